"""Attention's KV cache in few bits, by a subclass of the same name: codes between calls."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from qtoolkit.products import KVCache
from qtoolkit.scaling import QArray

_CACHES = ("cached_key", "cached_value")


def narrow_cache(module: Any, fmt: KVCache) -> None:
    """Quantizes the cache of an attention module.

    It gets cache variables of its own: those of the original model must not be written.
    """
    for name in (*_CACHES, "cache_index"):
        variable = getattr(module, name)
        if variable is not None:
            metadata = variable.get_metadata()
            setattr(module, name, type(variable).from_metadata(variable.get_value(), metadata))
    _widen(module)  # it may hold codes of another format
    _narrow(module, fmt, {})


def caching(kind: Any, run: Callable[..., Any], fmt: KVCache) -> dict[str, Any]:
    """The methods of an attention class that keep its cache in few bits between calls.

    Args:
      run: Its `__call__`, as it computes matmuls.
    """

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        decode = kwargs.get("decode")
        if not (self.decode if decode is None else decode):
            return run(self, *args, **kwargs)
        before = _widen(self)
        try:
            out = run(self, *args, **kwargs)
        except BaseException:
            for name, array in before.items():
                getattr(self, name).set_value(array)
            raise
        _narrow(self, fmt, before)
        return out

    @functools.wraps(kind.init_cache)
    def init_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.init_cache(self, *args, **kwargs)
        _narrow(self, fmt, {})

    return {"__call__": call, "init_cache": init_cache}


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


def _narrow(module: Any, fmt: KVCache, before: dict[str, QArray]) -> None:
    """Quantizes the cache of a module after a step; `before` is what `_widen` returned."""
    for side, name in enumerate(_CACHES):
        variable = getattr(module, name)
        wide = None if variable is None else variable.get_value()
        if isinstance(wide, jax.Array):
            where = f"{type(module).__name__}.{name}"
            variable.set_value(fmt.narrowed(where, wide, side, before.get(name)))
