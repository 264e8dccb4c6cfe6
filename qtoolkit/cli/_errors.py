"""How a failure reaches the user: one line and an exit code."""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NoReturn, TextIO

import typer

from qtoolkit.checkpoints import CheckpointError
from qtoolkit.checkpoints.internal import WHOLE, MisuseError


@contextlib.contextmanager
def one_line_errors(interrupted: str) -> Iterator[None]:
    """Turns expected failures into `qtoolkit: <message>` on stderr and exit code 1, misuse 2.

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
        except KeyboardInterrupt as error:
            _leave(_ended("interrupted", interrupted, error), 130)
        except _TerminatedError as error:
            _leave(_ended("terminated", interrupted, error), 143)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Makes errors in this context say that writing to standard output failed."""
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


def note(message: str) -> None:
    """Prints a line on stderr. Where that is full, nothing more is printed, and nothing fails."""
    try:
        typer.echo(printable(message), err=True)
    except OSError:
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Discards everything that is printed to `stream` from now on, and what is in its buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _with_notes(message: str, error: BaseException) -> str:
    """The message and what `add_note` has added to an exception, such as what it left."""
    return "; ".join((message, *getattr(error, "__notes__", ())))


def _ended(word: str, outcome: str, error: BaseException) -> str:
    """The message after a signal: `outcome`, or a note that says that the result is complete."""
    is_whole = any(note.endswith(WHOLE) for note in getattr(error, "__notes__", ()))
    return _with_notes(word if is_whole else f"{word}; {outcome}", error)


class _TerminatedError(BaseException):
    """A termination signal, as an exception."""


_RAISED: dict[int, type[BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: _TerminatedError,
    signal.SIGHUP: _TerminatedError,  # the terminal was closed
}


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Makes Ctrl-C and termination signals raise where that is safe: see `_raise_or_wait`."""
    # A shell starts background jobs with SIGINT ignored.
    numbers = [n for n in _RAISED if signal.getsignal(n) is not signal.SIG_IGN]
    previous_handlers = [signal.signal(number, _raise_or_wait) for number in numbers]
    previous_hook, sys.unraisablehook = sys.unraisablehook, _signal_again
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
        for number, handler in zip(numbers, previous_handlers, strict=True):
            signal.signal(number, handler)


def _raise_or_wait(number: int, frame: FrameType | None) -> None:
    """The signal handler: raises, but during an import it sends the signal again later.

    An exception while jaxlib is being loaded would abort or crash the process.
    """
    if _is_within(frame, _is_import):
        _send_later(number, _is_import)
    else:
        raise _RAISED[number]


def _is_import(code: CodeType) -> bool:
    return code.co_filename == "<frozen importlib._bootstrap>"


def _is_hook(code: CodeType) -> bool:
    return code is _signal_again.__code__


def _is_within(frame: FrameType | None, found: Callable[[CodeType], bool]) -> bool:
    return any(found(outer.f_code) for outer, _ in traceback.walk_stack(frame))


def _signal_again(lost: Any) -> None:
    """A `sys.unraisablehook` that sends a signal again if Python has dropped its exception.

    Python drops exceptions that are raised in a `__del__` or in a callback of the garbage
    collector. JAX has such a callback, and a Ctrl-C during it did not stop the demo.
    """
    number = next((n for n, kind in _RAISED.items() if kind is lost.exc_type), None)
    if number is None:
        sys.__unraisablehook__(lost)
    else:
        _send_later(number, _is_hook)  # what is raised within the hook is dropped too, for good


def _send_later(number: int, busy: Callable[[CodeType], bool]) -> None:
    """Sends a signal when the main thread is no longer within code that is `busy`."""
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        while _is_within(sys._current_frames()[main], busy):
            time.sleep(0.001)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def failure(message: str, code: int) -> typer.Exit:
    """Prints `message` in one line and returns an exception to raise, which exits with `code`."""
    _say(message)
    return typer.Exit(code)


def os_failure(error: OSError) -> typer.Exit:
    """`failure` of an error of the system, with the file that it names."""
    return failure(_with_notes(_os_message(error), error), 1)


def _say(message: str) -> None:
    note(f"qtoolkit: {' '.join(message.splitlines())}")


def _leave(message: str, code: int) -> NoReturn:
    # Exit without Python's clean-up. A compilation that was interrupted goes on in a thread of XLA;
    # at a normal exit XLA's client would be destroyed meanwhile: a segmentation fault (jax 0.10).
    with contextlib.suppress(OSError):  # whoever read our output may have been interrupted first
        _say(message)
        sys.stdout.flush()
    os._exit(code)


def _os_message(error: OSError) -> str:
    where = "" if error.filename is None else f"{error.filename or repr('')}: "
    if not where and error.errno == errno.ENOSPC:  # errors of files have their names
        where = "standard output: "
    reason = error.strerror or str(error)
    hint = _HINTS.get(error.errno or 0, "")
    return f"{where}{reason}{hint and '; ' + hint}"


_HINTS = {
    errno.ENOSPC: "make room or choose another disk",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "check its permissions",
    errno.EEXIST: "choose another name",
    errno.ELOOP: "its links lead in a circle: remove them, or give another name",
}
