"""Entries of other programs that look like those of a layout, and marks that say what they are.

The oracles are the programs' own formulas in NumPy; the programs are named with them.
"""

import json

import ml_dtypes
import numpy as np
import pytest
from refused import refused

from qtoolkit.checkpoints import (
    CheckpointError,
    compare,
    convert,
    dequantize,
    dequantize_checkpoint,
    load,
    save,
    verify,
)
from qtoolkit.checkpoints.internal import open_source

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
MODULE = "model.layers.0.mlp.up_proj"
WEIGHT = f"{MODULE}.weight"
rng = np.random.default_rng(0)
INT8 = rng.integers(-127, 128, (128, 256)).astype(np.int8)
FP8 = rng.uniform(-448, 448, (128, 256)).astype(E4M3)
SCALE = rng.uniform(0.001, 0.01, (128, 1)).astype(np.float32)
ONE = np.ones(1, np.float32)
WIDE = {"model.layers.0.mlp.down_proj.weight": np.ones((64, 64), np.float32)}


def folder(path, tensors, config=None, **more):
    path.mkdir()
    save(path / "model.safetensors", tensors | WIDE)
    about = {"model_type": "llama"} | more
    about |= {"quantization_config": config} if config else {}
    (path / "config.json").write_text(json.dumps(about))
    return path


def values(path, target):
    dequantize_checkpoint(path, target, dtype="float32")
    return load(target)


def comfy(tensors, about):
    """ComfyUI, comfy/ops.py and quant_ops.py: a mark for each weight, JSON in bytes."""
    return tensors | {f"{MODULE}.comfy_quant": np.frombuffer(json.dumps(about).encode(), np.uint8)}


ROTATED = {"format": "asym_w4a8_int8", "convrot": True, "convrot_groupsize": 256}
LOOK_ALIKES = {
    # A part of low rank belongs to it.
    "nvfp4": (
        {
            WEIGHT: INT8[:, :128].view(np.uint8),
            f"{WEIGHT}_scale": FP8[:, :16],
            f"{WEIGHT}_scale_2": ONE[0],
        },
        {"format": "svdquant_w4a4"},
    ),
    # Weights times a matrix of Hadamard's, with two codes a byte.
    "convrot": ({WEIGHT: INT8, f"{WEIGHT}_scale": SCALE[:, 0]}, ROTATED),
    "unknown": ({WEIGHT: FP8, f"{WEIGHT}_scale": ONE[0]}, {"format": "float8_e4m3fn", "new": 1}),
    "no JSON": ({WEIGHT: FP8, f"{WEIGHT}_scale": ONE[0]}, "nvfp4"),
}


@pytest.mark.parametrize("mark", ["tensor", "metadata"])
@pytest.mark.parametrize("case", LOOK_ALIKES)
def test_what_comfyui_marks_as_another_format_is_refused(tmp_path, case, mark):
    tensors, about = LOOK_ALIKES[case]
    if mark == "tensor":
        save(tmp_path / "f", comfy(tensors, about) | WIDE)
    else:
        marks = {"format_version": "1.0", "layers": {MODULE: about}}
        save(tmp_path / "f", tensors | WIDE, {"_quantization_metadata": json.dumps(marks)})
    message = rf"tensor {WEIGHT}: ComfyUI describes it by .*, expected only float8_e4m3fn"
    message += ".*dequantize .* ComfyUI$"
    for act in (
        lambda: convert(tmp_path / "f", tmp_path / "out"),
        lambda: dequantize_checkpoint(tmp_path / "f", tmp_path / "out"),
        lambda: compare(tmp_path / "f", tmp_path / "f"),
        lambda: dequantize(load(tmp_path / "f")),
    ):
        refused(CheckpointError, message, act)
    assert not (tmp_path / "out").exists()


def test_marks_that_contradict_a_config_are_refused(tmp_path):
    """Its NVFP4 has scales in tiles, and the first of two codes in the high bits."""
    tensors, _ = LOOK_ALIKES["nvfp4"]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    src = folder(tmp_path / "src", comfy(tensors, {"format": "nvfp4"}), config)
    refused(CheckpointError, r"by \{'format': 'nvfp4'\}", convert, src, tmp_path / "out")


@pytest.mark.parametrize("mark", ["tensor", "metadata"])
@pytest.mark.parametrize(
    ("codes", "scale", "about"),
    [
        (FP8, ONE[0] / 8, {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}),
        (INT8, SCALE, {"format": "int8_tensorwise", "per_row": True, "convrot": False}),
    ],
)
def test_comfyui_is_read_where_values_are_codes_times_scales(tmp_path, codes, scale, about, mark):
    """The marks are not copied: they would say of the new weights what these are not."""
    tensors, metadata = {WEIGHT: codes, f"{WEIGHT}_scale": scale}, {}
    if mark == "tensor":
        tensors = comfy(tensors, about)
    else:
        metadata = {"_quantization_metadata": json.dumps({"layers": {MODULE: about}})}
    save(tmp_path / "f", tensors | WIDE, metadata)
    found = values(tmp_path / "f", tmp_path / "values")
    np.testing.assert_array_equal(found[WEIGHT], codes.astype(np.float32) * scale)
    assert found.keys() == {WEIGHT, *WIDE}
    report = convert(tmp_path / "f", tmp_path / "out")
    assert report.left == ((f"{MODULE}.comfy_quant",) if mark == "tensor" else ())
    with open_source(tmp_path / "out") as out:
        assert "_quantization_metadata" not in out.metadata
    assert not verify(tmp_path / "f", tmp_path / "out").problems
    assert not any("comfy" in line for line in verify(tmp_path / "f", tmp_path / "f").problems)


def test_offsets_of_codes_are_read_if_they_are_0(tmp_path):
    """Ascend's msmodelslim: (code + weight_offset) * weight_scale; 0 in W8A8_DYNAMIC."""
    zeros = np.zeros((128, 1), BF16)
    tensors = {WEIGHT: INT8, f"{WEIGHT}_scale": SCALE.astype(BF16), f"{WEIGHT}_offset": zeros}
    src = folder(tmp_path / "src", tensors, quantize="w8a8_dynamic")
    expected = (INT8 + zeros.astype(np.float32)) * SCALE.astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(values(src, tmp_path / "values")[WEIGHT], expected)
    report = convert(src, tmp_path / "out")
    assert report.left == (f"{WEIGHT}_offset",)
    assert not verify(src, tmp_path / "out").problems
    assert load(tmp_path / "out").keys() == {WEIGHT, *WIDE}


@pytest.mark.parametrize(
    ("name", "array"),
    [
        (f"{WEIGHT}_offset", SCALE),
        (f"{WEIGHT}_zeros", np.full((128, 1), 3, np.int8)),
        (f"{WEIGHT}_scale_second", SCALE),
        (f"{MODULE}.quant_bias", np.ones(128, np.int32)),
    ],
)
def test_entries_that_change_the_numbers_are_refused(tmp_path, name, array):
    tensors = {WEIGHT: INT8, f"{WEIGHT}_scale": SCALE, name: array}
    src = folder(tmp_path / "src", tensors)
    message = rf"tensor {name}: .* of a quantized weight, expected no such entry, because it "
    message += "changes the weight"
    for act in (
        lambda: convert(src, tmp_path / "out", layout="plain"),
        lambda: dequantize_checkpoint(src, tmp_path / "out"),
        lambda: load(src),
        lambda: dequantize(load(src / "model.safetensors")),
    ):
        refused(CheckpointError, message, act)


def test_zero_points_of_activations_go_with_their_scales(tmp_path):
    """llm-compressor, W8A8 with static asymmetric activations and a cache in FP8."""
    tensors = {WEIGHT: INT8, f"{WEIGHT}_scale": SCALE}
    others = {"input_scale": ONE, "input_zero_point": np.ones(1, np.int8)}
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    others = {f"{MODULE}.{name}": array for name, array in others.items()}
    attention = "model.layers.0.self_attn"
    others |= {f"{attention}.{x}_zero_point": np.ones(1, np.int8) for x in "kv"}
    tensors |= {f"{attention}.{x}_proj.weight": np.ones((64, 64), np.float32) for x in "qkv"}
    src = folder(tmp_path / "src", tensors | others, config)
    assert set(convert(src, tmp_path / "out").left) == set(others)
    weights = {name for name in (*tensors, *WIDE) if name.endswith(".weight")}
    assert load(tmp_path / "out").keys() == weights
    np.testing.assert_array_equal(values(src, tmp_path / "values")[WEIGHT], INT8 * SCALE)


def test_a_weight_that_is_rounded_at_run_time_is_refused(tmp_path):
    """compressed-tensors with quantization_status "frozen": the weight itself, and its scale."""
    tensors = {WEIGHT: np.ones((128, 256), BF16), f"{WEIGHT}_scale": SCALE}
    config = {"quant_method": "compressed-tensors", "quantization_status": "frozen"}
    src = folder(tmp_path / "src", tensors, config)
    message = rf"tensor {WEIGHT}: BF16 .128, 256. with a scale, expected codes"
    for act in (lambda: convert(src, tmp_path / "out", layout="plain"), lambda: load(src)):
        refused(CheckpointError, message, act)


@pytest.mark.parametrize("name", ["dense/kernel", "dense.kernel", "w"])
def test_ambiguous_scales_of_a_square_are_refused(tmp_path, name):
    codes, scale = INT8[:, :128], SCALE[:, 0]
    save(tmp_path / "f", {name: codes, f"{name}_scale": scale})
    message = r"_scale: .128. of .128, 128., expected .128, 1., of rows, or .1, 128., of columns"
    refused(CheckpointError, message, dequantize_checkpoint, tmp_path / "f", tmp_path / "out")
    save(tmp_path / "g", {name: codes, f"{name}_scale": scale[None]})
    found = values(tmp_path / "g", tmp_path / "values")
    np.testing.assert_array_equal(found[name], codes * scale)


def test_fbgemm_is_read(tmp_path):
    """transformers, integrations/fbgemm_fp8.py: each output has a scale, also of experts
    [experts, inputs, outputs]; that of their down_proj lies in the other order.
    """
    up, down = FP8.reshape(4, 64, 128), FP8.reshape(4, 128, 64)
    of_up, of_down = SCALE.repeat(4, 1).T.copy(), SCALE[:64].repeat(4, 1).T.copy()
    experts = "model.layers.0.feed_forward.experts"
    tensors = {
        WEIGHT: FP8,
        f"{WEIGHT}_scale": SCALE,
        f"{MODULE}.input_scale_ub": np.float32([1200]),
        f"{experts}.gate_up_proj": up,
        f"{experts}.gate_up_proj_scale": of_up[:, None, :],
        f"{experts}.down_proj": down,
        f"{experts}.down_proj_scale": of_down[:, :, None],
    }
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    src = folder(tmp_path / "src", tensors, config)
    found = values(src, tmp_path / "values")
    expected = {
        WEIGHT: FP8.astype(np.float32) * SCALE,
        f"{experts}.gate_up_proj": np.einsum("eio,eo->eio", up.astype(np.float32), of_up),
        f"{experts}.down_proj": np.einsum("eio,eo->eio", down.astype(np.float32), of_down),
    }
    assert found.keys() == expected.keys() | WIDE.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        np.testing.assert_array_equal(load(src)[name].dequantize("float32"), array)


def quark(tensors):
    config = {"quant_method": "quark", "export": {"pack_method": "reorder"}}
    return {name: array.copy() for name, array in tensors.items()}, config


@pytest.mark.parametrize("scale", [ONE[0] / 8, SCALE[:, 0], SCALE.astype(BF16)])
def test_fp8_of_quark_is_read(tmp_path, scale):
    """AMD's Quark, per tensor and per channel; vLLM, quark_w8a8_fp8.py: codes times scales."""
    scale = np.asarray(scale)
    others = {f"{MODULE}.input_scale": ONE[0], f"{MODULE}.output_scale": ONE[0]}
    tensors = {WEIGHT: FP8, f"{WEIGHT}_scale": scale} | others
    src = folder(tmp_path / "src", *quark({k: np.asarray(x) for k, x in tensors.items()}))
    wide = scale.astype(np.float32).reshape(-1, 1)
    np.testing.assert_array_equal(
        values(src, tmp_path / "values")[WEIGHT], FP8.astype(np.float32) * wide
    )
    assert set(convert(src, tmp_path / "out").left) == set(others)


def test_mxfp4_of_quark_is_read(tmp_path):
    """Quark, Pack_fp4: 0x21 is the codes 1, 2; vLLM, mxfp4_utils.py: times 2**(scale - 127)."""
    e2m1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed = rng.integers(0, 256, (128, 64), np.uint8)
    packed[0, 0] = 0x21
    scale = rng.integers(118, 130, (128, 4), np.uint8)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(128, 128)
    expected = e2m1[codes] * np.repeat(np.exp2(scale.astype(np.float32) - 127), 32, 1)
    src = folder(tmp_path / "src", *quark({WEIGHT: packed, f"{WEIGHT}_scale": scale}))
    np.testing.assert_array_equal(values(src, tmp_path / "values")[WEIGHT], expected)
    np.testing.assert_array_equal(load(src)[WEIGHT].dequantize("float32"), expected)


@pytest.mark.parametrize("codes", [INT8, np.ones((128, 32), np.int32)])
def test_integers_of_quark_are_refused(tmp_path, codes):
    src = folder(tmp_path / "src", *quark({WEIGHT: codes, f"{WEIGHT}_scale": SCALE}))
    with refused(CheckpointError, rf"tensor {WEIGHT}: I.*the program that made it"):
        convert(src, tmp_path / "out")


@pytest.mark.parametrize("shape", [(4, 64, 1), (4, 1, 256), (4, 1, 1), (4,)])
def test_experts_with_a_scale_for_each_row_column_or_expert(tmp_path, shape):
    codes = rng.uniform(-448, 448, (4, 64, 256)).astype(E4M3)
    scale = rng.uniform(0.001, 0.01, shape).astype(np.float32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    src = folder(tmp_path / "src", {name: codes, f"{name}_scale": scale}, {"quant_method": "fp8"})
    expected = codes.astype(np.float32) * (scale if len(shape) > 1 else scale[:, None, None])
    np.testing.assert_array_equal(values(src, tmp_path / "values")[name], expected)
    np.testing.assert_array_equal(load(src)[name].dequantize("float32"), expected)
    found = compare(src, tmp_path / "values")
    assert found.equal
    save(tmp_path / "f", {name: codes, f"{name}_scale": scale} | WIDE)
    np.testing.assert_array_equal(dequantize(load(tmp_path / "f"))[name], expected)


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp8"])
@pytest.mark.parametrize("axis", [1, 2])
def test_fused_experts_of_modelopt_may_be_wider_than_a_block(tmp_path, axis, method):
    """FP8_PER_CHANNEL_PER_TOKEN of fused experts: `_weight_scale` [experts, outputs]."""
    codes = rng.uniform(-448, 448, (4, 192, 256)).astype(E4M3)
    scale = rng.uniform(0.001, 0.01, (4, codes.shape[axis])).astype(np.float32)
    name = "model.layers.0.mlp.experts.down_proj"
    config = {"quant_method": method, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    src = folder(tmp_path / "src", {name: codes, f"{name}_weight_scale": scale}, config)
    expected = codes.astype(np.float32) * np.expand_dims(scale, 3 - axis)
    np.testing.assert_array_equal(values(src, tmp_path / "values")[name], expected)


@pytest.mark.parametrize(
    ("program", "tensors", "more"),
    [
        (
            "MLX",
            {WEIGHT: np.ones((64, 32), np.uint32), f"{MODULE}.biases": np.ones((64, 4), BF16)},
            {"config": {"group_size": 64, "bits": 4}, "quantization": {"bits": 4}},
        ),
        ("torchao", {f"{MODULE}._weight_qdata": FP8, f"{MODULE}._weight_scale": SCALE}, {}),
        (
            "Nunchaku",
            {f"{MODULE}.qweight": INT8, f"{MODULE}.wscales": np.ones((4, 128), BF16)},
            {"_class_name": "FluxTransformer2DModel"},
        ),
        (
            "TensorRT-LLM",
            {WEIGHT: FP8, f"{MODULE}.weights_scaling_factor": ONE},
            {"architecture": "LlamaForCausalLM"},
        ),
    ],
)
def test_programs_are_named(tmp_path, program, tensors, more):
    src = folder(tmp_path / "src", tensors, **more)
    message = f"of {program}, which is not read(; | without .*, or )dequantize it with {program}"
    for act in (
        lambda: convert(src, tmp_path / "out"),
        lambda: dequantize_checkpoint(src, tmp_path / "out"),
    ):
        refused(CheckpointError, message, act)


def test_another_program_is_not_taken_for_comfyui(tmp_path):
    """Mistral's consolidated.safetensors: qscale_weight, where ComfyUI has scale_weight."""
    save(tmp_path / "f", {WEIGHT: FP8, f"{MODULE}.qscale_weight": ONE} | WIDE)
    with pytest.raises(CheckpointError, match="the program that made it") as caught:
        convert(tmp_path / "f", tmp_path / "out")
    assert "ComfyUI" not in str(caught.value)
