"""HQQ: integers of 1 to 8 bits with zero points that are floats.

`W_q` has the codes of a weight that is seen as a matrix of groups, in rows if `axis` is 1, in
columns if it is 0; a byte, or a word with ten codes of 3 bits, holds elements that are a part of
the whole weight apart, the first one in the high bits. `scale` and `zero` have one for each group,
x = (code - zero) * scale; other entries are numbers and texts in tensors: shape, nbits, packing.
Source: github.com/dropbox/hqq, core/quantize.py, Quantizer.dequantize, and core/bitpack.py.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints.layouts._encoding import (
    HIGH_NIBBLES,
    Encoding,
    Packing,
    ReadEntry,
    floats,
)
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import FLOAT_SCALES, Layout
from qtoolkit.formats import BlockFormat
from qtoolkit.formats import format as resolve

METHOD, CODES = "hqq", "W_q"
# By packing: bits of a code, and how they are packed.
_PACKINGS: dict[str, tuple[int, Packing | None]] = {
    "8bit_u8": (8, None),
    "4bit_u8": (4, dataclasses.replace(HIGH_NIBBLES, axis=0)),
    "3bit_32": (3, Packing(32, order=tuple(range(9, -1, -1)), axis=0)),
    "2bit_u8": (2, Packing(8, order=(3, 2, 1, 0), axis=0)),
    "1bit_u8": (1, Packing(8, order=tuple(range(7, -1, -1)), axis=0)),
}
# Entries that say how a weight was quantized, or how the program computes with it.
_TEXTS = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    names = [name for name in headers if name.rpartition(".")[2] == CODES]
    names = [name for name in names if config or entry_beside(name, "packing") in headers]
    return {entry_beside(name, "weight"): _decode_weight(headers, name) for name in names}


def _decode_weight(headers: Headers, name: str) -> Encoding:
    codes = headers[name]
    for text in ("shape", "packing"):
        headers.check(entry_beside(name, text), ("I64", "I32", "U8"))
    scale = headers.check(entry_beside(name, "scale"), FLOAT_SCALES)
    zero = headers.check(entry_beside(name, "zero"), FLOAT_SCALES)
    shape = tuple(headers.read(entry_beside(name, "shape")).reshape(-1).tolist())
    words = headers.read(entry_beside(name, "packing")).tobytes().decode("ascii", "replace")
    bits, packing = _PACKINGS.get(words, (0, None))
    size, groups = math.prod(shape), max(math.prod(scale.shape), 1)
    held = bits and codes.nbytes * 8 // (32 if bits == 3 else 8) * (10 if bits == 3 else 8 // bits)
    fits = held == size or (bits == 3 and size <= held < size + 10 * max(codes.shape[-1:]))
    in_rows = scale.shape[-1:] in ((), (1,))
    axis = headers.get(entry_beside(name, "axis"))
    if axis is not None and groups > 1 and bool(headers.read(axis.name).item()) != in_rows:
        raise headers.error(axis.name, f"other groups than those of scale {scale}", "HQQ")
    is_by_group = scale.shape == zero.shape and sorted(scale.shape)[:-1] in ([], [1])
    if not (size and bits and fits and is_by_group) or size % groups:
        what = f"{codes} packed as {words!r}, scale {scale}, zero {zero}, shape {list(shape)}"
        raise headers.error(name, f"{what}, expected {', '.join(_PACKINGS)} in groups", "HQQ")
    texts = (entry_beside(name, text) for text in _TEXTS)

    def finish(encoding: Encoding, values: np.ndarray, read: ReadEntry) -> np.ndarray:
        scales, zeros = floats(scale, read), floats(zero, read)
        matrix = values.reshape((groups, -1) if in_rows else (-1, groups))
        return ((matrix - zeros) * scales).reshape(shape)

    return Encoding(
        name=entry_beside(name, "weight"),
        shape=shape,
        spec=BlockFormat.tensor(resolve(f"uint{bits}"), scale=None),
        lengths=shape,
        codes=codes,
        packing=packing,
        others=(scale, zero, *(headers[text] for text in texts if text in headers)),
        finish=finish,
    )


LAYOUT = Layout(
    name="hqq",
    title="that of HQQ: W_q, scale, zero",
    loaders="HQQ; transformers before version 5",
    decode=decode,
    methods=(METHOD,),
)
