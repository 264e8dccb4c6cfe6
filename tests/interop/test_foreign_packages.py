"""Weights that MLX, bitsandbytes, HQQ, torchao and ComfyUI quantize, against their dequantizers.

No extra has these packages, some of which have no build for every machine: a test without its
package is skipped. `pip install "mlx[cpu]" bitsandbytes hqq torchao comfy-kitchen`, then run them.
The formulas in `tests/checkpoints/test_foreign_readers.py` need none, and run in CI.
"""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qtoolkit.checkpoints import dequantize_checkpoint, load

MODULE = "model.layers.0.mlp.down_proj"
WEIGHT = f"{MODULE}.weight"


def weight(shape=(64, 256)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def read(tmp_path, entries, config, metadata=None, name=WEIGHT):
    """The float32 values of the weight that a folder with these entries holds."""
    source = tmp_path / "source"
    source.mkdir()
    tensors = {key: tensor.contiguous() for key, tensor in entries.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt", **(metadata or {})})
    (source / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    dequantize_checkpoint(source, tmp_path / "values", dtype="float32")
    return load(tmp_path / "values")[name]


@pytest.mark.parametrize(
    ("mode", "bits", "length"),
    [
        *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
        *(("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)),
    ],
)
def test_mlx(tmp_path, mode, bits, length):
    mx = pytest.importorskip("mlx.core")
    settings = {"group_size": length, "bits": bits, "mode": mode}
    parts = mx.quantize(mx.array(weight().numpy()), **settings)
    source = tmp_path / "source"
    source.mkdir()
    names = zip(("weight", "scales", "biases"), parts, strict=False)
    mx.save_safetensors(
        str(source / "model.safetensors"), {f"{MODULE}.{name}": part for name, part in names}
    )
    (source / "config.json").write_text(json.dumps({"quantization": settings}))
    dequantize_checkpoint(source, tmp_path / "values", dtype="float32")
    found = load(tmp_path / "values")[WEIGHT]
    expected = np.asarray(mx.dequantize(*parts, **settings).astype(mx.float32))
    if mode != "affine":  # in bfloat16
        found = found.astype(ml_dtypes.bfloat16).astype(np.float32)
    # scale * code + bias in one rounding there, in two here.
    np.testing.assert_allclose(found, expected, 0, 2e-6 if mode == "affine" else 0)


@pytest.mark.parametrize("shape", [(64, 256), (64, 90)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(tmp_path, kind, nested, shape):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        weight(shape), quant_type=kind, compress_statistics=nested, blocksize=64
    )
    parts = {f"{WEIGHT}.{name}": part for name, part in state.as_dict(packed=True).items()}
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    found = read(tmp_path, {WEIGHT: codes, **parts}, config)
    expected = functional.dequantize_4bit(codes, state)
    np.testing.assert_array_equal(found, expected.float().numpy())


def test_bitsandbytes_int8(tmp_path):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, rows, _ = functional.int8_vectorwise_quant(weight().half())
    entries = {WEIGHT: codes, f"{MODULE}.SCB": rows}
    entries[f"{MODULE}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    expected = functional.int8_vectorwise_dequant(codes, rows).numpy()
    np.testing.assert_allclose(read(tmp_path, entries, config), expected, 2e-7)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_hqq(tmp_path, bits, axis):
    quantize = pytest.importorskip("hqq.core.quantize")
    linear = torch.nn.Linear(256, 64, bias=False)
    linear.weight.data = weight()
    config = quantize.BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    layer = quantize.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    entries = {f"{MODULE}.{name}": part for name, part in layer.state_dict().items()}
    about = {"quantization_config": {"quant_method": "hqq", "quant_config": {}}}
    found = read(tmp_path, entries, about)
    np.testing.assert_array_equal(found, layer.dequantize().numpy())


def torchao_tensors():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    def of(config):
        layer = torch.nn.Linear(256, 64, bias=False)
        layer.weight.data = weight()
        quantize_(layer, config)
        return layer.weight.data

    by_32 = PerGroup(32)
    elements = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}
    return {
        "int8": lambda: of(Int8WeightOnlyConfig(version=2)),
        "float8": lambda: of(Float8WeightOnlyConfig()),
        "int4": lambda: of(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=by_32)),
        "nvfp4": lambda: NVFP4Tensor.to_nvfp4(
            weight(), per_tensor_scale=torch.tensor(0.01), is_swizzled_scales=True
        ),
        **{
            name: lambda dtype=dtype: MXTensor.to_mx(
                weight(), dtype, block_size=32, is_swizzled_scales=True
            )
            for name, dtype in elements.items()
        },
    }


@pytest.mark.parametrize("kind", ["int8", "float8", "int4", "nvfp4", "mxfp8", "mxfp4"])
def test_torchao(tmp_path, kind):
    pytest.importorskip("torchao")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensor = torchao_tensors()[kind]()
    entries, metadata = flatten_tensor_state_dict({WEIGHT: tensor})
    config = {"quantization_config": {"quant_method": "torchao"}}
    found = read(tmp_path, entries, config, metadata)
    expected = tensor.dequantize().float().numpy()
    # NVFP4: (element * (tensor scale * scale)) in other programs, one product less here.
    np.testing.assert_allclose(found, expected, 2e-7 if kind == "nvfp4" else 0)


@pytest.mark.parametrize("mark", ["nvfp4", "mxfp8", "convrot_w4a4"])
def test_comfyui(tmp_path, mark):
    kitchen = pytest.importorskip("comfy_kitchen.backends.eager.quantization")
    from comfy_kitchen.backends.eager import convrot_w4a4 as four_bits

    x = weight((256, 512))
    entries, about = {}, {"format": mark}
    if mark == "nvfp4":
        second = x.abs().max() / (448 * 6)
        codes, scale = kitchen.quantize_nvfp4(x, second)
        entries[f"{WEIGHT}_scale_2"] = second
        expected = kitchen.dequantize_nvfp4(codes, second, scale, torch.float32)
    elif mark == "mxfp8":
        codes, scale = kitchen.quantize_mxfp8(x)
        expected = kitchen.dequantize_mxfp8(codes, scale, torch.float32)
    else:
        about["convrot_groupsize"] = 64
        codes, scale = four_bits.quantize_convrot_w4a4_weight(x, 64)
        expected = four_bits.dequantize_convrot_w4a4_weight(codes, scale, 64)
    entries |= {WEIGHT: codes, f"{WEIGHT}_scale": scale}
    entries[f"{MODULE}.comfy_quant"] = torch.frombuffer(
        bytearray(json.dumps(about).encode()), dtype=torch.uint8
    )
    found = read(tmp_path, entries, {})
    bounds = {"mxfp8": (0, 0), "nvfp4": (2e-7, 0), "convrot_w4a4": (1e-5, 1e-6)}
    np.testing.assert_allclose(found, expected.numpy(), *bounds[mark])


def test_comfyui_rotation(tmp_path):
    kitchen = pytest.importorskip("comfy_kitchen.backends.eager.quantization")
    codes, scale = kitchen.quantize_int8_convrot_weight(weight(), 64)
    about = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
    mark = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    entries = {WEIGHT: codes, f"{WEIGHT}_scale": scale, f"{MODULE}.comfy_quant": mark}
    expected = kitchen.dequantize_int8_convrot_weight(codes, scale, 64).numpy()
    np.testing.assert_allclose(read(tmp_path, entries, {}), expected, 1e-5, 1e-6)
