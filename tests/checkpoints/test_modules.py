"""Names in compressed-tensors' config find the modules of loaders, and no quantized one.

The names that transformers gives are those of transformers 5.23; that whole models load is tested
with it, in tests/interop.
"""

import json
import re

import numpy as np
import pytest
from refused import refused

from qtoolkit import Rules
from qtoolkit.checkpoints import CheckpointError, convert, save
from qtoolkit.checkpoints.layouts._modules import ignored, patterns_of

LAYER = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def layers(prefix, names=LAYER, count=3):
    return [f"{prefix}layers.{i}.{name}" for i in range(count) for name in names]


def found(patterns, module):
    """As compressed-tensors does it: a name, or "re:" and a pattern that `re.match` finds."""
    return any(
        re.match(one.removeprefix("re:"), module) if one.startswith("re:") else one == module
        for one in patterns
    )


TOWER = layers("vision_tower.encoder.", ("self_attn.q_proj", "mlp.down_proj"))
MODELS = {  # kept, quantized: as in the checkpoint; kept, quantized: as transformers calls them
    "llama, tied": (["model.embed_tokens"], layers("model."), ["lm_head"], layers("model.")),
    "llava": (
        [*TOWER, "multi_modal_projector.linear_1", "language_model.lm_head"],
        layers("language_model.model."),
        [*(f"model.{name}" for name in TOWER), "model.multi_modal_projector.linear_1", "lm_head"],
        layers("model.language_model."),
    ),
    "qwen2-vl": (
        ["visual.blocks.0.attn.qkv", "visual.merger.mlp.0", "lm_head"],
        layers("model."),
        ["model.visual.blocks.0.attn.qkv", "model.visual.merger.mlp.0", "lm_head"],
        layers("model.language_model."),
    ),
    "phimoe": (
        layers("model.", ("block_sparse_moe.gate",)),
        layers("model.", ("self_attn.q_proj", "block_sparse_moe.experts.0.w1")),
        layers("model.", ("mlp.router",)),
        layers("model.", ("self_attn.q_proj",)),
    ),
    "bert": (
        ["cls.predictions.transform.dense"],
        [f"bert.encoder.layer.{i}.output.dense" for i in range(2)],
        ["cls.predictions.transform.dense", "cls.predictions.decoder"],
        [f"bert.encoder.layer.{i}.output.dense" for i in range(2)],
    ),
    "modernbert": ([], ["model.layers.0.mlp.Wi"], ["decoder"], ["model.layers.0.mlp.Wi"]),
    "whisper": ([], layers("model.decoder."), ["proj_out"], layers("model.decoder.")),
    "xlnet": (
        [],
        ["transformer.layer.0.ff.layer_1"],
        ["lm_loss"],
        ["transformer.layer.0.ff.layer_1"],
    ),
    "segformer": (
        ["decode_head.linear_c.0.proj"],
        ["segformer.encoder.block.0.0.attention.self.query"],
        ["decode_head.linear_projections.0.proj"],
        ["segformer.stages.0.blocks.0.attention.q_proj"],
    ),
    "kimi-k2.5": (  # a tower whose insides have other names
        ["vision_tower.encoder.blocks.0.wqkv", "mm_projector.proj.0"],
        layers("language_model.model."),
        ["model.vision_tower.layers.0.attn.q_proj", "model.mm_projector.in_proj"],
        layers("model.language_model."),
    ),
    "a tower of which half is quantized": (
        ["visual.blocks.0.attn.qkv"],
        ["visual.blocks.0.mlp.fc1", *layers("model.")],
        ["model.visual.blocks.0.attn.qkv"],
        ["model.visual.blocks.0.mlp.fc1", *layers("model.language_model.")],
    ),
    "left out by --skip": (
        ["model.layers.0.mlp.down_proj"],
        layers("model.", ("mlp.down_proj",))[1:],
        ["model.layers.0.mlp.down_proj"],
        layers("model.", ("mlp.down_proj",))[1:],
    ),
    "a quantized projection of that name": (
        ["lm_head"],
        ["blocks.0.proj_out", "blocks.0.gate"],
        ["lm_head"],
        ["blocks.0.proj_out", "blocks.0.gate"],
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", MODELS)
def test_only_unquantized_modules_are_ignored(name):
    kept, quantized, loaded_kept, loaded_quantized = MODELS[name]
    listed = ignored(kept, quantized)
    assert listed[: len(kept)] == kept  # by name, for loaders that know no patterns
    for module in (*kept, *loaded_kept):
        assert found(listed, module), module
    for module in (*quantized, *loaded_quantized):
        assert not found(listed, module), module
    assert len(listed) <= len(kept) + 8


@pytest.mark.quick
def test_groups_of_a_model_whose_tower_has_layers_alike():
    language = layers("language_model.model.")
    first = [name for name in language if name.endswith("q_proj")]
    second = [name for name in language if not name.endswith("q_proj")]
    for names, others in ((first, second), (second, first)):
        patterns = patterns_of(names, [*others, *TOWER])
        for prefix in ("language_model.model.", "model.language_model."):
            for name in names:
                assert found(patterns, name.replace("language_model.model.", prefix))
        assert not any(found(patterns, name) for name in (*others, *TOWER))
        assert not any(found(patterns, f"model.{name}") for name in TOWER)


def test_the_experts_of_llama_4_are_refused(tmp_path):
    """transformers and compressed-tensors make a module of each, for which there are no weights."""
    name = "model.layers.0.feed_forward"
    tensors = {
        f"{name}.experts.down_proj": np.ones((4, 64, 32), np.float32),
        f"{name}.shared_expert.down_proj.weight": np.ones((32, 64), np.float32),
    }
    save(tmp_path / "in.safetensors", tensors)
    arguments = (tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    with refused(CheckpointError, r"experts.down_proj: all experts of a Llama 4 layer"):
        convert(*arguments, layout="compressed-tensors")
    assert convert(*arguments, layout="plain").tensors


@pytest.mark.parametrize(
    ("fmt", "scaling", "caution"),
    [
        ("nvfp4", None, r"nvfp4 with wrong weights, without an error: .*; for it, .* mxfp4"),
        ("e4m3fn", "block", r"does not load experts in e4m3fn by block, int8"),
        ("int8", None, r"does not load experts in e4m3fn by block, int8"),
        ("mxfp4", None, "^$"),
        ("e4m3fn", "channel", "^$"),
        (Rules({r"w1\.": "mxfp4", r"w2\.": "e4m3fn"}), None, "reads all experts by one format"),
        (Rules({r"experts\.": "mxfp4", "q_proj": "nvfp4"}), None, "^$"),
        (Rules({r"experts\.0\.": "e4m3fn"}), None, "where others are in e4m3fn, without an error"),
        (Rules({r"w1\.": "e4m3fn"}), None, "^$"),
        (
            Rules({r"w1\.": "int4_group128"}),
            None,
            "that are not quantized where others are in packed formats",
        ),
        (
            Rules({"q_proj": "int4_group128"}),
            None,
            "that are not quantized where others are in packed formats",
        ),
        (Rules({"q_proj": "e4m3fn"}), None, "^$"),
    ],
)
def test_experts_that_transformers_misreads_are_named(tmp_path, fmt, scaling, caution):
    """Which those are: tests/interop/test_cautions.py asks transformers. Other loaders, such as
    vLLM, take them, so they are not refused.
    """
    experts = "model.layers.0.block_sparse_moe.experts"
    names = [f"{experts}.{number}.{part}" for number in range(2) for part in ("w1", "w2")]
    names.append("model.layers.0.self_attn.q_proj")
    x = np.ones((128, 128), np.float32)
    save(tmp_path / "in.safetensors", {f"{name}.weight": x for name in names})
    report = convert(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", layout="compressed-tensors",
        format=fmt, scaling=scaling, allow_split=True,
    )  # fmt: skip
    assert re.search(caution, report.caution)


CONFIGS = [
    ({"model_type": "mixtral"}, True),
    ({"model_type": "x", "text_config": {"model_type": "qwen3_moe"}}, True),
    ({}, True),  # not known: most models' experts are joined
    ({"model_type": "llama4_text"}, False),
    ({"model_type": "custom"}, False),
]


@pytest.mark.parametrize(("config", "is_joined"), CONFIGS)
def test_only_of_models_whose_experts_are_joined(tmp_path, config, is_joined):
    x = np.ones((128, 128), np.float32)
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(2)]
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "model.safetensors", dict.fromkeys(names, x))
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    options = {"format": "nvfp4", "layout": "compressed-tensors"}
    report = convert(tmp_path / "in", tmp_path / "out", **options)
    assert bool(report.caution) == is_joined


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ((192, 128), "cuts rows or columns into equal blocks"),
        ((128, 448), "cuts rows or columns into equal blocks"),
        ((200, 128), "cuts rows or columns into equal blocks"),
        ((576, 256), "does not load weights whose rows or columns"),
        ((256, 129), "does not load weights"),
        ((256, 384), ""),
        ((64, 100), ""),
    ],
)
def test_partial_blocks_that_transformers_misreads_are_named(tmp_path, shape, fault):
    save(tmp_path / "in", {"a.weight": np.ones(shape, np.float32)})
    report = convert(tmp_path / "in", tmp_path / "out", layout="finegrained-fp8")
    assert fault in report.caution
    assert bool(report.caution) == bool(fault)
    assert not fault or ": a.weight; for it, use layout=" in report.caution
