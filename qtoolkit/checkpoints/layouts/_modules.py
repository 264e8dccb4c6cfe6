r"""Names of modules for loaders that call them otherwise than the checkpoint does.

transformers puts "model." before towers, moves language models, renames routers, and makes output
heads out of tied embeddings, which have no tensor. What a config lists by the checkpoint's name
alone is then not found: the module counts as quantized, finds no scale in the file, and computes
with whatever its memory held. Hence patterns, such as "re:(.*\.)?layers\.\d+\.mlp\.gate$".
"""

import re
from collections.abc import Iterable, Sequence

# Heads of transformers' models that have no tensor where they are tied to the embeddings, in turn:
# Llama, T5 and BART; BERT, RoBERTa and ModernBERT; Whisper; DistilBERT; ELECTRA; XLM; XLNet; BioGPT
# and TrOCR; T5Gemma; IDEFICS; GPT-NeoX-Japanese; RWKV; GIT; NeoMME.
_HEADS = (
    *("lm_head", "decoder", "proj_out", "vocab_projector", "generator_lm_head", "pred_layer.proj"),
    *("lm_loss", "output_projection", "lm_head.out_proj", "lm_head.additional_fc"),
    *("embed_out", "head", "output", "unembedding_projection"),
)
_ROUTERS = ("gate", "router")
_EMBEDDINGS = re.compile(r"(embed\w*|wte|wpe|shared)$")  # are no Linear layers


def ignored(kept: Sequence[str], quantized: Iterable[str]) -> list[str]:
    """The modules that stay wide: by name, then by patterns of the names that loaders give them."""
    taken = tuple(quantized)
    linear = [name for name in kept if "." in name and not _EMBEDDINGS.search(name)]
    patterns = patterns_of(linear, taken)
    patterns += _towers(linear)
    if any(name.rpartition(".")[2] in _ROUTERS for name in kept):
        patterns.append(rf"re:.*\.(mlp|feed_forward|block_sparse_moe)\.({'|'.join(_ROUTERS)})$")
    heads = [name for name in _HEADS if not any(f".{one}".endswith(f".{name}") for one in taken)]
    if heads:
        patterns.append(rf"re:(.*\.)?({'|'.join(map(re.escape, heads))})$")
    return [*kept, *(pattern for pattern in patterns if not _finds(pattern, taken))]


def _towers(names: Iterable[str]) -> list[str]:
    """Patterns of all in a tower or head, whose insides may have other names in loaders, too.

    transformers calls the linear_c.0.proj of Segformer's decode_head linear_projections.0.proj.
    """
    tops = dict.fromkeys(name.partition(".")[0] for name in names)
    # Behind "model." may be everything, "model.language_model" as well.
    return [rf"re:(model\.)?{re.escape(top)}\..*$" for top in tops if top != "model"]


def patterns_of(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Patterns that find these modules behind any prefix, and none of the others.

    They begin with the list of layers, or as far before it as the others demand; modules of layers
    alike share one.
    """
    others = tuple(others)
    found: dict[str, None] = {}
    for name in names:
        exact = f"re:{re.escape(name)}$"
        shared = (f"re:(.*\\.)?{part}$" for part in (*_suffixes(name), re.escape(name)))
        found[next((one for one in shared if not _finds(one, others)), exact)] = None
    return list(found)


def _suffixes(name: str) -> list[str]:
    r"""From short to long: "layers\.\d+\.mlp", "encoder\.layers\.\d+\.mlp" ..."""
    parts = [r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")]
    first = max(parts.index(r"\d+") - 1, 0) if r"\d+" in parts else 0
    suffixes = [r"\.".join(parts[start:]) for start in range(first, -1, -1)]
    if parts[:2] == ["language_model", "model"]:  # becomes "model.language_model"
        suffixes.insert(1, r"\.".join([r"language_model\.(model\.)?" + parts[2], *parts[3:]]))
    return suffixes


def _finds(pattern: str, modules: Iterable[str]) -> bool:
    compiled = re.compile(pattern.removeprefix("re:"))
    return any(compiled.match(module) for module in modules)
