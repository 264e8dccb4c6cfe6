"""Blocks of 128x128 that a matrix does not fill: DeepSeek's kv_a_proj_with_mqa has 576 rows."""

import json

import ml_dtypes
import numpy as np
import pytest
from refused import refused
from stored import stored

from qtoolkit.checkpoints import (
    CheckpointError,
    compare,
    convert,
    dequantize,
    dequantize_checkpoint,
    load,
    save,
    verify,
)
from qtoolkit.checkpoints.internal import LAYOUTS, Headers
from qtoolkit.checkpoints.internal import in_data_order as place

E4M3 = ml_dtypes.float8_e4m3fn
NAME = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


def folder(path, tensors, **config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **config}))
    save(path / "model.safetensors", tensors, {"format": "pt"})
    return path


def in_blocks(x):
    """Codes and scales in NumPy: a scale for what there is of each 128x128."""
    rows, columns = (-(-n // 128) for n in x.shape)
    scale = np.empty((rows, columns), np.float32)
    codes = np.empty(x.shape, E4M3)
    for i, j in np.ndindex(rows, columns):
        block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        scale[i, j] = np.abs(x[block]).max() / np.float32(448)
        codes[block] = (x[block] / scale[i, j]).astype(E4M3)
    return codes, scale


@pytest.mark.parametrize("shape", [(576, 256), (256, 200), (130, 130), (64, 100), (1, 129)])
def test_scales_are_rounded_up_and_everything_reads_them(tmp_path, shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    src = folder(tmp_path / "src", {NAME: x})
    convert(src, tmp_path / "dst", layout="finegrained-fp8")
    codes, scale = in_blocks(x)
    entries = stored(tmp_path / "dst" / "model.safetensors")
    np.testing.assert_array_equal(entries[NAME].view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(entries[f"{NAME}_scale_inv"], scale)
    spread = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: shape[0], : shape[1]]
    values = codes.astype(np.float32) * spread
    np.testing.assert_array_equal(dequantize(load(tmp_path / "dst"))[NAME], values)
    assert not verify(src, tmp_path / "dst").problems
    assert compare(src, tmp_path / "dst").tensors[0].sqnr_db > 25
    dequantize_checkpoint(tmp_path / "dst", tmp_path / "unquantized")
    np.testing.assert_array_equal(stored(tmp_path / "unquantized")[NAME], values)


@pytest.mark.parametrize("layout", ["finegrained-fp8", "plain", "compressed-tensors", "modelopt"])
def test_the_size_of_a_block_is_not_found_by_dividing(layout):
    """2 scales for 192 columns were read as groups of 96; they are for 128 and for 64."""
    suffix = {"finegrained-fp8": "_scale_inv"}.get(layout, "_scale")
    entries = ("a.weight", "F8_E4M3", (256, 192)), (f"a.weight{suffix}", "F32", (256, 2))
    headers = Headers({entry.name: entry for entry in place(entries)}, "here", {}, None)
    if layout == "finegrained-fp8":
        with refused(CheckpointError, r"\[256, 192\] with scales \[256, 2\]"):
            LAYOUTS[layout].decode({}, headers)
        config = {"weight_block_size": [1, 96]}
        assert LAYOUTS[layout].decode(config, headers)["a.weight"].lengths == (1, 96)
    else:
        assert LAYOUTS[layout].decode({}, headers)["a.weight"].lengths == (1, 128)
