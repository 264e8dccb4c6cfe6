"""Quantizes many small tensors at a time, with the same bits as `quantized` one by one.

Quantizing a tensor of 16x16 on its own takes half a millisecond, nearly all of it for calling
programs and fetching what they return. Here tensors of one dtype and format are laid out together.
A unit is a row of `width` cells. The elements of a block fill one or more units, and the rest of
the last one is padded with zeros. The units of all tensors follow each other and are cut into tiles
of one size, so that programs are compiled once per dtype, format and width. A unit belongs to one
block of one tensor, so the result for a tensor does not depend on its neighbours.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from qtoolkit.checkpoints._engine import (
    Piece,
    Sums,
    check_symmetric,
    is_small,
    quantized,
)
from qtoolkit.checkpoints._header import NUMPY_DTYPES
from qtoolkit.checkpoints._programs import (
    Encoded,
    encoded,
    errors,
    exceeds,
    is_cast,
    of_units,
    second_scale,
    unit_amax,
)
from qtoolkit.checkpoints._tiles import WIDTHS, Read
from qtoolkit.checkpoints._workers import ALONE, Workers
from qtoolkit.formats import BlockFormat

_TILE = 2**15  # cells: quantizing them takes about as long as calling the programs
_AHEAD = 2**17  # elements of small tensors that are quantized together


class Task(NamedTuple):
    """A tensor to quantize: arguments of `quantized`, `tensor_amax` as a function that finds it."""

    read: Read
    shape: tuple[int, ...]
    dtype: str
    spec: BlockFormat
    tensor_amax: Callable[[], float | None] = lambda: None


class Result(NamedTuple):
    """What `quantized` returns. `sums` is complete only once all pieces have been taken."""

    tensor_scale: np.ndarray | None
    pieces: Iterable[Piece]
    sums: Sums


def all_quantized(tasks: Iterable[Task], workers: Workers = ALONE) -> Iterator[Result]:
    """Yields the result of `quantized` for each task, computing small tensors many at a time.

    Some of `tasks` are taken before the results of those before them are yielded.
    """
    # Windows have threads of their own: finding a shared amax, they wait for `workers`.
    with Workers(workers.count) as others:
        for window in others.map(_with_results, _windows(tasks)):
            for task, result in window:
                yield result or _alone(task, workers)


def _windows(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    """Splits tasks into runs whose small tensors have about `_AHEAD` elements together."""
    window: list[Task] = []
    size = 0
    for task in tasks:
        window.append(task)
        size += math.prod(task.shape) if is_small(task.shape) else 0
        if size >= _AHEAD:
            yield window
            window, size = [], 0
    yield window


def _with_results(tasks: Sequence[Task]) -> list[tuple[Task, Result | None]]:
    """Each task with its result if the tensor is small, else with None."""
    results = iter(_together([task for task in tasks if is_small(task.shape)]))
    return [(task, next(results) if is_small(task.shape) else None) for task in tasks]


def _alone(task: Task, workers: Workers) -> Result:
    sums = Sums()
    amax = task.tensor_amax()
    made = quantized(*task[:4], tensor_amax=amax, sums=sums, workers=workers)
    return Result(*made, sums)


def _together(tasks: Sequence[Task]) -> list[Result]:
    layouts = [_layout(task.shape, task.spec) for task in tasks]
    groups: dict[tuple[str, BlockFormat, int], list[int]] = {}
    for i, (task, layout) in enumerate(zip(tasks, layouts, strict=True)):
        groups.setdefault((task.dtype, of_units(task.spec, 1), layout.width), []).append(i)
    results: dict[int, Result] = {}
    for (dtype, spec, _), members in groups.items():
        batch = _Batch(
            [tasks[i] for i in members], [layouts[i] for i in members], NUMPY_DTYPES[dtype], spec
        )
        results |= zip(members, batch.results(), strict=True)
    return [results[i] for i in range(len(tasks))]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the elements of a small tensor lie in units.

    Attributes:
      width: Cells of a unit.
      cells: For each element, in C order, its cell.
      blocks: For each block, in C order, its first unit.
      units: How many there are.
      counts: Blocks along each axis of the tensor.
    """

    width: int
    cells: np.ndarray
    blocks: np.ndarray
    units: int
    counts: tuple[int, ...]


@functools.lru_cache(32)  # of 256 KiB at most
def _layout(shape: tuple[int, ...], spec: BlockFormat) -> _Layout:
    check_symmetric(spec)
    lengths = shape if spec.scale is None else spec.block_lengths(shape)
    counts = tuple(-(-n // b) for n, b in zip(shape, lengths, strict=True))
    size = math.prod(shape)
    places = np.indices(shape).reshape(len(shape), size)
    block = np.zeros(size, np.intp)
    for place, length, count in zip(places, lengths, counts, strict=True):
        block = block * count + place // length
    sizes = np.bincount(block)
    width = next((width for width in WIDTHS if width >= sizes.max()), WIDTHS[-1])
    units = -(-sizes // width)
    # In the order of blocks: the n-th element of a block lies n cells after the block's first cell.
    order = np.argsort(block, kind="stable")
    cells = np.empty_like(order)
    cells[order] = np.arange(size) + np.repeat(_starts(units) * width - _starts(sizes), sizes)
    return _Layout(width, cells, _starts(units), int(units.sum()), counts)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where parts of these lengths start that follow each other."""
    return np.cumsum(lengths) - lengths


class _Batch:
    """Small tensors of one dtype, format and width of units."""

    def __init__(
        self, tasks: Sequence[Task], layouts: Sequence[_Layout], dtype: np.dtype, spec: BlockFormat
    ) -> None:
        self._tasks, self._layouts, self._spec = tasks, layouts, spec
        self._units = np.array([layout.units for layout in layouts])  # of each tensor
        self._count = int(self._units.sum())
        self._firsts = _starts(self._units)  # unit of each tensor
        width, both = layouts[0].width, [*zip(layouts, self._firsts.tolist(), strict=True)]
        self._blocks = np.concatenate([layout.blocks + first for layout, first in both])
        self._cells = np.concatenate([layout.cells + first * width for layout, first in both])
        height = _TILE // width
        self._tiles = np.zeros((-(-self._count // height), height, width), dtype)
        self._tiles.reshape(-1)[self._cells] = self._read(dtype)

    def _read(self, dtype: np.dtype) -> np.ndarray:
        """The elements of all tensors."""
        data = np.empty(len(self._cells), dtype)
        view, start = data.view(np.uint8).data, 0
        for task, layout in zip(self._tasks, self._layouts, strict=True):
            stop = start + len(layout.cells) * dtype.itemsize
            task.read(0, view[start:stop])
            start = stop
        return data

    def results(self) -> Iterator[Result]:
        spec, amax = self._spec, self._amaxes()
        factors = self._columns(self._factors(amax))
        amaxes = self._columns(None if spec.scale is None else amax)
        second = None if spec.tensor_scale is None else self._tensor_scales()
        seconds = self._columns(None if second is None else np.repeat(second, self._units))
        inputs = zip(self._tiles, amaxes, seconds, factors, strict=True)
        done = [encoded(*parts, spec, 1, True) for parts in inputs]
        scale = None
        if spec.scale is not None:
            scale = _joined([tile.scales.scale for tile in done]).reshape(-1)[self._blocks]
        codes = _joined([tile.codes for tile in done]).reshape(-1)[self._cells]
        return map(
            _result,
            self._tasks,
            self._layouts,
            _split(codes, [len(layout.cells) for layout in self._layouts]),
            _split(scale, [len(layout.blocks) for layout in self._layouts]),
            [None] * len(self._tasks) if second is None else second,
            self._sums(done, factors),
        )

    def _amaxes(self) -> np.ndarray:
        """For each unit the amax of its block."""
        amax = self._unit_amaxes(not self._spec.element.has_nan)
        with np.errstate(invalid="ignore"):  # NumPy warns of a NaN, which is the largest
            of_blocks = np.maximum.reduceat(amax, self._blocks)
        return np.repeat(of_blocks, np.diff(self._blocks, append=self._count))

    def _unit_amaxes(self, nan_wins: bool) -> np.ndarray:
        return _joined([unit_amax(tile, 1, nan_wins) for tile in self._tiles])[: self._count, 0]

    def _factors(self, amax: np.ndarray) -> np.ndarray:
        """For each unit a power of two, by which the largest amax of its tensor becomes about 1."""
        top = np.maximum.reduceat(np.where(np.isfinite(amax), amax, 0), self._firsts)
        return np.repeat(np.ldexp(1.0, -np.clip(np.frexp(top)[1], -126, 126)), self._units)

    def _tensor_scales(self) -> np.ndarray:
        """The second scale of each tensor."""
        found = np.maximum.reduceat(self._unit_amaxes(False), self._firsts)
        for i, task in enumerate(self._tasks):
            shared = task.tensor_amax()
            found[i] = found[i] if shared is None else shared
        columns = self._columns(np.repeat(found, self._units))
        made = [second_scale(column, self._spec) for column in columns]
        return _joined(made).reshape(-1)[self._firsts]

    def _columns(self, values: np.ndarray | None) -> Sequence[Any]:
        """Cuts values, one for each unit, into one column for each tile.

        The last column is padded with ones. A padding of zeros would make a block with the scale
        2**-127 where scales are powers of two, and so a slower kind of division for the whole tile.
        """
        if values is None:
            return [None] * len(self._tiles)
        columns = np.ones((*self._tiles.shape[:2], 1), np.float32)
        columns.reshape(-1)[: self._count] = values
        return [*columns]

    def _sums(self, done: Sequence[Encoded], factors: Sequence[np.ndarray]) -> Iterator[Sums]:
        """The `Sums` of each tensor; `factors` are those with which the tiles were encoded."""
        inputs = zip(self._tiles, done, factors, strict=True)
        of_tiles = [_unit_sums(*parts, self._spec) for parts in inputs]
        signal, noise, nonfinite, largest, overflowed = (
            _joined(parts)[: self._count] for parts in zip(*of_tiles, strict=True)
        )
        return map(
            Sums,
            *(np.add.reduceat(part, self._firsts).tolist() for part in (signal, noise, nonfinite)),
            np.maximum.reduceat(largest, self._firsts).tolist(),
            np.add.reduceat(overflowed, self._firsts).tolist(),
        )


def _unit_sums(
    x: np.ndarray, done: Encoded, factor: np.ndarray, spec: BlockFormat
) -> tuple[np.ndarray, ...]:
    """The fields of `Sums` for each unit of a tile."""
    signal, noise = (np.asarray(part).astype(np.float64) for part in (done.signal, done.noise))
    nonfinite, overflowed = np.zeros((2, len(x)), int)
    largest = np.zeros(len(x))
    bad = ~(np.isfinite(signal) & np.isfinite(noise))
    if bad.any():
        wide, error = (np.asarray(a)[bad] for a in errors(x, done.scales, factor, spec, 1))
        known = np.isfinite(wide) & np.isfinite(error)
        signal[bad], noise[bad] = (
            np.sum(part.astype(np.float64) ** 2, axis=1, where=known) for part in (wide, error)
        )
        nonfinite[bad] = np.count_nonzero(~np.isfinite(x[bad]), axis=1)
    if done.unit is not None:
        largest = np.fmax(np.asarray(done.unit)[:, 0], 0)
    if is_cast(spec):
        overflowed = np.count_nonzero(exceeds(x, spec), axis=1)
    square = factor[:, 0].astype(np.float64) ** 2
    return signal / square, noise / square, nonfinite, largest, overflowed


def _result(
    task: Task,
    layout: _Layout,
    codes: np.ndarray,
    scale: np.ndarray | None,
    tensor_scale: np.ndarray | None,
    sums: Sums,
) -> Result:
    columns = task.shape[-1] if task.shape else 1
    rows = slice(0, len(codes) // columns)
    piece = Piece(rows, slice(0, columns), codes.reshape(-1, columns), scale)
    return Result(tensor_scale, (piece,), sums)


def _split(values: np.ndarray | None, lengths: Sequence[int]) -> Sequence[Any]:
    """`values` in parts of these lengths; None for each of them where there are no values."""
    if values is None:
        return [None] * len(lengths)
    ends = [0, *itertools.accumulate(lengths)]
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def _joined(parts: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])
