"""How a failure reaches the user: one line and an exit code."""

import ast
import contextlib
import errno
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn, TextIO

import typer

from qtoolkit.checkpoints import CheckpointError
from qtoolkit.checkpoints.internal import COMPLETE, MisuseError

# An argument of Python as messages have it, with or without a value: skip=, layout="plain".
_ARGUMENT = re.compile(
    r"(?<![\w/.\\-])(skip|layout|scaling|keep_dtype|channel_axis|input_scales|allow_split|keep_unfitting"
    r"|allow_nonfinite|allow_codes|max_shard_size|overwrite|shard)="
    r"""(True\b|\(\d+, \d+\)|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?=[\s,;:)]|$))"""
)
_HINTS = {
    errno.ENOSPC: "make room or choose another disk",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "check its permissions",
    errno.EEXIST: "choose another name",
}


@contextlib.contextmanager
def one_line_errors(interrupted: str) -> Iterator[None]:
    """Turn expected failures into `qtoolkit: <message>` on stderr and exit code 1, misuse 2.

    Ctrl-C exits with 130 and says `interrupted; <interrupted>`, a termination signal with 143 and
    `terminated; <interrupted>`, each after the clean-up of what it stopped. Bugs keep their
    traceback.
    """
    with _signals_raise():
        try:
            yield
            sys.stdout.flush()
        except BrokenPipeError:
            _silence(sys.stdout)  # the reader of our output has exited, e.g. `| head`
            raise typer.Exit(1) from None
        except CheckpointError as error:
            raise failure(str(error), 2 if isinstance(error, MisuseError) else 1) from error
        except OSError as error:
            raise os_failure(error) from error
        except _Signal as error:
            _leave(error, interrupted)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Make errors in this context say that writing to standard output failed."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence(sys.stdout)
        raise OSError(error.errno, error.strerror, "standard output") from error


def printable(text: str) -> str:
    """A line with control characters, which paths may contain and terminals obey, escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def as_options(message: str) -> str:
    """A message of the Python functions with options for arguments: --skip lm_head."""

    def option(match: re.Match[str]) -> str:
        name = f"--{match[1].replace('_', '-')}"
        if match[2] in ("", "True"):
            return name
        with warnings.catch_warnings(action="ignore"):  # escapes in names of files
            value = ast.literal_eval(match[2])
        text = shlex.quote(value) if isinstance(value, str) else "/".join(map(str, value))
        return f"{name} {text}"

    return _ARGUMENT.sub(option, message)


def note(message: str) -> None:
    """Print a line on stderr. Where that is full, nothing more is printed, and nothing fails."""
    try:
        typer.echo(printable(message), err=True)
    except OSError:
        _silence(sys.stderr)


def failure(message: str, code: int) -> typer.Exit:
    """Print `message` in one line and return an exception to raise, which exits with `code`."""
    note(f"qtoolkit: {' '.join(as_options(message).splitlines())}")
    return typer.Exit(code)


def os_failure(error: OSError) -> typer.Exit:
    """`failure` of an error of the system: its file, its reason, what to do, and its notes."""
    where = "" if error.filename is None else f"{error.filename or repr('')}: "
    if not where and error.errno == errno.ENOSPC:  # errors of files have their names
        where = "standard output: "
    parts = [where + (error.strerror or str(error)), _HINTS.get(error.errno or 0, "")]
    return failure("; ".join(filter(None, (*parts, *_notes(error)))), 1)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _silence(stream: TextIO) -> None:
    """Discard everything that is printed to `stream` from now on, and what is in its buffer."""
    # What the buffer holds is written at exit, then to nowhere and without another error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Signal(KeyboardInterrupt):
    """Ctrl-C, a termination signal, or SIGHUP: the terminal was closed."""


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Make signals raise, so that what they stop cleans up.

    Commands import JAX before: an exception while its libraries are loaded could crash the process,
    and until then `qtoolkit.__main__` ends it at once.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # A shell starts background jobs with SIGINT ignored.
    caught = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]

    def handler(number: int, frame: FrameType | None) -> NoReturn:
        raise _Signal(number)

    previous = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def _leave(error: _Signal, outcome: str) -> NoReturn:
    is_interrupt = error.args[0] == signal.SIGINT
    is_whole = any(note.endswith(COMPLETE) for note in _notes(error))
    parts = ["interrupted" if is_interrupt else "terminated", *([] if is_whole else [outcome])]
    # Exit without Python's clean-up. A compilation that was interrupted goes on in a thread of XLA;
    # at a normal exit XLA's client would be destroyed meanwhile: a segmentation fault (jax 0.10).
    with contextlib.suppress(OSError):  # whoever read our output may have been interrupted first
        failure("; ".join((*parts, *_notes(error))), 1)
        sys.stdout.flush()
    os._exit(130 if is_interrupt else 143)
