"""A function of nnx modules and arguments as a function of arrays alone."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from qtoolkit.formats import Rules
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    Contents,
    check_result,
    in_module,
    is_traced_numpy,
    tracing_function,
    write_back,
)
from qtoolkit.scaling import QArray

SITE, PRODUCTS = "qtoolkit_site", "qtoolkit_products"


@dataclasses.dataclass(frozen=True)
class Site:
    """What a wrapped module knows of itself: static data.

    Attributes:
      paths: In the model that was wrapped; several if it is shared.
      kinds: Its type and the types of the modules around it, on all paths.
      rules: Those of the model.
      is_inside: Whether it is a copy, in a program.
      around: Where in a program the model that was wrapped stands: "gen", say, if a loss is given
        `nnx.Dict(gen=wrapped, ...)`.
    """

    paths: tuple[str, ...]
    kinds: tuple[type, ...]
    rules: Rules[Recipe]
    is_inside: bool = False
    around: str = ""

    @property
    def path(self) -> str:
        return f"{self.around}/{self.paths[0]}".strip("/") if self.around else self.paths[0]

    def at(self, place: Sequence[Any]) -> "Site":
        """The same of a module at a place among the nodes of a program, of which the model is 0."""
        first, *rest = map(str, place)
        shown, own = "/".join(rest if first == "0" else (first, *rest)), self.paths[0]
        if shown == own or not f"/{shown}".endswith(f"/{own}" if own else ""):
            return self
        return dataclasses.replace(self, around=shown.removesuffix(own).rstrip("/"))


def site_of(module: Any) -> Site | None:
    """The site of a module that was wrapped, None for others.

    `nnx.bridge.ToNNX` takes every attribute for a variable of linen: its class has the site.
    """
    site: Site | None = vars(module).get(SITE)
    return getattr(type(module), SITE, None) if site is None else site


def sites_in(model: nnx.Module) -> list[tuple[Site, nnx.Module]]:
    """The modules of a model that were wrapped, with what they know of themselves."""
    modules = ((path, x, site_of(x)) for path, x in nnx.iter_modules(model, graph=True))
    return [(site.at((0, *path)), x) for path, x, site in modules if site is not None]


def is_node(x: Any) -> bool:
    return isinstance(x, nnx.Module | nnx.Variable)


class _Array(NamedTuple):
    """Stands for an array in a result: its number."""

    number: int


class _Given(NamedTuple):
    """Stands for a module or Variable that the function was given."""

    path: tuple[Any, ...]


class _New(NamedTuple):
    """Stands for a module or Variable that the function has made."""

    graph: Any
    structure: Any
    numbers: tuple[int, ...]


class Result(NamedTuple):
    """What the function returns besides arrays, which are known by their numbers.

    Attributes:
      out: The structure of what the user's function returned, and its leaves: see `_Array`.
      changed: The paths of the variables that it has changed, each with its value.
      graph: All nodes, if it has changed more than variables.
      arguments: As `out`, of the arguments, if it has changed lists or dictionaries among them.
    """

    out: tuple[Any, tuple[Any, ...]]
    changed: tuple[tuple[Any, _New], ...]
    graph: _New | None
    arguments: tuple[Any, tuple[Any, ...]] | None

    @property
    def returned(self) -> set[int]:
        """The numbers of arrays that are not only written to variables."""
        parts = [*self.out[1], *(self.arguments[1] if self.arguments else ())]
        arrays = {x.number for x in parts if isinstance(x, _Array)}
        return arrays.union(*(x.numbers for x in parts if isinstance(x, _New)))


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of modules and arguments. Holds no array.

    Attributes:
      function: Of (model, *args, **kwargs).
      is_method: Whether it is a method of the model; else one that calls some.
      graph, paths, structures: The nodes among the arguments, without their arrays.
      tree: The structure of (model, args, kwargs); `kinds` says which leaves are a "node" or an
        "array".
      others: The other leaves, each with its type, because 1 == True.
    """

    function: Callable[..., Any]
    is_method: bool
    graph: Any
    paths: tuple[Any, ...]
    structures: tuple[Any, ...]
    tree: Any
    kinds: tuple[str, ...]
    others: tuple[Any, ...]

    @classmethod
    def of(
        cls, function: Any, arguments: Any, *, is_method: bool, traces_numbers: bool
    ) -> tuple["Function", tuple[Any, ...], list[tuple[Any, list[Any]]], list[Any]]:
        """The function; live nodes; the arrays of each of their variables; arrays of arguments."""
        given, tree = jax.tree.flatten(arguments, is_leaf=is_node)
        kinds = tuple(_kind_of(x, traces_numbers) for x in given)
        by_kind: dict[str, list[Any]] = {"node": [], "array": [], "": []}
        for x, kind in zip(given, kinds, strict=True):
            by_kind[kind].append(x)
        nodes = tuple(by_kind["node"])
        graph, state = nnx.split(nodes, graph=True)
        flat = list(nnx.to_flat_state(state))
        parts = [_flattened(variable) for _, variable in flat]
        paths, structures = tuple(path for path, _ in flat), tuple(tree for _, tree in parts)
        others = tuple((type(x), x) for x in by_kind[""])
        made = cls(function, is_method, graph, paths, structures, tree, kinds, others)
        variables = [(x, leaves) for (_, x), (leaves, _) in zip(flat, parts, strict=True)]
        return made, nodes, variables, [*map(jnp.asarray, by_kind["array"])]

    def __call__(self, leaves: list[Any]) -> tuple[list[Any], Result]:
        nodes, given = self._given(leaves)
        graph, values = _values(nodes)
        before = Contents.of(given, is_node)
        if self.is_method:
            with in_module(_path_of(nodes), is_root=True):
                out = self.run_method(*given)
        else:
            with tracing_function():
                model, args, kwargs = given
                out = self.function(model, *args, **kwargs)
        known = [(path, x) for path, x in nnx.iter_graph(nodes, graph=True) if is_node(x)]
        arrays = _Arrays()
        result = _parted(out, known, arrays)
        changed, changed_graph = _changes(graph, values, nodes, arrays)
        arguments = None
        if Contents.of(given, is_node).differ_from(before):
            arguments = _parted(given, known, arrays)
        return arrays.all, Result(result, changed, changed_graph, arguments)

    def run_method(self, model: Any, args: Any, kwargs: Any) -> Any:
        out = self.function(model, *args, **kwargs)
        check_result(f"{type(model).__name__}.{self.function.__name__}", out, is_node)
        return out

    def _given(self, leaves: list[Any]) -> tuple[Any, Any]:
        """Copies of the nodes, without state of matmuls; and the arguments of the function."""
        rest = iter(leaves)
        variables = []
        for path, structure in zip(self.paths, self.structures, strict=True):
            inner = [next(rest) for _ in range(structure.num_leaves)]
            variables.append((path, jax.tree.unflatten(structure, inner)))
        nodes = nnx.merge(self.graph, nnx.from_flat_state(variables))
        for place, module in list(nnx.iter_modules(nodes, graph=True)):
            vars(module).pop(PRODUCTS, None)
            if (site := site_of(module)) is not None:
                _set_site(module, dataclasses.replace(site.at(place), is_inside=True))
        parts = {"node": iter(nodes), "array": rest, "": iter(x for _, x in self.others)}
        return nodes, jax.tree.unflatten(self.tree, [next(parts[kind]) for kind in self.kinds])


def finished(
    result: Result, arrays: Sequence[Any], codes: Mapping[int, Any], nodes: Any, arguments: Any
) -> Any:
    """What the user's function returned. Writes what it has changed in live nodes and arguments.

    Args:
      codes: Of arrays that are a stored parameter, by their numbers. `nnx.jit` and `nnx.remat` in
        the function write each Variable of their models, also those that stay as they are.
    """
    live, written = {}, [codes.get(number, x) for number, x in enumerate(arrays)]
    parts = [*result.out[1], *(result.arguments[1] if result.arguments else ())]
    if result.changed or result.graph or any(isinstance(x, _Given) for x in parts):
        live = {tuple(path): x for path, x in nnx.iter_graph(nodes, graph=True)}

    def whole(tree: Any, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(tree, [_whole(x, arrays, live) for x in leaves])

    for path, value in result.changed:
        _write(live[tuple(path)], _tree_of(value, written))
    if result.graph is not None:
        _transfer(nnx.merge(result.graph.graph, _tree_of(result.graph, written)), live)
    if result.arguments is not None:
        write_back(arguments, whole(*result.arguments))
    return whole(*result.out)


class _Arrays:
    """The arrays of a result. One that comes twice is one array again."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def number(self, x: Any) -> int:
        for number, known in enumerate(self.all):
            if known is x:
                return number
        self.all.append(x)
        return len(self.all) - 1

    def new(self, graph: Any, tree: Any) -> _New:
        leaves, structure = jax.tree.flatten(tree)
        return _New(graph, structure, tuple(map(self.number, leaves)))


def _parted(tree: Any, known: Sequence[tuple[Any, Any]], arrays: _Arrays) -> Any:
    """The structure of a tree and its leaves, without arrays."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_node)
    parts: list[Any] = []
    for x in leaves:
        if isinstance(x, jax.Array):
            parts.append(_Array(arrays.number(x)))
        elif not is_node(x):
            parts.append(x)
        elif (path := next((path for path, node in known if node is x), None)) is not None:
            parts.append(_Given(path))
        else:
            parts.append(arrays.new(*nnx.split(x, graph=True)))
    return structure, tuple(parts)


def _whole(part: Any, arrays: Sequence[Any], live: Mapping[Any, Any]) -> Any:
    match part:
        case _Array(number):
            return arrays[number]
        case _Given(path):
            return live[tuple(path)]
        case _New(graph):
            made = nnx.merge(graph, _tree_of(part, arrays))
            for module in _modules_in(made):
                _leave_program(module)
            return made
    return part


def _tree_of(part: _New, arrays: Sequence[Any]) -> Any:
    return jax.tree.unflatten(part.structure, [arrays[number] for number in part.numbers])


def _values(nodes: Any) -> tuple[Any, list[list[Any]]]:
    """The nodes without arrays, and the arrays of each of their variables."""
    graph, state = nnx.split(nodes, graph=True)
    return graph, [jax.tree.leaves(variable) for _, variable in nnx.to_flat_state(state)]


def _changes(graph: Any, values: Any, nodes: Any, arrays: _Arrays) -> tuple[Any, Any]:
    """What a function has changed of its nodes, see `Result`."""
    graph_after, state = nnx.split(nodes, graph=True)
    if graph_after != graph:
        return (), arrays.new(graph_after, state)
    changed = []
    for before, (path, variable) in zip(values, nnx.to_flat_state(state), strict=True):
        after = jax.tree.leaves(variable)
        if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
            if not isinstance(variable, nnx.Variable):  # an array that is an attribute
                return (), arrays.new(graph_after, state)
            changed.append((path, arrays.new(None, _raw(variable))))
    return tuple(changed), None


# Types of Variables, and hooks, may change what `get_value` reads and `set_value` writes: this has
# happened in the program.
def _raw(variable: nnx.Variable[Any]) -> Any:
    value = variable.get_raw_value()
    return value[...] if nnx.variablelib.is_array_ref(value) else value


def _write(variable: nnx.Variable[Any], value: Any) -> None:
    before = variable.get_raw_value()
    if isinstance(value, QArray) and not isinstance(before, QArray):
        value = value.dequantize()  # a copy of a stored kernel
    if nnx.variablelib.is_array_ref(before):
        before[...] = value
    else:
        variable.set_raw_value(value)


def _transfer(nodes: Any, live: Mapping[Any, Any]) -> None:
    """Gives live modules the attributes and values of others that a function has changed."""
    for path, module in nnx.iter_graph(nodes, graph=True):
        target = live.get(tuple(path))
        if isinstance(module, nnx.Variable) and isinstance(target, nnx.Variable):
            _write(target, _raw(module))
            target.set_metadata(module.get_metadata())
        if not isinstance(module, nnx.Module) or not isinstance(target, nnx.Module):
            continue
        for name, value in vars(module).items():
            is_ours = name.startswith(("_pytree__", SITE))
            if not is_ours and not (is_node(value) and name in vars(target)):
                for inner in _modules_in(value):
                    _leave_program(inner)
                setattr(target, name, value)
        for name in [n for n in vars(target) if n not in vars(module) and n != PRODUCTS]:
            delattr(target, name)


def _modules_in(tree: Any) -> list[nnx.Module]:
    return [x for _, x in nnx.iter_graph(tree, graph=True) if isinstance(x, nnx.Module)]


def _leave_program(module: nnx.Module) -> None:
    if (site := site_of(module)) is not None:
        _set_site(module, dataclasses.replace(site, is_inside=False, around=""))


def _set_site(module: nnx.Module, site: Site) -> None:
    if SITE in vars(module):
        vars(module)[SITE] = site
    else:
        object.__setattr__(module, "__class__", type(module).qtoolkit_with_site(site))  # type: ignore[attr-defined]


def _path_of(nodes: Any) -> str:
    site = site_of(nodes[0])
    return "" if site is None else site.path


def _flattened(variable: nnx.Variable[Any]) -> tuple[list[Any], Any]:
    """The arrays of a variable. A stored kernel is one of them."""
    is_stored = isinstance(variable, nnx.Param) and isinstance(variable.get_value(), QArray)
    is_leaf = (lambda x: isinstance(x, QArray)) if is_stored else None
    leaves, structure = jax.tree.flatten(variable, is_leaf=is_leaf)
    return leaves, structure


def _kind_of(x: Any, traces_numbers: bool) -> str:
    if is_node(x):
        return "node"
    if isinstance(x, jax.Array):
        return "array"
    if type(x) in (float, complex):
        return "array" if traces_numbers else ""
    return "array" if is_traced_numpy(x, traces_numbers) else ""
