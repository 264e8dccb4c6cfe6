"""Quantized arrays that `save` wrote, as the metadata of the file describes them.

The metadata is needed because blocks may have any size, which the shape of the scales does not
tell: 1000 columns with 8 scales may have blocks of 125 or of 128. JAX is imported only if a file
has such arrays.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Collection, Container, Mapping

from qtoolkit.checkpoints._tensors import CheckpointError, Entry, json_object, shown
from qtoolkit.checkpoints.layouts._encoding import Encoding, Packing, merged_matrices
from qtoolkit.checkpoints.layouts._headers import Headers
from qtoolkit.formats import BlockFormat

ARRAYS_KEY = "qtoolkit_arrays"  # of the metadata
FIELDS = ("scale", "tensor_scale", "zero_point")
FACTORS, ROTATION = "factors", "rotation"  # in the description of an array that has such


def saved_arrays(headers: Headers) -> tuple[dict[str, Encoding], set[str]]:
    """How the arrays of a file are stored, and the names of all tensors that belong to them.

    Some arrays are skipped, and their tensors are copied as they are: those with elements of more
    than 8 bits, and those whose scales have a format without a dtype. Packed arrays are also
    skipped if they have zero points, a last axis of one element, or blocks that are not those of a
    stack of matrices.

    Raises:
      CheckpointError: The metadata does not describe the tensors, or an array cannot be read: its
        inputs have factors or a rotation, for which no layout has a place.
    """
    if ARRAYS_KEY not in headers.metadata:
        return {}, set()
    from qtoolkit.products.internal import spec_from_json

    encodings: dict[str, Encoding] = {}
    names: set[str] = set()
    try:
        for name, description in json.loads(headers.metadata[ARRAYS_KEY]).items():
            spec = spec_from_json(description["spec"])
            entries = {part: headers.get(f"{name}_{part}") for part in FIELDS}
            if FACTORS in description or ROTATION in description:
                what = FACTORS if FACTORS in description else "a rotation"
                raise CheckpointError(
                    f"{headers.path}: tensor {shown(name)}: a QArray whose matmul applies {what} "
                    "to its inputs, for which no layout has a place, expected none; quantize with "
                    "method='gptq', or dequantize it in Python: "
                    "qtoolkit.checkpoints.load(FILE)[NAME].dequantize()"
                )
            names |= {name, *(info.name for info in entries.values() if info is not None)}
            if spec.element.bits > 8 or (spec.scale is not None and spec.scale.dtype is None):
                continue
            size, lengths = description["packed_size"], tuple(description["lengths"])
            encoding = _encoding(headers[name], size, spec, lengths, entries)
            if encoding is not None:
                encodings[name] = encoding
            elif size is None:
                raise CheckpointError(
                    f"{headers.path}: tensor {shown(name)}: a QArray of {shown(str(spec))} with "
                    f"shape {list(headers[name].shape)}, which the commands do not read; "
                    "dequantize it in Python: qtoolkit.checkpoints.load(FILE)[NAME].dequantize()"
                )
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise not_described(headers.path, error) from error
    return encodings, names


def undecoded_parts(
    metadata: Mapping[str, str], names: Collection[str], stored: Container[str]
) -> set[str]:
    """The names of codes and scales of arrays that the metadata describes, but `stored` lacks.

    Neither has a meaning without the other.
    """
    found: set[str] = set()
    for name in json_object(metadata.get(ARRAYS_KEY, "")):
        parts = {part for field in FIELDS if (part := f"{name}_{field}") in names}
        if name not in stored and parts:
            found |= {name, *parts}
    return found


def remaining_arrays(metadata: Mapping[str, str], changed: Collection[str]) -> dict[str, str]:
    """The metadata without the descriptions of arrays of which a tensor has changed."""
    description = json_object(metadata.get(ARRAYS_KEY, ""))
    unchanged = {
        name: one
        for name, one in description.items()
        if name not in changed and not any(f"{name}_{part}" in changed for part in FIELDS)
    }
    others = {key: text for key, text in metadata.items() if key != ARRAYS_KEY}
    return others | ({ARRAYS_KEY: json.dumps(unchanged, sort_keys=True)} if unchanged else {})


def not_described(where: object, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{where}: the metadata {ARRAYS_KEY!r} does not describe the tensors of the file "
        f"({type(error).__name__}: {shown(str(error))}), expected what `save` writes; save the "
        "model again"
    )


def _encoding(
    codes: Entry,
    packed_size: int | None,
    spec: BlockFormat,
    lengths: tuple[int, ...],
    others: Mapping[str, Entry | None],
) -> Encoding | None:
    """How an array is stored; None if the commands do not read it: see `saved_arrays`.

    `packed_size` is the length of the last axis before codes were packed along it; None: they are
    not. `others` are the tensors of the array besides the codes, by the names in `FIELDS`.
    """
    shape, bits = codes.shape, spec.element.bits
    packing = None
    if packed_size is not None:
        if type(packed_size) is not int or packed_size < 0:
            raise ValueError(f"packed_size is {packed_size!r}")
        packing = Packing(24 if bits == 6 else 8)  # as `qtoolkit.pack` does
        row = -(-packed_size * bits // packing.word) * packing.word // 8
        if codes.dtype != "U8" or codes.shape[-1:] != (row,):
            raise ValueError(f"{packed_size} codes of {bits} bits in {list(codes.shape)}")
        shape = (*codes.shape[:-1], packed_size)
    lengths = (1,) * (len(shape) - len(lengths)) + lengths  # `vmap` has added axes in front
    tensor_scale = others["tensor_scale"]
    batch = () if tensor_scale is None else tensor_scale.shape  # the first axes
    unmerged = {len(batch)} if packed_size is None else {len(batch), len(shape) - 1}
    merged = (
        None if spec.zero_point or packed_size == 1 else merged_matrices(shape, lengths, unmerged)
    )
    if merged is None or math.prod(batch) not in (1, merged[0][0]):
        return None
    return Encoding(
        name=codes.name,
        shape=shape,
        spec=_spec_of_matrix(spec, merged[0][1:], merged[1]),
        lengths=lengths,
        codes=codes,
        scale=others["scale"],
        tensor_scale=tensor_scale,
        packing=packing,
    )


def _spec_of_matrix(
    spec: BlockFormat, shape: tuple[int, int], block: tuple[int, int]
) -> BlockFormat:
    """`spec` with the blocks of a matrix; unchanged, with its name, if it has these already."""
    if spec.scale is None:
        return spec
    with contextlib.suppress(ValueError):  # raised for blocks along axes that a matrix lacks
        if spec.block_lengths(shape) == block:
            return spec
    if block == (1, 1):  # a matrix of one row, with a scale for each channel
        return dataclasses.replace(spec, block=(1,), axes=(1,), other_axes=None)
    return dataclasses.replace(spec, block=block, axes=(0, 1), other_axes=1)
