"""DeepSeek's FP8, in transformers "finegrained fp8": blocks of 128x128.

`weight` is F8_E4M3, `weight_scale_inv` F32 [ceil(o / 128), ceil(i / 128)]; despite its name it
multiplies. The last blocks of a row or column may be partial, as in DeepSeek's kv_a_proj_with_mqa,
whose 576 rows have 5 scales. V3.1 has powers of two there, V4 calls the entry `scale`, of dtype
F8_E8M0, and has experts of MXFP4, I8 [o, i / 2]. "mxfp8" of SGLang has `weight_scale_inv` U8
[o, i / 32]. FBGEMM has `weight_scale` F32 [o, 1], and for Llama 4's experts, [e, i, o], scales
[e, 1, o], or, in the same order, [e, o, 1]. AMD's Quark has `weight_scale` of FP8, and of MXFP4, U8
[o, i / 2]; its integers, which may be transposed, are not read.
Source: github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md; transformers,
integrations/finegrained_fp8.py and fbgemm_fp8.py; Quark, utils/pack.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._tensors import Entry
from qtoolkit.checkpoints.layouts._encoding import Encoding
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import (
    BLOCK,
    BYTE_ELEMENTS,
    Layout,
    Scheme,
    SchemeModules,
    block_counts,
    by_block,
    decode_bytes,
    microscaled,
)
from qtoolkit.formats import DEEPSEEK_128X128, E4M3FN

SUFFIX = "_scale_inv"
METHOD = "fp8"
FBGEMM, QUARK = "fbgemm_fp8", "quark"
_OF_FLOATS = (METHOD, "mxfp8", FBGEMM)


def store(entry: Entry, scheme: Scheme, axes: Sequence[int], input_scale: float | None) -> Encoding:
    return Encoding(
        name=entry.name,
        shape=entry.shape,
        spec=scheme.spec,
        lengths=BLOCK,
        codes=Entry(entry.name, "F8_E4M3", entry.shape),
        scale=Entry(entry.name + SUFFIX, "F32", block_counts(entry.shape, BLOCK)),
    )


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    block = headers.check_block(config.get("weight_block_size"), "weight_block_size") or BLOCK
    method, encodings = config.get("quant_method"), {}
    for name, entry in headers.items():
        if entry.dtype not in (*BYTE_ELEMENTS, "U8") or (method == QUARK and entry.dtype == "I8"):
            continue
        scale_name = _scale_name(name, entry, headers, config)
        if scale_name is None:
            continue
        scale = headers[scale_name]
        if method == FBGEMM and len(entry.shape) == len(scale.shape) == 3:
            scale = scale._replace(shape=(scale.shape[0], 1, math.prod(scale.shape[1:])))
        pair = headers.only({name: entry, scale_name: scale})
        encodings[name] = microscaled(pair, name, scale_name) or decode_bytes(
            pair, name, scale_name, block, are_floats=method in _OF_FLOATS
        )
    return encodings


def _scale_name(name: str, entry: Entry, headers: Headers, config: Mapping[str, Any]) -> str | None:
    """The entry with the scales of a weight; None if none is surely of this layout."""
    # DeepSeek V4, and what DeepSeek's own program makes of V3, has "NAME.scale"; vLLM writes one
    # scale in all, "NAME.weight_scale". Without a config these are read only in the shapes that
    # DeepSeek has: other programs' scales of such names may divide.
    if name + SUFFIX in headers:
        return name + SUFFIX
    beside = entry_beside(name, "scale")
    if f".{name}".endswith(".weight") and beside in headers:
        grid = block_counts(entry.shape, BLOCK)
        is_known = headers[beside].dtype in ("F32", "F8_E8M0") and headers[beside].shape == grid
        is_known &= math.prod(grid) > 1
        if config or is_known or microscaled(headers, name, beside):
            return beside
    return name + "_scale" if config and name + "_scale" in headers else None


def config(used: SchemeModules, unquantized: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(unquantized),
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
    store=store,
    config=config,
    methods=(METHOD, "mxfp8", FBGEMM, QUARK),
    has_partial_blocks=True,
)
