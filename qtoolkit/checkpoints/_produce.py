"""Makes the bytes of planned tensors: read, quantized and packed slab by slab, in order.

Threads compute slabs ahead of what is asked for. The bytes do not depend on how many.
"""

import collections
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from qtoolkit.checkpoints._checkpoint import Tensor, Transposer
from qtoolkit.checkpoints._quantize import (
    BATCH,
    QuantizedSlab,
    Weight,
    largest_magnitudes,
    quantize_slabs,
    tensor_scales_from,
    with_block_scales,
)
from qtoolkit.checkpoints._reader import WeightReader, grid_of
from qtoolkit.checkpoints._report import Progress, TensorPlan, TensorReport
from qtoolkit.checkpoints._slabs import SLAB, Grid, Slab
from qtoolkit.checkpoints._tensors import FLOATS, NUMPY_DTYPES, Entry, shown
from qtoolkit.checkpoints.layouts._encoding import pack_rows, pack_zero_points, same_numbers
from qtoolkit.scaling.internal import WeightErrors, weight_errors

Item = TypeVar("Item")
Result = TypeVar("Result")
_COPY = 2**22  # bytes copied at a time
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


class _Job(NamedTuple):
    """Some of a tensor: a slab of a weight, or bytes that are copied.

    Attributes:
      start, stop: Its elements; its bytes where they are copied.
      slab: None where bytes are copied.
      weight: What the slab is of, if it is quantized.
      reader: Of a slab whose stored codes and scales are written as they are: what reads these.
    """

    tensor: TensorPlan
    start: int
    stop: int
    is_last: bool
    slab: Slab | None = None
    weight: Weight | None = None
    reader: WeightReader | None = None

    @property
    def batch_key(self) -> tuple[Any, ...] | None:
        """What small weights have in common that are quantized in one call; None of all others."""
        if self.start or not self.is_last or self.weight is None or self.stop * BATCH > SLAB:
            return None
        weight = self.weight
        return weight.spec, weight.grid, weight.tensor.dtype, weight.tensor_scale is None


class Production:
    """Makes the bytes of tensors.

    Args:
      tensors: All that are planned: some share a tensor scale.
      progress: Called after each chunk.

    Attributes:
      reports: What was done, a report for each tensor that is made.
      total: Bytes to make, for `progress`.
    """

    def __init__(
        self, tensors: Iterable[TensorPlan], workers: Workers, progress: Progress | None = None
    ) -> None:
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
        self._transposer = Transposer()

    def chunks(self, tensors: Sequence[TensorPlan]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name of an entry, the next bytes of it) for some tensors, one after the other."""
        errors: WeightErrors | None = None  # of the tensor that is being made
        zeros: list[np.ndarray] = []  # its zero points, which are packed along all rows
        jobs = (job for tensor in tensors for job in self._jobs(tensor))
        batches = self._workers.map(_outputs, _batches(jobs))
        for job, output in itertools.chain.from_iterable(batches):
            tensor = job.tensor
            if output.zero_point is not None:
                zeros.append(output.zero_point)
                whole = np.concatenate(zeros) if job.is_last else None
                output = output._replace(zero_point=whole)
                zeros = [] if job.is_last else zeros
            for entry, data in _entries(job, output):
                yield entry.name, data
                self._done += data.nbytes
                if self._progress is not None:
                    self._progress(shown(tensor.name), self._done, self.total)
            errors = output.errors if errors is None else errors + output.errors
            if job.is_last:
                self.reports.append(
                    tensor.report(
                        max_scale=errors.max_scale if tensor.has_scales else None,
                        sqnr_db=errors.known_sqnr_db if tensor.action == "quantize" else None,
                        nonfinite=errors.nonfinite,
                        overflowed=errors.overflowed,
                    )
                )
                errors = None

    def _jobs(self, tensor: TensorPlan) -> Iterator[_Job]:
        source = tensor.source
        if tensor.spec is None or not source.size:
            ends = [*range(0, source.nbytes, _COPY), source.nbytes]
            for start, stop in itertools.pairwise(ends) if len(ends) > 1 else [(0, 0)]:
                yield _Job(tensor, start, stop, stop == source.nbytes)
            return
        reader, encoding = self._same_numbers(tensor), tensor.encoding
        weight = None
        if reader is not None or (encoding is not None and encoding.quantizer is not None):
            assert encoding is not None
            grid = grid_of(encoding)
        else:
            weight = self._weight(tensor)
            grid = weight.grid
        for slab in grid.slabs():
            start = grid.start(slab)
            stop = start + slab.size
            yield _Job(tensor, start, stop, stop == source.size, slab, weight, reader)

    def _same_numbers(self, tensor: TensorPlan) -> WeightReader | None:
        """What reads the codes of a weight that the target can hold as they are; else None."""
        # A second rounding would cost 3 dB where scales are powers of two: the largest code of a
        # block is then seldom the largest that there is, and another scale follows from it.
        old, new = tensor.source.encoding, tensor.encoding
        if old is None or new is None or not same_numbers(old, new):
            return None
        weight = tensor.source.weight
        scale, _ = weight.scales
        least = np.float32(new.spec.amax_epsilon) / np.float32(new.spec.largest)
        return weight if scale is not None and scale.astype(np.float32).min() >= least else None

    def _weight(self, tensor: TensorPlan) -> Weight:
        spec, encoding, source = tensor.spec, tensor.encoding, tensor.source
        assert spec is not None
        if encoding is None:
            return Weight(source, spec, Grid.whole(source.size))
        if encoding.transposed:
            source = self._transposer.transposed(source)
        tensor_scale = None
        if encoding.tensor_scale is not None:
            if not tensor.group:
                count = encoding.tensor_scale.nbytes // 4
                amaxes = largest_magnitudes(tensor.source, count, self._workers.map)
            elif tensor.group in self._amaxes:
                amaxes = self._amaxes[tensor.group]
            else:
                members = self._groups[tensor.group]
                each = [largest_magnitudes(member, 1, self._workers.map) for member in members]
                amaxes = self._amaxes[tensor.group] = np.max(each, axis=0)
            tensor_scale = np.asarray(tensor_scales_from(amaxes, spec))
        return with_block_scales(
            Weight(source, spec, grid_of(encoding), tensor_scale), self._workers.map
        )


def _batches(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    """Parts that are computed together: small weights that are alike, and follow one another."""
    for is_small, run in itertools.groupby(jobs, lambda job: job.batch_key):
        size, is_compiled = BATCH if is_small else 1, False
        while batch := [*itertools.islice(run, size)]:
            is_compiled |= len(batch) == size
            yield from [batch] if is_compiled else ([job] for job in batch)


def _outputs(jobs: Sequence[_Job]) -> Iterable[tuple[_Job, QuantizedSlab]]:
    """What becomes of some jobs: computed in a thread."""
    slabs = [(j.weight, j.slab) for j in jobs if j.weight is not None and j.slab is not None]
    outputs = quantize_slabs(slabs) if slabs else [_output_of(job) for job in jobs]
    return [*zip(jobs, map(_pack, jobs, outputs), strict=True)]


def _output_of(job: _Job) -> QuantizedSlab:
    encoding = job.tensor.encoding
    if job.slab is None:
        return _copy_bytes(job)
    if job.reader is not None:
        return _copy_codes(job, job.slab, job.reader)
    assert encoding is not None
    assert encoding.quantizer is not None
    x = job.tensor.source.read(job.start, job.stop).astype(np.float32)
    data, values = encoding.quantizer(x)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        return QuantizedSlab(data, None, weight_errors(x, values))


def _pack(job: _Job, output: QuantizedSlab) -> QuantizedSlab:
    encoding = job.tensor.encoding
    if job.slab is None or encoding is None or encoding.packing is None:
        return output
    codes = pack_rows(output.codes, encoding.packing, encoding.spec.element.bits)
    if not encoding.scales_first:
        return output._replace(codes=codes)
    assert output.scale is not None
    scales = output.scale.view(np.uint8).reshape(-1, encoding.scales_first)
    codes = np.concatenate([scales, codes.reshape(len(scales), -1)], axis=1)
    return output._replace(codes=codes, scale=None)


def _copy_codes(job: _Job, slab: Slab, reader: WeightReader) -> QuantizedSlab:
    """The stored codes of a slab, and with the first one all scales."""
    codes = reader.codes_between(job.start, job.stop).view(np.uint8)
    scale, _ = reader.scales
    assert scale is not None
    x = job.tensor.source.read(job.start, job.stop)
    largest = float(scale.astype(np.float32).max())
    errors = dataclasses.replace(weight_errors(x, x), max_scale=largest)
    shaped = codes.reshape(slab.rows, slab.columns)
    return QuantizedSlab(shaped, scale if job.start == 0 else None, errors)


def _copy_bytes(job: _Job) -> QuantizedSlab:
    source, encoding = job.tensor.source, job.tensor.encoding
    data = np.empty(job.stop - job.start, np.uint8)
    if data.size:
        source.read_into(job.start, data.data)
    nonfinite = 0
    if source.dtype in _NONFINITE_BYTES:
        nonfinite = int(np.count_nonzero(_NONFINITE_BYTES[source.dtype][data]))
    elif source.dtype in _INFINITY:
        infinity = _INFINITY[source.dtype]
        nonfinite = int(np.count_nonzero(data.view(infinity.dtype) & infinity == infinity))
    scale = None
    if encoding is not None and encoding.scale is not None:  # a weight without elements
        scale = np.ones(encoding.scale.nbytes // 4, np.float32)
    return QuantizedSlab(data, scale, WeightErrors(nonfinite=nonfinite))


def _entries(job: _Job, output: QuantizedSlab) -> Iterator[tuple[Entry, np.ndarray]]:
    """The entries of which a job has bytes, with these."""
    encoding, scale, zero_point = job.tensor.encoding, output.scale, output.zero_point
    if encoding is None:
        yield job.tensor.entries[0], output.codes
        return
    tensor_scale = None
    if job.start == 0:
        yield from encoding.constant_pairs
        tensor_scale = None if job.weight is None else job.weight.tensor_scale
    if encoding.scale is not None and scale is not None:
        dtype = NUMPY_DTYPES[encoding.scale.dtype]
        is_byte = scale.itemsize == dtype.itemsize == 1  # E8M0, which some layouts call U8
        scale = scale.view(dtype) if is_byte else scale.astype(dtype, copy=False)
        scale = scale if len(scale) else None
    if zero_point is not None:
        assert encoding.zero_packing is not None
        zeros, bits = zero_point.reshape(encoding.matrix_shape[0], -1), encoding.spec.element.bits
        zero_point = np.ascontiguousarray(pack_zero_points(zeros, encoding.zero_packing, bits))
    yield from encoding.pairs(output.codes, scale, zero_point, tensor_scale)
