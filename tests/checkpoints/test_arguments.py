"""Arguments of wrong types. Oracle: each message names the argument, what was got and expected."""

import os
import re

import numpy as np
import pytest
from each import each
from refused import refused

from qtoolkit import checkpoints
from qtoolkit.checkpoints import CheckpointError, convert, save
from qtoolkit.checkpoints.internal import open_source


@pytest.fixture
def src(tmp_path):
    save(tmp_path / "src", {"a.weight": np.ones((128, 128), np.float32)})
    return str(tmp_path / "src")


@pytest.mark.parametrize("skip", [[1], 1, None, b"a", [b"a"], [re.compile(b"a")]])
def test_skip_is_strings(src, tmp_path, skip):
    refused(TypeError, r"convert: skip=", convert, src, tmp_path / "dst", skip=skip)
    assert os.listdir(tmp_path) == ["src"]


def test_layout_is_a_name(src, tmp_path):
    refused(ValueError, r"convert: layout=\[\]", convert, src, tmp_path / "dst", layout=[])


@pytest.mark.parametrize("function", [convert, checkpoints.dequantize_checkpoint])
def test_progress_is_a_function(src, tmp_path, function):
    refused(TypeError, r"progress=1", function, src, tmp_path / "dst", progress=1)
    assert os.listdir(tmp_path) == ["src"]


FUNCTIONS = {
    "src": [
        lambda path, good, new: convert(path, new),
        lambda path, good, new: checkpoints.dequantize_checkpoint(path, new),
        lambda path, good, new: checkpoints.verify(path, good),
    ],
    "dst": [
        lambda path, good, new: convert(good, path),
        lambda path, good, new: checkpoints.dequantize_checkpoint(good, path),
        lambda path, good, new: checkpoints.finalize(path),
    ],
    "converted": [lambda path, good, new: checkpoints.verify(good, path)],
    "a": [lambda path, good, new: checkpoints.compare(path, good)],
    "b": [lambda path, good, new: checkpoints.compare(good, path)],
    "path": [
        lambda path, good, new: open_source(path),
        lambda path, good, new: checkpoints.load(path),
        lambda path, good, new: save(path, {}),
        lambda path, good, new: save(path, "tensors and path in the wrong order"),
        lambda path, good, new: open_source(path),
    ],
}


@each("path", [b"model", 3, None, []])
@each(("name", "function"), [(name, f) for name, all_of in FUNCTIONS.items() for f in all_of])
def test_paths_are_strings(src, tmp_path, name, function, path):
    kind = type(path).__name__
    message = f"^{name}: got .* of type {kind}, expected a path as str or os.PathLike, e.g. "
    refused(TypeError, message, function, path, src, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize("scale", [1e-50, 1e50, 10**400, True, "0.5", np.ones(1), float("nan")])
def test_input_scales_are_numbers_that_float32_has(src, tmp_path, scale):
    with refused(CheckpointError, r"input scale "):
        convert(src, tmp_path / "dst", layout="modelopt", scaling="tensor", input_scales=scale)


@pytest.mark.parametrize("scale", [np.float32(0.1), np.float64(0.1), np.int32(2), 1e-45])
def test_input_scales_are_any_number(src, tmp_path, scale):
    convert(src, tmp_path / "dst", layout="modelopt", scaling="tensor", input_scales=scale)
    assert checkpoints.load(tmp_path / "dst")["a.input_scale"] == np.float32(scale)


def test_messages_name_arguments(src, tmp_path):
    """As a caller writes them; `cli/test_errors.py` has options of the command."""
    tree = {"layer": {"weight": np.ones((64, 32), np.float32)}}
    save(tmp_path / "model", tree)
    with refused(CheckpointError, r"^skip='a\(': invalid"):
        checkpoints.load(tmp_path / "model", like=tree, skip="a(")
    with refused(CheckpointError, r"^only='a\(': invalid"):
        checkpoints.export(tree, only="a(")
    with refused(CheckpointError, r"skip= or allow_codes=True$"):
        save(tmp_path / "codes", {"a.weight": np.ones((4, 4), np.int8)})
        convert(tmp_path / "codes", tmp_path / "dst")
