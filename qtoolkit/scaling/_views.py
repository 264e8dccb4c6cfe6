"""Indexing, transposing and reshaping of quantized arrays, where every block stays one block.

An array has four kinds of leaves, and each operation says what becomes of each kind; `_view` puts
them together, with a format whose blocks are those of the result:

    codes                  an element each; packed along the last axis, which must stay whole then
    scale, zero point      a block each, [blocks along each axis]
    tensor scale           one, or one for each index of the first axes, as `vmap` makes them
    factors                an element each along the axes that a matmul sums over, 1 along others

A rotation mixes all elements of an axis, so that axis must stay whole, too.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.formats import BlockFormat

QArray: TypeAlias = Any  # of `_qarray`, which imports this file


def indexed(array: QArray, index: Any) -> QArray:
    if isinstance(index, jax.core.Tracer) or (hasattr(index, "dtype") and np.ndim(index)):
        return _rows(array, jnp.asarray(index))
    items = _index_of_each_axis(array, index)
    codes, scale, factors, lengths = [], [], [], []
    for axis, (item, count, length) in enumerate(
        zip(items, array.blocks.counts, array.blocks.lengths, strict=True)
    ):
        n = array.shape[axis]
        is_whole = isinstance(item, slice) and item.indices(n) == (0, n, 1)
        is_packed = array.packed_size is not None and axis == array.ndim - 1
        if not is_whole and (is_packed or 1 < length < n):
            raise IndexError(
                f"QArray: index {item} of axis {axis}, which "
                + ("is packed" if is_packed else f"has {count} blocks of {length}")
                + ", expected the whole axis, ':'; "
                + ("unpack() first" if is_packed else "dequantize() first")
            )
        if not is_whole and axis == _rotated_axis(array):
            raise IndexError(
                f"QArray: index {item} of axis {axis}, which is rotated, expected the whole axis, "
                "':'; dequantize() first"
            )
        codes.append(item)
        is_one = array.factors is not None and array.factors.shape[axis] == 1
        factors.append((0 if isinstance(item, int) else slice(None)) if is_one else item)
        # Blocks of one element are indexed as elements are; a single block is all that there is.
        scale.append(item if length == 1 else (0 if isinstance(item, int) else slice(None)))
        if isinstance(item, slice):
            remaining = len(range(*item.indices(n)))
            if not remaining:
                raise IndexError(f"QArray: index {item} of axis {axis} selects none of {n}")
            lengths.append(length if 1 <= length < n else remaining)
    return _view(
        array,
        array.codes[tuple(codes)],
        tuple(lengths),
        lambda blockwise: blockwise[tuple(scale)],
        lambda batchwise: batchwise[tuple(codes[: batchwise.ndim])],
        lambda factors_: factors_[tuple(factors)],
        [axis for axis, item in enumerate(items) if not isinstance(item, int)],
    )


def transposed(array: QArray, axes: tuple[Any, ...]) -> QArray:
    is_reversed = not axes or (len(axes) == 1 and axes[0] is None)
    order = tuple(range(array.ndim))[::-1] if is_reversed else _flat("transpose", axes)
    in_range = all(-array.ndim <= axis < array.ndim for axis in order)
    if not in_range or sorted(axis % array.ndim for axis in order) != list(range(array.ndim)):
        raise ValueError(
            f"QArray: transpose{order} of an array with {array.ndim} axes, expected each of them "
            "once"
        )
    order = tuple(axis % array.ndim for axis in order)
    batch = getattr(array.tensor_scale, "ndim", 0)
    if sorted(order[:batch]) != list(range(batch)):
        raise ValueError(
            f"QArray: transpose{order} mixes the first {batch} axes, each index of which has a "
            "tensor scale of its own, with others; dequantize() first"
        )
    if array.packed_size is not None and order[-1] != array.ndim - 1:
        raise ValueError(f"QArray: transpose{order} moves the packed last axis; unpack() first")
    return _view(
        array,
        array.codes.transpose(order),
        tuple(array.blocks.lengths[axis] for axis in order),
        lambda blockwise: blockwise.transpose(order),
        lambda batchwise: batchwise.transpose(order[:batch]),
        lambda factors: factors.transpose(order),
        order,
    )


def reshaped(array: QArray, shape: tuple[Any, ...]) -> QArray:
    new_shape = _flat("reshape", shape)
    others = math.prod(n for n in new_shape if n != -1)
    if new_shape.count(-1) == 1 and others and array.size % others == 0:
        new_shape = tuple(array.size // others if n == -1 else n for n in new_shape)
    if math.prod(new_shape) != array.size or min(new_shape, default=1) < 1:
        raise ValueError(
            f"QArray: reshape{new_shape} of an array of shape {array.shape}, expected lengths "
            f"whose product is {array.size}, one of which may be -1"
        )
    blocks = array.blocks.reshaped(new_shape)
    batch = getattr(array.tensor_scale, "ndim", 0)
    if new_shape[:batch] != array.shape[:batch]:
        raise ValueError(
            f"QArray: reshape{new_shape} of shape {array.shape} changes the first {batch} axes, "
            "each index of which has a tensor scale of its own; dequantize() first"
        )
    codes_shape = new_shape
    if array.packed_size is not None:
        if not new_shape or new_shape[-1] != array.shape[-1]:
            raise ValueError(
                f"QArray: reshape{new_shape} changes the packed last axis; unpack() first"
            )
        codes_shape = (*new_shape[:-1], array.codes.shape[-1])
    long = [axis for axis, n in enumerate(array.shape) if n > 1]
    if array.transform and [n for n in new_shape if n > 1] != [array.shape[a] for a in long]:
        raise ValueError(
            f"QArray: reshape{new_shape} of shape {array.shape} splits or merges axes of an array "
            "with factors or a rotation; dequantize() first"
        )
    remaining = iter(long)
    places = [next(remaining) if n > 1 else -1 for n in new_shape] if array.transform else []
    return _view(
        array,
        array.codes.reshape(codes_shape),
        blocks.lengths,
        lambda blockwise: blockwise.reshape(blocks.counts),
        lambda batchwise: batchwise,
        lambda factors: factors.reshape([factors.shape[a] if a >= 0 else 1 for a in places]),
        places,
    )


def _rows(array: QArray, rows: jax.Array) -> QArray:
    length = array.blocks.lengths[0] if array.shape else 0
    is_one_block = length > 1 and length == array.shape[0] and rows.ndim <= 1
    fits = (length == 1 or is_one_block) and rows.size and _rotated_axis(array) != 0
    fits = fits and not (array.ndim == 1 and array.packed_size is not None)
    if not fits or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise IndexError(
            f"QArray: {rows.dtype}{list(rows.shape)} as index, expected integers and a first "
            f"axis that no block crosses; this one is {array!r}"
        )

    def chosen(blockwise: jax.Array) -> jax.Array:
        if is_one_block and rows.ndim:
            return blockwise  # the one block that all rows share
        return blockwise[0] if is_one_block else blockwise[rows]

    return _view(
        array,
        array.codes[rows],
        (rows.shape if is_one_block else (1,) * rows.ndim) + array.blocks.lengths[1:],
        chosen,
        lambda batchwise: batchwise[rows] if batchwise.ndim else batchwise,
        lambda factors: factors[rows if factors.shape[0] > 1 else jnp.zeros_like(rows)],
        [*[-1] * rows.ndim, *range(1, array.ndim)],
    )


def _rotated_axis(array: QArray) -> int | None:
    return None if array.rotation is None else array.rotation[2] % array.ndim


def _index_of_each_axis(array: QArray, index: Any) -> list[int | slice]:
    items = list(index) if isinstance(index, tuple) else [index]
    for place, item in enumerate(items):
        if hasattr(item, "dtype") and not isinstance(item, jax.core.Tracer):
            items[place] = item = np.asarray(item)[()]
        is_integer = isinstance(item, int | np.integer) and not isinstance(item, bool)
        if not is_integer and not isinstance(item, slice | EllipsisType):
            raise IndexError(
                f"QArray: index {item!r}, expected integers, slices, '...', or one array of "
                "integers; dequantize() first for others"
            )
    missing = array.ndim - sum(item is not Ellipsis for item in items)
    if missing < 0 or sum(item is Ellipsis for item in items) > 1:
        raise IndexError(
            f"QArray: index {index!r} of an array with {array.ndim} axes, expected no more than "
            "these, and '...' at most once"
        )
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * missing
    for axis, item in enumerate(items):
        if isinstance(item, slice):
            continue
        if not -array.shape[axis] <= item < array.shape[axis]:
            raise IndexError(
                f"QArray: index {item} of axis {axis} with {array.shape[axis]} elements, expected "
                f"{-array.shape[axis]} to {array.shape[axis] - 1}"
            )
        items[axis] = int(item) % array.shape[axis]
    return items


def _flat(where: str, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    nested = (item if isinstance(item, Sequence) else (item,) for item in arguments)
    try:
        return tuple(operator.index(n) for items in nested for n in items)
    except TypeError:
        text = ", ".join(map(repr, arguments))
        raise TypeError(f"QArray: {where}({text}), expected integers") from None


def _view(
    array: QArray,
    codes: jax.Array,
    lengths: tuple[int, ...],
    of_blocks: Callable[[jax.Array], jax.Array],
    of_batches: Callable[[jax.Array], jax.Array],
    of_factors: Callable[[jax.Array], jax.Array],
    places: Sequence[int],
) -> QArray:
    """`array` with `codes`; `of_blocks` maps scales and zero points, `of_batches` tensor scales.

    `places` are the axes that the result's axes were; -1 for new ones.
    """
    rotation = array.rotation
    if rotation is not None:
        axis = places.index(rotation[2] % array.ndim) - len(places)
        rotation = (*rotation[:2], axis)
    shape = codes.shape
    if array.packed_size is not None:
        shape = (*shape[:-1], array.packed_size)
    return dataclasses.replace(
        array,
        codes=codes,
        scale=jax.tree.map(of_blocks, array.scale),  # None stays None
        tensor_scale=jax.tree.map(of_batches, array.tensor_scale),
        zero_point=jax.tree.map(of_blocks, array.zero_point),
        factors=jax.tree.map(of_factors, array.factors),
        rotation=rotation,
        spec=_spec_of(array.spec, shape, lengths),
        lengths=lengths,
    )


def _spec_of(spec: BlockFormat, shape: tuple[int, ...], lengths: tuple[int, ...]) -> BlockFormat:
    """The smallest change of `spec` that gives `lengths`: of axes, else also of the block."""
    rank, plain = len(shape), dataclasses.replace(spec, axes=None)
    along = [spec.along(*axes) for axes in itertools.permutations(range(-rank, 0), len(spec.block))]
    # `channel` and `token` name their axis, published formats do not: q.T.T has the spec of q.
    names_axis = spec.block in ((1,), (None,))
    for candidate in (spec, *((*along, plain) if names_axis else (plain, *along))):
        try:
            if candidate.block_lengths(shape) == lengths:
                return candidate
        except ValueError:  # it names an axis that the array lacks, or too long a block
            continue
    named = [axis for axis in range(-rank, 0) if lengths[axis] != (spec.other_axes or shape[axis])]
    block = tuple(lengths[axis] for axis in named)
    if not named:  # no axis is longer than one element: one scale
        return dataclasses.replace(spec, block=(), axes=None, other_axes=None)
    return dataclasses.replace(spec, block=block, axes=tuple(named))
