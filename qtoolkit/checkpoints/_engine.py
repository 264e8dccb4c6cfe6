"""Quantizes tensors of any size in little memory, with the same bits as `quantize`.

A tensor is read in chunks, and a chunk is laid out as tiles: matrices of units, each unit a few
neighbours that share a scale. Tiles are padded with zeros to few shapes, so that few programs are
compiled whatever the shapes of the tensors. One program finds the amax of each unit. From these,
NumPy code here finds the amax of each block. A second program computes scales and codes.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qtoolkit.checkpoints import _tiles
from qtoolkit.checkpoints._chunks import Chunk, Cut
from qtoolkit.checkpoints._header import NUMPY_DTYPES
from qtoolkit.checkpoints._programs import (
    Encoded,
    encoded,
    errors,
    exceeds,
    is_cast,
    second_scale,
    unit_amax,
)
from qtoolkit.checkpoints._report import decibels
from qtoolkit.checkpoints._tiles import Read, Tile, laid_out
from qtoolkit.checkpoints._workers import ALONE, Workers
from qtoolkit.formats import BlockFormat

_UNBOUNDED = 2**40  # stands for an empty axis when blocks are counted: one, if it is the whole axis
_SMALL = 32  # how many small tensors a chunk holds at least


class Piece(NamedTuple):
    """The codes of a part of a tensor, which is seen as a matrix [prod(shape[:-1]), shape[-1]].

    Attributes:
      rows, columns: The part: some full rows, or a piece of one row if that is longer than a chunk.
      codes: Unsigned codes as from `encode`, not packed: [rows, columns].
      scale: The scales of the blocks that start in this part, in C order, flat, in the dtype of
        `QArray.scale`. The scales of all pieces, joined, are those of the tensor. None if the
        format has no scales.
    """

    rows: slice
    columns: slice
    codes: np.ndarray
    scale: np.ndarray | None


@dataclasses.dataclass
class Sums:
    """Statistics of the quantization error, summed over pieces.

    Attributes:
      signal, noise: Sums of x^2 and (x - y)^2 over elements with finite x and scale, where y is the
        dequantized x.
      nonfinite: How many elements are NaN or infinite.
      overflowed: How many finite elements, rounded to 16 bits without a scale, exceeded the largest
        number of the format and became that number.
      max_scale: The largest number by which a code is multiplied; 0 if there is no scale.
    """

    signal: float = 0.0
    noise: float = 0.0
    nonfinite: int = 0
    max_scale: float = 0.0
    overflowed: int = 0

    def add(self, other: "Sums") -> None:
        self.signal += other.signal
        self.noise += other.noise
        self.nonfinite += other.nonfinite
        self.overflowed += other.overflowed
        self.max_scale = max(self.max_scale, other.max_scale)

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise); infinite where exact, None where there is no signal."""
        return decibels(self.signal, self.noise)


def is_small(shape: tuple[int, ...]) -> bool:
    """Whether calling programs for a tensor takes longer than running them.

    A tensor of 256x256 takes as long with others as on its own, one of 128x256 half as long.
    """
    return 0 < math.prod(shape) <= _tiles.CHUNK // _SMALL


def amax_of(read: Read, shape: tuple[int, ...], dtype: str, *, workers: Workers = ALONE) -> float:
    """The largest finite |x| of a tensor, 0 where there is none.

    Args:
      read, shape, dtype, workers: As in `quantized`.
    """
    cut = Cut(shape, shape)
    if is_small(shape):
        x = np.empty(cut.size, NUMPY_DTYPES[dtype])
        read(0, x.view(np.uint8).data)
        found = np.abs(x.astype(np.float32))
        return float(np.max(found, initial=0, where=np.isfinite(found)))
    found = _amaxes(cut, read, NUMPY_DTYPES[dtype], False, workers) if cut.size else np.zeros(1)
    return float(found[0])


def quantized(
    read: Read,
    shape: tuple[int, ...],
    dtype: str,
    spec: BlockFormat,
    *,
    tensor_amax: float | None = None,
    sums: Sums,
    workers: Workers = ALONE,
) -> tuple[np.ndarray | None, Iterator[Piece]]:
    """Quantizes a tensor piece by piece: codes and scales of `qtoolkit.quantize`, bit for bit.

    A tensor is read once if its blocks fit in chunks. It is read twice if a scale belongs to the
    whole tensor or to a column, or if the format has a tensor scale and no `tensor_amax` is given.

    Args:
      read: `read(start, buffer)` fills a buffer with the tensor's bytes from `start` on.
      shape: The shape of the tensor. It may have no elements, unlike in `quantize`; then scales are
        1.
      dtype: F32, F16 or BF16.
      spec: A block format without zero points.
      tensor_amax: The amax from which the tensor scale follows, if several tensors share one: the
        largest of theirs, see `amax_of`.
      sums: Each piece adds its statistics to this.
      workers: Threads, which call `read`. Results do not depend on how many there are.

    Returns:
      The second scale, float32, a scalar, None where the format has none; and the pieces.

    Raises:
      ValueError: `spec` has zero points, or does not fit the shape.
    """
    check_symmetric(spec)
    tensor_scale = None
    if spec.tensor_scale is not None:
        found = amax_of(read, shape, dtype, workers=workers) if tensor_amax is None else tensor_amax
        tensor_scale = np.asarray(second_scale(np.float32(found), spec))
    if 0 in shape:
        return tensor_scale, iter([_piece_of_nothing(shape, spec)])
    source = NUMPY_DTYPES[dtype]
    cut = Cut(shape, shape if spec.scale is None else spec.block_lengths(shape))
    amaxes = None
    if spec.scale is not None and not cut.is_local(_tiles.CHUNK):
        amaxes = _amaxes(cut, read, source, not spec.element.has_nan, workers)
    encoder = _Encoder(cut, read, source, spec, tensor_scale, amaxes)
    return tensor_scale, _pieces(encoder, workers, sums)


def check_symmetric(spec: BlockFormat) -> None:
    if spec.zero_point:
        raise ValueError(f"{spec.name}: no checkpoint layout has zero points; use symmetric scales")
    if spec.tries_scales:
        raise ValueError(
            f"{spec.name}: checkpoints are converted with scales that amax alone decides; use "
            "rule='amax', or write the arrays that quantize(x, spec) gives"
        )


def _amaxes(cut: Cut, read: Read, dtype: np.dtype, nan_wins: bool, workers: Workers) -> np.ndarray:
    """The amax of every block: float32, flat."""
    found = np.zeros(math.prod(cut.counts), np.float32)

    def amaxes(chunk: Chunk) -> list[tuple[np.ndarray, np.ndarray]]:
        layout = laid_out(cut, chunk, read, dtype)
        return [(tile.blocks, _unit_amaxes(tile, layout.axis, nan_wins)) for tile in layout.tiles()]

    for parts in workers.map(amaxes, cut.chunks(_tiles.CHUNK)):
        for blocks, part in parts:
            _raise(found, blocks, part)
    return found


def _unit_amaxes(tile: Tile, axis: int, nan_wins: bool) -> np.ndarray:
    return np.asarray(unit_amax(tile.x, axis, nan_wins)).reshape(-1)[: len(tile.blocks)]


def _raise(found: np.ndarray, blocks: np.ndarray, amax: np.ndarray) -> None:
    """Raises the amaxes of these blocks to at least those of their units."""
    with np.errstate(invalid="ignore"):  # NumPy warns of a NaN, which is the largest
        np.maximum.at(found, blocks, amax)


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """Encodes chunks of a tensor to pieces. It holds what all chunks have in common.

    `amaxes` are the amaxes of all blocks; None if chunks hold whole blocks and find their own.
    """

    cut: Cut
    read: Read
    dtype: np.dtype
    spec: BlockFormat
    tensor_scale: np.ndarray | None
    amaxes: np.ndarray | None

    def __call__(self, chunk: Chunk) -> tuple[Piece, int, list[Sums]]:
        """Returns the piece with the scales of all its blocks, the index of the first of these
        blocks, and the sums.
        """
        spec = self.spec
        layout = laid_out(self.cut, chunk, self.read, self.dtype)
        tiles = list(layout.tiles())
        first = min(int(tile.blocks.min()) for tile in tiles)
        stop = max(int(tile.blocks.max()) for tile in tiles) + 1
        if self.amaxes is None:
            known = np.zeros(stop - first, np.float32)
            for tile in tiles:
                found = _unit_amaxes(tile, layout.axis, not spec.element.has_nan)
                _raise(known, tile.blocks - first, found)
        else:
            known = self.amaxes[first:stop]
        scale = None
        if spec.scale is not None:
            scale = np.zeros(known.shape, spec.scale.dtype or spec.scale.code_dtype)
        parts, sums = [], []
        for tile in tiles:
            units = len(tile.blocks)
            # Padding has amax 1: scales of 2**-127, from amax 0, would take a slower division.
            amax = np.ones(tile.x.shape[1 - layout.axis], np.float32)
            amax[:units] = known[tile.blocks - first]
            factor = _factor(amax[:units])
            column = None if spec.scale is None else np.expand_dims(amax, layout.axis)
            done = encoded(tile.x, column, self.tensor_scale, np.float32(factor), spec, layout.axis)
            parts.append(np.asarray(done.codes))
            if scale is not None:
                scale[tile.blocks - first] = np.asarray(done.scales.scale).reshape(-1)[:units]
            sums.append(_sums(tile, done, factor, spec, layout.axis))
        return _piece(self.cut, chunk, layout.joined(parts), scale), first, sums


def _pieces(encoder: _Encoder, workers: Workers, sums: Sums) -> Iterator[Piece]:
    done = 0  # how many blocks start before this piece: their scales have been yielded already
    for piece, first, parts in workers.map(encoder, encoder.cut.chunks(_tiles.CHUNK)):
        for part in parts:
            sums.add(part)
        if piece.scale is not None:
            scale = piece.scale[done - first :]
            done += len(scale)
            piece = piece._replace(scale=scale if len(scale) else None)
        yield piece


def _piece(cut: Cut, chunk: Chunk, codes: np.ndarray, scale: np.ndarray | None) -> Piece:
    width = cut.shape[-1] if cut.shape else 1
    row, column = divmod(chunk.start, width)
    full = len(codes) % width == 0 and column == 0
    rows = len(codes) // width if full else 1
    columns = slice(column, column + len(codes) // rows)
    return Piece(slice(row, row + rows), columns, codes.reshape(rows, -1), scale)


def _sums(tile: Tile, done: Encoded, factor: float, spec: BlockFormat, axis: int) -> Sums:
    """The `Sums` of a tile that was encoded with this `factor`."""
    signal, noise, nonfinite = float(done.signal), float(done.noise), 0
    if not (math.isfinite(signal) and math.isfinite(noise)):
        x, error = (
            np.asarray(a) for a in errors(tile.x, done.scales, np.float32(factor), spec, axis)
        )
        nonfinite = int(np.count_nonzero(~np.isfinite(tile.x)))
        known = np.isfinite(x) & np.isfinite(error)
        x, error = x[known], error[known]
        signal, noise = float(x @ x), float(error @ error)
    unit = np.float32(0)
    if done.unit is not None:
        unit = np.fmax.reduce(np.asarray(done.unit).reshape(-1)[: len(tile.blocks)], initial=0)
    overflowed = 0
    if is_cast(spec):
        overflowed = int(np.count_nonzero(exceeds(tile.x, spec)))
    return Sums(signal / factor**2, noise / factor**2, nonfinite, float(unit), overflowed)


def _factor(amax: np.ndarray) -> float:
    """A power of two; multiplied by it, the largest of these is about 1."""
    top = float(np.max(amax, initial=0, where=np.isfinite(amax)))
    return 2.0 ** -min(max(math.frexp(top)[1], -126), 126)


def _piece_of_nothing(shape: tuple[int, ...], spec: BlockFormat) -> Piece:
    """All of a tensor without elements: no codes, but scales along axes that are not empty."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    codes, scale = np.zeros((rows, columns), spec.element.code_dtype), None
    if spec.scale is not None:
        lengths = spec.block_lengths(tuple(n or _UNBOUNDED for n in shape))
        counts = [1 if b == _UNBOUNDED else -(-n // b) for n, b in zip(shape, lengths, strict=True)]
        scale = np.ones(math.prod(counts), spec.scale.dtype)
    return Piece(slice(0, rows), slice(0, columns), codes, scale)
