"""Modules that compute products by themselves: subclasses whose methods are rewritten.

A layer with `x @ self.kernel` has no attribute for a product. It gets a subclass of the same name,
whose methods run as a pure function of the module's state, traced, with quantized products in the
trace. The class that was there is not changed.
"""

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx.transforms.general import merge_inputs, split_inputs

from qtoolkit.products.internal import Site, enclosing, rewritten, scope

_PRODUCTS = {
    *("dot", "matmul", "einsum", "tensordot", "vdot", "inner", "dot_general", "ragged_dot"),
    *("conv_general_dilated", "conv_transpose", "conv", "conv_with_general_padding"),
    *("dot_product_attention", "batch_matmul", "convolve", "outer"),
}
_LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "optax", "qtoolkit", "builtins")
_FRAMEWORK = set(dir(nnx.Module))
_SITE, _ORIGINAL = "qtoolkit_site", "qtoolkit_original"
_DEPTH = 4  # of functions that call one another


def product_methods(kind: type) -> tuple[str, ...]:
    """The public methods of a class in whose code a product is named."""
    found = []
    for name in dir(kind):
        is_public = name == "__call__" or (not name.startswith("_") and name not in _FRAMEWORK)
        method = getattr(kind, name, None)
        if is_public and isinstance(method, types.FunctionType) and _computes(method, kind):
            found.append(name)
    return tuple(found)


@functools.cache
def _computes(function: Any, kind: type, depth: int = _DEPTH) -> bool:
    """Whether the code of a function, or of those it calls, has a product."""
    if any(map(_names_a_product, _codes(function.__code__))):
        return True
    if not depth:
        return False
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    called = [function.__globals__.get(name) for name in names]
    called += [getattr(kind, name, None) for name in names if name.startswith("_")]
    return any(
        isinstance(other, types.FunctionType)
        and not _is_of(other.__module__, _LIBRARIES)
        and other is not function
        and _computes(other, kind, depth - 1)
        for other in called
    )


def _names_a_product(code: types.CodeType) -> bool:
    """`x @ w`, or a name such as `jnp.dot`; `self.dot` is a layer's own attribute."""
    before: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "BINARY_OP" and instruction.argrepr in ("@", "@="):
            return True
        is_name = instruction.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"))
        if is_name and instruction.argval in _PRODUCTS and before != "self":
            return True
        argval = instruction.argval
        before = argval[-1] if isinstance(argval, tuple) and argval else argval
    return False


def _is_of(module: str | None, packages: tuple[str, ...]) -> bool:
    return (module or "").split(".")[0] in packages


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


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

    def on_arrays(module: Any, *dynamic: Any) -> Any:
        merged = list(leaves)
        for place, leaf in zip(places, dynamic, strict=True):
            merged[place] = leaf
        args, kwargs = jax.tree.unflatten(structure, merged)
        return method(module, *args, **kwargs)

    states = [kept.state() for kept in getattr(module, "qtoolkit_products", ())]
    merging = merge_inputs(on_arrays, ctxtag="qtoolkit")
    rewriting = rewritten(merging, site.multiply(states), _parameters)
    return split_inputs(rewriting, ctxtag="qtoolkit")(module, *(leaves[i] for i in places))


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
