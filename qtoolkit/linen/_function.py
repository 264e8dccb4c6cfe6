"""A function of linen variables and inputs as a function of arrays alone."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from qtoolkit.casts.internal import FLOATS
from qtoolkit.formats import Rules
from qtoolkit.linen._cache import narrow_cache
from qtoolkit.linen._state import planted_in
from qtoolkit.products import KVCache, Recipe
from qtoolkit.products.internal import (
    MODEL,
    FoundModule,
    Key,
    Module,
    Parameter,
    Planted,
    Quantizing,
    Traced,
    in_module,
    is_traced_numpy,
    is_whole,
    own_traces,
    planted_with,
    tracing_function,
    with_numbers,
)
from qtoolkit.scaling import QArray

Names = tuple[Parameter | None, ...]
NO_RULES: Rules[Recipe] = Rules([])


class _Array(NamedTuple):
    """Stands for an array in a tree."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree without its arrays: static data.

    Attributes:
      structure: Of the tree.
      leaves: Its leaves, with `_Array` in place of arrays.
      types: Their types: 1 == True, and 1 == 1.0.
    """

    structure: Any
    leaves: tuple[Any, ...]
    types: tuple[type, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", tuple(map(type, self.leaves)))

    @classmethod
    def of(cls, tree: Any, *, traces_numbers: bool = True) -> tuple["Tree", list[Any]]:
        """A tree of inputs, and its arrays. A `QArray` among parameters is one of them; elsewhere,
        as in a cache, it is what its leaves are.

        Args:
          traces_numbers: Whether NumPy's integers and booleans are arrays, too.
        """
        leaves, structure = jax.tree.flatten(_opened(tree), is_leaf=_is_stored)
        are_arrays = [_is_array(x, traces_numbers) for x in leaves]
        pairs = list(zip(leaves, are_arrays, strict=True))
        arrays = [_as_jax(x) for x, is_array in pairs if is_array]
        return cls(structure, tuple(_Array() if it else x for x, it in pairs)), arrays

    @classmethod
    def of_results(cls, tree: Any) -> tuple[list[Any], "Tree"]:
        """The arrays of a tree of results, and the rest of it."""
        leaves, structure = jax.tree.flatten(tree)
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        others = (_Array() if isinstance(x, jax.Array) else x for x in leaves)
        return arrays, cls(structure, tuple(others))

    def whole(self, arrays: Sequence[Any]) -> Any:
        rest = iter(arrays)
        leaves = [next(rest) if isinstance(x, _Array) else x for x in self.leaves]
        tree = jax.tree.unflatten(self.structure, leaves)
        return jax.tree.map(_closed, tree, is_leaf=lambda x: isinstance(x, _Opened))

    def names(self, tree: Any, path_of: Callable[[Any], Sequence[Any] | None]) -> Names:
        """The names of the arrays that are parameters.

        Args:
          tree: The tree itself.
          path_of: Gives the path of a leaf among the parameters of the model; None for others.
        """
        flat, _ = jax.tree_util.tree_flatten_with_path(_opened(tree), is_leaf=_is_stored)
        pairs = zip(flat, self.leaves, strict=True)
        found = [path_of(path) for (path, _), x in pairs if isinstance(x, _Array)]
        return tuple(None if path is None else _parameter(path) for path in found)


def _parameter(path: Sequence[Any]) -> Parameter:
    """The name of a parameter: the keys of modules are strings.

    Other keys belong to a list or a dictionary that is the parameter, or to a box of Flax, such as
    `nn.Partitioned`, which has no part in the name.
    """
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    modules = [name for name in names if isinstance(name, str)]
    kinds = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)
    inner = [jax.tree_util.keystr((key,), simple=True) for key in path if isinstance(key, kinds)]
    return Parameter("/".join(modules[:-1]), ".".join(inner[len(modules) - 1 :]))


def _is_stored(x: Any) -> bool:
    return isinstance(x, QArray)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Opened:
    """A `QArray` that is no parameter: its arrays are inputs, each by itself."""

    arrays: list[Any]
    structure: Any = dataclasses.field(metadata={"static": True})


def _opened(tree: Any) -> Any:
    def opened(path: Any, x: Any) -> Any:
        is_parameter = any(getattr(key, "key", None) == "params" for key in path)
        return x if is_parameter or not _is_stored(x) else _Opened(*jax.tree.flatten(x))

    if not any(map(_is_stored, jax.tree.leaves(tree, is_leaf=_is_stored))):
        return tree
    return jax.tree_util.tree_map_with_path(opened, tree, is_leaf=_is_stored)


def _closed(tree: Any) -> Any:
    is_opened = isinstance(tree, _Opened)
    return jax.tree.unflatten(tree.structure, tree.arrays) if is_opened else tree


def _is_array(x: Any, traces_numbers: bool) -> bool:
    if isinstance(x, jax.Array | QArray | jax.ShapeDtypeStruct):
        return True
    return is_traced_numpy(x, traces_numbers)


def has_whole(inputs: Any) -> bool:
    """Whether NumPy's integers or booleans are among inputs, see `with_numbers`."""
    return any(map(is_whole, jax.tree.leaves(inputs)))


def _as_jax(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x


def rules_of(module: nn.Module) -> Rules[Recipe] | None:
    """The rules of a module that was wrapped, None for others."""
    # Of the class: of an instance without the attribute Flax would run `setup`.
    own = getattr(type(module), "qtoolkit_rules", None)
    return None if own is None else own.fget(module)


class Layers:
    """The modules that run while a program is traced.

    Attributes:
      modules: What rules match of each, by its path in the model.
      roots: The paths of those that were wrapped, with the formats of their caches.
      params: The parameters of the function that is traced, if it may give modules parts of them.
      around: Where among these are the parameters of the wrapped module that runs.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        self.roots: dict[str, KVCache | None] = {}
        self.params: Any = {}
        self.around: tuple[str, ...] = ()

    @classmethod
    def within(cls, wrapped: nn.Module) -> "Layers":
        """For a module inside of a wrapped one."""
        layers = cls()
        layers._note(wrapped, "/".join(wrapped.path))
        return layers

    @contextmanager
    def noting(self) -> Iterator[None]:
        """In this context each method of a wrapped module says where it runs."""

        def entering(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module = context.module
            if module.scope is None or context.method_name == "setup":
                return run(*args, **kwargs)
            before, self.around = self.around, self._around(module)
            try:
                path = "/".join((*self.around, *module.path))
                if not self._note(module, path):
                    return run(*args, **kwargs)
                with in_module(path), self._cache(module, path, context.method_name):
                    return run(*args, **kwargs)
            finally:
                self.around = before

        with nn.intercept_methods(entering), own_traces():
            yield

    def _around(self, module: nn.Module) -> tuple[str, ...]:
        return self.around if rules_of(module) is None else around_of(module, self.params)

    def _note(self, module: nn.Module, path: str) -> bool:
        """Notes a module. Returns whether it is, or is in, one that was wrapped."""
        rules = rules_of(module)
        found = self.at(path)
        if rules is not None:
            self.roots.setdefault(path, getattr(type(module), "qtoolkit_cache", None))
            known = self.modules.get(path, Module(("",), ()))
            found = Module(("",), known.kinds, False, rules)
        elif not path or found.rules is None:
            return False
        # Flax transforms copies of modules, and their classes: a module may have several types.
        kinds = tuple(dict.fromkeys((type(module), *found.kinds)))
        is_left = isinstance(module, nn.SpectralNorm)
        self.modules[path] = found._replace(kinds=kinds, computes_unquantized=is_left)
        return True

    def at(self, path: str) -> Module:
        """What is known of a path."""
        return Quantizing(NO_RULES, self.modules).module_at(path)

    def _cache(self, module: nn.Module, path: str, name: str) -> Any:
        if name != "__call__" or not isinstance(module, nn.MultiHeadDotProductAttention):
            return nullcontext()
        fmt = next(
            (
                self.roots[path[:end]]
                for end in range(len(path), -1, -1)
                if path[:end] in self.roots
            ),
            None,
        )
        return nullcontext() if fmt is None else narrow_cache(module, fmt)


def around_of(module: nn.Module, params: Any) -> tuple[str, ...]:
    """Where among parameters those are that `apply` of a module was given: () for all of them.

    A loss may give each of several modules its part. Parts alike are told apart by their arrays.
    """
    leaves, structure = jax.tree.flatten(module.variables.get("params", {}))
    own, alike = tuple(module.path), []
    for path, part in _mappings(params):
        around, end = path[: len(path) - len(own)], path[len(path) - len(own) :]
        if not leaves or end != own or bool(jax.tree.structure(part) != structure):  # type: ignore[operator]
            continue
        pairs = list(zip(jax.tree.leaves(part), leaves, strict=True))
        if all(x is y for x, y in pairs):
            return around
        if all(jnp.shape(x) == jnp.shape(y) for x, y in pairs):
            alike.append(around)
    return alike[0] if alike else ()


def _mappings(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The dictionaries in a tree, the outer ones first, with their paths."""
    if isinstance(tree, Mapping):
        yield path, tree
        for name, part in tree.items():
            yield from _mappings(part, (*path, name))


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of variables and inputs, such as a loss. Holds no array.

    Attributes:
      function: Of (variables, *args, **kwargs).
      inputs: The tree of (variables, args, kwargs).
    """

    function: Callable[..., Any]
    inputs: Tree
    layers: Layers = dataclasses.field(compare=False)

    def __call__(self, arrays: list[Any]) -> tuple[list[Any], Tree]:
        variables, args, kwargs = self.inputs.whole(arrays)
        self.layers.params = params_of(variables)
        with tracing_function(), self.layers.noting():
            return Tree.of_results(self.function(variables, *args, **kwargs))


@dataclasses.dataclass
class Bound:
    """A function of variables, with its arguments: see `Call` of `products._flow`.

    Attributes:
      traced, leaves: The function of arrays, and the arrays.
      layers: The modules that run, once it is traced.
      states: The states of matmuls, by key.
    """

    traced: Traced
    leaves: list[Any]
    layers: Layers
    states: dict[Key, dict[str, Any]]

    @classmethod
    def of(cls, function: Callable[..., Any], variables: Any, args: Any, kwargs: Any) -> "Bound":
        inputs = variables, tuple(args), dict(kwargs)

        def bound(traces_numbers: bool) -> "Bound":
            tree, leaves = Tree.of(inputs, traces_numbers=traces_numbers)
            layers = Layers()
            names = tree.names(inputs, _path_in_variables)
            traced = Traced(Function(function, tree, layers), NO_RULES, layers.modules, names)
            if traces_numbers and has_whole((args, kwargs)):
                traced.program(leaves)  # may need their numbers
            return cls(traced, leaves, layers, planted_in(variables, ()))

        return with_numbers(bound, lambda: has_whole((args, kwargs)))

    def planted(self) -> dict[Key, Planted]:
        """What the matmuls are given, see `Program.run`."""
        return planted_with(self.states, {})


def _path_in_variables(path: Any) -> Sequence[Any] | None:
    """For variables that are the first of a function's inputs."""
    names = [getattr(key, "key", None) for key in path[:2]]
    is_variable = path[0] == jax.tree_util.SequenceKey(0)
    return path[2:] if is_variable and names[1:] == ["params"] and path[2:] else None


def check_dtypes(arrays: Sequence[Any], names: Names, layers: Layers) -> None:
    """Checks the parameters of modules with a recipe. Flax cannot multiply 8-bit ones."""
    multiply = Quantizing(NO_RULES, layers.modules)
    for x, name in zip(arrays, names, strict=False):
        if name is None or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype in FLOATS:
            continue
        if multiply.by_rules(name.path, name) is not None:
            raise TypeError(
                f"wrap: {name.path or MODEL}: {name.name} has dtype {x.dtype}, expected float32, "
                "float16 or bfloat16; create the layer with another param_dtype, or exclude the "
                "layer by a rule with None"
            )


def params_of(variables: Any) -> Any:
    return variables.get("params", {}) if isinstance(variables, Mapping) else {}


def parameters_of(variables: Any) -> list[tuple[Parameter, Any]]:
    """The parameters among variables, by name."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params_of(variables), is_leaf=_is_stored)
    return [(_parameter(path), x) for path, x in flat]


def found_modules(
    layers: Layers, rules: Rules[Recipe], matmuls: Sequence[Any], variables: Any
) -> list[FoundModule]:
    """The modules that ran under these rules, and their kernels, as rules match them."""
    computing = {matmul.path for matmul in matmuls} | {matmul.module for matmul in matmuls}
    found = [
        FoundModule(x.paths, x.kinds, x.kinds[0].__name__, path in computing)
        for path, x in layers.modules.items()
        if x.rules is rules
    ]
    for name, x in parameters_of(variables):
        module = layers.at(name.path)
        if len(getattr(x, "shape", ())) > 1 and module.rules is rules:
            path, kind = name._replace(path=module.paths[0]).full_path, module.kinds[0].__name__
            found.append(FoundModule((path,), module.kinds, kind, name.path in computing))
    return found
