"""What llama.cpp wants to know of a model: names of tensors, metadata, tokenizer.

Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py and conversion/: TextModel, LlamaModel,
Qwen2Model, Qwen3Model, Qwen2MoeModel, Qwen3MoeModel, GemmaModel, Gemma2Model, Gemma3Model. The
tables of names and the keys of the metadata are those of the package gguf.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._checkpoint import Tensor
from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._tensors import CheckpointError, shown
from qtoolkit.checkpoints.layouts._layout import HIGH_PRECISION


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What differs between architectures.

    Attributes:
      name: That of llama.cpp, as in `gguf.MODEL_ARCH`.
      permutes: Whether the rows of q and k are reordered: transformers rotates the halves of a
        head, llama.cpp neighbours.
      is_gemma: Whether norms are stored without the 1 that is added to them, and the output head
        is the embedding.
      numbers: Further numbers of the config, by methods of `GGUFWriter`.
      defaults: What the model takes where config.json lacks a key.
      fixed: Keys of config.json whose value llama.cpp does not read, and the one that it takes.
    """

    name: str
    permutes: bool = False
    is_gemma: bool = False
    numbers: tuple[tuple[str, str], ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: tuple[tuple[str, Any], ...] = ()


_HEADS = (("add_key_length", "head_dim"), ("add_value_length", "head_dim"))
_CAPS = (
    ("add_attn_logit_softcapping", "attn_logit_softcapping"),
    ("add_final_logit_softcapping", "final_logit_softcapping"),
    ("add_sliding_window", "sliding_window"),
)
_LLAMA = Architecture("LLAMA", permutes=True, numbers=(("add_vocab_size", "vocab_size"),))
_USED = ("add_expert_used_count", "num_experts_per_tok")
_EXPERTS = (
    ("add_expert_count", "num_experts"),
    _USED,
    ("add_expert_feed_forward_length", "moe_intermediate_size"),
)
_SHARED = ("add_expert_shared_feed_forward_length", "shared_expert_intermediate_size")
_GEMMA3 = {
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "rope_theta": 1e6,
}
ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": dataclasses.replace(
        _LLAMA, numbers=(*_LLAMA.numbers, ("add_expert_count", "num_experts"), _USED)
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "QWEN2MOE", numbers=(*_EXPERTS, _SHARED), fixed=(("norm_topk_prob", False),)
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "QWEN3MOE", numbers=_EXPERTS, fixed=(("norm_topk_prob", True),)
    ),
    "Qwen2ForCausalLM": Architecture("QWEN2"),
    "Qwen3ForCausalLM": Architecture("QWEN3"),
    "GemmaForCausalLM": Architecture("GEMMA", is_gemma=True),
    "Gemma2ForCausalLM": Architecture("GEMMA2", is_gemma=True, numbers=_CAPS),
    "Gemma3ForCausalLM": Architecture("GEMMA3", is_gemma=True, numbers=_CAPS[1:], defaults=_GEMMA3),
}
_NUMBERS = (
    ("add_block_count", "num_hidden_layers"),
    ("add_context_length", "max_position_embeddings"),
    ("add_embedding_length", "hidden_size"),
    ("add_feed_forward_length", "intermediate_size"),
    ("add_head_count", "num_attention_heads"),
    ("add_head_count_kv", "num_key_value_heads"),
    ("add_layer_norm_rms_eps", "rms_norm_eps"),
    *_HEADS,
)
_ROPES = (None, "default", "linear", "yarn", "llama3")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of config.json, as llama.cpp sees it."""

    path: Path
    config: Mapping[str, Any]
    architecture: Architecture

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def rope(self) -> dict[str, Any]:
        """Parameters of rotary embeddings; "sliding_attention" has those of other layers."""
        rope = dict(self.config.get("rope_parameters") or self.config.get("rope_scaling") or {})
        if "full_attention" in rope:
            return {**rope["full_attention"], "sliding_attention": rope.get("sliding_attention")}
        rope.setdefault("rope_type", rope.get("type"))
        if rope.get("rope_theta", self.config.get("rope_theta")) is not None:
            rope["rope_theta"] = rope.get("rope_theta", self.config.get("rope_theta"))
        if (local := self.config.get("rope_local_base_freq")) is not None:
            rope["sliding_attention"] = {"rope_theta": local}
        return rope

    def target_name(self, names: Any, name: str) -> str:
        """The name in llama.cpp; "" of a tensor that it has no use for. `names` is gguf's table."""
        if name.endswith((".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")):
            return ""
        if self.architecture.is_gemma and name == "lm_head.weight":
            return ""
        target_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target_name is None:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)}: llama.cpp's {self.architecture.name} has no "
                "such tensor, expected those of a language model alone; convert the model with "
                "llama.cpp's convert_hf_to_gguf.py"
            )
        return str(target_name)

    def conversion(self, tensor: Tensor) -> tuple[str, Callable[[np.ndarray], np.ndarray]] | None:
        """A dtype, and what makes the values of a tensor with which llama.cpp computes; None: they
        are those of the folder.
        """
        name = tensor.name
        if self.architecture.is_gemma and name.endswith("norm.weight"):
            return "F32", lambda x: x.astype(np.float32) + 1
        module = name.rpartition(".")[0]
        if not self.architecture.permutes or not module.endswith(("q_proj", "k_proj")):
            return None if tensor.dtype in HIGH_PRECISION else ("F32", lambda x: x)
        all_heads = heads = self.config["num_attention_heads"]
        size = self.config.get("head_dim") or self.config["hidden_size"] // all_heads
        if module.endswith("k_proj"):
            heads = self.config.get("num_key_value_heads") or heads
        rows = tensor.shape[0]
        if rows != heads * size or size % 2:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)}: {rows} rows, expected those of the {heads} "
                f"heads of {size} in config.json; fetch the folder again"
            )

        def neighbours(x: np.ndarray) -> np.ndarray:
            halves = x.reshape(heads, 2, size // 2, *x.shape[1:])
            return halves.swapaxes(1, 2).reshape(x.shape)

        return tensor.dtype, neighbours

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """Tensors that llama.cpp has and the folder has not: factors of Llama 3's frequencies."""
        rope = self.rope
        if rope.get("rope_type") != "llama3":
            return {}
        size = self.config.get("head_dim") or (
            self.config["hidden_size"] // self.config["num_attention_heads"]
        )
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        lengths = 2 * math.pi * np.float32(rope.get("rope_theta", 10000.0)) ** exponents
        factor, low = rope.get("factor", 8.0), rope.get("low_freq_factor", 1.0)
        high, old = (
            rope.get("high_freq_factor", 4.0),
            rope.get("original_max_position_embeddings", 8192),
        )
        smooth = (old / lengths - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors = np.where(lengths > old / low, factor, between)
        factors = np.where(lengths < old / high, 1, factors)
        return {"rope_freqs.weight": factors.astype(np.float32)}

    def write_metadata(self, writer: Any) -> None:
        import gguf

        for method, key in (*_NUMBERS, *self.architecture.numbers):
            if (value := self.config.get(key)) is not None:
                getattr(writer, method)(value)
        rope = self.rope
        theta, local = rope.get("rope_theta"), rope.get("sliding_attention") or {}
        if self.architecture.name in ("GEMMA", "GEMMA2"):  # llama.cpp's default, 10,000
            return
        if self.architecture.name == "LLAMA":
            heads = self.config["num_attention_heads"]
            size = self.config.get("head_dim") or self.config["hidden_size"] // heads
            writer.add_rope_dimension_count(size)
        if theta is not None:
            writer.add_rope_freq_base(theta)
        if local.get("rope_theta") is not None:
            writer.add_rope_freq_base_swa(local["rope_theta"])
        kind = rope.get("rope_type")
        if kind in ("linear", "yarn"):
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def model_of(path: Path, config: Mapping[str, Any]) -> Model:
    """The model of a folder; raises for one that is not written."""
    names = config.get("architectures") or [""]
    architecture = ARCHITECTURES.get(str(names[0]))
    if architecture is None:
        raise CheckpointError(
            f"{path}: architecture {shown(str(names[0]))} in config.json, expected one of "
            f"{', '.join(ARCHITECTURES)} for GGUF; convert the model with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    experts = {"num_experts": config.get("num_local_experts")}  # one name for both
    model = Model(path, {**architecture.defaults, **experts, **config}, architecture)
    kind, wanted = model.rope.get("rope_type"), ("num_hidden_layers", "num_attention_heads")
    if kind not in _ROPES or (kind == "llama3" and architecture.name != "LLAMA"):
        raise CheckpointError(
            f"{path}: rope_type {shown(str(kind))} in config.json, expected linear, yarn, or of "
            "Llama llama3; convert the model with llama.cpp's convert_hf_to_gguf.py"
        )
    for key, value in architecture.fixed:
        if config.get(key, False) != value:
            raise CheckpointError(
                f"{path}: {key} {shown(str(config.get(key)))} in config.json, and llama.cpp's "
                f"{architecture.name} computes with {value}, expected that; the model would be "
                "another in llama.cpp"
            )
    for key in (*wanted, "hidden_size"):
        if type(model.config.get(key)) is not int:
            raise CheckpointError(
                f"{path}: {key} {shown(str(config.get(key)))} in config.json, expected a number; "
                "fetch the folder again"
            )
    return model
