"""Quantizes weights slab by slab, with the same bits as `qtoolkit.quantize` of the whole.

A window is some slabs that are computed together: one large slab, or small weights of which each
would take longer to call programs for than to compute. Slabs of one dtype, format and length of
units become one array of units, which is cut into tiles of few shapes. Three programs do the rest:
the amax of each unit; from the amaxes of blocks their scales; codes and the rounding error.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import NEAREST, exact_float32, product, projection_of
from qtoolkit.checkpoints._slabs import Grid, Span, Units, columns_of, tiles_of
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

_KEEPING_INF = projection_of("quantized", (), "nearest_even", "propagate")
LEAST_RATE = np.float32(2.0**-100)  # what is multiplied by less may be subnormal
_COUNTS = tuple(2**n for n in (6, 10, 14, 20))  # of scales that are computed at once


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A weight to quantize.

    Attributes:
      tensor: Where its elements come from: float32, float16 or bfloat16.
      spec: Its format; the blocks are those of `grid`.
      grid: How it is cut.
      second: The tensor scale as stored, one for each matrix of the grid; None: the format has
        none.
      amaxes: The amax of each block; None if slabs hold whole blocks and find them.
    """

    tensor: Tensor
    spec: BlockFormat
    grid: Grid
    second: np.ndarray | None = None
    amaxes: np.ndarray | None = None


class Slab(NamedTuple):
    weight: Weight
    span: Span

    @property
    def size(self) -> int:
        return self.span.rows * self.span.columns

    def read(self) -> np.ndarray:
        start = self.span.row * self.weight.grid.columns + self.span.column
        return self.weight.tensor.read(start, start + self.size)


class QuantizedSlab(NamedTuple):
    """What became of a slab.

    Attributes:
      codes: Unsigned codes as from `encode`: [rows, columns].
      first: The first of the blocks that lie in the slab.
      scale: Their scales, flat, as stored; None if the format has none.
      sums: The rounding error.
    """

    codes: np.ndarray
    first: int
    scale: np.ndarray | None
    sums: ErrorSums


def is_cast(spec: BlockFormat) -> bool:
    """Whether weights are rounded to float16, bfloat16 or float32, in which Inf stays Inf."""
    return spec.scale is None and spec.element.bits >= 16


def quantize_window(slabs: Sequence[Slab]) -> list[QuantizedSlab]:
    """What becomes of each slab; its result does not depend on its neighbours."""
    groups: dict[Any, list[int]] = {}
    units = [slab.weight.grid.units(slab.span) for slab in slabs]
    for i, (slab, one) in enumerate(zip(slabs, units, strict=True)):
        spec = unit_spec(slab.weight.spec, one.axis)
        is_known = slab.weight.amaxes is not None
        key = (slab.weight.tensor.dtype, spec, one.axis, one.length, is_known)
        groups.setdefault(key, []).append(i)
    results: dict[int, QuantizedSlab] = {}
    for (_, spec, axis, *_), members in groups.items():
        batch = _Batch([slabs[i] for i in members], [units[i] for i in members], spec, axis)
        results |= zip(members, batch.results(), strict=True)
    return [results[i] for i in range(len(slabs))]


class _Batch:
    """Slabs of one dtype, format and length of units, side by side.

    Attributes:
      places: For each unit its block, counted from the first block of the first slab on.
      starts: For each slab its first unit, and then the end.
      firsts: For each slab the number of its first block here, and then the end.
      offsets: For each slab the number of its first block in its weight.
    """

    def __init__(
        self, slabs: Sequence[Slab], units: Sequence[Units], spec: BlockFormat, axis: int
    ) -> None:
        self.slabs, self.units, self.spec, self.axis = slabs, units, spec, axis
        self.offsets = [int(one.blocks.min()) for one in units]
        counts = [int(u.blocks.max()) + 1 - o for u, o in zip(units, self.offsets, strict=True)]
        self.starts = [0, *itertools.accumulate(one.count for one in units)]
        self.firsts = [0, *itertools.accumulate(counts)]
        parts = zip(units, self.firsts, self.offsets, strict=False)
        moved = [one.blocks + (first - offset) for one, first, offset in parts]
        self.places = moved[0] if len(moved) == 1 else np.concatenate(moved)
        laid_out = [u.laid_out(slab.read()) for slab, u in zip(slabs, units, strict=True)]
        self.tiles = tiles_of(laid_out, axis)
        self.sizes = [tile.shape[1 - axis] for tile in self.tiles]

    def results(self) -> Iterator[QuantizedSlab]:
        spec, amaxes = self.spec, self._amaxes()
        scales, seconds, effectives = self._scales(amaxes)
        factors = self._factors(amaxes)
        inputs = [
            *zip(
                self.tiles,
                self._columns(scales),
                self._columns(None if spec.scale is None else amaxes != 0),
                self._columns(seconds),
                self._columns(factors) if len(factors) > 1 else [factors[0]] * len(self.tiles),
                strict=True,
            )
        ]
        done = [encoded(*tile, spec, self.axis, len(factors) > 1) for tile in inputs]
        codes = np.concatenate([np.asarray(d.codes) for d in done], axis=1 - self.axis)
        stats = self._stats(inputs, done, factors)
        for i, (slab, units) in enumerate(zip(self.slabs, self.units, strict=True)):
            some = slice(self.starts[i], self.starts[i + 1])
            blocks = slice(self.firsts[i], self.firsts[i + 1])
            part = codes[some] if self.axis == 1 else codes[:, some]
            largest = 0.0
            if effectives is not None:
                largest = float(np.fmax.reduce(effectives[blocks], initial=0))
            of_slab = stats[:, some] if len(self.slabs) > 1 else stats
            signal, noise, nonfinite, overflowed = of_slab.sum(axis=1).tolist()
            sums = ErrorSums(signal, noise, int(nonfinite), int(overflowed), largest)
            if effectives is not None and _may_be_subnormal(effectives[blocks], spec):
                exact = self._exact_sums(i, part, effectives[self.places[some]])
                sums.signal, sums.noise = exact.signal, exact.noise
            yield QuantizedSlab(
                units.elements(part).reshape(slab.span.rows, slab.span.columns),
                self.offsets[i],
                None if scales is None else scales[blocks],
                sums,
            )

    def _exact_sums(self, i: int, codes: np.ndarray, rates: np.ndarray) -> ErrorSums:
        """Of a slab with subnormal numbers, which XLA's CPU takes for 0."""
        values = self.spec.element.values()[codes] * np.expand_dims(rates, self.axis).astype("f8")
        with np.errstate(under="ignore", invalid="ignore"):
            y = self.units[i].elements(values.astype(np.float32))
            return error_sums(self.slabs[i].read().astype(np.float32), y)

    def _factors(self, amaxes: np.ndarray) -> np.ndarray:
        """Powers of two by which the largest elements become about 1: one for each block, or for a
        slab that is alone.
        """
        top = np.where(np.isfinite(amaxes), amaxes, 0)
        if len(self.slabs) == 1:
            top = top.max(initial=0, keepdims=True)
        return np.ldexp(np.float32(1), -np.clip(np.frexp(top)[1], -126, 126))

    def _stats(
        self, inputs: Sequence[Any], done: Sequence["Encoded"], factors: np.ndarray
    ) -> np.ndarray:
        """Signal, noise, and how many elements are not finite and overflow: of each unit, or of
        each tile if a slab is alone.
        """
        by_unit, columns = len(factors) > 1, []
        for tile, made in zip(inputs, done, strict=True):
            stats = np.zeros((4, tile[0].shape[1 - self.axis] if by_unit else 1))
            stats[0], stats[1], stats[3] = made.signal, made.noise, made.overflowed
            if not np.isfinite(stats).all():
                known = np.asarray(finite_sums(*tile, self.spec, self.axis), np.float64)
                stats[:3] = known if by_unit else known.sum(axis=1, keepdims=True)
            columns.append(stats)
        stats = np.concatenate(columns, axis=1)
        if by_unit:
            stats = stats[:, : len(self.places)]
        squares = factors.astype(np.float64) ** 2
        stats[:2] /= squares[self.places] if by_unit else squares
        return stats

    def _amaxes(self) -> np.ndarray:
        known = [slab.weight.amaxes for slab in self.slabs]
        if known[0] is not None:
            ends = itertools.pairwise(self.firsts)
            counts = [stop - start for start, stop in ends]
            parts = zip(known, self.offsets, counts, strict=True)
            return np.concatenate([a[first : first + n] for a, first, n in parts if a is not None])
        return block_amaxes(
            self.tiles, self.axis, self.places, self.firsts[-1], not self.spec.element.has_nan
        )

    def _scales(self, amaxes: np.ndarray) -> tuple[Any, Any, Any]:
        """For each block its scale and tensor scale as stored, and the float32 number they are."""
        spec, second = self.spec, None
        if spec.scale is None:
            return None, None, None
        if spec.tensor_scale is not None:
            parts = []
            ends = itertools.pairwise(self.firsts)
            for slab, offset, (start, stop) in zip(self.slabs, self.offsets, ends, strict=True):
                grid, each = slab.weight.grid, slab.weight.second
                assert each is not None
                matrices = (offset + np.arange(stop - start)) // (grid.down * grid.across)
                parts.append(each[matrices if len(each) > 1 else matrices * 0])
            second = np.concatenate(parts)
        return _scales_of(amaxes, second, spec)

    def _columns(self, values: np.ndarray | None) -> Sequence[Any]:
        of_units = None if values is None else values[self.places]
        return columns_of(of_units, self.sizes, self.axis)


def _may_be_subnormal(rates: np.ndarray, spec: BlockFormat) -> bool:
    return not spec.has_powers and bool(((rates > 0) & (rates < LEAST_RATE)).any())


def block_amaxes(
    tiles: Sequence[np.ndarray], axis: int, places: np.ndarray, blocks: int, nan_wins: bool
) -> np.ndarray:
    """The amax of each of `blocks`, from units that lie in the blocks at `places`."""
    units = np.concatenate([np.asarray(unit_amax(t, axis, nan_wins)).reshape(-1) for t in tiles])
    units = units[: len(places)]
    if len(places) == blocks and places[0] == 0 and (np.diff(places) == 1).all():
        return units
    amaxes = np.zeros(blocks, np.float32)
    with np.errstate(invalid="ignore"):  # NumPy warns of a NaN, which is the largest
        np.maximum.at(amaxes, places, units)
    return amaxes


def slab_amaxes(slab: Slab, nan_wins: bool) -> tuple[int, np.ndarray]:
    """The amaxes of the blocks that lie in a slab, as far as they do, and the first of them."""
    units = slab.weight.grid.units(slab.span)
    first = int(units.blocks.min())
    tiles = units.tiles(slab.read())
    blocks = int(units.blocks.max()) + 1 - first
    return first, block_amaxes(tiles, units.axis, units.blocks - first, blocks, nan_wins)


Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def weight_amaxes(weight: Weight, map_: Map = map, *, nan_wins: bool) -> np.ndarray:
    amaxes = np.zeros(weight.grid.blocks, np.float32)
    slabs = (Slab(weight, span) for span in weight.grid.spans())
    for first, part in map_(functools.partial(slab_amaxes, nan_wins=nan_wins), slabs):
        some = amaxes[first : first + len(part)]
        with np.errstate(invalid="ignore"):
            np.maximum(some, part, out=some)
    return amaxes


def largest_magnitudes(tensor: Tensor, count: int = 1, map_: Map = map) -> np.ndarray:
    """The largest finite |x| of each of `count` equal parts of a tensor; 0 where there is none."""
    if not tensor.size:
        return np.zeros(count, np.float32)
    whole = Grid.whole(tensor.size // count, count)
    weight = Weight(tensor, BlockFormat.tensor("e4m3fn"), whole)
    return weight_amaxes(weight, map_, nan_wins=False)


def tensor_scales(amaxes: np.ndarray, spec: BlockFormat) -> np.ndarray:
    return np.asarray(_tensor_scales(np.asarray(amaxes, np.float32), spec))


def prepared(weight: Weight, map_: Map = map) -> Weight:
    """The weight with the amaxes of its blocks, if its slabs do not hold whole blocks."""
    if weight.spec.scale is None or weight.grid.has_whole_blocks:
        return weight
    amaxes = weight_amaxes(weight, map_, nan_wins=not weight.spec.element.has_nan)
    return dataclasses.replace(weight, amaxes=amaxes)


def _scales_of(
    amaxes: np.ndarray, second: np.ndarray | None, spec: BlockFormat
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    parts = []
    for start in range(0, len(amaxes), _COUNTS[-1]):
        some = slice(start, start + _COUNTS[-1])
        count = len(amaxes[some])
        missing = (0, next(n for n in _COUNTS if n >= count) - count)
        # Not zeros: an amax of 0 would make a scale of 2**-127, slower to divide by.
        amax, tensor_scale = (
            None if a is None else np.pad(a[some], missing, constant_values=1)
            for a in (amaxes, second)
        )
        parts.append([np.asarray(a)[:count] for a in block_scales(amax, tensor_scale, spec)])
    scale, value = (p[0] if len(p) == 1 else np.concatenate(p) for p in zip(*parts, strict=True))
    return scale, second, value


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
def _tensor_scales(amaxes: jax.Array, spec: BlockFormat) -> jax.Array:
    return tensor_scale_from(amaxes, spec)


@functools.partial(jax.jit, static_argnums=2)
def block_scales(
    amaxes: jax.Array, second: jax.Array | None, spec: BlockFormat
) -> tuple[jax.Array, jax.Array]:
    """The scale of each block as stored, and the float32 number that a code is multiplied by."""
    scale = scale_from(amaxes, spec, second)
    return scale, effective(scale, second, spec)


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def encoded(
    x: jax.Array,
    scale: jax.Array | None,
    nonzero: jax.Array | None,
    second: jax.Array | None,
    factor: jax.Array,
    spec: BlockFormat,
    axis: int,
    by_unit: bool,
) -> Encoded:
    """Encodes a tile and measures the rounding error.

    Args:
      scale, nonzero, second: For each unit the scale and the tensor scale of its block, and whether
        its amax is above 0; None where the format has none.
      factor: Powers of two that keep squares in range: one, or one for each unit.
      by_unit: Whether sums are those of each unit, not of the tile.
    """
    codes = block_codes(x, spec, _projection(spec), Scales(scale, second), nonzero)
    wide, error = _errors(x, scale, second, factor, spec)
    over = jnp.zeros(())
    summed = axis if by_unit else None
    if is_cast(spec):
        size = jnp.abs(exact_float32(x))
        exceeds = (size > np.float32(float(spec.element.max_finite))) & jnp.isfinite(size)
        over = jnp.sum(exceeds.astype(jnp.float32), axis=summed)
    return Encoded(
        codes, jnp.sum(wide * wide, axis=summed), jnp.sum(error * error, axis=summed), over
    )


def _errors(
    x: jax.Array,
    scale: jax.Array | None,
    second: jax.Array | None,
    factor: jax.Array,
    spec: BlockFormat,
) -> tuple[jax.Array, jax.Array]:
    """(factor * x, factor * (x - value)) for the elements of a tile."""
    rate = factor if scale is None else effective(scale, second, spec) * factor
    u = scaled_values(x, spec, Scales(scale, second))
    wide = exact_float32(x) * factor
    # `product` is rounded, as what `dequantize` gives; fused with the difference it would not be.
    return wide, wide - product(element_values(u, spec, _projection(spec), None), rate)


@functools.partial(jax.jit, static_argnums=(5, 6))
def finite_sums(
    x: jax.Array,
    scale: jax.Array | None,
    nonzero: jax.Array | None,
    second: jax.Array | None,
    factor: jax.Array,
    spec: BlockFormat,
    axis: int,
) -> jax.Array:
    """For each unit the sums of `encoded` over elements where both are finite, and how many are
    NaN or infinite: for the few tiles with such elements.
    """
    wide, error = _errors(x, scale, second, factor, spec)
    known = jnp.isfinite(wide) & jnp.isfinite(error)
    bad = (~jnp.isfinite(exact_float32(x))).astype(jnp.float32)
    parts = (jnp.where(known, part * part, np.float32(0)) for part in (wide, error))
    return jnp.stack([jnp.sum(part, axis=axis) for part in (*parts, bad)])


@functools.cache
def unit_spec(spec: BlockFormat, axis: int) -> BlockFormat:
    return dataclasses.replace(spec, block=(None,), axes=(axis,), other_axes=1)


def _projection(spec: BlockFormat) -> Projection:
    return _KEEPING_INF if is_cast(spec) else NEAREST
