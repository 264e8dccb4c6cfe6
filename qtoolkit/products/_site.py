"""One place in a model, and the products computed there by its recipe."""

import contextlib
import contextvars
import dataclasses
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jax.typing import DTypeLike

from qtoolkit.products._bilinear import Bilinear, ConvGeneralDilated, DotGeneral, Einsum
from qtoolkit.products._context import held
from qtoolkit.products._features import LAST, following
from qtoolkit.products._found import Found, Names, Standing
from qtoolkit.products._plan import State
from qtoolkit.products._product import quantized_product
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rewrite import LEFT, SCOPE, Multiply, rewritten
from qtoolkit.products._stored import stored_label
from qtoolkit.products._taps import MODEL, Place
from qtoolkit.scaling import QArray

StateLike: TypeAlias = State | Callable[[Any, Any], State | None] | None


class _Enclosing(NamedTuple):
    """What `qtoolkit.dot` has to know about the layer that calls it.

    Attributes:
      site: The site of the layer that is running; None outside of layers.
      state: The state for all calls of `dot` in this layer.
      trace: The trace in which `rewritten` will replace products later; None if it will not. In it
        `dot` is a plain product.
    """

    site: "Site | None" = None
    state: State | None = None
    trace: Any = None


_KERNEL = "kernel"  # what `Site.intercepted` calls it, whatever its name in the layer
_PLAINLY = _Enclosing()
_enclosing: contextvars.ContextVar[_Enclosing] = contextvars.ContextVar("site", default=_PLAINLY)


@dataclasses.dataclass(frozen=True)
class Site:
    """Computes the products of one layer by one recipe. Hashable: equal sites share one trace.

    Its methods stand in for JAX's functions of the same names, and take their arguments.

    Attributes:
      recipe: What the products round.
      path: The path of the layer, "blocks/0/mlp", written to the name stack, where reports find it.
        None if the caller has written it there.
    """

    recipe: Recipe
    path: str | None = ""

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
          state: The layer's state for this product, for (input, kernel, cotangent), if any.
          extra: Integer arrays that `function` takes besides.
          name: The name of the product in its layer.
          kernel: Which operand is a kernel: 0, 1, or None if both are activations.
          features: The axes of lhs and rhs along which features lie, from the end: -1, -2 ...
        """
        named = f"{where} of {self.path}" if self.path else where
        recipe = self.recipe.of_activations() if kernel is None else self.recipe
        recipe = following(recipe, function, (lhs, rhs), extra, features, kernel)
        is_swapped = kernel == 0
        if callable(state):  # it updates the state that it gives, see `_recording`
            state = state(rhs, lhs) if is_swapped else state(lhs, rhs)
        named_scope: Any = contextlib.nullcontext()
        if self.path is not None:
            # Reports name lhs first, recipes the input.
            shown = recipe.swapped() if is_swapped else recipe
            stored = (stored_label(lhs), stored_label(rhs))
            named_scope = jax.named_scope(scope(self.path, shown, stored))
        with named_scope:
            return quantized_product(
                named,
                function,
                lhs,
                rhs,
                recipe,
                dtype,
                state,
                extra,
                place=Place(self.path or "", name),
                is_swapped=is_swapped,
            )

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
        kernel = args[at + 1]
        stored = (Standing(kernel),) if isinstance(kernel, QArray) else ()

        def plain(lhs: jax.Array, *arrays: jax.Array) -> Any:
            # An interceptor finds the layer's parameters by identity, so close over the kernel.
            rhs = (arrays[0] if arrays else kernel).astype(lhs.dtype)
            return function(*args[:at], lhs, rhs, *args[at + 2 :], **kwargs)

        names = Names("intercepted.")

        def multiply(found: Found) -> jax.Array:
            name = names(found)
            is_own = name == f"intercepted.{_KERNEL}"
            return self.multiplied(found, "0" if is_own else name, state if is_own else None)

        rewriting = rewritten(
            plain,
            multiply,
            lambda lhs, *arrays: ("", *(_KERNEL for _ in arrays)),
            captured={id(kernel): _KERNEL},
        )
        out: jax.Array = rewriting(args[at], *stored)
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


def rewritten_later() -> contextlib.AbstractContextManager[_Enclosing]:
    """In this context `dot` is a plain product, which `rewritten` replaces afterwards.

    `rewritten` knows which operand is a parameter; `dot` does not. Inside of a nested trace, such
    as that of a custom derivative, `dot` computes the quantized product itself, since `rewritten`
    may not look into that trace.
    """
    return held(_enclosing, _enclosing.get()._replace(trace=_present_trace()))


def _present_trace() -> Any:
    return get_opaque_trace_state(convention="flax")


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
    site, state, trace = _enclosing.get()
    given: tuple[Any, Any] = lhs, rhs  # may be QArrays: the kernels of a quantized module
    stored = [isinstance(operand, QArray) for operand in given]
    is_replaced = trace is not None and not any(stored) and trace == _present_trace()
    if site is None or is_replaced or jnp.ndim(lhs) == 0 or jnp.ndim(rhs) == 0:
        return jnp.dot(lhs, rhs, precision=precision)
    numbers = (((lhs.ndim - 1,), (max(rhs.ndim - 2, 0),)), ((), ()))
    function = DotGeneral(numbers, precision)
    kernel = 0 if stored == [True, False] else 1
    dtype = jnp.result_type(lhs, rhs)
    return site.product("dot", function, lhs, rhs, dtype, state, name="dot", kernel=kernel)


class Scope(NamedTuple):
    """What the name stack of a program says about a product.

    Attributes:
      path: The path of the layer.
      label: The formats to which its operands are rounded.
      is_left: Whether a rule leaves the layer as it is.
      is_native: Whether its recipe says `arithmetic="native"`.
    """

    path: str
    label: str
    is_left: bool = False
    is_native: bool = False


_ESCAPES = {"/": ".", ".": "%2E", "%": "%25", "|": "%7C", "(": "%28"}


def scope(path: str, recipe: Recipe | None, stored: Sequence[str] = ("", "")) -> str:
    """The name that a layer's products get in the name stack of the program.

    Args:
      recipe: None for a layer that a rule leaves as it is.
      stored: Labels of lhs and rhs if they come as codes, whatever the recipe says; else "".
    """
    # In a name stack "/" begins another scope, and "(" belongs to a transformation: escape both.
    named = "".join(_ESCAPES.get(letter, letter) for letter in path) or "."
    if recipe is None:
        return f"{LEFT}{named}|"
    pairs = zip(stored, recipe.forward, strict=True)
    label = " x ".join(what or ("wide" if o is None else str(o)) for what, o in pairs)
    return f"{SCOPE}{named}|{label}|{recipe.arithmetic}|"


def place_of(name_stack: str) -> Scope | None:
    """The innermost scope in a name stack that `scope` has written, or None."""
    at = max(name_stack.rfind(SCOPE), name_stack.rfind(LEFT))
    if at < 0:
        return None
    is_left = name_stack.startswith(LEFT, at)
    path, label, arithmetic, *_ = (*name_stack[at + len(SCOPE) :].split("|"), "", "")
    path = MODEL if path == "." else urllib.parse.unquote(path.replace(".", "/"))
    return Scope(path, "", True) if is_left else Scope(path, label, False, arithmetic == "native")
