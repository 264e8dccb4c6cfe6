"""What stands in layers for JAX's functions: the products of a site, with what they keep."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from qtoolkit.nnx._state import ProductState
from qtoolkit.products.internal import Site, State, instrument, rewritten, scope
from qtoolkit.scaling import QArray

States = Sequence[State]


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """Stands in for `jax.lax.dot_general`. Equal sites make equal objects: no second trace."""

    site: Site

    def __call__(self, *args: Any, states: States = (), **kwargs: Any) -> jax.Array:
        return self.site.dot_general(*args, state=_first(states), **kwargs)


@dataclasses.dataclass(frozen=True)
class Einsum:
    """Stands in for `jax.numpy.einsum` of an input and a kernel."""

    site: Site

    def __call__(self, *args: Any, states: States = (), **kwargs: Any) -> jax.Array:
        return self.site.einsum(*args, state=_first(states), **kwargs)


@dataclasses.dataclass(frozen=True)
class ConvGeneralDilated:
    """Stands in for `jax.lax.conv_general_dilated`."""

    site: Site

    def __call__(self, *args: Any, states: States = (), **kwargs: Any) -> jax.Array:
        return self.site.conv_general_dilated(*args, state=_first(states), **kwargs)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Stands in for an attention function, whose products it replaces."""

    site: Site
    original: Callable[..., jax.Array]

    def __call__(
        self, *arrays: Any, module: Any = None, states: States = (), **options: Any
    ) -> jax.Array:
        named = {key: options.pop(key) for key in _ARRAYS if options.get(key) is not None}

        scoped = jax.named_scope(scope(self.site.path or "", self.site.recipe.of_activations()))
        # With their path where products are looked at one by one; else blocks alike share a trace.
        place = Site(self.site.recipe, None if instrument() is None else self.site.path)
        with scoped:
            # Any other function may read what is not among its arguments.
            is_known = self.original is nnx.dot_product_attention and module is None
            static = tuple(sorted(options.items()))
            if is_known and _is_hashable(static):
                return _attend(arrays, named, list(states), place, self.original, static)
            return self._sowing(place, arrays, named, options, module, states)

    def _sowing(
        self,
        place: Site,
        arrays: Any,
        named: Any,
        options: dict[str, Any],
        module: Any,
        states: States,
    ) -> jax.Array:
        """With what the function sows, which its trace gives back."""
        names: list[Any] = []

        def traced(arrays: Any, named: Any) -> Any:
            recorder = None if module is None else _Recorder()
            out = self.original(*arrays, **named, **options, module=recorder)
            names[:] = [] if recorder is None else recorder.sown
            return out, [value for _, _, value in names]

        multiply = place.multiply(_by_number(states))
        out, values = rewritten(traced, multiply, _no_parameters)(arrays, named)
        for (kind, name, _), value in zip(names, values, strict=True):
            module.sow(kind, name, value)
        return out


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


# Jitted, so that blocks alike are traced once.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _attend(
    arrays: Any, named: Any, states: Any, site: Site, original: Any, options: Any
) -> jax.Array:
    def pure(arrays: Any, named: Any) -> Any:
        return original(*arrays, **named, **dict(options), module=None)

    return rewritten(pure, site.multiply(_by_number(states)), _no_parameters)(arrays, named)


_ARRAYS = ("bias", "mask", "dropout_rng")


class _Recorder:
    """Takes what an attention function sows, inside of a trace that a module must not see."""

    def __init__(self) -> None:
        self.sown: list[Any] = []

    def sow(self, kind: Any, name: str, value: Any) -> None:
        self.sown.append((kind, name, value))


def _no_parameters(*args: Any) -> Any:
    return jax.tree.map(lambda _: "", args)


def _by_number(states: States) -> Callable[[str], State | None]:
    """The state of a product by its name: those of two activations are numbered."""
    return {str(i): state for i, state in enumerate(states)}.get


class StatefulProducts(nnx.Module):
    """One of the above, and what its products keep.

    Attributes:
      call: The function.
      products: A `ProductState` for each product that it computes, in order.
    """

    def __init__(self, call: Any, products: Sequence[ProductState]) -> None:
        self.call = call
        self.products = nnx.List(products)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        return self.call(*args, states=[kept.state() for kept in self.products], **kwargs)


def _first(states: States) -> State | None:
    return states[0] if states else None


def keep_kernel_dtype(args: tuple[Any, ...], /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Flax's `promote_dtype` for (inputs, kernel, bias), but for the kernel.

    The kernel is rounded from its own dtype; a bfloat16 copy of it would be rounded twice.
    """
    inputs, kernel, *biases = args
    is_stored = isinstance(kernel, QArray)
    like = jnp.zeros((), kernel.dtype) if is_stored else kernel
    dtype = dtypes.canonicalize_dtype(inputs, like, *biases, dtype=dtype, inexact=inexact)
    biases = [None if bias is None else jnp.asarray(bias, dtype) for bias in biases]
    return jnp.asarray(inputs, dtype), kernel if is_stored else jnp.asarray(kernel), *biases
