"""What transformers makes of converted folders, on the CPU."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from qtoolkit import Rules
from qtoolkit.checkpoints import CheckpointError, convert, dequantize_checkpoint, internal

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
COMPRESSED = [
    ("e4m3fn", "tensor"),
    ("e4m3fn", "channel"),
    ("e4m3fn", "block"),
    ("int8", "channel"),
    ("mxfp8_e4m3", None),
    ("mxfp4", None),
    ("nvfp4", None),
    ("int4_group128", None),
    ("int4_group32", None),
    ("int8_group128", None),
    ("W4A16_ASYM", None),
    ("W8A8_ASYM", None),
]
WEIGHTS_ONLY = {"mxfp4", "nvfp4"}
WEIGHTS_ONLY |= {"int4_group128", "int4_group32", "int8_group128"}


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=4,
            max_position_embeddings=64,
        )
    )


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=128, n_layer=2, n_head=4)
    )


def gpt_oss():
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            vocab_size=64,
            hidden_size=128,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            num_local_experts=4,
            max_position_embeddings=64,
        )
    )


SMALLEST = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def llama4():
    sizes = {"intermediate_size": 256, "intermediate_size_mlp": 128, "num_local_experts": 2}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = transformers.Llama4TextConfig(
        interleave_moe_layer_step=1, **SMALLEST, **sizes, **tokens
    )
    return transformers.Llama4ForCausalLM(config)


def qwen35():
    sizes = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 128}
    config = transformers.Qwen3_5MoeTextConfig(
        num_experts=2, num_experts_per_tok=2, layer_types=["full_attention"], **SMALLEST, **sizes
    )
    return transformers.Qwen3_5MoeForCausalLM(config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of random models, by name."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for make in (llama, mixtral, gpt2, gpt_oss, llama4):
        make().float().save_pretrained(root / make.__name__, max_shard_size="1MB")
    return root


def logits(folder, dtype=torch.float32, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    with torch.no_grad():
        return model.eval()(IDS).logits.float().numpy()


def dequantizing():
    return transformers.CompressedTensorsConfig(dequantize=True)


@pytest.mark.parametrize(("fmt", "scaling"), COMPRESSED)
def test_llama_in_compressed_tensors(folders, tmp_path, fmt, scaling):
    convert(
        folders / "llama",
        tmp_path / "out",
        layout="compressed-tensors",
        format=fmt,
        scaling=scaling,
        max_shard_size="500KB",
    )
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    expected, wide = logits(tmp_path / "back"), logits(folders / "llama")
    assert np.abs(expected - wide).max() > 1e-4  # it is quantized
    # FP4 is decompressed in bfloat16: 8 bits of 24.
    rtol = 2e-2 if fmt in ("mxfp4", "nvfp4") else 1e-5
    found = logits(tmp_path / "out", quantization_config=dequantizing())
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.abs(expected).max())
    # With nothing said, as users load it. What has block scales is decompressed in bfloat16, which
    # float32 activations cannot be multiplied with.
    if fmt == "W4A16_ASYM":  # of which it says so: a row of `CAUTIONS`
        return
    dtype = torch.bfloat16 if fmt in ("mxfp8_e4m3", "mxfp4", "nvfp4") else torch.float32
    compressed = logits(tmp_path / "out", dtype)
    error = np.abs(compressed - expected).max() / np.abs(expected).max()
    assert error < (0.02 if fmt in WEIGHTS_ONLY else 0.1)


@pytest.mark.parametrize("pattern", ["embed_tokens|_proj", "embed_tokens"])
@pytest.mark.parametrize("fmt", ["W8A16", "int4_group32"])
def test_tables_of_embeddings_in_compressed_tensors(folders, tmp_path, pattern, fmt):
    """Oracle: transformers runs the weights that `dequantize` gives."""
    rules = Rules({pattern: fmt})
    convert(folders / "llama", tmp_path / "out", layout="compressed-tensors", format=rules)
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    expected, wide = logits(tmp_path / "back"), logits(folders / "llama")
    assert np.abs(expected - wide).max() > 1e-4  # it is quantized
    found = logits(tmp_path / "out", quantization_config=dequantizing())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_a_table_with_a_tied_head_is_refused(tmp_path):
    model = llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.float().save_pretrained(tmp_path / "tied")
    rules = Rules({"embed_tokens": "W8A16"})
    with pytest.raises(CheckpointError, match="the head is tied to this table"):
        convert(tmp_path / "tied", tmp_path / "out", layout="compressed-tensors", format=rules)


def test_llama_in_blocks_of_deepseek(folders, tmp_path):
    convert(folders / "llama", tmp_path / "out", layout="finegrained-fp8")
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    expected = logits(tmp_path / "back")
    np.testing.assert_allclose(logits(tmp_path / "out"), expected, rtol=1e-5, atol=1e-5)


def test_experts_of_gpt_oss(folders, tmp_path):
    convert(folders / "gpt_oss", tmp_path / "out", layout="gpt-oss", format="mxfp4")
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    expected = logits(tmp_path / "back")
    np.testing.assert_array_equal(logits(tmp_path / "out"), expected)
    assert np.abs(expected - logits(folders / "gpt_oss")).max() > 1e-4  # it is quantized


@pytest.mark.parametrize("layout", ["compressed-tensors", "finegrained-fp8"])
def test_experts_of_qwen35_in_one_tensor(tmp_path, layout):
    """As Qwen publishes the unquantized model; transformers itself saves them one by one."""
    torch.manual_seed(0)
    model, src = qwen35().float(), tmp_path / "src"
    model.save_pretrained(src)
    save_file(model.state_dict(), src / "model.safetensors", {"format": "pt"})
    convert(src, tmp_path / "out", layout=layout)
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    options = {"quantization_config": dequantizing()} if layout == "compressed-tensors" else {}
    expected = logits(tmp_path / "back")
    np.testing.assert_allclose(logits(tmp_path / "out", **options), expected, atol=1e-5)
    error = np.abs(expected - logits(src)).max() / np.abs(expected).max()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("fmt", ["e4m3fn", "int4_group128"])
def test_experts_of_llama_4_in_one_tensor(folders, tmp_path, fmt):
    convert(folders / "llama4", tmp_path / "out", format=fmt)
    found = logits(tmp_path / "out", quantization_config=dequantizing())
    expected = logits(folders / "llama4")
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert 1e-4 < error < (0.1 if fmt == "e4m3fn" else 0.5)


@pytest.mark.parametrize("layout", ["compressed-tensors", "finegrained-fp8"])
def test_mixtral(folders, tmp_path, layout):
    # Of experts in compressed-tensors' FP8 transformers reads scales per channel, not per block.
    convert(folders / "mixtral", tmp_path / "out", layout=layout)
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    options = {"quantization_config": dequantizing()} if layout == "compressed-tensors" else {}
    expected = logits(tmp_path / "back")
    np.testing.assert_allclose(logits(tmp_path / "out", **options), expected, atol=1e-5)


FEW = {"num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
SMALL = {"hidden_size": 128, "num_hidden_layers": 1}
TOWER = {"intermediate_size": 256, "num_attention_heads": 4, **SMALL}
SPECIAL = {f"{kind}_token_id": 0 for kind in ("pad", "bos", "eos", "cls", "sep")}
# Their code asks layers for `weight`, which packed layers have not. The keys are model_type's.
ASK_FOR_WEIGHTS = {
    "t5": ("T5ForConditionalGeneration", {"d_model": 128, "d_kv": 32, "d_ff": 256, **FEW}),
    "umt5": ("UMT5ForConditionalGeneration", {"d_model": 128, "d_kv": 32, "d_ff": 256, **FEW}),
    "falcon": ("FalconForCausalLM", {"num_attention_heads": 4, **SMALL}),
    "mamba": ("MambaForCausalLM", {"time_step_rank": 32, **SMALL}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 16, **SMALL},
    ),
    "rwkv": (
        "RwkvForCausalLM",
        {"attention_hidden_size": 128, "intermediate_size": 256, **SMALL, "num_hidden_layers": 2},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {"intermediate_size": 256, "num_attention_heads": 4, **SPECIAL, **SMALL},
    ),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {"n_embd": 128, "n_layer": 1, "n_head": 4}),
    "siglip": (
        "SiglipModel",
        {
            "text_config": {"vocab_size": 64, **TOWER},
            "vision_config": {"image_size": 32, "patch_size": 8, **TOWER},
        },
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            "conv_dim": (32, 32),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "num_feat_extract_layers": 2,
            **TOWER,
        },
    ),
}


def test_the_table_has_these_models():
    assert ASK_FOR_WEIGHTS.keys() == internal.ASK_FOR_WEIGHTS


@pytest.mark.parametrize("kind", ASK_FOR_WEIGHTS)
def test_models_that_ask_for_weights_of_layers_run_dequantized(tmp_path, kind):
    """T5's code reads wo.weight.dtype, for instance. Oracle: the dequantized weights."""
    name, sizes = ASK_FOR_WEIGHTS[kind]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    sizes = sizes if kind in ("siglip", "wav2vec2") else {"vocab_size": 64, **sizes}
    model = cls(cls.config_class(**sizes))
    model.save_pretrained(tmp_path / "wide")
    convert(tmp_path / "wide", tmp_path / "out", format="int4_group32")
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    inputs = {"input_ids": IDS}
    if kind in ("t5", "umt5"):
        inputs["decoder_input_ids"] = IDS
    elif kind == "siglip":
        inputs["pixel_values"] = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    elif kind == "wav2vec2":
        inputs = {"input_values": torch.linspace(-1, 1, 800)[None]}

    def run(folder, **options):
        loaded = cls.from_pretrained(folder, dtype=torch.float32, **options)
        with torch.no_grad():
            return loaded.eval()(**inputs)[0].numpy()

    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        run(tmp_path / "out")
    found = run(tmp_path / "out", quantization_config=dequantizing())
    np.testing.assert_array_equal(found, run(tmp_path / "back"))


def test_gpt2_is_refused_or_round_trips_in_plain(folders, tmp_path):
    with pytest.raises(CheckpointError, match=r"Conv1D.*use layout=.plain"):
        convert(folders / "gpt2", tmp_path / "out", layout="compressed-tensors")
    convert(folders / "gpt2", tmp_path / "out", layout="plain", scaling="channel")
    with pytest.raises(ValueError, match="Unrecognized model"):
        logits(tmp_path / "out")  # rather than reading codes as weights
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    expected = logits(folders / "gpt2")
    error = np.abs(logits(tmp_path / "back") - expected).max() / np.abs(expected).max()
    assert 0 < error < 0.05


def test_a_config_that_says_nothing_is_what_breaks_silently(folders, tmp_path):
    """Why config.json is written: without it transformers reads the codes as weights."""
    convert(folders / "llama", tmp_path / "out", layout="compressed-tensors")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    expected = logits(tmp_path / "out", quantization_config=dequantizing())
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    assert np.abs(logits(tmp_path / "out") - expected).max() > 1


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TINY))


def roberta():
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**TINY))


def modernbert():
    options = {"pad_token_id": 0, "attn_implementation": "eager"}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**TINY, **options))


def distilbert():
    sizes = {"vocab_size": 96, "dim": 64, "hidden_dim": 128, "n_layers": 1, "n_heads": 4}
    return transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes))


def electra():
    config = transformers.ElectraConfig(**TINY, embedding_size=32)
    return transformers.ElectraForMaskedLM(config)


def phimoe():
    sizes = {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**TINY, **sizes))


def llava():
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=8, projection_dim=64,
    )  # fmt: skip
    text = transformers.LlamaConfig(**TINY, num_key_value_heads=4)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=90)
    return transformers.LlavaForConditionalGeneration(config)


def xlnet():
    sizes = {"vocab_size": 96, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes))


def biogpt():
    return transformers.BioGptForCausalLM(transformers.BioGptConfig(**TINY))


def git():
    vision = {k: TINY[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads")}
    vision |= {"num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GitForCausalLM(
        transformers.GitConfig(vision_config=vision, **TINY, **tokens)
    )


def segformer():
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[32, 32, 64, 64], decoder_hidden_size=32
    )
    return transformers.SegformerForSemanticSegmentation(config)


TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
RENAMED = [bert, roberta, modernbert, distilbert, electra, phimoe, llava]
# Whose layers the rules do not name; transformers joins phimoe's experts, and fails where mixed.
NO_GROUPS = [phimoe, xlnet, biogpt, git, segformer]
RENAMED += NO_GROUPS[1:]
PIXELS = torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (make, rules)
        for make in RENAMED
        for rules in (False, True)
        if not (make in NO_GROUPS and rules)
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_heads_and_modules_that_transformers_names_otherwise(make, rules, tmp_path):
    """Tied heads have no tensor, towers and routers other names: none may be taken for quantized.

    Oracle: transformers with the dequantized folder; activations are rounded in the other one.
    """
    torch.manual_seed(0)
    model = make().float()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.1)
    model.tie_weights()
    model.save_pretrained(tmp_path / "wide")
    formats = "e4m3fn"
    if rules:  # groups by name, and most layers wide
        towers = {"vision|multi_modal": None} if make is llava else {}
        narrow = {
            r"(query|q_proj|q_lin|Wqkv)\.weight$": "int8",
            r"(value|v_proj|v_lin|mlp\.Wo)\.weight$": "e4m3fn",
        }
        formats = Rules({**towers, **narrow})
    convert(
        tmp_path / "wide", tmp_path / "narrow", layout="compressed-tensors", format=formats,
        scaling="channel", allow_split=True,
    )  # fmt: skip
    dequantize_checkpoint(tmp_path / "narrow", tmp_path / "back")
    outs = []
    for folder in ("back", "narrow"):
        loaded, about = type(model).from_pretrained(
            tmp_path / folder, dtype=torch.float32, output_loading_info=True
        )
        assert not about["missing_keys"]
        assert not about["unexpected_keys"]
        inputs = {"input_ids": IDS}
        if make is llava:
            tokens = torch.tensor([[3, 1, 4, 1, 5, 90, 90, 90, 90, 2]])
            inputs = {"input_ids": tokens, "pixel_values": PIXELS}
        if make is segformer:
            inputs = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)}
        with torch.no_grad():
            outs.append(loaded.eval()(**inputs).logits)
    largest = outs[0].abs().max()
    assert (outs[1] - outs[0]).abs().max() < (0.5 if make is phimoe else 0.25) * largest
