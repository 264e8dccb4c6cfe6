"""Packed integers that compressed-tensors writes, against the package's own decompressor."""

import json

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from qtoolkit.checkpoints import dequantize_checkpoint

MODULE = "model.layers.0.mlp.down_proj"


def scales_of(weight, arguments):
    rows, columns = weight.shape
    shapes = {"tensor": (1, -1), "channel": (rows, -1), "group": (rows, columns // 32, 32)}
    view = weight.reshape(shapes[arguments.strategy.value])
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
    about |= {"config_groups": groups, "version": "0.20.0"}
    scheme = QuantizationConfig.model_validate(about).config_groups["group_0"]
    weight = torch.from_numpy(np.random.default_rng(0).normal(0.3, 1, (48, 160)).astype("float32"))
    scale, zero = scales_of(weight, scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(packed), scheme)["weight"]
    source = tmp_path / "src"
    source.mkdir()
    save_file(
        {f"{MODULE}.{name}": x.contiguous() for name, x in packed.items()},
        source / "model.safetensors",
    )
    (source / "config.json").write_text(json.dumps({"quantization_config": about}))
    dequantize_checkpoint(source, tmp_path / "dst", dtype="float32")
    found = load_file(tmp_path / "dst" / "model.safetensors")[f"{MODULE}.weight"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
