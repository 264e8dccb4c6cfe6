"""What names and shapes say: lists of the tensors of real models, as their files have them."""

import json
from pathlib import Path

import numpy as np
import pytest
from stored import stored

from qtoolkit.checkpoints import CheckpointError, compare, convert, load, save
from qtoolkit.checkpoints.internal import PlanOptions, make_plan, open_source
from qtoolkit.formats import Rules

# Of each model with one layer the weights of linear layers and experts, and the other matrices,
# which stay wide: what transformers writes (`tests/interop/test_names.py` makes and checks it).
LISTS = json.loads(Path(__file__).with_name("models.json").read_text())
# What it does not write or wrote otherwise, some of the names: google-t5/t5-base,
# meta-llama/Llama-2-7b (consolidated.00.pth), openai-community/gpt2, llava-hf/llava-1.5-7b-hf,
# Qwen/Qwen2-VL, THUDM's ChatGLM and GLM-4V, OpenGVLab/InternVL2, HuggingFaceM4's Idefics, Pixtral
# as Mistral and as Hugging Face have it, openai/whisper, deepseek-ai/DeepSeek-V3, google-bert,
# sequence classifiers and reward models, timm's ViT, GGUF, Flax.
MODELS = {
    "t5": (
        """encoder.block.0.layer.0.SelfAttention.q.weight
        decoder.block.0.layer.1.EncDecAttention.o.weight
        encoder.block.0.layer.1.DenseReluDense.wi.weight
        encoder.block.0.layer.1.DenseReluDense.wo.weight""",
        """shared.weight encoder.embed_tokens.weight lm_head.weight
        encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight""",
    ),
    "meta": (
        """layers.0.attention.wq.weight layers.0.attention.wo.weight
        layers.0.feed_forward.w1.weight layers.0.feed_forward.w2.weight""",
        "tok_embeddings.weight output.weight",
    ),
    "gpt2": (
        """h.0.attn.c_attn.weight h.0.attn.c_proj.weight h.0.mlp.c_fc.weight
        h.0.mlp.c_proj.weight""",
        "wte.weight wpe.weight lm_head.weight",
    ),
    "llava": (
        "language_model.model.layers.0.self_attn.q_proj.weight",
        """vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight
        vision_tower.vision_model.embeddings.patch_embedding.weight
        multi_modal_projector.linear_1.weight language_model.lm_head.weight""",
    ),
    "qwen2-vl": (
        "model.layers.0.mlp.down_proj.weight",
        "visual.blocks.0.attn.qkv.weight visual.merger.mlp.0.weight visual.patch_embed.proj.weight",
    ),
    "chatglm": (
        """transformer.encoder.layers.0.self_attention.query_key_value.weight
        transformer.encoder.layers.0.self_attention.dense.weight
        transformer.encoder.layers.0.mlp.dense_h_to_4h.weight
        transformer.encoder.layers.0.mlp.dense_4h_to_h.weight""",
        """transformer.output_layer.weight transformer.embedding.word_embeddings.weight
        transformer.vision.transformer.layers.0.mlp.fc1.weight
        transformer.vision.linear_proj.linear_proj.weight""",
    ),
    "internvl": (
        """language_model.model.layers.0.attention.wqkv.weight
        language_model.model.layers.0.feed_forward.w1.weight""",
        """vision_model.encoder.layers.0.mlp.fc1.weight mlp1.1.weight mlp1.3.weight
        language_model.output.weight language_model.model.tok_embeddings.weight""",
    ),
    "idefics": (
        "model.text_model.layers.0.mlp.up_proj.weight",
        """model.connector.modality_projection.proj.weight
        model.connector.modality_projection.up_proj.weight
        model.connector.perceiver_resampler.layers.0.self_attn.q_proj.weight
        model.perceiver_resampler.latents model.vision_model.encoder.layers.0.mlp.fc1.weight""",
    ),
    "phi-3-vision": (
        "model.layers.0.self_attn.qkv_proj.weight model.layers.0.mlp.gate_up_proj.weight",
        """model.vision_embed_tokens.img_projection.0.weight
        model.vision_embed_tokens.img_processor.vision_model.encoder.layers.0.mlp.fc1.weight""",
    ),
    "gemma3": (
        "language_model.model.layers.0.mlp.down_proj.weight",
        """multi_modal_projector.mm_input_projection_weight
        vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight""",
    ),
    "pixtral": (
        """layers.0.attention.wq.weight layers.0.feed_forward.w2.weight
        language_model.model.layers.0.mlp.gate_proj.weight""",
        """vision_language_adapter.w_in.weight
        vision_encoder.transformer.layers.0.attention.wq.weight
        patch_merger.merging_layer.weight multi_modal_projector.patch_merger.merging_layer.weight
        vision_tower.transformer.layers.0.feed_forward.up_proj.weight tok_embeddings.weight
        output.weight""",
    ),
    "minicpm-v": (
        "llm.model.layers.0.self_attn.q_proj.weight",
        """vpm.encoder.layers.0.self_attn.q_proj.weight resampler.kv_proj.weight
        apm.layers.0.fc1.weight audio_projection_layer.linear1.weight llm.lm_head.weight""",
    ),
    "deepseek-vl": (
        "language_model.model.layers.0.self_attn.q_proj.weight",
        """aligner.layers.0.weight gen_aligner.layers.0.weight projector.layers.0.weight
        vision.blocks.0.attn.qkv.weight gen_vision_model.decoder.conv_in.weight
        vision_model.vision_tower.blocks.0.mlp.fc1.weight gen_head.output_mlp_projector.weight""",
    ),
    "blip-2": (
        "language_model.model.decoder.layers.0.self_attn.q_proj.weight",
        """qformer.encoder.layer.0.attention.attention.query.weight language_projection.weight
        query_tokens vision_model.encoder.layers.0.mlp.fc1.weight""",
    ),
    "video-llava, molmo, chameleon, clip": (
        "language_model.model.layers.0.mlp.up_proj.weight model.transformer.blocks.0.ff_out.weight",
        """image_tower.vision_model.encoder.layers.0.mlp.fc1.weight model.transformer.ff_out.weight
        video_tower.vision_model.encoder.layers.0.mlp.fc1.weight text_projection.weight
        model.vision_backbone.image_projector.w1.weight visual_projection.weight
        model.vqmodel.quantize.embedding.weight""",
    ),
    "falcon": (
        """transformer.h.0.self_attention.query_key_value.weight
        transformer.h.0.self_attention.dense.weight transformer.h.0.mlp.dense_h_to_4h.weight""",
        "transformer.word_embeddings.weight lm_head.weight",
    ),
    "whisper": (
        """model.decoder.layers.0.encoder_attn.q_proj.weight model.encoder.layers.0.fc1.weight
        model.decoder.layers.0.self_attn.out_proj.weight""",
        """proj_out.weight model.decoder.embed_positions.weight
        model.encoder.embed_positions.weight model.decoder.embed_tokens.weight""",
    ),
    "heads of masked language models": (
        """distilbert.transformer.layer.0.ffn.lin1.weight transformer.attentions.0.q_lin.weight
        electra.encoder.layer.0.intermediate.dense.weight transformer.layer.0.ff.layer_1.weight
        biogpt.layers.0.fc1.weight model.layers.0.mlp.Wo.weight""",
        """vocab_transform.weight vocab_projector.weight generator_lm_head.weight
        generator_predictions.dense.weight discriminator_predictions.dense.weight
        pred_layer.proj.weight lm_loss.weight output_projection.weight decoder.weight
        head.dense.weight cls.predictions.decoder.weight lm_head.decoder.weight""",
    ),
    "mixtures": (
        """model.layers.0.mlp.shared_mlp.gate_proj.weight model.layers.0.mlp.experts.0.w1.weight
        model.layers.0.feed_forward.shared_expert.gate_proj.weight
        transformer.blocks.0.ffn.experts.mlp.w1""",
        """model.layers.0.mlp.gate.wg.weight model.layers.0.feed_forward.router.weight
        transformer.blocks.0.ffn.router.layer.weight model.layers.0.mlp.router.classifier.weight
        model.layers.0.mlp.shared_expert_gate.weight""",
    ),
    "mamba": (
        """backbone.layers.0.mixer.in_proj.weight backbone.layers.0.mixer.x_proj.weight
        backbone.layers.0.mixer.dt_proj.weight backbone.layers.0.mixer.out_proj.weight""",
        """backbone.layers.0.mixer.A_log backbone.layers.0.mixer.conv1d.weight
        backbone.embeddings.weight""",
    ),
    "rwkv": (
        "blocks.0.att.key.weight blocks.0.ffn.value.weight",
        "emb.weight head.weight",
    ),
    "deepseek": (
        """model.layers.3.self_attn.kv_a_proj_with_mqa.weight
        model.layers.3.self_attn.q_b_proj.weight model.layers.3.mlp.shared_experts.up_proj.weight
        model.layers.3.mlp.experts.255.gate_proj.weight""",
        "model.layers.3.mlp.gate.weight model.layers.61.shared_head.head.weight",
    ),
    "bert": (
        """bert.encoder.layer.0.attention.self.query.weight
        bert.encoder.layer.0.attention.output.dense.weight
        bert.encoder.layer.0.output.dense.weight bert.pooler.dense.weight""",
        """bert.embeddings.word_embeddings.weight classifier.weight
        cls.predictions.transform.dense.weight qa_outputs.weight""",
    ),
    "classifiers": (
        "model.layers.0.mlp.down_proj.weight",
        """classifier.dense.weight classifier.out_proj.weight pre_classifier.weight
        classification_head.dense.weight classification_head.out_proj.weight score.weight
        head.weight""",
    ),
    "gguf": (
        """blk.0.attn_q.weight blk.0.attn_output.weight blk.0.ffn_gate.weight blk.0.ffn_up.weight
        blk.0.ffn_down.weight""",
        """token_embd.weight position_embd.weight token_types.weight output.weight
        blk.0.ffn_gate_inp.weight blk.0.ffn_gate_inp_shexp.weight""",
    ),
    "flax": (
        "params.blocks_0.attention.query.kernel params/Dense_0/kernel",
        """params.lm_head.kernel params/Embed_0/embedding params.head.kernel
        opt_state.0.nu.Dense_0.kernel optimizer.0.nu.Dense_0.kernel
        optimizer_state/0/mu/Dense_0/kernel optim.0.nu.kernel""",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("model", [*LISTS, *MODELS])
def test_only_linear_layers_of_real_models_are_quantized(tmp_path, model):
    if model in LISTS:
        linear, wide = LISTS[model]["linear"], LISTS[model]["unquantized"]
    else:
        linear, wide = (names.split() for names in MODELS[model])
    save(tmp_path / "f", {name: np.zeros((2, 4), np.float32) for name in (*linear, *wide)})
    with open_source(tmp_path / "f") as source:
        plan = make_plan(source, PlanOptions())
    found = {tensor.name: tensor.reason for tensor in plan.tensors}
    assert found == dict.fromkeys(linear, "") | dict.fromkeys(wide, "skipped by default")


def scale_shapes(tmp_path, shapes, config=None, **options):
    """Shapes of the scales by channel of tensors of those shapes."""
    (tmp_path / "src").mkdir()
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save(tmp_path / "src" / "model.safetensors", tensors)
    (tmp_path / "src" / "config.json").write_text(json.dumps(config or {}))
    from qtoolkit.checkpoints.internal import open_source

    source = open_source(tmp_path / "src")
    try:
        plan = make_plan(source, PlanOptions(scaling="channel", layout="plain", **options))
    finally:
        source.close()
    return {
        tensor.name: tensor.encoding.scale.shape
        for tensor in plan.tensors
        if tensor.encoding is not None
    }


IN_OUT = {"h.0.attn.c_attn.weight": (4, 12), "h.0.attn.c_proj.weight": (4, 4)}
OUT_IN = {"h.0.attn.c_attn.weight": (12, 4), "h.0.attn.c_proj.weight": (4, 4)}
UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("shapes", "config", "expected"),
    [
        # GPT-2's Conv1D is [inputs, outputs]; the same names of other models are Linear's.
        (IN_OUT, {"model_type": "gpt2"}, [(1, 12), (1, 4)]),
        (IN_OUT, {}, [(1, 12), (1, 4)]),
        (OUT_IN, {"model_type": "gpt_bigcode"}, [(12, 1), (4, 1)]),
        (OUT_IN, {}, [(12, 1), (4, 1)]),
        ({"h.0.attn.c_proj.weight": (4, 4)}, {"model_type": "gpt2"}, [(1, 4)]),
        # A bias is as long as there are outputs.
        ({"a.weight": (4, 6), "a.bias": (6,)}, {}, [(1, 6)]),
        ({"a.weight": (4, 6), "a.bias": (4,)}, {}, [(4, 1)]),
        ({"W": (4, 6), "bias": (6,)}, {}, [(1, 6)]),
        # All experts in one: [E, in, out] of Llama 4 and GPT-OSS, [E, out, in] of others.
        ({UP: (3, 4, 10), DOWN: (3, 5, 4)}, {"hidden_size": 4}, [(3, 1, 10), (3, 1, 4)]),
        ({UP: (3, 10, 4), DOWN: (3, 4, 5)}, {"hidden_size": 4}, [(3, 10, 1), (3, 4, 1)]),
        ({UP: (3, 4, 10), DOWN: (3, 5, 4)}, {}, [(3, 1, 10), (3, 1, 4)]),
        ({UP: (3, 10, 4), DOWN: (3, 4, 5)}, {}, [(3, 10, 1), (3, 4, 1)]),
        (
            {
                "l.block_sparse_moe.input_linear.weight": (3, 10, 4),
                "l.block_sparse_moe.output_linear.weight": (3, 4, 5),
                "l.shared_mlp.input_linear.weight": (10, 4),
            },
            {"model_type": "granitemoeshared"},
            [(3, 10, 1), (3, 4, 1), (10, 1)],
        ),
        # Flax: heads and their length are outputs; of what they are projected to, the last axis.
        ({"attention.query.kernel": (8, 2, 4)}, {}, [(1, 2, 4)]),
        ({"attention.out.kernel": (2, 4, 8)}, {}, [(1, 1, 8)]),
        ({"Conv_0.kernel": (3, 3, 4, 8)}, {}, [(1, 1, 1, 8)]),
        ({"conv.weight": (8, 4, 3, 3)}, {}, [(8, 1, 1, 1)]),
    ],
)
def test_scales_by_channel_are_those_of_the_outputs(tmp_path, shapes, config, expected):
    found = scale_shapes(tmp_path, shapes, config)
    assert [found[name] for name in shapes if name in found] == expected


@pytest.mark.parametrize(
    ("shapes", "config"),
    [
        ({"W": (4, 6)}, {}),
        ({"W": (4, 4), "bias": (4,)}, {}),
        ({UP: (3, 4, 4), DOWN: (3, 4, 4)}, {"hidden_size": 4}),
        ({UP: (3, 4, 9), DOWN: (3, 5, 4)}, {}),
    ],
)
def test_an_unknown_axis_of_outputs_is_asked_for(tmp_path, shapes, config):
    name = next(iter(shapes)) if UP not in shapes else r".*experts\."
    with pytest.raises(CheckpointError, match=rf"tensor {name}.*channel_axis=.first. .* or .*last"):
        scale_shapes(tmp_path, shapes, config)
    (tmp_path / "src" / "model.safetensors").unlink()
    (tmp_path / "src" / "config.json").unlink()
    (tmp_path / "src").rmdir()
    scales = scale_shapes(tmp_path, shapes, config, channel_axis="last")
    assert all(shape[-1] == shapes[name][-1] for name, shape in scales.items())


def test_experts_in_one_tensor_have_codes_as_if_each_were_alone(tmp_path):
    x = np.random.default_rng(0).normal(size=(3, 10, 4)).astype(np.float32)
    tensors = {UP: x, DOWN: np.ascontiguousarray(x[:, :4, :].repeat(2, 2)[:, :, :5])}
    save(tmp_path / "src", tensors)
    convert(tmp_path / "src", tmp_path / "dst", scaling="channel")
    save(tmp_path / "alone", {f"{i}.weight": x[i] for i in range(3)})
    convert(tmp_path / "alone", tmp_path / "each", scaling="channel")

    found, each = stored(tmp_path / "dst"), stored(tmp_path / "each")
    for i in range(3):
        assert found[UP][i].tobytes() == each[f"{i}.weight"].tobytes()
        assert found[f"{UP}_scale"][i].tobytes() == each[f"{i}.weight_scale"].tobytes()


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_layers_of_flax_have_codes_as_if_each_were_alone(tmp_path, axis):
    """`nn.scan` stacks along any axis. Each layer is 100 times as large as the one before."""
    rng = np.random.default_rng(0)
    shapes = {"up": (8, 12), "attention.query": (8, 2, 4), "attention.out": (2, 4, 8)}
    layers = [
        {
            name: (rng.normal(size=shape) * 100**i).astype(np.float32)
            for name, shape in shapes.items()
        }
        for i in range(3)
    ]
    stacks = {f"layers.{x}.kernel": np.stack([layer[x] for layer in layers], axis) for x in shapes}
    norm = {"layers.norm.scale": np.ones((3, 8) if axis == 0 else (8, 3), np.float32)}
    head = {"output.query.kernel": np.ones((3, 2, 4), np.float32), "norm.scale": np.ones(8)}
    save(tmp_path / "src", stacks | norm | head)
    convert(tmp_path / "src", tmp_path / "dst", format="e4m3fn", scaling="channel")
    loaded = load(tmp_path / "dst")
    for name, x in stacks.items():  # it is read as it is written
        error = np.abs(np.asarray(loaded[name].dequantize()) - x).max()
        assert error < 0.04 * np.abs(x).max()
    assert compare(tmp_path / "src", tmp_path / "dst").tensors
    found = stored(tmp_path / "dst")
    assert found["output.query.kernel_scale"].shape == (1, 2, 4)  # it is no stack
    for i, layer in enumerate(layers):
        save(tmp_path / f"src{i}", {f"{name}.kernel": x for name, x in layer.items()})
        convert(tmp_path / f"src{i}", tmp_path / f"dst{i}", format="e4m3fn", scaling="channel")
        for name, each in stored(tmp_path / f"dst{i}").items():
            if axis == 1 and "out" in name:  # the layers lie between its inputs
                assert found["layers.attention.out.kernel_scale"].shape == (1, 1, 1, 8)
                continue
            np.testing.assert_array_equal(found[f"layers.{name}"].take(i, axis), each, name)


def test_fused_weights_share_the_second_scale_of_nvfp4(tmp_path):
    names = [f"model.layers.{i}.self_attn.{x}_proj.weight" for i in range(2) for x in "qkvo"]
    names += [f"model.layers.0.mlp.experts.1.{x}.weight" for x in ("w1", "w2", "w3")]
    tensors = {name: np.full((16, 16), 2.0**i, np.float32) for i, name in enumerate(names)}
    save(tmp_path / "src", tensors)
    convert(tmp_path / "src", tmp_path / "dst", layout="compressed-tensors", format="nvfp4")

    found = stored(tmp_path / "dst")
    # 448 * 6 over the amax of q, k and v together: of v. o and w2 stand alone.
    largest = [4, 4, 4, 8, 64, 64, 64, 128, 1024, 512, 1024]
    got = [float(found[name.removesuffix("weight") + "weight_global_scale"][0]) for name in names]
    np.testing.assert_allclose(got, [2688 / amax for amax in largest], rtol=1e-6)


@pytest.mark.parametrize(
    ("others", "targets"),
    [("int8_group128", [["Linear", "Embedding"]]), ("int8", [["Embedding"], [r"re:(.*\.)?mlp$"]])],
)
def test_tables_are_targeted_by_their_class(tmp_path, others, targets):
    """As llm-compressor does it: vLLM's models do not tell all tables their names."""
    x = np.ones((128, 128), np.float32)
    save(tmp_path / "f", {f"{name}.weight": x for name in ("embed_tokens", "mlp", "lm_head")})
    with open_source(tmp_path / "f") as source:
        rules = Rules({"embed_tokens": "int8_group128", "mlp": others})
        plan = make_plan(source, PlanOptions(format=rules, layout="compressed-tensors"))
    groups = plan.quantization_config["config_groups"].values()
    assert [group["targets"] for group in groups] == targets
    assert "lm_head" in plan.quantization_config["ignore"]


@pytest.mark.parametrize("name", ["model.embed_tokens", "transformer.wte", "token_embd"])
def test_embeddings_are_refused_for_layouts_of_linear_layers(tmp_path, name):
    tensors = {f"{name}.weight": np.zeros((128, 128), np.float32)}
    save(tmp_path / "f", tensors | {"embed_out.weight": np.zeros((128, 128), np.float32)})
    with open_source(tmp_path / "f") as source:
        with pytest.raises(CheckpointError, match="a table of embeddings by its name"):
            make_plan(
                source, PlanOptions(format=Rules((), default="e4m3fn"), layout="compressed-tensors")
            )
        rules = Rules({"embed_out": "e4m3fn"})
        plan = make_plan(source, PlanOptions(format=rules, layout="compressed-tensors"))
    assert [t.name for t in plan.tensors if t.action == "quantize"] == ["embed_out.weight"]
