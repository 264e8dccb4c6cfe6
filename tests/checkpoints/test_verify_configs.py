"""What `verify` says of configs and input scales. Oracle: one change of what `convert` wrote, by
hand.
"""

import json
import re

import numpy as np
import pytest
from refused import refused
from stored import stored

from qtoolkit.checkpoints import CheckpointError, convert, save, verify
from qtoolkit.checkpoints.internal import open_source
from qtoolkit.formats import BlockFormat, Rules

WEIGHTS = {f"model.layers.0.self_attn.{x}_proj.weight": (256, 128) for x in "qkvo"}
WIDE = {"model.embed_tokens.weight": (64, 128), "model.layers.0.mlp.gate.weight": (4, 128)}
Q = "model.layers.0.self_attn.q_proj"
LAYOUTS = [
    ("compressed-tensors", "e4m3fn", "tensor", 0.5),
    ("compressed-tensors", "e4m3fn", "tensor", None),
    ("compressed-tensors", "e4m3fn", "channel", None),
    ("compressed-tensors", "e4m3fn", "block", None),
    ("compressed-tensors", "int8", None, None),
    ("compressed-tensors", "mxfp8_e4m3", None, None),
    ("compressed-tensors", "mxfp4", None, None),
    ("compressed-tensors", "nvfp4", None, None),
    ("compressed-tensors", "int4_group128", None, None),
    ("compressed-tensors", "int8_group128", None, None),
    ("modelopt", "e4m3fn", "tensor", 0.5),
    ("modelopt", "e4m3fn", "channel", None),
    ("modelopt", "nvfp4", None, 0.5),
    ("finegrained-fp8", "e4m3fn", None, None),
    ("finegrained-fp8", "deepseek_128x128", None, None),
]
STATIC = [case for case in LAYOUTS if case[3] is not None]
DYNAMIC = [case for case in LAYOUTS if case[3] is None]


def id_of(case):
    return " ".join(map(str, case))


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    shapes = WEIGHTS | WIDE
    tensors = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    (tmp_path / "src").mkdir()
    save(tmp_path / "src" / "model.safetensors", tensors)
    (tmp_path / "src" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "src"


@pytest.fixture
def problems(source, tmp_path):
    """Converts by a case, which verifies; changes JSON or tensors; returns the problems."""

    def found(case, *, json_file="config.json", change=None, tensors=None):
        layout, fmt, scaling, scales = case
        dst = tmp_path / "dst"
        convert(
            source,
            dst,
            layout=layout,
            format=fmt,
            scaling=scaling,
            input_scales=scales,
            allow_split=True,
        )
        assert verify(source, dst).problems == ()
        if change is not None:
            content = json.loads((dst / json_file).read_text())
            change(content)
            (dst / json_file).write_text(json.dumps(content))
        if tensors is not None:
            with open_source(dst / "model.safetensors") as file:
                arrays, metadata = {n: file.read(n) for n in file.tensors}, file.metadata
            tensors(arrays)
            save(dst / "model.safetensors", arrays, metadata, overwrite=True)
        return verify(source, dst).problems

    return found


def scale_of(arrays):
    return arrays[f"{Q}.input_scale"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays: scale_of(arrays).fill(np.nan), "byte"),
        (lambda arrays: scale_of(arrays).fill(0.25), "byte"),
        (lambda arrays: arrays.update({f"{Q}.input_scale": np.ones(2, "f2")}), "F16 [2], expected"),
        (lambda arrays: arrays.pop(f"{Q}.input_scale"), "is missing, expected F32 ["),
    ],
    ids=["nan", "another", "dtype", "missing"],
)
@pytest.mark.parametrize("case", STATIC, ids=id_of)
def test_static_input_scales_are_those_of_the_conversion(problems, case, change, said):
    (line,) = problems(case, tensors=change)
    assert f"{Q}.input_scale: {said}" in line


@pytest.mark.parametrize("case", DYNAMIC[::3], ids=id_of)
def test_no_tensor_is_there_that_convert_does_not_write(problems, case):
    (line,) = problems(case, tensors=lambda a: a.update({f"{Q}.input_scale": np.ones(1, "f4")}))
    assert line.startswith(f"{Q}.input_scale: is there, expected no such tensor")


def test_arguments_that_nobody_can_read(source, tmp_path):
    convert(source, tmp_path / "dst")
    with open_source(tmp_path / "dst" / "model.safetensors") as file:
        record = json.loads(file.metadata["qtoolkit"])
    arrays = stored(tmp_path / "dst")
    for arguments in ({}, {"format": "no"}, {"format": 3}, {"format": {"rules": 3}}, [], "x"):
        record["arguments"] = arguments
        path = tmp_path / "dst" / "model.safetensors"
        save(path, arrays, {"qtoolkit": json.dumps(record)}, overwrite=True)
        with refused(CheckpointError, "the arguments of its conversion"):
            verify(source, tmp_path / "dst")


@pytest.mark.parametrize(
    "options",
    [
        {"skip": [re.compile("Q_PROJ", re.IGNORECASE), "gate"], "allow_split": True},
        {"format": Rules({"q_proj": "mxfp4", "[ko]_proj": "nvfp4"}), "allow_split": True},
        {"format": "W4A16", "keep_dtype": "bfloat16"},
        {"format": BlockFormat(element="e4m3fn", block=(128, 128))},
        {"format": "int8", "layout": "plain", "scaling": "channel", "channel_axis": "first"},
        {"scaling": "tensor", "input_scales": {f"{Q[:-6]}{x}_proj": 0.3 for x in "qkvo"}},
    ],
)
def test_every_argument_of_the_plan_is_stored(source, tmp_path, options):
    convert(source, tmp_path / "dst", **options)
    found = verify(source, tmp_path / "dst")
    assert (found.problems, found.codes_only) == ((), False)


def test_a_source_of_which_no_such_plan_can_be_made(source, tmp_path):
    convert(source, tmp_path / "dst", skip=["gate"])
    save(tmp_path / "other.safetensors", {"a.weight": np.ones((128, 128), np.float32)})
    (line,) = verify(tmp_path / "other.safetensors", tmp_path / "dst").problems
    assert line.startswith("planned again as it was converted: skip='gate' matches nothing")


def test_a_config_that_calls_static_scales_dynamic(problems):
    def change(config):
        groups = config["quantization_config"]["config_groups"]
        groups["group_0"]["input_activations"]["dynamic"] = True

    assert problems(LAYOUTS[0], change=change) == (
        "config.json: quantization_config.config_groups.group_0.input_activations.dynamic is true, "
        "expected false; convert it again",
    )


@pytest.mark.sample(
    *("compressed-tensors e4m3fn tensor 0.5", "compressed-tensors e4m3fn channel None"),
    *("compressed-tensors mxfp8_e4m3 None None", "compressed-tensors nvfp4 None None"),
    *("modelopt e4m3fn tensor 0.5", "finegrained-fp8 e4m3fn None None"),
)
@pytest.mark.parametrize("case", LAYOUTS, ids=id_of)
def test_ignored_modules_are_the_unquantized_ones(problems, case):
    key = "modules_to_not_convert" if case[0] == "finegrained-fp8" else "ignore"

    def change(config):
        modules = config["quantization_config"][key]
        modules.remove("model.layers.0.mlp.gate")
        modules.insert(0, Q)
        modules.reverse()  # says nothing

    assert problems(case, change=change) == (
        f"config.json: quantization_config.{key} has {Q}, expected no such entry; convert it again",
        f"config.json: quantization_config.{key} has no model.layers.0.mlp.gate, expected it; "
        "convert it again",
    )


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("num_bits", 4), "num_bits is 4, expected 8"),
        (("strategy", None), "strategy is null, expected tensor"),
        (("actorder", "group"), "actorder is group, expected no such key"),
    ],
)
def test_what_the_config_says_of_weights(problems, path, line):
    def change(config):
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update([path])

    where = "config.json: quantization_config.config_groups.group_0.weights"
    assert problems(LAYOUTS[1], change=change) == (f"{where}.{line}; convert it again",)


def test_targets_of_several_formats(problems):
    rules = Rules({"q_proj": "mxfp4", "[kv]_proj": "e4m3fn"})
    case = ("compressed-tensors", rules, None, None)

    def change(config):
        groups = config["quantization_config"]["config_groups"]
        groups["group_1"]["targets"] = [r"re:.*q_proj$", *reversed(groups["group_1"]["targets"])]

    assert problems(case, change=change) == (
        "config.json: quantization_config.config_groups.group_1.targets has re:.*q_proj$, expected "
        "no such entry; convert it again",
    )


@pytest.mark.parametrize("case", [c for c in LAYOUTS if c[0] == "modelopt"], ids=id_of)
def test_the_second_config_of_modelopt(problems, case, source, tmp_path):
    def change(config):
        config["quantization"]["quant_algo"] = "W4A8"
        config["quantization"]["exclude_modules"].append(Q)

    algorithm = {"channel": "FP8_PER_CHANNEL_PER_TOKEN", "tensor": "FP8", None: "NVFP4"}[case[2]]
    assert problems(case, json_file="hf_quant_config.json", change=change) == (
        f"hf_quant_config.json: quantization.quant_algo is W4A8, expected {algorithm}; convert it "
        "again",
        f"hf_quant_config.json: quantization.exclude_modules has {Q}, expected no such entry; "
        "convert it again",
    )
    (tmp_path / "dst" / "hf_quant_config.json").unlink()
    assert verify(source, tmp_path / "dst").problems == (
        "hf_quant_config.json: is missing, expected what layout modelopt has; convert it again",
    )


def test_scales_in_a_shape_that_the_layout_does_not_write(problems):
    def change(arrays):
        arrays[f"{Q}.weight_scale"] = arrays[f"{Q}.weight_scale"].reshape(-1)

    (line,) = problems(LAYOUTS[2], tensors=change)
    assert line == (
        f"{Q}.weight: {Q}.weight_scale: F32 [256], expected F32 [256, 1]; convert it again"
    )


def test_a_config_without_what_loaders_need(problems):
    (line,) = problems(LAYOUTS[2], change=lambda config: config.pop("quantization_config"))
    assert line.startswith("config.json: quantization_config is missing, expected {")


def test_of_another_program_codes_are_compared_and_nothing_else(problems, source, tmp_path):
    """As llm-compressor writes it: other keys, scales in bfloat16."""
    assert problems(LAYOUTS[0]) == ()
    dst = tmp_path / "dst"
    arrays = stored(dst)
    arrays[f"{Q}.input_scale"] = arrays[f"{Q}.input_scale"].astype("bfloat16").reshape(())
    save(dst / "model.safetensors", arrays, {"format": "pt"}, overwrite=True)
    config = json.loads((dst / "config.json").read_text())
    config["quantization_config"] |= {"ignore": ["lm_head"], "version": "0.9", "sparsity": {}}
    (dst / "config.json").write_text(json.dumps(config))
    found = verify(source, dst)
    assert (found.problems, found.codes_only, found.quantized) == ((), True, 4)
    arrays[f"{Q}.weight_scale"] *= 2
    save(dst / "model.safetensors", arrays, {"format": "pt"}, overwrite=True)
    (line,) = verify(source, dst).problems
    assert line.startswith(f"{Q}.weight: {Q}.weight_scale: byte")


def test_arguments_in_the_wrong_order(problems, source, tmp_path):
    assert problems(LAYOUTS[0]) == ()
    first, *_ = verify(tmp_path / "dst", source).problems
    assert "expected the source first" in first
