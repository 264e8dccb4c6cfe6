"""Processes that run the command: Ctrl-C reaches them, and no test leaves one behind."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(autouse=True)
def _ctrl_c_reaches_children() -> Iterator[None]:
    """A suite started in the background ignores SIGINT, and children inherit that.

    A handler, on the other hand, is not inherited: a child starts with the default again.
    """
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts `qtoolkit ARGUMENTS`, both outputs piped as text; kills what a test leaves running."""
    processes = []

    def started(*arguments, **options) -> subprocess.Popen:
        command = [sys.executable, "-m", "qtoolkit", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, **pipes, **options))
        return processes[-1]

    yield started
    for process in processes:
        process.kill()
        process.communicate()  # waits, and closes the pipes
