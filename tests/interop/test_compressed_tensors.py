"""Codes and values against the package compressed-tensors itself."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from qtoolkit import checkpoints
from qtoolkit.checkpoints import convert, dequantize_checkpoint, save

NAME = "model.layers.0.mlp.down_proj.weight"
PREFIX = NAME.removesuffix("weight")
FORMATS = [
    ("e4m3fn", "tensor"),
    ("e4m3fn", "channel"),
    ("e4m3fn", "block"),
    ("int8", "channel"),
    ("mxfp8_e4m3", None),
    ("mxfp4", None),
    ("nvfp4", None),
    ("int4_group128", None),
    ("int4_group32", None),
    ("int8_group128", None),
]


def weights(dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 384)) * np.exp(rng.normal(size=(256, 1)))
    x[3] = 0  # a channel of zeros
    x[130, 128:256] *= 100
    return x.astype(dtype)


def as_torch(path):
    """The tensors of a file as the package's own loader gives them."""
    from safetensors.torch import load_file

    return load_file(path)


def stored(tmp_path, x, fmt, scaling):
    save(tmp_path / "src.safetensors", {NAME: x})
    report = convert(
        tmp_path / "src.safetensors",
        tmp_path / "dst.safetensors",
        layout="compressed-tensors",
        format=fmt,
        scaling=scaling,
    )
    config = QuantizationConfig.model_validate(dict(report.quantization_config))
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    found = as_torch(tmp_path / "dst.safetensors")
    return {name.removeprefix(PREFIX): t for name, t in found.items()}, scheme, compressor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("fmt", "scaling"), FORMATS)
def test_codes_are_those_of_its_own_compress(tmp_path, fmt, scaling, dtype):
    """Given the scales that we store, byte for byte."""
    x = weights(dtype)
    ours, scheme, compressor = stored(tmp_path, x, fmt, scaling)
    scale = ours["weight_scale"]
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    state = {"weight": torch.from_numpy(x.astype(np.float32)), "weight_scale": scale.float()}
    if "weight_global_scale" in ours:
        state["weight_global_scale"] = ours["weight_global_scale"]
    theirs = compressor.compress(state, scheme)
    assert ours.keys() == theirs.keys()
    key = "weight_packed" if "weight_packed" in ours else "weight"
    assert ours[key].dtype == theirs[key].dtype
    got, expected = (t[key].view(torch.uint8).numpy() for t in (ours, theirs))
    # -0 and +0 are one number, and torch's cast to FP4 loses the sign of what rounds to 0.
    if key == "weight_packed" and ours[key].dtype == torch.uint8:
        assert np.mean(got != expected) <= 0.2
        got, expected = (_without_negative_zero(codes) for codes in (got, expected))
    np.testing.assert_array_equal(got, expected)
    if "weight_shape" in ours:
        assert ours["weight_shape"].tolist() == list(x.shape)


def _without_negative_zero(packed):
    nibbles = np.stack([packed & 15, packed >> 4])
    return np.where(nibbles == 8, 0, nibbles)


@pytest.mark.parametrize(("fmt", "scaling"), FORMATS)
def test_its_decompress_gives_the_values_that_dequantize_gives(tmp_path, fmt, scaling):
    ours, scheme, compressor = stored(tmp_path, weights("float32"), fmt, scaling)
    theirs = compressor.decompress(dict(ours), scheme)["weight"].float().numpy()
    dequantize_checkpoint(tmp_path / "dst.safetensors", tmp_path / "back.safetensors")
    values = checkpoints.load(tmp_path / "back.safetensors")[NAME]
    if fmt in ("nvfp4", "mxfp4"):  # it decompresses FP4 in bfloat16
        values = values.astype("bfloat16").astype(np.float32)
    np.testing.assert_array_equal(values, theirs)


@pytest.mark.parametrize(
    ("fmt", "scaling"), [("e4m3fn", "tensor"), ("e4m3fn", "channel"), ("mxfp4", None)]
)
def test_scales_are_those_of_its_observers(tmp_path, fmt, scaling):
    """Of a float32 weight; a channel of zeros has no scale that matters."""
    x = weights("float32")
    ours, scheme, _ = stored(tmp_path, x, fmt, scaling)
    grouped = torch.from_numpy(x)
    dims = None if scaling == "tensor" else -1
    if fmt == "mxfp4":
        grouped = grouped.reshape(256, -1, 32)
    low = grouped.min() if dims is None else grouped.amin(dims, keepdim=fmt == "e4m3fn")
    high = grouped.max() if dims is None else grouped.amax(dims, keepdim=fmt == "e4m3fn")
    scale, _ = calculate_qparams(low, high, scheme.weights)
    got = ours["weight_scale"]
    if got.dtype == torch.uint8:
        got = torch.exp2(got.float() - 127)
    live = (grouped.abs().amax(-1) > 0).reshape(got.shape) if dims else torch.ones(1, dtype=bool)
    torch.testing.assert_close(got[live], scale[live].float(), rtol=0, atol=0)


def test_the_global_scale_of_nvfp4_is_its_own_to_an_ulp(tmp_path):
    x = weights("float32")
    ours, _, _ = stored(tmp_path, x, "nvfp4", None)
    expected = generate_gparam(torch.tensor(x.min()), torch.tensor(x.max()))
    torch.testing.assert_close(ours["weight_global_scale"], expected, rtol=2**-23, atol=0)
