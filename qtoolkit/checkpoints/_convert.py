"""`convert`: a plan carried out, tensor by tensor, from a file to a file."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._engine import CHUNK, Sums, quantized
from qtoolkit.checkpoints._plan import Plan, TensorPlan, make_plan
from qtoolkit.checkpoints._report import Report, TensorReport
from qtoolkit.checkpoints._safetensors import (
    Path,
    SafetensorsFile,
    check_target,
    write_safetensors,
)
from qtoolkit.formats import BlockFormat, FormatLike, Rules

Progress = Callable[[str, int, int], None]


def convert(
    src: Path,
    dst: Path,
    *,
    format: FormatLike | Rules[Any] = "e4m3fn",
    scaling: str = "tensor",
    skip: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Quantizes the weights of a safetensors file into another one, streaming.

    Which tensors, by one format or by rules, and the layout, are in `make_plan`. Codes are
    `encode(x / scale)`, rounded to nearest even, saturating; scale = amax / max_finite in float32,
    amax over finite elements: the bits of `qtoolkit.quantize`. NaN stays NaN where the format has
    one; in int8 it makes the scale NaN. The same arguments give the same bytes.

    Args:
      src: A safetensors file.
      dst: The file to write; may be `src` with `overwrite`. It appears when it is whole.
      format: Any spelling of an 8-bit float that safetensors has, int8, bfloat16 or float16; the
        last two are rounded to without a scale. Or `Rules` of them over the names of the tensors,
        None keeping a tensor: they decide alone, nothing is skipped by default.
      scaling: "tensor" or "channel".
      skip: Regular expressions; tensors in whose names one is found are kept.
      overwrite: Whether `dst` may be replaced.
      progress: Called with (name, bytes converted, bytes in all) of the source.

    Returns:
      What was done, tensor by tensor.

    Raises:
      CheckpointError: `src` is damaged, `dst` exists, or `make_plan` raises it.
      OSError: A file cannot be opened, read or written; it names the file.
      TypeError, ValueError: As `make_plan`.
    """
    check_target(dst, overwrite)
    with SafetensorsFile(src) as source:
        plan = make_plan(source, format=format, scaling=scaling, skip=skip)
        engine = _Conversion(source, plan, progress)
        write_safetensors(dst, plan.outputs, engine.chunks(), plan.metadata, overwrite=overwrite)
    return Report(
        source=str(src),
        target=str(dst),
        format=_format_names(plan),
        scaling=plan.scaling,
        tensors=tuple(engine.reports),
    )


def _format_names(plan: Plan) -> str:
    if not isinstance(plan.format, Rules):
        return plan.format.name
    used = dict.fromkeys(tensor.format.name for tensor in plan.tensors if tensor.format is not None)
    return ", ".join(used) or "nothing"


class _Conversion:
    """One conversion under way: the open source, and the reports so far."""

    def __init__(self, source: SafetensorsFile, plan: Plan, progress: Progress | None) -> None:
        self.source = source
        self.plan = plan
        self.reports: list[TensorReport] = []
        self._progress = progress
        self._sizes = {info.name: info.nbytes for info in plan.outputs}
        self._done = 0
        self._total = sum(tensor.source.nbytes for tensor in plan.tensors)

    def chunks(self) -> Iterator[tuple[str, Any]]:
        """Everything to be written, a tensor after the other."""
        for tensor in self.plan.tensors:
            yield from self._keep(tensor) if tensor.action == "keep" else self._quantize(tensor)

    def _keep(self, tensor: TensorPlan) -> Iterator[tuple[str, Any]]:
        size = tensor.source.nbytes
        buffer = np.empty(min(4 * CHUNK, size), np.uint8)
        for start in range(0, size, 4 * CHUNK):
            data = buffer[: min(len(buffer), size - start)]
            self.source.read_into(tensor.name, start, data.data)
            yield tensor.name, data
            self._advance(tensor, len(data))
        self.reports.append(
            TensorReport(
                name=tensor.name,
                action="keep",
                reason=tensor.reason,
                bytes_before=size,
                bytes_after=size,
            )
        )

    def _quantize(self, tensor: TensorPlan) -> Iterator[tuple[str, Any]]:
        assert tensor.format is not None
        spec, sums = _spec(tensor), Sums()

        def read(start: int, buffer: memoryview) -> None:
            self.source.read_into(tensor.name, start, buffer)

        source = tensor.source
        scales, pieces = quantized(read, source.shape, source.dtype, spec, sums=sums)
        if scales.scale is not None:
            yield tensor.scale_name, scales.scale
        for piece in pieces:
            yield tensor.name, piece.codes
            if piece.scale is not None:
                yield tensor.scale_name, piece.scale
            self._advance(tensor, piece.codes.size * source.nbytes // source.size)
        if not source.size:
            self._advance(tensor, 0)
        self.reports.append(
            TensorReport(
                name=tensor.name,
                action="quantize",
                format=tensor.format.name,
                bytes_before=source.nbytes,
                bytes_after=sum(self._sizes[name] for name, _, _ in tensor.entries),
                max_scale=None if tensor.scale_shape is None else sums.max_scale,
                sqnr_db=sums.sqnr_db,
                nonfinite=sums.nonfinite,
            )
        )

    def _advance(self, tensor: TensorPlan, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(tensor.name, self._done, self._total)


def _spec(tensor: TensorPlan) -> BlockFormat:
    assert tensor.format is not None
    if tensor.scale_shape is None:
        return BlockFormat.tensor(tensor.format, scale=None)
    if tensor.channel_axis is None:
        return BlockFormat.tensor(tensor.format)
    return BlockFormat.channel(tensor.format, tensor.channel_axis)
