"""A call of a wrapped module: traced to a program, and computed with quantized matmuls.

`wrap` gives a module a subclass of the same name. A public method of it is one function of the
variables, keys and inputs, by Flax's own lifting (`lift.pack`). It is traced to a program, from
which the collections with the state of matmuls are left out. They are planted and written here,
outside of the program.
"""

import contextlib
import dataclasses
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
    around_of,
    check_dtypes,
    has_whole,
    params_of,
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
    NEEDS_NUMBERS,
    Contents,
    NoMatmulsError,
    Program,
    Quantizing,
    RunsLaterError,
    Traced,
    check_result,
    in_module,
    is_in_program,
    is_step_by_step,
    needs_numbers,
    needs_state,
    planted_with,
    refusing_kept_arrays,
    runs_step_by_step,
    started,
    step_of,
    unstarted,
    warn,
    with_numbers,
    write_back,
)

OURS = (COLLECTION, SCALES)


def entered(method: Callable[..., Any], *, is_compiled: bool = False) -> Callable[..., Any]:
    """A method of a wrapped module that runs as a program.

    Under `jax.disable_jit` one that cannot be traced runs as it is, and the modules that it calls
    run as programs.

    Args:
      is_compiled: Whether the caller runs the method by itself if it computes no matmul.
    """

    def entering(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        rules = rules_of(self)
        if self.scope is None or rules is None or is_in_program():
            return method(self, *args, **kwargs)
        if self.is_initializing():
            out = made(method, self, *args, **kwargs)
            if keeps_state(rules):
                with starting(method, self):
                    start_states(method, self, *args, **kwargs)
            return out
        try:
            return _called(method, self, args, kwargs, self)
        except NoMatmulsError:
            if is_compiled:
                raise
            return method(self, *args, **kwargs)
        except (*NEEDS_NUMBERS, RunsLaterError):
            if not is_step_by_step():
                raise
            return _step_by_step(method, self, args, kwargs)

    # updated=() leaves out the attributes by which Flax marks functions: `method` has them.
    return nn.nowrap(functools.update_wrapper(entering, method, updated=()))


def _step_by_step(method: Any, root: nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls a method as it is, and each module that it calls as a program."""

    def entering(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, name = context.module, context.method_name
        is_outer = module.scope is None or module.path == root.path or name == "setup"
        if is_outer or is_in_program():
            return run(*args, **kwargs)
        try:
            return _called(getattr(type(module), name), module, args, kwargs, root)
        except (NoMatmulsError, *NEEDS_NUMBERS, RunsLaterError):
            return run(*args, **kwargs)

    with nn.intercept_methods(entering):
        out = method(root, *args, **kwargs)
    own = root.variables.get("params", {}).values()
    what = f"{type(root).__name__}.{method.__name__} cannot be traced"
    runs_step_by_step(what, any(getattr(x, "ndim", 0) > 1 for x in own))
    return out


# A name that no module has: with `capture_intermediates` Flax stores what "__call__" returns.
_CALLED = "qtoolkit_called"


def _lifted(module: nn.Module, method: Any, args: Any, kwargs: Any, run: Any) -> Any:
    """`run`, a function of a method as a function of its variables, keys and arguments.

    Args:
      run: Takes (core, scope_fn, repack_fn, groups of variables, keys, arguments), see `lift.pack`,
        and returns a result and the variables that the method has written. `core` returns what the
        method does, and the `_containers` that it has changed.
    """

    def called(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = _containers(args, kwargs)
        before = {name: Contents.of(x) for name, x in given.items()}
        name = f"{type(module).__name__}.{method.__name__}"
        fields = [getattr(module, x.name) for x in dataclasses.fields(module) if x.name != "parent"]
        objects = (x for x in (*fields, *args, *kwargs.values()) if not _is_module(x))
        with refusing_kept_arrays(name, objects):
            out = method(module, *args, **kwargs)
        check_result(name, out, _is_module)
        changed = {name: x for name, x in given.items() if Contents.of(x).differ_from(before[name])}
        return out, changed

    called.__name__ = called.__qualname__ = _CALLED

    def transform(core: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack_fn: Any, groups: Any, keys: Any, *arguments: Any) -> Any:
            groups = tuple(
                tuple({n: x for n, x in scope.items() if n not in OURS} for scope in group)
                for group in groups
            )
            return run(core, scope_fn, repack_fn, groups, keys, arguments)

        packed: Callable[..., Any] = lift.pack(inner, (True,), (True,), (True,))
        return packed

    return decorator_lift_transform(transform, called)(module, args, kwargs)


def _is_module(x: Any) -> bool:
    return isinstance(x, nn.Module | nn.Variable)


def _containers(args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments in which a method may change something, by their places."""
    named = {**{str(number): x for number, x in enumerate(args)}, **kwargs}
    return {name: x for name, x in named.items() if type(x) in (list, dict, tuple)}


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
        cls,
        module: nn.Module,
        layers: Layers,
        core: Any,
        scope_fn: Any,
        repack_fn: Any,
        *given: Any,
    ) -> "_Trace":
        """Traces a method, see `_lifted`, of (groups of variables, keys, arguments).

        It returns its result, and the variables that it has written.
        """
        groups, keys, inputs = given
        paths = _scope_paths(scope_fn, groups, keys)

        def trace(numbers: bool) -> "_Trace":
            tree, arrays = Tree.of(given, traces_numbers=numbers)
            names = _names(tree, given, paths)

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


def _called(method: Any, module: nn.Module, args: Any, kwargs: Any, wrapped: nn.Module) -> Any:
    """A call of a method, with quantized matmuls. Writes their new states.

    Args:
      wrapped: The module with the state: this one, or one around it.
    """
    args, kwargs = _by_position(method, module, args, kwargs)
    variables = {name: wrapped.variables.get(name, {}) for name in OURS}
    root = tuple(wrapped.path)
    is_ours, measured = step_of("linen")
    zeros: Any = {}
    if measured is not None:
        around = around_of(wrapped, params_of(measured.model))
        zeros = measured.zeros_in("/".join(around))
    planted = planted_with(planted_in(variables, root), zeros)
    moves = wrapped.is_mutable_collection(COLLECTION) and not is_ours
    options: dict[str, Any] = {
        "moves": moves,
        "observes": not is_ours,
        "rng": _random_words(wrapped),
        "tap": None if measured is None else measured.tap,
    }

    def run(core: Any, scope_fn: Any, repack_fn: Any, *given: Any) -> Any:
        layers = Layers.within(wrapped) if module is not wrapped else Layers()
        traced, program, arrays = _Trace.of(module, layers, core, scope_fn, repack_fn, *given)
        if program.is_as_written:
            raise NoMatmulsError
        outs, new = traced.quantizing(**options).run(program, arrays, planted)
        result, _ = program.static.whole(outs)
        codes = program.codes(arrays)
        _, written = program.static.whole([codes.get(n, x) for n, x in enumerate(outs)])
        return (*result, new), written

    with _explaining_names():
        out, changed, new = _lifted(module, method, args, kwargs, run)
    live = _containers(args, kwargs)
    for name, x in changed.items():
        write_back(live[name], x)
    if moves:
        for name, part in with_states(variables[COLLECTION], root, new).items():
            wrapped.put_variable(COLLECTION, name, part)
    return out


def made(method: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """A call of a method in `init`: nothing is quantized.

    Methods that it calls start no states, which are those of the whole.
    """
    is_plain = getattr(type(module), "qtoolkit_cache", None) is None
    noting = (
        contextlib.nullcontext() if is_plain else Layers().noting()
    )  # attention makes its cache
    with in_module("/".join(module.path), is_root=True), noting:
        return method(module, *args, **kwargs)


def keeps_state(rules: Rules[Recipe]) -> bool:
    return any(needs_state(recipe) for recipe in values_of_rules(rules))


@contextlib.contextmanager
def starting(method: Any, module: nn.Module) -> Iterator[None]:
    """Says that a method has no first states if it needs numbers."""
    try:
        yield
    except NEEDS_NUMBERS as error:
        what = f"{type(module).__name__}.{method.__name__} needs the numbers of an array"
        if not is_step_by_step():
            raise needs_numbers(f"{what} in init", error) from error
        warn(f"{what}: its matmuls have no state, so delayed scales are current ones")


def start_states(method: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
    """Gives the matmuls of a method their first states, in `init`, after its parameters."""
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
        found.append(_Trace.of(module, Layers(), core, scope_fn, repack_fn, groups, *inputs))
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
