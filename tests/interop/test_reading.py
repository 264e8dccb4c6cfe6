"""Weights that other programs wrote, against what their own packages make of them."""

import json

import compressed_tensors
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qtoolkit.checkpoints import convert, dequantize_checkpoint

MODULE = "model.layers.0.mlp.down_proj"


def scales_of(weight, arguments):
    rows, columns = weight.shape
    shapes = {"tensor": (1, -1), "channel": (rows, -1), "group": (rows, columns // 32, 32)}
    view = weight.reshape(shapes[str(arguments.strategy)])
    scale, zero = calculate_qparams(view.amin(-1), view.amax(-1), arguments)
    return (
        (scale, zero) if scale.ndim == 2 or scale.numel() == 1 else (scale[:, None], zero[:, None])
    )


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_integers_are_those_of_the_packages_decompressor(
    tmp_path, bits, strategy, is_symmetric
):
    arguments = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": strategy}
    arguments |= {"group_size": 32 if strategy == "group" else None}
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    about = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    about |= {"config_groups": groups, "version": compressed_tensors.__version__}
    scheme = QuantizationConfig.model_validate(about).config_groups["group_0"]
    weight = torch.from_numpy(np.random.default_rng(0).normal(0.3, 1, (48, 160)).astype("float32"))
    scale, zero = scales_of(weight, scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(packed), scheme)["weight"]
    entries = {f"{MODULE}.{name}": x.contiguous() for name, x in packed.items()}
    found = values(source_of(tmp_path / "src", about, entries))[f"{MODULE}.weight"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def source_of(path, config, entries):
    path.mkdir()
    save_file(entries, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def values(source):
    dequantize_checkpoint(source, source.with_name("dst"), dtype="float32")
    return load_file(source.with_name("dst") / "model.safetensors")


def any_bytes(*shape, low=0, high=256):
    made = np.random.default_rng(0).integers(low, high, shape, np.uint8)
    return torch.from_numpy(made)


def test_gpt_oss_experts_are_read_as_transformers_does(tmp_path):
    blocks, scales = any_bytes(3, 40, 2, 16), any_bytes(3, 40, 2, low=110, high=140)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    entries = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    found = values(source_of(tmp_path / "src", {"quant_method": "mxfp4"}, entries))
    torch.testing.assert_close(found[name], expected, rtol=0, atol=0)


def test_gpt_oss_experts_are_written_as_transformers_reads(tmp_path):
    """Weights that MXFP4 holds exactly come back exactly, in transformers' order of axes."""
    weights = convert_moe_packed_tensors(
        any_bytes(3, 40, 2, 16), any_bytes(3, 40, 2, low=110, high=140), dtype=torch.float32
    )
    name = "model.layers.0.mlp.experts.gate_up_proj"
    src = tmp_path / "src.safetensors"
    save_file({name: weights}, src)
    dst = tmp_path / "dst.safetensors"
    convert(src, dst, layout="gpt-oss", format="mxfp4", channel_axis="last")
    written = load_file(dst)
    found = convert_moe_packed_tensors(
        written[f"{name}_blocks"], written[f"{name}_scales"], dtype=torch.float32
    )
    torch.testing.assert_close(found, weights, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["fp4", "blocks", "mxfp8"])
def test_deepseek_v4_weights_are_read_as_transformers_does(tmp_path, kind):
    codes, scale = any_bytes(256, 256, high=127).view(torch.float8_e4m3fn), (2, 2)
    if kind == "fp4":
        codes, scale = any_bytes(256, 128).view(torch.int8), (256, 8)
    elif kind == "mxfp8":
        scale = (256, 8)
    scales = any_bytes(*scale, low=110, high=140)
    name, dtype = "scale", torch.float8_e8m0fnu
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if kind == "mxfp8":
        name, dtype = "weight_scale_inv", torch.uint8
        config = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales.view(dtype), torch.float32)
    entries = {f"{MODULE}.weight": codes, f"{MODULE}.{name}": scales.view(dtype)}
    found = values(source_of(tmp_path / "src", config, entries))
    torch.testing.assert_close(found[f"{MODULE}.weight"], expected, rtol=0, atol=0)
