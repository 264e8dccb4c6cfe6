"""How a weight is cut: into slabs that fit in memory, and these into units that share a scale.

Four sizes, from the format's to the program's:

  block  the elements that share a scale, height x width of a matrix
  slab   rows of a weight that are read at once, or a piece of a long row: 2**20 elements
  unit   16, 32 or 128 neighbours in one block, padded with zeros where the block ends
  tile   an array of many units; one of three sizes for each length of units

Programs are compiled for tiles, so they are few, whatever the shapes of weights and blocks.
No JAX here.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from qtoolkit.checkpoints.layouts._encoding import merged_matrices

SLAB = 2**20  # elements of a slab: 4 MiB of float32, enough to keep a few cores busy
_LENGTHS = (16, 32, 128)  # of units along rows: the first that holds a block, else the last
_HEIGHTS = (8, 32, 128)  # of units along columns
_SMALL = 2**15
_WHOLE_WORDS = 32  # codes of any number of bits fill whole words


class Slab(NamedTuple):
    """Rows of a weight seen as one matrix: all columns of them, or some of a single row."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclasses.dataclass(frozen=True)
class Grid:
    """A weight as `count` matrices of `rows` x `columns`, in blocks of `height` x `width`."""

    count: int
    rows: int
    columns: int
    height: int
    width: int

    @classmethod
    def of(cls, shape: Sequence[int], lengths: Sequence[int], apart: Sequence[int] = ()) -> "Grid":
        """The grid of a weight with blocks of these lengths; ValueError if it has no matrices.

        Axes that are `apart` are not merged with those before them.
        """
        merged = merged_matrices(tuple(shape), tuple(lengths), apart)
        if merged is None:
            raise ValueError(f"{list(shape)} in blocks of {list(lengths)} are no matrices")
        (count, rows, columns), (height, width) = merged
        # Rows that stay apart may end with padding.
        if (height, width) == (rows, columns) and len(shape) - 1 not in apart:
            return cls.whole(rows * columns, count)
        return cls(count, rows, columns, height, width)

    @classmethod
    def whole(cls, size: int, count: int = 1) -> "Grid":
        """`count` blocks of `size` elements."""
        return cls(count, 1, size, 1, size)

    @property
    def down(self) -> int:
        """Blocks along the rows of a matrix."""
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    @property
    def blocks(self) -> int:
        return self.count * self.down * self.across

    @property
    def is_by_column(self) -> bool:
        """Whether neighbours have different scales: one for each column."""
        return self.width == 1 < self.columns

    @property
    def has_whole_blocks(self) -> bool:
        """Whether slabs hold whole blocks, so that a weight is read once."""
        if self.columns > SLAB:
            return self.height == 1 and self.width <= SLAB
        return self.height * self.columns <= SLAB

    def start(self, slab: Slab) -> int:
        """The first element of a slab."""
        return slab.row * self.columns + slab.column

    def of_matrices(self, values: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """For each of some blocks the value of its matrix; there may be one value for all."""
        matrices = blocks // (self.down * self.across)
        return values[matrices if len(values) > 1 else matrices * 0]

    def slabs(self) -> Iterator[Slab]:
        """All slabs in order. A slab holds whole blocks, or a part of only one row of blocks."""
        count = self.count * self.rows
        if self.columns > SLAB:
            yield from (Slab(row, 1, *piece) for row in range(count) for piece in self._pieces())
        elif not count * self.columns:
            return
        elif self.height == 1:
            yield from self._rows(0, count, SLAB // self.columns)
        elif self.rows * self.columns <= SLAB:
            yield from self._rows(0, count, SLAB // (self.rows * self.columns) * self.rows)
        else:
            step = SLAB // (self.height * self.columns) * self.height
            part = self.rows if step else self.height  # slabs of less than a block end with it
            for first in range(0, count, self.rows):
                for start in range(first, first + self.rows, part):
                    stop = min(start + part, first + self.rows)
                    yield from self._rows(start, stop, step or SLAB // self.columns)

    def _rows(self, start: int, stop: int, step: int) -> Iterator[Slab]:
        for row in range(start, stop, step):
            yield Slab(row, min(step, stop - row), 0, self.columns)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Pieces of a long row: first column and columns of each. None crosses a long block."""
        unit = math.lcm(self.width, _WHOLE_WORDS) if self.width <= SLAB else _WHOLE_WORDS
        step = max(SLAB // unit, 1) * unit
        block = self.width if self.width > SLAB else self.columns
        for first in range(0, self.columns, block):
            stop = min(first + block, self.columns)
            yield from ((at, min(step, stop - at)) for at in range(first, stop, step))

    def slabs_between(self, start: int, stop: int) -> Iterator[tuple[Slab, slice]]:
        """Slabs that hold elements `start` to `stop`, and where in each of them these are."""
        while start < stop:
            row, column = divmod(start, self.columns)
            if self.columns > SLAB:
                piece = next(piece for piece in self._pieces() if column < sum(piece))
                slab = Slab(row, 1, *piece)
            else:
                last = -(-stop // self.columns)
                if self.is_by_column:  # units run along columns, not over the end of a block
                    matrix, within = divmod(row, self.rows)
                    end = min((within // self.height + 1) * self.height, self.rows)
                    last = min(last, matrix * self.rows + end)
                slab = Slab(row, last - row, 0, self.columns)
            first = self.start(slab)
            end = min(first + slab.size, stop)
            yield slab, slice(start - first, end - first)
            start = end

    def units(self, slab: Slab) -> "Units":
        make = _cached_units if slab.size <= _SMALL else _units
        return make(self, slab)


@dataclasses.dataclass(frozen=True)
class Units:
    """How the elements of a slab lie in units.

    Attributes:
      axis: The axis of an array of units along which the elements of one lie: 1 for pieces of rows;
        0 for pieces of columns.
      length: Elements of a unit.
      blocks: The block in which each unit lies.
      slab: The slab as [outer, along the blocks, inner]: [rows, columns, 1], or for pieces of
        columns [matrices, rows, columns].
      block: Elements of a block along the middle axis.
    """

    axis: int
    length: int
    blocks: np.ndarray
    slab: tuple[int, int, int]
    block: int

    @functools.cached_property
    def first(self) -> int:
        """The first of the blocks that lie in the slab."""
        return int(self.blocks.min())

    @functools.cached_property
    def block_count(self) -> int:
        return int(self.blocks.max()) + 1 - self.first

    @property
    def _places(self) -> int:
        """Blocks along the middle axis."""
        return -(-self.slab[1] // self.block)

    @property
    def _padded(self) -> int:
        """Elements of the units of a block, with zeros at the end."""
        return -(-self.block // self.length) * self.length

    def laid_out(self, elements: np.ndarray) -> np.ndarray:
        """The units of the elements of a slab: [units, length] or [length, units]."""
        outer, size, inner = self.slab
        places, padded = self._places, self._padded
        x: np.ndarray = elements.reshape(self.slab)
        if missing := places * self.block - size:
            x = np.concatenate([x, np.zeros((outer, missing, inner), x.dtype)], axis=1)
        x = x.reshape(outer, places, self.block, inner)
        if self.block != padded:
            rows = np.zeros((outer, places, padded, inner), x.dtype)
            rows[:, :, : self.block] = x
            x = rows
        if self.axis == 1:
            return x.reshape(-1, self.length)
        x = x.reshape(outer * places * (padded // self.length), self.length, inner)
        return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(self.length, -1)

    def elements(self, units: np.ndarray) -> np.ndarray:
        """The elements of a slab, flat, from its units."""
        outer, size, inner = self.slab
        if self.axis == 0:
            units = units.reshape(self.length, -1, inner).swapaxes(0, 1)
        x = units.reshape(outer, self._places, self._padded, inner)[:, :, : self.block]
        return x.reshape(outer, -1, inner)[:, :size].reshape(-1)


def _units(grid: Grid, slab: Slab) -> Units:
    if grid.is_by_column:
        # Whole matrices, or rows of one matrix that begin with a block or lie in one.
        matrices = max(slab.rows // grid.rows, 1)
        height = slab.rows // matrices
        length = min(grid.height, height)
        unit = next((n for n in _HEIGHTS if n >= length), _HEIGHTS[-1])
        matrix, row = divmod(slab.row, grid.rows)
        down = (matrix + np.arange(matrices))[:, None] * grid.down
        down = down + row // grid.height + np.arange(-(-height // length))
        columns = slab.column + np.arange(slab.columns)
        blocks = np.repeat(down.reshape(-1), -(-length // unit))[:, None] * grid.across + columns
        return Units(0, unit, blocks.reshape(-1), (matrices, height, slab.columns), length)
    length = min(grid.width, slab.columns)
    unit = next((n for n in _LENGTHS if n >= length), _LENGTHS[-1])
    rows = slab.row + np.arange(slab.rows)
    down = rows // grid.rows * grid.down + rows % grid.rows // grid.height
    across = slab.column // grid.width + np.arange(-(-slab.columns // length))
    blocks = np.repeat((down[:, None] * grid.across + across).reshape(-1), -(-length // unit))
    return Units(1, unit, blocks, (slab.rows, slab.columns, 1), length)


_cached_units = functools.lru_cache(64)(_units)  # of 16 KiB at most


def tiles_of(units: Sequence[np.ndarray], axis: int) -> list[np.ndarray]:
    """Arrays of units side by side, in tiles of few sizes; the last one is padded with zeros."""
    count = sum(part.shape[1 - axis] for part in units)
    length, parts = units[0].shape[axis], [*units]
    sizes = _tile_sizes(count, length)
    if missing := sum(sizes) - count:
        shape = (missing, length) if axis == 1 else (length, missing)
        parts.append(np.zeros(shape, parts[0].dtype))
    array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1 - axis)
    return _split(array, sizes, 1 - axis)


def columns_of(values: np.ndarray | None, sizes: Sequence[int], axis: int) -> Sequence[Any]:
    """A number for each unit, as columns that broadcast to tiles of these sizes; 1 for padding."""
    if values is None:
        return [None] * len(sizes)
    column = np.ones(sum(sizes), values.dtype)
    column[: len(values)] = values
    return [np.expand_dims(part, axis) for part in _split(column, sizes, 0)]


def _split(array: np.ndarray, sizes: Sequence[int], axis: int) -> list[np.ndarray]:
    ends = [0, *itertools.accumulate(sizes)]
    parts = [slice(*part) for part in itertools.pairwise(ends)]
    return [array[part] if axis == 0 else array[:, part] for part in parts]


def _tile_sizes(units: int, length: int) -> list[int]:
    """How many units each tile has: three sizes, so that tiles and padding are few."""
    sizes = [max(SLAB // length // 16**k, 1) for k in range(3)]
    tiles = []
    for size, less in itertools.pairwise([*sizes, 0]):
        count = max(units, 0) // size
        if units - count * size > (size // 2 if less else 0):
            count += 1
        tiles += [size] * count
        units -= count * size
    return tiles
