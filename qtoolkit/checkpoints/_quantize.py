"""Quantizes weights slab by slab, with the same bits as `qtoolkit.quantize` of a whole weight.

A slab with whole blocks goes through one program, `_quantized`: scales, codes, the rounding error.
Where a block is more than a slab, all amaxes are computed first, by `_amaxes`, and the scales from
them. `_slabs.py` says how a weight is cut.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import NEAREST, exact_float32, projection_of
from qtoolkit.checkpoints._checkpoint import Tensor
from qtoolkit.checkpoints._slabs import Grid, Slab
from qtoolkit.formats import BlockFormat, Format
from qtoolkit.scaling.internal import (
    Scales,
    SlabSums,
    WeightErrors,
    block_codes,
    block_values,
    blocks_of,
    dequantized,
    find_scales,
    largest_magnitude,
    magnitude_max,
    scale_from,
    slab_errors,
    slab_sums,
    tensor_scale_from,
    weight_errors,
)

# `map`, or that of a pool of threads.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
_KEEPING_INF = projection_of("quantized", (), "nearest_even", "propagate")
# Small weights in one call. A call takes some 0.1 ms, as long as to quantize 30 weights of 16x16.
BATCH = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight to quantize.

    Attributes:
      tensor: Where its elements come from: float32, float16 or bfloat16.
      spec: Its format.
      grid: The weight as matrices, and how they are cut into blocks.
      tensor_scale: The second scale that formats such as NVFP4 have, as stored: one for each matrix
        of the grid, or one in all. None if the format has none.
      scale: The scale of each block, [count * down, across]. None if every slab holds whole blocks,
        so that their scales can be computed from the slab.
      nonzero: With `scale`, whether the amax of each block is above 0.
    """

    tensor: Tensor
    spec: BlockFormat
    grid: Grid
    tensor_scale: np.ndarray | None = None
    scale: np.ndarray | None = None
    nonzero: np.ndarray | None = None

    def read(self, slab: Slab) -> np.ndarray:
        """The elements of a slab, padded with zeros to the shape that programs take."""
        start = self.grid.start(slab)
        x = self.tensor.read(start, start + slab.size).reshape(slab.rows, slab.columns)
        return pad_matrix(x, self.grid.program_shape(slab))


class QuantizedSlab(NamedTuple):
    """The codes and scales of a slab.

    Attributes:
      codes: Unsigned codes as from `encode`: [rows, columns]; later packed into bytes.
      scale: The scales, flat, as stored, of the blocks that begin in the slab; None if the format
        has none.
      errors: Of rounding.
      zero_point: The zero points of these blocks, int32, flat; None if the format has none.
    """

    codes: np.ndarray
    scale: np.ndarray | None
    errors: WeightErrors
    zero_point: np.ndarray | None = None


def quantize_slabs(slabs: Sequence[tuple[Weight, Slab]]) -> list[QuantizedSlab]:
    """The slabs of weights of one format, dtype and grid: of several weights whole ones."""
    (weight, slab), n = slabs[0], len(slabs)
    grid = weight.grid
    x = np.stack([w.read(part) for w, part in slabs]) if n > 1 else weight.read(slab)[None]
    spec = slab_spec(weight.spec, grid.lengths(slab))
    seconds = [matrix_scale(w.tensor_scale, grid, part) for w, part in slabs]
    tensor_scale = None if seconds[0] is None else np.stack(seconds)
    down, across = grid.blocks(slab)
    counts = spec.scale_shape(x.shape[1:])
    known = (
        None if a is None else pad_matrix(a[down, across], counts, 1)[None]
        for a in (weight.scale, weight.nonzero)
    )
    arguments = x, *known, tensor_scale
    if n == 1:  # a program with a first axis of 1 takes a fifth longer to compile
        first = jax.tree.map(lambda a: a[0], arguments)
        result = jax.tree.map(lambda a: a[None], jax.device_get(_quantized(*first, spec)))
    else:
        places = np.minimum(np.arange(BATCH), n - 1)  # fills the batch with the last weight
        filled = jax.tree.map(lambda a: a[places], arguments)
        made = jax.device_get(_quantized_weights(*filled, spec))
        result = jax.tree.map(lambda a: a[:n], made)
    codes = result.codes[:, : slab.rows, : slab.columns]
    if result.scale is None:
        errors = slab_errors(slab.size, result.sums, [0.0] * n)
        return [QuantizedSlab(*parts) for parts in zip(codes, [None] * n, errors, strict=True)]
    shape = down.stop - down.start, across.stop - across.start
    scale = _of_blocks(result.scale, counts, shape)
    if tensor_scale is not None:
        tensor_scale = tensor_scale.reshape(n, 1, 1)
    rates = multipliers(scale, tensor_scale, weight.spec)
    max_scales = np.fmax.reduce(rates, axis=(1, 2), initial=0).tolist()
    errors = slab_errors(slab.size, result.sums, max_scales)
    zeros = [None] * n
    if result.zero_point is not None:
        zeros = [*_of_blocks(result.zero_point, counts, shape).reshape(n, -1)]
    elif may_be_subnormal(rates, weight.spec):
        for i in range(n):  # XLA counted such values as 0: compute them again
            values = exact_values(codes[i], rates[i], grid.lengths(slab), weight.spec)
            wide = x[i, : slab.rows, : slab.columns].astype(np.float32)
            with np.errstate(invalid="ignore"):
                exact = weight_errors(wide.reshape(-1), values.reshape(-1))
            errors[i] = dataclasses.replace(errors[i], moments=exact.moments)
    if slab.row % grid.rows % grid.height or slab.column % grid.width:
        scale = scale[:, :0]  # of blocks that begin, and are written, with another slab
    return [*map(QuantizedSlab, codes, scale.reshape(n, -1), errors, zeros)]


def _of_blocks(a: np.ndarray, counts: tuple[int, ...], shape: tuple[int, int]) -> np.ndarray:
    """[weights, down, across] of numbers that programs have made of all blocks, padded ones too."""
    return a.reshape(-1, *counts)[:, : shape[0], : shape[1]]


def pad_matrix(x: np.ndarray, shape: tuple[int, ...], value: Any = 0) -> np.ndarray:
    """A matrix with rows and columns of `value` at its ends, so that it has this shape."""
    if x.shape == shape:
        return x
    result = np.full(shape, value, x.dtype)
    result[: x.shape[0], : x.shape[1]] = x
    return result


def matrix_scale(tensor_scale: np.ndarray | None, grid: Grid, slab: Slab) -> Any:
    """The tensor scale of a slab; None if there is none."""
    if tensor_scale is None:
        return None
    flat = tensor_scale.reshape(-1)
    return flat[grid.matrix(slab) if len(flat) > 1 else 0]


# Subnormal numbers, which XLA on a CPU takes for 0. NumPy does not.


def multipliers(scale: np.ndarray, tensor_scale: Any, spec: BlockFormat) -> np.ndarray:
    """The float32 numbers by which elements are multiplied."""
    rates = scale.astype(np.float32)
    if tensor_scale is None or spec.scale is None:
        return rates * np.float32(2.0**spec.element_exponent)
    with np.errstate(all="ignore"):
        return rates / tensor_scale if spec.tensor_scale_divides else rates * tensor_scale


def may_be_subnormal(rates: np.ndarray, spec: BlockFormat) -> bool:
    """Whether a code times its multiplier may be subnormal in float32; XLA on a CPU makes it 0."""
    is_small = (rates > 0) & (rates < np.float32(2.0**-100))
    return not spec.has_powers and bool(is_small.any())


def exact_values(
    codes: np.ndarray, rates: np.ndarray, lengths: tuple[int | None, int | None], spec: BlockFormat
) -> np.ndarray:
    """The float32 numbers of codes [rows, columns] with a multiplier for each block."""
    wide = rates.astype(np.float64)
    for axis, (length, size) in enumerate(zip(lengths, codes.shape, strict=True)):
        wide = wide if length is None else wide.repeat(length, axis).take(range(size), axis)
    with np.errstate(under="ignore", invalid="ignore", over="ignore"):
        return (_values_of(spec.element)[codes] * wide).astype(np.float32)


@functools.cache
def _values_of(element: Format) -> np.ndarray:
    """float64, what each code stands for."""
    values = element.values()
    nans = np.flatnonzero(np.isnan(values))
    if len(nans) > 1:  # as casts of JAX and ml_dtypes: with the sign of the code
        values[nans] = np.copysign(np.nan, np.where(nans < len(values) // 2, 1, -1))
    return values


# Weights of which blocks are more than a slab.


def weight_amaxes(weight: Weight, map_: Map = map, *, nan_wins: bool) -> np.ndarray:
    """The amax of each block of a weight, [count * down, across]. Reads the whole weight."""
    grid = weight.grid

    def slab_amaxes(slab: Slab) -> tuple[Slab, np.ndarray]:
        spec = slab_spec(weight.spec, grid.lengths(slab))
        return slab, np.asarray(_amaxes(weight.read(slab), spec, nan_wins))

    amaxes = np.zeros((grid.count * grid.down, grid.across), np.float32)
    for slab, found in map_(slab_amaxes, grid.slabs()):
        of_slab = amaxes[grid.blocks(slab)]  # a block may lie in several slabs
        with np.errstate(invalid="ignore"):  # NumPy warns of a NaN, which is the largest
            np.maximum(of_slab, found[: of_slab.shape[0], : of_slab.shape[1]], out=of_slab)
    return amaxes


def largest_magnitudes(tensor: Tensor, count: int = 1, map_: Map = map) -> np.ndarray:
    """The largest finite |x| of each of `count` equal parts of a tensor; 0 where there is none."""
    if not tensor.size:
        return np.zeros(count, np.float32)
    parts = Grid.whole(tensor.size // count, count)
    weight = Weight(tensor, BlockFormat.tensor("e4m3fn"), parts)  # its format has no effect here
    return weight_amaxes(weight, map_, nan_wins=False).reshape(-1)


def with_block_scales(weight: Weight, map_: Map = map) -> Weight:
    """The weight with the scales of its blocks, if its slabs do not hold whole blocks."""
    if weight.spec.scale is None or weight.grid.has_whole_blocks:
        return weight
    amaxes = weight_amaxes(weight, map_, nan_wins=not weight.spec.element.has_nan)
    second = weight.tensor_scale
    if second is not None and second.size > 1:  # one for each matrix
        second = second.reshape(-1, 1, 1)
    by_matrix = amaxes.reshape(weight.grid.count, -1, amaxes.shape[1])
    scale = np.asarray(_scales(by_matrix, second, weight.spec)).reshape(amaxes.shape)
    return dataclasses.replace(weight, scale=scale, nonzero=amaxes != 0)


# The programs: compiled once for each padded shape, dtype and format.


class _Quantized(NamedTuple):
    """The codes, scales and zero points of a slab, and its sums."""

    codes: jax.Array
    scale: jax.Array | None
    zero_point: jax.Array | None
    sums: SlabSums


@functools.partial(jax.jit, static_argnames="spec")
def _quantized(
    x: jax.Array,
    scale: jax.Array | None,
    nonzero: jax.Array | None,
    tensor_scale: jax.Array | None,
    spec: BlockFormat,
) -> _Quantized:
    scales, above_zero = find_scales(x, spec, Scales(scale, tensor_scale))
    if nonzero is not None:
        above_zero = blocks_of(x, spec).spread(nonzero)
    projection = _projection(spec)
    codes = block_codes(x, spec, projection, scales, above_zero)
    # Without these two barriers XLA fuses codes, values and sums into one loop that it does not
    # vectorize: 3 to 9 times as long as `quantize` alone.
    again = lax.optimization_barrier(x)
    values = block_values(again, spec, projection, scales, above_zero)
    wide, values = lax.optimization_barrier((exact_float32(again), values))
    limit = float(spec.element.max_finite) if _is_cast(spec) else None
    sums = slab_sums(wide, values, largest_magnitude(x), limit)
    return _Quantized(codes, scales.scale, scales.zero_point, sums)


@functools.partial(jax.jit, static_argnames="spec")
def _quantized_weights(
    x: jax.Array,
    scale: jax.Array | None,
    nonzero: jax.Array | None,
    tensor_scale: jax.Array | None,
    spec: BlockFormat,
) -> _Quantized:
    """`_quantized` of some weights, one after the other in one call."""
    return lax.map(lambda each: _quantized(*each, spec), (x, scale, nonzero, tensor_scale))


@functools.partial(jax.jit, static_argnames=("spec", "nan_wins"))
def _amaxes(x: jax.Array, spec: BlockFormat, nan_wins: bool) -> jax.Array:
    """The largest finite |x| of each block, float32; NaN if `nan_wins` and the block has a NaN."""
    blocks = blocks_of(x, spec)
    amaxes = magnitude_max(blocks.split(x), blocks.element_axes, nan_wins=nan_wins)
    return blocks.gather(exact_float32(amaxes))


@functools.partial(jax.jit, static_argnames="spec")
def _scales(amaxes: jax.Array, tensor_scale: jax.Array | None, spec: BlockFormat) -> jax.Array:
    """The scales of blocks, as stored."""
    return scale_from(amaxes, spec, tensor_scale)


@functools.partial(jax.jit, static_argnames="spec")
def tensor_scales_from(amaxes: jax.Array, spec: BlockFormat) -> jax.Array:
    return tensor_scale_from(amaxes, spec)


@functools.partial(jax.jit, static_argnames="spec")
def numbers_of(
    codes: jax.Array, scale: jax.Array | None, tensor_scale: jax.Array | None, spec: BlockFormat
) -> jax.Array:
    """The float32 numbers of the codes of a slab."""
    scales = Scales(scale, tensor_scale)
    return dequantized(codes, scales, blocks_of(codes, spec), spec, jnp.float32)


@functools.cache
def slab_spec(spec: BlockFormat, lengths: tuple[int | None, int | None]) -> BlockFormat:
    """The format with blocks of these lengths in a matrix."""
    if spec.scale is None:
        return spec
    return dataclasses.replace(spec, block=lengths, axes=(0, 1), other_axes=1)


def _is_cast(spec: BlockFormat) -> bool:
    """Whether weights are rounded to float16, bfloat16 or float32, in which Inf stays Inf."""
    return spec.scale is None and spec.element.bits >= 16


def _projection(spec: BlockFormat) -> Projection:
    return _KEEPING_INF if _is_cast(spec) else NEAREST
