"""Headers and configs with seeded random changes: read, or refused in one line that names them."""

import copy
import json
import random
import struct

import numpy as np
import pytest
import safetensors

from qtoolkit.checkpoints import (
    CheckpointError,
    compare,
    convert,
    dequantize_checkpoint,
    save,
    verify,
)
from qtoolkit.checkpoints.internal import open_source

NAME = "model.layers.0.mlp.up_proj.weight"
JUNK = (None, True, 0, -1, 3, 2**70, 1e300, "", "x", [], [0], ["a"], [128, 128], {}, {"a": 1})
DTYPES = {1: ("U8", "I8", "F8_E4M3", "F8_E8M0", "BOOL"), 4: ("F32", "I32"), 8: ("I64", "F64")}


def parts(path):
    """Header and data of a file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return raw[8 : 8 + length], raw[8 + length :]


def write(path, header, data):
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def check(errors, path):
    assert [error for error in errors if str(path) not in error or "\n" in error] == []


def test_200_headers_with_random_bytes(tmp_path):
    """What is read of them, the package safetensors reads, too."""
    save(tmp_path / "f", {f"a.{i}.weight": np.ones((2, 8), np.float32) for i in range(4)})
    header, data = parts(tmp_path / "f")
    draw = random.Random(0)
    errors = []
    for _ in range(200):
        changed = bytearray(header)
        for _ in range(draw.choice((1, 1, 2, 4))):
            changed[draw.randrange(len(changed))] = draw.randrange(32, 127)
        write(tmp_path / "f", bytes(changed), data)
        try:
            with open_source(tmp_path / "f"):
                pass
        except CheckpointError as error:
            errors.append(str(error))
        else:
            safetensors.safe_open(tmp_path / "f", "np")
    check(errors, tmp_path)
    assert 100 < len(errors) < 200


def places(value, path=()):
    """Where something is in nested objects and lists."""
    pairs = enumerate(value) if isinstance(value, list) else getattr(value, "items", list)()
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value, draw):
    """A copy with one of its places removed or made something else."""
    value = copy.deepcopy(value)
    *path, last = draw.choice([*places(value)])
    inner = value
    for key in path:
        inner = inner[key]
    if isinstance(inner, dict) and draw.random() < 0.25:
        del inner[last]
    else:
        inner[last] = draw.choice(JUNK)
    return value


def reshaped(header, draw):
    """A header that is true to the file, with another shape, dtype or name of one tensor."""
    header = copy.deepcopy(header)
    name = draw.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    size, count = int(np.prod(entry["shape"])), entry["data_offsets"][1] - entry["data_offsets"][0]
    what = draw.randrange(3)
    if what == 0:
        shapes = [[size // n, n] for n in (1, 2, 32, 64) if size % n == 0]
        shapes += [[size], [1, size, 1]] + [[]] * (size == 1) + [[0, 4]] * (size == 0)
        entry["shape"] = draw.choice(shapes)
    elif what == 1 and size:
        entry["dtype"] = draw.choice(DTYPES[count // size])
    else:
        ends = ("", "_packed", "_scale", "_scale_inv", "_scale_2", "_global_scale", "_shape")
        header.setdefault(NAME + draw.choice(ends), header.pop(name))
    return header


LAYOUTS = [
    ("compressed-tensors", "e4m3fn"),
    ("compressed-tensors", "mxfp4"),
    ("compressed-tensors", "nvfp4"),
    ("compressed-tensors", "int4_group32"),
    ("finegrained-fp8", "e4m3fn"),
    ("modelopt", "nvfp4"),
]


@pytest.mark.sample("compressed-tensors-e4m3fn", "compressed-tensors-nvfp4", "modelopt-nvfp4")
@pytest.mark.parametrize(("layout", "fmt"), LAYOUTS)
def test_folders_with_changed_headers_and_configs(tmp_path, layout, fmt):
    """600 in all: read by compare, some by verify and dequantize, too, which take longer."""
    src, dst = tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    x = np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32)
    save(src / "model.safetensors", {NAME: x, "norm.weight": np.ones(8, np.float32)})
    (src / "config.json").write_text('{"torch_dtype": "bfloat16", "hidden_size": 128}')
    scales = 1.0 if layout == "modelopt" else None
    convert(src, dst, layout=layout, format=fmt, input_scales=scales)
    text, data = parts(dst / "model.safetensors")
    header, config = json.loads(text), json.loads((dst / "config.json").read_text())
    draw = random.Random(f"{layout} {fmt}")
    errors = []
    for number in range(100):
        new = changed(header, draw) if draw.random() < 0.25 else reshaped(header, draw)
        write(dst / "model.safetensors", json.dumps(new).encode(), data)
        (dst / "config.json").write_text(json.dumps(changed(config, draw)))
        try:
            compare(src, dst)
            if number % 8 == 0:
                verify(src, dst)
            elif number % 4 == 0:
                dequantize_checkpoint(dst, tmp_path / f"out{number}")
        except CheckpointError as error:
            errors.append(str(error))
    check(errors, dst)
    assert 30 < len(errors) < 100
