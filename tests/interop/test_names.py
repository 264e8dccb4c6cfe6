"""The lists of tensors that `tests/checkpoints/test_roles.py` reads are those of transformers.

Written anew by `python tests/interop/test_names.py`.
"""

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors import safe_open

from qtoolkit.checkpoints import convert, save

LINEAR = torch.nn.Linear | hf.pytorch_utils.Conv1D
LISTS = Path(__file__).parents[1] / "checkpoints" / "models.json"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OWN = {"vocab_size": 96, "d_model": 64, "pad_token_id": 0}
VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "image_size": 16}
VISION |= {"num_attention_heads": 4, "patch_size": 8, "projection_dim": 64}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
LORA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
GROUPS = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
# Class, its config, and what stays wide though it is Linear, or has another name in the file than
# in the class, so that nothing says what it is: routers, output layers, and what sees.
MODELS = {
    "LlamaForCausalLM": (hf.LlamaConfig, SMALL, ()),
    "LlamaForSequenceClassification": (hf.LlamaConfig, SMALL, ()),
    "GPT2LMHeadModel": (hf.GPT2Config, {"n_embd": 64, "n_layer": 1, "n_head": 4}, ()),
    "OPTForCausalLM": (hf.OPTConfig, SMALL | {"ffn_dim": 128, "word_embed_proj_dim": 64}, ()),
    "GPTNeoXForCausalLM": (hf.GPTNeoXConfig, SMALL, ("embed_out",)),
    "Gemma3ForCausalLM": (hf.Gemma3TextConfig, SMALL | {"head_dim": 16}, ()),
    "MixtralForCausalLM": (hf.MixtralConfig, SMALL | {"num_local_experts": 2}, ("gate",)),
    "GraniteMoeForCausalLM": (hf.GraniteMoeConfig, SMALL | {"num_local_experts": 2}, ("router",)),
    "Qwen2MoeForCausalLM": (
        hf.Qwen2MoeConfig,
        SMALL | EXPERTS | {"num_experts": 2, "shared_expert_intermediate_size": 64},
        ("shared_expert_gate",),
    ),
    "DeepseekV3ForCausalLM": (
        hf.DeepseekV3Config,
        SMALL | EXPERTS | LORA | GROUPS | {"v_head_dim": 16},
        (),
    ),
    "GptOssForCausalLM": (hf.GptOssConfig, SMALL | {"num_local_experts": 2, "head_dim": 16}, ()),
    "MambaForCausalLM": (hf.MambaConfig, SMALL | {"state_size": 8}, ()),
    "T5ForConditionalGeneration": (
        hf.T5Config,
        OWN | {"d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4},
        (),
    ),
    "BartForSequenceClassification": (
        hf.BartConfig,
        OWN | {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 128},
        (),
    ),
    "BertForMaskedLM": (hf.BertConfig, SMALL, ()),
    "BertForQuestionAnswering": (hf.BertConfig, SMALL, ()),
    "RobertaForSequenceClassification": (hf.RobertaConfig, SMALL, ()),
    "ViTForImageClassification": (hf.ViTConfig, VISION, ()),
    "LlavaForConditionalGeneration": (
        hf.LlavaConfig,
        {"text_config": {"model_type": "llama", **SMALL}, "image_token_index": 90}
        | {"vision_config": {"model_type": "clip_vision_model", **VISION}},
        ("vision_tower", "multi_modal_projector", "lm_head", "embed_tokens"),
    ),
}


def lists(name, folder):
    """Arrays of two axes in the file of that model, and its experts: of linear layers, and others.

    Outside the base model are heads.
    """
    config, options, stays = MODELS[name]
    model = getattr(hf, name)(config(**options))
    model.save_pretrained(folder / name)
    with safe_open(folder / name / "model.safetensors", "pt") as file:
        ranks = {key: len(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    modules, inside = dict(model.named_modules()), set(model.base_model.modules())
    found = {"linear": [], "unquantized": []}
    for key, rank in ranks.items():
        module = modules.get(key.rpartition(".")[0])
        is_expert = "experts" in key or "block_sparse_moe" in key
        is_linear = is_expert or isinstance(module, LINEAR | None)
        is_wide = not is_linear or (module is not None and module not in inside)
        is_wide = is_wide or any(part in stays for part in key.split(".")) or "bias" in key
        if rank == 2 or (rank == 3 and is_expert):
            found["unquantized" if is_wide else "linear"].append(key)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_lists_are_those_of_transformers(tmp_path, name):
    assert json.loads(LISTS.read_text())[name] == lists(name, tmp_path)


def test_heads_that_are_tied_to_embeddings_are_known(tmp_path):
    """As the sources of transformers say what is tied: those heads have no tensor to be listed."""
    tied = re.compile(r'"([\w.]+)\.weight": "[\w.]*(?:embed|shared|wte|\.w\b|word)[\w.]*\.weight"')
    sources = (Path(hf.__file__).parent / "models").glob("*/modeling_*.py")
    heads = {name for path in sources for name in tied.findall(path.read_text())}
    save(tmp_path / "in", {"mlp.weight": np.ones((64, 64), np.float32)})
    report = convert(tmp_path / "in", tmp_path / "out", layout="compressed-tensors")
    *_, pattern = report.quantization_config["ignore"]
    found = re.compile(pattern.removeprefix("re:"))
    assert len(heads) > 20
    assert [name for name in sorted(heads) if not found.match(name) and "embed" not in name] == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = {name: lists(name, Path(folder)) for name in MODELS}
    LISTS.write_text(json.dumps(made, indent=1) + "\n")
