"""How the command ends after a signal."""

import re
import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_skips_the_end_of_the_interpreter(start, sent):
    # There XLA's client is destroyed, also under a compilation that the signal made JAX abandon.
    script = f"""
import atexit, os
from qtoolkit.cli._errors import one_line_errors
atexit.register(print, "teardown")
with one_line_errors("nothing was changed"):
    try:
        print("said before", end="")
        os.kill(os.getpid(), {int(sent)})
    finally:
        print(", cleaned up", end="")
"""
    process = start(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + sent
    assert stdout == "said before, cleaned up"
    assert re.fullmatch(r"qtoolkit: \w+; nothing was changed\n", stderr)
