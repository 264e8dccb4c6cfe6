"""Reads quantized arrays that `save` wrote, as the file's metadata describes them.

The metadata is needed since blocks may have any size, and the shape of the scales does not tell it:
1000 columns with 8 scales may be blocks of 125 or of 128. JAX is imported only if a file has such
arrays.
"""

import dataclasses
import json
import math
from collections.abc import Collection, Container, Mapping

from qtoolkit.checkpoints._header import CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._stored import Entry, Stored
from qtoolkit.formats import BlockFormat

ARRAYS_KEY = "qtoolkit_arrays"  # of the metadata
PARTS = ("scale", "tensor_scale", "zero_point")

Matrices = tuple[tuple[int, int, int], tuple[int, int]]


def saved_arrays(
    metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo], where: str
) -> tuple[dict[str, Stored], set[str]]:
    """The stored weights of a file, and the names of all tensors that belong to them.

    Packed arrays, arrays with elements of more than 8 bits, and arrays whose scales have a format
    without a dtype are no stored weights: their tensors are copied as they are.

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
            if about["packed_size"] is None and _is_read(spec):
                found[name] = _stored(tensors[name], spec, tuple(about["lengths"]), entries, where)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise not_described(where, error) from error
    return found, names


def copied_parts(
    metadata: Mapping[str, str], names: Collection[str], stored: Container[str]
) -> set[str]:
    """Codes and scales of the arrays that are described but not `stored`: numbers only together."""
    try:
        about = json.loads(metadata.get(ARRAYS_KEY, "{}"))
    except (ValueError, RecursionError):
        return set()
    found: set[str] = set()
    for name in about if isinstance(about, dict) else ():
        parts = {f"{name}_{part}" for part in PARTS} & set(names)
        if name not in stored and parts:
            found |= {name, *parts}
    return found


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
    spec: BlockFormat,
    lengths: tuple[int, ...],
    entries: Mapping[str, TensorInfo | None],
    where: str,
) -> Stored:
    found = _matrices(codes.shape, lengths)
    if found is None or spec.zero_point:
        raise CheckpointError(
            f"{where}: tensor {shown(codes.name)}: a QArray of {shown(str(spec))} with shape "
            f"{list(codes.shape)}, which the commands do not read; dequantize it in Python: "
            "qtoolkit.checkpoints.load(FILE)[NAME].dequantize()"
        )
    matrices, block = found
    scale, second, _ = (
        None if info is None else Entry(info.name, info.dtype, info.shape)
        for info in (entries[part] for part in PARTS)
    )
    return Stored(
        name=codes.name,
        shape=codes.shape,
        matrices=matrices,
        spec=_of_matrix(spec, block),
        codes=Entry(codes.name, codes.dtype, codes.shape),
        scale=scale,
        second=second,
    )


def _matrices(shape: tuple[int, ...], lengths: tuple[int, ...]) -> Matrices | None:
    """An array seen as matrices: their count, rows and columns, and the lengths of their blocks.

    Neighbouring axes are merged if blocks have length 1 along both, or the full length along both.
    None if more axes than those of a stack of matrices remain.
    """
    axes: list[tuple[int, int]] = []
    for n, length in zip(shape, lengths, strict=True):
        if n == 1:
            continue
        last, block = axes[-1] if axes else (0, 0)
        if axes and (block == length == 1 or (block == last and length == n)):
            axes[-1] = (last * n, block * length)
        else:
            axes.append((n, length))
    axes = [(1, 1)] * (2 - len(axes)) + axes
    count = math.prod(n for n, _ in axes[:-2])
    if any(length != 1 for _, length in axes[:-2]):
        return None
    (rows, height), (columns, width) = axes[-2:]
    if height == width == 1 and rows > 1:  # each element has a scale
        return None
    return (count, rows, columns), (height, width)


def _of_matrix(spec: BlockFormat, block: tuple[int, int]) -> BlockFormat:
    """`spec` with the blocks of a matrix."""
    if spec.scale is None:
        return spec
    if block == (1, 1):  # a matrix of one row, with a scale for each channel
        return dataclasses.replace(spec, block=(1,), axes=(1,), other_axes=None)
    return dataclasses.replace(spec, block=block, axes=(0, 1), other_axes=1)
