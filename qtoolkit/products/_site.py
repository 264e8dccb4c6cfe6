"""One place in a model, and the products computed there by its recipe."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from qtoolkit.products._bilinear import Bilinear, ConvGeneralDilated, DotGeneral, Einsum
from qtoolkit.products._context import held
from qtoolkit.products._features import LAST, following
from qtoolkit.products._finding import note_kernel
from qtoolkit.products._found import Found, Names
from qtoolkit.products._place import MODEL, Marked, Place, marked
from qtoolkit.products._plan import State
from qtoolkit.products._product import quantized_product
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rewrite import Multiply, Replacing, is_watched, replacing
from qtoolkit.products._stored import stored_label
from qtoolkit.scaling import QArray

StateLike: TypeAlias = State | Callable[[Any, Any], State | None] | None


class _Enclosing(NamedTuple):
    """What `qtoolkit.dot` has to know about the layer that calls it.

    Attributes:
      site: The site of the layer that is running; None outside of layers.
      state: The state for all calls of `dot` in this layer.
    """

    site: "Site | None" = None
    state: State | None = None


_KERNEL = "kernel"  # what `Site.intercepted` calls it, whatever its name in the layer
_PLAINLY = _Enclosing()
_enclosing: contextvars.ContextVar[_Enclosing] = contextvars.ContextVar("site", default=_PLAINLY)


@dataclasses.dataclass(frozen=True)
class Site:
    """Computes the products of one layer by one recipe. Hashable: equal sites share one trace.

    Its methods stand in for JAX's functions of the same names, and take their arguments.

    Attributes:
      recipe: What the products round.
      path: The path of the layer, "blocks/0/mlp".
    """

    recipe: Recipe
    path: str = ""

    def product(
        self,
        where: str,
        function: Bilinear,
        lhs: jax.Array | QArray,
        rhs: jax.Array | QArray,
        dtype: DTypeLike | None,
        state: StateLike = None,
        extra: tuple[jax.Array, ...] = (),
        *,
        name: str = "0",
        kernel: int | None = 1,
        features: tuple[int, int] = (LAST, LAST),
    ) -> jax.Array:
        """`function(lhs, rhs, *extra)`, as `quantized_product` computes it by this recipe.

        The recipe's lhs stands for the layer's input and its rhs for the kernel, even in a product
        whose lhs is the kernel. Two activations are both rounded as inputs.

        Args:
          where: The name of the function that was called, for messages.
          dtype: The dtype of the result; None for that of `lhs`.
          state: The layer's state for this product, for (input, kernel, cotangent), if any; or a
            function that gives it, called with (input, kernel).
          extra: Integer arrays that `function` takes besides.
          name: The name of the product in its layer.
          kernel: Which operand is a kernel: 0, 1, or None if both are activations.
          features: The axes of lhs and rhs along which features lie, from the end: -1, -2 ...
        """
        named = f"{where} of {self.path}" if self.path else where
        recipe = self.recipe.of_activations() if kernel is None else self.recipe
        recipe = following(recipe, function, (lhs, rhs), extra, features, kernel)
        is_swapped = kernel == 0
        if callable(state):  # it stores what the product moves, see `_recording`
            state = state(rhs, lhs) if is_swapped else state(lhs, rhs)
        place = Place(self.path, name)
        note_kernel(place, (lhs, rhs), kernel)
        with jax.named_scope(self.path or MODEL):
            out = quantized_product(
                named,
                function,
                lhs,
                rhs,
                recipe,
                dtype,
                state,
                extra,
                place=place,
                is_swapped=is_swapped,
            )
        # Reports name lhs first, recipes the input.
        shown = recipe.swapped() if is_swapped else recipe
        return marked(out, Marked(place, shown, (stored_label(lhs), stored_label(rhs))))

    @property
    def mark(self) -> Marked:
        """The mark of products in the layer that stay as they are, such as those of integers."""
        return Marked(Place(self.path, ""))

    def multiply(
        self, state_of: Callable[[str], StateLike] = lambda name: None, prefix: str = ""
    ) -> Multiply:
        """A `multiply` for `rewritten`, which computes each product with the state of its name."""
        names = Names(prefix)

        def multiply(found: Found) -> jax.Array:
            name = names(found)
            return self.multiplied(found, name, state_of(name))

        return multiply

    def multiplied(self, found: Found, name: str, state: StateLike) -> jax.Array:
        """Computes a product that was found in a trace.

        A kernel on either side is rounded as a kernel; of two activations both are rounded as
        inputs. Without a state, delayed scales become current ones.
        """
        recipe = self.recipe if state is not None else self.recipe.without_state()
        return dataclasses.replace(self, recipe=recipe).product(
            found.name,
            found.function,
            found.lhs,
            found.rhs,
            found.dtype if jnp.issubdtype(found.dtype, jnp.floating) else None,
            state,
            found.extra,
            name=name,
            kernel=found.kernel,
            features=found.features,
        )

    def intercepted(
        self, function: Callable[..., Any], args: Any, kwargs: Any, state: StateLike
    ) -> jax.Array:
        """`function(*args, **kwargs)`, a product of JAX that an interceptor such as qwix replaces.

        The interceptor sees the call that the plain layer would make. Whatever products it computes
        then, the layer's own and those of an adapter, are quantized by this recipe. Only the
        layer's own, which multiplies its kernel, has the state.
        """
        at = 1 if isinstance(args[0], str) else 0  # einsum takes its subscripts first
        lhs, kernel = args[at : at + 2]
        # An interceptor finds the layer's parameters by identity: give it the kernel itself.
        array = kernel.dequantize() if isinstance(kernel, QArray) else kernel
        names = Names("intercepted.")

        def multiply(found: Found) -> jax.Array:
            name = names(found)
            is_own = name == f"intercepted.{_KERNEL}"
            return self.multiplied(found, "0" if is_own else name, state if is_own else None)

        trace = Replacing(multiply, {id(array): _KERNEL}, mark=self.mark)
        trace.know_inputs(lhs)
        trace.know_parameter(array, kernel if array is not kernel else None)
        with replacing(trace):
            rhs = array.astype(lhs.dtype)
            out: jax.Array = function(*args[:at], lhs, rhs, *args[at + 2 :], **kwargs)
        return out

    def dot_general(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
        state: StateLike = None,
    ) -> jax.Array:
        function = DotGeneral(dimension_numbers, precision, out_sharding)
        return self.product("dot_general", function, lhs, rhs, preferred_element_type, state)

    def einsum(
        self,
        subscripts: str,
        lhs: jax.Array,
        rhs: jax.Array,
        *,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
        state: StateLike = None,
    ) -> jax.Array:
        function = Einsum(subscripts, precision, out_sharding)
        return self.product("einsum", function, lhs, rhs, preferred_element_type, state)

    def conv_general_dilated(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        window_strides: Sequence[int],
        padding: Any,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
        state: StateLike = None,
    ) -> jax.Array:
        function = ConvGeneralDilated(
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
            precision,
            out_sharding,
        )
        dtype = preferred_element_type
        return self.product("conv_general_dilated", function, lhs, rhs, dtype, state)


def enclosing(
    site: Site | None, state: State | None = None
) -> contextlib.AbstractContextManager[_Enclosing]:
    """In this context `dot` computes by `site`, with one state for all its calls."""
    return held(_enclosing, _Enclosing(site, state))


@contextlib.contextmanager
def leaving(path: str, seen: list[str] | None = None) -> Iterator[None]:
    """In this context products stay in high precision, because a rule says so."""
    mark = Marked(Place(path, ""), is_left=True)
    with enclosing(None), replacing(Replacing(None, {}, mark=mark, seen=seen)):
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
    function = DotGeneral(numbers, precision)
    kernel = 0 if stored == [True, False] else 1
    dtype = jnp.result_type(lhs, rhs)
    return site.product("dot", function, lhs, rhs, dtype, state, name="dot", kernel=kernel)
