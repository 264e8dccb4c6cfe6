"""What `verify` says of configs and input scales. Oracle: one change of what `convert` wrote, by
hand.
"""

import json

import numpy as np
import pytest

from qtoolkit.checkpoints import SafetensorsFile, convert, save, verify
from qtoolkit.formats import Rules

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
            with SafetensorsFile(dst / "model.safetensors") as file:
                arrays, metadata = {n: file.read(n) for n in file.tensors}, file.metadata
            tensors(arrays)
            save(dst / "model.safetensors", arrays, metadata, overwrite=True)
        return verify(source, dst).problems

    return found


@pytest.mark.parametrize("value", [np.nan, 0, -1, np.inf])
@pytest.mark.parametrize("case", STATIC, ids=id_of)
def test_input_scales_are_numbers_above_zero(problems, case, value):
    assert problems(case, tensors=lambda arrays: arrays[f"{Q}.input_scale"].fill(value)) == (
        f"{Q}.input_scale: {value:g}, expected a number above 0, as every calibration gives; "
        "calibrate again, and convert it again",
    )


@pytest.mark.parametrize("dtype", ["float16", "int32"])
@pytest.mark.parametrize("case", STATIC, ids=id_of)
def test_input_scales_have_the_dtype_and_shape_of_the_layout(problems, case, dtype):
    shape = "[]" if case[0] == "modelopt" else "[1]"
    name = {"float16": "F16", "int32": "I32"}[dtype]

    def change(arrays):
        arrays[f"{Q}.input_scale"] = np.ones(2, dtype)

    assert problems(case, tensors=change) == (
        f"{Q}.input_scale: {name} [2], expected F32 {shape}; convert it again",
    )


@pytest.mark.parametrize("case", STATIC, ids=id_of)
def test_input_scales_are_there_where_the_config_says_so(problems, case):
    (line,) = problems(case, tensors=lambda arrays: arrays.pop(f"{Q}.input_scale"))
    assert line.startswith(f"{Q}.input_scale: is missing, expected F32 [")


@pytest.mark.sample(
    "compressed-tensors e4m3fn tensor None",
    "compressed-tensors e4m3fn block None",
    "compressed-tensors mxfp4 None None",
    "finegrained-fp8 e4m3fn None None",
)
@pytest.mark.parametrize("case", DYNAMIC, ids=id_of)
def test_input_scales_are_nowhere_else(problems, case):
    def change(arrays):
        arrays[f"{Q}.input_scale"] = np.ones(1, np.float32)

    assert problems(case, tensors=change) == (
        f"{Q}.input_scale: is there, expected none: activations have no static scales; convert it "
        "again",
    )


def test_a_config_that_calls_static_scales_dynamic(problems):
    def change(config):
        groups = config["quantization_config"]["config_groups"]
        groups["group_0"]["input_activations"]["dynamic"] = True

    assert problems(LAYOUTS[0], change=change) == (
        "config.json: quantization_config.config_groups.group_0.input_activations.dynamic is true, "
        "expected false; convert it again",
    )


@pytest.mark.sample(
    "compressed-tensors e4m3fn tensor 0.5",
    "compressed-tensors e4m3fn channel None",
    "compressed-tensors mxfp8_e4m3 None None",
    "compressed-tensors nvfp4 None None",
    "modelopt e4m3fn tensor 0.5",
    "finegrained-fp8 e4m3fn None None",
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
    assert line.startswith(f"{Q}.weight: {Q}.weight F8_E4M3 [256, 128], {Q}.weight_scale F32 [256]")


@pytest.mark.parametrize("key", ["compression_config", "text_config"])
def test_a_config_where_loaders_need_not_find_it(problems, key):
    def change(config):
        given = {"quantization_config": config.pop("quantization_config")}
        config[key] = given if key == "text_config" else given["quantization_config"]

    (line,) = problems(LAYOUTS[2], change=change)
    assert line.startswith("config.json: no quantization_config, expected that of layout compresse")


def test_a_config_of_codes_for_unquantized_weights(source, tmp_path):
    convert(source, tmp_path / "dst", layout="finegrained-fp8", format="e4m3fn")
    (tmp_path / "dst" / "model.safetensors").write_bytes(
        (source / "model.safetensors").read_bytes()
    )
    (line,) = verify(source, tmp_path / "dst").problems
    assert line.startswith("config.json: quantization_config of fp8, and no weight is quantized")


def test_the_config_of_another_program_is_its_own(problems, source, tmp_path):
    """As llm-compressor writes it: other keys, scales in bfloat16."""
    assert problems(LAYOUTS[0]) == ()
    dst = tmp_path / "dst"
    with SafetensorsFile(dst / "model.safetensors") as file:
        arrays = {name: file.read(name) for name in file.tensors}
    arrays[f"{Q}.input_scale"] = arrays[f"{Q}.input_scale"].astype("bfloat16").reshape(())
    save(dst / "model.safetensors", arrays, {"format": "pt"}, overwrite=True)
    config = json.loads((dst / "config.json").read_text())
    config["quantization_config"] |= {"ignore": ["lm_head"], "version": "0.9", "sparsity": {}}
    (dst / "config.json").write_text(json.dumps(config))
    assert verify(source, dst).problems == ()
    arrays[f"{Q}.input_scale"] = -arrays[f"{Q}.input_scale"]
    save(dst / "model.safetensors", arrays, {"format": "pt"}, overwrite=True)
    (negative,) = verify(source, dst).problems
    assert negative.startswith(f"{Q}.input_scale: -0.5, expected a number above 0")


@pytest.mark.parametrize("removed", [0, 1, 4])
def test_a_file_has_input_scales_for_all_weights_or_none(source, tmp_path, removed):
    src, dst = source / "model.safetensors", tmp_path / "dst.safetensors"
    layout, fmt, scaling, scales = LAYOUTS[0]
    convert(src, dst, layout=layout, format=fmt, scaling=scaling, input_scales=scales)
    with SafetensorsFile(dst) as file:
        arrays, metadata = {n: file.read(n) for n in file.tensors}, file.metadata
    gone = [name for name in arrays if name.endswith("input_scale")][:removed]
    save(dst, {n: x for n, x in arrays.items() if n not in gone}, metadata, overwrite=True)
    lines = tuple(f"{name}: is missing, expected F32 [1]; convert it again" for name in gone)
    assert verify(src, dst).problems == (() if removed == 4 else lines)
