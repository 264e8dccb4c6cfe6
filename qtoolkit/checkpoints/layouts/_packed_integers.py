"""Integers of 2 to 8 bits in words of 32 bits: pack-quantized of compressed-tensors.

`weight_packed` is I32 [outputs, words]. It stores code + 2**(bits - 1), the first code in the low
bits of a word. Since version 0.18 of the package a code may begin in one word and end in the next;
before, a word held 32 // bits whole codes. The two differ for 3, 5, 6 and 7 bits.
`weight_zero_point` is packed in the same way, but along the outputs: I32 [words, groups]. With one
scale for the whole tensor it is one I8. x = scale * (code - zero point). Some checkpoints have
`weight_g_idx`, the group of each input.
Source: compressed-tensors, compressors/pack_quantized/base.py and helpers.py.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qtoolkit.checkpoints._tensors import Entry
from qtoolkit.checkpoints.layouts._encoding import WORDS, Encoding, constant, dense
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import FLOAT_SCALES, HIGH_PRECISION, block_format
from qtoolkit.formats import IntFormat
from qtoolkit.formats import format as resolve

SHAPE = "weight_shape"
_PACKAGE = "compressed-tensors"
_INTEGERS = {bits: resolve(f"int{bits}") for bits in range(2, 9)}


class Width(NamedTuple):
    """What the config says about packed integers.

    Attributes:
      bits: The bits of a code.
      length: The elements of a group; None: one scale for each row, or for the whole tensor.
      is_dense: Whether a code may begin in one word and end in the next. Used only if `length` is
        None; with groups, the number of words tells it.
    """

    bits: int
    length: int | None
    is_dense: bool = True

    def __str__(self) -> str:
        groups = f"in groups of {self.length}" if self.length else "with a scale for each row"
        return f"{self.bits} bits {groups}"


# To try if there is no config. `decode_weights` checks the result by weight_shape.
_WIDTHS = (Width(4, 128), Width(4, 32), Width(8, 128))


def decode_integers(headers: Headers, codes: Entry, widths: Sequence[Width]) -> Encoding:
    """Reads packed integers as the first of `widths` that fits the scales."""
    scale = headers.check(entry_beside(codes.name, "weight_scale"), FLOAT_SCALES)
    fitting = (_of_width(headers, codes, scale, width) for width in widths)
    encoding = next((encoding for encoding in fitting if encoding is not None), None)
    if encoding is None:
        what = f"{codes.shape[1]} words a row and scales {list(scale.shape)}"
        what += f", expected {' or '.join(map(str, widths))}, as config.json says"
        raise headers.error(codes.name, what, _PACKAGE)
    shape_name = entry_beside(codes.name, SHAPE)
    if shape_name not in headers:
        return encoding
    numbers = headers.check(shape_name, ("I64", "I32"))
    if numbers.shape != (2,):
        what = f"{list(numbers.shape)}, expected two numbers, rows and columns"
        raise headers.error(numbers.name, what, _PACKAGE)
    expected = constant(numbers.name, numbers.dtype, encoding.shape, (2,))
    return dataclasses.replace(encoding, constants=(expected,))


def _of_width(headers: Headers, codes: Entry, scale: Entry, width: Width) -> Encoding | None:
    """How the weight is stored if it has these bits and groups; None if its shapes contradict."""
    bits, length, is_dense = width
    rows, words = codes.shape
    if length is None:
        # As many columns as fit into the words. An entry weight_shape must agree.
        columns = words * 32 // bits if is_dense else words * (32 // bits)
        lengths = (rows, columns) if scale.shape in ((), (1,)) else (1, columns)
        fields: dict[str, Any] = {"other_axes": None}
        if scale.shape in ((rows, 1), (rows,)):
            fields |= {"block": (1,), "axes": (0,)}
        elif scale.shape not in ((), (1,)):
            return None
    else:
        if scale.shape[:1] != (rows,) or len(scale.shape) != 2:
            return None
        columns, lengths, fields = scale.shape[1] * length, (1, length), {"block": (length,)}
        if words not in (-(-columns * bits // 32), -(-columns // (32 // bits))):
            return None
        is_dense = words == -(-columns * bits // 32)
    return Encoding(
        name=entry_beside(codes.name, "weight"),
        shape=(rows, columns),
        spec=block_format(element=_INTEGERS[bits], scale=HIGH_PRECISION[scale.dtype], **fields),
        lengths=lengths,
        codes=codes,
        scale=scale,
        packing=dense(bits, biased=True) if is_dense and 32 % bits else WORDS,
    )


def with_group_index(headers: Headers, encoding: Encoding) -> Encoding:
    """The encoding with the group of each input, if inputs were sorted by activations."""
    name = entry_beside(encoding.name, "weight_g_idx")
    if name not in headers:
        return encoding
    index = headers.check(name, ("I32", "I64"))
    if index.shape != encoding.shape[1:] or encoding.lengths[0] != 1:
        what = f"{list(index.shape)}, expected the group of each input of {list(encoding.shape)}"
        raise headers.error(name, what, _PACKAGE)
    return dataclasses.replace(encoding, group_index=index)


def with_zero_point(headers: Headers, encoding: Encoding, is_symmetric: Any) -> Encoding:
    """The encoding with the zero points of its module, if it has any or the config says so.

    `is_symmetric` is what the config says of all weights; None if it says nothing of all of them.
    """
    name = entry_beside(encoding.name, "weight_zero_point")
    if name not in headers and is_symmetric is not False:
        return encoding
    zero = headers.check(name, ("I32", "I8"))
    assert encoding.scale is not None
    (rows, *_), scale, bits = encoding.shape, encoding.scale.shape, encoding.spec.element.bits
    is_packed = zero.dtype == "I32" and encoding.packing is not None
    packing, wanted = None, scale
    if is_packed and encoding.packing is not None:
        packing = dataclasses.replace(encoding.packing, axis=-2)
        whole = packing.word == 32
        words = -(-rows // (32 // bits)) if whole else -(-rows * bits // 32)
        wanted = (words, *(scale[1:] or (1,)))
    is_integer = isinstance(encoding.spec.element, IntFormat)
    if zero.shape != wanted or not is_integer or is_packed != (zero.dtype == "I32"):
        what = f"{zero}, expected a zero point for each scale {list(scale)} of integers, I32 in"
        raise headers.error(name, f"{what} words or I8", _PACKAGE)
    return dataclasses.replace(
        encoding,
        spec=dataclasses.replace(encoding.spec, zero_point=True),
        zero_point=zero,
        zero_packing=packing,
        symmetric_key="symmetric" if is_symmetric is True else "",
    )


def widths_of(
    headers: Headers, groups: Sequence[Mapping[str, Any]], version: object
) -> Sequence[Width]:
    """The widths of packed integers, from the "weights" of the groups of the config."""
    # Shapes alone do not tell the widths: a row of 16 words with one scale may be 128 codes of 4
    # bits in a group of 128, or 64 codes of 8 bits in a group of 64.
    minor = re.match(r"0\.(\d+)", str(version))
    is_dense = minor is None or int(minor[1]) >= 18
    widths: list[Width] = []
    for weights in groups:
        bits, length = weights.get("num_bits"), weights.get("group_size")
        if weights.get("type") != "int" or type(bits) is not int or bits not in _INTEGERS:
            continue
        if length in (None, -1):
            widths.append(Width(bits, None, is_dense))
        elif type(length) is int and length > 0:
            widths.append(Width(bits, length))
        else:
            what = "a length from 1 up"
            raise headers.config_error("group_size", length, what, _PACKAGE)
    return widths or _WIDTHS
