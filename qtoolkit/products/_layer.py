"""The recipe of one layer, and the matmuls that are computed by it."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from qtoolkit.products._analyses import Matmul, MatmulNames, following_features
from qtoolkit.products._bilinear import DotGeneral
from qtoolkit.products._instruments import instrument, note_matmul, set_variable
from qtoolkit.products._matmul_trace import (
    MatmulTrace,
    Multiply,
    is_watched,
    replacing_matmuls,
    running,
)
from qtoolkit.products._place import MODEL, Mark, Place, with_mark
from qtoolkit.products._plan import State
from qtoolkit.products._product import quantized_product
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._stored import stored_label
from qtoolkit.scaling import QArray

# The state of a matmul; or a function of (input, kernel) that gives it, such as a `ForwardState`.
StateLike: TypeAlias = State | Callable[[Any, Any], State | None] | None


@dataclasses.dataclass(frozen=True)
class LayerRecipe:
    """Computes the matmuls of one layer by one recipe. Hashable: equal ones share one trace.

    Attributes:
      recipe: What the matmuls round.
      path: The path of the layer, "blocks/0/mlp".
      kernels: The parameters to which rules give recipes of their own, None for high precision.
    """

    recipe: Recipe
    path: str = ""
    kernels: tuple[tuple[str, Recipe | None], ...] = ()

    def recipe_of(self, kernel: str) -> Recipe | None:
        """The recipe of matmuls with this parameter."""
        return dict(self.kernels).get(kernel, self.recipe) if kernel else self.recipe

    @property
    def mark(self) -> Mark:
        """The mark of matmuls in the layer that stay unchanged, such as those of integers."""
        return Mark(Place(self.path, ""))

    def multiply(
        self,
        state_of: Callable[[str], StateLike] = lambda name: None,
        named: Callable[[str], str] = str,
        note: Callable[[Matmul, str], None] = lambda matmul, name: None,
        missing: str = "",
    ) -> Multiply:
        """A `multiply` for one run of a method under a `MatmulTrace`.

        Args:
          state_of: From the name of a matmul to its state.
          named: From the name of a matmul in the method to that in the layer.
          note: Called with each matmul and its name.
          missing: What to say of a matmul that has no state, if its recipe needs one.
        """
        names = MatmulNames()

        def multiply(matmul: Matmul) -> jax.Array | Mark:
            name = named(names(matmul))
            note(matmul, name)
            if self.kernels and self.recipe_of(matmul.kernel_name) is None:
                return Mark(Place(self.path, name), is_excluded=True)
            return self.product(matmul, name, state_of(name), missing)

        return multiply

    def product(self, matmul: Matmul, name: str, state: StateLike, missing: str = "") -> jax.Array:
        """Computes a matmul of the layer.

        A kernel on either side is rounded as a kernel; of two activations both are rounded as
        inputs. Without a state, delayed scales become current ones.

        Args:
          name: The name of the matmul in its layer.
          state: What the layer keeps for it, in the order (input, kernel, cotangent).
          missing: What to say if it is None, though the recipe has state, and is differentiated.
        """
        # The second, if `dot` multiplies a stored kernel, of which it does not know the name.
        recipe = self.recipe_of(matmul.kernel_name) or self.recipe
        is_missing = state is None and bool(recipe.is_delayed or recipe.warm_up)
        recipe = recipe if state is not None else recipe.without_state()
        recipe = recipe.of_activations() if matmul.kernel is None else recipe
        recipe = following_features(recipe, matmul)
        operands, is_swapped = (matmul.lhs, matmul.rhs), matmul.kernel == 0
        if callable(state):
            state = state(*operands[::-1]) if is_swapped else state(*operands)
        place = Place(self.path, name)
        note_matmul(self, place, None if matmul.kernel is None else operands[matmul.kernel])
        with jax.named_scope(self.path or MODEL):  # for profilers: nothing of ours reads it
            out = quantized_product(
                f"{matmul.name} of {self.path}" if self.path else matmul.name,
                matmul.function,
                *operands,
                recipe,
                matmul.dtype if jnp.issubdtype(matmul.dtype, jnp.floating) else None,
                state,
                matmul.extra,
                place=place,
                is_swapped=is_swapped,
            )
        if instrument() is None:  # reports and measurements trace the model under an instrument
            return with_mark(out, Mark(place, warning=missing)) if is_missing and missing else out
        # Reports name lhs first, recipes the input.
        of_sides = recipe.swapped() if is_swapped else recipe
        stored = stored_label(matmul.lhs), stored_label(matmul.rhs)
        return with_mark(out, Mark(place, of_sides, stored))


# What `qtoolkit.dot` has to know about the layer that calls it: its recipe, and one state for all
# calls; None outside of layers.
_layer_of_dot: contextvars.ContextVar[tuple[LayerRecipe | None, State | None]]
_layer_of_dot = contextvars.ContextVar("layer_of_dot", default=(None, None))


def quantizing_dot(
    layer: LayerRecipe | None, state: State | None = None
) -> contextlib.AbstractContextManager[Any]:
    """In this context `qtoolkit.dot` computes by `layer`, with one state for all its calls."""
    return set_variable(_layer_of_dot, (layer, state))


@contextlib.contextmanager
def in_high_precision(path: str, seen: list[str] | None = None) -> Iterator[None]:
    """In this context matmuls stay in high precision, because a rule says so."""
    mark = Mark(Place(path, ""), is_excluded=True)
    with quantizing_dot(None), replacing_matmuls(MatmulTrace(None, {}, mark=mark, seen=seen)):
        yield


def _parameters(layer: LayerRecipe, lhs: Any, rhs: Any) -> tuple[str, str]:
    """The names of the parameters that `dot` multiplies, in a layer with rules for some of them."""
    trace = running()
    arrays = [x.__jax_array__() if hasattr(x, "get_value") else x for x in (lhs, rhs)]
    names = ["", ""] if trace is None else [trace.parameter(x) for x in arrays]
    if not any(names) and not is_watched():
        kernels = ", ".join(name for name, _ in layer.kernels)
        raise ValueError(
            f"dot: {layer.path or MODEL}: rules name {kernels}, and inside of jax.jit, a loop or "
            "vmap dot does not know which parameter it multiplies, expected a call outside of "
            "them, or of a parameter that the function closes over; write lhs @ rhs there"
        )
    return names[0], names[1]


def dot(lhs: jax.Array, rhs: jax.Array, *, precision: Any = None) -> jax.Array:
    """`jax.numpy.dot` by the recipe of the wrapped layer that calls it; outside of one, plainly.

    For your own layers: `qtoolkit.dot(x, self.kernel)` in place of `x @ self.kernel`. Usually it
    knows which operand is a parameter. Inside of a custom derivative, and with nnx also inside of a
    function under `jax.jit`, a loop or `vmap`, it does not, and takes rhs for the kernel: write `@`
    there for a matmul of two activations. If rules name parameters of the layer, it knows them in a
    custom derivative, too; elsewhere it raises, except for a parameter that a function closes over.
    The backward function of a `jax.custom_vjp` runs after the layer, so plainly.

    Args:
      lhs: [..., k].
      rhs: [k] or [..., k, n].
      precision: As for `jax.numpy.dot`.

    Returns:
      The shape and dtype of `jax.numpy.dot`.

    Raises:
      ValueError: Rules name parameters of the layer, and `dot` does not know which it multiplies.

    Raises, Gradient: As `dot_general`.

    Examples:
      >>> class Layer(nnx.Module):
      ...     def __init__(self):
      ...         self.kernel = nnx.Param(jnp.asarray([0.3, 448.0]))
      ...     def __call__(self, x):
      ...         return qt.dot(x, self.kernel)
      >>> x = jnp.asarray([448.0, 1.0])
      >>> Layer()(x), qt.nnx.wrap(Layer())(x)  # 0.3 became 0.3125
      (Array(582.4, dtype=float32), Array(588., dtype=float32))
    """
    layer, state = _layer_of_dot.get()
    operands: tuple[Any, Any] = lhs, rhs  # may be QArrays: the kernels of a quantized module
    stored = [isinstance(operand, QArray) for operand in operands]
    # Below, a trace sees the `jnp.dot`. In a custom derivative it replaces none.
    trace = running() if is_watched() else None
    is_replaced = trace is not None and trace.multiply is not None and not any(stored)
    if layer is None or is_replaced or jnp.ndim(lhs) == 0 or jnp.ndim(rhs) == 0:
        return jnp.dot(lhs, rhs, precision=precision)
    numbers = (((lhs.ndim - 1,), (max(rhs.ndim - 2, 0),)), ((), ()))
    parameters = ("kernel", "") if stored == [True, False] else ("", "kernel")
    if layer.kernels and not any(stored):
        parameters = _parameters(layer, lhs, rhs)
        if layer.recipe_of(parameters[1] or parameters[0]) is None:
            mark = Mark(Place(layer.path, "dot"), is_excluded=True)
            return with_mark(jnp.dot(lhs, rhs, precision=precision), mark)
    function, dtype = DotGeneral(numbers, precision), jnp.result_type(lhs, rhs)
    return layer.product(Matmul("dot", function, lhs, rhs, (), parameters, dtype), "dot", state)
