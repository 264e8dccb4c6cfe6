"""Quantizes modules that compute products by themselves, by subclasses with rewritten methods.

A layer with `x @ self.kernel` has no attribute for its product that could be replaced. Instead, the
module gets a subclass of the same name, whose methods run under a trace that replaces products. The
original class is not changed.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from qtoolkit.nnx._products import StatefulProducts
from qtoolkit.nnx._state import ProductState
from qtoolkit.products.internal import (
    Replacing,
    Site,
    Track,
    as_jax,
    computes_product,
    enclosing,
    leaving,
    overridden,
    product_attributes,
    replacing,
    returns_later,
    with_numbers,
)

_FRAMEWORK = set(dir(nnx.Module))
# Flax's layers that call an attribute for their product, which `wrap` sets.
HOOKED = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.MultiHeadAttention)
_BY_ATTRIBUTE = frozenset(
    inspect.unwrap(own)
    for layer in HOOKED
    for own in vars(layer).values()
    if inspect.isfunction(own)
)
_SITE, _ORIGINAL = "qtoolkit_site", "qtoolkit_original"
_MADE_BY = "qtoolkit_made_by"
_PATH = "qtoolkit_path"  # of a module that a rule leaves
PRODUCTS = "qtoolkit_products"


def methods_of(module: Any) -> tuple[str, ...]:
    """The public methods of a module that compute products by themselves.

    So does a layer of Flax with parameters of somebody else: his interceptor of `lax.dot_general`
    adds an adapter's products to the layer's own. `qwix.apply_lora_to_model` makes such layers.
    """
    kind = original_class(type(module))
    known = frozenset() if isinstance(module, HOOKED) else product_attributes(vars(module))
    methods = product_methods(kind, known)
    return (*methods, "__call__") if foreign(module) and "__call__" not in methods else methods


def foreign(module: Any) -> tuple[str, ...]:
    """The names of parameters of a layer of Flax that no code of its class mentions."""
    if not isinstance(module, HOOKED):
        return ()
    params = (name for name, value in vars(module).items() if isinstance(value, nnx.Param))
    return tuple(name for name in params if name not in _mentioned(original_class(type(module))))


@functools.cache
def _mentioned(kind: type) -> frozenset[str]:
    functions = (inspect.unwrap(x) for base in kind.__mro__ for x in vars(base).values())
    codes = (getattr(function, "__code__", None) for function in functions)
    return frozenset(name for code in codes if code is not None for name in code.co_names)


def has_products(module: Any) -> bool:
    """Whether a module computes products, by an attribute or by itself."""
    return isinstance(module, HOOKED) or bool(methods_of(module))


def product_methods(kind: type, attributes: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The public methods of a class whose code computes a product or calls one of `attributes`.

    A static method or a class method is not among them: it has no module whose recipe it could use.
    The methods that call it are, and their traces reach its products.
    """
    found = []
    for name, method in _public_methods(kind).items():
        function = inspect.unwrap(method)
        if not isinstance(function, types.FunctionType) or returns_later(function):
            continue
        candidates = (function, *overridden(function, kind))
        others = (one for one in candidates if one not in _BY_ATTRIBUTE)
        if any(computes_product(one, kind, attributes) for one in others):
            found.append(name)
    return tuple(found)


def _public_methods(kind: type) -> dict[str, Any]:
    """The methods of a class that are not nnx's own, by name, and also those that are decorated."""
    found = {}
    for name in dir(kind):
        is_public = name == "__call__" or (not name.startswith("_") and name not in _FRAMEWORK)
        own = inspect.getattr_static(kind, name, None)
        is_bound = hasattr(own, "__get__") and not isinstance(own, staticmethod | classmethod)
        method = getattr(kind, name, None) if is_public and is_bound else None
        if callable(method):
            found[name] = method
    return found


@functools.cache
def rewriting_class(kind: type, methods: tuple[str, ...]) -> type:
    """The subclass of `kind` whose `methods` compute by the module's site."""
    body = {name: _entered(getattr(kind, name), name) for name in methods}
    return subclass(kind, body, kind, (rewriting_class, kind, methods))


def is_left(module: Any) -> bool:
    """Whether a rule leaves this module as it is: `leave` has marked it."""
    return hasattr(type(module), _PATH)


def leave(module: Any, path: str) -> None:
    """Marks the products that a module computes, and those in all that it calls, as left."""
    if not is_left(module):
        kind: Any = type(module)
        become(module, _scoped_class(kind, path))


def become(module: Any, kind: type) -> None:
    """Sets the class of a module, which may be a frozen dataclass."""
    object.__setattr__(module, "__class__", kind)


@functools.cache
def _scoped_class(kind: Any, path: str) -> type:
    """A subclass that marks its calls in the name stack as those of a module that a rule leaves.

    The class holds the path, not its object: `nnx.bridge.ToNNX` takes every attribute for a
    variable of its linen module.
    """
    body: dict[str, Any] = {
        name: _scoped(method, path) for name, method in _public_methods(kind).items()
    }
    made_by = (_scoped_class, kind, path)
    return subclass(kind, body | {_PATH: path}, original_class(kind), made_by)


def subclass(kind: Any, members: dict[str, Any], original: type, made_by: tuple[Any, ...]) -> type:
    """A subclass of the same name with other members, which is made of `original`.

    Args:
      made_by: The function that makes it and its arguments, by which its objects are pickled.
    """
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__} | members
    body |= {_MADE_BY: made_by, "__reduce_ex__": _reduced}
    body["__doc__"] = kind.__doc__
    is_pytree = getattr(kind, "_pytree__is_pytree", True)
    made = type(kind)(kind.__name__, (kind,), body, pytree=is_pytree)
    setattr(made, _ORIGINAL, original)
    return made


def _reduced(module: Any, protocol: Any) -> Any:
    """How to pickle an object of our subclass: with how to make the class again.

    The subclass has the name of the original, and `pickle` would find the original by that name.
    """
    reduced: Any = object.__reduce_ex__(module, max(2, protocol))
    _, _, *rest = reduced
    return _remade, (_making_of(type(module)),), *rest


def _making_of(kind: type) -> Any:
    """How to make a class again: (function, arguments) for our subclasses, else the class."""
    made_by = vars(kind).get(_MADE_BY)
    if made_by is None:
        return kind
    function, kind, *others = made_by
    return function, _making_of(kind), *others


def _made(making: Any) -> type:
    if isinstance(making, type):
        return making
    function, kind, *others = making
    return function(_made(kind), *others)


def _remade(making: Any) -> Any:
    kind: Any = _made(making)
    return kind.__new__(kind)


def _scoped(method: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with leaving(path):
            return method(self, *args, **kwargs)

    return scoped


def original_class(kind: type) -> type:
    """The class from which `subclass` made this one; `kind` itself if it is not one of ours."""
    return getattr(kind, _ORIGINAL, kind)


def prefix_of(kind: type, method: str) -> str:
    """The prefix of the names of products in a method: "encode." in "encode.kernel".

    The main method of a module, usually `__call__`, has no prefix. But a subclass of a Flax layer
    that overrides `__call__` has one for it: the layer's own product is named "0".
    """
    main = "attend" if issubclass(kind, nnx.Embed) else "__call__"
    return "" if method == main and not issubclass(kind, HOOKED) else f"{method}."


def named_states(module: Any) -> dict[str, Any]:
    """The states of the products in a module's own methods, by name."""
    kept = getattr(module, PRODUCTS, None)
    states = {} if kept is None else vars(kept)
    return {name: state for name, state in states.items() if isinstance(state, ProductState)}


def product_states(layer: Any) -> dict[str, ProductState]:
    """The states of a layer's products, by name."""
    return {**named_states(layer), **hooked_states(layer)}


def hooked_states(layer: Any) -> dict[str, ProductState]:
    """The states in the layer's attribute: "0", and for attention also "1"."""
    hooks = (value for value in vars(layer).values() if isinstance(value, StatefulProducts))
    return {str(i): kept for hook in hooks for i, kept in enumerate(hook.products)}


def _entered(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A method whose products are computed by the module's site."""
    prefix = functools.cache(lambda kind: prefix_of(original_class(kind), name))

    @functools.wraps(method)
    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: Site | None = getattr(self, _SITE, None)
        if site is None:
            return method(self, *args, **kwargs)
        kept = getattr(self, "qtoolkit_dot", None)
        states = named_states(self)

        def state_of(name: str) -> Track | None:
            return states[name].track() if name in states else None

        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        dots = dataclasses.replace(site, recipe=site.recipe.without_state())

        def run(integers: bool) -> Any:
            given = [leaf if _is_node(leaf) else as_jax(leaf, integers) for leaf in leaves]
            args, kwargs = jax.tree.unflatten(structure, given)
            names: dict[int, str] = {}
            trace = Replacing(site.multiply(state_of, prefix(type(self))), names, mark=site.mark)
            for node in (self, *given):
                _know(trace, names, node)
            with enclosing(dots, None if kept is None else kept.track().unmoved), replacing(trace):
                return method(self, *args, **kwargs)

        return with_numbers(run, (args, kwargs))

    return entering


def _know(trace: Replacing, names: dict[int, str], node: Any) -> None:
    """Tells a trace which arrays of a module or an argument are parameters, and their names."""
    if not _is_node(node):
        trace.know_inputs(node)
        return
    variables = nnx.to_flat_state(nnx.state(node)) if isinstance(node, nnx.Module) else [((), node)]
    for path, variable in variables:
        arrays = jax.tree.leaves(variable.get_value())
        if isinstance(variable, nnx.Param):
            for array in arrays:
                names[id(array)] = ".".join(map(str, path))
                trace.know_parameter(array)
        else:
            trace.know_inputs(arrays)


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Module | nnx.Variable)
