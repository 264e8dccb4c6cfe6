"""Codes and values against the package compressed-tensors itself."""

import json

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from qtoolkit import checkpoints
from qtoolkit.checkpoints import convert, dequantize_checkpoint, save, verify

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
    ("W4A16_ASYM", None),
]


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def weights(dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 384)) * np.exp(rng.normal(size=(256, 1)))
    x[3] = 0  # a channel of zeros
    x[130, 128:256] *= 100
    x[7, ::32] = 448 * np.exp2(np.arange(-5, 7))  # where the powers of two of MX change
    x[8, ::32] = 447.5 * np.exp2(np.arange(-5, 7))
    return x.astype(dtype)


def converted(tmp_path, x, fmt, scaling):
    """What we write of a weight, its scheme in the package, and the class that compresses by it."""
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
    found = load_file(tmp_path / "dst.safetensors")
    return {name.removeprefix(PREFIX): t for name, t in found.items()}, scheme, compressor


def compressed(weight, scheme, compressor):
    """What the package makes of a weight: its own scales, then its own codes.

    The observer is that of llm-compressor, "memoryless_minmax": `observers/min_max.py`, with
    `_flatten_weight` in `observers/helpers.py`.
    """
    args = scheme.weights
    groups = {
        "tensor": lambda: weight.reshape(1, -1),
        "channel": lambda: weight.unsqueeze(-2),
        "block": lambda: _blocks(weight, *(args.block_structure or ())),
    }.get(args.strategy, lambda: weight.unflatten(-1, (-1, args.group_size)))()
    low, high, state = groups.amin(-1), groups.amax(-1), {"weight": weight}
    second = None
    if args.strategy == "tensor_group":
        amax = weight.abs().max().reshape(1)
        second = state["weight_global_scale"] = generate_gparam(-amax, amax)
    scale, zero_point = calculate_qparams(low, high, args, global_scale=second)
    if not args.symmetric:
        state["weight_zero_point"] = zero_point
    # The parameter that holds the scales of a layer has the dtype of its weight.
    return compressor.compress(state | {"weight_scale": scale.to(weight.dtype)}, scheme)


def _blocks(weight, height, width):
    rows, columns = weight.shape
    view = weight.reshape(rows // height, height, columns // width, width)
    return view.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize(("fmt", "scaling"), FORMATS)
def test_scales_and_codes_are_its_own(tmp_path, fmt, scaling):
    """Byte for byte, from float32 weights alone; blocks of zeros have scales that do not matter."""
    x = weights("float32")
    x[3] = x[4]  # a channel of zeros, for which the package takes the machine epsilon
    ours, scheme, compressor = converted(tmp_path, x, fmt, scaling)
    theirs = compressed(torch.from_numpy(x), scheme, compressor)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (expected.dtype, expected.shape)
        assert_same_bytes(ours[name], expected, name)
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file({PREFIX + name: t for name, t in theirs.items()}, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (folder / "config.json").write_text(json.dumps(config))
    assert verify(tmp_path / "src.safetensors", folder).problems == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fmt", "scaling"), FORMATS)
def test_codes_are_those_of_its_own_compress(tmp_path, fmt, scaling, dtype):
    """Given the scales that we store, byte for byte, whatever the dtype of the weights.

    With zero points but for quotients in the middle of two codes: the package adds the zero point
    before it rounds, ONNX and we after it.
    """
    ours, scheme, compressor = converted(tmp_path, weights(dtype), fmt, scaling)
    state = {"weight": load_file(tmp_path / "src.safetensors")[NAME]}
    assert state["weight"].dtype == DTYPES[dtype]
    state["weight_scale"] = scale = ours["weight_scale"]
    if scale.dtype == torch.uint8:
        state["weight_scale"] = torch.exp2(scale.float() - 127)
    elif "weight_global_scale" in ours:
        state["weight_scale"] = scale.float()
        state["weight_global_scale"] = ours["weight_global_scale"]
    if "weight_zero_point" in ours:
        state["weight_zero_point"] = unpack_from_int32(
            ours["weight_zero_point"], scheme.weights.num_bits, scale.shape, packed_dim=0
        )
    theirs = compressor.compress(state, scheme)
    assert ours.keys() == theirs.keys()
    name = "weight_packed" if "weight_packed" in ours else "weight"
    if "weight_zero_point" not in ours:
        assert_same_bytes(ours[name], theirs[name], name)
        return
    quotients = state["weight"].float() / scale.repeat_interleave(128, 1)
    is_middle = quotients.frac().abs() == 0.5
    codes = [unpack_from_int32(one[name], 4, quotients.shape) for one in (ours, theirs)]
    assert torch.equal(codes[0][~is_middle], codes[1][~is_middle])
    assert (codes[0] - codes[1]).abs().max() <= 1


def assert_same_bytes(ours, theirs, name):
    got, wanted = (t.contiguous().view(torch.uint8).numpy() for t in (ours, theirs))
    np.testing.assert_array_equal(got, wanted, name)


@pytest.mark.parametrize(("fmt", "scaling"), FORMATS)
def test_its_decompress_gives_the_values_that_dequantize_gives(tmp_path, fmt, scaling):
    ours, scheme, compressor = converted(tmp_path, weights("float32"), fmt, scaling)
    theirs = compressor.decompress(dict(ours), scheme)["weight"].float().numpy()
    dequantize_checkpoint(tmp_path / "dst.safetensors", tmp_path / "back.safetensors")
    values = checkpoints.load(tmp_path / "back.safetensors")[NAME]
    if fmt in ("nvfp4", "mxfp4"):  # it decompresses FP4 in bfloat16
        values = values.astype("bfloat16").astype(np.float32)
    np.testing.assert_array_equal(values, theirs)
