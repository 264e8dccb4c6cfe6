"""Attention's KV cache in few bits, by a subclass of the same name: codes between calls."""

import functools
from typing import Any

import jax

from qtoolkit.formats import BlockFormat
from qtoolkit.nnx._rewriting import become, original_class, subclass
from qtoolkit.products.internal import cached
from qtoolkit.scaling import QArray

_FORMAT = "qtoolkit_cache"  # the attribute with the format of a module's cache
_CACHES = ("cached_key", "cached_value")


def keep_cache(module: Any, fmt: BlockFormat) -> None:
    """Makes an attention module keep its cache in `fmt`.

    It gets cache variables of its own: those of the original model must not be written.
    """
    if not keeps_cache(module):
        kind: Any = type(module)
        become(module, caching_class(kind))
    setattr(module, _FORMAT, fmt)
    for name in (*_CACHES, "cache_index"):
        variable = getattr(module, name)
        if variable is not None:
            metadata = variable.get_metadata()
            setattr(module, name, type(variable).from_metadata(variable.get_value(), metadata))
    _widen(module)  # it may hold codes of another format
    _narrow(module, {})


def keeps_cache(module: Any) -> bool:
    return hasattr(module, _FORMAT)


@functools.cache
def caching_class(kind: Any) -> type:
    """The subclass of an attention class that keeps its cache in few bits between calls."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        decode = kwargs.get("decode")
        if not (self.decode if decode is None else decode):
            return kind.__call__(self, *args, **kwargs)
        before = _widen(self)
        try:
            out = kind.__call__(self, *args, **kwargs)
        except BaseException:
            for name, array in before.items():
                getattr(self, name).set_value(array)
            raise
        _narrow(self, before)
        return out

    @functools.wraps(kind.init_cache)
    def init_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.init_cache(self, *args, **kwargs)
        _narrow(self, {})

    body = {"__call__": call, "init_cache": init_cache}
    return subclass(kind, body, original_class(kind), (caching_class, kind))


def _widen(module: Any) -> dict[str, QArray]:
    """Dequantizes the cache of a module, and returns the quantized one."""
    before = {}
    for name in _CACHES:
        variable = getattr(module, name)
        array = None if variable is None else variable.get_value()
        if isinstance(array, QArray):
            before[name] = array
            variable.set_value(array.dequantize())
    return before


def _narrow(module: Any, before: dict[str, QArray]) -> None:
    """Quantizes the cache of a module after a step; `before` is what `_widen` returned."""
    fmt = getattr(module, _FORMAT)
    for name in _CACHES:
        variable = getattr(module, name)
        wide = None if variable is None else variable.get_value()
        if isinstance(wide, jax.Array):
            where = f"{type(module).__name__}.{name}"
            variable.set_value(cached(where, wide, fmt, before.get(name)))
