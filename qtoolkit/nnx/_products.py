"""Callables that layers hold in place of JAX's functions, and the state of their products."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx.nn import dtypes
from jax import lax

from qtoolkit.nnx._state import ProductState
from qtoolkit.products.internal import (
    MODEL,
    Site,
    Track,
    instrument,
    is_intercepted,
    rewritten,
    scope,
)
from qtoolkit.scaling import QArray

States = Sequence[Track]


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Stands in for a function of JAX, such as `lax.dot_general`, by the method of its name.

    Equal sites make equal objects: no second trace.

    Attributes:
      original: The function that Flax's layer holds; None if it takes JAX's when it is called.
    """

    site: Site
    name: str
    original: Callable[..., Any] | None = dataclasses.field(default=None, repr=False)

    def __call__(self, *args: Any, states: States = (), **kwargs: Any) -> jax.Array:
        state = states[0] if states else None
        if is_intercepted():
            return self._intercepted(args, kwargs, state)
        product: jax.Array = getattr(self.site, self.name)(*args, state=state, **kwargs)
        return product

    def _intercepted(self, args: Any, kwargs: Any, state: Track | None) -> jax.Array:
        function = self.original or getattr(lax, self.name)
        try:
            return self.site.intercepted(function, args, kwargs, state)
        except TraceContextError as error:
            raise ValueError(
                f"wrap: {self.site.path or MODEL}: an interceptor of {self.name} changes variables "
                "of the model while the product is traced, expected one that only reads them; "
                "apply an adapter such as qwix's LoRA before wrap, with dropout=0.0, or leave this "
                "layer as it is by a rule"
            ) from error


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
        # An instrument needs the path, to tell products apart. Without it equal blocks can share
        # one trace.
        place = Site(self.site.recipe, None if instrument() is None else self.site.path)
        with scoped:
            # A user's function may close over arrays, so only Flax's own is jitted.
            # So is none that an interceptor sees: a later call might be without it.
            is_known = self.original is _FLAXS and module is None and not is_intercepted()
            static = tuple(sorted(options.items()))
            if is_known and _is_hashable(static):
                out, moved = _attend(arrays, named, list(states), place, static)
                for track, new in zip(states, moved, strict=True):
                    track.moved |= new
                return out
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
        """Runs a function that sows: its trace returns the sown values, which are sown here."""
        names: list[Any] = []

        def traced(arrays: Any, named: Any) -> Any:
            recorder = None if module is None else _Recorder()
            out = self.original(*arrays, **named, **options, module=recorder)
            names[:] = [] if recorder is None else recorder.sown
            return out, [value for _, _, value in names]

        multiply = place.multiply(_by_number(states))
        out, values = rewritten(traced, multiply)(arrays, named)
        for (kind, name, _), value in zip(names, values, strict=True):
            module.sow(kind, name, value)
        return out


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


# Jitted, so that equal blocks share one trace.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _attend(
    arrays: Any, named: Any, states: list[Track], site: Site, options: Any
) -> tuple[jax.Array, list[Any]]:
    def pure(arrays: Any, named: Any) -> Any:
        return _FLAXS(*arrays, **named, **dict(options), module=None)

    out = rewritten(pure, site.multiply(_by_number(states)))(arrays, named)
    return out, [track.moved for track in states]


_FLAXS: Any = nnx.dot_product_attention
_ARRAYS = ("bias", "mask", "dropout_rng")


class _Recorder:
    """Stands in for the module and records what an attention function sows.

    The values are tracers, which must not be stored in the module.
    """

    def __init__(self) -> None:
        self.sown: list[Any] = []

    def sow(self, kind: Any, name: str, value: Any) -> None:
        self.sown.append((kind, name, value))


def _by_number(states: States) -> Callable[[str], Track | None]:
    """A function from the name of a product, "0" or "1", to its state."""
    return {str(i): state for i, state in enumerate(states)}.get


class StatefulProducts(nnx.Module):
    """One of the callables above, together with the states of its products, in order."""

    def __init__(self, call: Any, products: Sequence[ProductState]) -> None:
        self.call = call
        self.products = nnx.List(products)

    def __call__(this, *args: Any, **kwargs: Any) -> jax.Array:  # noqa: N805
        # Interceptors of qwix take the innermost module that a frame calls `self` for the layer.
        tracks = [kept.track() for kept in this.products]
        out: jax.Array = this.call(*args, states=tracks, **kwargs)
        for kept, track in zip(this.products, tracks, strict=True):
            kept.write(track.moved)
        return out


def keep_kernel_dtype(args: tuple[Any, ...], /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Flax's `promote_dtype` for (inputs, kernel, bias), except that the kernel keeps its dtype.

    A product rounds the kernel; if it were a bfloat16 copy, it would be rounded twice.
    """
    inputs, kernel, *biases = args
    is_stored = isinstance(kernel, QArray)
    like = jnp.zeros((), kernel.dtype) if is_stored else kernel
    dtype = dtypes.canonicalize_dtype(inputs, like, *biases, dtype=dtype, inexact=inexact)
    biases = [None if bias is None else jnp.asarray(bias, dtype) for bias in biases]
    return jnp.asarray(inputs, dtype), kernel if is_stored else jnp.asarray(kernel), *biases
