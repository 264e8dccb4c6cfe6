"""Checks an error by its structure: where it is, what was got, what is expected or what to do."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# "expected X", or what to do after a semicolon, or a rule of the kind "X needs Y".
_EXPECTED = re.compile(
    "expect|; |did you mean|need|must|not |no |only|one of|use |see | but |without|beyond", re.I
)


@contextlib.contextmanager
def _refused(kind: Any, got: str) -> Iterator[Any]:
    with pytest.raises(kind, match=got) as error:
        yield error
    message = str(error.value)
    assert _EXPECTED.search(message), f"does not say what is expected: {message}"


def got(x: Any) -> str:
    """How messages name a wrong argument: a pattern for "dtype int32" or "type list"."""
    is_array = hasattr(x, "dtype") and not isinstance(x, type)
    return re.escape(f"dtype {x.dtype}" if is_array else f"type {type(x).__name__}")


def refused(
    kind: type[Exception] | tuple[type[Exception], ...],
    got: str,
    function: Callable[..., Any] | None = None,
    /,
    *arguments: Any,
    **options: Any,
) -> Any:
    """`pytest.raises` of an error that says what is expected. `got`: where and what, a pattern."""
    if function is None:
        return _refused(kind, got)
    with _refused(kind, got):
        return function(*arguments, **options)
