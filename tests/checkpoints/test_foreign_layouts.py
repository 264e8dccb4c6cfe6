"""Layouts that other programs write: what their weights stand for, by the program's own formula.

Each oracle is the formula of the program that is named beside it, in NumPy, element by element: it
makes entries and the weight that they stand for, and shares no code with qtoolkit.
"""

import json
import re

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
    verify,
)
from qtoolkit.scaling import QArray

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
MODULE = "model.layers.0.mlp.down_proj"
EXPERTS = "model.layers.0.mlp.experts"


def rng():
    return np.random.default_rng(0)


def stream(codes, bits):
    """Words of 32 bits along the last axis, from the low bits on, codes across their ends."""
    at = np.arange(codes.shape[-1])[:, None] * bits + np.arange(bits)
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] * bits // 32)), np.uint32)
    for element, places in enumerate(at):
        for bit, place in enumerate(places):
            value = (codes[..., element].astype(np.uint32) >> np.uint32(bit)) & np.uint32(1)
            words[..., place // 32] |= value << np.uint32(place % 32)
    return words.view(np.int32)


def whole_words(codes, bits):
    """The same with 32 // bits whole codes to a word."""
    count = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // count)), np.uint32)
    for element in range(codes.shape[-1]):
        shift = np.uint32(element % count * bits)
        words[..., element // count] |= codes[..., element].astype(np.uint32) << shift
    return words.view(np.int32)


def columns(make, codes, bits):
    """Words that run down the columns."""
    return np.ascontiguousarray(make(codes.swapaxes(-1, -2), bits).swapaxes(-1, -2))


def fp4(shape, lowest=118, highest=136):
    """Bytes of two codes each, bytes of scales, and the numbers: E2M1 times 2**(scale - 127)."""
    packed = rng().integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    packed[..., :2] = 0x21  # 1, 2 halves
    scales = rng().integers(lowest, highest, (*shape[:-1], shape[-1] // 32), np.uint8)
    values = np.empty(shape, np.float32)
    values[..., 0::2], values[..., 1::2] = E2M1[packed & 15], E2M1[packed >> 4]
    return packed, scales, values * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, -1)


def fp8(shape):
    codes = rng().integers(0, 256, shape, np.uint8)
    codes[codes & 127 == 127] = 0
    return codes.view(E4M3)


def spread(scales, shape, block):
    rows, inputs = np.arange(shape[-2]) // block[0], np.arange(shape[-1]) // block[1]
    return np.asarray(scales, np.float32)[..., rows[:, None], inputs]


# Each case: (quantization_config, entries, weights).


def gpt_oss():
    """transformers, integrations/mxfp4.py: a weight [experts, inputs, outputs]."""
    packed, scales, values = fp4((3, 40, 64))
    name = f"{EXPERTS}.gate_up_proj"
    entries = {f"{name}_blocks": packed.reshape(3, 40, 2, 16), f"{name}_scales": scales}
    entries[f"{name}_bias"] = np.ones((3, 40), np.float32)
    return {"quant_method": "mxfp4"}, entries, {name: values.swapaxes(1, 2)}


def gpt_oss_original():
    """github.com/openai/gpt-oss, torch/weights.py: a weight [experts, outputs, inputs]."""
    packed, scales, values = fp4((3, 40, 64))
    name = "block.0.mlp.mlp1_weight"
    entries = {f"{name}.blocks": packed.reshape(3, 40, 2, 16), f"{name}.scales": scales}
    return {}, entries, {name: values}


def deepseek_v31():
    """DeepSeek-V3.1's inference/kernel.py; scales are powers of two, 576 rows 4.5 blocks."""
    codes = fp8((576, 256))
    scales = np.exp2(rng().integers(-9, 3, (5, 2)).astype(np.float32))
    values = codes.astype(np.float32) * spread(scales, codes.shape, (128, 128))
    config = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    entries = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale_inv": scales.astype(E8M0)}
    return config, entries, {f"{MODULE}.weight": values}


def deepseek_v4():
    """transformers, integrations/finegrained_fp8.py, Fp8Dequantize: both kinds of weights."""
    codes = fp8((256, 192))
    exponents = rng().integers(110, 130, (2, 2), np.uint8)
    values = codes.astype(np.float32) * spread(np.exp2(exponents - 127.0), codes.shape, (128, 128))
    packed, scales, experts = fp4((48, 64))
    table = np.zeros((100, 6), np.int64)
    entries = {
        "layers.0.attn.wq_a.weight": codes,
        "layers.0.attn.wq_a.scale": exponents.view(E8M0),
        "layers.0.ffn.experts.0.w1.weight": packed.view(np.int8),
        "layers.0.ffn.experts.0.w1.scale": scales.view(E8M0),
        "layers.0.ffn.gate.tid2eid": table,
    }
    config = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    return (
        config,
        entries,
        {
            "layers.0.attn.wq_a.weight": values,
            "layers.0.ffn.experts.0.w1.weight": experts,
            "layers.0.ffn.gate.tid2eid": table,
        },
    )


def deepseek_v4_without_config():
    _, entries, expected = deepseek_v4()
    return {}, entries, expected


def deepseek_v4_fused():
    """The same experts as transformers saves them: one tensor, NAME_scale_inv."""
    packed, scales, values = fp4((3, 48, 64))
    name = f"{EXPERTS}.down_proj"
    entries = {name: packed.view(np.int8), f"{name}_scale_inv": scales.view(E8M0)}
    return {"quant_method": "fp8", "scale_fmt": "ue8m0"}, entries, {name: values}


def mxfp8(config, suffix, dtype):
    codes, scales = fp8((48, 96)), rng().integers(110, 130, (48, 3), np.uint8)
    values = codes.astype(np.float32) * np.repeat(np.exp2(scales - np.float32(127)), 32, 1)
    entries = {f"{MODULE}.weight": codes, f"{MODULE}.{suffix}": scales.view(dtype)}
    return config, entries, {f"{MODULE}.weight": values}


def sglang_mxfp8():
    """SGLang: quant_method mxfp8."""
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    return mxfp8(config, "weight_scale_inv", np.uint8)


def modelopt_mxfp8():
    return mxfp8({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "weight_scale", np.uint8)


def modelopt_nvfp4(name, suffix, is_turned):
    """NVFP4QTensor: code * weight_scale * weight_scale_2, by expert."""
    packed = rng().integers(0, 256, (3, 48, 32), np.uint8)
    scale, second = np.abs(fp8((3, 48, 4))), np.float32([0.5, 0.003, 7])
    values = np.empty((3, 48, 64), np.float32)
    values[..., 0::2], values[..., 1::2] = E2M1[packed & 15], E2M1[packed >> 4]
    values *= np.repeat(scale.astype(np.float32), 16, -1) * second[:, None, None]
    parts = packed, scale, values
    if is_turned:
        parts = [np.ascontiguousarray(part.swapaxes(1, 2)) for part in parts]
    entries = {
        name: parts[0],
        f"{suffix}_scale": parts[1],
        f"{suffix}_scale_2": second,
        f"{name}_input_scale": np.float32(0.1),
    }
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, entries, {name: parts[2]}


def modelopt_fused():
    name = f"{EXPERTS}.gate_up_proj"
    return modelopt_nvfp4(name, f"{name}_weight", False)


def modelopt_fused_llama4():
    """Its experts are [experts, inputs, outputs], packed along the inputs."""
    name = f"{EXPERTS}.gate_up_proj"
    return modelopt_nvfp4(name, f"{name}_weight", True)


def modelopt_fused_fp8():
    """to_quantized_weight: one scale for each row of each expert."""
    codes, scale = fp8((3, 48, 64)), np.exp(rng().normal(size=(3, 48))).astype(np.float32)
    name = f"{EXPERTS}.down_proj"
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    values = codes.astype(np.float32) * scale[:, :, None]
    return config, {name: codes, f"{name}_weight_scale": scale}, {name: values}


def awq():
    """AutoAWQ, modules/linear/gemm.py, from_linear: column 8c + order[i] is nibble i of word c."""
    inputs, outputs, group = 64, 48, 32
    codes = rng().integers(0, 16, (inputs, outputs), np.uint8)
    zeros = rng().integers(0, 16, (inputs // group, outputs), np.uint8)
    scales = rng().uniform(0.01, 0.1, zeros.shape).astype(np.float16)

    def pack_rows(values):
        words = np.zeros((len(values), outputs // 8), np.uint32)
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= values[:, output::8].astype(np.uint32) << np.uint32(4 * place)
        return words.view(np.int32)

    entries = {
        f"{MODULE}.qweight": pack_rows(codes),
        f"{MODULE}.qzeros": pack_rows(zeros),
        f"{MODULE}.scales": scales,
    }
    groups = np.arange(inputs) // group
    values = (codes - zeros[groups].astype(np.float32)) * scales.astype(np.float32)[groups]
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return config, entries, {f"{MODULE}.weight": values.T}


def awq_without_config():
    _, entries, expected = awq()
    return {}, entries, expected


def gptq(bits, stored_as="gptq", act_order=False, is_symmetric=False, group=32):
    """GPTQModel, utils/model_dequant.py, convert_gptq_file."""
    inputs, outputs = 96, 64
    codes = rng().integers(0, 2**bits, (inputs, outputs), np.uint16)
    count = inputs // group if group > 0 else 1
    zeros = rng().integers(0, 2**bits, (count, outputs), np.uint16)
    zeros[0, :3] = 0, 2**bits - 1, 1  # "gptq" stores them minus one
    if is_symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = rng().uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    index = np.arange(inputs) // (group if group > 0 else inputs)
    if act_order:
        index = rng().permutation(index)
    stored = (zeros - (stored_as == "gptq")) % 2**bits
    entries = {
        f"{MODULE}.qweight": columns(stream, codes, bits),
        f"{MODULE}.qzeros": stream(stored, bits),
        f"{MODULE}.scales": scales,
        f"{MODULE}.g_idx": index.astype(np.int32),
        f"{MODULE}.bias": np.ones(outputs, np.float16),
    }
    values = (codes - zeros[index].astype(np.float32)) * scales.astype(np.float32)[index]
    config = {"quant_method": "gptq", "bits": bits, "group_size": group}
    config |= {"checkpoint_format": stored_as, "sym": is_symmetric}
    return config, entries, {f"{MODULE}.weight": values.T}


def gptq_old():
    """AutoGPTQ before checkpoint_format, and without g_idx."""
    config, entries, expected = gptq(4)
    del config["checkpoint_format"], entries[f"{MODULE}.g_idx"]
    return config, entries, expected


def pack_quantized(bits, strategy, is_asymmetric=False, make=stream, dtype=np.float32):
    """compressed-tensors, compressors/pack_quantized: scale * (code - zero point)."""
    rows, inputs, group = 40, 480, 32
    half = 2 ** (bits - 1)
    codes = rng().integers(-half, half, (rows, inputs))
    counts = {"tensor": (1, 1), "channel": (rows, 1), "group": (rows, inputs // group)}[strategy]
    scale = rng().uniform(0.01, 0.1, counts).astype(dtype)
    zero = rng().integers(-half, half, counts) * is_asymmetric
    entries = {
        f"{MODULE}.weight_packed": make(codes + half, bits),
        f"{MODULE}.weight_scale": scale if strategy != "tensor" else scale[0],
        f"{MODULE}.weight_shape": np.int64([rows, inputs]),
    }
    if is_asymmetric:
        packed = columns(make, zero + half, bits)
        entries[f"{MODULE}.weight_zero_point"] = (
            zero[0].astype(np.int8) if strategy == "tensor" else packed
        )
    block = (1 if len(scale) > 1 else rows, group if scale.shape[1] > 1 else inputs)
    shape = (rows, inputs)
    values = np.float32(codes - spread(zero, shape, block)) * spread(scale, shape, block)
    arguments = {"num_bits": bits, "type": "int", "symmetric": not is_asymmetric}
    arguments |= {"strategy": strategy, "group_size": group if strategy == "group" else None}
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config["version"] = "0.20.0" if make is stream else "0.12.2"
    return config | {"config_groups": groups}, entries, {f"{MODULE}.weight": values}


def pack_quantized_act_order():
    """compressed-tensors 0.9, quantization/lifecycle/forward.py: columns lie in group g_idx."""
    config, entries, expected = pack_quantized(4, "group", True, whole_words)
    ((name, values),) = expected.items()
    order = rng().permutation(values.shape[1])
    packed = entries[f"{MODULE}.weight_packed"].view(np.uint32)
    nibbles = packed[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    codes = nibbles.reshape(len(packed), -1)[:, order]
    entries[f"{MODULE}.weight_packed"] = whole_words(codes, 4)
    entries[f"{MODULE}.weight_g_idx"] = (np.arange(values.shape[1]) // 32)[order].astype(np.int32)
    return config, entries, {name: values[:, order]}


def pack_quantized_in_place():
    """-1 in g_idx: the columns are not reordered."""
    config, entries, expected = pack_quantized(4, "group")
    entries[f"{MODULE}.weight_g_idx"] = np.full(480, -1, np.int32)
    return config, entries, expected


def int_quantized_asymmetric():
    """compressed-tensors, compressors/naive_quantized: a code to a byte."""
    codes = rng().integers(-128, 128, (40, 64))
    scale = rng().uniform(0.01, 0.1, (40, 1)).astype(np.float32)
    zero = rng().integers(-128, 128, (40, 1))
    entries = {
        f"{MODULE}.weight": codes.astype(np.int8),
        f"{MODULE}.weight_scale": scale,
        f"{MODULE}.weight_zero_point": zero.astype(np.int8),
    }
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    arguments = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    return config, entries, {f"{MODULE}.weight": np.float32(codes - zero) * scale}


CASES = {
    **{
        make.__name__: make
        for make in (
            *(gpt_oss, gpt_oss_original, deepseek_v31, deepseek_v4, deepseek_v4_without_config),
            *(deepseek_v4_fused, sglang_mxfp8, modelopt_mxfp8, modelopt_fused),
            *(modelopt_fused_llama4, modelopt_fused_fp8, awq, awq_without_config, gptq_old),
            *(int_quantized_asymmetric, pack_quantized_act_order, pack_quantized_in_place),
        )
    },
    **{f"gptq_{bits}": lambda bits=bits: gptq(bits) for bits in (2, 3, 4, 8)},
    **{f"gptq_v2_{bits}": lambda bits=bits: gptq(bits, "gptq_v2") for bits in (2, 3, 4, 8)},
    "gptq_symmetric": lambda: gptq(4, is_symmetric=True),
    "gptq_one_group": lambda: gptq(4, group=-1),
    "gptq_act_order": lambda: gptq(4, act_order=True),
    "gptq_act_order_3": lambda: gptq(3, act_order=True),
    **{
        f"packed_{bits}_{strategy}": lambda b=bits, s=strategy: pack_quantized(b, s)
        for bits in range(2, 9)
        for strategy in ("tensor", "channel", "group")
    },
    **{
        f"asymmetric_{bits}_{strategy}": lambda b=bits, s=strategy: pack_quantized(b, s, True)
        for bits in range(2, 9)
        for strategy in ("tensor", "channel", "group")
    },
    **{
        f"old_{bits}_{strategy}": lambda b=bits, s=strategy: pack_quantized(b, s, True, whole_words)
        for bits in range(2, 9)
        for strategy in ("channel", "group")
    },
    "packed_bfloat16": lambda: pack_quantized(4, "group", True, dtype=ml_dtypes.bfloat16),
}
FEW = ("gpt_oss", "deepseek_v4", "modelopt_mxfp8", "modelopt_fused_llama4", "awq")
FEW += ("gptq_act_order_3", "asymmetric_3_group")


def folder(path, config, entries):
    path.mkdir()
    save(path / "model.safetensors", entries)
    about = {"model_type": "llama"} | ({"quantization_config": config} if config else {})
    (path / "config.json").write_text(json.dumps(about))
    return path


@pytest.mark.parametrize("case", CASES)
def test_weights_have_the_values_of_the_programs_own_formula(tmp_path, case):
    """As `dequantize_checkpoint` writes them, and as `load` gives them."""
    config, entries, expected = CASES[case]()
    source = folder(tmp_path / "source", config, entries)
    dequantize_checkpoint(source, tmp_path / "values", dtype="float32")
    written, loaded = load(tmp_path / "values"), load(source)
    assert {name for name in written if not name.endswith("bias")} == expected.keys()
    for name, values in expected.items():
        array = loaded[name]
        array = array.dequantize("float32") if isinstance(array, QArray) else array
        for found in (written[name], array):
            np.testing.assert_array_equal(found, values, err_msg=name)


@pytest.mark.parametrize("case", FEW)
def test_convert_and_compare_see_the_weights(tmp_path, case):
    config, entries, _ = CASES[case]()
    source = folder(tmp_path / "source", config, entries)
    dequantize_checkpoint(source, tmp_path / "values", dtype="float32")
    assert compare(source, tmp_path / "values").equal
    for path in ("source", "values"):
        convert(tmp_path / path, tmp_path / f"{path}_8", format="int8", layout="plain")
    found, expected = (load(tmp_path / f"{path}_8") for path in ("source", "values"))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        for one, other in zip(*map(jax.tree.leaves, (found[name], array)), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("case", ["gptq_4", "awq"])
def test_verify_does_not_judge_what_it_cannot_make_again(tmp_path, case):
    config, entries, _ = CASES[case]()
    source = folder(tmp_path / "source", config, entries)
    dequantize_checkpoint(source, tmp_path / "values", dtype="float32")
    (problem,) = verify(tmp_path / "values", source).problems
    assert "is read, not written" in problem
    assert problem.endswith("measure it with `qtoolkit compare`")


@pytest.mark.parametrize(
    "index", [np.full(96, 2**31 - 1), np.arange(96) % 4, np.where(np.arange(96) < 33, 0, 2)]
)
def test_groups_of_inputs_that_are_no_groups_are_named(tmp_path, index):
    config, entries, _ = gptq(4)
    entries[f"{MODULE}.g_idx"] = index.astype(np.int32)
    source = folder(tmp_path / "source", config, entries)
    with refused(CheckpointError, r"down_proj\.g_idx: groups of"):
        dequantize_checkpoint(source, tmp_path / "values")


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gptq_4", {"checkpoint_format": "marlin"}, r"checkpoint_format marlin .*GPTQModel"),
        ("gptq_4", {"group_size": 64}, r"qweight: .12, 64., .*in groups of 64; .*GPTQModel"),
        ("awq", {"version": "gemv"}, r"version gemv .*expected gemm; .*with AutoAWQ"),
        ("awq", {"group_size": 64}, r"qweight: .64, 6., .*with AutoAWQ"),
        (
            "packed_3_group",
            {"config_groups": {}},
            r"weight_packed: 45 words a row .*expected 4 bit",
        ),
        ("modelopt_mxfp8", {"quant_algo": "W4A8_AWQ"}, r"quant_algo W4A8_AWQ .*dequantize"),
    ],
)
def test_variants_that_are_not_read_name_the_program_that_does(tmp_path, case, changes, message):
    config, entries, _ = CASES[case]()
    source = folder(tmp_path / "source", config | changes, entries)
    with pytest.raises(CheckpointError, match=message) as caught:
        dequantize_checkpoint(source, tmp_path / "values")
    assert "fetch" not in str(caught.value)


@pytest.mark.parametrize(
    ("case", "entry"),
    [
        ("gpt_oss", f"{EXPERTS}.gate_up_proj_scales"),
        ("gptq_4", f"{MODULE}.qzeros"),
        ("awq", f"{MODULE}.scales"),
        ("asymmetric_4_group", f"{MODULE}.weight_zero_point"),
        ("packed_4_group", f"{MODULE}.weight_scale"),
        ("modelopt_fused", f"{EXPERTS}.gate_up_proj_weight_scale"),
    ],
)
def test_a_missing_entry_is_named(tmp_path, case, entry):
    config, entries, _ = CASES[case]()
    del entries[entry]
    source = folder(tmp_path / "source", config, entries)
    message = f"tensor {re.escape(entry)}: no such tensor, expected .*; fetch the checkpoint again"
    for act in (dequantize_checkpoint, convert):
        refused(CheckpointError, message, act, source, tmp_path / "values")
