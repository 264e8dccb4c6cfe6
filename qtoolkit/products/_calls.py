"""Calls of modules while a program is traced, and the training step in which it runs."""

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
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


NEEDS_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
