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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen.transforms import decorator_lift_transform

from qtoolkit.formats import Rules
from qtoolkit.linen._function import (
    NO_RULES,
    Bound,
    Layers,
    Names,
    Tree,
    check_dtypes,
    planted_with,
    rules_of,
    with_numbers,
)
from qtoolkit.linen._state import (
    COLLECTION,
    SCALES,
    check_started,
    has_nan,
    planted_in,
    with_states,
)
from qtoolkit.products import Recipe
from qtoolkit.products.internal import (
    NEEDS_NUMBERS,
    Program,
    Quantizing,
    StaticResult,
    Traced,
    in_module,
    is_eager,
    is_in_program,
    matching,
    needs_state,
    started,
    step_of,
    unstarted,
)

_OURS = (COLLECTION, SCALES)


class NoMatmulsError(Exception):
    """The method computes no matmul: it runs as it is."""


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


def _recipes(rules: Rules[Recipe]) -> list[Recipe]:
    values = [*(value for _, value in rules.rules), rules.default]
    return [value for value in values if value is not None]


# A name that no module has: with `capture_intermediates` Flax stores what "__call__" returns.
_CALLED = "qtoolkit_called"


def _lifted(module: nn.Module, method: Any, args: Any, kwargs: Any, run: Any, outs: Any) -> Any:
    """`run`, a function of a method as a function of its variables, keys and arguments.

    Args:
      run: Takes (scope_fn, repack_fn, core, groups of variables, keys, arguments), see `lift.pack`,
        and returns a result and the variables that the method has written.
      outs: The filters of these variables.
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
            return run(scope_fn, repack_fn, core, groups, keys, arguments)

        packed: Callable[..., Any] = lift.pack(inner, (True,), outs, (True,))
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


def _traced(
    module: nn.Module, run: Callable[[Any, Any, Any], Any], given: Any, names_of: Any, numbers: bool
) -> tuple[Traced, Layers, list[Any]]:
    tree, arrays = Tree.of(given, traces_numbers=numbers)
    layers = Layers()

    def pure(arrays: list[Any]) -> tuple[list[Any], Tree]:
        with in_module("/".join(module.path), is_root=True), layers.noting():
            return Tree.of_results(run(*tree.whole(arrays)))

    names = names_of(tree)
    return Traced(pure, NO_RULES, layers.modules, names), layers, arrays


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

    def run(scope_fn: Any, repack_fn: Any, core: Any, groups: Any, keys: Any, inputs: Any) -> Any:
        given, paths = (groups, keys, inputs), _scope_paths(scope_fn, groups, keys)

        def result(groups: Any, keys: Any, inputs: Any) -> Any:
            scopes = scope_fn(groups, keys)
            out = core(scopes, *inputs)
            _check_result(method, module, out)
            return out, repack_fn(scopes)

        def trace(numbers: bool) -> Any:
            names_of = lambda tree: _names(tree, given, paths)  # noqa: E731
            traced, layers, arrays = _traced(module, result, given, names_of, numbers)
            try:
                program = traced.program(arrays)
            finally:  # Flax cannot multiply some of the dtypes
                check_dtypes(arrays, traced.parameters, layers)
            return traced, program, arrays

        traced, program, arrays = with_numbers(trace, inputs)
        if not program.matmuls:
            raise NoMatmulsError
        outs, new = traced.quantizing(**options).run(program, arrays, planted)
        out, written = program.static.whole(outs)
        return (out, new), written

    with _explaining_names():
        out, new = _lifted(module, method, args, kwargs, run, (True,))
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
    if not any(needs_state(recipe) for recipe in _recipes(rules)):
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
    found: list[Any] = []

    def run(scope_fn: Any, repack_fn: Any, core: Any, groups: Any, keys: Any, inputs: Any) -> Any:
        groups = tuple(
            tuple({n: x for n, x in scope.items() if n == "params"} for scope in group)
            for group in groups
        )
        given, paths = (groups, keys, inputs), _scope_paths(scope_fn, groups, keys)

        def result(groups: Any, keys: Any, inputs: Any) -> Any:
            return core(scope_fn(groups, keys), *inputs)

        def traced(numbers: bool) -> Any:
            names_of = lambda tree: _names(tree, given, paths)  # noqa: E731
            traced, _, arrays = _traced(module, result, given, names_of, numbers)
            return traced.program(arrays), traced.quantizing()

        found.append(with_numbers(traced, inputs))
        return None, ()

    _lifted(module, method, args, kwargs, run, ())
    return found[0]


def _random_words(module: nn.Module) -> jax.Array | None:
    """Words of the key that `apply` was given for stochastic rounding."""
    rules = rules_of(module)
    is_stochastic = any(recipe.is_stochastic for recipe in _recipes(rules or NO_RULES))
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


_LATER = ("generator", "coroutine", "async_generator")


def _check_result(method: Any, module: nn.Module, out: Any) -> None:
    if type(out).__name__ in _LATER:
        raise TypeError(
            f"wrap: {type(module).__name__}.{method.__name__} returns a {type(out).__name__}, "
            "whose code runs later, expected arrays: its matmuls would not be quantized; return a "
            "list, or let an unwrapped module yield what wrapped ones return"
        )


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


@dataclasses.dataclass(frozen=True)
class Applied:
    """`apply` of a wrapped module: a static argument of `jax.jit`. Holds no array.

    Attributes:
      apply: Flax's own one.
      method, mutable, capture_intermediates: As for `apply`.
      inputs: The tree of (variables, keys, args, kwargs).
    """

    apply: Callable[..., Any]
    module: nn.Module
    method: Callable[..., Any]
    mutable: Any
    capture_intermediates: Any
    inputs: Tree | None = None

    def __call__(
        self, method: Callable[..., Any], variables: Any, rngs: Any, args: Any, kwargs: Any
    ) -> Any:
        return self.apply(
            self.module,
            variables,
            *args,
            rngs=rngs,
            method=method,
            mutable=self.mutable,
            capture_intermediates=self.capture_intermediates,
            **kwargs,
        )


@functools.partial(jax.jit, static_argnums=0)
def _jitted(call: Applied, arrays: list[Any]) -> Any:
    assert call.inputs is not None
    method = entered(call.method, is_compiled=True)
    outs, tree = Tree.of_results(call(method, *call.inputs.whole(arrays)))
    return outs, StaticResult(tree)


# Calls that compute no matmul: they are not traced a second time.
_without_matmuls: dict[Applied, None] = {}
_MOST = 4096


def applied(
    call: Applied, variables: Any, rngs: Any, args: Any, kwargs: Any, *, is_stable: bool
) -> Any:
    """Calls `apply`, compiled if nothing else is traced or compiled around it.

    Args:
      is_stable: Whether the next call has the same method: not a lambda, which is new each time.
    """
    inputs = variables, rngs, args, kwargs
    # Those who intercept methods want to see each call.
    if is_stable and is_eager(inputs) and not nn.module._global_interceptor_stack:
        try:
            out = with_numbers(functools.partial(_compiled, call, inputs), (args, kwargs))
            _check_scales(call, inputs)
            return out
        except NoMatmulsError:
            return call(call.method, *inputs)
        except NEEDS_NUMBERS as error:
            _explain_numbers(call, error)
    return call(entered(call.method), *inputs)


def _compiled(call: Applied, inputs: Any, numbers: bool) -> Any:
    tree, arrays = Tree.of(inputs, traces_numbers=numbers)
    call = dataclasses.replace(call, inputs=tree)
    try:
        hash(call)
    except TypeError:  # a module with a list or an array among its attributes
        return call(entered(call.method), *inputs)
    if call in _without_matmuls:
        raise NoMatmulsError
    try:
        outs, static = _jitted(call, arrays)
    except NoMatmulsError:
        if len(_without_matmuls) >= _MOST:
            _without_matmuls.clear()
        _without_matmuls[call] = None
        raise
    return static.value.whole(outs)


def _check_scales(call: Applied, inputs: Any) -> None:
    """Raises if a matmul has a learned scale that was not started."""
    variables, *others = inputs
    states = planted_in({SCALES: variables.get(SCALES)}, ())
    if not any(map(has_nan, states.values())):
        return

    def plain(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
        return call(call.method, variables, rngs, args, kwargs)

    bound = Bound.of(plain, variables, others, {})
    matmuls = bound.traced.program(bound.leaves).matmuls
    multiply = bound.traced.quantizing()
    ran = [matmul for matmul in matmuls if multiply.recipe_of(matmul) is not None]
    for key in matching(ran, states).values():
        check_started(key, states[key])


def _explain_numbers(call: Applied, error: Exception) -> None:
    name = f"{type(call.module).__name__}.{call.method.__name__}"
    line = str(error).strip().split("\n")[0]
    raise TypeError(
        f"wrap: {name} needs the numbers of an array, which a wrapped module does not have while "
        f"its call is traced, as under jax.jit: {line} Expected a method that JAX can trace; write "
        "jnp.where or jax.lax.cond in place of an if, and jax.debug.print in place of print"
    ) from error


def static_filter(mutable: Any) -> Any:
    """A filter of collections that hashes."""
    if isinstance(mutable, list | set | Mapping):
        return tuple(mutable)
    if isinstance(mutable, nn.DenyList):
        return nn.DenyList(static_filter(mutable.deny))
    return mutable
