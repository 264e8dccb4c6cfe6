"""Values that hold while a `with` block runs."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Value = TypeVar("Value")


@contextmanager
def held(variable: contextvars.ContextVar[Any], value: Value) -> Iterator[Value]:
    """In this context `variable` has another value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
