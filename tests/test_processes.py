"""What `conftest.py` promises of the processes that tests start."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = "import time; print('ready', flush=True); time.sleep(600)"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.quick
def test_a_child_is_interruptible_if_its_parent_is_not(start):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start([sys.executable, "-c", CHILD], **PIPES)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].rstrip().endswith("KeyboardInterrupt")


SUITE = f"""
import subprocess, sys

CHILD = [sys.executable, "-c", {CHILD!r}]
PARENT = [sys.executable, "-c", f"import subprocess; subprocess.run({{CHILD!r}})"]

def test_grandchildren_are_killed(start):
    process = start(PARENT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\\n"

def test_what_runs_on_is_found():
    global child
    child = subprocess.Popen(CHILD)

def test_the_end():
    child.kill()
    child.wait()
"""


@pytest.mark.quick
def test_what_a_test_leaves_is_killed_or_found(tmp_path, start):
    (tmp_path / "tests").mkdir()
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_leaves.py").write_text(SUITE)
    # Uncaptured, all of them write to our pipe: it ends when the last of them has ended.
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "--rootdir", "."]
    stdout, stderr = start(command, cwd=tmp_path, **PIPES).communicate(timeout=120)
    errors = re.findall(r"ERROR at teardown of (\w+)", stdout)
    assert errors == ["test_what_runs_on_is_found"], stdout + stderr
    assert "a child process is left: running" in stdout
    assert "3 passed, 1 error" in stdout
