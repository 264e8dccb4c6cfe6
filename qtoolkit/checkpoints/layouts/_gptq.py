"""GPTQ, as AutoGPTQ and GPTQModel write it: unsigned integers of 2, 3, 4 or 8 bits.

A weight [outputs, inputs] has these entries:

* `qweight`, I32 [inputs * bits / 32, outputs]: the codes of a column, one after the other, the
  first one in the low bits. Codes of 3 bits may begin in one word and end in the next.
* `scales`, [groups, outputs].
* `qzeros`, I32 [groups, outputs * bits / 32]: the zero points. The checkpoint format "gptq" stores
  zero - 1, "gptq_v2" stores zero.
* `g_idx`, I32 [inputs]: the group of each input. Without it a group is a run of inputs, but
  `desc_act` of the config says that they were sorted.

x = scale * (code - zero).
Source: github.com/ModelCloud/GPTQModel, gptqmodel/utils/model_dequant.py, convert_gptq_file.
"""

from collections.abc import Mapping
from typing import Any

from qtoolkit.checkpoints._tensors import CheckpointError, Entry, shown
from qtoolkit.checkpoints.layouts._encoding import Encoding, dense
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import FLOAT_SCALES, HIGH_PRECISION, Layout, block_format
from qtoolkit.formats import UINT2, UINT4, UINT8
from qtoolkit.formats import format as resolve

_ELEMENTS = {2: UINT2, 3: resolve("uint3"), 4: UINT4, 8: UINT8}
_OFFSETS = {"gptq": 1, "gptq_v2": 0}


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    if not config:
        for name, entry in headers.items():
            scale = headers.get(entry_beside(name, "scales"))
            is_gptq = f".{name}".endswith(".qweight") and entry_beside(name, "qzeros") in headers
            if is_gptq and scale is not None and entry.shape[1:] == scale.shape[1:]:
                raise CheckpointError(
                    f"{headers.path}: tensor {shown(name)}: of a weight quantized by GPTQ, as "
                    "its name says, expected a config.json, which says what its zero points mean; "
                    "give the folder with it"
                )
        return {}
    stored_as = str(config.get("checkpoint_format") or "gptq")
    if stored_as not in _OFFSETS:
        known = " or ".join(_OFFSETS)
        raise headers.config_error("checkpoint_format", stored_as, known, "GPTQModel")
    return {
        entry_beside(name, "weight"): _decode_weight(config, headers, entry, _OFFSETS[stored_as])
        for name, entry in headers.items()
        if f".{name}".endswith(".qweight")
    }


def _decode_weight(
    config: Mapping[str, Any], headers: Headers, codes: Entry, offset: int
) -> Encoding:
    name = codes.name
    headers.check(name, ("I32",))
    scale = headers.check(entry_beside(name, "scales"), FLOAT_SCALES)
    zero = headers.check(entry_beside(name, "qzeros"), ("I32",))
    index = headers.get(entry_beside(name, "g_idx"))
    if index is None and config.get("desc_act") is True and scale.shape[:1] != (1,):
        headers.check(entry_beside(name, "g_idx"), ("I32", "I64"))  # raises
    words, outputs = codes.shape if len(codes.shape) == 2 else (0, 0)
    groups = scale.shape[0] if scale.shape else 0
    # Not from config.json: "dynamic" there may give single modules another number of bits.
    bits = next((b for b in _ELEMENTS if zero.shape == (groups, outputs * b / 32)), 0)
    inputs = words * 32 // (bits or 1)
    if index is not None:
        headers.check(index.name, ("I32", "I64"))
        inputs = index.shape[0] if len(index.shape) == 1 else 0
    length = config.get("group_size")
    length = length if type(length) is int and length > 0 else max(inputs, 1)
    if config.get("dynamic") and groups and inputs % groups == 0:  # modules may have other groups
        length = max(inputs // groups, 1)
    fits = bits and inputs and words == inputs * bits / 32 and scale.shape == (groups, outputs)
    if not fits or -(-inputs // length) != groups:
        raise headers.error(
            name,
            f"{list(codes.shape)}, scales {list(scale.shape)}, qzeros {list(zero.shape)}, expected "
            f"codes of {', '.join(map(str, _ELEMENTS))} bits in groups of {length}",
            "GPTQModel",
        )
    return Encoding(
        name=entry_beside(name, "weight"),
        shape=(outputs, inputs),
        spec=block_format(
            element=_ELEMENTS[bits],
            block=(length,),
            axes=(0,),
            scale=HIGH_PRECISION[scale.dtype],
            zero_point=True,
        ),
        lengths=(length, 1),
        codes=codes,
        scale=scale,
        zero_point=zero,
        packing=dense(bits, axis=-2),
        zero_packing=dense(bits),
        zero_offset=offset,
        # Under "dynamic" single modules may be asymmetric.
        symmetric_key="sym" if config.get("sym") is True and not config.get("dynamic") else "",
        group_index=index,
        transposed=True,
    )


LAYOUT = Layout(
    name="gptq",
    title="that of GPTQ: qweight, qzeros, scales, g_idx",
    loaders="transformers with GPTQModel; by their documentation (untested): vLLM, SGLang",
    decode=decode,
    methods=("gptq",),
)
