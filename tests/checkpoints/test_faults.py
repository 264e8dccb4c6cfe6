"""Conversions that are killed, interrupted, run twice, or meet full disks and failing reads."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
from refused import refused
from stored import stored

from qtoolkit.checkpoints import CheckpointError, convert, save
from qtoolkit.checkpoints.internal import in_data_order, write_safetensors

TARGET = "dst.safetensors"
CONVERT = [sys.executable, "-m", "qtoolkit", "convert"]


def temporaries(folder):
    return [name for name in os.listdir(folder) if "qtoolkit-partial" in name]


@pytest.mark.quick
@pytest.mark.parametrize("ended", [True, False])
def test_of_two_writers_of_a_file_one_fails(tmp_path, ended):
    """They have one temporary name and no lock: the one that began first finds its file gone."""
    outputs = in_data_order([("x", "U8", (4,))])

    def second():
        yield "x", b"5678"
        if not ended:
            raise OSError(errno.EIO, "the second fails")

    def first():
        yield "x", b"1234"
        with contextlib.nullcontext() if ended else pytest.raises(OSError, match="the second"):
            write_safetensors(tmp_path / TARGET, outputs, second(), overwrite=True)

    with refused(CheckpointError, r"dst\.safetensors: another conversion is writ"):
        write_safetensors(tmp_path / TARGET, outputs, first(), overwrite=True)
    assert os.listdir(tmp_path) == ([TARGET] if ended else [])
    assert not ended or stored(tmp_path / TARGET)["x"].tobytes() == b"5678"


@pytest.mark.quick
def test_what_a_killed_run_left_is_overwritten(tmp_path):
    left = tmp_path / f".{TARGET}.qtoolkit-partial"
    left.write_bytes(b"x" * 10**6)
    save(tmp_path / TARGET, {"y": np.zeros(3)})
    assert os.listdir(tmp_path) == [TARGET]
    assert os.path.getsize(tmp_path / TARGET) < 1000


def test_names_of_255_bytes(tmp_path):
    name = "n" * 255
    save(tmp_path / name, {"y": np.zeros(3)})
    assert os.listdir(tmp_path) == [name]


def test_a_failed_read_in_a_thread_names_the_source(tmp_path, monkeypatch):
    save(tmp_path / "src", {f"{i}.weight": np.ones((64, 64), np.float32) for i in range(3)})
    preadv, count = os.preadv, 0

    def fail(*arguments):
        nonlocal count
        count += 1
        if count > 3:  # after those of the header
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        convert(tmp_path / "src", tmp_path / TARGET)
    assert caught.value.filename == str(tmp_path / "src")
    assert os.listdir(tmp_path) == ["src"]


def test_the_bytes_are_the_same_whatever_the_number_of_threads(tmp_path):
    x = np.random.default_rng(0).normal(size=(3000, 1024)).astype(ml_dtypes.bfloat16)
    save(tmp_path / "src", {"a.weight": x, "b/kernel": x[:7]})
    files, reports = [], []
    for workers in (1, 2, 5):
        report = convert(tmp_path / "src", tmp_path / TARGET, workers=workers, overwrite=True)
        files.append((tmp_path / TARGET).read_bytes())
        reports.append(report.tensors)
    assert len(set(files)) == 1
    assert reports[0] == reports[1] == reports[2]


@pytest.mark.parametrize("workers", [0, 65, True, "2"])
def test_workers_out_of_range(tmp_path, workers):
    save(tmp_path / "src", {"a.weight": np.ones((2, 2), np.float32)})
    refused(ValueError, r"workers=", convert, tmp_path / "src", tmp_path / TARGET, workers=workers)
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize("memory", ["359MiB", 0, "much"])
def test_memory_out_of_range(tmp_path, memory):
    save(tmp_path / "src", {"a.weight": np.ones((2, 2), np.float32)})
    with refused(ValueError, r"max_memory="):
        convert(tmp_path / "src", tmp_path / TARGET, max_memory=memory)
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.cpu  # the libraries for a GPU alone take more
def test_memory_stays_below_its_limit(tmp_path):
    """Of a process that converts 128 MiB; 16 workers would be given 660, the limit allows 3."""
    x = np.random.default_rng(0).normal(size=(4096, 4096)).astype(ml_dtypes.bfloat16)
    save(tmp_path / "src", {f"{i}.weight": x for i in range(4)})
    limit = 400
    program = (
        "import pathlib, re, sys\n"
        "from qtoolkit.checkpoints import convert\n"
        f"convert(sys.argv[1], sys.argv[2], workers=16, max_memory='{limit}MiB')\n"
        # Not getrusage, which counts what this process had before it became that program.
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "src"), str(tmp_path / TARGET)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < limit * 2**10  # KiB


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_killed_at_any_moment_a_rerun_finishes_the_work(tmp_path, kills):
    x = np.random.default_rng(0).normal(size=(2048, 2048)).astype(ml_dtypes.bfloat16)
    save(tmp_path / "src", {f"{i}.weight": x for i in range(4)})
    folder = tmp_path / "out"
    folder.mkdir()
    command = [*CONVERT, str(tmp_path / "src"), str(folder / TARGET), "-q"]
    start = time.monotonic()
    subprocess.run(command, check=True)
    seconds = time.monotonic() - start
    expected = (folder / TARGET).read_bytes()
    (folder / TARGET).unlink()
    rng = random.Random(0)
    for _ in range(kills):
        process = subprocess.Popen(command)
        time.sleep(seconds * rng.uniform(0.3, 1))
        process.kill()
        process.wait()
        # Either nothing is there under the name, or all of it.
        if (folder / TARGET).exists():
            assert (folder / TARGET).read_bytes() == expected
            (folder / TARGET).unlink()
        assert len(temporaries(folder)) <= 1
    subprocess.run(command, check=True)
    assert os.listdir(folder) == [TARGET]
    assert (folder / TARGET).read_bytes() == expected


@pytest.mark.parametrize(
    ("sent", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 143, "terminated"),
    ],
)
def test_a_signal_while_the_command_loads_is_one_line(sent, code, word):
    """It arrives in the first of the imports that take long; an exception would crash the last."""
    program = (
        "import os, signal, sys\n"
        # A shell starts background jobs, and so this one, with SIGINT ignored; nohup with SIGHUP.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from qtoolkit.__main__ import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            try:\n"
        f"                os.kill(os.getpid(), {int(sent)})\n"
        "            except BaseException:\n"
        "                os.abort()\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == f"qtoolkit: {word}; nothing was written\n"


def test_a_signal_after_the_last_rename(tmp_path):
    """While what was replaced is removed."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    save(source / "model.safetensors", {"w.weight": np.ones((64, 64), np.float32)})
    convert(source, target, layout="plain", format="e5m2")
    program = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from qtoolkit.cli import main\n"
        "import shutil\n"
        "rmtree = shutil.rmtree\n"
        "def interrupted(path, **options):\n"
        "    if os.path.isdir(f'{path}/old'):\n"
        "        shutil.rmtree = rmtree\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    rmtree(path, **options)\n"
        "shutil.rmtree = interrupted\n"
        "main()\n"
    )
    options = [str(source), str(target), "--layout", "plain", "--overwrite"]
    done = subprocess.run(
        [sys.executable, "-c", program, "convert", *options], capture_output=True, text=True
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == f"qtoolkit: interrupted; {target} is written and whole"
    dtypes = {array.dtype.name for array in stored(target / "model.safetensors").values()}
    assert "float8_e4m3fn" in dtypes


def test_little_is_loaded_before_interrupts_are_caught():
    program = (
        "import sys; before = set(sys.modules); from qtoolkit.__main__ import main; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    own = {"qtoolkit", "qtoolkit.__main__", "qtoolkit._names", "qtoolkit._version"}
    assert set(done.stdout.split()) - own <= {
        *("importlib", "importlib._bootstrap", "importlib._bootstrap_external", "warnings"),
        *("signal", "enum", "types", "functools", "reprlib"),
        *("operator", "_operator", "keyword", "itertools"),
        *("collections", "_collections", "_functools", "collections.abc"),
    }
