"""Reads quantized arrays that `save` wrote, as the file's metadata describes them.

The metadata is needed since blocks may have any size, and the shape of the scales does not tell it:
1000 columns with 8 scales may be blocks of 125 or of 128. JAX is imported only if a file has such
arrays.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Collection, Container, Mapping
from typing import Any

from qtoolkit.checkpoints._header import CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._stored import Entry, Packing, Stored
from qtoolkit.formats import BlockFormat

ARRAYS_KEY = "qtoolkit_arrays"  # of the metadata
PARTS = ("scale", "tensor_scale", "zero_point")


def saved_arrays(
    metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo], where: str
) -> tuple[dict[str, Stored], set[str]]:
    """The stored weights of a file, and the names of all tensors that belong to them.

    Arrays with elements of more than 8 bits, and those whose scales have a format without a dtype,
    are no stored weights: their tensors are copied as they are. So are packed ones that have zero
    points, a last axis of one element, or blocks that are not those of a stack of matrices.

    Raises:
      CheckpointError: The metadata does not describe the tensors, or an array cannot be read.
    """
    if ARRAYS_KEY not in metadata:
        return {}, set()
    from qtoolkit.products.internal import spec_from_json

    found: dict[str, Stored] = {}
    names: set[str] = set()
    try:
        for name, about in json.loads(metadata[ARRAYS_KEY]).items():
            spec = spec_from_json(about["spec"])
            entries = {part: tensors.get(f"{name}_{part}") for part in PARTS}
            names |= {name, *(info.name for info in entries.values() if info is not None)}
            if not _is_read(spec):
                continue
            size, lengths = about["packed_size"], tuple(about["lengths"])
            stored = _stored(tensors[name], size, spec, lengths, entries)
            if stored is not None:
                found[name] = stored
            elif size is None:
                raise CheckpointError(
                    f"{where}: tensor {shown(name)}: a QArray of {shown(str(spec))} with shape "
                    f"{list(tensors[name].shape)}, which the commands do not read; dequantize it "
                    "in Python: qtoolkit.checkpoints.load(FILE)[NAME].dequantize()"
                )
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise not_described(where, error) from error
    return found, names


def copied_parts(
    metadata: Mapping[str, str], names: Collection[str], stored: Container[str]
) -> set[str]:
    """Codes and scales of the arrays that are described but not `stored`: numbers only together."""
    found: set[str] = set()
    for name in _described(metadata) or ():
        parts = {f"{name}_{part}" for part in PARTS} & set(names)
        if name not in stored and parts:
            found |= {name, *parts}
    return found


def remaining_arrays(metadata: Mapping[str, str], changed: Collection[str]) -> dict[str, str]:
    """The metadata, describing no quantized array any more of which a tensor has changed."""
    about = _described(metadata)
    if about is None:
        return dict(metadata)
    kept = {
        name: one
        for name, one in about.items()
        if name not in changed and not any(f"{name}_{part}" in changed for part in PARTS)
    }
    others = {key: text for key, text in metadata.items() if key != ARRAYS_KEY}
    return others | ({ARRAYS_KEY: json.dumps(kept, sort_keys=True)} if kept else {})


def _described(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """What describes each array; None where nothing does that can be read."""
    try:
        about = json.loads(metadata.get(ARRAYS_KEY, "null"))
    except (ValueError, RecursionError):
        return None
    return about if isinstance(about, dict) else None


def not_described(where: object, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{where}: the metadata {ARRAYS_KEY!r} does not describe the tensors of the file "
        f"({type(error).__name__}: {shown(str(error))}), expected what `save` writes; save the "
        "model again"
    )


def _is_read(spec: BlockFormat) -> bool:
    return spec.element.bits <= 8 and (spec.scale is None or spec.scale.dtype is not None)


def _stored(
    codes: TensorInfo,
    packed_size: int | None,
    spec: BlockFormat,
    lengths: tuple[int, ...],
    entries: Mapping[str, TensorInfo | None],
) -> Stored | None:
    """How an array is stored; None if the commands do not read it: see `saved_arrays`.

    Args:
      codes: The tensor with the codes, packed along its last axis if there is a `packed_size`.
      packed_size: The length of the last axis where codes are packed, else None.
      spec, lengths: As a `QArray` has them.
      entries: Its other tensors, by their names in it.

    Raises:
      ValueError: The codes do not have the bytes of `packed_size` codes.
    """
    shape, bits = codes.shape, spec.element.bits
    packing: Packing = "bytes"
    if packed_size is not None:
        if type(packed_size) is not int or packed_size < 0:
            raise ValueError(f"packed_size is {packed_size!r}")
        unit = 24 if bits == 6 else 8
        row = -(-packed_size * bits // unit) * unit // 8
        if codes.dtype != "U8" or codes.shape[-1:] != (row,):
            raise ValueError(f"{packed_size} codes of {bits} bits in {list(codes.shape)}")
        shape = (*codes.shape[:-1], packed_size)
        packing = "nibbles" if bits == 4 and packed_size % 2 == 0 else "bits"
    lengths = (1,) * (len(shape) - len(lengths)) + lengths  # `vmap` has added axes in front
    scale, second, _ = (
        None if info is None else Entry(info.name, info.dtype, info.shape)
        for info in (entries[part] for part in PARTS)
    )
    batch = () if second is None else second.shape  # the first axes: a second scale for each index
    # Rows of packed codes end with whole bytes.
    apart = {len(batch)} if packed_size is None else {len(batch), len(shape) - 1}
    found = None if spec.zero_point or packed_size == 1 else _matrices(shape, lengths, apart)
    if found is None:
        return None
    matrices, block = found
    if math.prod(batch) not in (1, matrices[0]):
        return None
    return Stored(
        name=codes.name,
        shape=shape,
        matrices=matrices,
        spec=_of_matrix(spec, matrices[1:], block),
        codes=Entry(codes.name, codes.dtype, codes.shape),
        scale=scale,
        second=second,
        packing=packing,
    )


def _matrices(
    shape: tuple[int, ...], lengths: tuple[int, ...], apart: Collection[int]
) -> tuple[tuple[int, int, int], tuple[int, int]] | None:
    """An array seen as matrices: their count, rows and columns, and the lengths of their blocks.

    Neighbouring axes are merged if blocks have length 1 along both, or the full length along both.
    None if more axes than those of a stack of matrices remain.

    Args:
      shape, lengths: Those of the array and of its blocks.
      apart: Axes that are not merged with those before them.
    """
    axes: list[tuple[int, int]] = []
    is_apart = False
    for axis, (n, length) in enumerate(zip(shape, lengths, strict=True)):
        is_apart |= axis in apart
        if n == 1:
            continue
        last, block = axes[-1] if axes else (0, 0)
        is_whole = block == last and length == n
        if axes and not is_apart and (block == length == 1 or is_whole):
            axes[-1] = (last * n, block * length)
        else:
            axes.append((n, length))
        is_apart = False
    axes = [(1, 1)] * (2 - len(axes)) + axes
    count = math.prod(n for n, _ in axes[:-2])
    if any(length != 1 for _, length in axes[:-2]):
        return None
    (rows, height), (columns, width) = axes[-2:]
    if height == width == 1 and rows > 1:  # each element has a scale
        return None
    return (count, rows, columns), (height, width)


def _of_matrix(spec: BlockFormat, shape: tuple[int, int], block: tuple[int, int]) -> BlockFormat:
    """`spec` with the blocks of a matrix; itself, with its name, where it has these anyway."""
    if spec.scale is None:
        return spec
    with contextlib.suppress(ValueError):  # blocks along axes that a matrix has not
        if spec.block_lengths(shape) == block:
            return spec
    if block == (1, 1):  # a matrix of one row, with a scale for each channel
        return dataclasses.replace(spec, block=(1,), axes=(1,), other_axes=None)
    return dataclasses.replace(spec, block=block, axes=(0, 1), other_axes=1)
