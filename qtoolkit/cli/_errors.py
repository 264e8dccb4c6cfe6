"""How a failure reaches the user: one line and an exit code."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import typer

from qtoolkit.checkpoints import CheckpointError


@contextlib.contextmanager
def one_line_errors(interrupted: str) -> Iterator[None]:
    """Turns expected failures into `qtoolkit: <message>` on stderr and exit code 1.

    Ctrl-C exits with 130 and says `interrupted; <interrupted>`, a termination signal with 143 and
    `terminated; <interrupted>`, each after the clean-up of what it stopped. Bugs keep their
    traceback.
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
            raise failure(str(error), 1) from error
        except OSError as error:
            raise failure(_os_message(error), 1) from error
        except KeyboardInterrupt:
            _leave(f"interrupted; {interrupted}", 130)
        except _TerminatedError:
            _leave(f"terminated; {interrupted}", 143)


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


def failure(message: str, code: int) -> typer.Exit:
    """Says `message` in one line. Raise what it returns, which ends the command with `code`."""
    _say(message)
    return typer.Exit(code)


def _say(message: str) -> None:
    typer.echo(f"qtoolkit: {' '.join(message.splitlines())}", err=True)


def _leave(message: str, code: int) -> NoReturn:
    # Not by an exception: a compilation that a signal made JAX abandon goes on in a thread of XLA,
    # and when Python ends, XLA's client is destroyed under it: a segmentation fault (jax 0.10).
    with contextlib.suppress(OSError):  # whoever read our output may have been interrupted first
        _say(message)
        sys.stdout.flush()
    os._exit(code)


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
