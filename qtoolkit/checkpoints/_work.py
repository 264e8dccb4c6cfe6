"""A conversion under way: what is read and quantized, and what is written, piece by piece."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._base import Source
from qtoolkit.checkpoints._batches import Result, Task, all_quantized
from qtoolkit.checkpoints._engine import Sums, amax_of
from qtoolkit.checkpoints._header import NUMPY_DTYPES, CheckpointError, TensorInfo, listed, shown
from qtoolkit.checkpoints._plan import Plan, TensorPlan
from qtoolkit.checkpoints._report import Progress, TensorReport
from qtoolkit.checkpoints._stored import Stored, pack_codes, scale_bytes
from qtoolkit.checkpoints._tiles import Read
from qtoolkit.checkpoints._workers import ALONE, Workers

_COPY = 2**22  # bytes copied at a time
_NAMED = 20  # tensors with NaN or Inf that are named
# The patterns of +Inf and -Inf. Those of NaNs of the same sign are larger.
_INFINITIES = {
    dtype: np.array([np.inf, -np.inf], NUMPY_DTYPES[dtype]).view(f"u{NUMPY_DTYPES[dtype].itemsize}")
    for dtype in ("F64", "F32", "F16", "BF16")
}


def reader(source: Source, name: str, offset: int = 0) -> Read:
    """What `quantized` reads by: a tensor from byte `offset` on."""

    def read(start: int, buffer: memoryview) -> None:
        source.read_into(name, offset + start, buffer)

    return read


def copied(source: Source, info: TensorInfo) -> Iterator[tuple[str, np.ndarray]]:
    """(name, the next bytes) of a tensor as it is."""
    for start in range(0, info.nbytes, _COPY):
        data = np.empty(min(_COPY, info.nbytes - start), np.uint8)
        source.read_into(info.name, start, data.data)
        yield info.name, data


def shared_amax(source: Source, infos: Iterable[TensorInfo], workers: Workers = ALONE) -> float:
    """The largest magnitude in weights that share a second scale."""
    return max(
        amax_of(reader(source, info.name), info.shape, info.dtype, workers=workers)
        for info in infos
    )


def tasks_of(
    source: Source, info: TensorInfo, stored: Stored, tensor_amax: Callable[[], float | None]
) -> Iterator[Task]:
    """What is quantized for a weight, which is written as `stored`: each of its matrices."""
    count, rows, columns = stored.matrices
    for matrix in range(count):
        read = reader(source, info.name, matrix * (info.nbytes // count))
        yield Task(read, (rows, columns), info.dtype, stored.spec, tensor_amax)


def entries(
    stored: Stored, results: Iterable[Result], sums: Sums
) -> Iterator[tuple[str, np.ndarray]]:
    """What is written for a quantized weight: (name of an entry, the next bytes of it).

    The sums of `results`, those of its matrices, are added to `sums`.
    """
    for entry, data in stored.constants:
        yield entry.name, np.frombuffer(data, np.uint8)
    for number, result in enumerate(results):
        # A second scale is one in all, or one for each matrix.
        if stored.second is not None and 4 * number < stored.second.nbytes:
            assert result.tensor_scale is not None
            second = np.asarray(result.tensor_scale, np.float32).reshape(1)
            with np.errstate(divide="ignore"):
                inverts = stored.second_divides and not stored.spec.tensor_scale_divides
                yield stored.second.name, 1 / second if inverts else second
        for piece in result.pieces:
            yield stored.codes.name, pack_codes(piece.codes, stored)
            if stored.scale is not None and piece.scale is not None:
                yield stored.scale.name, scale_bytes(piece.scale, stored.scale)
        sums.add(result.sums)


def _nonfinite_count(data: np.ndarray, dtype: str) -> int:
    """How many elements of `dtype` in some bytes are NaN or infinite; 0 for what is not wide."""
    if dtype not in _INFINITIES:
        return 0
    infinities = _INFINITIES[dtype]
    patterns = data.view(infinities.dtype)
    signed = data.view(f"i{patterns.itemsize}")
    # Two maxima are a small part of the time of a copy, and nearly always enough: as signed numbers
    # the patterns of positive elements are the largest, as unsigned ones those of negative ones.
    if signed.max() < infinities[0] and patterns.max() < infinities[1]:
        return 0
    return int(np.count_nonzero(patterns & infinities[0] == infinities[0]))


class Work:
    """One conversion under way: the open source, and a report for each tensor done so far."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        allow_nonfinite: bool,
        progress: Progress | None,
        workers: Workers,
    ) -> None:
        self.reports: list[TensorReport] = []
        self.plan = plan
        self.source = source
        self._workers = workers
        self._allow_nonfinite = allow_nonfinite
        self._progress = progress
        self._done = 0
        self._total = 0
        self._groups: dict[str, list[TensorPlan]] = {}
        for tensor in plan.tensors:
            if tensor.group:
                self._groups.setdefault(tensor.group, []).append(tensor)
        self._amaxes: dict[str, float] = {}

    def start(self, tensors: Sequence[TensorPlan]) -> None:
        """Says what will be written, for `progress`."""
        self._total = sum(tensor.nbytes for tensor in tensors)

    def chunks(
        self, tensors: Sequence[TensorPlan], finish: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[str, Any]]:
        """Yields (name, bytes) for some tensors, one after the other; then calls `finish`."""
        changed = (tensor for tensor in tensors if tensor.spec is not None)
        tasks = itertools.chain.from_iterable(map(self._tasks, changed))
        results = all_quantized(tasks, self._workers)
        for tensor in tensors:
            parts = self._copied(tensor) if tensor.spec is None else self._made(tensor, results)
            for name, data in parts:
                yield name, data
                self._done += data.nbytes
                if self._progress is not None:
                    self._progress(shown(tensor.name), self._done, self._total)
        finish()

    def accepts(self, reports: Sequence[TensorReport]) -> bool:
        """Whether a file whose tensors have these reports may be written or kept."""
        return not self._bad(reports)

    def _bad(self, reports: Sequence[TensorReport]) -> list[TensorReport]:
        if self._allow_nonfinite:
            return []
        return [r for r in reports if r.nonfinite and r.action != "keep"]

    def finish(self) -> None:
        """Raises where weights had NaN or Inf and may not."""
        bad = self._bad(self.reports)
        if not bad:
            return
        named = listed((f"{shown(r.name)} ({r.nonfinite:,})" for r in bad), _NAMED)
        wide = " and without --keep-dtype" if any(r.action == "cast" for r in bad) else ""
        raise CheckpointError(
            f"{self.source.path}: NaN or Inf in weights: {named}; expected finite numbers; "
            f"copy them as they are, with --skip{wide}, or pass --allow-nonfinite"
        )

    def _copied(self, tensor: TensorPlan) -> Iterator[tuple[str, np.ndarray]]:
        sums = Sums()
        for name, data in copied(self.source, tensor.source):
            sums.nonfinite += _nonfinite_count(data, tensor.source.dtype)
            yield name, data
        self._report(tensor, sums)

    def _tasks(self, tensor: TensorPlan) -> Iterable[Task]:
        """What is quantized for a tensor, or rounded to another wide dtype."""
        info = tensor.source
        if tensor.stored is None:
            assert tensor.spec is not None
            return [Task(reader(self.source, info.name), info.shape, info.dtype, tensor.spec)]
        amax = functools.partial(self._group_amax, tensor.group)
        return tasks_of(self.source, info, tensor.stored, amax)

    def _made(
        self, tensor: TensorPlan, results: Iterator[Result]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The codes and scales of a tensor, or its elements; its results are the next ones."""
        sums = Sums()
        if tensor.stored is not None:
            matrices = itertools.islice(results, tensor.stored.matrices[0])
            yield from entries(tensor.stored, matrices, sums)
        else:
            result = next(results)
            for piece in result.pieces:
                yield tensor.name, piece.codes
            sums.add(result.sums)
        self._report(tensor, sums)

    def _group_amax(self, group: str) -> float | None:
        if group and group not in self._amaxes:
            infos = [tensor.source for tensor in self._groups[group]]
            self._amaxes[group] = shared_amax(self.source, infos, self._workers)
        return self._amaxes.get(group)

    def _report(self, tensor: TensorPlan, sums: Sums) -> None:
        is_quantized = tensor.action == "quantize"
        self.reports.append(
            TensorReport(
                name=tensor.name,
                action=tensor.action,
                reason=tensor.reason,
                dtype=tensor.dtype,
                format=tensor.format.name if is_quantized and tensor.format else "",
                bytes_before=self.plan.before(tensor).nbytes,
                bytes_after=tensor.nbytes,
                max_scale=sums.max_scale if tensor.stored is not None else None,
                sqnr_db=sums.sqnr_db if is_quantized else None,
                nonfinite=sums.nonfinite,
                overflowed=sums.overflowed,
            )
        )
