"""Codes and scales of a source are kept where the target has the same blocks."""

import json

import ml_dtypes
import numpy as np
import pytest
from stored import stored

from qtoolkit.checkpoints import compare, convert, save, verify
from qtoolkit.checkpoints.internal import open_source

E4M3 = ml_dtypes.float8_e4m3fn
NAME = "model.layers.0.self_attn.o_proj.weight"
SHAPE = (300, 256)
GRID = (3, 2)


def powers(x):
    """Blocks of 128x128 in NumPy, with the least power of two that does not clamp."""
    scale = np.empty(GRID, np.float32)
    codes = np.empty(x.shape, E4M3)
    for i, j in np.ndindex(GRID):
        block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        scale[i, j] = 2 ** np.ceil(np.log2(np.abs(x[block]).max() / 448))
        codes[block] = (x[block] / scale[i, j]).astype(E4M3)
    return codes, scale


def spread(codes, scale):
    whole = np.repeat(np.repeat(scale, 128, 0), 128, 1)[: SHAPE[0], : SHAPE[1]]
    return codes.astype(np.float32) * whole.astype(np.float32)


def folder(path, tensors, quantization):
    path.mkdir()
    config = {"model_type": "deepseek_v3"}
    config |= {"quantization_config": quantization} if quantization else {}
    (path / "config.json").write_text(json.dumps(config))
    save(path / "model.safetensors", tensors, {"format": "pt"})
    return path


@pytest.fixture
def source(tmp_path):
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    codes, scale = powers(x)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return folder(tmp_path / "src", {NAME: codes, f"{NAME}_scale_inv": scale}, config), codes, scale


@pytest.mark.parametrize(
    ("layout", "scaling", "fmt", "suffix"),
    [
        ("finegrained-fp8", None, "e4m3fn", "_scale_inv"),
        ("finegrained-fp8", None, "deepseek_128x128", "_scale_inv"),
        ("plain", "block", "e4m3fn", "_scale"),
    ],
)
def test_codes_are_copied_where_scales_are_powers_of_two(
    tmp_path, source, layout, scaling, fmt, suffix
):
    src, codes, scale = source
    report = convert(src, tmp_path / "dst", layout=layout, scaling=scaling, format=fmt)
    found = stored(tmp_path / "dst" / "model.safetensors")
    assert found[NAME].tobytes() == codes.tobytes()
    np.testing.assert_array_equal(found[NAME + suffix], scale)
    (weight,) = report.quantized
    assert (weight.sqnr_db, weight.max_scale) == (np.inf, scale.max())
    assert verify(src, tmp_path / "dst").problems == ()
    assert compare(src, tmp_path / "dst").equal


def test_another_grid_is_quantized_from_the_values(tmp_path, source):
    src, codes, scale = source
    x = spread(codes, scale)
    report = convert(src, tmp_path / "dst", layout="compressed-tensors", scaling="channel")
    found = stored(tmp_path / "dst" / "model.safetensors")
    by_row = np.abs(x).max(1, keepdims=True) / np.float32(448)
    np.testing.assert_array_equal(found[f"{NAME}_scale"], by_row)
    assert found[NAME].tobytes() == (x / by_row).astype(E4M3).tobytes()
    assert report.quantized[0].sqnr_db < 40
    assert verify(src, tmp_path / "dst").problems == ()


def test_scales_below_the_least_of_a_target_are_made_anew(tmp_path, source):
    """DeepSeek's kernels have none below 1e-4 / 448."""
    _, codes, scale = source
    scale = scale * np.float32(2**-30)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    src = folder(tmp_path / "small", {NAME: codes, f"{NAME}_scale_inv": scale}, config)
    convert(src, tmp_path / "dst", layout="finegrained-fp8", format="deepseek_128x128")
    found = stored(tmp_path / "dst" / "model.safetensors")
    least = np.float32(1e-4) / np.float32(448)
    np.testing.assert_array_equal(found[f"{NAME}_scale_inv"], np.full(GRID, least))
    assert verify(src, tmp_path / "dst").problems == ()


@pytest.mark.parametrize("fmt", ["int4_group32", "mxfp4", "mxfp8_e4m3", "int8", "nvfp4"])
def test_codes_that_are_converted_again_stay_as_they_are(tmp_path, fmt):
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    src = folder(tmp_path / "unquantized", {NAME: x}, None)
    convert(src, tmp_path / "once", format=fmt)
    convert(tmp_path / "once", tmp_path / "twice", format=fmt)
    paths = [tmp_path / name / "model.safetensors" for name in ("once", "twice")]
    with open_source(paths[0]) as once, open_source(paths[1]) as twice:
        assert once.tensors.keys() == twice.tensors.keys()
        if fmt != "nvfp4":  # its second scale follows from the largest of the others
            for name in once.tensors:
                assert once.read(name).tobytes() == twice.read(name).tobytes(), name
    assert verify(tmp_path / "once", tmp_path / "twice").problems == ()
