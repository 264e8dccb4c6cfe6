"""Subclasses of the same name, by which modules are quantized."""

import abc
import dataclasses
import functools
import inspect
from typing import Any, NamedTuple, cast

from flax import nnx

from qtoolkit.nnx._cache import caching
from qtoolkit.nnx._call import entered
from qtoolkit.nnx._function import SITE, Site
from qtoolkit.products import KVCache

_FRAMEWORK = set(dir(nnx.Module))
_MADE = "qtoolkit_made"


class Made(NamedTuple):
    """What a subclass is made of: a class; the format of attention's KV cache; see `set_site`."""

    kind: Any
    cache: KVCache | None = None
    site: Site | None = None


def original_class(kind: type) -> type:
    """The class from which `become` made this one; `kind` itself if it is not one of ours."""
    made: Made | None = getattr(kind, _MADE, None)
    return kind if made is None else made.kind


def become(module: Any, cache: KVCache | None = None, site: Site | None = None) -> None:
    """Gives a module, which may be a frozen dataclass, our subclass of its class."""
    before: Made = getattr(type(module), _MADE, Made(type(module)))
    made = before._replace(cache=cache or before.cache, site=site or before.site)
    object.__setattr__(module, "__class__", _class_of(made))


def set_site(module: Any, site: Site) -> None:
    """Tells a module its site. `nnx.bridge.ToNNX` takes every attribute for a variable of linen."""
    if isinstance(module, nnx.bridge.ToNNX):
        become(module, site=site)
    else:
        nnx.Module.__setattr__(module, SITE, site)


@functools.cache
def _class_of(made: Made) -> type:
    kind, cache, site = made
    methods = public_methods(kind)
    if cache is not None:
        methods |= caching(kind, kind.__call__, cache)
    body: dict[str, Any] = {name: entered(method) for name, method in methods.items()}
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    body |= {"__doc__": kind.__doc__, _MADE: made, "__reduce_ex__": _reduced}
    if site is not None:
        body |= {SITE: site, "qtoolkit_with_site": staticmethod(_with_site(made))}
    # A user's `__init_subclass__` or metaclass may keep a registry by name, or ask for keywords. It
    # does not hear of this class: a subclass of `nnx.Module` first, whose bases are then set.
    is_pytree = getattr(kind, "_pytree__is_pytree", True)
    own: Any = abc.ABCMeta.__new__(type(kind), kind.__name__, (nnx.Module,), body, pytree=is_pytree)
    own.__bases__ = (kind,)
    del own._pytree__nodes  # of `nnx.Module`; it has those of `kind`
    return cast(type, own)


def _with_site(made: Made) -> Any:
    return lambda site: _class_of(made._replace(site=site))


def public_methods(kind: type) -> dict[str, Any]:
    """The methods of a class that are not nnx's own, by name, and also those that are decorated."""
    found = {}
    for name in dir(kind):
        is_public = name == "__call__" or (not name.startswith("_") and name not in _FRAMEWORK)
        own = inspect.getattr_static(kind, name, None)
        is_bound = hasattr(own, "__get__") and not isinstance(own, staticmethod | classmethod)
        method = getattr(kind, name, None) if is_public and is_bound else None
        if callable(method) and not isinstance(method, type):
            found[name] = method
    return found


def _reduced(module: Any, protocol: Any) -> Any:
    """How to pickle an object of our subclass, by whose name `pickle` would find the original."""
    reduced: Any = object.__reduce_ex__(module, max(2, protocol))
    return _remade, getattr(type(module), _MADE), *reduced[2:]


def _remade(*made: Any) -> Any:
    kind: Any = _class_of(Made(*made))
    return kind.__new__(kind)


def set_attribute(module: Any, name: str, value: Any) -> None:
    """Sets an attribute of a module, which may be a frozen dataclass."""
    if dataclasses.is_dataclass(module):
        nnx.Module.__setattr__(module, name, value)
    else:
        setattr(module, name, value)
