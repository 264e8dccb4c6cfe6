"""Calls of modules while a program is traced, and the training step in which it runs."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import take_current_trace

from qtoolkit.products._lines import warn
from qtoolkit.products._matmul import Key
from qtoolkit.products._program import CALL, SCOPE
from qtoolkit.products._taps import Tap

# Of the function that is traced to a program: the numbers of its calls of the outermost module, or
# None inside of such a call. Unset if none is traced.
_tracing: contextvars.ContextVar[Iterator[int] | None] = contextvars.ContextVar("tracing")


@contextlib.contextmanager
def tracing_function() -> Iterator[None]:
    """In this context a function that calls modules is traced to a program."""
    token = _tracing.set(itertools.count())
    try:
        yield
    finally:
        _tracing.reset(token)


def is_in_program() -> bool:
    return _tracing.get(0) != 0


@contextlib.contextmanager
def in_module(path: str, *, is_root: bool = False) -> Iterator[None]:
    """In this context operations belong to the module of this path.

    Args:
      is_root: Whether its method is traced to a program.
    """
    numbers = itertools.count() if is_root else _tracing.get(None)
    if numbers is None:
        with jax.named_scope(SCOPE + path):
            yield
        return
    token = _tracing.set(None)
    try:
        with jax.named_scope(f"{CALL}{next(numbers)}:{path}"):
            yield
    finally:
        _tracing.reset(token)


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredStep:
    """What a training step measures, see `Tap`.

    Attributes:
      zeros: For each matmul of the loss, by its key there.
      model: What the loss is given: the loss may call parts of it.
    """

    tap: Tap
    zeros: Mapping[Key, Any]
    model: Any

    def zeros_in(self, around: str) -> dict[Key, Any]:
        """The zeros of a part of the model, by the keys of its own matmuls.

        Args:
          around: The path of the part.
        """
        start = f"{around}/" if around else ""
        inner = ((f"{path}/", name, x) for (path, name), x in self.zeros.items())
        return {
            Key(path.removeprefix(start).removesuffix("/"), name): x
            for path, name, x in inner
            if path.startswith(start)
        }


# The package whose `value_and_grad` runs, and what it measures. It is part of the key by which
# `jax.jit` finds a trace: a matmul in ours tells its magnitudes as the gradient of a probe.
# Its last part is new for each program that asks for traces of its own.
_step = jax.make_user_context(None)


def training_step(package: str, measured: MeasuredStep | None = None) -> Any:
    """In this context `value_and_grad` of a package, "nnx" or "linen", differentiates."""
    return _step((package, measured, None))


def own_traces() -> Any:
    """In this context JAX and Flax do not reuse traces of functions from before.

    In those, other modules run, and nobody would know which these are.
    """
    package, measured, _ = _step.value or ("", None, None)
    return _step((package, measured, object()))


def step_of(package: str) -> tuple[bool, MeasuredStep | None]:
    """Whether the package's `value_and_grad` runs, and what it measures."""
    running, measured, _ = _step.value or ("", None, None)
    return running == package, measured if running == package else None


with jax.core.eval_context(), take_current_trace() as _trace:
    _EAGER: Any = type(_trace)


def is_eager(tree: Any) -> bool:
    """Whether nothing is traced: neither now, nor one of these arrays."""
    with take_current_trace() as trace:
        is_traced = not isinstance(trace, _EAGER)
    return not is_traced and not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


class NoMatmulsError(Exception):
    """A method computes no matmul: it runs as it is."""


class RunsLaterError(TypeError):
    """A method returns code that runs later."""


_MOST = 4096  # calls whose answer is kept


def remembering_no_matmuls(run: Callable[..., Any]) -> Callable[..., Any]:
    """A jitted function of a call, which hashes, and arrays: each call without matmuls is traced
    once for types of arrays, and raises `NoMatmulsError` from then on.
    """
    # An empty batch has no matmul, nor may a method that asks for the rank of its argument.
    without: dict[Any, set[Any]] = {}

    @functools.wraps(run)
    def remembered(call: Any, *arrays: Any) -> Any:
        if call in without and _types_of(arrays) in without[call]:
            raise NoMatmulsError
        try:
            return run(call, *arrays)
        except NoMatmulsError:
            if len(without) >= _MOST or len(without.get(call, ())) >= _MOST:
                without.clear()
            without.setdefault(call, set()).add(_types_of(arrays))
            raise

    return remembered


def _types_of(arrays: Any) -> tuple[Any, ...]:
    return tuple(map(jax.typeof, jax.tree.leaves(arrays)))


def is_step_by_step() -> bool:
    """Whether somebody debugs under `jax.disable_jit`: then a method that cannot be traced runs."""
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def hashes(call: Any) -> bool:
    """Whether `jax.jit` can know a call again: not if its model has a list as an attribute, say."""
    try:
        hash(call)
    except TypeError:
        return False
    return True


def runs_step_by_step(what: str, has_own_kernels: bool) -> None:
    """Warns where a method that cannot be traced runs as it is, the modules in it as programs."""
    if has_own_kernels:
        warn(
            f"{what}: it runs step by step, and matmuls that it computes itself are not quantized, "
            "only those of the modules that it calls; move them into such a module"
        )


def needs_numbers(what: str, error: Exception) -> TypeError:
    """The error for a method that cannot be traced.

    Args:
      what: Says which one, and where numbers are missing.
      error: That of JAX.
    """
    line = str(error).strip().split("\n")[0]
    return TypeError(
        f"wrap: {what}: {line} Expected a method that JAX can trace; write jnp.where or "
        "jax.lax.cond in place of an if, and jax.debug.print in place of print; to debug it, call "
        "it under jax.disable_jit()"
    )


_LATER = ("generator", "coroutine", "async_generator")


def check_result(method: str, out: Any, is_module: Callable[[Any], bool]) -> None:
    """Raises if a method, "Model.__call__", returns code that runs later: a generator, say, or a
    function that closes over arrays or modules.
    """
    kind = type(out).__name__
    if kind not in _LATER:
        leaves = jax.tree.leaves(out, is_leaf=is_module)
        kind = "function" if any(_computes_later(x, is_module) for x in leaves) else ""
    if not kind:
        return
    getattr(out, "close", lambda: None)()  # else Python warns that it never ran
    raise RunsLaterError(
        f"wrap: {method} returns a {kind}, whose code runs later, expected arrays: its matmuls "
        "would not be quantized; return a list, or let an unwrapped module yield what wrapped "
        "ones return"
    )


@contextlib.contextmanager
def refusing_kept_arrays(method: str, objects: Iterable[Any]) -> Iterator[None]:
    """Raises if a method, while it is traced, puts an array into an object: it has no number."""
    held = [x for x in objects if hasattr(x, "__dict__") and not callable(x)]
    before = [_values_of(x) for x in held]
    yield
    for x, known in zip(held, before, strict=True):
        new = (y for y in _values_of(x) if not any(y is one for one in known))
        if any(isinstance(y, jax.core.Tracer) for y in new):
            raise TypeError(
                f"wrap: {method} keeps an array in an object of {type(x).__name__}, which gets no "
                "numbers because the call is traced, as under jax.jit; expected arrays that are "
                "returned; return them, append them to a list that is an argument, or write "
                'self.sow("intermediates", name, x)'
            )


def _values_of(x: Any) -> list[Any]:
    """The attributes of an object, and what is in lists and dictionaries among them."""
    values = list(vars(x).values())
    lists = (list(y.values()) if isinstance(y, dict) else y for y in values)
    return [*values, *(one for y in lists if isinstance(y, list) for one in y)]


def _computes_later(x: Any, is_module: Callable[[Any], bool]) -> bool:
    """Whether it is a function of a module, or one that closes over arrays or modules."""
    if not callable(x) or is_module(x):
        return False
    owner = getattr(x, "__self__", None)
    cells = (cell.cell_contents for cell in getattr(x, "__closure__", None) or ())
    partial = (*getattr(x, "args", ()), *getattr(x, "keywords", {}).values())
    held = (owner, *cells, *(partial if isinstance(x, functools.partial) else ()))
    return any(is_module(one) or isinstance(one, jax.core.Tracer) for one in held)
