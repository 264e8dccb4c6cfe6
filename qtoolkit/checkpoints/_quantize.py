"""Quantizes weights slab by slab, with the same bits as `qtoolkit.quantize` of the whole.

A batch is some slabs that are computed together: one large slab, or slabs of small weights, because
calling programs for each would take longer than computing it. The units of slabs of one dtype,
format and length lie side by side in one array, which is cut into tiles. Three programs do the
rest: the amax of each unit; from the amaxes of blocks their scales; codes and the rounding error.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import NEAREST, exact_float32, product, projection_of
from qtoolkit.checkpoints._slabs import Grid, Slab, Units, columns_of, tiles_of
from qtoolkit.checkpoints._tensors import Tensor
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling.internal import (
    ErrorSums,
    Scales,
    block_codes,
    effective,
    element_values,
    error_sums,
    magnitude_max,
    scale_from,
    scaled_values,
    tensor_scale_from,
)

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
_KEEPING_INF = projection_of("quantized", (), "nearest_even", "propagate")
_COUNTS = tuple(2**n for n in (6, 10, 14, 20))  # of scales that are computed at once


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight to quantize.

    Attributes:
      tensor: Where its elements come from: float32, float16 or bfloat16.
      spec: Its format; the blocks are those of `grid`.
      grid: How it is cut.
      tensor_scale: As stored, one for each matrix of the grid; None: the format has none.
      amaxes: The amax of each block; None if slabs hold whole blocks and find them.
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
    """What became of a slab.

    Attributes:
      codes: Unsigned codes as from `encode`: [rows, columns]; later packed into bytes.
      first: The first of the blocks that lie in the slab.
      scale: Their scales, flat, as stored; None if the format has none.
      sums: The rounding error.
    """

    codes: np.ndarray
    first: int
    scale: np.ndarray | None
    sums: ErrorSums


def quantize_batch(batch: Sequence[tuple[Weight, Slab]]) -> list[QuantizedSlab]:
    """What becomes of each slab; its result does not depend on the others."""
    alike: dict[Any, list[int]] = {}
    units = [weight.grid.units(slab) for weight, slab in batch]
    for i, ((weight, _), one) in enumerate(zip(batch, units, strict=True)):
        spec = unit_spec(weight.spec, one.axis)
        key = (weight.tensor.dtype, spec, one.axis, one.length, weight.amaxes is None)
        alike.setdefault(key, []).append(i)
    results: dict[int, QuantizedSlab] = {}
    for (_, spec, *_), members in alike.items():
        made = _quantize_alike([batch[i] for i in members], [units[i] for i in members], spec)
        results |= zip(members, made, strict=True)
    return [results[i] for i in range(len(batch))]


def _quantize_alike(
    batch: Sequence[tuple[Weight, Slab]], units: Sequence[Units], spec: BlockFormat
) -> list[QuantizedSlab]:
    """Quantize slabs of one dtype, format and length of units."""
    axis = units[0].axis
    # Units and blocks are counted on from slab to slab: slab i has the units from unit_ends[i] to
    # unit_ends[i + 1], and the blocks of all slabs together are 0 to block_ends[-1].
    unit_ends = [0, *itertools.accumulate(len(one.blocks) for one in units)]
    block_ends = [0, *itertools.accumulate(one.block_count for one in units)]
    block_of = np.concatenate(
        [u.blocks + (start - u.first) for u, start in zip(units, block_ends, strict=False)]
    )
    # First the amax of each block, then its scales, then codes and error sums of tiles.
    elements = [one.laid_out(w.read(slab)) for (w, slab), one in zip(batch, units, strict=True)]
    tiles = tiles_of(elements, axis)
    amaxes = _known_amaxes(batch, units)
    if amaxes is None:
        nan_wins = not spec.element.has_nan
        amaxes = block_amaxes(tiles, axis, block_of, block_ends[-1], nan_wins)
    scales, tensor_scales, rates = _scales(amaxes, _tensor_scales_of(batch, units), spec)
    nonzero = None if spec.scale is None else amaxes != 0
    columns = [_columns(of, block_of, tiles, axis) for of in (scales, nonzero, tensor_scales)]
    inputs = [*zip(tiles, *columns, strict=True)]
    is_alone = len(batch) == 1
    codes, stats = _encode_tiles(inputs, amaxes, block_of, spec, axis, is_alone)
    made = []  # what belongs to each slab, cut out again
    for i, ((weight, slab), one) in enumerate(zip(batch, units, strict=True)):
        of_slab, blocks = slice(*unit_ends[i : i + 2]), slice(*block_ends[i : i + 2])
        own = codes[of_slab] if axis == 1 else codes[:, of_slab]
        own_stats = stats if is_alone else stats[:, of_slab]
        signal, noise, nonfinite, overflowed = own_stats.sum(axis=1).tolist()
        sums = ErrorSums(signal, noise, int(nonfinite), int(overflowed))
        if rates is not None:
            sums.max_scale = float(np.fmax.reduce(rates[blocks], initial=0))
            if may_be_subnormal(rates[blocks], spec):
                of_units = np.expand_dims(rates[block_of[of_slab]], axis).astype(np.float64)
                with np.errstate(under="ignore", invalid="ignore"):
                    values = (spec.element.values()[own] * of_units).astype(np.float32)
                    x = weight.read(slab).astype(np.float32)
                    exact = error_sums(x, one.elements(values))
                sums.signal, sums.noise = exact.signal, exact.noise
        slab_codes = one.elements(own).reshape(slab.rows, slab.columns)
        scale = None if scales is None else scales[blocks]
        made.append(QuantizedSlab(slab_codes, one.first, scale, sums))
    return made


def _known_amaxes(
    batch: Sequence[tuple[Weight, Slab]], units: Sequence[Units]
) -> np.ndarray | None:
    """The amaxes of the blocks that lie in slabs, if their weights have them."""
    known = [
        weight.amaxes[one.first : one.first + one.block_count]
        for (weight, _), one in zip(batch, units, strict=True)
        if weight.amaxes is not None
    ]
    return np.concatenate(known) if known else None


def _tensor_scales_of(
    batch: Sequence[tuple[Weight, Slab]], units: Sequence[Units]
) -> np.ndarray | None:
    """For each block that lies in slabs its tensor scale, as stored."""
    scales = [
        weight.grid.of_matrices(weight.tensor_scale, one.first + np.arange(one.block_count))
        for (weight, _), one in zip(batch, units, strict=True)
        if weight.tensor_scale is not None
    ]
    return np.concatenate(scales) if scales else None


def _columns(
    of_blocks: np.ndarray | None, block_of: np.ndarray, tiles: Sequence[np.ndarray], axis: int
) -> Sequence[Any]:
    """A number for each block, as columns that broadcast to the units of tiles."""
    of_units = None if of_blocks is None else of_blocks[block_of]
    return columns_of(of_units, [tile.shape[1 - axis] for tile in tiles], axis)


def _encode_tiles(
    inputs: Sequence[tuple[Any, ...]],
    amaxes: np.ndarray,
    block_of: np.ndarray,
    spec: BlockFormat,
    axis: int,
    is_alone: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The codes of all units, and four sums: signal, noise, how many elements are not finite, how
    many overflow. The sums are those of each unit, or of each tile if a slab is alone: one sum over
    2**20 elements takes 0.74 ms together with the codes, 8,192 sums over 128 take 0.88 ms.
    """
    # Squares of the elements may leave float32's range. So elements are first multiplied by a power
    # of two that makes the largest one of a block, or of a slab that is alone, about 1.
    top = np.where(np.isfinite(amaxes), amaxes, 0)
    top = top.max(initial=0, keepdims=True) if is_alone else top
    factors = np.ldexp(np.float32(1), -np.clip(np.frexp(top)[1], -126, 126))
    tiles = [tile for tile, *_ in inputs]
    by_tile: Sequence[Any] = [factors[0]] * len(tiles)
    if not is_alone:
        by_tile = _columns(factors, block_of, tiles, axis)
    inputs = [(*tile, factor) for tile, factor in zip(inputs, by_tile, strict=True)]
    done = [encoded(*tile, spec, axis, not is_alone) for tile in inputs]
    codes, stats = [], []
    for tile, made in zip(inputs, done, strict=True):
        codes.append(np.asarray(made.codes))
        sums = np.zeros((4, 1 if is_alone else tile[0].shape[1 - axis]))
        sums[0], sums[1], sums[3] = made.signal, made.noise, made.overflowed
        if not np.isfinite(sums).all():
            known = np.asarray(finite_sums(*tile, spec, axis), np.float64)
            sums[:3] = known.sum(axis=1, keepdims=True) if is_alone else known
        stats.append(sums)
    all_stats = np.concatenate(stats, axis=1)
    squares = factors.astype(np.float64) ** 2
    if not is_alone:
        all_stats, squares = all_stats[:, : len(block_of)], squares[block_of]
    all_stats[:2] /= squares
    return np.concatenate(codes, axis=1 - axis), all_stats


def may_be_subnormal(rates: np.ndarray, spec: BlockFormat) -> bool:
    """Whether numbers that codes stand for may be subnormal, which XLA's CPU takes for 0."""
    return not spec.has_powers and bool(((rates > 0) & (rates < np.float32(2.0**-100))).any())


def block_amaxes(
    tiles: Sequence[np.ndarray], axis: int, block_of: np.ndarray, blocks: int, nan_wins: bool
) -> np.ndarray:
    """The amax of each of `blocks` blocks, from units of which each lies in one."""
    units = np.concatenate([np.asarray(unit_amax(t, axis, nan_wins)).reshape(-1) for t in tiles])
    units = units[: len(block_of)]
    if len(block_of) == blocks and block_of[0] == 0 and (np.diff(block_of) == 1).all():
        return units
    amaxes = np.zeros(blocks, np.float32)
    with np.errstate(invalid="ignore"):  # NumPy warns of a NaN, which is the largest
        np.maximum.at(amaxes, block_of, units)
    return amaxes


def weight_amaxes(weight: Weight, map_: Map = map, *, nan_wins: bool) -> np.ndarray:
    """The amax of each block of a weight, for which all of it is read."""

    def slab_amaxes(slab: Slab) -> tuple[int, np.ndarray]:
        units = weight.grid.units(slab)
        tiles, block_of = tiles_of([units.laid_out(weight.read(slab))], units.axis), units.blocks
        own = block_of - units.first, units.block_count
        return units.first, block_amaxes(tiles, units.axis, *own, nan_wins)

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
    whole = Grid.whole(tensor.size // count, count)
    weight = Weight(tensor, BlockFormat.tensor("e4m3fn"), whole)
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
    """For each block its scale and tensor scale as stored, and the float32 number they are."""
    if spec.scale is None:
        return None, None, None
    parts = []
    for start in range(0, len(amaxes), _COUNTS[-1]):
        stop = min(start + _COUNTS[-1], len(amaxes))
        count = stop - start
        missing = (0, next(n for n in _COUNTS if n >= count) - count)
        # Not zeros: an amax of 0 would make a scale of 2**-127, slower to divide by.
        amax, tensor_scale = (
            None if a is None else np.pad(a[start:stop], missing, constant_values=1)
            for a in (amaxes, tensor_scales)
        )
        parts.append([np.asarray(a)[:count] for a in block_scales(amax, tensor_scale, spec)])
    scale, rate = (np.concatenate(part) for part in zip(*parts, strict=True))
    return scale, tensor_scales, rate


# The programs: compiled once for each shape of tiles, dtype and format.


class Encoded(NamedTuple):
    """Codes of a tile; sums of (factor * x)^2 and (factor * (x - value))^2; how many elements
    overflow. Sums are those of units or of the tile, and not finite if an element is not.
    """

    codes: jax.Array
    signal: jax.Array
    noise: jax.Array
    overflowed: jax.Array


@functools.partial(jax.jit, static_argnums=(1, 2))
def unit_amax(x: jax.Array, axis: int, nan_wins: bool) -> jax.Array:
    """The largest finite |x| of each unit, float32; a NaN wins if `nan_wins`."""
    return exact_float32(magnitude_max(x, (axis,), nan_wins=nan_wins))


@functools.partial(jax.jit, static_argnums=1)
def tensor_scales_from(amaxes: jax.Array, spec: BlockFormat) -> jax.Array:
    return tensor_scale_from(amaxes, spec)


@functools.partial(jax.jit, static_argnums=2)
def block_scales(
    amaxes: jax.Array, tensor_scale: jax.Array | None, spec: BlockFormat
) -> tuple[jax.Array, jax.Array]:
    """The scale of each block as stored, and the float32 number that a code is multiplied by."""
    scale = scale_from(amaxes, spec, tensor_scale)
    return scale, effective(scale, tensor_scale, spec)


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def encoded(
    x: jax.Array,
    scale: jax.Array | None,
    nonzero: jax.Array | None,
    tensor_scale: jax.Array | None,
    factor: jax.Array,
    spec: BlockFormat,
    axis: int,
    by_unit: bool,
) -> Encoded:
    """Encodes a tile and measures the rounding error.

    Args:
      scale, nonzero, tensor_scale: For each unit the scales of its block, and whether the amax of
        the block is above 0; None where the format has none.
      factor: Powers of two that keep squares in range: one, or one for each unit.
      by_unit: Whether sums are those of each unit, not of the tile.
    """
    codes = block_codes(x, spec, _projection(spec), Scales(scale, tensor_scale), nonzero)
    wide, error = _errors(x, scale, tensor_scale, factor, spec)
    over = jnp.zeros(())
    summed = axis if by_unit else None
    if _is_cast(spec):
        size = jnp.abs(exact_float32(x))
        exceeds = (size > np.float32(float(spec.element.max_finite))) & jnp.isfinite(size)
        over = jnp.sum(exceeds.astype(jnp.float32), axis=summed)
    return Encoded(
        codes, jnp.sum(wide * wide, axis=summed), jnp.sum(error * error, axis=summed), over
    )


def _errors(
    x: jax.Array,
    scale: jax.Array | None,
    tensor_scale: jax.Array | None,
    factor: jax.Array,
    spec: BlockFormat,
) -> tuple[jax.Array, jax.Array]:
    """(factor * x, factor * (x - value)) for the elements of a tile."""
    rate = factor if scale is None else effective(scale, tensor_scale, spec) * factor
    u = scaled_values(x, spec, Scales(scale, tensor_scale))
    wide = exact_float32(x) * factor
    # `product` is rounded, as what `dequantize` gives; fused with the difference it would not be.
    return wide, wide - product(element_values(u, spec, _projection(spec), None), rate)


@functools.partial(jax.jit, static_argnums=(5, 6))
def finite_sums(
    x: jax.Array,
    scale: jax.Array | None,
    nonzero: jax.Array | None,
    tensor_scale: jax.Array | None,
    factor: jax.Array,
    spec: BlockFormat,
    axis: int,
) -> jax.Array:
    """For each unit the sums of `encoded` over elements where both are finite, and how many are
    NaN or infinite: for the few tiles with such elements.
    """
    wide, error = _errors(x, scale, tensor_scale, factor, spec)
    known = jnp.isfinite(wide) & jnp.isfinite(error)
    bad = (~jnp.isfinite(exact_float32(x))).astype(jnp.float32)
    parts = (jnp.where(known, part * part, np.float32(0)) for part in (wide, error))
    return jnp.stack([jnp.sum(part, axis=axis) for part in (*parts, bad)])


@functools.cache
def unit_spec(spec: BlockFormat, axis: int) -> BlockFormat:
    return dataclasses.replace(spec, block=(None,), axes=(axis,), other_axes=1)


def _is_cast(spec: BlockFormat) -> bool:
    """Whether weights are rounded to float16, bfloat16 or float32, in which Inf stays Inf."""
    return spec.scale is None and spec.element.bits >= 16


def _projection(spec: BlockFormat) -> Projection:
    return _KEEPING_INF if _is_cast(spec) else NEAREST
