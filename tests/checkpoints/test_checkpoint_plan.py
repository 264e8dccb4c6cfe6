"""What is quantized and what is kept."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from refused import refused

from qtoolkit.checkpoints import CheckpointError, save
from qtoolkit.checkpoints.internal import PlanOptions, make_plan, open_source, safetensors_dtype
from qtoolkit.formats import E4M3FN, Rules, format


def plan_of(tmp_path, tensors, metadata=None, **options):
    save(tmp_path / "model.safetensors", tensors, metadata, overwrite=True)
    with open_source(tmp_path / "model.safetensors") as source:
        return make_plan(source, PlanOptions(**options))


def actions(plan):
    return {tensor.name: tensor.reason or "quantize" for tensor in plan.tensors}


MATRIX = np.zeros((4, 6), np.float32)


def test_vectors_integers_and_quantized_tensors_are_copied(tmp_path):
    tensors = {
        "vector": np.zeros(4, np.float32),
        "scalar": np.float64(1),
        "ids": np.zeros((2, 2), np.int64),
        "codes": MATRIX.astype("float8_e4m3fn"),
        "other": MATRIX.astype("float8_e5m2"),
        "mine": MATRIX,
    }
    assert actions(plan_of(tmp_path, tensors, skip=["^mi"], allow_codes=True)) == {
        "vector": "fewer than two dimensions",
        "scalar": "fewer than two dimensions",
        "ids": "dtype I64",
        "codes": "dtype F8_E4M3",
        "other": "dtype F8_E5M2",
        "mine": "skip=",
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


def test_metadata_is_copied_and_says_what_was_done(tmp_path):
    tensors = {"w.weight": MATRIX}
    plan = plan_of(tmp_path, tensors, {"format": "pt"}, format="F8_E5M2", scaling="channel")
    assert plan.metadata["format"] == "pt"
    about = json.loads(plan.metadata["qtoolkit"])
    assert (about["format"], about["scaling"], list(about)) == (
        "e5m2",
        "channel",
        ["arguments", "format", "scaling", "version"],
    )


def test_formats_of_16_bits_get_no_scale(tmp_path):
    plan = plan_of(tmp_path, {"w": MATRIX}, format="float16")
    assert [(output.name, output.dtype) for output in plan.outputs] == [("w", "F16")]
    assert plan.scaling == "none"
    with refused(CheckpointError, r"^scaling='channel': float16 has no .*omit it$"):
        plan_of(tmp_path, {"w": MATRIX}, format="float16", scaling="channel")
    rules = Rules({"w": "bfloat16"})
    with refused(CheckpointError, r"^scaling='tensor': bfloat16 has no scales"):
        plan_of(tmp_path, {"w": MATRIX}, format=rules, scaling="tensor")


def test_errors_say_where_what_and_what_to_do(tmp_path):
    wide = {"layers/3/kernel": MATRIX.astype(np.float64)}
    message = (
        r"model\.safetensors: tensor layers/3/kernel: dtype F64, expected F32, F16 or BF16; "
        "exclude it with skip="
    )
    refused(CheckpointError, message, plan_of, tmp_path, wide)
    assert actions(plan_of(tmp_path, wide, skip=("kernel",))) == {"layers/3/kernel": "skip="}
    with refused(CheckpointError, "tensor w: its scale would be named w_scale"):
        plan_of(tmp_path, {"w": MATRIX, "w_scale": np.zeros(1, np.float32)})
    with refused(CheckpointError, r"skip='\(': invalid regular expression"):
        plan_of(tmp_path, {}, skip=["("])
    refused(ValueError, "scaling='row'", plan_of, tmp_path, {}, scaling="row")
    refused(ValueError, "unknown format 'e4m4'", plan_of, tmp_path, {}, format="e4m4")


def test_a_format_of_other_layouts_names_them(tmp_path):
    """int4 for a Flax model: "expected one of e4m3fn" did not say where int4 is."""
    message = "plain: cannot hold int4; use layout='compressed-tensors' .*quantize of qtoolkit.nnx"
    refused(CheckpointError, message, plan_of, tmp_path, {"w": MATRIX}, format="int4")


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        ("e2m1fn", "its codes are narrower than a byte"),
        ("e2m3fn", "its codes are narrower than a byte"),
        ("int4", "its codes are narrower than a byte"),
        ("e3m4", "safetensors has no dtype for it"),
        ("hifloat8", "safetensors has no dtype for it"),
        ("int24", "safetensors has no dtype for it"),
        (
            dataclasses.replace(E4M3FN, name="mine", bias=9, dtype_name=None),
            "safetensors has no dtype for it",
        ),
        ("e8m0fnu", "no weights are stored in it"),
        ("int32", "no weights are stored in it"),
    ],
)
def test_the_reason_why_not(fmt, reason):
    refused(CheckpointError, f": {reason}", safetensors_dtype, fmt)


NAMES = ("head.weight", "norm.weight", "mlp.up.weight", "mlp.down.weight", "mlp.up.bias", "scale")
MODEL = {name: np.zeros((4,) if name.endswith("bias") else (4, 6), np.float32) for name in NAMES}
MODEL |= {"scale": np.zeros((), np.float32), "ids": np.zeros((2, 2), np.int64)}


def formats(plan):
    return {t.name: t.format.name if t.format else t.reason for t in plan.tensors}


def test_rules_decide_alone(tmp_path):
    rules = Rules({"^head": None, "down": "bf16", r"up\.weight": "F8_E5M2"}, default="int8")
    plan = plan_of(tmp_path, MODEL, format=rules, scaling="channel")
    assert formats(plan) == {
        "head.weight": "rule '^head'",
        "mlp.down.weight": "bfloat16",
        "mlp.up.weight": "e5m2",
        "norm.weight": "int8",
        "mlp.up.bias": "int8",
        "scale": "int8",
        "ids": "dtype I64",
    }
    assert {o.name: (o.dtype, o.shape) for o in plan.outputs} == {
        "head.weight": ("F32", (4, 6)),
        "mlp.down.weight": ("BF16", (4, 6)),
        "mlp.up.weight": ("F8_E5M2", (4, 6)),
        "mlp.up.weight_scale": ("F32", (4, 1)),
        "norm.weight": ("I8", (4, 6)),
        "norm.weight_scale": ("F32", (4, 1)),
        "mlp.up.bias": ("I8", (4,)),
        "mlp.up.bias_scale": ("F32", (1,)),
        "scale": ("I8", ()),
        "scale_scale": ("F32", (1,)),
        "ids": ("I64", (2, 2)),
    }
    assert plan.format == rules.map(format)
    assert plan.scaling == "channel"


def test_rules_without_a_default_copy_the_rest(tmp_path):
    rules = Rules({"weight": "e4m3fn", "ids": None})
    assert formats(plan_of(tmp_path, MODEL, format=rules, skip="norm")) == {
        "head.weight": "e4m3fn",
        "mlp.down.weight": "e4m3fn",
        "mlp.up.weight": "e4m3fn",
        "norm.weight": "skip=",
        "mlp.up.bias": "no rule",
        "scale": "no rule",
        "ids": "rule 'ids'",
    }
    half = {"a": MATRIX.astype("bfloat16"), "b": MATRIX.astype("float16")}
    plan = plan_of(tmp_path, half, format=Rules({".": "bfloat16"}))
    assert formats(plan) == {"a": "BF16 already", "b": "bfloat16"}
    assert plan.scaling == "none"


def test_metadata_records_the_rules(tmp_path):
    rules = Rules({"^head": None, "w": "F8_E5M2"}, default="bf16")
    plan = plan_of(tmp_path, MODEL, {"format": "pt"}, format=rules)
    about = json.loads(plan.metadata["qtoolkit"])
    assert plan.metadata["format"] == "pt"
    assert list(about) == ["arguments", "rules", "scaling", "version"]
    assert Rules.from_json(json.dumps(about["rules"])) == rules.map(format)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (
            {"haed": None},
            CheckpointError,
            r"model\.safetensors: rule 'haed' matches nothing.* head",
        ),
        ({"head": "e4m4"}, CheckpointError, "Rules: rule 'head': format: unknown format 'e4m4'"),
        ({"head": "nf4"}, CheckpointError, "rule 'head': convert: format nf4: its codes are narr"),
        ({"ids": "int8"}, CheckpointError, "tensor ids: dtype I64, expected F32, F16 or BF16"),
        ({"head": 5}, TypeError, "Rules: rule 'head': format: got 5"),
        ({np.float32: None}, TypeError, "Rules: rule float32 is a class, which JSON cannot hold"),
    ],
)
def test_rules_that_cannot_be_meant(tmp_path, rules, error, message):
    refused(error, message, plan_of, tmp_path, MODEL, format=Rules(rules))


def test_reading_and_planning_do_not_load_jax(tmp_path):
    """Converting does: the test sees what it looks for."""
    save(tmp_path / "src.safetensors", {"w": np.ones((64, 32), np.float32)})
    code = (
        "import sys, qtoolkit.checkpoints as c; from qtoolkit.checkpoints import internal;"
        "c.dequantize; c.load;"
        "assert 'jax' not in sys.modules;"
        "c.convert('src.safetensors', 'dst.safetensors', scaling='tensor');"
        "assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
