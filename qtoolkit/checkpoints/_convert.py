"""The engine of `convert`: a stream of chunks through two kernels, whatever the size of the file.

A tensor is seen as a matrix in C order with a scale for each row or each column (one scale in all:
one row). It is read twice in contiguous blocks of at most `CHUNK` elements, first for the largest
magnitudes, then to be encoded. Blocks are padded with zeros to few shapes, so that few compile.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts import decode
from qtoolkit.casts.internal import NEAREST, exact_float32, quotient
from qtoolkit.checkpoints._header import NUMPY_DTYPES
from qtoolkit.checkpoints._plan import Plan, TensorPlan, as_matrix, make_plan
from qtoolkit.checkpoints._report import Report, TensorReport, decibels
from qtoolkit.checkpoints._safetensors import (
    Path,
    SafetensorsFile,
    check_target,
    write_safetensors,
)
from qtoolkit.formats import BlockFormat, Format, FormatLike, Rules
from qtoolkit.scaling import amax
from qtoolkit.scaling.internal import Scales, block_codes, scale_from, scaled_values

CHUNK = 2**20  # elements in a block: 4 MiB of float32, enough to keep a few cores busy
_LEAST = 2**10  # the smallest block, and what is summed in float32 before float64 takes over

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
    amax over finite elements. NaN stays NaN where the format has one (int8: 0). The same arguments
    give the same bytes.

    Args:
      src: A safetensors file.
      dst: The file to write; may be `src` with `overwrite`. It appears when it is whole.
      format: Any spelling of an 8-bit float that safetensors has, int8, bfloat16 or float16; the
        last two are rounded to without a scale. Or `Rules` of them over the names of the tensors,
        None keeping a tensor: they decide alone, nothing is skipped by default.
      scaling: "tensor" or "channel".
      skip: Regular expressions; tensors in whose names one is found are kept.
      overwrite: Whether `dst` may be replaced.
      progress: Called with (name, bytes read, bytes to read in all); scaled tensors are read twice.

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
        engine = _Engine(source, plan, progress)
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


@dataclasses.dataclass(frozen=True)
class _Block:
    """A contiguous part of a matrix: full rows, or a piece of one row."""

    rows: slice
    columns: slice
    start: int  # its first element
    size: int
    shape: tuple[int, int]  # of the padded block that the kernels see


class _Engine:
    """One conversion under way: the open source, a reused buffer, the reports so far."""

    def __init__(self, source: SafetensorsFile, plan: Plan, progress: Progress | None) -> None:
        self.source = source
        self.plan = plan
        self.reports: list[TensorReport] = []
        self._progress = progress
        self._done = 0
        self._total = sum(
            tensor.source.nbytes * (1 if tensor.scale_shape is None else 2)
            for tensor in plan.tensors
        )
        self._buffer = np.empty(4 * CHUNK, np.uint8)

    def chunks(self) -> Iterator[tuple[str, Any]]:
        """Everything to be written, a tensor after the other."""
        for tensor in self.plan.tensors:
            yield from self._keep(tensor) if tensor.action == "keep" else self._quantize(tensor)

    def _keep(self, tensor: TensorPlan) -> Iterator[tuple[str, Any]]:
        size = tensor.source.nbytes
        for start in range(0, size, len(self._buffer)):
            data = self._buffer[: min(len(self._buffer), size - start)]
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
        fmt, axis = tensor.format, as_matrix(tensor)[2]
        assert fmt is not None
        scales = None if tensor.scale_shape is None else self._scales(tensor, fmt, axis)
        if scales is not None:
            yield tensor.scale_name, scales
        signal, noise, nonfinite = 0.0, 0.0, 0
        for block, x in self._blocks(tensor):
            scale = None if scales is None else _padded_part(scales, block, axis)
            codes, squares, errors, unit, count = _encode_block(x, scale, fmt, axis)
            yield tensor.name, np.asarray(codes).reshape(-1)[: block.size]
            area = np.asarray(unit, np.float64) ** 2
            signal += float(np.sum(np.asarray(squares) * area))
            noise += float(np.sum(np.asarray(errors) * area))
            nonfinite += int(count)
        self.reports.append(
            TensorReport(
                name=tensor.name,
                action="quantize",
                format=fmt.name,
                bytes_before=tensor.source.nbytes,
                bytes_after=tensor.source.size * fmt.bits // 8
                + (0 if scales is None else scales.nbytes),
                max_scale=None if scales is None else float(scales.max(initial=0)),
                sqnr_db=decibels(signal, noise),
                nonfinite=nonfinite,
            )
        )

    def _scales(self, tensor: TensorPlan, fmt: Format, axis: int) -> np.ndarray:
        """First pass: float32 [rows, 1] or [1, columns]."""
        rows, columns, _ = as_matrix(tensor)
        largest = np.zeros((rows, 1) if axis == 0 else (1, columns), np.float32)
        for block, x in self._blocks(tensor):
            found = np.asarray(_amax_block(x, axis))
            part = largest[block.rows] if axis == 0 else largest[:, block.columns]
            np.maximum(part, found[: part.shape[0], : part.shape[1]], out=part)
        padded = np.zeros(_power_of_two(largest.size), np.float32)
        padded[: largest.size] = largest.reshape(-1)
        scales = np.asarray(_scales_from_amax(padded, fmt))
        return scales[: largest.size].reshape(largest.shape)

    def _blocks(self, tensor: TensorPlan) -> Iterator[tuple[_Block, np.ndarray]]:
        """The blocks of a tensor, each with its padded data, valid until the next is asked for."""
        dtype = NUMPY_DTYPES[tensor.source.dtype]
        rows, columns, _ = as_matrix(tensor)
        for block in _cut(rows, columns):
            data = self._buffer[: math.prod(block.shape) * dtype.itemsize]
            used = block.size * dtype.itemsize
            data[used:] = 0
            self.source.read_into(tensor.name, block.start * dtype.itemsize, data[:used].data)
            yield block, data.view(dtype).reshape(block.shape)
            self._advance(tensor, used)

    def _advance(self, tensor: TensorPlan, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(tensor.name, self._done, self._total)


def _cut(rows: int, columns: int) -> Iterator[_Block]:
    """Blocks of at most `CHUNK` elements: as many full rows as fit, or pieces of a row."""
    if rows * columns == 0:
        return
    if rows == 1 or columns > CHUNK:
        for row in range(rows):
            for column in range(0, columns, CHUNK):
                width = min(CHUNK, columns - column)
                padded = min(CHUNK, max(_LEAST, _power_of_two(width)))
                yield _Block(
                    rows=slice(row, row + 1),
                    columns=slice(column, column + width),
                    start=row * columns + column,
                    size=width,
                    shape=(1, padded),
                )
        return
    most = CHUNK // columns
    for row in range(0, rows, most):
        height = min(most, rows - row)
        yield _Block(
            rows=slice(row, row + height),
            columns=slice(0, columns),
            start=row * columns,
            size=height * columns,
            shape=(min(most, _power_of_two(height)), columns),
        )


def _padded_part(scales: np.ndarray, block: _Block, axis: int) -> np.ndarray:
    """The scales of a block, [rows, 1] or [1, columns], ones where the block is padding."""
    part = scales[block.rows] if axis == 0 else scales[:, block.columns]
    padded = np.ones((block.shape[0], 1) if axis == 0 else (1, block.shape[1]), np.float32)
    padded[: part.shape[0], : part.shape[1]] = part
    return padded


def _power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()


@functools.partial(jax.jit, static_argnums=1)
def _amax_block(x: jax.Array, axis: int) -> jax.Array:
    return amax(x, axis=1 - axis)


@functools.partial(jax.jit, static_argnums=1)
def _scales_from_amax(amax: jax.Array, fmt: Format) -> jax.Array:
    return scale_from(amax, BlockFormat.tensor(fmt), None)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _encode_block(
    x: jax.Array, scale: jax.Array | None, fmt: Format, axis: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Codes of x / scale; partial sums of its squares and squared errors; their unit; non-finites.

    The sums, [rows, n] or [1, columns], are in units of the scale, or of the largest magnitude
    where there is none: the squares of the elements themselves may leave float32.
    """
    spec = BlockFormat.tensor(fmt, scale=None)
    if scale is not None:
        spec = BlockFormat.channel(fmt, axis)
    codes = block_codes(x, spec, NEAREST, Scales(scale))
    finite = lax.is_finite(exact_float32(x))
    zero = jnp.zeros(x.shape, jnp.float32)
    wide = jnp.where(finite, scaled_values(x, spec, Scales(scale)), zero)
    error = wide - jnp.where(finite, decode(codes, fmt), zero)
    unit = scale
    if unit is None:
        largest = amax(x)
        unit = jnp.where(largest == 0, jnp.ones_like(largest), largest)
        wide, error = quotient(wide, unit), quotient(error, unit)
    count = jnp.sum(~finite, dtype=jnp.int32)
    return codes, _partial_sums(wide * wide, axis), _partial_sums(error * error, axis), unit, count


def _partial_sums(x: jax.Array, axis: int) -> jax.Array:
    if axis == 1:
        return jnp.sum(x, axis=0, keepdims=True)
    if x.shape[1] % _LEAST:
        return jnp.sum(x, axis=1, keepdims=True)
    return jnp.sum(x.reshape(x.shape[0], -1, _LEAST), axis=2)
