"""Values that hold while a `with` block runs."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def held(variable: contextvars.ContextVar[Value], value: Value) -> Iterator[None]:
    """In this context `variable` has another value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
