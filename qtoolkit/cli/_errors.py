"""How a failure reaches the user: one line and an exit code."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import typer

from qtoolkit.checkpoints import CheckpointError


@contextlib.contextmanager
def one_line_errors(interrupted: str) -> Iterator[None]:
    """Turns expected failures into `qtoolkit: <message>` on stderr and exit code 1.

    Ctrl-C exits with 130 and a termination signal with 143, both after the clean-up that they would
    otherwise skip, and both saying `interrupted`. Bugs keep their traceback.
    """
    with _termination_raises():
        try:
            yield
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read our output has gone; what is left in the buffer must not complain later.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except CheckpointError as error:
            raise _failure(str(error), 1) from error
        except OSError as error:
            raise _failure(_os_message(error), 1) from error
        except KeyboardInterrupt as error:
            raise _failure(f"interrupted; {interrupted}", 130) from error
        except _TerminatedError as error:
            raise _failure(f"terminated; {interrupted}", 143) from error


class _TerminatedError(BaseException):
    """A termination signal, as an exception."""


@contextlib.contextmanager
def _termination_raises() -> Iterator[None]:
    def handler(*_: Any) -> None:
        raise _TerminatedError

    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _failure(message: str, code: int) -> typer.Exit:
    typer.echo(f"qtoolkit: {' '.join(message.splitlines())}", err=True)
    return typer.Exit(code)


def _os_message(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename is not None else ""
    reason = error.strerror or str(error)
    hint = _HINTS.get(error.errno or 0, "")
    return f"{where}{reason}{hint and '; ' + hint}"


_HINTS = {
    errno.ENOSPC: "nothing was written; make room or choose another disk",
    errno.EROFS: "nothing was written; choose a folder that can be written to",
    errno.EACCES: "check its permissions",
}
