"""The command `qtoolkit`, also `python -m qtoolkit`. Interrupts end it with one line."""

import os
import signal
import sys


def main() -> None:
    """Runs the command; exits with 0, with 1 after a failure, with 2 after misuse."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, _leave)
    _open_closed_streams()
    from qtoolkit.cli import main as run

    try:
        run()
    finally:  # Python's exit takes a while, during which "nothing was written" would be false
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def _open_closed_streams() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed, as by 2>&-: without this a checkpoint would get this number
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _leave(number: int, _: object) -> None:
    # Not by an exception: raised while NumPy's or JAX's libraries load, it crashes them or becomes
    # an ImportError, and libraries that are half loaded must not run their exit handlers.
    word = "interrupted" if number == signal.SIGINT else "terminated"
    try:
        os.write(2, f"qtoolkit: {word}; nothing was written\n".encode())
    finally:
        os._exit(130 if number == signal.SIGINT else 143)


if __name__ == "__main__":
    main()
