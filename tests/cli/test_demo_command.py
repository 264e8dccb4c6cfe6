"""`qtoolkit demo` as a command: its options, its errors, Ctrl-C. What it computes: tests/demo."""

import os
import re
import signal
import subprocess
import sys
import time
import types

import pytest
from typer.testing import CliRunner

from qtoolkit.cli._app import app


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_options_are_passed_on(monkeypatch, tmp_path):
    calls = []
    stub = types.ModuleType("qtoolkit.demo")
    stub.run = lambda **options: calls.append(options)
    monkeypatch.setitem(sys.modules, "qtoolkit.demo", stub)
    assert run().exit_code == 0
    result = run("--steps", 3, "--out", tmp_path, "--seed", 5, "--format", "f8e5m2")
    assert result.exit_code == 0
    assert [{**call, "out": str(call["out"])} for call in calls] == [
        {"steps": 400, "out": "qtoolkit-demo", "seed": 0, "format": "e4m3fn"},
        {"steps": 3, "out": str(tmp_path), "seed": 5, "format": "e5m2"},
    ]
    assert run("--steps", 0).exit_code == 2
    assert run("--seed", 2**31 - 1).exit_code == 0
    assert run("--seed", 2**31).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "file"], "file: File exists"),
        (["--out", "new", "--format", "nf4"], "format nf4: its codes are narrow"),
    ],
)
def test_failures_are_one_line_and_come_before_any_training(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("qtoolkit: ")
    assert message in line
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.sample("1")
@pytest.mark.parametrize("seconds", [1, 3])  # while it loads, while it compiles
def test_ctrl_c_is_one_line(start, tmp_path, seconds):
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "qtoolkit", "demo", "--steps", "100000", "--out", tmp_path]
    process = start(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline().startswith("text of ")
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(r"qtoolkit: interrupted; .* may be incomplete\n", errors)
    assert not list(tmp_path.iterdir())
