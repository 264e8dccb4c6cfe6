"""Attention's KV cache in few bits: codes between calls, ordinary arrays while the module runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flax import linen as nn

from qtoolkit.products import KVCache
from qtoolkit.scaling import QArray

_COLLECTION, _CACHES = "cache", ("cached_key", "cached_value")


@contextmanager
def narrow_cache(module: nn.Module, fmt: KVCache) -> Iterator[None]:
    """In this context a module's cache holds ordinary arrays; afterwards codes and scales again."""
    before: dict[str, Any] = {}
    for name in _CACHES:
        if module.has_variable(_COLLECTION, name):
            array: Any = module.get_variable(_COLLECTION, name)
            if isinstance(array, QArray):
                before[name] = array
                module.put_variable(_COLLECTION, name, array.dequantize())
    yield
    if not module.is_mutable_collection(_COLLECTION):
        return
    for side, name in enumerate(_CACHES):
        if module.has_variable(_COLLECTION, name):
            wide: Any = module.get_variable(_COLLECTION, name)
            where = f"{'/'.join(module.path)}: {type(module).__name__}.{name}"
            narrow = fmt.narrowed(where, wide, side, before.get(name))
            module.put_variable(_COLLECTION, name, narrow)
