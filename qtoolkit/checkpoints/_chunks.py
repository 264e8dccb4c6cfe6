"""How a tensor is cut: into chunks that fit in memory, and these into units with one scale each.

First a tensor and its blocks are written with as few axes as possible, in C order: neighbouring
axes are merged if that leaves every block in one piece. An axis is (n, b): n elements in blocks of
b. The weight [4096, 1024] becomes
  in blocks of 32 along its last axis  [(131072, 1), (32, 32)],
  with one scale per channel           [(4096, 1), (1024, 1024)],
  with one scale in all                [(4194304, 4194304)].
The axes before the last one are called lead; an index into them in C order is a row. No JAX here.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

Axis = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive elements of a tensor: full rows of its axes, or a piece of one of them.

    Attributes:
      start, stop: The elements, in C order.
      row: The first row of the axes that it lies in.
      column: Where in that row it starts.
      rows, columns: Its shape.
    """

    start: int
    stop: int
    row: int
    column: int
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Cut:
    """A tensor and the blocks that share a scale.

    Attributes:
      shape: Of the tensor.
      lengths: Length of a block along each axis.
    """

    shape: tuple[int, ...]
    lengths: tuple[int, ...]

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...]:
        axes: list[Axis] = []
        for axis in zip(self.shape, self.lengths, strict=True):
            if axis[0] == 1:
                continue
            axes.append(axis)
            if len(axes) > 1 and (merged := _merged(*axes[-2:])) is not None:
                axes[-2:] = [merged]
        return tuple(axes) or ((1, 1),)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks along each axis of the tensor."""
        return tuple(-(-n // b) for n, b in zip(self.shape, self.lengths, strict=True))

    @property
    def is_by_column(self) -> bool:
        """Whether neighbours have different scales: one for each index of the last axis."""
        n, b = self.axes[-1]
        return b == 1 < n

    @functools.cached_property
    def _slab(self) -> tuple[int, int]:
        """(part, period): the smallest number of consecutive elements that holds whole blocks, and
        the number of elements after which such parts start anew; the last one may be shorter.
        """
        for i, (n, b) in enumerate(self.axes):
            if b > 1:
                inner = math.prod(n for n, _ in self.axes[i + 1 :])
                return b * inner, n * inner
        return 1, self.axes[-1][0]

    def is_local(self, limit: int) -> bool:
        """Whether chunks of `limit` elements hold whole blocks."""
        return self._slab[0] <= limit

    def chunks(self, limit: int) -> Iterator[Chunk]:
        """Chunks of at most `limit` elements, of whole blocks where that is possible.

        Each is some full rows of the tensor seen as [prod(shape[:-1]), shape[-1]], or, where such a
        row has more elements than `limit`, a piece of one.
        """
        width = self.axes[-1][0]
        for start, stop in self._spans(limit):
            full = start % width == 0 and (stop - start) % width == 0
            yield Chunk(
                start=start,
                stop=stop,
                row=start // width,
                column=start % width,
                rows=(stop - start) // width if full else 1,
                columns=width if full else stop - start,
            )

    def _spans(self, limit: int) -> Iterator[tuple[int, int]]:
        """Where chunks start and stop.

        A piece of a row holds whole blocks of the last axis, or lies in one of them: with [5000,
        512] in blocks of [3000, 512] a chunk of 2048 rows at row 2048 would be taken for one block.
        """
        (width, length), row = self.axes[-1], self.shape[-1] if self.shape else 1
        if self.is_local(limit):
            part, period = self._slab
            return _spans(self.size, part, row if part < row else period, limit)
        if width <= limit:
            return _spans(self.size, width, width, limit)
        # If `width` is more than a row, either rows are a multiple of blocks or the reverse.
        part = max(n for n in (1, row, length) if n <= limit)
        period = width if row <= limit else min(row, width)
        block = min(length, period) if length > limit else period
        return (
            (first + within + start, first + within + stop)
            for first in range(0, self.size, period)
            for within in range(0, period, block)
            for start, stop in _spans(min(block, period - within), part, block, limit)
        )

    def block_rows(self, chunk: Chunk) -> np.ndarray:
        """For each row of a chunk the index of the blocks that it lies in, among those of lead."""
        rows, lead = np.arange(chunk.row, chunk.row + chunk.rows), self.axes[:-1]
        if all(b == 1 for _, b in lead):
            return rows
        index = np.zeros_like(rows)
        inner = math.prod(n for n, _ in lead)
        for n, b in lead:
            inner //= n
            index = index * -(-n // b) + rows // inner % n // b
        return index

    @property
    def blocks_in_row(self) -> int:
        n, b = self.axes[-1]
        return -(-n // b)


def _merged(first: Axis, second: Axis) -> Axis | None:
    (n, b), (m, c) = first, second
    if c == m:
        return n * m, b * m
    if b == 1 and m % c == 0:
        return n * m, c
    return None


def _spans(size: int, part: int, period: int, limit: int) -> Iterator[tuple[int, int]]:
    """Spans of at most `limit` elements, of whole parts, from whole periods where they fit."""
    if period <= limit:
        step = limit // period * period
        yield from ((start, min(start + step, size)) for start in range(0, size, step))
        return
    step = max(limit // part, 1) * part
    for first in range(0, size, period):
        stop = min(first + period, size)
        yield from ((start, min(start + step, stop)) for start in range(first, stop, step))
