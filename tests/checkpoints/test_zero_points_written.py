"""Integers with zero points, written: W4A16_ASYM of compressed-tensors, by arithmetic of NumPy."""

import json

import numpy as np
import pytest
from refused import refused
from safetensors.numpy import load_file

import qtoolkit as qt
from qtoolkit import checkpoints
from qtoolkit.checkpoints import CheckpointError, convert

NAME = "model.layers.0.mlp.up_proj.weight"


def unpack_rows(words, count):
    """Codes of 4 bits along the last axis of words, the first one in the lowest bits, less 8."""
    words = np.asarray(words).view(np.uint32)
    codes = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    return codes.reshape(*words.shape[:-1], -1)[..., :count].astype(int) - 8


@pytest.mark.parametrize("shape", [(20, 384), (8, 128), (3, 256), (600, 2048)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_scales_and_zero_points(tmp_path, shape, dtype):
    x = np.random.default_rng(0).normal(0.2, 1, shape).astype(np.float32)
    x[0, :128], x[-1, -128:] = 0, np.abs(x[-1, -128:]) + 1  # zeros alone, and one side alone
    x = np.asarray(qt.round_to_format(x, dtype)) if dtype != "float32" else x
    checkpoints.save(tmp_path / "a.safetensors", {NAME: np.asarray(x)})
    report = convert(
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
        format="W4A16_ASYM",
        layout="compressed-tensors",
    )
    found = load_file(tmp_path / "b.safetensors")
    prefix = NAME.removesuffix("weight")
    rows, columns = shape
    groups = x.reshape(rows, -1, 128)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scale = ((high - low) / np.float32(15)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        zero = np.nan_to_num(np.clip(-8 - np.rint(low / scale), -8, 7))
        q = np.clip(np.rint(np.nan_to_num(groups / scale[..., None])) + zero[..., None], -8, 7)
    is_used, stored = scale > 0, found[f"{prefix}weight_scale"]
    np.testing.assert_allclose(stored[is_used], scale[is_used], rtol=2e-7)
    zeros = unpack_rows(found[f"{prefix}weight_zero_point"].T, rows).T
    np.testing.assert_array_equal(zeros[is_used], zero[is_used])
    codes = unpack_rows(found[f"{prefix}weight_packed"], columns).reshape(q.shape)
    assert (codes != q)[is_used].mean() < 1e-5  # a quotient in the middle of two codes
    np.testing.assert_array_equal(found[f"{prefix}weight_shape"], shape)
    assert found[f"{prefix}weight_zero_point"].shape == (-(-rows // 8), columns // 128)
    assert report.quantization_config["config_groups"]["group_0"]["weights"]["symmetric"] is False

    # Our own reader and the errors that were printed.
    checkpoints.dequantize_checkpoint(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    values = np.asarray(checkpoints.load(tmp_path / "c.safetensors")[NAME], np.float32)
    values = values.reshape(groups.shape)
    expected = (codes - zeros[..., None]) * stored[..., None]
    tolerance = 1e-6 if dtype == "float32" else 5e-3
    np.testing.assert_allclose(values, expected, rtol=tolerance, atol=1e-6)
    exact = ((groups - expected) ** 2).sum(dtype=np.float64)
    sqnr = 10 * np.log10((groups.astype(np.float64) ** 2).sum() / exact)
    np.testing.assert_allclose(report.tensors[0].sqnr_db, sqnr, atol=1e-3)


def test_a_folder_is_verified_and_loaded(tmp_path):
    x = np.random.default_rng(0).normal(0.2, 1, (64, 256)).astype(np.float32)
    (tmp_path / "a").mkdir()
    checkpoints.save(tmp_path / "a" / "model.safetensors", {NAME: x})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "a", tmp_path / "b", format="W4A16_ASYM")
    assert checkpoints.verify(tmp_path / "a", tmp_path / "b").problems == ()
    array = checkpoints.load(tmp_path / "b")[NAME]
    assert array.spec.zero_point
    spec = qt.spec("int4_group128").with_(zero_point=True)
    error = np.abs(np.asarray(array.dequantize()) - qt.fake_quantize(x, spec))
    assert error.max() < 1e-6


@pytest.mark.parametrize("as_rules", [False, True])
def test_activations_with_zero_points(tmp_path, as_rules):
    """Oracle: the folder of W8A8, which differs in one word of its config."""
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    (tmp_path / "a").mkdir()
    checkpoints.save(tmp_path / "a" / "model.safetensors", {NAME: x})
    (tmp_path / "a" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    configs = {}
    for scheme in ("W8A8", "W8A8_ASYM"):
        fmt = qt.Rules({"proj": scheme}) if as_rules else scheme
        convert(tmp_path / "a", tmp_path / scheme, format=fmt)
        assert checkpoints.verify(tmp_path / "a", tmp_path / scheme).problems == ()
        config = json.loads((tmp_path / scheme / "config.json").read_text())
        configs[scheme] = config["quantization_config"]
    entries = [load_file(tmp_path / scheme / "model.safetensors") for scheme in configs]
    assert entries[0].keys() == entries[1].keys()
    for name in entries[0]:
        np.testing.assert_array_equal(entries[0][name], entries[1][name])
    activations = configs["W8A8_ASYM"]["config_groups"]["group_0"]["input_activations"]
    assert activations["symmetric"] is False
    activations["symmetric"] = True
    assert configs["W8A8_ASYM"] == configs["W8A8"]


@pytest.mark.parametrize("layout", ["plain", "modelopt", "finegrained-fp8"])
def test_other_layouts_refuse_it_by_name(tmp_path, layout):
    checkpoints.save(tmp_path / "a.safetensors", {NAME: np.ones((128, 128), np.float32)})
    with refused(CheckpointError, f"layout {layout}: cannot hold .*zero_point=True"):
        convert(tmp_path / "a.safetensors", tmp_path / "b", format="W4A16_ASYM", layout=layout)
