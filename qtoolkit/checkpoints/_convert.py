"""`convert` and `dequantize_checkpoint`: a source planned, quantized as a stream, written."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._batches import Result, Task, all_quantized
from qtoolkit.checkpoints._container import destination, layout_in, tree_of
from qtoolkit.checkpoints._dequantized import check_quantized, dequantized
from qtoolkit.checkpoints._engine import Sums, amax_of
from qtoolkit.checkpoints._header import NUMPY_DTYPES, CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._input_scales import InputScales
from qtoolkit.checkpoints._limits import byte_count, worker_count
from qtoolkit.checkpoints._parts import Shard, check_shard, write_folder
from qtoolkit.checkpoints._plan import ContainerName, Plan, TensorPlan
from qtoolkit.checkpoints._planner import make_plan
from qtoolkit.checkpoints._report import Progress, Report, TensorReport
from qtoolkit.checkpoints._roles import AxisChoice
from qtoolkit.checkpoints._safetensors import write_safetensors
from qtoolkit.checkpoints._source import CONFIG, Folder, Source, open_source
from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._stored import Stored, pack_codes, scale_bytes
from qtoolkit.checkpoints._tiles import Read
from qtoolkit.checkpoints._workers import Workers
from qtoolkit.formats import FormatLike, Rules, SpecLike

_COPY = 2**22  # bytes copied at a time
_NAMED = 20  # tensors with NaN or Inf that are named
# The patterns of +Inf and -Inf. Those of NaNs of the same sign are larger.
_INFINITIES = {
    dtype: np.array([np.inf, -np.inf], NUMPY_DTYPES[dtype]).view(f"u{NUMPY_DTYPES[dtype].itemsize}")
    for dtype in ("F64", "F32", "F16", "BF16")
}


def convert(
    src: Path,
    dst: Path,
    *,
    format: SpecLike | Rules[Any] = "e4m3fn",
    scaling: str | None = None,
    layout: str | None = None,
    skip: Sequence[str] = (),
    keep_dtype: FormatLike | None = None,
    channel_axis: AxisChoice = "auto",
    input_scales: InputScales | None = None,
    to: ContainerName = "safetensors",
    max_shard_size: int | str = "5GB",
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    shard: Shard | None = None,
    workers: int | None = None,
    max_memory: int | str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantizes the weights of a checkpoint into another one, streaming.

    A folder becomes a folder, with index, config.json and the other files in it (`Report.left`
    names what is not copied); a file or a checkpoint of orbax becomes a safetensors file. With
    `to="orbax"` each becomes a checkpoint of orbax. Codes and scales are those of
    `qtoolkit.quantize`, rounded to nearest even, saturating. What is quantized in the source is
    dequantized first. The same arguments give the same bytes.

    Args:
      src: A folder as Hugging Face's or orbax's, or a file: safetensors, npz, Flax's msgpack, GGUF.
        Folders of the first kind and safetensors files may also be URLs, such as
        "s3://bucket/model", which fsspec reads.
      dst: The folder or file to write, or a URL; not `src`. It appears when it is whole. In a
        folder behind a URL each file does, config.json last.
      format, scaling, layout, skip, keep_dtype, channel_axis, input_scales: As in `make_plan`.
      to: "safetensors", or "orbax": the plain layout in a tree, that of the source or of the names
        split at their dots. `load(dst, like=...)` and orbax read it. What it holds is the same in
        every run, its bytes are not: orbax chooses names of files at random.
      max_shard_size: Bytes of a file of a folder, or such as "5GB".
      allow_nonfinite: Whether weights with NaN or Inf are quantized and cast; what is copied may
        have them, as masks do, and is named in the report. Inf saturates, but stays in
        float16 and bfloat16. NaN stays NaN where the format has one; in int8 and FP4 its scale,
        hence its whole block, becomes NaN.
      overwrite: Whether `dst` may be replaced.
      shard: (index, count), index from 0 on: which part of the files of a folder is written, for
        instance `(jax.process_index(), jax.process_count())`. Each process is given the same other
        arguments; then `finalize(dst)` makes the checkpoint. Files that are there are kept.
      workers: Threads that read and quantize, each with some 20 MiB; None for one for each core, at
        most 4. The bytes are the same whatever their number.
      max_memory: Bytes, or such as "400MB", that the process may take: fewer workers are started,
        by an estimate, on CPU, of 340 MiB for Python, JAX and compiled programs and 20 for each
        worker; hence at least "360MiB". Arrays that cannot be read in pieces (those of orbax,
        GGUF's blocks, members of npz that are compressed, in Fortran order or of another byte
        order) are read whole: the largest of a source, blocks as float32, comes in addition.
      progress: Called with (name, bytes written, bytes to write in all).

    Returns:
      What was done, tensor by tensor.

    Raises:
      CheckpointError: `src` is no checkpoint or damaged, `dst` exists or is `src`, weights that are
        not copied have NaN or Inf, there is a shard of something that is no folder of files, orbax
        cannot hold a tensor, or `make_plan` raises it. Nothing is written, of shards no file that
        is not whole.
      OSError: A file cannot be opened, read or written; it names the file.
      TypeError, ValueError: As `make_plan`; or `max_shard_size`, `shard`, `workers` or `max_memory`
        is out of range.

    Examples:
      >>> qt.checkpoints.save("model.safetensors", {"w": jnp.ones((64, 32)), "bias": jnp.ones(32)})
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> for tensor in report.tensors:
      ...     print(tensor.name, tensor.dtype, tensor.bytes_before, tensor.bytes_after)
      bias F32 128 128
      w F8_E4M3 8192 2052
      >>> {name: x.dtype.name for name, x in qt.checkpoints.load("fp8.safetensors").items()}
      {'bias': 'float32', 'w_scale': 'float32', 'w': 'float8_e4m3fn'}
    """
    if format is None:  # of `make_plan` it asks to quantize nothing: a copy would look converted
        raise TypeError(
            "convert: format=None, expected a format such as 'e4m3fn', or Rules; "
            "dequantize_checkpoint writes wide weights"
        )
    limit = byte_count(max_shard_size)
    check_shard(shard)
    count = worker_count(workers, max_memory)
    _check_progress(progress)
    with (
        destination(src, dst, overwrite, to, shard),
        contextlib.closing(open_source(src)) as opened,
        Workers(count) as threads,
    ):
        source = dequantized(opened)
        plan = make_plan(
            source,
            format=format,
            scaling=scaling,
            layout=layout_in(to, layout),
            skip=skip,
            keep_dtype=keep_dtype,
            channel_axis=channel_axis,
            input_scales=input_scales,
        )
        work = _Work(source, plan, allow_nonfinite, progress, threads)
        return _written(dst, opened, work, to, limit, overwrite, shard)


def dequantize_checkpoint(
    src: Path,
    dst: Path,
    *,
    dtype: FormatLike | None = None,
    to: ContainerName = "safetensors",
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    shard: Shard | None = None,
    workers: int | None = None,
    max_memory: int | str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Writes the weights that a quantized checkpoint stands for, streaming.

    Args:
      src, dst: As in `convert`. GGUF is quantized, too.
      to, max_shard_size, overwrite, shard, workers, max_memory, progress: As in `convert`.
      dtype: float32, float16 or bfloat16, for all weights; None for the one that config.json
        names, else float32.

    Returns:
      What was done, tensor by tensor.

    Raises:
      CheckpointError: Nothing in `src` is quantized; or as `convert`.
      OSError, ValueError, TypeError: As `convert`.

    Examples:
      >>> qt.checkpoints.save("model.safetensors", {"w": jnp.asarray([[896.0, 0.3]])})
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> report = qt.checkpoints.dequantize_checkpoint("fp8.safetensors", "wide.safetensors")
      >>> qt.checkpoints.load("wide.safetensors")
      {'w': array([[8.960e+02, 3.125e-01]], dtype=float32)}
    """
    limit = byte_count(max_shard_size)
    check_shard(shard)
    count = worker_count(workers, max_memory)
    _check_progress(progress)
    with (
        destination(src, dst, overwrite, to, shard),
        contextlib.closing(open_source(src)) as opened,
        Workers(count) as threads,
    ):
        source = check_quantized(opened)
        plan = make_plan(source, format=None, keep_dtype=dtype)
        work = _Work(source, plan, True, progress, threads)
        return _written(dst, opened, work, to, limit, overwrite, shard)


def _check_progress(progress: object) -> None:
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress={progress!r}, expected a function of (name, bytes written, bytes to write "
            "in all), or None"
        )


def _written(
    dst: Path,
    opened: Source,
    work: "_Work",
    to: ContainerName,
    limit: int,
    overwrite: bool,
    shard: Shard | None,
) -> Report:
    plan = work.plan
    report = Report(
        source=str(opened.path),
        target=str(dst),
        container=to,
        layout=plan.layout,
        format=plan.format_names,
        scaling=plan.scaling,
        dequantized=plan.dequantizes,
        left=_left(opened, to),
        loads_nowhere=plan.loads_nowhere,
        quantization_config=plan.quantization_config,
        caution=plan.caution,
        tensors=(),
    )
    if isinstance(opened, Folder) and to == "safetensors":
        return write_folder(
            dst, opened, plan, work, report, limit=limit, overwrite=overwrite, shard=shard
        )
    if shard is not None:
        raise CheckpointError(
            f"{opened.path}: is a file, which becomes one file, and shards are files of a folder; "
            "leave --shard out"
        )
    work.start(plan.tensors)
    chunks = work.chunks(plan.tensors, work.finish)
    if to == "orbax":
        from qtoolkit.checkpoints._orbax_writer import write_orbax

        custom = getattr(opened, "custom_metadata", {})
        write_orbax(dst, plan, chunks, tree_of(opened), custom, overwrite=overwrite)
    else:
        write_safetensors(dst, plan.outputs, chunks, plan.metadata, overwrite=overwrite)
    return dataclasses.replace(report, tensors=tuple(work.reports))


def _left(opened: Source, to: ContainerName) -> tuple[str, ...]:
    """The files of a source folder that do not go with the weights."""
    if not isinstance(opened, Folder):
        return ()
    config = [CONFIG] if opened.has_config else []
    return (*opened.left, *(() if to == "safetensors" else (*config, *opened.copied)))


def tasks_of(
    reader: Callable[[int], Read],
    info: TensorInfo,
    stored: Stored,
    tensor_amax: Callable[[], float | None],
) -> Iterator[Task]:
    """What is quantized for a weight: each of its matrices.

    Args:
      reader: Gives what `quantized` reads by, for the part of the weight from a byte on.
      info: The weight in the source.
      stored: How it is written.
      tensor_amax: Gives that of `quantized`.
    """
    count, rows, columns = stored.matrices
    for matrix in range(count):
        read = reader(matrix * (info.nbytes // count))
        yield Task(read, (rows, columns), info.dtype, stored.spec, tensor_amax)


def entries(
    stored: Stored, results: Iterable[Result], sums: Sums
) -> Iterator[tuple[str, np.ndarray]]:
    """What is written for a quantized weight: (name of an entry, the next bytes of it).

    Args:
      stored: How it is written.
      results: Of its matrices.
      sums: What theirs are added to.
    """
    for entry, data in stored.constants:
        yield entry.name, np.frombuffer(data, np.uint8)
    for number, result in enumerate(results):
        scales = result.scales
        # A second scale is one in all, or one for each matrix.
        if stored.second is not None and 4 * number < stored.second.nbytes:
            assert scales.tensor_scale is not None
            second = np.asarray(scales.tensor_scale, np.float32).reshape(1)
            with np.errstate(divide="ignore"):
                inverts = stored.second_divides and not stored.spec.tensor_scale_divides
                yield stored.second.name, 1 / second if inverts else second
        if stored.scale is not None and scales.scale is not None:
            yield stored.scale.name, scale_bytes(scales.scale, stored.scale)
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


class _Work:
    """One conversion under way: the open source, the reports so far."""

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
        self._source = source
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
        """What is written for some tensors, a tensor after the other; then calls `finish`."""
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
        """Whether weights with these reports may be written."""
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
        named = ", ".join(f"{shown(r.name)} ({r.nonfinite:,})" for r in bad[:_NAMED])
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        wide = " and without --keep-dtype" if any(r.action == "cast" for r in bad) else ""
        raise CheckpointError(
            f"{self._source.path}: NaN or Inf in weights: {named}{more}; expected finite numbers; "
            f"copy them as they are, with --skip{wide}, or pass --allow-nonfinite"
        )

    def _copied(self, tensor: TensorPlan) -> Iterator[tuple[str, np.ndarray]]:
        size, sums = tensor.source.nbytes, Sums()
        for start in range(0, size, _COPY):
            data = np.empty(min(_COPY, size - start), np.uint8)
            self._source.read_into(tensor.name, start, data.data)
            sums.nonfinite += _nonfinite_count(data, tensor.source.dtype)
            yield tensor.name, data
        self._report(tensor, sums)

    def _tasks(self, tensor: TensorPlan) -> Iterable[Task]:
        """What is quantized for a tensor, or rounded to another wide dtype."""
        info = tensor.source
        if tensor.stored is None:
            assert tensor.spec is not None
            return [Task(self._reader(tensor), info.shape, info.dtype, tensor.spec)]
        reader = functools.partial(self._reader, tensor)
        amax = functools.partial(self._group_amax, tensor.group)
        return tasks_of(reader, info, tensor.stored, amax)

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

    def _reader(self, tensor: TensorPlan, offset: int = 0) -> Callable[[int, memoryview], None]:
        def read(start: int, buffer: memoryview) -> None:
            self._source.read_into(tensor.name, offset + start, buffer)

        return read

    def _group_amax(self, group: str) -> float | None:
        """The largest magnitude in the weights that share a second scale."""
        if group and group not in self._amaxes:
            self._amaxes[group] = max(
                amax_of(
                    self._reader(tensor),
                    tensor.source.shape,
                    tensor.source.dtype,
                    workers=self._workers,
                )
                for tensor in self._groups[group]
            )
        return self._amaxes.get(group)

    def _report(self, tensor: TensorPlan, sums: Sums) -> None:
        """Adds the report of a tensor that is written."""
        is_quantized = tensor.action == "quantize"
        has_scale = is_quantized and tensor.stored is not None
        self.reports.append(
            TensorReport(
                name=tensor.name,
                action=tensor.action,
                reason=tensor.reason,
                dtype=tensor.dtype,
                format=tensor.format.name if is_quantized and tensor.format else "",
                bytes_before=self.plan.before(tensor).nbytes,
                bytes_after=tensor.nbytes,
                max_scale=sums.max_scale if has_scale else None,
                sqnr_db=sums.sqnr_db if is_quantized else None,
                nonfinite=sums.nonfinite,
                overflowed=sums.overflowed,
            )
        )
