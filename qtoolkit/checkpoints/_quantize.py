"""Quantizes weights slab by slab, with the same bits as `qtoolkit.quantize` of a whole weight.

`_slabs.py` explains how a weight is cut. In short:

  slab   a part of a weight that fits into memory
  block  the elements that share a scale
  unit   a piece of a block, of one of a few lengths
  tile   an array of many units, of one of a few shapes, so that XLA compiles few programs

`quantize_batch` gets one large slab, or many slabs of small weights: starting programs for each
small slab would take longer than their work. It puts the units of similar slabs side by side into
tiles. Then three programs run:

1. `unit_amax` computes the largest magnitude (amax) of each unit, hence of each block;
2. `block_scales` computes the scale of each block from its amax;
3. `encoded` computes codes and the rounding error.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qtoolkit.checkpoints._checkpoint import Tensor
from qtoolkit.checkpoints._programs import (
    block_scales,
    encoded,
    finite_sums,
    range_scales,
    unit_amax,
    unit_range,
    unit_spec,
)
from qtoolkit.checkpoints._slabs import Grid, Slab, Units, columns_of, tiles_of
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling.internal import (
    ErrorSums,
    error_sums,
)

# `map`, or that of a pool of threads.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
# `block_scales` gets one of these numbers of blocks, padded, so that XLA compiles it four times.
_BLOCK_COUNTS = tuple(2**n for n in (6, 10, 14, 20))


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight to quantize.

    Attributes:
      tensor: Where its elements come from: float32, float16 or bfloat16.
      spec: Its format.
      grid: The weight as matrices, and how they are cut into blocks.
      tensor_scale: The second scale that formats such as NVFP4 have, as stored: one for each matrix
        of the grid. None if the format has none.
      amaxes: The amax of each block. None if every slab holds whole blocks, so that their amaxes
        can be computed from the slab.
    """

    tensor: Tensor
    spec: BlockFormat
    grid: Grid
    tensor_scale: np.ndarray | None = None
    amaxes: np.ndarray | None = None

    def read(self, slab: Slab) -> np.ndarray:
        start = self.grid.start(slab)
        return self.tensor.read(start, start + slab.size)


class QuantizedSlab(NamedTuple):
    """The codes and scales of a slab.

    Attributes:
      codes: Unsigned codes as from `encode`: [rows, columns]; later packed into bytes.
      first: The number of the first block that lies in the slab.
      scale: The scales of its blocks, flat, as stored; None if the format has none.
      sums: The rounding error.
      zero_point: The zero points of its blocks, int32, flat; None if the format has none.
    """

    codes: np.ndarray
    first: int
    scale: np.ndarray | None
    sums: ErrorSums
    zero_point: np.ndarray | None = None


def quantize_batch(batch: Sequence[tuple[Weight, Slab]]) -> list[QuantizedSlab]:
    """Quantize several slabs. The result for a slab does not depend on the others."""
    units = [weight.grid.units(slab) for weight, slab in batch]
    groups: dict[Any, list[int]] = {}  # slabs whose units can lie in the same tiles
    for i, ((weight, _), slab_units) in enumerate(zip(batch, units, strict=True)):
        axis, length = slab_units.axis, slab_units.length
        spec = unit_spec(weight.spec, axis)
        key = (weight.tensor.dtype, spec, axis, length, weight.amaxes is None)
        groups.setdefault(key, []).append(i)
    results: dict[int, QuantizedSlab] = {}
    for (_, spec, *_), group in groups.items():
        slabs = _quantize_group([batch[i] for i in group], [units[i] for i in group], spec)
        results |= zip(group, slabs, strict=True)
    return [results[i] for i in range(len(batch))]


def _quantize_group(
    batch: Sequence[tuple[Weight, Slab]], units: Sequence[Units], spec: BlockFormat
) -> list[QuantizedSlab]:
    """Quantize slabs whose units can lie in the same tiles."""
    axis = units[0].axis
    # The units of all slabs lie in one array, and so do their blocks. Slab i has the units from
    # unit_starts[i] to unit_starts[i + 1], and likewise its blocks. Unit u lies in block
    # block_of_unit[u] of that array.
    unit_starts = [0, *itertools.accumulate(len(u.blocks) for u in units)]
    block_starts = [0, *itertools.accumulate(u.block_count for u in units)]
    block_of_unit = np.concatenate(
        [u.blocks - u.first + start for u, start in zip(units, block_starts, strict=False)]
    )
    elements = [weight.read(slab) for weight, slab in batch]
    tiles = tiles_of([u.laid_out(x) for u, x in zip(units, elements, strict=True)], axis)
    amaxes, zeros, ranges = _known_amaxes(batch, units), None, None
    if spec.zero_point:
        assert amaxes is None  # slabs hold whole groups
        ranges = block_ranges(tiles, axis, block_of_unit, block_starts[-1])
        amaxes = np.maximum(-ranges[0], ranges[1])
    if amaxes is None:
        # If no code is NaN, a NaN makes its whole block NaN. So the amax of the block must be NaN.
        nan_wins = not spec.element.has_nan
        amaxes = block_amaxes(tiles, axis, block_of_unit, block_starts[-1], nan_wins)
    tensor_scales = _tensor_scales_of(batch, units)
    scales, tensor_scales, multipliers = _scales(amaxes, tensor_scales, spec)
    if ranges is not None:
        scales, zeros = map(np.asarray, range_scales(*ranges, spec))
        multipliers = scales
    nonzero = None if spec.scale is None else amaxes != 0
    columns = [
        _columns(values, block_of_unit, tiles, axis)
        for values in (scales, nonzero, tensor_scales, zeros)
    ]
    is_alone = len(batch) == 1
    inputs = [*zip(tiles, *columns, strict=True)]
    codes, stats = _encode_tiles(inputs, amaxes, block_of_unit, spec, axis, is_alone)

    quantized = []
    for i, ((_, slab), slab_units) in enumerate(zip(batch, units, strict=True)):
        own, blocks = slice(*unit_starts[i : i + 2]), slice(*block_starts[i : i + 2])
        unit_codes = codes[own] if axis == 1 else codes[:, own]
        slab_stats = stats if is_alone else stats[:, own]
        signal, noise, nonfinite, overflowed = slab_stats.sum(axis=1).tolist()
        sums = ErrorSums(signal, noise, int(nonfinite), int(overflowed))
        if multipliers is not None:
            sums.max_scale = float(np.fmax.reduce(multipliers[blocks], initial=0))
            if zeros is None and may_be_subnormal(multipliers[blocks], spec):
                # XLA counted such values as 0. NumPy does not: compute the error again.
                factors = np.expand_dims(multipliers[block_of_unit[own]], axis).astype(np.float64)
                with np.errstate(under="ignore", invalid="ignore"):
                    values = (spec.element.values()[unit_codes] * factors).astype(np.float32)
                    exact = error_sums(elements[i].astype(np.float32), slab_units.elements(values))
                sums.signal, sums.noise = exact.signal, exact.noise
        slab_codes = slab_units.elements(unit_codes).reshape(slab.rows, slab.columns)
        scale = None if scales is None else scales[blocks]
        zero_point = None if zeros is None else zeros[blocks]
        quantized.append(QuantizedSlab(slab_codes, slab_units.first, scale, sums, zero_point))
    return quantized


def _known_amaxes(
    batch: Sequence[tuple[Weight, Slab]], units: Sequence[Units]
) -> np.ndarray | None:
    """The amaxes of all blocks of the slabs, if their weights have them; else None."""
    known = [
        weight.amaxes[u.first : u.first + u.block_count]
        for (weight, _), u in zip(batch, units, strict=True)
        if weight.amaxes is not None
    ]
    return np.concatenate(known) if known else None


def _tensor_scales_of(
    batch: Sequence[tuple[Weight, Slab]], units: Sequence[Units]
) -> np.ndarray | None:
    """For each block of the slabs the tensor scale of its matrix, as stored."""
    scales = [
        weight.grid.of_matrices(weight.tensor_scale, u.first + np.arange(u.block_count))
        for (weight, _), u in zip(batch, units, strict=True)
        if weight.tensor_scale is not None
    ]
    return np.concatenate(scales) if scales else None


def _columns(
    values: np.ndarray | None, block_of_unit: np.ndarray, tiles: Sequence[np.ndarray], axis: int
) -> Sequence[Any]:
    """For each tile the values of the blocks of its units, in a shape that broadcasts to the tile.

    `values` has one for each block.
    """
    of_units = None if values is None else values[block_of_unit]
    return columns_of(of_units, [tile.shape[1 - axis] for tile in tiles], axis)


def _encode_tiles(
    inputs: Sequence[tuple[Any, ...]],
    amaxes: np.ndarray,
    block_of_unit: np.ndarray,
    spec: BlockFormat,
    axis: int,
    is_alone: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The codes of all units, and [4, units or tiles], the rows being signal, noise, how many
    elements are not finite, how many overflow. A slab that is alone has a column for each tile.

    Args:
      inputs: For each tile its elements, and the scales, `nonzero`, tensor scales and zero points
        of `encoded`.
      amaxes: The amax of each block.
      is_alone: Whether all units are of one slab. Then sums are computed for each tile, not for
        each unit: one sum over 2**20 elements takes less time than 8,192 sums over 128.
    """
    # Squares of the elements may leave float32's range. So elements are first multiplied by a power
    # of two, such that the largest element of the block (or of all, if a slab is alone) is about 1.
    largest = np.where(np.isfinite(amaxes), amaxes, 0)
    largest = largest.max(initial=0, keepdims=True) if is_alone else largest
    factors = np.ldexp(np.float32(1), -np.clip(np.frexp(largest)[1], -126, 126))
    tiles = [tile for tile, *_ in inputs]
    tile_factors: Sequence[Any] = [factors[0]] * len(tiles)
    if not is_alone:
        tile_factors = _columns(factors, block_of_unit, tiles, axis)
    arguments = [(*of_tile, factor) for of_tile, factor in zip(inputs, tile_factors, strict=True)]
    # Start all programs before the first result is waited for.
    results = [encoded(*of_tile, spec, axis, not is_alone) for of_tile in arguments]
    codes, stats = [], []
    for of_tile, result in zip(arguments, results, strict=True):
        codes.append(np.asarray(result.codes))
        sums = np.zeros((4, 1 if is_alone else of_tile[0].shape[1 - axis]))
        sums[0], sums[1], sums[3] = result.signal, result.noise, result.overflowed
        if not np.isfinite(sums).all():  # the tile holds a NaN or an infinity: sum without these
            finite = np.asarray(finite_sums(*of_tile, spec, axis), np.float64)
            sums[:3] = finite.sum(axis=1, keepdims=True) if is_alone else finite
        stats.append(sums)
    all_stats = np.concatenate(stats, axis=1)
    squares = factors.astype(np.float64) ** 2
    if not is_alone:
        all_stats = all_stats[:, : len(block_of_unit)]  # without the padding of the last tile
        squares = squares[block_of_unit]
    all_stats[:2] /= squares
    return np.concatenate(codes, axis=1 - axis), all_stats


def may_be_subnormal(multipliers: np.ndarray, spec: BlockFormat) -> bool:
    """Whether a code times its multiplier may be subnormal in float32; XLA on a CPU makes it 0."""
    is_small = (multipliers > 0) & (multipliers < np.float32(2.0**-100))
    return not spec.has_powers and bool(is_small.any())


def block_amaxes(
    tiles: Sequence[np.ndarray], axis: int, block_of_unit: np.ndarray, blocks: int, nan_wins: bool
) -> np.ndarray:
    """The amax of each of `blocks` blocks: the largest amax of its units."""
    units = np.concatenate([np.asarray(unit_amax(t, axis, nan_wins)).reshape(-1) for t in tiles])
    units = units[: len(block_of_unit)]  # without the padding of the last tile
    if np.array_equal(block_of_unit, np.arange(blocks)):  # each unit is a block
        return units
    amaxes = np.zeros(blocks, np.float32)
    with np.errstate(invalid="ignore"):  # NumPy warns of a NaN, which is the largest
        np.maximum.at(amaxes, block_of_unit, units)
    return amaxes


def block_ranges(
    tiles: Sequence[np.ndarray], axis: int, block_of_unit: np.ndarray, blocks: int
) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest finite element of each block, and zero; NaN where one is NaN."""
    parts = [np.asarray(unit_range(tile, axis)).reshape(2, -1) for tile in tiles]
    units = np.concatenate(parts, axis=1)[:, : len(block_of_unit)]
    lowest, largest = np.zeros((2, blocks), np.float32)
    with np.errstate(invalid="ignore"):
        np.minimum.at(lowest, block_of_unit, units[0])
        np.maximum.at(largest, block_of_unit, units[1])
    return lowest, largest


def weight_amaxes(weight: Weight, map_: Map = map, *, nan_wins: bool) -> np.ndarray:
    """The amax of each block of a weight. Reads the whole weight."""

    def slab_amaxes(slab: Slab) -> tuple[int, np.ndarray]:
        units = weight.grid.units(slab)
        tiles = tiles_of([units.laid_out(weight.read(slab))], units.axis)
        blocks = units.blocks - units.first
        return units.first, block_amaxes(tiles, units.axis, blocks, units.block_count, nan_wins)

    amaxes = np.zeros(weight.grid.blocks, np.float32)
    for first, part in map_(slab_amaxes, weight.grid.slabs()):
        of_slab = amaxes[first : first + len(part)]  # a block may lie in several slabs
        with np.errstate(invalid="ignore"):
            np.maximum(of_slab, part, out=of_slab)
    return amaxes


def largest_magnitudes(tensor: Tensor, count: int = 1, map_: Map = map) -> np.ndarray:
    """The largest finite |x| of each of `count` equal parts of a tensor; 0 where there is none."""
    if not tensor.size:
        return np.zeros(count, np.float32)
    parts = Grid.whole(tensor.size // count, count)
    weight = Weight(tensor, BlockFormat.tensor("e4m3fn"), parts)  # its format has no effect here
    return weight_amaxes(weight, map_, nan_wins=False)


def prepared(weight: Weight, map_: Map = map) -> Weight:
    """The weight with the amaxes of its blocks, if its slabs do not hold whole blocks."""
    if weight.spec.scale is None or weight.grid.has_whole_blocks:
        return weight
    amaxes = weight_amaxes(weight, map_, nan_wins=not weight.spec.element.has_nan)
    return dataclasses.replace(weight, amaxes=amaxes)


def _scales(
    amaxes: np.ndarray, tensor_scales: np.ndarray | None, spec: BlockFormat
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """For each block its scale and tensor scale as stored, and their float32 multiplier.

    A code stands for an element; the element times the multiplier is the weight.
    """
    if spec.scale is None or spec.zero_point:
        return None, None, None
    parts = []
    for start in range(0, len(amaxes), _BLOCK_COUNTS[-1]):
        stop = min(start + _BLOCK_COUNTS[-1], len(amaxes))
        count = stop - start
        padding = (0, next(n for n in _BLOCK_COUNTS if n >= count) - count)
        # Padded with 1, as the scale for an amax of 0 is 2**-127: subnormal, so slow to divide by.
        amax, tensor_scale = (
            None if a is None else np.pad(a[start:stop], padding, constant_values=1)
            for a in (amaxes, tensor_scales)
        )
        parts.append([np.asarray(a)[:count] for a in block_scales(amax, tensor_scale, spec)])
    scales, multipliers = (np.concatenate(part) for part in zip(*parts, strict=True))
    return scales, tensor_scales, multipliers
