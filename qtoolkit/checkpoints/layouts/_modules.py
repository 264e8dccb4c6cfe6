r"""Lists modules that are not quantized, for loaders that rename the modules of a checkpoint.

transformers puts "model." before towers, moves language models, renames routers, and makes output
heads out of tied embeddings, which have no tensor. If the config listed such a module by its name
in the checkpoint only, the loader would not find it in the list: it would take the module for
quantized, find no scale in the file, and compute with whatever its memory held. So the list also
has patterns, such as "re:(.*\.)?layers\.\d+\.mlp\.gate$".
"""

import re
from collections.abc import Iterable, Sequence

# Output heads in transformers, which have no tensor if they are tied to the embeddings. In turn:
# Llama, T5 and BART; BERT, RoBERTa and ModernBERT; Whisper; DistilBERT; ELECTRA; XLM; XLNet; BioGPT
# and TrOCR; T5Gemma; IDEFICS; GPT-NeoX-Japanese; RWKV; GIT; NeoMME.
_HEADS = (
    *("lm_head", "decoder", "proj_out", "vocab_projector", "generator_lm_head", "pred_layer.proj"),
    *("lm_loss", "output_projection", "lm_head.out_proj", "lm_head.additional_fc"),
    *("embed_out", "head", "output", "unembedding_projection"),
)
_ROUTERS = ("gate", "router")
_EMBEDDINGS = re.compile(r"(embed\w*|wte|wpe|shared)$")  # are no Linear layers


def is_table(module: str) -> bool:
    """Whether it is a table of embeddings by its name; "embed_out" is GPT-NeoX's output layer."""
    return bool(_EMBEDDINGS.search(module)) and not module.endswith("embed_out")


def ignored(unquantized: Sequence[str], quantized: Iterable[str]) -> list[str]:
    """Names of the modules that are not quantized, then patterns for what loaders call them."""
    taken = tuple(quantized)
    has_tables = any(map(is_table, taken))
    linear = [
        name for name in unquantized if "." in name and (has_tables or not _EMBEDDINGS.search(name))
    ]
    patterns = patterns_of(linear, taken)
    patterns += _towers(linear)
    if any(name.rpartition(".")[2] in _ROUTERS for name in unquantized):
        patterns.append(rf"re:.*\.(mlp|feed_forward|block_sparse_moe)\.({'|'.join(_ROUTERS)})$")
    heads = [name for name in _HEADS if not any(f".{one}".endswith(f".{name}") for one in taken)]
    if heads:
        patterns.append(rf"re:(.*\.)?({'|'.join(map(re.escape, heads))})$")
    return [*unquantized, *(pattern for pattern in patterns if not _finds(pattern, taken))]


def _towers(names: Iterable[str]) -> list[str]:
    """For each first part of a name, such as "vision_tower", a pattern for everything below it."""
    # Loaders may rename what is inside a tower or head: transformers turns the linear_c.0.proj of
    # Segformer's decode_head into linear_projections.0.proj.
    tops = dict.fromkeys(name.partition(".")[0] for name in names)
    # Not for "model": everything may be below it, also "model.language_model".
    return [rf"re:(model\.)?{re.escape(top)}\..*$" for top in tops if top != "model"]


def patterns_of(names: Iterable[str], others: Iterable[str]) -> list[str]:
    r"""Patterns that match these modules, whatever prefix they have, and none of the others.

    A pattern begins at the list of layers, "layers\.\d+\.mlp", so that one serves all layers. If it
    would match one of `others`, it begins further left.
    """
    others = tuple(others)
    found: dict[str, None] = {}
    for name in names:
        exact = f"re:{re.escape(name)}$"
        shared = (f"re:(.*\\.)?{part}$" for part in (*_suffixes(name), re.escape(name)))
        found[next((one for one in shared if not _finds(one, others)), exact)] = None
    return list(found)


def _suffixes(name: str) -> list[str]:
    r"""Endings of a name as patterns: "layers\.\d+\.mlp", "encoder\.layers\.\d+\.mlp" ..."""
    parts = [r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")]
    first = max(parts.index(r"\d+") - 1, 0) if r"\d+" in parts else 0
    suffixes = [r"\.".join(parts[start:]) for start in range(first, -1, -1)]
    if parts[:2] == ["language_model", "model"]:  # becomes "model.language_model"
        suffixes.insert(1, r"\.".join([r"language_model\.(model\.)?" + parts[2], *parts[3:]]))
    return suffixes


def _finds(pattern: str, modules: Iterable[str]) -> bool:
    compiled = re.compile(pattern.removeprefix("re:"))
    return any(compiled.match(module) for module in modules)
