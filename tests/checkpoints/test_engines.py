"""What engines ask of a checkpoint: one scheme in a layer that they join, names, whole blocks.

The oracle of joined layers is a table written from vLLM's `packed_modules_mapping`.
"""

import ast
import json
import re

import numpy as np
import pytest
from command import run
from refused import refused

from qtoolkit.checkpoints import CheckpointError, convert, save, verify
from qtoolkit.checkpoints.internal import PlanOptions, make_plan, open_source
from qtoolkit.formats import Rules

RNG = np.random.default_rng(0)


def folder(path, shapes, **config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    tensors = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save(path / "model.safetensors", tensors, {"format": "pt"})
    return path


def of_layers(*names, count=2):
    return {f"model.layers.{i}.{name}.weight": (32, 64) for i in range(count) for name in names}


def plan(path, **options):
    with open_source(path) as source:
        return make_plan(source, PlanOptions(**options))


def kept(made):
    return {t.name for t in made.tensors if t.action == "keep"}


JOINED = [  # (parts that vLLM joins, others of the layer)
    (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]),
    (["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]),
    (["feed_forward.w1", "feed_forward.w3"], ["feed_forward.w2"]),
    (["attention.self.query", "attention.self.key", "attention.self.value"], ["output.dense"]),
    (["attention.wq", "attention.wk", "attention.wv"], ["attention.wo"]),
    (["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"], ["self_attn.kv_b_proj"]),
    (["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"], ["linear_attn.out_proj"]),
    (["linear_attn.in_proj_a", "linear_attn.in_proj_b"], ["linear_attn.out_proj"]),
    (["mlp.fc11", "mlp.fc12"], ["mlp.fc2"]),
    # vLLM's Whisper: {"encoder_attn.kv_proj": ["encoder_attn.k_proj", "encoder_attn.v_proj"]}.
    (["encoder_attn.k_proj", "encoder_attn.v_proj"], ["encoder_attn.q_proj"]),
    (["mlp.experts.0.gate_proj", "mlp.experts.0.down_proj", "mlp.experts.1.up_proj"], []),
    (["moe.experts.0.w1", "moe.experts.1.w2"], ["moe.shared_expert.w2"]),
]


@pytest.mark.parametrize("layout", ["compressed-tensors", "finegrained-fp8", "modelopt"])
@pytest.mark.parametrize(("parts", "others"), JOINED)
def test_parts_of_a_joined_layer_are_quantized_alike(tmp_path, parts, others, layout):
    src = folder(tmp_path / "src", of_layers(*parts, *others))
    options = {"layout": layout}
    for part in parts:
        skip = rf"{re.escape(part)}\."
        with pytest.raises(CheckpointError, match=r"parts in several schemes.*skip=") as error:
            plan(src, skip=[skip], **options)
        pattern = ast.literal_eval(re.search(r"Write skip=(\S+)", str(error.value))[1])
        if others:  # else nothing is left to quantize
            made = plan(src, skip=[skip, pattern], **options)
            assert kept(made) == {*of_layers(*parts)}
        made = plan(src, skip=[skip], allow_split=True, **options)
        assert kept(made) == {*of_layers(part)}
    for other in others:
        assert kept(plan(src, skip=[rf"{re.escape(other)}\."], **options)) == {*of_layers(other)}


def test_the_line_to_write_is_of_one_layer(tmp_path):
    """Of Whisper's decoder: the other attention of a layer has projections of the same names."""
    names = [f"{a}.{x}_proj" for a in ("self_attn", "encoder_attn") for x in "qkv"]
    src = folder(tmp_path / "src", of_layers(*names))
    with pytest.raises(CheckpointError, match=r"Write skip=") as error:
        plan(src, skip=[r"encoder_attn\.k_proj"])
    pattern = ast.literal_eval(re.search(r"Write skip=(\S+)", str(error.value))[1])
    assert kept(plan(src, skip=[pattern])) == {*of_layers(names[4], names[5])}


def test_all_parts_of_some_layers_may_be_skipped(tmp_path):
    src = folder(tmp_path / "src", of_layers(*JOINED[0][0], *JOINED[1][0]))
    assert len(kept(plan(src, skip=[r"layers\.0\."]))) == 5


def test_rules_that_split_a_layer_are_for_plain_only(tmp_path):
    src = folder(tmp_path / "src", of_layers(*JOINED[0][0]))
    rules = Rules({"q_proj": "e4m3fn", "[kv]_proj": "int8"})
    message = r"q_proj.weight \(e4m3fn .*and so for 1 more; expected one for all parts"
    refused(CheckpointError, message, plan, src, format=rules, scaling="channel")
    plan(src, format=rules, scaling="channel", allow_split=True)
    plan(src, skip=["k_proj"], layout="plain")


def test_the_command_refuses_and_takes_split_layers(tmp_path):
    src = folder(tmp_path / "src", of_layers(*JOINED[0][0]))
    arguments = ["convert", str(src), str(tmp_path / "dst"), "--skip", "k_proj", "--dry-run"]
    done = run(*arguments)
    assert done.exit_code == 1
    assert "--allow-split" in done.stderr
    assert run(*arguments, "--allow-split").exit_code == 0


SIZES = {
    "model.layers.0.mlp.down_proj.weight": (64, 100),
    "model.layers.1.mlp.down_proj.weight": (64, 100),
    "model.layers.0.self_attn.o_proj.weight": (64, 40),
    "model.layers.1.self_attn.o_proj.weight": (64, 64),
}


def test_all_matrices_that_do_not_fit_are_named_at_once(tmp_path):
    src = folder(tmp_path / "src", SIZES)
    arguments = ["convert", str(src), str(tmp_path / "dst"), "--format", "mxfp4"]
    for dry in ([], ["--dry-run"]):
        result = run(*arguments, *dry)
        assert result.exit_code == 1
        text = " ".join(result.stderr.split())
        assert (
            "2 tensors model.layers.*.mlp.down_proj.weight, [64, 100]: axis -1 has 100 elements, "
            "expected a multiple of 32 for mxfp4" in text
        )
        assert "tensor model.layers.0.self_attn.o_proj.weight, [64, 40]: axis -1 has 40" in text
        assert f"{src}: write --keep-unfitting to exclude what does not fit" in text
    misfits = {name for name, shape in SIZES.items() if shape[1] % 32}
    assert kept(plan(src, format="mxfp4", keep_unfitting=True)) == misfits
    report = convert(src, tmp_path / "dst", format="mxfp4", keep_unfitting=True)
    ignored = report.quantization_config["ignore"]
    assert {name.removesuffix(".weight") for name in misfits} <= {*ignored}


@pytest.mark.parametrize(
    ("fmt", "layout"),
    [
        ("deepseek_128x128", "finegrained-fp8"),
        ("mxfp4", "compressed-tensors"),
        ("nvfp4", "compressed-tensors"),
        ("e4m3fn", "compressed-tensors"),
        ("e5m2", "plain"),
    ],
)
def test_the_only_layout_that_holds_a_format_is_chosen(tmp_path, fmt, layout):
    src = folder(tmp_path / "src", {"model.layers.0.mlp.down_proj.weight": (128, 128)})
    assert plan(src, format=fmt).layout == layout
    if layout != "compressed-tensors" or fmt == "mxfp4":
        assert plan(src / "model.safetensors", format=fmt).layout == layout


@pytest.mark.parametrize(
    ("name", "fmt", "scaling"),
    [
        ("FP8_DYNAMIC", "e4m3fn", "channel"),
        ("FP8", "e4m3fn", "tensor"),
        ("w4a16", "int4_group128", None),
        ("FP8_BLOCK", "e4m3fn", "block"),
        ("W8A8", "int8", "channel"),
        ("W4A16", "int4_group128", None),
        ("W8A16", "int8_group128", None),
        ("MXFP8", "mxfp8_e4m3", None),
        ("MXFP4A16", "mxfp4", None),
        ("NVFP4", "nvfp4", None),
        ("FP8_PER_CHANNEL_PER_TOKEN", "e4m3fn", "channel"),
    ],
)
def test_formats_by_the_names_of_their_publishers(tmp_path, name, fmt, scaling):
    src = folder(tmp_path / "src", {"model.layers.0.mlp.down_proj.weight": (128, 128)})
    by_name, by_words = plan(src, format=name), plan(src, format=fmt, scaling=scaling)
    assert by_name.outputs == by_words.outputs
    assert by_name.metadata == by_words.metadata
    assert by_name.quantization_config == by_words.quantization_config
    by_rule = plan(src, format=Rules({"down_proj": name}), layout="compressed-tensors")
    expected = plan(src, format=fmt, scaling=scaling, layout="compressed-tensors")
    assert by_rule.quantization_config == expected.quantization_config
    arguments = ["convert", str(src), str(tmp_path / "dst"), "--format", name, "--dry-run"]
    assert run(*arguments).exit_code == 0


def test_a_name_with_another_scaling_is_refused(tmp_path):
    src = folder(tmp_path / "src", {"model.layers.0.mlp.down_proj.weight": (128, 128)})
    with refused(CheckpointError, r"scaling='tensor': FP8_DYNAMIC is e4m3fn"):
        plan(src, format="FP8_DYNAMIC", scaling="tensor")


def test_a_folder_is_not_written_into_the_name_of_a_file(tmp_path):
    src = folder(tmp_path / "src", {"model.layers.0.mlp.down_proj.weight": (128, 128)})
    with refused(CheckpointError, r"out.safetensors: ends in .safetensors, but .* is a folder"):
        convert(src, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


EXPERTS = {
    "one by one": {
        f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight": (32, 64)
        for i in range(2)
        for e in range(2)
        for part in ("gate", "up", "down")
    },
    "as Mixtral's": {
        f"model.layers.{i}.mlp.experts.{e}.w{n}.weight": (32, 64)
        for i in range(2)
        for e in range(2)
        for n in (1, 2, 3)
    },
    "in one tensor": {
        f"model.layers.{i}.mlp.experts.{part}": (2, 64, 32)
        for i in range(2)
        for part in ("gate_up_proj", "down_proj")
    },
    "as Granite's": {
        f"model.layers.{i}.mlp.{part}_linear.weight": (2, 64, 32)
        for i in range(2)
        for part in ("input", "output")
    },
}


def is_ignored(name, ignored):
    """As vLLM's check_equal_or_regex_match."""
    return any(re.match(one[3:], name) if one.startswith("re:") else one == name for one in ignored)


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("layout", ["compressed-tensors", "finegrained-fp8", "modelopt"])
def test_unquantized_experts_are_ignored_by_loaders_names(tmp_path, kind, layout):
    src = folder(tmp_path / "src", EXPERTS[kind] | of_layers("self_attn.o_proj"))
    report = convert(src, tmp_path / "dst", layout=layout, skip=[r"\.mlp\."])
    config = report.quantization_config
    ignored = config.get("ignore") or config["modules_to_not_convert"]
    for i in range(2):
        module = f"model.layers.{i}.mlp.experts"
        for part in ("gate", "up", "down"):
            assert is_ignored(f"{module}.0.{part}_proj", ignored)
            if layout == "compressed-tensors":
                assert is_ignored(f"{module}.1.{part}_proj", ignored)
        assert is_ignored(module, ignored) == (kind in ("in one tensor", "as Granite's"))
        assert not is_ignored(f"model.layers.{i}.self_attn.o_proj", ignored)
    assert verify(src, tmp_path / "dst").problems == ()


def test_quantized_experts_are_not_ignored(tmp_path):
    src = folder(tmp_path / "src", EXPERTS["one by one"] | of_layers("self_attn.o_proj"))
    config = convert(src, tmp_path / "dst", skip=["o_proj"]).quantization_config
    assert not is_ignored("model.layers.0.mlp.experts.0.gate_proj", config["ignore"])


def test_the_summary_says_how_much_of_a_model_stays_as_it_was(tmp_path):
    shapes = {"model.layers.0.mlp.experts.gate_up_proj": (8, 64, 32)}  # 16384 of 18432 elements
    src = folder(tmp_path / "src", shapes | {"model.layers.0.self_attn.o_proj.weight": (32, 64)})
    arguments = ["convert", str(src), str(tmp_path / "dst")]
    for dry in (["--dry-run"], []):
        result = run(*arguments, *dry)
        reason = "3 dimensions, compressed-tensors holds matrices"
        assert f"excluded   1 tensor ({reason}: 1), 88.9 % of" in result.stdout
    report = run(*arguments, "--overwrite", "--json")
    assert json.loads(report.stdout)["kept_share"] == 16384 / 18432


@pytest.mark.parametrize(
    ("rules", "words", "title"),
    [
        ({"o_proj": "int8", "down": "e4m3fn"}, "channel", "a scale per channel, layout"),
        ({"o_proj": "mxfp4"}, "none", "mxfp4, layout"),
        ({"o_proj": "mxfp4", "down": "int8"}, "channel, none", "channel, or the format's own"),
        ({"o_proj": "FP8", "down": "int8"}, "channel, tensor", "a scale per channel or tensor,"),
    ],
)
def test_summary_and_metadata_are_true_of_several_schemes(tmp_path, rules, words, title):
    src = folder(tmp_path / "src", of_layers("mlp.down_proj", "self_attn.o_proj"))
    (tmp_path / "rules.json").write_text(json.dumps({"rules": [*rules.items()]}))
    arguments = [
        "convert",
        str(src),
        str(tmp_path / "dst"),
        "--rules",
        str(tmp_path / "rules.json"),
    ]
    result = run(*arguments)
    assert title in result.stdout
    with open_source(tmp_path / "dst") as source:
        assert json.loads(source.metadata["qtoolkit"])["scaling"] == words
