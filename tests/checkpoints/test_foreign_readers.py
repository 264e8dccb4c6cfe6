"""AutoRound, MLX, bitsandbytes, HQQ, torchao, ComfyUI, modelopt's AWQ: values by their formulas.

Each oracle is the formula of the program that is named beside it, in NumPy, element by element, and
shares no code with qtoolkit. `tests/interop/test_foreign_packages.py` has the programs themselves.
"""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from refused import refused

from qtoolkit.checkpoints import (
    CheckpointError,
    compare,
    convert,
    dequantize_checkpoint,
    load,
    save,
)
from qtoolkit.scaling import QArray

E4M3, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MODULE = "model.layers.0.mlp.down_proj"
WEIGHT = f"{MODULE}.weight"
ROWS, COLUMNS = 64, 128


def rng():
    return np.random.default_rng(1)


def words(codes, bits):
    """Bit by bit: the first code in the low bits, codes across the ends of words of 32 bits."""
    stream = (codes[..., None].astype(np.uint32) >> np.arange(bits, dtype=np.uint32)) & 1
    stream = stream.reshape(*codes.shape[:-1], -1, 32)
    return (stream.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)


def repeated(x, length):
    return np.repeat(np.asarray(x, np.float32), length, -1)


def text(value):
    return np.frombuffer(value.encode(), np.uint8)


# Each case: (config.json, metadata, entries, weights).


def auto_round(packing, bits, shift):
    """qlinear_torch.py and qlinear_torch_zp.py, forward: scale * (q - zero)."""
    codes = rng().integers(0, 2**bits, (COLUMNS, ROWS))
    zeros = rng().integers(1, 2**bits, (4, ROWS))
    scales = rng().uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    values = (codes - np.repeat(zeros, 32, 0)) * np.repeat(scales.astype(np.float32), 32, 0)
    entries = {
        f"{MODULE}.qweight": np.ascontiguousarray(words(codes.T, bits).T).view(np.int32),
        f"{MODULE}.qzeros": words(zeros - shift, bits).view(np.int32),
        f"{MODULE}.scales": scales,
    }
    config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": False}
    config |= {"packing_format": packing} if packing else {}
    return {"quantization_config": config}, {}, entries, {WEIGHT: values.T}


def auto_round_awq():
    """export_to_awq/utils.py: nibble i of a word is output (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    about, _, entries, expected = auto_round("auto_round:auto_awq", 4, 0)
    codes = rng().integers(0, 16, (COLUMNS, ROWS))
    zeros = rng().integers(1, 16, (4, ROWS))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for name, x in (("qweight", codes), ("qzeros", zeros)):
        moved = x.reshape(len(x), -1, 8)[:, :, order].reshape(x.shape)
        entries[f"{MODULE}.{name}"] = words(moved, 4).view(np.int32)
    return about, {}, entries, expected


def mlx(bits, length, mode="affine", own=None, shape=(ROWS, COLUMNS)):
    """ops.cpp, affine_dequantize and fp_dequantize."""
    codes = rng().integers(0, 2**bits, shape)
    counts = (*shape[:-1], shape[-1] // length)
    entries = {WEIGHT: words(codes, bits)}
    if mode == "affine":
        scales, biases = (rng().normal(size=counts).astype(np.float16) for _ in range(2))
        entries |= {f"{MODULE}.scales": scales, f"{MODULE}.biases": biases}
        values = codes * repeated(scales, length) + repeated(biases, length)
    else:
        scales = rng().integers(110, 120, counts, np.uint8)
        entries[f"{MODULE}.scales"] = scales
        factor = (
            scales.view(E4M3).astype(np.float32) if mode == "nvfp4" else 2.0 ** (scales - 127.0)
        )
        codes = np.where(codes % 128 == 127, 0, codes) if bits == 8 else codes
        entries[WEIGHT] = words(codes, bits)
        numbers = E2M1[codes] if bits == 4 else codes.astype(np.uint8).view(E4M3).astype(np.float32)
        values = numbers * repeated(factor, length)
    about = {"group_size": length, "bits": bits} | ({} if mode == "affine" else {"mode": mode})
    if own:
        about = {"group_size": 64, "bits": 4, MODULE: about, "model.norm": False}
    return {"quantization": about, "quantization_config": about}, {}, entries, {WEIGHT: values}


NF4 = np.float32(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
FP4 = np.float32([0, 0.0052083334885537624, 0.6666666865348816, 1, 0.3333333432674408, 0.5])
FP4 = np.append(FP4, np.float32([0.1666666716337204, 0.25]))
TABLES = {"nf4": NF4, "fp4": np.append(FP4, -FP4)}


def bitsandbytes(kind, shape, nested, block=64):
    """functional.py, dequantize_4bit and dequantize_blockwise: blocks of the flat weight."""
    codes = rng().integers(0, 16, shape).reshape(-1)
    blocks = -(-codes.size // block)
    absmax = rng().uniform(0.1, 3, blocks).astype(np.float32)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    entries = {}
    if nested:
        small = rng().integers(0, 256, blocks).astype(np.uint8)
        table = np.linspace(-1, 1, 256, dtype=np.float32)
        second = rng().uniform(0.5, 2, -(-blocks // 16)).astype(np.float32)
        absmax = table[small] * np.repeat(second, 16)[:blocks] + np.float32(2.5)
        entries = {f"{WEIGHT}.nested_absmax": second, f"{WEIGHT}.nested_quant_map": table}
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 2.5}
    entries |= {
        WEIGHT: (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        f"{WEIGHT}.absmax": small if nested else absmax,
        f"{WEIGHT}.quant_map": TABLES[kind],
        f"{WEIGHT}.quant_state.bitsandbytes__{kind}": text(json.dumps(state)),
    }
    values = TABLES[kind][codes] * np.repeat(absmax, block)[: codes.size]
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return {"quantization_config": config}, {}, entries, {WEIGHT: values.reshape(shape)}


def bitsandbytes_int8():
    """transformers, dequantize_bnb_weight: CB * SCB / 127."""
    codes = rng().integers(-127, 128, (ROWS, COLUMNS)).astype(np.int8)
    rows = rng().uniform(0.1, 3, ROWS).astype(np.float32)
    entries = {WEIGHT: codes, f"{MODULE}.SCB": rows, f"{MODULE}.weight_format": np.uint8(0)}
    values = codes * rows[:, None].astype(np.float64) / 127
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return {"quantization_config": config}, {}, entries, {WEIGHT: values.astype(np.float32)}


def hqq(bits, axis, group=32):
    """core/bitpack.py and Quantizer.dequantize; the first part of the weight in the high bits."""
    groups = ROWS * COLUMNS // group
    codes = rng().integers(0, 2**bits, (groups, group) if axis else (group, groups))
    scale, zero = (
        rng().normal(size=(groups, 1) if axis else (1, groups)).astype(np.float16) for _ in "ab"
    )
    values = (np.float32(codes) - zero) * scale.astype(np.float32)
    count = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    padded = np.zeros((-(-len(codes) // count) * count, codes.shape[1]), np.int64)
    padded[: len(codes)] = codes
    step, packed = len(padded) // count, 0
    for part in range(count):
        packed = packed | padded[part * step : (part + 1) * step] << bits * (count - 1 - part)
    packing = "3bit_32" if bits == 3 else f"{bits}bit_u8"
    entries = {
        f"{MODULE}.W_q": packed.astype(np.int32 if bits == 3 else np.uint8),
        f"{MODULE}.scale": scale,
        f"{MODULE}.zero": zero,
        f"{MODULE}.shape": np.int64([ROWS, COLUMNS]),
        f"{MODULE}.nbits": np.int32(bits),
        f"{MODULE}.axis": np.int32(axis),
        f"{MODULE}.group_size": np.int32(group),
        f"{MODULE}.packing": text(packing),
        f"{MODULE}.compute_dtype": text("torch.float16"),
        f"{MODULE}.view_as_float": np.uint8(0),
        f"{MODULE}.bias": np.ones(ROWS, np.float16),
    }
    config = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}
    return {"quantization_config": config}, {}, entries, {WEIGHT: values.reshape(ROWS, COLUMNS)}


def torchao(kind, parts, values, **settings):
    parts = {f"{MODULE}._weight_{name}": part for name, part in parts.items()}
    about = {"_type": kind, "_data": settings, "_tensor_data_names": []}
    norm = {"model.norm.weight": np.ones(4, np.float32)}
    metadata = {WEIGHT: json.dumps(about), "model.norm.weight": json.dumps({"_type": "Tensor"})}
    metadata["tensor_names"] = json.dumps([WEIGHT, *norm])
    config = {"quantization_config": {"quant_method": "torchao"}}
    return config, metadata, parts | norm, {WEIGHT: values} | norm


def torchao_float8():
    codes = rng().normal(size=(ROWS, COLUMNS)).astype(E4M3)
    scale = rng().uniform(0.1, 1, (ROWS, 1)).astype(np.float32)
    parts = {"qdata": codes, "scale": scale}
    values = codes.astype(np.float32) * scale
    return torchao("Float8Tensor", parts, values, block_size=[1, COLUMNS])


def torchao_bytes(kind, length, has_zero, factors=False):
    """dequantize_affine: (q - zero point) * scale; act_pre_scale multiplies inputs."""
    codes = rng().integers(-8, 8, (ROWS, COLUMNS)).astype(np.int8)
    scale = rng().uniform(0.1, 1, (ROWS, COLUMNS // length)).astype(np.float32)
    zero = (rng().integers(-8, 8, scale.shape) * has_zero).astype(np.int8)
    values = (codes - repeated(zero, length)) * repeated(scale, length)
    parts = {"qdata": codes, "scale": scale, "zero_point": zero}
    if factors:
        parts["act_pre_scale"] = rng().uniform(0.5, 2, COLUMNS).astype(np.float32)
        values = values * parts["act_pre_scale"]
    return torchao(kind, parts, values, block_size=[1, length])


def torchao_int4():
    """int4_row_quantize_zp: x = q * scale + zero point, scales [groups, outputs]."""
    codes = rng().integers(-8, 8, (ROWS, COLUMNS))
    scale, zero = (rng().normal(size=(4, ROWS)).astype(np.float32) for _ in "ab")
    values = np.float32(codes) * repeated(scale.T, 32) + repeated(zero.T, 32)
    packed = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).astype(np.uint8)
    parts = {"qdata": packed, "scale": scale, "zero_point": zero}
    return torchao("Int4Tensor", parts, values, block_size=[1, 32], shape=[ROWS, COLUMNS])


def tiled(scales):
    """cuBLAS: 128 rows by 4 columns a tile, row 32 i + j at [j, i]."""
    rows, columns = scales.shape
    out = np.zeros((-(-rows // 128), -(-columns // 4), 32, 4, 4), scales.dtype)
    for row in range(rows):
        for column in range(columns):
            place = (row // 128, column // 4, row % 32, row % 128 // 32, column % 4)
            out[place] = scales[row, column]
    return out.reshape(-1, 16)


def torchao_groups(kind, is_tiled, rows=160):
    packed = rng().integers(0, 256, (rows, 96), np.uint8)
    if kind == "NVFP4Tensor":
        scale = np.abs(rng().normal(size=(rows, 12))).astype(E4M3)
        factors = scale.astype(np.float32) * np.float32(0.3)
        settings = {"block_size": 16}
    else:
        scale = rng().integers(118, 130, (rows, 6), np.uint8)
        factors = 2.0 ** (scale - 127.0)
        settings = {"block_size": 32, "elem_dtype": {"_data": "float4_e2m1fn_x2"}}
    values = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1).reshape(rows, -1)
    values = np.float32(values * repeated(factors, values.shape[1] // scale.shape[1]))
    stored = tiled(scale.view(np.uint8)) if is_tiled else scale.view(np.uint8)
    parts = {"qdata": packed, "scale": stored.view(E4M3 if "NV" in kind else E8M0)}
    parts |= {"per_tensor_scale": np.float32(0.3)} if kind == "NVFP4Tensor" else {}
    return torchao(kind, parts, values, is_swizzled_scales=is_tiled, **settings)


def comfyui():
    """comfy/ops.py: weight * scale_weight; scale_input is of activations."""
    codes = rng().normal(size=(ROWS, COLUMNS)).astype(E4M3)
    entries = {
        WEIGHT: codes,
        f"{MODULE}.scale_weight": np.float32([0.3]),
        f"{MODULE}.scale_input": np.float32(2),
        "scaled_fp8": np.zeros(2, E4M3),
    }
    return {}, {}, entries, {WEIGHT: codes.astype(np.float32) * np.float32(0.3)}


def comfyui_marked(tensors, about, mark, values):
    entries, metadata = dict(tensors), {}
    if mark == "tensor":
        entries[f"{MODULE}.comfy_quant"] = text(json.dumps(about))
    else:
        metadata["_quantization_metadata"] = json.dumps({"layers": {MODULE: about}})
    return {}, metadata, entries, {WEIGHT: values.astype(np.float32)}


def comfyui_rotated(mark, bits=8):
    """comfy-kitchen, dequantize_int8_convrot_weight: (q * scale) @ H by groups; here n = 16."""
    codes = rng().integers(1 - 2 ** (bits - 1), 2 ** (bits - 1), (ROWS, COLUMNS)).astype(np.int8)
    scale = rng().uniform(0.001, 0.01, (ROWS, 1)).astype(np.float32)
    four = np.ones((4, 4)) - 2 * np.eye(4)[::-1]
    matrix = np.einsum("ik,jl->ijkl", four, four).reshape(16, 16) / 4
    values = ((codes * scale).reshape(ROWS, -1, 16) @ matrix).reshape(ROWS, COLUMNS)
    about = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}
    if bits == 4:
        about = {"format": "convrot_w4a4", "convrot_groupsize": 16}
        codes, scale = codes[:, ::2] & 15 | codes[:, 1::2] << 4, scale[:, 0]
    return comfyui_marked({WEIGHT: codes, f"{WEIGHT}_scale": scale}, about, mark, values)


def comfyui_nvfp4(mark):
    """comfy-kitchen, dequantize_nvfp4: the first of two codes high, scales in tiles."""
    packed = rng().integers(0, 256, (160, 96), np.uint8)
    scale = np.abs(rng().normal(size=(160, 12))).astype(E4M3)
    values = np.stack([E2M1[packed >> 4], E2M1[packed & 15]], -1).reshape(160, -1)
    values = values * (repeated(scale, 16) * np.float32(0.3))
    parts = {f"{WEIGHT}_scale": tiled(scale.view(np.uint8)).view(E4M3)}
    parts |= {WEIGHT: packed, f"{WEIGHT}_scale_2": np.float32(0.3)}
    return comfyui_marked(parts, {"format": "nvfp4"}, mark, values)


def comfyui_mxfp8(mark):
    """sglang#38028: scales lie in tiles, and have the shape that they would have in rows."""
    codes = rng().normal(size=(128, 256)).astype(E4M3)
    scale = rng().integers(118, 130, (128, 8), np.uint8)
    values = codes.astype(np.float32) * repeated(2.0 ** (scale - 127.0), 32)
    parts = {WEIGHT: codes, f"{WEIGHT}_scale": tiled(scale).reshape(128, 8)}
    return comfyui_marked(parts, {"format": "mxfp8"}, mark, values)


def modelopt_awq(algorithm="NVFP4_AWQ"):
    """torch/export/quant_utils.py: inputs times pre_quant_scale, weights NVFP4."""
    packed = rng().integers(0, 256, (ROWS, COLUMNS // 2), np.uint8)
    scale = np.abs(rng().normal(size=(ROWS, COLUMNS // 16))).astype(E4M3)
    factors = rng().uniform(0.5, 2, COLUMNS).astype(BF16)
    values = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1).reshape(ROWS, -1)
    values = values * (repeated(scale, 16) * np.float32(0.5)) * factors.astype(np.float32)
    entries = {
        WEIGHT: packed,
        f"{WEIGHT}_scale": scale,
        f"{WEIGHT}_scale_2": np.float32(0.5),
        f"{MODULE}.input_scale": np.float32(0.1),
        f"{MODULE}.pre_quant_scale": factors,
    }
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16}
    return {"quantization_config": config}, {}, entries, {WEIGHT: values}


def in_floats(make, entry):
    """The same folder with codes stored as float32 (bnb_4bit_quant_storage, view_as_float)."""
    config, metadata, entries, expected = make()
    entries[entry] = entries[entry].reshape(-1).view(np.float32)[:, None]
    return config, metadata, entries, expected


CASES = {
    "nf4_floats": lambda: in_floats(lambda: bitsandbytes("nf4", (ROWS, 90), False), WEIGHT),
    "hqq_floats": lambda: in_floats(lambda: hqq(4, 1), f"{MODULE}.W_q"),
    **{f"auto_round_{b}": lambda b=b: auto_round("auto_round:auto_gptq", b, 1) for b in (2, 4, 8)},
    "auto_round_default": lambda: auto_round(None, 4, 1),
    "auto_round_gptqmodel": lambda: auto_round("auto_round:gptqmodel", 4, 0),
    "auto_round": lambda: auto_round("auto_round", 3, 0),
    "auto_round_awq": auto_round_awq,
    **{f"mlx_{bits}": lambda bits=bits: mlx(bits, 64) for bits in (1, 2, 3, 4, 5, 6, 8)},
    "mlx_own": lambda: mlx(8, 32, own=True),
    "mlx_experts": lambda: mlx(4, 32, shape=(3, 16, 64)),
    "mlx_mxfp4": lambda: mlx(4, 32, "mxfp4"),
    "mlx_mxfp4_experts": lambda: mlx(4, 32, "mxfp4", shape=(3, 16, 64)),
    "mlx_mxfp8": lambda: mlx(8, 32, "mxfp8"),
    "mlx_nvfp4": lambda: mlx(4, 16, "nvfp4"),
    **{
        f"{kind}_{columns}{'_nested' * nested}": lambda k=kind, c=columns, n=nested: bitsandbytes(
            k, (ROWS, c), n
        )
        for kind in ("nf4", "fp4")
        for columns in (128, 90)
        for nested in (False, True)
    },
    "nf4_experts": lambda: bitsandbytes("nf4", (3, 16, 64), True),
    "bitsandbytes_int8": bitsandbytes_int8,
    **{
        f"hqq_{bits}_{axis}": lambda b=bits, a=axis: hqq(b, a)
        for bits in (1, 2, 3, 4, 8)
        for axis in (0, 1)
    },
    "torchao_float8": torchao_float8,
    "torchao_int8": lambda: torchao_bytes("Int8Tensor", COLUMNS, False),
    "torchao_int8_zero": lambda: torchao_bytes("Int8Tensor", COLUMNS, True),
    "torchao_int8_factors": lambda: torchao_bytes("Int8Tensor", COLUMNS, False, True),
    "torchao_intx": lambda: torchao_bytes("IntxUnpackedToInt8Tensor", 32, True),
    "torchao_intx_symmetric": lambda: torchao_bytes("IntxUnpackedToInt8Tensor", 32, False),
    "torchao_int4": torchao_int4,
    **{
        f"{kind}_{is_tiled}": lambda k=kind, t=is_tiled: torchao_groups(k, t)
        for kind in ("NVFP4Tensor", "MXTensor")
        for is_tiled in (False, True)
    },
    "comfyui": comfyui,
    **{
        f"comfyui_{name}_{mark}": lambda make=make, mark=mark: make(mark)
        for mark in ("tensor", "metadata")
        for name, make in (
            *(("rotated", comfyui_rotated), ("nvfp4", comfyui_nvfp4), ("mxfp8", comfyui_mxfp8)),
            ("rotated_4", lambda mark: comfyui_rotated(mark, 4)),
        )
    },
    "modelopt_awq": modelopt_awq,
    "modelopt_w4a16": lambda: modelopt_awq("W4A16_NVFP4"),
}
# What no QArray can hold is loaded as float32.
IS_ARRAY = ("auto_round", "mlx_mx", "mlx_nv", "nf4_128", "nf4_experts", "bitsandbytes_int8")
IS_ARRAY += ("comfyui_nvfp4", "comfyui_mxfp8")
IS_ARRAY += ("torchao_float8", "torchao_int8", "torchao_intx", "NVFP4", "MXTensor")


def folder(path, about, metadata, entries):
    path.mkdir()
    save(path / "model.safetensors", entries, metadata)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **about}))
    return path


def assert_values(found, expected, case):
    # SCB / 127 is rounded before it multiplies; a rotation sums 16 products.
    tolerance = {"bitsandbytes_int8": 2e-7, "comfyui_rotated": 1e-5}
    rtol = next((bound for name, bound in tolerance.items() if case.startswith(name)), 0)
    for name, values in expected.items():
        assert found[name].shape == values.shape
        np.testing.assert_allclose(found[name], values, rtol, rtol and 1e-6, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_weights_have_the_values_of_the_programs_own_formula(tmp_path, case):
    about, metadata, entries, expected = CASES[case]()
    source = folder(tmp_path / "source", about, metadata, entries)
    dequantize_checkpoint(source, tmp_path / "values", dtype="float32")
    found = load(tmp_path / "values")
    assert_values(found, expected, case)
    assert {name for name in found if not name.endswith("bias")} == expected.keys()
    config = json.loads((tmp_path / "values" / "config.json").read_text())
    assert config == {"model_type": "llama"}
    assert compare(source, tmp_path / "values").equal
    loaded = load(source)
    is_array = (case.startswith(IS_ARRAY) or case == "comfyui") and "factors" not in case
    assert isinstance(loaded[WEIGHT], QArray) == is_array
    found = {n: x.dequantize("float32") if isinstance(x, QArray) else x for n, x in loaded.items()}
    assert_values(found, expected, case)


@pytest.mark.parametrize(
    "case",
    ["mlx_4", "mlx_experts", "nf4_128_nested", "hqq_3_0", "torchao_int4", "NVFP4Tensor_True"],
)
def test_convert_quantizes_the_weights(tmp_path, case):
    about, metadata, entries, _ = CASES[case]()
    source = folder(tmp_path / "source", about, metadata, entries)
    dequantize_checkpoint(source, tmp_path / "values", dtype="float32")
    for path in ("source", "values"):
        convert(tmp_path / path, tmp_path / f"{path}_8", format="int8", layout="plain")
    found, expected = (load(tmp_path / f"{path}_8") for path in ("source", "values"))
    assert found.keys() == expected.keys()
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


def changed(entries, **changes):
    return entries | {f"{MODULE}.{name}": value for name, value in changes.items()}


REFUSED = {
    "packing": (
        "auto_round",
        {"packing_format": "auto_round:llm_compressor"},
        {},
        "packing_format",
    ),
    "floats": ("auto_round", {"data_type": "nv_fp"}, {}, "data_type nv_fp"),
    "mode": ("mlx_4", {"mode": "turbo"}, {}, "mode turbo"),
    "bits": ("mlx_4", {"bits": 7}, {}, "quantization .*expected bits of 1, 2"),
    "other bits": ("mlx_4", {"bits": 8}, {}, r"scales: .*expected a scale for every 64"),
    "biases": ("mlx_4", {}, {"biases": None}, "biases: no such tensor"),
    "global scale": ("mlx_nvfp4", {}, {"global_scale": np.ones(1, np.float32)}, "global_scale"),
    "order": ("bitsandbytes_int8", {}, {"weight_format": np.uint8(2)}, "weight_format.*row"),
    "table": ("nf4_128", {}, {"weight.quant_map": NF4[::-1].copy()}, "quant_map.*those of nf4"),
    "absmax": ("nf4_128", {}, {"weight.absmax": NF4}, "a scale for each block"),
    "turned": ("nf4_128", {}, {"weight": np.zeros((1, 3072), np.uint8)}, "in one column"),
    "hqq": ("hqq_4_1", {}, {"packing": text("4bit_32")}, "expected 8bit_u8"),
    "shape": ("hqq_4_1", {}, {"shape": np.int64([ROWS, 2 * COLUMNS])}, "W_q: .*in groups"),
    "class": ("torchao_int8", {}, {"_weight_scale": None}, "expected Float8Tensor"),
    "bits as text": ("mlx_4", {"bits": "4"}, {}, "quantization .*'bits': '4'"),
    # mlx-lm#1214: loaders rename modules, and then miss what the config says of them.
    "other module": ("mlx_8", {"model.q": {"bits": 4, "group_size": 64}}, {}, "model.q .*a quant"),
    "two types": (
        *("nf4_128", {}),
        {"weight.quant_state.bitsandbytes__nf4": text('{"quant_type": "fp4", "shape": [64, 128]}')},
        "two codes of nf4 or fp4",
    ),
    "axis": ("hqq_4_1", {}, {"axis": np.int32(0)}, "axis: other groups than those of scale"),
    "factors": ("modelopt_awq", {}, {"pre_quant_scale": np.ones(3, np.float32)}, "each input"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused_by_name(tmp_path, case):
    name, changes, parts, message = REFUSED[case]
    about, metadata, entries, _ = CASES[name]()
    for part in about.values():
        part |= changes
    entries = {n: x for n, x in changed(entries, **parts).items() if x is not None}
    source = folder(tmp_path / "source", about, metadata, entries)
    refused(CheckpointError, message, dequantize_checkpoint, source, tmp_path / "values")


@pytest.mark.parametrize("module", ["self_attn.q_proj", "vision_tower.q_proj"])
def test_bits_and_groups_of_mlx_that_do_not_fit_the_hidden_size_are_refused(tmp_path, module):
    """4 bits in groups of 64 have the shapes of 8 in groups of 32 of half as many inputs."""
    _, _, entries, _ = mlx(8, 32)
    entries = {name.replace(MODULE, module): part for name, part in entries.items()}
    about = {"quantization": {"bits": 4, "group_size": 64}, "hidden_size": COLUMNS}
    source = folder(tmp_path / "source", about, {}, entries)
    if module.startswith("vision"):  # which has a size of its own
        assert load(source)[f"{module}.weight"].shape == (ROWS, 2 * COLUMNS)
        return
    refused(CheckpointError, f"256 inputs as 4 bits .*hidden_size {COLUMNS}", load, source)


def test_a_scale_weight_of_a_weight_in_high_precision_is_refused(tmp_path):
    """It was copied beside the new codes, and the file could not be read any more."""
    save(tmp_path / "f", {WEIGHT: np.ones((64, 64), BF16), f"{MODULE}.scale_weight": np.ones(1)})
    with refused(CheckpointError, r"scale_weight: .*a scale by its name, of a weight"):
        convert(tmp_path / "f", tmp_path / "out")


def test_a_scale_for_each_input_is_none_of_compressed_tensors(tmp_path):
    """A transposed scale of a square weight was read as one for each column, without an error."""
    codes = np.ones((ROWS, ROWS), E4M3)
    entries = {WEIGHT: codes, f"{WEIGHT}_scale": np.ones((1, ROWS), np.float32)}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    source = folder(tmp_path / "source", {"quantization_config": config}, {}, entries)
    refused(CheckpointError, "a scale for each input", load, source)


@pytest.mark.parametrize("kind", ["Int4TilePackedTo4dTensor", "Float6Tensor"])
def test_classes_of_torchao_that_are_not_read_are_named(tmp_path, kind):
    about, metadata, entries, _ = torchao_float8()
    metadata[WEIGHT] = metadata[WEIGHT].replace("Float8Tensor", kind)
    source = folder(tmp_path / "source", about, metadata, entries)
    refused(CheckpointError, f"of class {kind}", dequantize_checkpoint, source, tmp_path / "values")
