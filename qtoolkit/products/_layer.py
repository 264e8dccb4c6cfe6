"""One place in a model, and the products computed there by its recipe."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from qtoolkit.products._analyses import Matmul, MatmulNames, following
from qtoolkit.products._bilinear import DotGeneral
from qtoolkit.products._instruments import note_kernel, set_variable
from qtoolkit.products._matmul_trace import MatmulTrace, Multiply, is_watched, replacing_matmuls
from qtoolkit.products._place import MODEL, Mark, Place, with_mark
from qtoolkit.products._plan import State
from qtoolkit.products._product import quantized_product
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._stored import stored_label
from qtoolkit.scaling import QArray

StateLike: TypeAlias = State | Callable[[Any, Any], State | None] | None


class _Enclosing(NamedTuple):
    """What `qtoolkit.dot` has to know about the layer that calls it.

    Attributes:
      site: The site of the layer that is running; None outside of layers.
      state: The state for all calls of `dot` in this layer.
    """

    site: "LayerRecipe | None" = None
    state: State | None = None


_PLAINLY = _Enclosing()
_enclosing: contextvars.ContextVar[_Enclosing] = contextvars.ContextVar("site", default=_PLAINLY)


@dataclasses.dataclass(frozen=True)
class LayerRecipe:
    """Computes the products of one layer by one recipe. Hashable: equal sites share one trace.

    Attributes:
      recipe: What the products round.
      path: The path of the layer, "blocks/0/mlp".
      kernels: The parameters to which rules give recipes of their own, None for high precision.
    """

    recipe: Recipe
    path: str = ""
    kernels: tuple[tuple[str, Recipe | None], ...] = ()

    def recipe_of(self, kernel: str) -> Recipe | None:
        """The recipe of products with this parameter."""
        return dict(self.kernels).get(kernel, self.recipe) if kernel else self.recipe

    @property
    def mark(self) -> Mark:
        """The mark of products in the layer that stay as they are, such as those of integers."""
        return Mark(Place(self.path, ""))

    def multiply(
        self,
        state_of: Callable[[str], StateLike] = lambda name: None,
        named: Callable[[str], str] = str,
        note: Callable[[Matmul, str], None] = lambda found, name: None,
    ) -> Multiply:
        """A `multiply` for `MatmulTrace`, which computes each product with the state of its name.

        Args:
          named: From the name that a trace gives a product to that in the layer.
          note: Called with each product and its name.
        """
        names = MatmulNames()

        def multiply(found: Matmul) -> jax.Array | Mark:
            name = named(names(found))
            note(found, name)
            if self.kernels and self.recipe_of(found.kernel_name) is None:
                return Mark(Place(self.path, name), is_left=True)
            return self.product(found, name, state_of(name))

        return multiply

    def product(self, found: Matmul, name: str, state: StateLike) -> jax.Array:
        """Computes a product of the layer.

        A kernel on either side is rounded as a kernel; of two activations both are rounded as
        inputs. Without a state, delayed scales become current ones.

        Args:
          name: The name of the product in its layer.
          state: The layer's state for this product, for (input, kernel, cotangent), if any; or a
            function that gives it, called with (input, kernel).
        """
        recipe = self.recipe_of(found.kernel_name) or self.recipe
        recipe = recipe if state is not None else recipe.without_state()
        recipe = recipe.of_activations() if found.kernel is None else recipe
        recipe = following(recipe, found)
        operands, is_swapped = (found.lhs, found.rhs), found.kernel == 0
        if callable(state):  # it stores what the product moves, see `_forward_state`
            state = state(*operands[::-1]) if is_swapped else state(*operands)
        place = Place(self.path, name)
        note_kernel(place, operands, found.kernel)
        with jax.named_scope(self.path or MODEL):
            out = quantized_product(
                f"{found.name} of {self.path}" if self.path else found.name,
                found.function,
                *operands,
                recipe,
                found.dtype if jnp.issubdtype(found.dtype, jnp.floating) else None,
                state,
                found.extra,
                place=place,
                is_swapped=is_swapped,
            )
        # Reports name lhs first, recipes the input.
        shown = recipe.swapped() if is_swapped else recipe
        return with_mark(
            out, Mark(place, shown, (stored_label(found.lhs), stored_label(found.rhs)))
        )


def quantizing_dot(
    site: LayerRecipe | None, state: State | None = None
) -> contextlib.AbstractContextManager[_Enclosing]:
    """In this context `dot` computes by `site`, with one state for all its calls."""
    return set_variable(_enclosing, _Enclosing(site, state))


@contextlib.contextmanager
def in_high_precision(path: str, seen: list[str] | None = None) -> Iterator[None]:
    """In this context products stay in high precision, because a rule says so."""
    mark = Mark(Place(path, ""), is_left=True)
    with quantizing_dot(None), replacing_matmuls(MatmulTrace(None, {}, mark=mark, seen=seen)):
        yield


def dot(lhs: jax.Array, rhs: jax.Array, *, precision: Any = None) -> jax.Array:
    """`jax.numpy.dot` by the recipe of the wrapped layer that calls it; outside of one, plainly.

    For your own layers: `qtoolkit.dot(x, self.kernel)` in place of `x @ self.kernel`. Usually it
    knows which operand is a parameter. Inside of a custom derivative, and with nnx also inside of a
    function under `jax.jit`, a loop or `vmap`, it does not, and takes rhs for the kernel: write `@`
    there for a product of two activations.

    Args:
      lhs: [..., k].
      rhs: [k] or [..., k, n].
      precision: As for `jax.numpy.dot`.

    Returns:
      The shape and dtype of `jax.numpy.dot`.

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
    site, state = _enclosing.get()
    given: tuple[Any, Any] = lhs, rhs  # may be QArrays: the kernels of a quantized module
    stored = [isinstance(operand, QArray) for operand in given]
    is_replaced = is_watched() and not any(stored)
    if site is None or is_replaced or jnp.ndim(lhs) == 0 or jnp.ndim(rhs) == 0:
        return jnp.dot(lhs, rhs, precision=precision)
    numbers = (((lhs.ndim - 1,), (max(rhs.ndim - 2, 0),)), ((), ()))
    parameters = ("kernel", "") if stored == [True, False] else ("", "kernel")
    function, dtype = DotGeneral(numbers, precision), jnp.result_type(lhs, rhs)
    return site.product(Matmul("dot", function, lhs, rhs, (), parameters, dtype), "dot", state)
