"""Files and configs that contradict each other. Oracle: the formulas of the programs."""

import json

import numpy as np
import pytest
from refused import refused

from qtoolkit.checkpoints import CheckpointError, dequantize_checkpoint, load, save

MODULE = "model.layers.0.mlp.up_proj"
INPUTS, OUTPUTS, GROUP = 64, 32, 32
rng = np.random.default_rng(0)


def stream(codes, bits):
    """I32 words of rows of codes, one code after the other, the first in the low bits."""
    places = codes.astype(np.uint32)[..., None] >> np.arange(bits, dtype=np.uint32) & 1
    rows = places.astype(np.uint8).reshape(len(codes), -1)
    return np.packbits(rows, axis=1, bitorder="little").view(np.int32)


def folder(path, entries, config):
    path.mkdir()
    save(path / "model.safetensors", entries)
    about = {"model_type": "llama", "quantization_config": config}
    (path / "config.json").write_text(json.dumps(about))
    return path


def values(source, tmp_path):
    dequantize_checkpoint(source, tmp_path / "values", dtype="float32")
    return load(tmp_path / "values")[f"{MODULE}.weight"]


def gptq(path, stored, bits, **config):
    """A folder, and its weight if all zero points were `zero`."""
    codes = rng.integers(0, 2**bits, (INPUTS, OUTPUTS))
    scales = rng.uniform(0.01, 0.1, (INPUTS // GROUP, OUTPUTS)).astype(np.float16)
    entries = {
        f"{MODULE}.qweight": np.ascontiguousarray(stream(codes.T, bits).T),
        f"{MODULE}.qzeros": stream(np.broadcast_to(stored, scales.shape), bits),
        f"{MODULE}.scales": scales,
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **config}
    rates = np.repeat(scales.astype(np.float32), GROUP, 0)
    return folder(path, entries, config), lambda zero: ((codes - zero) * rates).T


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_that_says_symmetric_has_the_middle_as_zero_point(tmp_path, bits, version):
    middle, offset = 2 ** (bits - 1), int(version == "gptq")
    about = {"checkpoint_format": version, "sym": True}
    source, weight = gptq(tmp_path / "right", middle - offset, bits, **about)
    np.testing.assert_array_equal(values(source, tmp_path), weight(middle))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_of_the_other_version_is_refused_with_both_readings(tmp_path, bits, version):
    """A symmetric model of 4 bits that stores 8: 8 by its config's sym, 9 by its version."""
    middle, offset = 2 ** (bits - 1), int(version == "gptq")
    other, found = ("gptq_v2", middle + 1) if offset else ("gptq", middle - 1)
    about = {"checkpoint_format": version, "sym": True}
    source, weight = gptq(tmp_path / "src", middle - 1 + offset, bits, **about)
    message = rf"qzeros: a zero point of {found}, expected {middle} alone, as sym in its config"
    message += (
        rf".*\(q - {found}\) \* scale.*\"sym\": false.*\(q - {middle}\) \* scale.*\"{other}\""
    )
    for act in (load, lambda path: dequantize_checkpoint(path, tmp_path / "values")):
        refused(CheckpointError, message, act, source)
    for number, (change, zero) in enumerate(
        [({"sym": False}, found), ({"checkpoint_format": other}, middle)]
    ):
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] |= change
        (source / "config.json").write_text(json.dumps(config))
        (tmp_path / str(number)).mkdir()
        np.testing.assert_array_equal(values(source, tmp_path / str(number)), weight(zero))
        config["quantization_config"] |= about


def test_one_zero_point_that_differs_is_refused(tmp_path):
    stored = np.full((INPUTS // GROUP, OUTPUTS), 7)
    stored[1, 5] = 3
    source, _ = gptq(tmp_path / "src", stored, 4, sym=True)
    refused(CheckpointError, r"zero point of 4", load, source)
    source, _ = gptq(tmp_path / "dynamic", stored, 4, sym=True, dynamic={"+:.*up": {"sym": False}})
    load(source)


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("zero", [0, 3])
def test_zero_points_of_compressed_tensors(tmp_path, is_symmetric, zero):
    codes = rng.integers(-128, 128, (40, 64)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (40, 1)).astype(np.float32)
    entries = {
        f"{MODULE}.weight": codes,
        f"{MODULE}.weight_scale": scale,
        f"{MODULE}.weight_zero_point": np.full((40, 1), zero, np.int8),
    }
    about = {"num_bits": 8, "type": "int", "symmetric": is_symmetric, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": about}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    source = folder(tmp_path / "src", entries, config | {"config_groups": groups})
    if is_symmetric and zero:
        refused(CheckpointError, r"of 3", load, source)
    else:
        expected = (codes.astype(np.float32) - zero) * scale
        np.testing.assert_array_equal(values(source, tmp_path), expected)


@pytest.mark.parametrize("zero", [8, 5])
def test_zero_points_of_awq_without_zero_points(tmp_path, zero):
    codes = rng.integers(0, 16, (INPUTS, OUTPUTS))
    order = np.arange(OUTPUTS).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    scales = rng.uniform(0.01, 0.1, (INPUTS // GROUP, OUTPUTS)).astype(np.float16)
    entries = {
        f"{MODULE}.qweight": stream(codes[:, order], 4),
        f"{MODULE}.qzeros": stream(np.full(scales.shape, zero), 4),
        f"{MODULE}.scales": scales,
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": False}
    source = folder(tmp_path / "src", entries, config)
    if zero != 8:
        refused(CheckpointError, r"of 5", load, source)
    else:
        expected = ((codes - 8) * np.repeat(scales.astype(np.float32), GROUP, 0)).T
        np.testing.assert_array_equal(values(source, tmp_path), expected)


FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": FLOATS}}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "config_groups": GROUPS},
        {"quant_method": "fp8"},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ],
)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, "float8_e4m3fn"])
def test_bytes_of_floats_in_another_dtype_are_refused(tmp_path, config, dtype):
    """FP8 as I8, as programs write it whose container has no FP8: read as integers."""
    codes = rng.normal(size=(40, 64)).astype("float8_e4m3fn")
    scale = rng.uniform(0.01, 0.1, 40).astype(np.float32)
    if config["quant_method"] != "modelopt":
        scale = scale[:, None]
    entries = {f"{MODULE}.weight": codes.view(dtype), f"{MODULE}.weight_scale": scale}
    source = folder(tmp_path / "src", entries, config)
    if dtype == "float8_e4m3fn":
        expected = codes.astype(np.float32) * scale.reshape(-1, 1)
        np.testing.assert_array_equal(values(source, tmp_path), expected)
        return
    with refused(CheckpointError, r"up_proj\.weight: .*(U8|I8).*dequantize the checkpoint with"):
        load(source)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_gptq_that_was_sorted_has_an_index(tmp_path, is_sorted):
    source, weight = gptq(tmp_path / "src", 7, 4, sym=True, desc_act=is_sorted)
    if is_sorted:
        refused(CheckpointError, r"up_proj\.g_idx: no such tensor", load, source)
    else:
        np.testing.assert_array_equal(values(source, tmp_path), weight(8))
