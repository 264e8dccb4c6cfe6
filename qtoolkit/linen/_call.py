"""A call of a wrapped module: traced to a program, and computed with quantized matmuls.

`wrap` gives a module a subclass of the same name. A public method of it is one function of the
variables, keys and inputs, by Flax's own lifting (`lift.pack`). It is traced to a program, from
which the collections with the state of matmuls are left out. They are planted and written here,
outside of the program.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen.transforms import decorator_lift_transform

from qtoolkit.formats import Rules
from qtoolkit.formats.internal import values_of_rules
from qtoolkit.linen._function import (
    NO_RULES,
    Layers,
    Names,
    Tree,
    check_dtypes,
    has_whole,
    planted_with,
    rules_of,
)
from qtoolkit.linen._state import (
    COLLECTION,
    SCALES,
    planted_in,
    with_states,
)
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    LATER,
    NoMatmulsError,
    Program,
    Quantizing,
    Traced,
    in_module,
    is_in_program,
    needs_state,
    runs_later,
    started,
    step_of,
    unstarted,
    with_numbers,
)

_OURS = (COLLECTION, SCALES)


def entered(method: Callable[..., Any], *, is_compiled: bool = False) -> Callable[..., Any]:
    """A method of a wrapped module that runs as a program.

    Args:
      is_compiled: Whether the caller runs the method by itself if it computes no matmul.
    """

    def entering(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        rules = rules_of(self)
        if self.scope is None or rules is None or is_in_program():
            return method(self, *args, **kwargs)
        if self.is_initializing():
            return _initialized(method, rules, self, args, kwargs)
        try:
            return _called(method, self, args, kwargs)
        except NoMatmulsError:
            if is_compiled:
                raise
            return method(self, *args, **kwargs)

    # updated=() leaves out the attributes by which Flax marks functions: `method` has them.
    return nn.nowrap(functools.update_wrapper(entering, method, updated=()))


# A name that no module has: with `capture_intermediates` Flax stores what "__call__" returns.
_CALLED = "qtoolkit_called"


def _lifted(module: nn.Module, method: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """`run`, a function of a method as a function of its variables, keys and arguments.

    Args:
      run: Takes (core, scope_fn, repack_fn, groups of variables, keys, arguments), see `lift.pack`,
        and returns a result and the variables that the method has written.
    """

    def called(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    called.__name__ = called.__qualname__ = _CALLED

    def transform(core: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack_fn: Any, groups: Any, keys: Any, *arguments: Any) -> Any:
            groups = tuple(
                tuple({n: x for n, x in scope.items() if n not in _OURS} for scope in group)
                for group in groups
            )
            return run(core, scope_fn, repack_fn, groups, keys, arguments)

        packed: Callable[..., Any] = lift.pack(inner, (True,), (True,), (True,))
        return packed

    return decorator_lift_transform(transform, called)(module, args, kwargs)


def _scope_paths(scope_fn: Any, groups: Any, keys: Any) -> list[tuple[str, ...]]:
    """The paths of the scopes whose variables these are: the module's, and those of its arguments.

    Flax hands over the variables alone. Scopes with a number among their variables tell which is
    which.
    """
    numbered = tuple(
        tuple({"params": {"number": number}} for number in range(len(group))) for group in groups
    )
    paths = {}
    for scope in jax.tree.leaves(scope_fn(numbered, keys)):
        while scope.parent is not None:
            scope = scope.parent
        paths[scope.get_variable("params", "number")] = tuple(scope.path)
    return [paths[number] for number in range(len(paths))]


def _names(tree: Tree, given: Any, paths: list[tuple[str, ...]]) -> Names:
    def path_of(path: Any) -> Any:
        """For groups of variables that are the first of a method's inputs."""
        is_variable = path[0] == jax.tree_util.SequenceKey(0)
        if not is_variable or path[3] != jax.tree_util.DictKey("params") or not path[4:]:
            return None
        return [*map(jax.tree_util.DictKey, paths[path[2].idx]), *path[4:]]

    return tree.names(given, path_of)


class _Trace(NamedTuple):
    """A method that was traced, as a function of arrays, and the arrays."""

    traced: Traced
    program: Program
    arrays: list[Any]

    @classmethod
    def of(
        cls, module: nn.Module, core: Any, scope_fn: Any, repack_fn: Any, *given: Any
    ) -> "_Trace":
        """Traces a method, see `_lifted`, of (groups of variables, keys, arguments).

        It returns its result, and the variables that it has written.
        """
        groups, keys, inputs = given
        paths = _scope_paths(scope_fn, groups, keys)

        def trace(numbers: bool) -> "_Trace":
            tree, arrays = Tree.of(given, traces_numbers=numbers)
            layers, names = Layers(), _names(tree, given, paths)

            def pure(arrays: list[Any]) -> tuple[list[Any], Tree]:
                groups, keys, inputs = tree.whole(arrays)
                with in_module("/".join(module.path), is_root=True), layers.noting():
                    scopes = scope_fn(groups, keys)
                    out = core(scopes, *inputs)
                    return Tree.of_results((out, repack_fn(scopes)))

            traced = Traced(pure, NO_RULES, layers.modules, names)
            try:
                return cls(traced, traced.program(arrays), arrays)
            finally:  # Flax cannot multiply some of the dtypes
                check_dtypes(arrays, names, layers)

        return with_numbers(trace, lambda: has_whole(inputs))


def _called(method: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A call of a method, with quantized matmuls. Writes their new states."""
    args, kwargs = _by_position(method, module, args, kwargs)
    variables = {name: module.variables.get(name, {}) for name in _OURS}
    root = tuple(module.path)
    is_ours, measured = step_of("linen")
    zeros: Any = {} if measured is None else measured.zeros
    planted = planted_with(planted_in(variables, root), zeros)
    moves = module.is_mutable_collection(COLLECTION) and not is_ours
    options: dict[str, Any] = {
        "moves": moves,
        "observes": not is_ours,
        "rng": _random_words(module),
    }
    options["tap"] = None if measured is None else measured.tap

    def run(core: Any, scope_fn: Any, repack_fn: Any, *given: Any) -> Any:
        traced, program, arrays = _Trace.of(module, core, scope_fn, repack_fn, *given)
        if program.is_as_written:
            raise NoMatmulsError
        outs, new = traced.quantizing(**options).run(program, arrays, planted)
        out, written = program.static.whole(outs)
        if (kind := type(out).__name__) in LATER:
            raise runs_later(f"{type(module).__name__}.{method.__name__}", kind)
        return (out, new), written

    with _explaining_names():
        out, new = _lifted(module, method, args, kwargs, run)
    if moves:
        for name, part in with_states(variables[COLLECTION], root, new).items():
            module.put_variable(COLLECTION, name, part)
    return out


def _initialized(
    method: Any, rules: Rules[Recipe], module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """A call of a method in `init`: nothing is quantized, and matmuls get their first states."""
    layers = Layers()
    caches = getattr(type(module), "qtoolkit_cache", None) is not None
    if caches:
        with layers.noting():
            out = method(module, *args, **kwargs)
    else:
        out = method(module, *args, **kwargs)
    if not any(needs_state(recipe) for recipe in values_of_rules(rules)):
        return out
    program, multiply = _program_of_init(method, module, args, kwargs)
    root = tuple(module.path)
    for collection, first in ((COLLECTION, started), (SCALES, _unstarted)):
        if not module.is_mutable_collection(collection):
            continue
        kept = module.variables.get(collection, {})
        new: dict[Any, Any] = {}
        known = planted_in({collection: kept}, root)
        for matmul in program.matmuls:
            recipe = multiply.recipe_of(matmul)
            if recipe is not None and matmul.key not in known:
                state = first(recipe, ":".join(matmul.key), matmul.stack)
                new |= {matmul.key: state} if state else {}
        for name, part in with_states(kept, root, new).items():
            module.put_variable(collection, name, part)
    return out


def _unstarted(recipe: Recipe, name: str, lead: tuple[int, ...]) -> dict[str, Any]:
    return unstarted(recipe, lead)


def _program_of_init(
    method: Any, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Program, Quantizing]:
    """What `init` computes, given the parameters that it has made.

    A second trace, because only now they are inputs. Other variables are made anew.
    """
    args, kwargs = _by_position(method, module, args, kwargs)
    found: list[_Trace] = []

    def run(core: Any, scope_fn: Any, repack_fn: Any, groups: Any, *inputs: Any) -> Any:
        groups = tuple(
            tuple({n: x for n, x in scope.items() if n == "params"} for scope in group)
            for group in groups
        )
        found.append(_Trace.of(module, core, scope_fn, repack_fn, groups, *inputs))
        return None, tuple(tuple({} for _ in group) for group in groups)  # nothing is written

    _lifted(module, method, args, kwargs, run)
    return found[0].program, found[0].traced.quantizing()


def _random_words(module: nn.Module) -> jax.Array | None:
    """Words of the key that `apply` was given for stochastic rounding."""
    rules = rules_of(module)
    is_stochastic = any(recipe.is_stochastic for recipe in values_of_rules(rules or NO_RULES))
    if not is_stochastic or not module.has_rng(COLLECTION):
        return None
    return jax.random.key_data(module.make_rng(COLLECTION)).reshape(-1)[:2]  # of 2 or 4 words


_RESERVED = ("module", "orig_method")  # parameters of `run_interceptors` in flax.linen.module


def _by_position(method: Any, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a method, those by position whose names Flax cannot pass."""
    if any(name in kwargs for name in _RESERVED):
        bound = inspect.signature(method).bind(module, *args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args[1:], bound.kwargs
    return tuple(args), dict(kwargs)


@contextlib.contextmanager
def _explaining_names() -> Iterator[None]:
    """In this context Flax's error for arguments that it cannot pass says what to write."""
    try:
        yield
    except TypeError as error:
        for name in _RESERVED:
            if str(error) == f"run_interceptors() got multiple values for argument {name!r}":
                raise TypeError(
                    f"wrap: a method of a module is called with {name}=..., expected this argument "
                    "by position: under nn.intercept_methods, by which qtoolkit knows which module "
                    f"runs, Flax cannot pass an argument of that name; write layer(x, {name}) in "
                    f"place of layer(x, {name}={name}), and rename it if it is keyword-only"
                ) from error
        raise
