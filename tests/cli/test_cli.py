"""The command as a user meets it: in a process of its own where that matters."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
import typer
from command import fails, run
from stored import stored

import qtoolkit as qt
from qtoolkit import __version__
from qtoolkit.checkpoints import save
from qtoolkit.cli.internal import EXAMPLES, app

COMMAND = (sys.executable, "-m", "qtoolkit")


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    save(
        tmp_path / "model.safetensors",
        {
            "layers/0/kernel": rng.normal(size=(32, 16)).astype(np.float32),
            "layers/0/bias": np.zeros(16, np.float32),
            "embed/embedding": rng.normal(size=(8, 32)).astype(np.float32),
        },
        {"format": "pt"},
    )
    return tmp_path / "model.safetensors"


def test_convert_writes_and_sums_up(source, tmp_path):
    result = run("convert", source, tmp_path / "out", "--scaling", "channel", "--format", "F8_E5M2")
    assert result.exit_code == 0
    assert "out: e5m2, a scale per channel" in result.stdout
    assert "quantized  1 tensor\n" in result.stdout
    assert "excluded   2 tensors" in result.stdout
    assert "mean SQNR" in result.stdout
    assert "converting: 100 %, 1.7/1.7 kB" in result.stderr
    found = stored(tmp_path / "out")
    assert found["layers/0/kernel"].dtype == ml_dtypes.float8_e5m2
    assert found["layers/0/kernel_scale"].shape == (1, 16)


def test_a_dry_run_shows_what_a_conversion_then_does(source, tmp_path):
    arguments = ["convert", source, tmp_path / "out", "--scaling", "channel"]
    result = run(*arguments, "--dry-run")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    header = ["tensor", "dtype", "becomes", "scale", "bytes", "not quantized because"]
    assert lines[0].split(maxsplit=5) == header
    # Of 32 x 16 codes and 16 scales: 512 + 4 * 16 bytes.
    assert [line.split(maxsplit=5) for line in lines[1:4]] == [
        ["embed/embedding", "F32", "F32", "1,024", "skipped", "by default"],
        ["layers/0/bias", "F32", "F32", "64", "fewer", "than two dimensions"],
        ["layers/0/kernel", "F32", "F8_E4M3", "[1,", "16]", "576"],
    ]
    assert lines[4].endswith("out: e4m3fn, a scale per channel; a dry run, nothing was written")
    assert os.listdir(tmp_path) == ["model.safetensors"]
    done = run(*arguments).stdout.splitlines()
    assert lines[5:] == done[1:4]  # the same counts and bytes
    written = stored(tmp_path / "out")
    assert written["layers/0/kernel"].dtype == ml_dtypes.float8_e4m3fn
    assert written["layers/0/kernel_scale"].shape == (1, 16)


def test_a_dry_run_fails_where_the_conversion_would(source, tmp_path):
    (tmp_path / "out").touch()
    folder, name = tmp_path / "no" / "out", tmp_path / "new"
    for arguments in ([tmp_path / "out"], [folder], [name, "--skip", "nothing"]):
        expected = fails("convert", source, *arguments)
        assert fails("convert", source, *arguments, "--dry-run") == expected


def test_errors_are_one_line_that_names_the_file(source, tmp_path):
    missing, out = tmp_path / "missing", tmp_path / "out"
    (tmp_path / "empty").mkdir()
    assert fails("convert", missing, out) == f"{missing}: No such file or directory"
    assert fails("convert", missing, tmp_path) == f"{missing}: No such file or directory"
    assert fails("inspect", missing) == f"{missing}: No such file or directory"
    assert fails("inspect", tmp_path / "empty").startswith(f"{tmp_path}/empty: no safetensors")
    assert fails("convert", source, source, "--overwrite").startswith(
        f"{source}: is the source itself; choose another name"
    )
    assert fails("convert", source, tmp_path / "no" / "out") == (
        f"{tmp_path}/no/out: its folder does not exist; create it"
    )
    assert fails("convert", source, tmp_path).startswith(f"{tmp_path}: is a folder")
    assert fails("convert", source, f"{out}/") == (
        f"{out}/: the target is a safetensors file, expected a name that ends so; name it "
        f"{out}.safetensors"
    )
    binary = tmp_path / "empty" / "binary"
    binary.write_bytes(bytes(range(128, 256)))
    message = fails("convert", source, out, "--input-scales", binary)
    assert re.fullmatch(rf"{binary}: 'utf-8' .*, expected a JSON object", message)
    assert fails("convert", source, out, "--skip", "norm", "--skip", "a(", code=2).startswith(
        "--skip 'a(': invalid regular expression (missing ), unterminated subpattern at position 1)"
    )
    assert sorted(os.listdir(tmp_path)) == ["empty", "model.safetensors"]


def test_a_tensor_that_cannot_be_converted_is_named(tmp_path):
    save(tmp_path / "wide", {"layers/3/kernel": np.zeros((2, 2))})
    assert fails("convert", tmp_path / "wide", tmp_path / "out") == (
        f"{tmp_path}/wide: tensor layers/3/kernel: dtype F64, expected F32, F16 or BF16; "
        "exclude it with --skip"
    )


@pytest.mark.parametrize("length", [0, 7, 9, 100, -1])
def test_a_damaged_file_is_named(source, tmp_path, length):
    source.write_bytes(source.read_bytes()[:length])
    for command in (("inspect", source), ("convert", source, tmp_path / "out")):
        assert fails(*command).startswith(f"{source}: ")
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_line_breaks_in_names_stay_out_of_the_error(tmp_path):
    header = json.dumps({"a\nb": {"dtype": "X"}}).encode()
    (tmp_path / "odd\nname").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "tensor 'a\\nb': dtype 'X'" in fails("inspect", tmp_path / "odd\nname")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scaling", "channels"], "--scaling: 'channels', expected one of tensor, channel, bl"),
        (["--layout", "vllm"], "--layout: 'vllm', expected one of plain, compressed-tensors"),
        (["--keep-dtype", "int8"], "--keep-dtype: 'int8', expected one of float32, bfloat16"),
        (["--channel-axis", "2"], "--channel-axis: '2', expected one of auto, first, last"),
        (["--max-shard-size", "big"], "--max-shard-size: 'big', expected such as '5GB'"),
        (["--max-memory", "lots"], "--max-memory: 'lots', expected such as '5GB'"),
        (["--max-memory", "1MB"], "--max-memory: '1MB', expected '360MiB' or more"),
        (["--unknown"], "No such option: --unknown"),
    ],
)
def test_misuse_exits_with_2(source, tmp_path, arguments, message):
    result = run("convert", source, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("name", ["e4m3", "fp8", "e4m4", "float8"])
def test_a_wrong_format_is_one_line_and_exits_with_2(name):
    with pytest.raises(ValueError, match=f"'{name}'") as error:
        qt.format(name)
    result = run("convert", "src", "dst", "--format", name)
    assert (result.exit_code, result.stdout) == (2, "")
    message = str(error.value).removeprefix("format: ")
    assert result.stderr.startswith(f"qtoolkit: --format: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert "; convert takes e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, int8, " in result.stderr


def test_inspect_prints_plain_aligned_text_to_a_pipe(tmp_path):
    name = "a_very_long_name." * 10
    save(tmp_path / "f", {name: np.zeros((2, 3), np.float32), "[b]": np.int8(1)}, {"k": "v\n"})
    result = run("inspect", tmp_path / "f")
    assert result.stdout.splitlines() == [
        "tensor".ljust(len(name)) + "  dtype  shape   bytes",
        f"{name}  F32    [2, 3]     24",
        "[b]".ljust(len(name)) + "  I8     []          1",
        "2 tensors, 7 elements, 25 bytes",
        "metadata k: 'v\\n'",
    ]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["convert", "--help"], ["formats"], ["formats", "nf4"], ["layouts"]]
)
def test_looking_loads_neither_jax_nor_anything_heavy(arguments):
    assert not loaded_by(arguments) & HEAVY


def test_inspecting_and_a_dry_run_do_not_either(source):
    assert not loaded_by(["inspect", str(source)]) & HEAVY
    for name in ("e4m3fn", "F8_E5M2"):
        arguments = ["convert", str(source), "out", "--dry-run", "--format", name]
        assert not loaded_by(arguments) & HEAVY


HEAVY = {"jax", "jaxlib", "flax", "optax", "matplotlib", "safetensors"}


def loaded_by(arguments, code=0):
    """The modules that a command loads which exits with `code`."""
    program = (
        "import sys; sys.argv[0] = 'qtoolkit'\n"
        "from qtoolkit.cli import main\n"
        "try: main()\n"
        "finally: print('MODULES', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return set(done.stdout.split("MODULES ")[1].split())


def test_python_m_and_version():
    done = subprocess.run([*COMMAND, "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"qtoolkit {__version__}\n"


def endless(path):
    """A source of 64 GiB that takes no room: longer to convert than any test waits."""
    entry = {"dtype": "F32", "shape": [2**17, 2**17], "data_offsets": [0, 2**36]}
    header = json.dumps({"layers/0/kernel": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2**36)


@pytest.mark.parametrize(
    ("sent", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_signals_leave_the_folder_as_it_was(tmp_path, start, sent, code, word):
    endless(tmp_path / "src")
    (tmp_path / "dst").write_bytes(b"precious")
    process = start(
        [*COMMAND, "convert", "src", "dst", "--overwrite"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(os.listdir(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir(tmp_path)) == 3  # the temporary file is there
    process.send_signal(sent)
    stdout, stderr = process.communicate(timeout=60)
    lines = [line for line in stderr.splitlines() if not line.startswith("converting")]
    assert lines == [f"qtoolkit: {word}; dst was not written"]
    assert (process.returncode, stdout) == (code, "")
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]
    assert (tmp_path / "dst").read_bytes() == b"precious"


def test_a_reader_that_hangs_up_is_no_error(tmp_path, start):
    save(tmp_path / "f", {f"tensor {i}": np.int8(0) for i in range(9000)})
    process = start(
        [*COMMAND, "inspect", "f"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "formats"])
def test_help_that_a_full_disk_does_not_take_is_one_line(arguments):
    command = f"{sys.executable} -m qtoolkit {arguments} >/dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"qtoolkit: standard output: No space left on .*\n", done.stderr)


@pytest.mark.sample("full output", "closed errors")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("redirected", "code", "error"),
    [
        (
            ">/dev/full",
            1,
            "qtoolkit: standard output: No space left on device; make room or choose "
            "another disk; out is written and whole\n",
        ),
        ("2>/dev/full", 0, ""),
        ("2>&-", 0, ""),
    ],
    ids=["full output", "full errors", "closed errors"],
)
def test_streams_that_fail_do_not_cost_the_job(source, tmp_path, start, redirected, code, error):
    process = start(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *COMMAND, "convert", str(source), "out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stdout, stderr = process.communicate(timeout=60)
    lines = [line for line in stderr.splitlines(True) if not line.startswith("converting")]
    assert (process.returncode, "".join(lines)) == (code, error)
    assert bool(stdout) is (code == 0)
    assert stored(tmp_path / "out")


@pytest.mark.quick
def test_the_examples_of_help_are_of_that_command_and_can_be_parsed():
    group = typer.main.get_command(app)
    assert set(EXAMPLES) == set(group.commands)
    for name, lines in EXAMPLES.items():
        shown = run(name, "--help").output
        assert len(lines) == 2
        for line in lines:
            assert f"    {line}\n" in shown
            program, command, *arguments = shlex.split(line)
            assert (program, command) == ("qtoolkit", name)
            group.commands[name].make_context(name, arguments)  # an unknown option would raise
