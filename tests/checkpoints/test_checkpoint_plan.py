"""What is quantized and what is kept."""

import json
import subprocess
import sys

import numpy as np
import pytest

from qtoolkit.checkpoints import (
    CheckpointError,
    SafetensorsFile,
    make_plan,
    safetensors_dtype,
    save,
)
from qtoolkit.formats import FORMATS, FloatFormat, Overflow, Specials


def plan_of(tmp_path, tensors, metadata=None, **options):
    save(tmp_path / "model.safetensors", tensors, metadata, overwrite=True)
    with SafetensorsFile(tmp_path / "model.safetensors") as source:
        return make_plan(source, **options)


def actions(plan):
    return {tensor.name: tensor.reason or "quantize" for tensor in plan.tensors}


MATRIX = np.zeros((4, 6), np.float32)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "layers/3/kernel",
        "blocks/0/linear/kernel",
        "transformer.h.0.attn.c_attn.weight",
        "lnear/kernel",
        "delegate.weight",
        "kernel",
    ],
)
def test_weights_of_linear_layers_are_quantized(tmp_path, name):
    assert actions(plan_of(tmp_path, {name: MATRIX})) == {name: "quantize"}


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "tok_embeddings.weight",
        "Embed_0/embedding",
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "lm_head.weight",
        "LM_HEAD.weight",
        "layers/input_layernorm/scale",
        "layers.q_norm.weight",
        "LayerNorm_0/scale",
        "h.0.ln_1.weight",
        "h.0.ln1.weight",
        "attn_ln.weight",
        "block_sparse_moe.gate.weight",
        "mlp.shared_expert_gate.weight",
        "router/kernel",
        "attention/query/bias",
        "relative_attention_bias.weight",
        "layers.0.weight_scale",
        "layers.0.weight_scale_inv",
    ],
)
def test_sensitive_tensors_are_kept(tmp_path, name):
    assert actions(plan_of(tmp_path, {name: MATRIX})) == {name: "skipped by default"}


def test_vectors_integers_and_what_is_quantized_already_are_kept(tmp_path):
    tensors = {
        "vector": np.zeros(4, np.float32),
        "scalar": np.float64(1),
        "ids": np.zeros((2, 2), np.int64),
        "codes": MATRIX.astype("float8_e4m3fn"),
        "other": MATRIX.astype("float8_e5m2"),
        "mine": MATRIX,
    }
    assert actions(plan_of(tmp_path, tensors, skip=["^mi"])) == {
        "vector": "fewer than two dimensions",
        "scalar": "fewer than two dimensions",
        "ids": "dtype I64",
        "codes": "dtype F8_E4M3",
        "other": "dtype F8_E5M2",
        "mine": "--skip",
    }
    half = {"a": MATRIX.astype("bfloat16"), "b": MATRIX.astype("float16")}
    assert actions(plan_of(tmp_path, half, format="bfloat16")) == {
        "a": "BF16 already",
        "b": "quantize",
    }


@pytest.mark.parametrize(
    ("scaling", "name", "shape", "expected"),
    [
        ("tensor", "w.weight", (3, 4), (1,)),
        ("tensor", "w/kernel", (3, 4, 5), (1,)),
        ("channel", "w.weight", (3, 4), (3, 1)),
        ("channel", "w.weight", (3, 4, 5, 6), (3, 1, 1, 1)),
        ("channel", "w/kernel", (3, 4), (1, 4)),
        ("channel", "w.kernel", (3, 4, 5), (1, 1, 5)),
        ("channel", "kernel", (3, 4), (1, 4)),
        ("channel", "kernel.weight", (3, 4), (3, 1)),
    ],
)
def test_scales_broadcast_along_the_outputs(tmp_path, scaling, name, shape, expected):
    plan = plan_of(tmp_path, {name: np.zeros(shape, np.float32)}, scaling=scaling)
    placed = {output.name: output for output in plan.outputs}
    assert (placed[name].dtype, placed[name].shape) == ("F8_E4M3", shape)
    assert (placed[name + "_scale"].dtype, placed[name + "_scale"].shape) == ("F32", expected)


def test_metadata_is_kept_and_says_what_was_done(tmp_path):
    plan = plan_of(tmp_path, {"w": MATRIX}, {"format": "pt"}, format="F8_E5M2", scaling="channel")
    assert plan.metadata["format"] == "pt"
    about = json.loads(plan.metadata["qtoolkit"])
    assert (about["format"], about["scaling"], list(about)) == (
        "e5m2",
        "channel",
        ["format", "scaling", "version"],
    )


def test_formats_of_16_bits_get_no_scale(tmp_path):
    plan = plan_of(tmp_path, {"w": MATRIX}, format="float16", scaling="channel")
    assert [(output.name, output.dtype) for output in plan.outputs] == [("w", "F16")]
    assert plan.scaling == "none"


def test_errors_say_where_what_and_what_to_do(tmp_path):
    wide = {"layers/3/kernel": MATRIX.astype(np.float64)}
    message = (
        r"model\.safetensors: tensor layers/3/kernel: dtype F64, expected F32, F16 or BF16; "
        "leave it out with --skip"
    )
    with pytest.raises(CheckpointError, match=message):
        plan_of(tmp_path, wide)
    assert actions(plan_of(tmp_path, wide, skip=("kernel",))) == {"layers/3/kernel": "--skip"}
    with pytest.raises(CheckpointError, match="tensor w: its scale would be named w_scale"):
        plan_of(tmp_path, {"w": MATRIX, "w_scale": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"--skip \(: invalid regular expression"):
        plan_of(tmp_path, {}, skip=["("])
    with pytest.raises(ValueError, match="scaling='row', expected one of tensor, channel"):
        plan_of(tmp_path, {}, scaling="row")
    with pytest.raises(ValueError, match="unknown format 'e4m4'"):
        plan_of(tmp_path, {}, format="e4m4")


def test_every_shipped_format_has_a_dtype_there_and_others_are_refused():
    assert {fmt.name: safetensors_dtype(fmt) for fmt in FORMATS} == {
        "e4m3fn": "F8_E4M3",
        "e5m2": "F8_E5M2",
        "e4m3fnuz": "F8_E4M3FNUZ",
        "e5m2fnuz": "F8_E5M2FNUZ",
        "bfloat16": "BF16",
        "float16": "F16",
        "int8": "I8",
    }
    odd = FloatFormat(
        name="e3m4",
        exponent_bits=3,
        mantissa_bits=4,
        bias=3,
        specials=Specials.IEEE,
        overflow=Overflow.INF,
        dtype_name="float8_e3m4",
    )
    with pytest.raises(CheckpointError, match="no dtype for format e3m4, expected one of e4m3fn"):
        safetensors_dtype(odd)


def test_reading_and_planning_do_not_load_jax():
    code = (
        "import sys, qtoolkit.checkpoints as c; c.make_plan; c.dequantize; c.load;"
        "assert 'jax' not in sys.modules; c.convert; assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
