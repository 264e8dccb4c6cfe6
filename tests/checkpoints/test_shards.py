"""Folders converted by many processes, then finalized.

Oracle: one process, whose bytes and report they have to give.
"""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import command
import numpy as np
import pytest
from refused import refused
from stored import stored

import qtoolkit as qt
from qtoolkit.checkpoints import CheckpointError, convert, dequantize_checkpoint, finalize, save
from qtoolkit.checkpoints import _shards as shards_module

PARTS = ".dst.qtoolkit-partial"
SIZE = "40KB"  # two matrices of codes to a file
COMMAND = [sys.executable, "-m", "qtoolkit"]
FILES = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]


def folder(path, seed=0, bad=""):
    path.mkdir()
    rng = np.random.default_rng(seed)
    tensors = {
        f"model.layers.{i}.self_attn.{x}_proj.weight": rng.normal(size=(128, 128)).astype("float32")
        for i in range(2)
        for x in "qkv"
    }
    if bad:
        tensors[bad][0, 0] = np.nan
    save(path / "model.safetensors", tensors | {"norm.weight": np.ones(128, "bfloat16")})
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 128}))
    (path / "tokenizer.json").write_text("{}")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text("{}")
    return path


@pytest.fixture
def source(tmp_path):
    return folder(tmp_path / "src")


def contents(path):
    """Every file below a folder and its bytes."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


def shard(source, target, index, count=2, **options):
    return convert(source, target, max_shard_size=SIZE, shard=(index, count), **options)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (1, {"layout": "modelopt"}),
        # q, k and v share a scale, and lie in files of different shards.
        (2, {"format": "nvfp4"}),
        pytest.param(3, {}, marks=pytest.mark.quick),
        (5, {"format": "e5m2"}),
    ],
)
def test_shards_give_the_bytes_and_the_report_of_one_process(source, tmp_path, count, options):
    one = convert(source, tmp_path / "one", max_shard_size=SIZE, **options)
    expected = contents(tmp_path / "one")
    assert "1_Pooling/config.json" in expected
    for index in reversed(range(count)):
        report = shard(source, tmp_path / "dst", index, count, **options)
        assert (report.shard, report.resumed) == (f"{index}/{count}", ())
        assert not (tmp_path / "dst").exists()
    report = finalize(tmp_path / "dst")
    assert contents(tmp_path / "dst") == expected
    assert dataclasses.replace(report, target=one.target) == one
    assert sorted(os.listdir(tmp_path)) == ["dst", "one", "src"]


DISTRIBUTED = """
import sys
import jax
from jax.experimental import multihost_utils
from qtoolkit import checkpoints

address, index, source, target = sys.argv[1:]
jax.distributed.initialize(address, 2, int(index), initialization_timeout=120)
shard = (jax.process_index(), jax.process_count())
checkpoints.convert(source, target, max_shard_size="40KB", shard=shard)
multihost_utils.sync_global_devices("converted")
if jax.process_index() == 0:
    checkpoints.finalize(target)
jax.distributed.shutdown()
"""


def test_two_processes_of_jax_distributed(source, tmp_path, start):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-c", DISTRIBUTED, address]
    paths = [str(source), str(tmp_path / "dst")]
    started = [
        start([*line, str(i), *paths], stderr=subprocess.PIPE, env=environment) for i in range(2)
    ]
    for process in started:
        assert process.communicate(timeout=300)[1] == b""
        assert process.returncode == 0
    convert(source, tmp_path / "one", max_shard_size=SIZE)
    assert contents(tmp_path / "dst") == contents(tmp_path / "one")


def test_finalizing_loads_neither_jax_nor_the_source(source, tmp_path):
    for index in range(2):
        shard(source, tmp_path / "dst", index)
    shutil.rmtree(source)
    code = (
        "import sys\nfrom qtoolkit.checkpoints import finalize\nfinalize(sys.argv[1])\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "dst"], check=True)
    assert len(stored(tmp_path / "dst" / FILES[0])) == 4


@pytest.mark.quick
def test_a_missing_part_is_named_with_its_shard(source, tmp_path):
    refused(CheckpointError, r"dst: no parts of a conversion", finalize, tmp_path / "dst")
    shard(source, tmp_path / "dst", 0, 3)
    before = contents(tmp_path)
    message = (
        rf"dst: 2 of 3 files are missing: {FILES[1]}, {FILES[2]}; .*shard=\(1, 3\), shard=\(2, 3\)$"
    )
    refused(CheckpointError, message, finalize, tmp_path / "dst")
    assert contents(tmp_path) == before
    shard(source, tmp_path / "dst", 1, 3)
    # One that is cut short counts as missing, and is written again.
    damaged = tmp_path / PARTS / "checkpoint" / FILES[1]
    os.truncate(damaged, 1000)
    shard(source, tmp_path / "dst", 2, 3)
    refused(CheckpointError, rf"1 of 3 files is missing: {FILES[1]};", finalize, tmp_path / "dst")
    assert shard(source, tmp_path / "dst", 1, 3).resumed == ()
    finalize(tmp_path / "dst")
    refused(CheckpointError, r"no parts .*it is finalized already", finalize, tmp_path / "dst")


def other_source(source, tmp_path):
    name = source / "model.safetensors"
    save(name, stored(name) | {"more.weight": np.ones(3, np.float32)}, overwrite=True)
    return {}


def other_tokenizer(source, tmp_path):
    (source / "tokenizer.json").write_text('{"other": 1}')
    return {}


def other_version(source, tmp_path):
    plan = tmp_path / PARTS / "plan.json"
    plan.write_text(plan.read_text().replace(qt.__version__, "9"))
    return {}


DIFFERENT = [
    (lambda *_: {"scaling": "tensor"}, "scaling channel, here tensor"),
    (lambda *_: {"format": "int8"}, "format e4m3fn, here int8"),
    (lambda *_: {"layout": "plain"}, "scaling channel, here tensor"),
    (lambda *_: {"keep_dtype": "float32"}, "other options"),
    (lambda *_: {"max_shard_size": "60KB"}, "files 3, here 2"),
    (other_source, "other source"),
    (other_tokenizer, "other source"),
    (other_version, rf"qtoolkit 9, here {qt.__version__}"),
]


@pytest.mark.parametrize(("change", "difference"), DIFFERENT)
def test_parts_of_another_conversion(source, tmp_path, change, difference):
    shard(source, tmp_path / "dst", 0)
    options = {"max_shard_size": SIZE, **change(source, tmp_path)}
    before = contents(tmp_path / PARTS)
    message = (
        f"dst: files of another conversion are there: {difference}; .*remove them: rm -r .*{PARTS}"
    )
    refused(CheckpointError, message, convert, source, tmp_path / "dst", shard=(1, 2), **options)
    assert contents(tmp_path / PARTS) == before
    # Two shards that began at the same moment have not seen each other's plan.
    plan = (tmp_path / PARTS / "plan.json").read_bytes()
    (tmp_path / PARTS / "plan.json").unlink()
    convert(source, tmp_path / "dst", shard=(1, 2), **options)
    (tmp_path / PARTS / "plan.json").write_bytes(plan)
    with refused(CheckpointError, r"is of another conversion than the others|missing"):
        finalize(tmp_path / "dst")
    shutil.rmtree(tmp_path / PARTS)
    refused(CheckpointError, "no parts of a conversion", finalize, tmp_path / "dst")


def fail(*_, **__):
    raise OSError(28, "no space")


def test_whole_files_are_not_written_again(source, tmp_path, monkeypatch):
    shard(source, tmp_path / "dst", 0)
    paths = [tmp_path / PARTS / "checkpoint" / FILES[i] for i in (0, 2)]
    before = [os.stat(path).st_mtime_ns for path in paths]
    report = shard(source, tmp_path / "dst", 0)
    assert report.resumed == (FILES[0], FILES[2])
    assert [tensor.sqnr_db for tensor in report.quantized]
    # One process alone goes on, and leaves them as they were where it fails.
    with monkeypatch.context() as patched:
        patched.setattr(shards_module, "write_safetensors", fail)
        with pytest.raises(OSError, match="no space"):
            convert(source, tmp_path / "dst", max_shard_size=SIZE)
    assert set(FILES) & {*os.listdir(tmp_path / PARTS / "checkpoint")} == {FILES[0], FILES[2]}
    done = convert(source, tmp_path / "dst", max_shard_size=SIZE)
    assert done.resumed == (FILES[0], FILES[2])
    assert [os.stat(tmp_path / "dst" / path.name).st_mtime_ns for path in paths] == before
    one = convert(source, tmp_path / "one", max_shard_size=SIZE)
    assert contents(tmp_path / "dst") == contents(tmp_path / "one")
    assert dataclasses.replace(done, resumed=(), target=one.target) == one


@pytest.mark.parametrize("place", [-1, -2000, 9])  # of the data, of the header
def test_a_finished_file_whose_bytes_changed_is_written_again(source, tmp_path, place):
    """Of the right size, as a disk may leave it when a machine fails. Oracle: another run."""
    shard(source, tmp_path / "dst", 0)
    path = tmp_path / PARTS / "checkpoint" / FILES[0]
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    report = convert(source, tmp_path / "dst", max_shard_size=SIZE)
    assert report.resumed == (FILES[2],)
    convert(source, tmp_path / "one", max_shard_size=SIZE)
    assert contents(tmp_path / "dst") == contents(tmp_path / "one")


def test_weights_with_nan_are_no_part(tmp_path):
    bad = "model.layers.0.self_attn.k_proj.weight"
    source = folder(tmp_path / "src", bad=bad)
    with refused(CheckpointError, rf"NaN or Inf in weights: {bad} \(1\)"):
        shard(source, tmp_path / "dst", 0, 1)
    assert {name for name in contents(tmp_path / PARTS) if "model-" in name} == {
        path for i in (1, 2) for path in (f"{FILES[i]}.json", f"checkpoint/{FILES[i]}")
    }
    report = shard(source, tmp_path / "dst", 0, 1, allow_nonfinite=True)
    assert (report.nonfinite, report.resumed) == (1, (FILES[1], FILES[2]))
    # They are there now, but not for whom did not allow them.
    refused(CheckpointError, "NaN or Inf in weights", shard, source, tmp_path / "dst", 0, 1)


def test_an_existing_target(source, tmp_path):
    convert(source, tmp_path / "dst")
    before = contents(tmp_path / "dst")
    with refused(CheckpointError, "exists already; pass overwrite=True"):
        shard(source, tmp_path / "dst", 0, 1)
    shard(source, tmp_path / "dst", 0, 1, overwrite=True)
    refused(CheckpointError, "exists already; pass overwrite=True", finalize, tmp_path / "dst")
    assert contents(tmp_path / "dst") == before
    finalize(tmp_path / "dst", overwrite=True)
    assert sorted(os.listdir(tmp_path / "dst")) == [
        *("1_Pooling", "config.json", *FILES, "model.safetensors.index.json", "tokenizer.json")
    ]


def test_what_killed_processes_leave_is_not_in_the_checkpoint(source, tmp_path):
    shard(source, tmp_path / "dst", 0, 1)
    (tmp_path / PARTS / "checkpoint" / "config.json.4711").write_text("{")
    (tmp_path / PARTS / "checkpoint" / f".{FILES[0]}.qtoolkit-partial").write_text("x")
    finalize(tmp_path / "dst")
    assert set(contents(tmp_path / "dst")) == {
        *FILES,
        *("1_Pooling/config.json", "config.json", "model.safetensors.index.json", "tokenizer.json"),
    }


@pytest.mark.parametrize(
    ("shard", "sent"),
    [
        (["--shard", "1/2"], signal.SIGKILL),
        pytest.param([], signal.SIGKILL, marks=pytest.mark.exhaustive),
        pytest.param(["--shard", "1/2"], signal.SIGTERM, marks=pytest.mark.exhaustive),
        pytest.param([], signal.SIGTERM, marks=pytest.mark.exhaustive),
        pytest.param([], signal.SIGINT, marks=pytest.mark.exhaustive),
    ],
)
def test_killed_a_rerun_goes_on(source, tmp_path, start, shard, sent):
    """Killed in the middle: when the first of two files is there."""
    options = ["--max-shard-size", "20KB", "-q", *shard]
    line = [*COMMAND, "convert", str(source), str(tmp_path / "dst"), *options]
    program = (
        "import os, re, signal, sys\n"
        # A shell starts background jobs, and so this one, with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def replace(source, target, replace=os.replace):\n"
        "    replace(source, target)\n"
        "    if re.fullmatch(r'model.*\\.json', os.path.basename(target)):\n"
        f"        os.kill(os.getpid(), {int(sent)})\n"
        "os.replace = replace\n"
        "from qtoolkit.__main__ import main\n"
        "main()\n"
    )
    killed = start([sys.executable, "-c", program, *line[3:]], stderr=subprocess.PIPE, text=True)
    _, error = killed.communicate(timeout=300)
    if sent == signal.SIGKILL:
        assert killed.returncode == -sent
    else:
        word = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[sent]
        assert (killed.returncode, error) == (
            128 + sent,
            f"qtoolkit: {word}; {tmp_path}/dst was not written; 1 of 6 files is whole, and a rerun "
            f"with the same options uses them; else remove them: rm -r {tmp_path}/{PARTS}\n",
        )
    if shard:
        for index in (0, 1):
            report = convert(source, tmp_path / "dst", max_shard_size="20KB", shard=(index, 2))
        assert len(report.files) == 3
        finalize(tmp_path / "dst")
    else:
        report = convert(source, tmp_path / "dst", max_shard_size="20KB")
    assert len(report.resumed) == 1
    convert(source, tmp_path / "one", max_shard_size="20KB")
    assert contents(tmp_path / "dst") == contents(tmp_path / "one")
    assert sorted(os.listdir(tmp_path)) == ["dst", "one", "src"]


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0), (0,), ("0", "2"), (0.0, 1), "0/2", 1])
def test_shards_that_are_none(source, tmp_path, shard):
    refused(ValueError, r"shard=", convert, source, tmp_path / "dst", shard=shard)
    refused(ValueError, r"shard=", dequantize_checkpoint, source, tmp_path / "dst", shard=shard)


def run(*arguments):
    result = command.run(*arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.quick
def test_the_commands(source, tmp_path):
    target = tmp_path / "dst"
    convert_it = ("convert", source, target, "--max-shard-size", SIZE)
    for text in ("2/2", "x", "1", "-1/2", "1/0", "1/2/3"):
        code, _, error = run(*convert_it, "--shard", text)
        assert (code, error) == (
            2,
            f"qtoolkit: --shard: '{text}', expected I/N with I from 0 to N - 1: 0/8, 1/8, ... 7/8"
            "\n",
        )
    code, _, error = run("convert", source / "model.safetensors", target, "--shard", "0/2")
    assert code == 2
    assert error.endswith(
        "model.safetensors: is a file, which becomes one file, and --shard is for the safetensors "
        "files of a folder; omit --shard\n"
    )
    code, output, _ = run(*convert_it, "--shard", "1/2", "--dry-run")
    assert output.splitlines()[-1] == f"  shard      1/2 writes 1 of 3 files: {FILES[1]}"
    code, output, _ = run(*convert_it, "--shard", "3/4")
    assert (code, output.splitlines()) == (
        0,
        [
            f"{target}: shard 3/4: has no file to write, there are more shards than files; a "
            "smaller --max-shard-size makes more of these",
            f"when all shards are done: qtoolkit finalize {target}",
        ],
    )
    code, _, error = run("finalize", target)
    assert (code, error.partition("; ")[0]) == (
        1,
        f"qtoolkit: {target}: 3 of 3 files are missing: {', '.join(FILES)}",
    )
    shutil.rmtree(tmp_path / PARTS)
    assert run(*convert_it, "--shard", "0/1", "--json")[0] == 0
    code, output, _ = run(*convert_it, "--shard", "0/1")
    assert "  resumed    3 files of an earlier run" in output.splitlines()
    code, output, _ = run("finalize", target, "--json")
    assert (code, json.loads(output)["files"][1]) == (0, "config.json")


def test_one_process_does_not_remove_what_shards_have_written(source, tmp_path):
    dst = tmp_path / "dst"
    shard(source, dst, 0)
    with refused(CheckpointError, r"another conversion are there: format .*; .*rm -r"):
        convert(source, dst, format="int8", max_shard_size=SIZE)
    assert (tmp_path / PARTS / "checkpoint" / FILES[0]).is_file()
    convert(source, dst, format="int8", max_shard_size=SIZE, overwrite=True)


def test_a_file_that_the_shard_of_the_first_copies_is_missing(source, tmp_path):
    dst = tmp_path / "dst"
    for index in (0, 1):
        shard(source, dst, index)
    (tmp_path / PARTS / "checkpoint" / "tokenizer.json").unlink()
    refused(
        CheckpointError, rf"1 of 3 files is missing: {FILES[0]}; .*shard=\(0, 2\)$", finalize, dst
    )
    assert len(shard(source, dst, 0).resumed) == 2
    finalize(dst)
    assert (dst / "tokenizer.json").is_file()


def test_a_source_that_changed_is_converted_anew(source, tmp_path):
    dst = tmp_path / "dst"
    shard(source, dst, 0)
    (source / "tokenizer.json").write_text('{"other": 1}')
    refused(CheckpointError, "other source", shard, source, dst, 1)
    shutil.rmtree(tmp_path / PARTS)
    shard(source, dst, 0)
    os.utime(source / "model.safetensors", ns=(2**62, 2**62))  # newer weights
    assert convert(source, dst, max_shard_size=SIZE).resumed == ()


def test_a_former_checkpoint_does_not_come_back(source, tmp_path, monkeypatch):
    """Killed after both renames, before the former content is removed."""
    dst = tmp_path / "dst"
    convert(source, dst)
    rmtree = shutil.rmtree

    def killed(path, **options):
        if str(path).endswith(PARTS) and os.path.isdir(f"{path}/old"):
            raise KeyboardInterrupt
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(source, dst, format="int8", overwrite=True)
    monkeypatch.undo()
    shutil.rmtree(dst)
    convert(source, dst, format="int8")
    convert(source, tmp_path / "alone", format="int8")
    assert contents(dst) == contents(tmp_path / "alone")
    assert sorted(os.listdir(tmp_path)) == ["alone", "dst", "src"]


@pytest.mark.parametrize("options", [{}, {"format": "int8"}])
def test_of_two_runs_at_once_one_fails(source, tmp_path, options):
    """The second runs from begin to end while the first is at its second file."""
    dst, second = tmp_path / "dst", []

    def progress(name, done, total):
        if 2 * done > total and not second:
            second.append(convert(source, dst, max_shard_size=SIZE, **options))

    with pytest.raises((CheckpointError, OSError)):
        convert(source, dst, max_shard_size=SIZE, progress=progress)
    convert(source, tmp_path / "alone", max_shard_size=SIZE, **options)
    assert contents(dst) == contents(tmp_path / "alone")
    assert sorted(os.listdir(tmp_path)) == ["alone", "dst", "src"]
