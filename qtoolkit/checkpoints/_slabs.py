"""How a weight is cut: into blocks, which share a scale, and slabs, which fit in memory.

A weight is seen as one or more matrices. A slab is some rows of them, or a piece of a long row. It
holds whole blocks, or lies in one row of blocks. No JAX here.

Programs are compiled for slabs of few shapes, since one takes 0.2 s: as long as some 20 slabs. So
slabs are padded with zeros, rows to full slabs or to powers of 4, columns by `padded_columns`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qtoolkit.checkpoints.layouts._encoding import merged_matrices

SLAB = 2**20  # elements of a slab: 4 MiB of float32, enough to keep a few cores busy
_WHOLE_WORDS = 32  # codes of any number of bits fill whole words
_LEAST_ROWS, _LEAST_COLUMNS = 16, 2**10  # of a slab, and of a piece of a row
_SIZES = 8  # of padded columns, between a power of two and the next


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
    """A weight as `count` matrices of `rows` x `columns`, in blocks of `height` x `width`.

    `by_matrix` says that each matrix has a tensor scale of its own, so that no slab has two.
    """

    count: int
    rows: int
    columns: int
    height: int
    width: int
    by_matrix: bool = False

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        lengths: Sequence[int],
        unmerged: Sequence[int] = (),
        *,
        word: int = 1,
        by_matrix: bool = False,
    ) -> "Grid":
        """The grid of a weight with blocks of these lengths; ValueError if it has no matrices.

        Args:
          unmerged: Axes that are not merged with those before them.
          word: How many codes fill a word, with which rows end in a file; 1 if they may end
            anywhere.
        """
        merged = merged_matrices(tuple(shape), tuple(lengths), unmerged)
        if merged is None:
            raise ValueError(f"{list(shape)} in blocks of {list(lengths)} are no matrices")
        (count, rows, columns), (height, width) = merged
        if (height, width) == (rows, columns) and len(shape) - 1 not in unmerged:
            return cls.whole(rows * columns, count, by_matrix)
        if height == 1 and width > 1 and columns % width == 0 and width % word == 0:
            rows, columns = rows * columns // width, width  # a row is a block
        return cls(count, rows, columns, height, width, by_matrix)

    @classmethod
    def whole(cls, size: int, count: int = 1, by_matrix: bool = True) -> "Grid":
        """`count` blocks of `size` elements."""
        return cls(count, 1, size, 1, size, by_matrix)

    @property
    def down(self) -> int:
        """Blocks along the rows of a matrix."""
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    @property
    def has_whole_blocks(self) -> bool:
        """Whether slabs hold whole blocks, so that a weight is read once."""
        if self.columns > SLAB:
            return self.height == 1 and self.width <= SLAB
        return self.height * self.padded_columns <= SLAB

    @property
    def padded_columns(self) -> int:
        """Columns for which programs are compiled: of rows that fit in a slab.

        A weight of at most two slabs takes little time, however padded: the next power of two.
        A larger one takes one of 8 sizes to an octave, at most 1/8 more than its own.
        """
        octave = 1 << (self.columns - 1).bit_length()
        is_small = self.count * self.rows * self.columns <= 2 * SLAB
        step = octave if is_small else max(octave // (2 * _SIZES), 1)
        return -(-self.columns // step) * step

    def start(self, slab: Slab) -> int:
        """The first element of a slab."""
        return slab.row * self.columns + slab.column

    def matrix(self, slab: Slab) -> int:
        """The index of the tensor scale of a slab."""
        return slab.row // self.rows if self.by_matrix else 0

    def blocks(self, slab: Slab) -> tuple[slice, slice]:
        """Where the blocks of a slab are among all, [count * down, across]."""
        (first, row), (last, end) = (
            divmod(at, self.rows) for at in (slab.row, slab.row + slab.rows - 1)
        )
        down = first * self.down + row // self.height, last * self.down + end // self.height
        stop = -(-(slab.column + slab.columns) // self.width)
        return slice(down[0], down[1] + 1), slice(slab.column // self.width, stop)

    def lengths(self, slab: Slab) -> tuple[int | None, int | None]:
        """The lengths of blocks in a slab; None along an axis on which one block has all of it."""
        is_one = self.height >= slab.rows and (self.height > 1 or self.width == 1)
        return (None if is_one else self.height, None if self.width >= slab.columns else self.width)

    def program_shape(self, slab: Slab) -> tuple[int, int]:
        """Rows and columns for which a program is compiled that takes the slab."""
        is_row = self.rows == 1 and (self.by_matrix or self.count == 1)
        if self.columns > SLAB or is_row:
            return 1, _power(slab.columns, _LEAST_COLUMNS, SLAB)
        columns, height = self.padded_columns, self.lengths(slab)[0] or 1
        # A weight of few rows is padded little; the last rows of another one share a program.
        few = self.count * self.rows <= _LEAST_ROWS
        least = max((_LEAST_ROWS if few else 4 * _LEAST_ROWS) // height, 1)
        count = _power(-(-slab.rows // height), least, SLAB // (height * columns))
        return max(count * height, slab.rows), columns

    def slabs(self) -> Iterator[Slab]:
        """All slabs in order. A slab holds whole blocks, or a part of only one row of blocks."""
        count = self.count * self.rows
        if self.columns > SLAB:
            yield from (Slab(row, 1, *piece) for row in range(count) for piece in self._pieces())
            return
        for first in range(0, count if self.columns else 0, self._run):
            last = first + self._run
            most = SLAB // self.padded_columns
            step = most // self.height * self.height
            # If a block is more than a slab, slabs end with it.
            for start in range(first, last, self._run if step else self.height):
                stop = last if step else min(start + self.height, last)
                for row in range(start, stop, step or most):
                    yield Slab(row, min(step or most, stop - row), 0, self.columns)

    @property
    def _run(self) -> int:
        """Rows of which a slab may have any: of all matrices, if blocks and tensor scales allow."""
        return self.rows * (1 if self.by_matrix or self.rows % self.height else self.count)

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
                slab = Slab(row, self._last(row, -(-stop // self.columns)) - row, 0, self.columns)
            first = self.start(slab)
            end = min(first + slab.size, stop)
            yield slab, slice(start - first, end - first)
            start = end

    def _last(self, row: int, stop: int) -> int:
        """The row up to which a slab may go that begins at any row: at most to `stop`."""
        end = row // self._run * self._run + self._run
        if within := row % self.rows % self.height:  # the slab lies in one row of blocks
            end = min(end, row - within + self.height, row - row % self.rows + self.rows)
        return min(stop, end, row + max(SLAB // self.padded_columns, 1))


def _power(n: int, least: int, most: int) -> int:
    """`least` times a power of 4 that is not below n; but `most` where that holds n."""
    power = least
    while power < n:
        power *= 4
    return most if n <= most < power else power
