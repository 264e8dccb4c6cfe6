"""Cases that differ by one code or one spelling: one test, which names the case that fails."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[..., Any]:
    """As `pytest.mark.parametrize`, in a loop: fixtures are those of all cases."""
    is_one = isinstance(names, str)
    cases = list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **others: Any) -> None:
            for case in cases:
                given = {names: case} if is_one else dict(zip(names, case, strict=True))
                try:
                    test(*args, **others, **given)
                except BaseException as error:
                    error.add_note(f"case: {given}")
                    raise

        signature = inspect.signature(test)
        kept = [p for p in signature.parameters.values() if p.name not in (names, *names)]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
