"""AutoAWQ (GEMM): unsigned integers of 4 bits with zero points.

Of a weight [outputs, inputs], `qweight` is I32 [inputs, outputs / 8], `qzeros` I32
[groups, outputs / 8], `scales` F16 [groups, outputs]; x = scale * (code - zero). The nibbles of a
word, from the lowest on, are those of outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight.
Source: github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py, dequantize_gemm.
"""

from collections.abc import Mapping
from typing import Any

from qtoolkit.checkpoints._tensors import Entry
from qtoolkit.checkpoints.layouts._encoding import Encoding, Packing
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import FLOAT_SCALES, HIGH_PRECISION, Layout, block_format
from qtoolkit.formats import UINT4

_PACKED = Packing(32, order=(0, 4, 1, 5, 2, 6, 3, 7))


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    if config and str(config.get("version") or "gemm").lower() != "gemm":
        raise headers.config_error("version", config["version"], "gemm", "AutoAWQ")
    encodings = {}
    for name, entry in headers.items():
        if not f".{name}".endswith(".qweight"):
            continue
        encoding = _decode_weight(config, headers, entry)
        if encoding is not None:
            encodings[encoding.name] = encoding
        elif config:
            headers.check(name, ("I32",))
            zero = headers.check(entry_beside(name, "qzeros"), ("I32",))
            scale = headers.check(entry_beside(name, "scales"), FLOAT_SCALES)
            what = (
                f"{list(entry.shape)}, scales {list(scale.shape)}, qzeros {list(zero.shape)}, "
                "expected [inputs, outputs / 8], [groups, outputs] and [groups, outputs / 8] in "
                "the groups of config.json"
            )
            raise headers.error(name, what, "AutoAWQ")
    return encodings


def _decode_weight(config: Mapping[str, Any], headers: Headers, codes: Entry) -> Encoding | None:
    """How a weight is stored; None where entries have not the shapes of this layout."""
    scale = headers.get(entry_beside(codes.name, "scales"))
    zero = headers.get(entry_beside(codes.name, "qzeros"))
    if scale is None or zero is None or len(codes.shape) != 2 or len(scale.shape) != 2:
        return None
    (inputs, words), (groups, outputs) = codes.shape, scale.shape
    is_packed = codes.dtype == zero.dtype == "I32" and scale.dtype in FLOAT_SCALES
    fits = words * 8 == outputs and zero.shape == (groups, words)
    if not (is_packed and fits and groups) or inputs % groups:
        return None
    length = inputs // groups  # AutoAWQ makes whole groups only
    wanted = config.get("group_size", config.get("q_group_size", length))
    if length != (inputs if wanted == -1 else wanted):
        return None
    return Encoding(
        name=entry_beside(codes.name, "weight"),
        shape=(outputs, inputs),
        spec=block_format(
            element=UINT4,
            block=(length,),
            axes=(0,),
            scale=HIGH_PRECISION[scale.dtype],
            zero_point=True,
        ),
        lengths=(length, 1),
        codes=codes,
        scale=scale,
        zero_point=zero,
        packing=_PACKED,
        zero_packing=_PACKED,
        symmetric_key="zero_point" if config.get("zero_point") is False else "",
        transposed=True,
    )


LAYOUT = Layout(
    name="awq",
    title="that of AutoAWQ (GEMM): qweight, qzeros, scales",
    loaders="transformers with GPTQModel; by their documentation (untested): vLLM, SGLang",
    decode=decode,
    methods=("awq",),
)
