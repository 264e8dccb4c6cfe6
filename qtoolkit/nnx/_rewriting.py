"""Quantizes modules that compute products by themselves, by subclasses with rewritten methods.

A layer with `x @ self.kernel` has no attribute for its product that could be replaced. Instead, the
module gets a subclass of the same name. It runs a method as a pure function of the module's state:
it is traced, and the trace is evaluated with quantized products. The original class is not changed.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from qtoolkit.nnx._products import StatefulProducts
from qtoolkit.nnx._state import ProductState
from qtoolkit.products.internal import (
    Site,
    Track,
    as_jax,
    carrying,
    computes_product,
    enclosing,
    opened,
    overridden,
    product_attributes,
    returns_later,
    rewritten,
    rewritten_later,
    scope,
    with_numbers,
    with_values,
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
        with jax.named_scope(scope(path, None)), enclosing(None):
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
    @functools.wraps(method)
    def entering(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: Site | None = getattr(self, _SITE, None)
        if site is None:
            return method(self, *args, **kwargs)
        kept = getattr(self, "qtoolkit_dot", None)
        within = dataclasses.replace(site, recipe=site.recipe.without_state())
        with enclosing(within, None if kept is None else kept.track().unmoved):
            running = functools.partial(_run, site, method, name, self, args, kwargs)
            return with_numbers(running, (args, kwargs))

    return entering


def _run(
    site: Site, method: Any, name: str, module: Any, args: Any, kwargs: Any, integers: bool
) -> Any:
    """Runs `method` as a pure function of the module's state and of the arrays in its arguments.

    NumPy's integers among them stay as they are if `integers` is false.

    Modules and variables among the arguments, such as a cache, count as state, too, and so do
    attributes that are constants, `self.calls += 1` or `self.shape = x.shape`. Afterwards only
    state that the method has changed is written to the module: `jax.jit` may have closed over the
    model, and nnx then forbids writing to it.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    leaves = [leaf if _is_node(leaf) else as_jax(leaf, integers) for leaf in leaves]
    at_arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    at_nodes = [i for i, leaf in enumerate(leaves) if _is_node(leaf)]
    nodes = [leaves[i] for i in at_nodes]
    graph, state = nnx.split((module, nodes))
    states = (part for _, part in nnx.iter_modules(module) if isinstance(part, ProductState))
    is_carried = all(part.is_writable for part in states)
    traced: list[_Traced] = []  # filled by the one trace of `pure`

    def pure(state: Any, arrays: list[Any]) -> Any:
        copied, given = nnx.merge(graph, state)
        merged = with_values(leaves, [*at_arrays, *at_nodes], [*arrays, *given])
        args, kwargs = jax.tree.unflatten(structure, merged)
        before = {path: jax.tree.leaves(v) for path, v in nnx.to_flat_state(state)}
        notes = [_notes(node) for node in (copied, *given)]
        with rewritten_later(), carrying(is_carried):
            out = method(copied, *args, **kwargs)
        outs, closed = opened(out, is_leaf=_is_node)
        changed = [
            (path, variable)
            for path, variable in nnx.to_flat_state(nnx.state((copied, given)))
            if not _are_same(jax.tree.leaves(variable), before.get(path))
        ]
        pairs = zip([copied, *given], [module, *nodes], strict=True)
        originals = {id(copy): node for copy, node in pairs}
        traced[:] = [
            _Traced(
                closed,
                [None if _is_array(out) else (originals.get(id(out), out),) for out in outs],
                [(path, jax.tree.structure(variable)) for path, variable in changed],
                [_news(node, was) for node, was in zip((copied, *given), notes, strict=True)],
            )
        ]
        return [out for out in outs if _is_array(out)], [jax.tree.leaves(v) for _, v in changed]

    prefix = prefix_of(original_class(type(module)), name)
    kept = named_states(module)
    tracks: dict[str, Track] = {}

    def state_of(name: str) -> Track | None:
        if name in kept:
            tracks[name] = kept[name].track()
        return tracks.get(name)

    rewriting = rewritten(pure, site.multiply(state_of, prefix), _parameters)
    with jax.named_scope(scope(site.path or "", site.recipe)):
        arrays, written = rewriting(state, [leaves[i] for i in at_arrays])
    (found,) = traced
    changes = [
        (node, path, key, value)
        for node, news in zip((module, *nodes), found.notes, strict=True)
        for path, key, value in news
    ]
    try:  # Find every place first, so that an error leaves the module as it was.
        holders = [functools.reduce(_part, path, node) for node, path, _, _ in changes]
        places = [_place((module, nodes), path) for path, _ in found.variables]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"wrap: {type(module).__name__}.{name} made a module or lengthened a list, expected "
            "each to be there before the call; make it in __init__, or call the plain model once "
            "and wrap it then"
        ) from error
    for holder, (_, _, key, value) in zip(holders, changes, strict=True):
        setattr(holder, key, value)
    for place, (_, variable), values in zip(places, found.variables, written, strict=True):
        _write(*place, jax.tree.unflatten(variable, values))
    for name, track in tracks.items():
        kept[name].write(track.moved)
    remaining = iter(arrays)
    outs = [next(remaining) if other is None else other[0] for other in found.others]
    return found.closed(outs)


class _Traced(NamedTuple):
    """What the trace of a method returns besides arrays.

    Attributes:
      closed: Makes the method's result from its leaves, see `opened`.
      others: For each leaf of the result None if it is an array, else the leaf in a tuple. The
        method ran on copies; where it returns a copied module or variable, this is the original.
      variables: The variables that the method wrote or made: paths, and trees of their values.
      notes: For the module and each node among the arguments the constants that changed: path of
        the module that holds one, its name, its value.
    """

    closed: Callable[[list[Any]], Any]
    others: list[tuple[Any] | None]
    variables: list[tuple[tuple[Any, ...], Any]]
    notes: list[list[tuple[Any, str, Any]]]


def _are_same(values: list[Any], before: list[Any] | None) -> bool:
    if before is None or len(values) != len(before):
        return False
    return all(value is was for value, was in zip(values, before, strict=True))


def _is_note(value: Any) -> bool:
    """Whether an attribute is a constant: it hashes by value, and holds no part of the model.

    An object that hashes by identity, such as a function, may hold arrays of the trace.
    """
    if isinstance(value, nnx.Pytree | nnx.Variable):
        return False
    leaves = jax.tree.leaves(value)
    by_identity: Any = object.__hash__
    if any(type(leaf).__hash__ is by_identity for leaf in leaves):
        return False
    try:
        hash((value, *leaves))
    except TypeError:  # arrays do not hash
        return False
    return True


def _notes(node: Any) -> dict[tuple[Any, ...], Any]:
    """The constants that the modules of a node hold, by path and name."""
    if not isinstance(node, nnx.Module):
        return {}
    return {
        (path, name): value
        for path, module in nnx.iter_modules(node)
        for name, value in vars(module).items()
        if not name.startswith(("_pytree", "_object")) and _is_note(value)
    }


def _news(node: Any, before: dict[tuple[Any, ...], Any]) -> list[tuple[Any, str, Any]]:
    """The constants of `node` that are new or have changed: path, name, value."""
    return [
        (path, name, value)
        for (path, name), value in _notes(node).items()
        if (path, name) not in before or before[path, name] is not value
    ]


def _part(node: Any, name: Any) -> Any:
    is_attribute = isinstance(name, str) and hasattr(node, name)
    return getattr(node, name) if is_attribute else node[name]


def _place(module: Any, path: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """The parent of the variable at a path inside of a module or a sequence, its name, and what is
    there.
    """
    *parents, name = path
    parent = functools.reduce(_part, parents, module)
    found = getattr(parent, name, None) if isinstance(name, str) else parent[name]
    return parent, name, found


def _write(parent: Any, name: Any, found: Any, variable: Any) -> None:
    """Sets the variable that was found there, or makes it."""
    if isinstance(found, nnx.Variable):
        found.set_value(variable.get_value())
    else:
        setattr(parent, name, variable)


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Module | nnx.Variable)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _parameters(*args: Any) -> Any:
    """The name of each array in its module, where it is a parameter; else ""."""

    def named(path: Any, leaf: Any) -> Any:
        # The first two keys are the argument, and the module or one of the nodes in it.
        parts = [jax.tree_util.keystr((key,), simple=True) for key in path[2:]]
        name = ".".join(parts) if isinstance(leaf, nnx.Param) else ""
        return jax.tree.map(lambda _: name, leaf)

    return jax.tree_util.tree_map_with_path(
        named, args, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
