"""Modules that compute products by themselves: subclasses whose methods are rewritten.

A layer with `x @ self.kernel` has no attribute for a product. It gets a subclass of the same name,
whose methods run as a pure function of the module's state, traced, with quantized products in the
trace. The class that was there is not changed.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx.transforms.general import merge_inputs, split_inputs

from qtoolkit.products.internal import Site, computes_product, enclosing, rewritten, scope

_FRAMEWORK = set(dir(nnx.Module))
_SITE, _ORIGINAL = "qtoolkit_site", "qtoolkit_original"


def product_methods(kind: type) -> tuple[str, ...]:
    """The public methods of a class in whose code a product is named."""
    found = []
    for name in dir(kind):
        is_public = name == "__call__" or (not name.startswith("_") and name not in _FRAMEWORK)
        method = getattr(kind, name, None)
        if is_public and isinstance(method, types.FunctionType) and computes_product(method, kind):
            found.append(name)
    return tuple(found)


@functools.cache
def rewriting_class(kind: type, methods: tuple[str, ...]) -> type:
    """The subclass of `kind` whose `methods` compute by the module's site."""
    body: dict[str, Any] = {name: _entered(getattr(kind, name)) for name in methods}
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    body["__doc__"] = kind.__doc__
    is_pytree = getattr(kind, "_pytree__is_pytree", True)
    made = type(kind)(kind.__name__, (kind,), body, pytree=is_pytree)
    setattr(made, _ORIGINAL, kind)
    return made


def leave(module: Any, path: str) -> None:
    """Marks the products of a layer as left."""
    if "qtoolkit_path" not in vars(module):
        kind: Any = type(module)
        module.__class__ = _scoped_class(kind)
        module.qtoolkit_path = path


@functools.cache
def _scoped_class(kind: type) -> type:
    """A subclass whose calls stand in the name stack as those of a layer that is left."""
    names = {"__call__", *product_methods(kind)} & set(dir(kind))
    body: dict[str, Any] = {name: _scoped(getattr(kind, name)) for name in names}
    is_pytree = getattr(kind, "_pytree__is_pytree", True)
    made = type(kind)(kind.__name__, (kind,), body, pytree=is_pytree)
    setattr(made, _ORIGINAL, original_class(kind))
    return made


def _scoped(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope(self.qtoolkit_path, None)):
            return method(self, *args, **kwargs)

    return scoped


def original_class(kind: type) -> type:
    """What a subclass was made of."""
    return getattr(kind, _ORIGINAL, kind)


def _entered(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: Site | None = getattr(self, _SITE, None)
        if site is None:
            return method(self, *args, **kwargs)
        with enclosing(site):
            return _run(site, method, self, args, kwargs)

    return entering


def _run(site: Site, method: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """`method` as a pure function of the module and of the arrays among its arguments."""
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    places = [i for i, leaf in enumerate(leaves) if _is_dynamic(leaf)]

    static: list[Any] = []  # of the result, what is no array

    def on_arrays(module: Any, *dynamic: Any) -> Any:
        merged = list(leaves)
        for place, leaf in zip(places, dynamic, strict=True):
            merged[place] = leaf
        args, kwargs = jax.tree.unflatten(structure, merged)
        outs, kind = jax.tree.flatten(method(module, *args, **kwargs), is_leaf=_is_node)
        static[:] = [kind, *(None if _is_dynamic(out) else (out,) for out in outs)]
        return [out for out in outs if _is_dynamic(out)]

    states = [kept.state() for kept in getattr(module, "qtoolkit_products", ())]
    merging = merge_inputs(on_arrays, ctxtag="qtoolkit")
    rewriting = rewritten(merging, site.multiply(states), _parameters)
    arrays = split_inputs(rewriting, ctxtag="qtoolkit")(module, *(leaves[i] for i in places))
    remaining = iter(arrays)
    kind, *known = static
    return jax.tree.unflatten(kind, [next(remaining) if one is None else one[0] for one in known])


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Module | nnx.Variable)


def _is_dynamic(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) or _is_node(x)


def _parameters(*args: Any) -> Any:
    """For each array, whether it is one of a parameter."""

    def flags(leaf: Any) -> Any:
        is_parameter = isinstance(leaf, nnx.Param)
        return jax.tree.map(lambda _: is_parameter, leaf)

    return jax.tree.map(flags, args, is_leaf=lambda x: isinstance(x, nnx.Variable))
