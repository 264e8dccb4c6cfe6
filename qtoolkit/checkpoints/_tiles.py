"""Lays out chunks of tensors as tiles of few shapes, so that few programs compile. No JAX here."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from qtoolkit.checkpoints._chunks import Chunk, Cut

CHUNK = 2**20  # elements of a chunk: 4 MiB of float32, enough to keep a few cores busy
WIDTHS = (16, 32, 128)  # elements of a unit: the first that holds its block, else the last
_GROUPS = (1, 8, 32, 128)  # elements of a unit that is a piece of a column
# Columns of a tile: were a tile of one row as large as the chunk, its scales would be as many.
_MOST_COLUMNS = 2**15
Read = Callable[[int, memoryview], object]


class Tile(NamedTuple):
    """A part of a chunk, padded with zeros. Its units are its rows, in `_Columns` its columns.

    Attributes:
      x: Its elements.
      blocks: The index of the block that each unit lies in, without those of padding.
    """

    x: np.ndarray
    blocks: np.ndarray


class _Rows:
    """A chunk laid out in units that are pieces of its rows."""

    axis = 1  # along this axis of a tile elements share a scale

    def __init__(self, cut: Cut, chunk: Chunk, read: Read, dtype: np.dtype) -> None:
        self._chunk = chunk
        length = min(cut.axes[-1][1], chunk.columns)
        self._length = length
        self._width = next((width for width in WIDTHS if width >= length), WIDTHS[-1])
        count = -(-chunk.columns // length)
        each = -(-length // self._width)  # units that hold one row of a block
        self._padded = (chunk.rows, count, each * self._width)
        units = chunk.rows * count * each
        self._heights = _heights(units, self._width)
        self._units = np.empty((sum(self._heights), self._width), dtype)
        column = chunk.column // cut.axes[-1][1]
        blocks = cut.block_rows(chunk)[:, None] * cut.blocks_in_row + column + np.arange(count)
        self._blocks = np.repeat(blocks.reshape(-1), each)
        self._fill(read)

    def _fill(self, read: Read) -> None:
        start, size = self._chunk.start, self._chunk.stop - self._chunk.start
        item = self._units.itemsize
        flat = self._units.reshape(-1)
        if size == math.prod(self._padded):
            flat[size:] = 0
            read(start * item, flat[:size].view(np.uint8).data)
            return
        flat[:] = 0
        data = np.empty(size, self._units.dtype)
        read(start * item, data.view(np.uint8).data)
        for padded, plain in self._parts(flat[: math.prod(self._padded)], data):
            padded[...] = plain

    def tiles(self) -> Iterator[Tile]:
        for top, end in itertools.pairwise(itertools.accumulate(self._heights, initial=0)):
            yield Tile(self._units[top:end], self._blocks[top:end])

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """The elements of the chunk, flat, from those of the tiles."""
        units = parts[0] if len(parts) == 1 else np.concatenate(parts)
        flat = units.reshape(-1)[: math.prod(self._padded)]
        if flat.size == self._chunk.stop - self._chunk.start:
            return flat
        data = np.empty(self._chunk.stop - self._chunk.start, flat.dtype)
        for padded, plain in self._parts(flat, data):
            plain[...] = padded
        return data

    def _parts(self, padded: np.ndarray, plain: np.ndarray) -> Iterator[tuple[Any, Any]]:
        """Pairs of views of the same elements, padded and not: whole blocks, then the last ones."""
        padded = padded.reshape(self._padded)
        plain = plain.reshape(self._chunk.rows, self._chunk.columns)
        whole = self._chunk.columns // self._length
        edge = whole * self._length
        blocks = plain[:, :edge].reshape(self._chunk.rows, whole, self._length)
        yield padded[:, :whole, : self._length], blocks
        if edge < self._chunk.columns:
            yield padded[:, whole, : self._chunk.columns - edge], plain[:, edge:]


class _Columns:
    """A chunk laid out in units that are pieces of its columns, side by side.

    Rows of one block follow each other in a run. A run is cut into groups of `height` rows, and the
    groups of all runs are put next to each other: [256, 4096] in one block becomes [128, 8192].
    """

    axis = 0

    def __init__(self, cut: Cut, chunk: Chunk, read: Read, dtype: np.dtype) -> None:
        self._chunk = chunk
        block_rows = cut.block_rows(chunk)
        starts = np.flatnonzero(np.diff(block_rows, prepend=-1))  # of runs
        lengths = np.diff(starts, append=chunk.rows)
        height = max(h for h in _GROUPS if h <= lengths.max())
        counts = -(-lengths // height)  # groups of each run
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        firsts = np.repeat(starts, counts) + within * height
        rows = firsts + np.arange(height)[:, None]
        # [height, groups]: where the last group of a run ends early, a row of zeros after the last.
        self._rows = np.where(rows < np.repeat(starts + lengths, counts), rows, chunk.rows)
        blocks = block_rows[firsts][:, None] * cut.blocks_in_row + chunk.column
        self._blocks = (blocks + np.arange(chunk.columns)).reshape(-1)
        self._widths = _heights(self._blocks.size, height, _MOST_COLUMNS)
        self._units = np.empty((height, sum(self._widths)), dtype)
        data = np.empty((chunk.rows + 1, chunk.columns), dtype)
        data[-1] = 0
        flat = data[:-1].reshape(-1)
        read(chunk.start * flat.itemsize, flat.view(np.uint8).data)
        self._groups(self._units)[...] = data[self._rows]
        self._units[:, self._blocks.size :] = 0

    def tiles(self) -> Iterator[Tile]:
        for left, right in itertools.pairwise(itertools.accumulate(self._widths, initial=0)):
            yield Tile(self._units[:, left:right], self._blocks[left:right])

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        units = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        data = np.empty((self._chunk.rows + 1, self._chunk.columns), units.dtype)
        data[self._rows] = self._groups(units)
        return data[:-1].reshape(-1)

    def _groups(self, units: np.ndarray) -> np.ndarray:
        """A view of units without padding: [height, groups, columns]."""
        return units[:, : self._blocks.size].reshape(*self._rows.shape, self._chunk.columns)


def laid_out(cut: Cut, chunk: Chunk, read: Read, dtype: np.dtype) -> _Rows | _Columns:
    return (_Columns if cut.is_by_column else _Rows)(cut, chunk, read, dtype)


def _heights(units: int, width: int, most: int | None = None) -> list[int]:
    """Heights of tiles that hold so many units: three sizes, so that tiles and padding are few."""
    largest = CHUNK // width if most is None else min(CHUNK // width, most)
    sizes = [max(largest // 16**k, 1) for k in range(3)]
    heights = []
    for size, less in itertools.pairwise([*sizes, 0]):
        count = units // size
        if units - count * size > (size // 2 if less else 0):
            count += 1
        heights += [size] * count
        units = max(units - count * size, 0)
    return heights
