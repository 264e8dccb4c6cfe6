"""A name at which a run was killed, or still writes, and another run, of whatever kind, for it.

Oracle: what the second run writes where none was before.
"""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from qtoolkit.checkpoints import CheckpointError, convert, finalize, save
from qtoolkit.checkpoints.internal import open_source

SIZE = "40KB"  # two matrices of codes to a file
KINDS = ("file", "folder", "shard")
# Forks, since loading JAX takes longer than all else here.
KILLED = f"""
import os, signal, sys
from qtoolkit.checkpoints import convert

source, root = sys.argv[1:]

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def kill_late(name, done, total):
    if 2 * done > total:
        kill()

def folder(kind, **options):
    convert(source, f"{{root}}/{{kind}}/dst", **options)

size = {{"max_shard_size": "{SIZE}"}}

RUNS = {{
    "file": lambda: convert(
        f"{{source}}/model.safetensors", f"{{root}}/file/dst", progress=kill_late
    ),
    "folder": lambda: folder("folder", **size, progress=kill_late),
    "shard": lambda: folder("shard", **size, shard=(0, 2), progress=kill_late),
}}
for kind, run in RUNS.items():
    os.mkdir(f"{{root}}/{{kind}}")
    child = os.fork()
    if not child:
        run()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, kind
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "src"
    folder.mkdir()
    rng = np.random.default_rng(0)
    weights = {f"{i}.weight": rng.normal(size=(128, 128)).astype(np.float32) for i in range(6)}
    save(folder / "model.safetensors", weights)
    return folder


@pytest.fixture(scope="module")
def killed(source, tmp_path_factory):
    """A folder for each kind of run, with what one has left that was killed."""
    root = tmp_path_factory.mktemp("killed")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(source), str(root)], check=True
    )
    return root


def run(kind, source, target):
    if kind == "finalize":
        finalize(target)
    elif kind == "file":
        convert(source / "model.safetensors", target)
    elif kind == "shard":
        for index in (0, 1):
            convert(source, target, max_shard_size=SIZE, shard=(index, 2))
        finalize(target)
    else:
        convert(source, target, max_shard_size=SIZE)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    root = tmp_path_factory.mktemp("expected")
    for kind in KINDS:
        run(kind, source, root / kind)
    return {kind: contents(root / kind) for kind in KINDS}


def contents(path):
    found = {}
    with open_source(path) as source:
        for name, tensor in source.tensors.items():
            data = bytearray(tensor.nbytes)
            source.tensors[name].read_into(0, memoryview(data))
            found[name] = (tensor.dtype, tensor.shape, data)
    return found


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_a_rerun_of_any_kind_takes_the_name_of_a_killed_run(
    source, killed, expected, tmp_path, first, second
):
    shutil.copytree(killed / first, tmp_path, dirs_exist_ok=True)
    target = tmp_path / "dst"
    (left,) = tmp_path.iterdir()
    if first == "shard" and second == "file":
        # Of shards one may be killed and the others go on: their files are not removed unasked.
        with pytest.raises(CheckpointError) as caught:
            run(second, source, target)
        assert str(caught.value) == (
            f"{target}: files of a conversion in shards are there; finalize it, or remove them: "
            f"rm -r {left}"
        )
        shutil.rmtree(left)
    run(second, source, target)
    assert contents(target) == expected[second]
    assert os.listdir(tmp_path) == ["dst"]
