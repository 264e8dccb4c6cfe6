"""What loaders are known to do wrong with some checkpoints: a table, each row with its version.

`convert` prints the sentence of a row where it applies, because the files are what their layout
says, and other loaders read them. `tests/interop/test_cautions.py` tries each row with the loader:
what a row names must fail there, and what it does not must load. The documentation prints the
table. No JAX here.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._report import TensorPlan
from qtoolkit.checkpoints._roles import EMBEDDING
from qtoolkit.checkpoints._tensors import configs_in, listed, over_layers, shown
from qtoolkit.checkpoints.layouts import Scheme
from qtoolkit.checkpoints.layouts._compressed_tensors import (
    FP8_CHANNEL,
    FP8_STATIC,
    FP8_TENSOR,
    MX4,
    NV4,
    PACKED,
    W4A16_ASYM,
)
from qtoolkit.formats import E4M3FN

TRIED = "2026-11-28"  # when the rows of transformers were last tried
# The `model_type` of models whose experts transformers joins, although files have them one by one:
# a WeightConverter with MergeModulelist. Source: its conversion_mapping.py.
# fmt: off
JOINED = frozenset((
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1",
    "dots3_note_vision_encoder", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint",
    "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm5_next_text", "glm_moe_dsa",
    "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_k25", "kimi_linear", "kolibri1", "laguna",
    "lfm2_moe", "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2",
    "minimax_m3_vl", "mistral_large4_text", "mixtral", "nemotron_h", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe",
    "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "qwen4_exp_text", "sarvam_mla",
    "sarvam_moe", "solar_open",
))
# fmt: on
# Models in which several layers share a module, which files hold once.
SHARED = frozenset({"zamba", "zamba2"})
_SHARED_MODULE = re.compile(r"(^|\.)shared_transf(ormer)?\.")
# Models whose code asks layers for `weight`, which packed layers have not: transformers 5.24 fails
# as it runs them, but for PACKED_OPTION. There are more than were tried.
ASK_FOR_WEIGHTS = frozenset(
    (
        *("falcon", "gpt_bigcode", "mamba", "mamba2", "modernbert"),
        *("rwkv", "siglip", "t5", "umt5", "wav2vec2"),
    )
)
PACKED_OPTION = "quantization_config=transformers.CompressedTensorsConfig(dequantize=True)"
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+\.")
# The schemes that transformers reads in the experts of a mixture. It multiplies FP8 codes by one
# scale in all or one per output; for other schemes it calls the decompressors of
# compressed-tensors, with `weight_scale` as the only scale.
_READ_OF_EXPERTS = {FP8_CHANNEL, FP8_TENSOR, FP8_STATIC, MX4, *PACKED}


@dataclasses.dataclass(frozen=True)
class Target:
    """What a row looks at: the layout, the config and the tensors of a checkpoint to be written."""

    layout: str
    config: Mapping[str, Any]
    tensors: Sequence[TensorPlan]

    @property
    def models(self) -> set[str]:
        """The `model_type` of the model, and that of the language model in it."""
        return {str(part["model_type"]) for part in configs_in(self.config) if "model_type" in part}

    @property
    def quantized(self) -> list[TensorPlan]:
        return [tensor for tensor in self.tensors if tensor.scheme is not None]

    @property
    def experts(self) -> list[TensorPlan]:
        """Weights of single experts that transformers joins; [] if it joins none."""
        if self.models and not self.models & JOINED:
            return []
        return [
            tensor
            for tensor in self.tensors
            if len(tensor.source.shape) == 2
            if tensor.name.endswith(".weight") and _EXPERT.search(tensor.name)
        ]

    @property
    def schemes_of_experts(self) -> dict[Scheme, list[str]]:
        """The schemes of joined experts, with the names of the weights."""
        schemes: dict[Scheme, list[str]] = {}
        for tensor in self.experts:
            if tensor.scheme is not None:
                schemes.setdefault(tensor.scheme, []).append(tensor.name)
        return schemes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caution:
    """A row.

    Attributes:
      key: Its name.
      loader, version: Which program; "" if it was read in its source, but not run.
      layout: The layout of the files.
      models: Of which models, in words.
      fault: What it does, "loads ... with wrong weights, without an error".
      remedy: What to do to use this loader.
      names: The names of the tensors for which it holds.
    """

    key: str
    loader: str
    version: str
    layout: str
    models: str
    fault: str
    remedy: str
    names: Callable[[Target], Iterable[str]]

    @property
    def who(self) -> str:
        return f"{self.loader} ({self.version})" if self.version else self.loader


def cautions_of(target: Target) -> list[str]:
    """The sentences of all rows that apply."""
    sentences = []
    for row in CAUTIONS:
        names = [] if row.layout != target.layout else [*row.names(target)]
        if names:
            which = listed(dict.fromkeys(map(shown, map(over_layers, names))), 10)
            sentences.append(f"{row.who} {row.fault}: {which}; {row.remedy}")
    return sentences


def _experts_in_nvfp4(target: Target) -> Iterable[str]:
    schemes = target.schemes_of_experts
    return schemes[NV4] if [*schemes] == [NV4] else ()


def _experts_in_unread_formats(target: Target) -> Iterable[str]:
    schemes = target.schemes_of_experts
    unread = [scheme for scheme in schemes if scheme not in {*_READ_OF_EXPERTS, NV4}]
    return schemes[unread[0]] if len(schemes) == 1 and unread else ()


def _experts_in_several_formats(target: Target) -> Iterable[str]:
    schemes = target.schemes_of_experts
    return [names[0] for names in schemes.values()] if len(schemes) > 1 else ()


def _unquantized_experts(target: Target, is_fp8: bool) -> list[str]:
    """The names of joined experts that are not quantized, which transformers reads as FP8, or else
    as packed codes.
    """
    # If no expert is quantized, transformers takes the first group of the config for them.
    schemes = [*target.schemes_of_experts] or [t.scheme for t in target.quantized if t.scheme][:1]
    if len(schemes) != 1 or not {*schemes} <= _READ_OF_EXPERTS:
        return []
    is_same = (schemes[0].spec.element == E4M3FN) == is_fp8
    return [tensor.name for tensor in target.experts if tensor.scheme is None and is_same]


def _experts_beside_fp8(target: Target) -> Iterable[str]:
    """Of weights that are joined, some are in FP8, and some not: of w1, but not of w2."""
    quantized = {_EXPERT.sub("", n) for some in target.schemes_of_experts.values() for n in some}
    names = _unquantized_experts(target, True)
    return [name for name in names if _EXPERT.sub("", name) in quantized]


def _shared_modules(target: Target) -> Iterable[str]:
    if not target.models & SHARED:
        return ()
    layers, blocks = (target.config.get(key) for key in ("layers_block_type", "num_mem_blocks"))
    hybrid = layers.count("hybrid") if isinstance(layers, list) else math.inf
    names = [tensor.name for tensor in target.quantized if _SHARED_MODULE.search(tensor.name)]
    return names if hybrid > (blocks if isinstance(blocks, int) else 1) else ()


def _divided(tensor: TensorPlan) -> tuple[bool, bool]:
    """Whether 128 divides each axis longer than 128, and whether the number of its blocks does."""
    sizes = [(n, -(-n // 128)) for n in tensor.source.shape[-2:]]
    return all(n <= 128 or n % 128 == 0 for n, _ in sizes), all(n % c == 0 for n, c in sizes)


def _unquantized_stacks(target: Target) -> Iterable[str]:
    stacks = (t for t in target.tensors if len(t.source.shape) == 3 and t.scheme is None)
    return [t.name for t in stacks if re.search(r"experts\.\w*_proj$", t.name)]


_ALIKE = (
    "for it, quantize all of them alike, in e4m3fn by channel or tensor, mxfp4, int4_group128, "
    "int4_group32 or int8_group128"
)
_OF_TRANSFORMERS: dict[str, Any] = {"loader": "transformers", "version": "5.24"}
_OF_EXPERTS: dict[str, Any] = {
    **_OF_TRANSFORMERS,
    "layout": "compressed-tensors",
    "models": "experts that it joins: Mixtral, Qwen3-MoE, DeepSeek and others",
    "remedy": _ALIKE,
}
_OF_BLOCKS: dict[str, Any] = {
    **_OF_TRANSFORMERS,
    "layout": "finegrained-fp8",
    "models": "all",
    "remedy": 'for it, use layout="compressed-tensors", or exclude them with skip=',
}
CAUTIONS = (
    Caution(
        key="experts in nvfp4",
        fault="loads experts in nvfp4 with wrong weights, without an error",
        names=_experts_in_nvfp4,
        **_OF_EXPERTS,
    ),
    Caution(
        key="experts in unread formats",
        fault="does not load experts in e4m3fn by block, int8 or mxfp8_e4m3",
        names=_experts_in_unread_formats,
        **_OF_EXPERTS,
    ),
    Caution(
        key="experts in several formats",
        fault="reads all experts by one format, with wrong weights where they have several",
        names=_experts_in_several_formats,
        **_OF_EXPERTS,
    ),
    Caution(
        key="unquantized experts beside FP8",
        fault="loads experts with wrong weights where others are in e4m3fn, without an error",
        names=_experts_beside_fp8,
        **_OF_EXPERTS,
    ),
    Caution(
        key="unquantized experts beside packed codes",
        fault="does not load experts that are not quantized where others are in packed formats",
        names=lambda target: _unquantized_experts(target, False),
        **_OF_EXPERTS,
    ),
    Caution(
        key="shared modules",
        layout="compressed-tensors",
        models="Zamba, Zamba 2",
        fault="finds the scales of a module that layers share in the first of these layers only, "
        "and computes NaN or wrong numbers or fails",
        remedy='for it, exclude them with skip="shared_transf", or use layout="finegrained-fp8"',
        names=_shared_modules,
        **_OF_TRANSFORMERS,
    ),
    Caution(
        key="zero points of weights",
        layout="compressed-tensors",
        models="all",
        fault="does not load zero points of packed weights: it makes room of another size",
        remedy="for it, load them by " + PACKED_OPTION,
        names=lambda target: [t.name for t in target.quantized if t.scheme == W4A16_ASYM],
        **_OF_TRANSFORMERS,
    ),
    Caution(
        key="tables of embeddings",
        layout="compressed-tensors",
        models="all",
        fault="finds no weight in a table of embeddings and fails as it runs the model",
        remedy="vLLM looks up the codes; for transformers load one scheme by " + PACKED_OPTION,
        names=lambda target: [t.name for t in target.quantized if EMBEDDING.search(t.name)],
        **_OF_TRANSFORMERS,
    ),
    Caution(
        key="partial blocks, misread",
        fault="without a GPU, or with dequantize=True, cuts rows or columns into equal blocks: 192 "
        "into 96 and 96 instead of 128 and 64, hence wrong weights, without an error",
        names=lambda target: [t.name for t in target.quantized if _divided(t) == (False, True)],
        **_OF_BLOCKS,
    ),
    Caution(
        key="partial blocks, not read",
        fault="without a GPU, or with dequantize=True, does not load weights whose rows or columns "
        "are no multiple of their number of blocks",
        names=lambda target: [t.name for t in target.quantized if not _divided(t)[1]],
        **_OF_BLOCKS,
    ),
    Caution(
        key="unquantized layers of gpt-oss",
        loader="vLLM",
        version="",
        layout="gpt-oss",
        models="gpt-oss",
        fault="takes the experts of every layer for MXFP4, whatever the config says of layers that "
        "are not quantized",
        remedy="for it, quantize all of them",
        names=_unquantized_stacks,
    ),
)
