"""DeepSeek's FP8, in transformers "finegrained fp8": blocks of 128x128.

`weight` is F8_E4M3, `weight_scale_inv` F32 [ceil(o / 128), ceil(i / 128)]; despite its name it
multiplies. The last blocks of a row or column may be partial, as in DeepSeek's kv_a_proj_with_mqa,
whose 576 rows have 5 scales.
Source: github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md; transformers,
integrations/finegrained_fp8.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._tensors import Entry
from qtoolkit.checkpoints.layouts._encoding import Encoding
from qtoolkit.checkpoints.layouts._layout import (
    BLOCK,
    BYTE_ELEMENTS,
    Headers,
    Layout,
    Scheme,
    Used,
    block_counts,
    by_block,
    check_block,
    decode_bytes,
)
from qtoolkit.formats import DEEPSEEK_128X128, E4M3FN

SUFFIX = "_scale_inv"
METHOD = "fp8"


def encode(info: Entry, scheme: Scheme, axes: Sequence[int], input_scale: float | None) -> Encoding:
    return Encoding(
        name=info.name,
        shape=info.shape,
        spec=scheme.spec,
        lengths=BLOCK,
        codes=Entry(info.name, "F8_E4M3", info.shape),
        scale=Entry(info.name + SUFFIX, "F32", block_counts(info.shape, BLOCK)),
    )


def decode(config: Mapping[str, Any], headers: Headers, where: str) -> dict[str, Encoding]:
    block = check_block(config.get("weight_block_size"), "weight_block_size", where) or BLOCK
    encodings = {}
    for name, info in headers.items():
        if info.dtype in BYTE_ELEMENTS and name + SUFFIX in headers:
            encodings[name] = decode_bytes(headers, name, name + SUFFIX, where, block)
        elif config and info.dtype in BYTE_ELEMENTS and name + "_scale" in headers:
            # One scale in all, as vLLM writes it.
            encodings[name] = decode_bytes(headers, name, name + "_scale", where, block)
    return encodings


def config(used: Used, kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(kept),
    }


LAYOUT = Layout(
    name="finegrained-fp8",
    title="DeepSeek's blocks of 128x128: weight, weight_scale_inv",
    loaders="transformers; by their documentation (untested): vLLM, SGLang",
    schemes=(
        Scheme(name="blocks of 128x128", spec=by_block(E4M3FN)),
        Scheme(
            name="blocks of 128x128, no scale below 1e-4 / 448, as DeepSeek's kernels",
            spec=DEEPSEEK_128X128,
        ),
    ),
    decode=decode,
    encode=encode,
    config=config,
    methods=(METHOD,),
    has_partial_blocks=True,
)
