"""gpt-oss: experts in MXFP4. A byte holds two E2M1 codes, the first one in its low bits.

transformers names the entries `gate_up_proj_blocks`, U8 [experts, outputs, inputs / 32, 16], and
`gate_up_proj_scales`, U8 [experts, outputs, inputs / 32]; its weight is [experts, inputs, outputs].
OpenAI's own files have `mlp1_weight.blocks` and `mlp1_weight.scales` of a weight
[experts, outputs, inputs].
Source: transformers, integrations/mxfp4.py; github.com/openai/gpt-oss, torch/weights.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._tensors import Entry
from qtoolkit.checkpoints.layouts._encoding import NIBBLES, Encoding
from qtoolkit.checkpoints.layouts._headers import Headers
from qtoolkit.checkpoints.layouts._layout import Layout, Scheme, SchemeModules, decode_groups
from qtoolkit.formats import MXFP4

METHOD = "mxfp4"
_IS_TRANSPOSED = {"_blocks": True, ".blocks": False}


def store(entry: Entry, scheme: Scheme, axes: Sequence[int], input_scale: float | None) -> Encoding:
    experts, inputs, outputs = entry.shape
    rows = (experts, outputs, inputs // 32)
    return Encoding(
        name=entry.name,
        shape=entry.shape,
        spec=scheme.spec,
        lengths=(1, 1, 32),
        codes=Entry(f"{entry.name}_blocks", "U8", (*rows, 16)),
        scale=Entry(f"{entry.name}_scales", "U8", rows),
        packing=NIBBLES,
        transposed=True,
    )


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    encodings = {}
    for entry in headers.values():
        name, suffix = entry.name[:-7], entry.name[-7:]
        scale_name = f"{name}{suffix[:1]}scales"
        if (
            suffix not in _IS_TRANSPOSED
            or entry.dtype != "U8"
            or not (config or scale_name in headers)
        ):
            continue
        scale = headers.check(scale_name, ("U8",))
        if entry.shape != (*scale.shape, 16):
            what = (
                f"{list(entry.shape)} with scales {list(scale.shape)}, expected 16 bytes for each"
            )
            raise headers.error(entry.name, what)
        *rows, blocks = scale.shape
        shape = (*rows, 32 * blocks)
        encoding = decode_groups(headers, name, shape, MXFP4, entry, scale, packing=NIBBLES)
        if _IS_TRANSPOSED[suffix]:
            swapped = (*shape[:-2], shape[-1], shape[-2])
            encoding = dataclasses.replace(encoding, shape=swapped, transposed=True)
        encodings[name] = encoding
    return encodings


def config(used: SchemeModules, unquantized: Sequence[str]) -> dict[str, Any]:
    return {"quant_method": METHOD, "modules_to_not_convert": list(unquantized)}


LAYOUT = Layout(
    name="gpt-oss",
    title="gpt-oss's MXFP4: NAME_blocks and NAME_scales, or NAME.blocks and NAME.scales",
    loaders="transformers; by their documentation (untested): vLLM, SGLang",
    schemes=(Scheme(name="MXFP4", spec=MXFP4, note="weights of experts only"),),
    decode=decode,
    store=store,
    config=config,
    methods=(METHOD,),
    experts_of="gpt_oss",
)
