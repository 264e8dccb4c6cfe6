"""bitsandbytes: tables of 16 values (NF4, FP4) in blocks of the flat weight, and int8 by rows.

* 4 bits: `weight` has two codes a byte, the first one in the high bits, in any dtype. Beside it are
  `weight.absmax`, a scale for each block; `weight.quant_map`, the table; and JSON in
  `weight.quant_state.bitsandbytes__nf4` or `__fp4`: shape, blocksize. Nested: `absmax` is U8, codes
  of the table `nested_quant_map` in blocks with `nested_absmax`, to which `nested_offset` is added.
* 8 bits: `weight` is I8, `SCB` F32 [outputs]; x = code * SCB / 127.

Source: github.com/bitsandbytes-foundation/bitsandbytes, functional.py, QuantState, dequantize_4bit;
transformers, integrations/bitsandbytes.py, dequantize_bnb_weight.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import Entry, json_object
from qtoolkit.checkpoints.layouts._encoding import HIGH_NIBBLES, Encoding, ReadEntry
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import Layout, by_channel
from qtoolkit.formats import INT8, NF4, NF4_BLOCK64, UINT4, BlockFormat

METHOD = "bitsandbytes"
_STATE = ".quant_state.bitsandbytes__"
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # twelfths; the other sign follows
_TABLES = {
    "nf4": np.asarray(NF4.values_by_code, np.float32),
    "fp4": np.asarray([*_FP4, *(-value for value in _FP4)], np.float32) / np.float32(12),
}


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    encodings = {}
    for name in headers:
        weight, state, table = name.rpartition(_STATE)
        if state:
            encodings[weight] = _of_table(headers, weight, table)
        elif name.rpartition(".")[2] == "SCB":
            weight = entry_beside(name, "weight")
            if config or weight in headers:
                encodings[weight] = _of_rows(headers, weight)
    return encodings


def _of_rows(headers: Headers, name: str) -> Encoding:
    codes = headers.check(name, ("I8",))
    scale = headers.check(entry_beside(name, "SCB"), ("F32",))
    if len(codes.shape) != 2 or scale.shape != codes.shape[:1]:
        raise headers.error(scale.name, f"{scale}, expected one for each row of {codes}", METHOD)
    order = headers.get(entry_beside(name, "weight_format"))
    if order is not None and headers.read(order.name).any():
        raise headers.error(order.name, "codes in the order of a GPU, expected row", METHOD)
    return Encoding(
        name=name,
        shape=codes.shape,
        spec=by_channel(INT8),
        lengths=(1, codes.shape[1]),
        codes=codes,
        scale=scale,
        others=() if order is None else (order,),
        scale_of=lambda encoding, read: read(scale).view(np.float32) * np.float32(1 / 127),
    )


def _of_table(headers: Headers, name: str, table: str) -> Encoding:
    state_name = f"{name}{_STATE}{table}"
    state = json_object(headers.read(state_name).tobytes())
    shape, length = tuple(state.get("shape") or ()), _length(state, "blocksize")
    codes = headers.check(name, ("U8", "I8", "F32", "BF16", "F16"))
    scale = headers.check(f"{name}.absmax", ("F32", "U8"))
    count = math.prod(shape)
    is_whole = length and count and shape[-1] % 2 == 0
    is_whole = is_whole and state.get("quant_type") == table
    fits = is_whole and codes.nbytes == count // 2 and scale.shape == (-(-count // length),)
    if not fits or table not in _TABLES or (codes.shape[0] == 1 < codes.shape[-1]):
        what = f"{codes} and absmax {scale} of {state}, expected two codes of nf4 or fp4 a byte"
        raise headers.error(name, f"{what}, in one column, and a scale for each block", METHOD)
    values = headers.check(f"{name}.quant_map", ("F32",))
    if not np.allclose(headers.read(values.name), _TABLES[table], 0, 1e-6):
        raise headers.error(values.name, f"other values than those of {table}", METHOD)
    nested = _nested(headers, name, scale, state)
    others = (headers[state_name], values, *nested)

    def scales(read: ReadEntry) -> np.ndarray:
        return _scales(scale, nested, state, read)

    encoding = Encoding(
        name=name,
        shape=shape,
        spec=BlockFormat.tensor(UINT4, scale=None),
        lengths=shape,
        codes=codes,
        packing=HIGH_NIBBLES,
        others=(*others, scale),
        finish=lambda encoding, q, read: _scaled(
            _TABLES[table][q.astype(np.uint8)], scales(read), length
        ),
    )
    if table == "fp4" or shape[-1] % length:  # no format of ours; blocks that begin within a row
        return encoding
    return dataclasses.replace(
        encoding,
        spec=dataclasses.replace(NF4_BLOCK64, block=(length,)),
        lengths=(*(1 for _ in shape[:-1]), length),
        scale=scale,
        others=others,
        scale_of=(lambda encoding, read: scales(read)) if nested else None,
        finish=None,
    )


def _length(state: Mapping[str, Any], key: str) -> int:
    length = state.get(key)
    return length if type(length) is int and length > 0 else 0


def _nested(
    headers: Headers, name: str, scale: Entry, state: Mapping[str, Any]
) -> tuple[Entry, ...]:
    """The entries of which scales are made that are codes themselves; () where they are numbers."""
    if scale.dtype == "F32":
        return ()
    absmax = headers.check(f"{name}.nested_absmax", ("F32",))
    table = headers.check(f"{name}.nested_quant_map", ("F32",))
    length, has_offset = _length(state, "nested_blocksize"), "nested_offset" in state
    if (
        not length
        or not has_offset
        or absmax.shape != (-(-scale.shape[0] // length),)
        or table.shape != (256,)
    ):
        what = f"{absmax} and {table} of {scale} and {state}"
        raise headers.error(absmax.name, f"{what}, expected one for each block", METHOD)
    return absmax, table


def _scales(
    scale: Entry, nested: tuple[Entry, ...], state: Mapping[str, Any], read: ReadEntry
) -> np.ndarray:
    if not nested:
        return read(scale).view(np.float32)
    absmax, table = (read(entry).view(np.float32) for entry in nested)
    codes = read(scale)
    blocks = np.arange(len(codes)) // state["nested_blocksize"]
    return table[codes] * absmax[blocks] + np.float32(state["nested_offset"])


def _scaled(values: np.ndarray, scales: np.ndarray, length: int) -> np.ndarray:
    spread = np.repeat(scales, length)[: values.size]
    return (values.reshape(-1) * spread).reshape(values.shape)


LAYOUT = Layout(
    name="bitsandbytes",
    title="that of bitsandbytes: absmax and quant_state (NF4, FP4), or SCB (int8)",
    loaders="transformers with bitsandbytes; by their documentation (untested): vLLM",
    decode=decode,
    methods=(METHOD, "bitsandbytes_4bit", "bitsandbytes_8bit"),
)
