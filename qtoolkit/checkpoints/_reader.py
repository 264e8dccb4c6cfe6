"""Makes numbers of a quantized weight that a file holds: a `QArray`, or float32 slab by slab."""

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from qtoolkit.checkpoints._checkpoint import Tensor
from qtoolkit.checkpoints._quantize import (
    exact_values,
    matrix_scale,
    may_be_subnormal,
    multipliers,
    numbers_of,
    pad_matrix,
    slab_spec,
)
from qtoolkit.checkpoints._slabs import Grid, Slab
from qtoolkit.checkpoints._tensors import NUMPY_DTYPES, CheckpointError, Entry, shown
from qtoolkit.checkpoints.layouts._encoding import (
    Encoding,
    ReadEntry,
    unpack_entry,
    unpack_rows,
    zero_points,
)
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling import QArray

_FEW = 2**12  # codes that NumPy turns into numbers in a third of the time that a program takes


def entry_reader(stored: Mapping[str, Tensor], index: int = 0, count: int = 1) -> ReadEntry:
    """Reads entries of a checkpoint; of `count` equal parts of each the one at `index`."""

    def read(entry: Entry) -> np.ndarray:
        tensor = stored[entry.name]
        data = np.empty(tensor.nbytes // count, np.uint8)
        tensor.read_into(index * len(data), data.data)
        return data

    return read


def grid_of(encoding: Encoding) -> Grid:
    """How a weight is cut as its entries hold it; ValueError if it is no stack of matrices."""
    shape = encoding.matrix_shape
    packing, second = encoding.packing, encoding.tensor_scale
    unmerged = set() if packing is None else {len(shape) - 1}  # rows end with whole bytes
    count = 1 if second is None else math.prod(second.shape)
    if count > 1:
        ends = range(len(shape) + 1)
        unmerged.add(next(end for end in ends if math.prod(shape[:end]) == count))
    word = 1 if packing is None else packing.word // encoding.spec.element.bits
    return Grid.of(shape, encoding.lengths, sorted(unmerged), word=word, by_matrix=count > 1)


class WeightReader:
    """Reads the float32 values of a stored weight, slab by slab where its entries allow it.

    What cannot be read by rows is read by matrices: an expert of gpt-oss takes 66 MB of float32,
    all of a layer 8 GB.

    Args:
      encoding: How it is stored.
      stored: The tensors of the checkpoint, as they are.
    """

    def __init__(self, encoding: Encoding, stored: Mapping[str, Tensor]) -> None:
        self.encoding = encoding
        self._stored = stored
        self._loading = threading.Lock()
        # By the function that made them the elements of the last matrix, and its index.
        self._matrices: dict[Callable[..., np.ndarray], tuple[int, np.ndarray]] = {}
        is_read_by_rows = encoding.is_sliceable and 0 not in encoding.shape
        self._grid = grid_of(encoding) if is_read_by_rows else None

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` of the float32 weight on; both multiples of 4."""
        out, first = np.frombuffer(buffer, np.float32), start // 4
        if self._grid is None:
            self._copy_matrices(values_of, first, out)
            return
        spec, done = self.encoding.spec, 0
        for slab, where in self._grid.slabs_between(first, first + len(out)):
            codes = self._slab_codes(slab)
            part = slab_values(codes, self._grid, slab, spec, *self.scales).reshape(-1)[where]
            out[done : done + len(part)] = part
            done += len(part)

    def codes_between(self, start: int, stop: int) -> np.ndarray:
        """The codes of elements `start` to `stop` of the weight."""
        if self._grid is None:
            codes = np.empty(stop - start, np.uint8)
            self._copy_matrices(_codes_of, start, codes)
            return codes
        slabs = self._grid.slabs_between(start, stop)
        return np.concatenate([self._slab_codes(slab).reshape(-1)[where] for slab, where in slabs])

    def _slab_codes(self, slab: Slab) -> np.ndarray:
        encoding, grid = self.encoding, self._grid
        assert grid is not None
        width = encoding.codes.nbytes // (grid.count * grid.rows)
        bits = 8 if encoding.packing is None else encoding.spec.element.bits
        first, end = 0, width
        if slab.columns < grid.columns:  # a piece of a long row, cut where words end
            first = slab.column * bits // 8
            end = min(-(-(slab.column + slab.columns) * bits // 8), width)
        data = np.empty((slab.rows, end - first), np.uint8)
        self._stored[encoding.codes.name].read_into(slab.row * width + first, data.reshape(-1).data)
        if encoding.packing is not None:
            return unpack_rows(data, encoding.packing, bits, slab.columns)
        _check_range(data, encoding)
        return data

    def array(self, dtype: Any) -> Any:
        """The weight as a `QArray` of numbers of `dtype`, packed where its codes are narrower than
        a byte; float32 where no `QArray` can hold it: without elements, with reordered groups, or
        with what `Encoding.finish` does.
        """
        encoding, read = self.encoding, entry_reader(self._stored)
        if 0 in encoding.shape or not encoding.is_array:
            return values_of(encoding, read)
        array = qarray_of(encoding, read, dtype=dtype)
        return array.pack() if encoding.spec.element.bits in (1, 2, 4, 6) else array

    @functools.cached_property
    def scales(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Scales and tensor scales, flat, as stored."""
        return _scales(self.encoding, entry_reader(self._stored))

    def _copy_matrices(
        self, make: Callable[[Encoding, ReadEntry], np.ndarray], start: int, out: np.ndarray
    ) -> None:
        """Copies elements from `start` on of what `make` makes of whole matrices, one at a time."""
        count, matrix = _stack_of(self.encoding)
        size, done = max(math.prod(matrix.shape), 1), 0
        while done < len(out):
            index, first = divmod(start + done, size)
            with self._loading:
                if make not in self._matrices or self._matrices[make][0] != index:
                    read = entry_reader(self._stored, index, count)
                    self._matrices[make] = index, make(matrix, read).reshape(-1)
                part = self._matrices[make][1][first : first + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)


def _stack_of(encoding: Encoding) -> tuple[int, Encoding]:
    """How many matrices a weight is, if entries have one after the other, and how one is stored."""
    shape, tensor_scale = encoding.shape, encoding.tensor_scale
    count = math.prod(shape[:-2])
    is_stack = count > 1 and all(n == 1 for n in encoding.lengths[:-2])
    is_shared = tensor_scale is not None and math.prod(tensor_scale.shape) != count
    if not is_stack or encoding.scale is None or is_shared:
        return 1, encoding
    one = None if tensor_scale is None else tensor_scale._replace(shape=())
    return count, dataclasses.replace(
        encoding, shape=shape[-2:], lengths=encoding.lengths[-2:], tensor_scale=one
    )


def _codes_of(encoding: Encoding, read: ReadEntry) -> np.ndarray:
    return np.asarray(qarray_of(encoding, read).codes).view(np.uint8)


def _check_range(codes: np.ndarray, encoding: Encoding) -> None:
    """Raises where a byte is no code of an element of fewer than 8 bits."""
    count = 2**encoding.spec.element.bits
    if count < 256 and codes.size and codes.max() >= count:
        raise CheckpointError(
            f"{shown(encoding.name)}: code {codes.max()}, expected below {count}, as "
            f"{encoding.spec.element.name} has; the file is damaged, fetch it again"
        )


def values_of(encoding: Encoding, read: ReadEntry) -> np.ndarray:
    """The float32 values of a whole weight."""
    if 0 in encoding.shape:
        return np.zeros(encoding.shape, np.float32)
    if encoding.finish is not None:
        values = values_of(dataclasses.replace(encoding, finish=None), read)
        return np.ascontiguousarray(encoding.finish(encoding, values, read), np.float32)
    if encoding.group_index is None:
        return np.asarray(qarray_of(encoding, read).dequantize("float32"))
    # Each input says in which group it lies: codes are sorted by groups, and the values back.
    dtype = NUMPY_DTYPES[encoding.group_index.dtype]
    index = read(encoding.group_index).view(dtype).astype(np.int64)
    axis = 0 if encoding.transposed else 1
    length = encoding.lengths[axis]
    groups = -(-len(index) // length)
    if (index < 0).all():  # compressed-tensors: they are not reordered
        index = np.arange(len(index)) // length
    is_inside = (index >= 0) & (index < groups)
    counts = np.bincount(index[is_inside], minlength=groups)
    if not is_inside.all() or not (counts[:-1] == length).all():
        raise CheckpointError(
            f"{shown(encoding.group_index.name)}: groups of {sorted({*counts.tolist()})[:4]} "
            f"inputs, expected {length} in each; dequantize the checkpoint with the program that "
            "made it"
        )
    order = np.argsort(index, kind="stable")
    in_order = dataclasses.replace(
        encoding, group_index=None, transposed=False, shape=encoding.matrix_shape
    )
    values = np.asarray(qarray_of(in_order, read, (order, axis)).dequantize("float32"))
    values = np.take(values, np.argsort(order), axis)
    return np.ascontiguousarray(values.swapaxes(-1, -2)) if encoding.transposed else values


def qarray_of(
    encoding: Encoding,
    read: ReadEntry,
    order: tuple[np.ndarray, int] | None = None,
    dtype: Any = "float32",
) -> QArray:
    """The weight as a `QArray` of numbers of `dtype`, a code to a byte.

    `order` says in which order the codes are, and along which axis; None: as they are.
    """
    spec, shape = encoding.spec, encoding.matrix_shape
    bits = spec.element.bits
    codes = unpack_entry(encoding.codes, read, encoding.packing, bits, shape)
    if encoding.packing is None:
        _check_range(codes, encoding)
    if order is not None:
        codes = np.take(codes, *order)
    counts = tuple(-(-n // b) for n, b in zip(shape, encoding.lengths, strict=True))
    scale, tensor_scale = _scales(encoding, read)
    zero = None
    if encoding.zero_point is not None:
        zero = jnp.asarray(zero_points(encoding, read))
    if tensor_scale is not None and encoding.tensor_scale is not None:
        of_all = math.prod(encoding.tensor_scale.shape) == 1
        ends = range(len(shape) + 1)
        batch = next(shape[:end] for end in ends if math.prod(shape[:end]) == len(tensor_scale))
        tensor_scale = tensor_scale.reshape(() if of_all else batch)
    array = QArray(
        jnp.asarray(codes.view(spec.element.code_dtype).reshape(shape)),
        None if scale is None else jnp.asarray(scale.reshape(counts)),
        encoding.array_spec,
        tensor_scale=None if tensor_scale is None else jnp.asarray(tensor_scale),
        zero_point=zero,
        dtype=dtype,
        lengths=encoding.lengths,
    )
    if not encoding.transposed:
        return array
    axes = [*range(len(shape))]
    return array.transpose(*axes[:-2], axes[-1], axes[-2])


def _scales(encoding: Encoding, read: ReadEntry) -> tuple[np.ndarray | None, np.ndarray | None]:
    scale = tensor_scale = None
    if encoding.scale is not None:
        spec = encoding.spec
        assert spec.scale is not None
        # A byte of E8M0 is U8 in some layouts.
        dtype = (spec.has_powers and spec.scale.dtype) or NUMPY_DTYPES[encoding.scale.dtype]
        if encoding.scale_of is not None:
            scale = encoding.scale_of(encoding, read)
        else:
            scale = read(encoding.scale).view(dtype)
    if encoding.tensor_scale is not None:
        tensor_scale = read(encoding.tensor_scale).view(np.float32)
    return scale, tensor_scale


def slab_values(
    codes: np.ndarray,
    grid: Grid,
    slab: Slab,
    spec: BlockFormat,
    scale: np.ndarray | None,
    tensor_scale: np.ndarray | None,
) -> np.ndarray:
    """The float32 numbers of the codes [rows, columns] of a slab.

    `scale` and `tensor_scale` are those of all blocks and matrices of the weight, flat, as stored.
    """
    lengths, shape = grid.lengths(slab), grid.program_shape(slab)
    second = matrix_scale(tensor_scale, grid, slab)
    spec_of_slab = slab_spec(spec, lengths)
    if scale is not None:
        scale = scale.reshape(grid.count * grid.down, grid.across)[grid.blocks(slab)]
        rates = multipliers(scale, second, spec)
        if codes.size <= _FEW or may_be_subnormal(rates, spec):
            return exact_values(codes, rates, lengths, spec)
        scale = pad_matrix(scale, spec_of_slab.scale_shape(shape), 1)
    values = numbers_of(pad_matrix(codes, shape), scale, second, spec_of_slab)
    return np.asarray(values)[: slab.rows, : slab.columns]
