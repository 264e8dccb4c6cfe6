"""Lays out chunks of tensors as tiles of few shapes, so that few programs compile. No JAX here."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from qtoolkit.checkpoints._chunks import Chunk, Cut

CHUNK = 2**20  # elements of a chunk: 4 MiB of float32, enough to keep a few cores busy
WIDTHS = (16, 32, 128)  # elements of a unit: the first that holds its block, else the last
_COLUMNS = (128, 1024)  # columns of a tile that has a scale for each column
_FEW = 64  # a chunk with fewer rows is cut into wide tiles that are as high as the chunk
Read = Callable[[int, memoryview], object]


class Tile(NamedTuple):
    """A part of a chunk, padded with zeros. Its units are its rows, in `_Columns` its columns.

    Attributes:
      x: Its elements.
      blocks: The index of the block that each unit lies in, without those of padding.
      place: Where it lies in the chunk: (units,), or (rows, columns) in `_Columns`.
    """

    x: np.ndarray
    blocks: np.ndarray
    place: tuple[slice, ...]


class _Rows:
    """A chunk laid out in units that are pieces of its rows."""

    axis = 1  # along this axis of a tile elements share a scale

    def __init__(self, cut: Cut, chunk: Chunk, dtype: np.dtype) -> None:
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

    def fill(self, read: Read) -> None:
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
        start = 0
        for height in self._heights:
            place = slice(start, start + height)
            yield Tile(self._units[place], self._blocks[place], (place,))
            start += height

    def joined(self, tiles: list[Tile], parts: list[np.ndarray]) -> np.ndarray:
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
    """A chunk laid out in units that are pieces of its columns."""

    axis = 0

    def __init__(self, cut: Cut, chunk: Chunk, dtype: np.dtype) -> None:
        self._cut, self._chunk = cut, chunk
        self._data = np.empty((chunk.rows, chunk.columns), dtype)

    def fill(self, read: Read) -> None:
        flat = self._data.reshape(-1)
        read(self._chunk.start * flat.itemsize, flat.view(np.uint8).data)

    def tiles(self) -> Iterator[Tile]:
        rows, columns = self._data.shape
        block_rows = self._cut.block_rows(self._chunk)
        ends = [*(np.flatnonzero(np.diff(block_rows)) + 1).tolist(), rows]
        for start, end in itertools.pairwise([0, *ends]):
            first = int(block_rows[start]) * self._cut.blocks_in_row + self._chunk.column
            heights, widths = _sides(end - start, columns)
            for top, bottom in itertools.pairwise(itertools.accumulate(heights, initial=start)):
                for left, right in itertools.pairwise(itertools.accumulate(widths, initial=0)):
                    part = tile = self._data[top : min(bottom, end), left:right]
                    if part.shape != (bottom - top, right - left):
                        tile = np.zeros((bottom - top, right - left), part.dtype)
                        tile[: part.shape[0], : part.shape[1]] = part
                    place = (slice(top, top + part.shape[0]), slice(left, left + part.shape[1]))
                    yield Tile(tile, first + left + np.arange(part.shape[1]), place)

    def joined(self, tiles: list[Tile], parts: list[np.ndarray]) -> np.ndarray:
        data = np.empty(self._data.shape, parts[0].dtype)
        for tile, part in zip(tiles, parts, strict=True):
            place = data[tile.place]
            place[...] = part[: place.shape[0], : place.shape[1]]
        return data.reshape(-1)


def _sides(rows: int, columns: int) -> tuple[list[int], list[int]]:
    """Heights and widths of tiles that cover [rows, columns], with a unit for each column."""
    if columns > CHUNK // _FEW:
        # A chunk of a single row would be 1024 tiles of [4, 1024], each with calls of its own. One
        # tile as large as the chunk is no faster; its scales and float32 numbers take 100 MiB more.
        height = power_of_two(rows)
        return [height], _heights(columns, 16 * height)
    width = _COLUMNS[columns > _COLUMNS[1] // 2]
    return _heights(rows, width), [width] * -(-columns // width)


def laid_out(cut: Cut, chunk: Chunk, read: Read, dtype: np.dtype) -> _Rows | _Columns:
    layout = (_Columns if cut.is_by_column else _Rows)(cut, chunk, dtype)
    layout.fill(read)
    return layout


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()


def _heights(units: int, width: int) -> list[int]:
    """Heights of tiles that hold so many units: three sizes, so that tiles and padding are few."""
    sizes = [max(CHUNK // 16**k // width, 1) for k in range(3)]
    heights = []
    for size, less in itertools.pairwise([*sizes, 0]):
        count = units // size
        if units - count * size > (size // 2 if less else 0):
            count += 1
        heights += [size] * count
        units = max(units - count * size, 0)
    return heights
