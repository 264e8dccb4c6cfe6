"""Makes the bytes of planned tensors: read, quantized and encoded slab by slab, in order.

Threads compute windows of slabs ahead of what is asked for. The bytes do not depend on how many.
"""

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from qtoolkit.checkpoints._quantize import (
    Slab,
    Weight,
    largest_magnitudes,
    prepared,
    quantize_window,
    tensor_scales,
)
from qtoolkit.checkpoints._report import Progress, TensorPlan, TensorReport
from qtoolkit.checkpoints._slabs import Grid, Span
from qtoolkit.checkpoints._tensors import FLOATS, NUMPY_DTYPES, Entry, Tensor, Turning, shown
from qtoolkit.checkpoints._values import Values, grid_of
from qtoolkit.checkpoints.layouts._encoding import packed, same_numbers
from qtoolkit.scaling.internal import ErrorSums, error_sums

Item = TypeVar("Item")
Result = TypeVar("Result")
_COPY = 2**22  # bytes copied at a time
_AHEAD = 2**17  # elements of small slabs that are computed together
# The pattern of infinity: the bits that are set in all numbers that are not finite.
_INFINITY = {
    dtype: np.array([np.inf], NUMPY_DTYPES[dtype]).view(f"u{NUMPY_DTYPES[dtype].itemsize}")
    for dtype in FLOATS
}
# For each byte of a float of 8 bits whether it is NaN or infinite.
_NONFINITE_BYTES = {
    dtype: ~np.isfinite(np.arange(256, dtype=np.uint8).view(NUMPY_DTYPES[dtype]).astype(np.float32))
    for dtype in NUMPY_DTYPES
    if dtype.startswith("F8_")
}


class Workers:
    """Threads that are started once, for many tensors.

    Each thread allocates from a heap of its own, which glibc keeps when the thread ends. With
    threads of their own for every matrix, a stack of 64 experts took 85 to 170 MiB more.

    Attributes:
      count: How many threads; 1 stands for none, everything is done where it is asked for.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._pool = concurrent.futures.ThreadPoolExecutor(count) if count > 1 else None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """`map`, in order; at most one item for each thread, and one more, is computed ahead.

        `items` may use these threads; `function` must not wait for them.
        """
        items = iter(items)
        first = list(itertools.islice(items, 2))
        items = itertools.chain(first, items)
        if self._pool is None or len(first) < 2:
            yield from map(function, items)
            return
        pool = self._pool
        pending = collections.deque(
            pool.submit(function, item) for item in itertools.islice(items, self.count + 1)
        )
        try:
            while pending:
                result = pending.popleft().result()
                pending.extend(pool.submit(function, item) for item in itertools.islice(items, 1))
                yield result
        finally:
            # What runs may still read the source. Nobody would ever say of a cancelled one that it
            # ended, if the threads are gone already.
            concurrent.futures.wait([future for future in pending if not future.cancel()])


class _Part(NamedTuple):
    """Some of a tensor: a slab to quantize, one of which codes and scales are kept, or bytes."""

    tensor: TensorPlan
    slab: Slab | None
    start: int
    stop: int
    is_last: bool
    kept: tuple[Values, Span] | None = None


class _Made(NamedTuple):
    """What became of a part: codes, or bytes, and of a slab its scales from the `first` on."""

    data: np.ndarray
    first: int
    scale: np.ndarray | None
    sums: ErrorSums


class Production:
    """Makes the bytes of tensors.

    Args:
      tensors: All that are planned: some share a tensor scale.
      progress: Called after each chunk.
      stored: The tensors of a quantized source as they are, whose codes may be kept.

    Attributes:
      reports: What was done, a report for each tensor that is made.
      total: Bytes to make, for `progress`.
    """

    def __init__(
        self,
        tensors: Iterable[TensorPlan],
        workers: Workers,
        progress: Progress | None = None,
        stored: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._stored = stored or {}
        self.reports: list[TensorReport] = []
        self.total = 0
        self._done = 0
        self._workers = workers
        self._progress = progress
        self._groups: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.group:
                self._groups.setdefault(tensor.group, []).append(tensor.source)
        self._amaxes: dict[str, np.ndarray] = {}
        self._turning = Turning()

    def chunks(self, tensors: Sequence[TensorPlan]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name of an entry, the next bytes of it) for some tensors, one after the other."""
        sums, scales = ErrorSums(), 0  # of the tensor that is being made: how many are written
        windows = _windows(part for tensor in tensors for part in self._parts(tensor))
        for window, results in self._workers.map(_made, windows):
            for part, made in zip(window, results, strict=True):
                tensor = part.tensor
                is_first = part.start == 0
                for name, data in _entries(part, made, is_first, scales):
                    yield name, data
                    self._done += data.nbytes
                    if self._progress is not None:
                        self._progress(shown(tensor.name), self._done, self.total)
                sums.add(made.sums)
                if made.scale is not None:
                    scales = max(scales, made.first + len(made.scale))
                if part.is_last:
                    self.reports.append(_report(tensor, sums))
                    sums, scales = ErrorSums(), 0

    def _parts(self, tensor: TensorPlan) -> Iterator[_Part]:
        source = tensor.source
        if tensor.spec is None or not source.size:
            ends = [*range(0, source.nbytes, _COPY), source.nbytes]
            for start, stop in itertools.pairwise(ends) if len(ends) > 1 else [(0, 0)]:
                yield _Part(tensor, None, start, stop, stop == source.nbytes)
            return
        values = self._same_values(tensor)
        weight = None if values is not None else self._weight(tensor)
        if weight is not None:
            grid = weight.grid
        else:
            assert tensor.encoding is not None
            grid = grid_of(tensor.encoding)
        start, columns = 0, grid.columns
        for span in grid.spans():
            stop = span.row * columns + span.column + span.rows * span.columns
            slab = None if weight is None else Slab(weight, span)
            kept = None if values is None else (values, span)
            yield _Part(tensor, slab, start, stop, stop == source.size, kept)
            start = stop

    def _same_values(self, tensor: TensorPlan) -> Values | None:
        """The stored values of a weight that the target can hold as they are; else None.

        A second rounding would cost 3 dB where scales are powers of two: the largest code of a
        block is then seldom the largest that there is, and another scale follows from it.
        """
        old, new = tensor.source.encoding, tensor.encoding
        if old is None or new is None or not same_numbers(old, new) or not self._stored:
            return None
        values = Values(old, self._stored)
        scale, _ = values.scales()
        least = np.float32(new.spec.amax_epsilon) / np.float32(new.spec.largest)
        return values if scale is not None and scale.astype(np.float32).min() >= least else None

    def _weight(self, tensor: TensorPlan) -> Weight:
        spec, encoding, source = tensor.spec, tensor.encoding, tensor.source
        assert spec is not None
        if encoding is None:
            return Weight(source, spec, Grid.whole(source.size))
        grid = grid_of(encoding)
        second = None
        if encoding.transposed:
            source = self._turning.transposed(source)
        if encoding.tensor_scale is not None:
            count = encoding.tensor_scale.nbytes // 4
            second = tensor_scales(self._second_amaxes(tensor, count), spec)
        return prepared(Weight(source, spec, grid, second), self._workers.map)

    def _second_amaxes(self, tensor: TensorPlan, count: int) -> np.ndarray:
        """The amaxes from which tensor scales follow: of the tensor, or of all that share one."""
        if not tensor.group:
            return largest_magnitudes(tensor.source, count, self._workers.map)
        if tensor.group not in self._amaxes:
            sources = self._groups[tensor.group]
            found = [largest_magnitudes(source, 1, self._workers.map) for source in sources]
            self._amaxes[tensor.group] = np.max(found, axis=0)
        return self._amaxes[tensor.group]


def _windows(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Runs of parts that are computed together: one large, or small ones until they are enough."""
    window: list[_Part] = []
    size = 0
    for part in parts:
        if window and part.stop - part.start >= _AHEAD:
            yield window
            window, size = [], 0
        window.append(part)
        size += part.stop - part.start
        if size >= _AHEAD:
            yield window
            window, size = [], 0
    if window:
        yield window


def _made(window: list[_Part]) -> tuple[list[_Part], list[_Made]]:
    """What becomes of the parts of a window: computed in a thread."""
    slabs = [part.slab for part in window if part.slab is not None]
    quantized = iter(quantize_window(slabs))
    results = []
    for part in window:
        if part.slab is None:
            results.append(_copied(part) if part.kept is None else _kept(part, *part.kept))
            continue
        slab, encoding = next(quantized), part.tensor.encoding
        codes = slab.codes
        if encoding is not None and encoding.packing is not None:
            codes = packed(codes, encoding.packing, encoding.spec.element.bits)
        results.append(_Made(codes, slab.first, slab.scale, slab.sums))
    return window, results


def _kept(part: _Part, values: Values, span: Span) -> _Made:
    """The stored codes of a slab, and with the first one all scales."""
    encoding = part.tensor.encoding
    assert encoding is not None
    codes = values.codes_between(part.start, part.stop).view(np.uint8)
    if encoding.packing is not None:
        codes = codes.reshape(span.rows, span.columns)
        codes = packed(codes, encoding.packing, encoding.spec.element.bits)
    scale, _ = values.scales()
    assert scale is not None
    x = part.tensor.source.read(part.start, part.stop)
    sums = error_sums(x, x)
    sums.max_scale = float(scale.astype(np.float32).max())
    return _Made(codes, 0, scale if part.start == 0 else None, sums)


def _copied(part: _Part) -> _Made:
    tensor = part.tensor
    data = np.empty(part.stop - part.start, np.uint8)
    if data.size:
        tensor.source.read_into(part.start, data.data)
    sums = ErrorSums(nonfinite=_nonfinite_count(data, tensor.source.dtype))
    encoding = tensor.encoding
    scale = None
    if encoding is not None and encoding.scale is not None:  # a weight without elements
        scale = np.ones(encoding.scale.nbytes // 4, np.float32)
    return _Made(data, 0, scale, sums)


def _entries(
    part: _Part, made: _Made, is_first: bool, scales: int
) -> Iterator[tuple[str, np.ndarray]]:
    """What is written for a part: (name of an entry, bytes). `scales` have been written before."""
    encoding = part.tensor.encoding
    if encoding is None:
        yield part.tensor.name, made.data
        return
    if is_first:
        for entry, data in encoding.constants:
            yield entry.name, np.frombuffer(data, np.uint8)
        if encoding.tensor_scale is not None and part.slab is not None:
            assert part.slab.weight.second is not None
            yield encoding.tensor_scale.name, part.slab.weight.second
    yield encoding.codes.name, made.data
    # Scales of the blocks that start in this part: others have been written with their start.
    if encoding.scale is not None and made.scale is not None:
        scale = made.scale[max(scales - made.first, 0) :]
        if len(scale):
            yield encoding.scale.name, _as_stored(scale, encoding.scale)


def _as_stored(scale: np.ndarray, entry: Entry) -> np.ndarray:
    """Scales as the entry has them: E8M0 is written as U8 by some layouts, its byte unchanged."""
    dtype = NUMPY_DTYPES[entry.dtype]
    if scale.dtype == dtype:
        return scale
    return scale.view(dtype) if scale.itemsize == dtype.itemsize == 1 else scale.astype(dtype)


def _nonfinite_count(data: np.ndarray, dtype: str) -> int:
    """How many elements of `dtype` in some bytes are NaN or infinite; 0 of other dtypes."""
    if dtype in _NONFINITE_BYTES:
        return int(np.count_nonzero(_NONFINITE_BYTES[dtype][data]))
    if dtype not in _INFINITY:
        return 0
    infinity = _INFINITY[dtype]
    return int(np.count_nonzero(data.view(infinity.dtype) & infinity == infinity))


def _report(tensor: TensorPlan, sums: ErrorSums) -> TensorReport:
    return tensor.report(
        max_scale=sums.max_scale if tensor.encoding is not None else None,
        sqnr_db=sums.sqnr_db if tensor.action == "quantize" else None,
        nonfinite=sums.nonfinite,
        overflowed=sums.overflowed,
    )
