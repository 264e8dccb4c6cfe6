"""Writing that fails: the folder stays as it was, whatever the cause."""

import errno
import os
import pickle
import traceback

import ml_dtypes
import numpy as np
import pytest

from qtoolkit.checkpoints import CheckpointError, layout, load, save, write_safetensors

TARGET = "model.safetensors"


def test_an_existing_target_stays_unless_told_otherwise(tmp_path):
    save(tmp_path / TARGET, {"x": np.ones(2, np.float32)})
    before = (tmp_path / TARGET).read_bytes()
    with pytest.raises(CheckpointError, match="exists already; pass --overwrite"):
        save(tmp_path / TARGET, {})
    assert (tmp_path / TARGET).read_bytes() == before
    save(tmp_path / TARGET, {}, overwrite=True)
    assert load(tmp_path / TARGET) == {}
    assert os.listdir(tmp_path) == [TARGET]


def test_layouts_of_what_safetensors_cannot_hold():
    with pytest.raises(CheckpointError, match=r"'a': got dtype 'F33', expected one of .*F32"):
        layout([("a", "F33", (3,))])
    with pytest.raises(CheckpointError, match=r"'a': F4 of shape \(3,\) ends within a byte.*pad"):
        layout([("a", "F4", (3,))])


def test_targets_that_cannot_be(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        save(tmp_path, {}, overwrite=True)
    with pytest.raises(FileNotFoundError, match="its folder does not exist") as caught:
        save(tmp_path / "no" / TARGET, {})
    assert caught.value.filename == str(tmp_path / "no" / TARGET)
    with pytest.raises(CheckpointError, match="/dev/null: is not a regular file"):
        save("/dev/null", {}, overwrite=True)


@pytest.mark.parametrize("size", [1000, 10**6])  # written at once, and by the thread
def test_a_full_disk_leaves_nothing_and_names_the_target(tmp_path, monkeypatch, size):
    save(tmp_path / TARGET, {"old": np.ones(1, np.int8)})
    before = (tmp_path / TARGET).read_bytes()
    pwrite, room = os.pwrite, 100

    def full(descriptor, data, position):
        if position >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data[: room - position], position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save(tmp_path / TARGET, {"x": np.ones(size, np.float32)}, overwrite=True)
    assert caught.value.filename == str(tmp_path / TARGET)
    assert os.listdir(tmp_path) == [TARGET]
    assert (tmp_path / TARGET).read_bytes() == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_any_failure_leaves_the_folder_as_it_was(tmp_path, failure):
    save(tmp_path / TARGET, {"old": np.ones(1, np.int8)})
    before = (tmp_path / TARGET).read_bytes()

    def chunks():
        yield "x", b"12"
        assert len(os.listdir(tmp_path)) == 2  # the temporary file is in the target's folder
        raise failure

    with pytest.raises(failure):
        write_safetensors(tmp_path / TARGET, layout([("x", "U8", (4,))]), chunks(), overwrite=True)
    assert os.listdir(tmp_path) == [TARGET]
    assert (tmp_path / TARGET).read_bytes() == before


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([("x", b"123")], "tensor x: 1 bytes fewer produced"),
        ([("x", b"123"), ("x", b"45")], "tensor x: 2 more bytes produced, expected 1"),
        ([("y", b"1")], "tensor y: 1 more bytes produced, expected no such tensor"),
    ],
)
def test_chunks_that_break_the_plan_write_nothing(tmp_path, chunks, message):
    with pytest.raises(CheckpointError, match=message):
        write_safetensors(tmp_path / TARGET, layout([("x", "U8", (4,))]), chunks)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"x": np.zeros(2, np.complex128)}, None, "tensor x: dtype complex128, expected one of"),
        ({"x": np.zeros(2, ml_dtypes.int4)}, None, "tensor x: dtype int4"),
        ({"x": np.array(["text"])}, None, "tensor x: dtype <U4"),
        ({"__metadata__": np.zeros(2)}, None, "expected a name that is text"),
        ({"\ud800": np.zeros(2)}, None, "expected a name that is text"),
        ({}, {"a": 1}, "metadata: got {'a': 1}, expected strings"),
    ],
)
def test_what_safetensors_has_no_place_for(tmp_path, tensors, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / TARGET, tensors, metadata)
    assert os.listdir(tmp_path) == []


def test_a_traceback_names_the_module_that_a_user_imports():
    with pytest.raises(CheckpointError) as caught:
        raise CheckpointError("m.safetensors: none")
    lines = traceback.format_exception_only(caught.value)
    assert lines == ["qtoolkit.checkpoints.CheckpointError: m.safetensors: none\n"]
    assert type(pickle.loads(pickle.dumps(caught.value))) is CheckpointError
