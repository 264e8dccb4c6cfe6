"""All experts of a layer in one tensor: gpt-oss's MXFP4 is written as its loaders read it."""

import json

import ml_dtypes
import numpy as np
import pytest
from command import run
from refused import refused

from qtoolkit import Rules
from qtoolkit.checkpoints import (
    CheckpointError,
    compare,
    convert,
    dequantize_checkpoint,
    load,
    save,
    verify,
)
from qtoolkit.checkpoints.internal import open_source

LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts"
CONFIG = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64}
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def tensors(inputs=64, outputs=96, layers=1):
    rng = np.random.default_rng(0)

    def weights(*shape):
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    made = {"lm_head.weight": weights(32, 64)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        made |= {
            f"{name}.mlp.experts.gate_up_proj": weights(3, inputs, outputs),
            f"{name}.mlp.experts.gate_up_proj_bias": weights(3, outputs),
            f"{name}.mlp.experts.down_proj": weights(3, 64, 64),
            f"{name}.mlp.router.weight": weights(3, 64),
            f"{name}.self_attn.o_proj.weight": weights(64, 64),
        }
    return made


@pytest.fixture
def source(tmp_path):
    return folder(tmp_path / "source", tensors())


def folder(path, weights, config=CONFIG):
    path.mkdir()
    save(path / "model.safetensors", weights)
    (path / "config.json").write_text(json.dumps(config))
    return path


def load_file(path):
    """Every tensor as it is stored."""
    with open_source(path) as source:
        return {name: source.read(name) for name in source.tensors}


def mxfp4(rows):
    """Bytes of codes and of scales of [..., inputs]: OCP MX, scales rounded as elements are.

    The exponent of a scale is that of amax rounded to one bit of mantissa, less 2; codes are the
    nearest, of two the even one.
    """
    x = np.asarray(rows, np.float64).reshape(*rows.shape[:-1], -1, 32)
    mantissa, exponent = np.frexp(np.abs(x).max(-1))  # of [0.5, 1)
    exponent = exponent - 3 + (mantissa >= 0.875)
    distances = np.abs(np.abs(x / np.exp2(exponent)[..., None])[..., None] - MAGNITUDES)
    nearest = distances == distances.min(-1, keepdims=True)
    codes = np.where(nearest & (np.arange(8) % 2 == 0), 2, nearest.astype(int)).argmax(-1)
    codes = (codes | (8 * np.signbit(x))).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).astype(np.uint8)


def test_gpt_oss_is_written_as_transformers_reads_it(source, tmp_path):
    """Names, shapes and order of transformers' Mxfp4GptOssExperts; codes by the formula above."""
    report = convert(source, tmp_path / "out", layout="gpt-oss", format="mxfp4")
    written, original = load_file(tmp_path / "out" / "model.safetensors"), tensors()
    for name in (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"):
        blocks, scales = mxfp4(original.pop(name).swapaxes(1, 2))
        np.testing.assert_array_equal(written.pop(f"{name}_blocks"), blocks)
        np.testing.assert_array_equal(written.pop(f"{name}_scales"), scales)
    assert written.keys() == original.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert f"{LAYER}.self_attn.o_proj" in config["quantization_config"]["modules_to_not_convert"]
    assert report.caution == ""


def test_written_experts_are_read_and_written_again_alike(source, tmp_path):
    convert(source, tmp_path / "out", layout="gpt-oss", format="mxfp4")
    assert verify(source, tmp_path / "out").problems == ()
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back", dtype="float32")
    assert compare(tmp_path / "out", tmp_path / "back").equal
    name = f"{EXPERTS}.gate_up_proj"
    found = load(tmp_path / "out")[name].dequantize("float32")
    np.testing.assert_array_equal(found, load(tmp_path / "back")[name])
    convert(tmp_path / "out", tmp_path / "again", layout="gpt-oss", format="mxfp4")
    assert compare(tmp_path / "out", tmp_path / "again").equal
    blocks = load_file(tmp_path / "out" / "model.safetensors")[f"{name}_blocks"]
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        at = file.read().index(blocks.tobytes()) + 7
        file.seek(at)
        file.write(bytes([blocks.reshape(-1)[7] ^ 1]))
    (problem,) = verify(source, tmp_path / "out").problems
    assert f"{name}_blocks: byte 7 is" in problem


@pytest.mark.parametrize(
    ("weights", "config", "options", "message"),
    [
        ({"inputs": 48}, CONFIG, {}, r"axis -2 has 48 elements, expected a multiple of 32"),
        ({}, CONFIG | {"model_type": "llama4"}, {}, "the model is llama4 by its config.json"),
        ({}, CONFIG, {"format": "int8"}, r"cannot hold int8"),
        ({}, CONFIG, {"skip": ["down_proj$"]}, "one layer for engines"),
        (
            {},
            CONFIG,
            {"format": Rules({"o_proj": "mxfp4"})},
            "o_proj.weight, .64, 64.: expected all experts",
        ),
    ],
)
def test_what_loaders_of_gpt_oss_do_not_read_is_refused(
    tmp_path, weights, config, options, message
):
    source = folder(tmp_path / "source", tensors(**weights), config)
    with refused(CheckpointError, message):
        convert(source, tmp_path / "out", layout="gpt-oss", **{"format": "mxfp4"} | options)


def test_unquantized_layers_of_experts_come_with_a_caution(tmp_path):
    source = folder(tmp_path / "source", tensors(layers=2))
    options = {"layout": "gpt-oss", "format": "mxfp4", "skip": [r"layers\.1\."]}
    report = convert(source, tmp_path / "out", **options)
    assert report.caution.startswith("vLLM takes the experts of every layer for MXFP4")
    kept = report.quantization_config["modules_to_not_convert"]
    assert "model.layers.1.mlp.experts" in kept
    assert EXPERTS not in kept


def test_other_layouts_name_the_one_that_holds_experts(source, tmp_path):
    result = run("convert", str(source), str(tmp_path / "out"))
    assert "compressed-tensors holds matrices; --layout gpt-oss holds experts: 2" in result.stdout


# By model_type the orders of axes of a stack, and a layout whose loaders read experts one by one.
SPLIT = [
    ("qwen3_5_moe", (0, 1, 2), "compressed-tensors"),
    ("qwen3_5_moe_text", (0, 1, 2), "finegrained-fp8"),
    ("llama4", (0, 2, 1), "compressed-tensors"),
]


@pytest.mark.parametrize(("model", "order", "layout"), SPLIT)
def test_stacks_become_the_weights_that_loaders_read_one_by_one(tmp_path, model, order, layout):
    """Oracle: the same conversion of a folder that has them one by one."""
    rng = np.random.default_rng(0)
    parts = {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}
    experts = [
        {part: rng.standard_normal(shape, np.float32) for part, shape in parts.items()}
        for _ in range(3)
    ]
    single = {
        f"{EXPERTS}.{i}.{part}_proj.weight": weight
        for i, expert in enumerate(experts)
        for part, weight in expert.items()
    }
    gate_up = np.stack([np.concatenate([e["gate"], e["up"]]) for e in experts])
    down = np.stack([e["down"] for e in experts])
    stacks = {
        f"{EXPERTS}.gate_up_proj": np.ascontiguousarray(gate_up.transpose(order)),
        f"{EXPERTS}.down_proj": np.ascontiguousarray(down.transpose(order)),
    }
    config = {"model_type": model, "text_config": {"hidden_size": 32}}
    for name, weights in (("stacks", stacks), ("single", single)):
        src = folder(tmp_path / name, weights, config)
        report = convert(src, tmp_path / f"{name}_8", layout=layout)
        assert report.kept_share == 0
    found, expected = (
        load_file(tmp_path / f"{name}_8" / "model.safetensors") for name in ("stacks", "single")
    )
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint8), array.view(np.uint8), name)
    for source in ("stacks", "single"):
        assert verify(tmp_path / source, tmp_path / "stacks_8").problems == ()
    assert compare(tmp_path / "stacks", tmp_path / "single").equal
    assert not compare(tmp_path / "stacks_8", tmp_path / "stacks").only_b
