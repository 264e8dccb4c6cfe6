"""How the command ends after a signal."""

import re
import signal
import subprocess
import sys

import pytest

from qtoolkit.cli._errors import as_options


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


def test_messages_of_python_name_options_at_the_command():
    for message, printed in {
        "use layout='plain', or skip=": "use --layout plain, or --skip",
        r"write skip='(^|\\.)(q|k)\\.'; or": r"write --skip '(^|\.)(q|k)\.'; or",
        "again: shard=(1, 3)": "again: --shard 1/3",
        "pass overwrite=True to replace it": "pass --overwrite to replace it",
        "with tie_word_embeddings=false": "with tie_word_embeddings=false",
    }.items():
        assert as_options(message) == printed


def test_names_of_files_are_no_arguments():
    for text in ("shard=3/model: No such file", "s3://b/shard=3/x", "layout=plain/x.safetensors"):
        assert as_options(text) == text
    assert as_options("give skip=, layout='plain'") == "give --skip, --layout plain"
