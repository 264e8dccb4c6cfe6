"""Calls of modules while a program is traced, and the training step in which it runs."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import take_current_trace

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
    """What a training step measures, see `Tap`: zeros for each matmul, by its key."""

    tap: Tap
    zeros: Mapping[Key, Any]


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


_MOST = 4096  # calls whose answer is kept


def remembering_no_matmuls(run: Callable[..., Any]) -> Callable[..., Any]:
    """A jitted function of a call, which hashes, and arrays: each call without matmuls is traced
    once, and raises `NoMatmulsError` from then on.
    """
    without: dict[Any, None] = {}

    @functools.wraps(run)
    def remembered(call: Any, *arrays: Any) -> Any:
        if call in without:
            raise NoMatmulsError
        try:
            return run(call, *arrays)
        except NoMatmulsError:
            if len(without) >= _MOST:
                without.clear()
            without[call] = None
            raise

    return remembered


def hashes(call: Any) -> bool:
    """Whether `jax.jit` can know a call again: not if its model has a list as an attribute, say."""
    try:
        hash(call)
    except TypeError:
        return False
    return True


def needs_numbers(what: str, error: Exception) -> TypeError:
    """The error for a method that cannot be traced.

    Args:
      what: Says which one, and where numbers are missing.
      error: That of JAX.
    """
    line = str(error).strip().split("\n")[0]
    return TypeError(
        f"wrap: {what}: {line} Expected a method that JAX can trace; write jnp.where or "
        "jax.lax.cond in place of an if, and jax.debug.print in place of print"
    )


LATER = ("generator", "coroutine", "async_generator")


def runs_later(method: str, kind: str) -> TypeError:
    """The error for "Model.__call__" that returns a generator, say: its `kind`."""
    return TypeError(
        f"wrap: {method} returns a {kind}, whose code runs later, expected arrays: its matmuls "
        "would not be quantized; return a list, or let an unwrapped module yield what wrapped "
        "ones return"
    )
