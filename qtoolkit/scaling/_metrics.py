"""How well a format holds an array: error, saturation, underflow, and which codes are used."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from qtoolkit.casts import Projection, Stochastic
from qtoolkit.casts.internal import (
    check_differentiable,
    exact_float32,
    floor_log2,
    is_zero,
    power_of_two,
    product,
    settled,
    times_power_of_two,
)
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.scaling._blocks import explicit_spec, magnitude_max
from qtoolkit.scaling._engine import (
    Scales,
    block_codes,
    blocks_of,
    dequantized,
    find_scales,
    scaled_values,
)
from qtoolkit.scaling._quantize import check_quantize
from qtoolkit.scaling._scales import kept_range

_DECIBELS = 10 / math.log(10)  # of a power ratio, for one natural logarithm
_LARGEST = float(np.finfo(np.float32).max)
_LIFT = 60  # arrays below 2**-60 are measured in units of it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Metrics:
    """What quantizing an array has done to it. A pytree of arrays, all scalars but `histogram`.

    Attributes:
      sqnr_db: float32, 10 log10(sum x^2 / sum (x - y)^2) over the elements that are finite in x and
        y; infinite where y is exact, NaN where there are no such elements.
      max_error: float32, the largest |x - y| of the same elements.
      cosine: float32, the cosine of the angle between x and y, over the same elements; 1 where both
        are zero, 0 where one is.
      saturated: float32, the fraction of the elements that were clamped: x / scale lies more than
        half a step beyond the finite range of the element format, whatever the rounding. Infinities
        are among them.
      flushed: float32, the fraction of the finite elements other than zero that became zero.
      nonfinite: uint32, how many elements of x are NaN or infinite.
      histogram: uint32 [2**bits], how often each code occurs; None for elements of more than 8
        bits.
    """

    sqnr_db: jax.Array
    max_error: jax.Array
    cosine: jax.Array
    saturated: jax.Array
    flushed: jax.Array
    nonfinite: jax.Array
    histogram: jax.Array | None

    def __repr__(self) -> str:
        known = isinstance(self.sqnr_db, jax.Array | np.ndarray | np.generic)
        if not known or isinstance(self.sqnr_db, jax.core.Tracer) or np.ndim(self.sqnr_db):
            fields = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
            return f"Metrics({', '.join(fields)})"
        parts = [
            f"SQNR {float(self.sqnr_db):.2f} dB",
            f"max error {float(self.max_error):.4g}",
            f"cosine {float(self.cosine):.6f}",
            f"saturated {_percent(self.saturated)}",
            f"flushed {_percent(self.flushed)}",
            f"{int(self.nonfinite)} not finite",
        ]
        if self.histogram is not None:
            used = np.count_nonzero(np.asarray(self.histogram))
            parts.append(f"{used} of {len(self.histogram)} codes used")
        return f"Metrics({', '.join(parts)})"


def metrics(
    x: ArrayLike,
    spec: SpecLike,
    *,
    scale: ArrayLike | None = None,
    tensor_scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> Metrics:
    """Quantizes `x` and measures what that does to it.

    y is the float32 value of `quantize(x, spec, ...)`, before any rounding to the dtype of `x`.
    Sums are compensated: right to 1e-6 of their value for up to 2**32 elements of any magnitudes,
    SQNR to 1e-4 dB. Counts are exact.

    Args:
      x, spec, scale, tensor_scale, zero_point, rounding, saturation, key, random_bits,
        index_offset: As in `quantize`.

    Returns:
      `Metrics`: SQNR, largest error, cosine, fractions that saturated and became zero, how many
      elements are not finite, and the histogram of codes.

    Raises:
      TypeError, ValueError: As `quantize`.

    Gradient: zero. Under `vmap`, one set of metrics for each array.
    """
    x, spec, given, projection = check_quantize(
        "metrics", x, spec, scale, tensor_scale, zero_point, rounding, saturation, key,
        random_bits, index_offset,
    )  # fmt: skip
    return _metrics(lax.stop_gradient(x), lax.stop_gradient(given), projection, spec)


def sqnr_db(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """Signal to quantization noise: 10 log10(sum x^2 / sum (x - y)^2), in decibels.

    Args:
      x: float32, float16 or bfloat16, any shape, not empty.
      y: What became of it, in the shape of `x`; likewise.

    Returns:
      float32 scalar, right to 1e-4 dB: see `metrics`. Over elements that are finite in both;
      infinite where they are equal, NaN where there are none.

    Raises:
      TypeError: Another dtype.
      ValueError: The shapes differ, or are empty.

    Gradient: zero.
    """
    x = check_differentiable("sqnr_db", x, wide=False)
    y = check_differentiable("sqnr_db", y, wide=False)
    if x.shape != y.shape or 0 in x.shape:
        raise ValueError(
            f"sqnr_db: x has shape {x.shape}, y {y.shape}, expected the same, with at least one "
            "element"
        )
    return _sqnr(lax.stop_gradient(x), lax.stop_gradient(y))


@jax.jit
def _sqnr(x: jax.Array, y: jax.Array) -> jax.Array:
    return moments(exact_float32(x), exact_float32(y)).sqnr_db()


@functools.partial(jax.jit, static_argnums=3)
def _metrics(x: jax.Array, given: Scales, projection: Projection, spec: BlockFormat) -> Metrics:
    scales, nonzero = find_scales(x, spec, given)
    codes = block_codes(x, spec, projection, scales, nonzero)
    y = dequantized(codes, scales, blocks_of(x, spec), spec, jnp.float32)
    found = moments(exact_float32(x), y)
    counted = counts(x, y, spec, scales)
    return Metrics(
        sqnr_db=found.sqnr_db(),
        max_error=found.max_error,
        cosine=found.cosine(),
        saturated=_fraction(counted.saturated, np.float32(x.size)),
        flushed=_fraction(counted.flushed, counted.alive.astype(jnp.float32)),
        nonfinite=counted.nonfinite,
        histogram=_histogram(codes, spec.element.bits) if spec.element.bits <= 8 else None,
    )


class Counts(NamedTuple):
    """Of the elements of an array x that became y, uint32 scalars.

    Attributes:
      saturated: Clamped: see `Metrics`.
      alive: Finite and not zero.
      flushed: Of those, the ones that became zero.
      nonfinite: NaN or infinite.
    """

    saturated: jax.Array
    alive: jax.Array
    flushed: jax.Array
    nonfinite: jax.Array


def counts(x: jax.Array, y: jax.Array, spec: BlockFormat | None, scales: Scales) -> Counts:
    """Of `x`, which `spec` with `scales` makes the float32 numbers `y`; None: which stays wide."""
    wide = exact_float32(x)
    saturated = jnp.zeros_like(wide, bool)
    if spec is not None:
        u = scaled_values(x, spec, scales)
        lowest, highest = kept_range(spec)
        saturated = (u < np.float32(lowest)) | (u > np.float32(highest)) | jnp.isinf(wide)
    alive = jnp.isfinite(wide) & ~is_zero(wide)
    return Counts(
        _count(saturated), _count(alive), _count(alive & is_zero(y)), _count(~jnp.isfinite(wide))
    )


class Moments(NamedTuple):
    """Sums over the elements that are finite in x and y.

    Attributes:
      sums: float32[4], of x x, (x - y)(x - y), y y and x y, each in units of a power of two, so
        that none overflows or underflows.
      exponents: int32[4], of these powers.
      max_error: float32, the largest |x - y|.
      compared: uint32, how many elements these are.
    """

    sums: jax.Array
    exponents: jax.Array
    max_error: jax.Array
    compared: jax.Array

    def sqnr_db(self) -> jax.Array:
        signal, noise, *_ = self.sums
        units = (self.exponents[0] - self.exponents[1]).astype(jnp.float32)
        decibels = (jnp.log(signal) - jnp.log(noise)) * np.float32(_DECIBELS)
        decibels += units * np.float32(10 * math.log10(2))
        decibels = jnp.where(signal > 0, decibels, np.float32(-np.inf))
        exact = jnp.where(self.compared > 0, np.float32(np.inf), np.float32(np.nan))
        return jnp.where(noise > 0, decibels, exact)

    def cosine(self) -> jax.Array:
        signal, _, image, overlap = self.sums
        norms = jnp.sqrt(signal * image)
        cosine = jnp.clip(overlap / jnp.where(norms > 0, norms, np.float32(1)), -1, 1)
        return jnp.where((signal == 0) & (image == 0), np.float32(1), cosine)


def moments(x: jax.Array, y: jax.Array) -> Moments:
    """Of float32 arrays in one shape.

    Sums of squares would overflow or underflow for many an array that float32 holds. So x, y and
    x - y are each divided by the power of two of their largest magnitude.
    """
    compared = jnp.isfinite(x) & jnp.isfinite(y)
    x, y = (jnp.where(compared, a, np.float32(0)) for a in (x, y))
    every = tuple(range(x.ndim))
    amax = jnp.maximum(*(magnitude_max(a, every, nan_wins=False).reshape(()) for a in (x, y)))
    is_tiny = amax < np.float32(2.0**-_LIFT)
    lift = jnp.where(is_tiny, np.int32(_LIFT), np.int32(0))
    x, y = (lax.cond(is_tiny, times_power_of_two, lambda a, _: a, a, lift) for a in (x, y))
    error = settled(x) - y
    largest = jnp.max(jnp.abs(error))
    (x, of_x), (y, of_y), (noise, of_noise) = map(_normalized, (x, y, error))
    sums = _sums(product(x, x), product(noise, noise), product(y, y), product(x, y))
    exponents = jnp.stack([2 * of_x, 2 * of_noise, 2 * of_y, of_x + of_y]) - 2 * lift
    return Moments(jnp.stack(sums), exponents, times_power_of_two(largest, -lift), _count(compared))


def _normalized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`x` with a largest magnitude from 1 to 2, or all zero, and the exponent it was divided by."""
    exponent = jnp.clip(floor_log2(jnp.max(jnp.abs(x))), -126, 126)  # its reciprocal is normal
    return x * power_of_two(-exponent), exponent


def _sums(*terms: jax.Array) -> list[jax.Array]:
    """The sum of each of the arrays, which share a shape, with what additions round off.

    A reduction of pairs, sum and remainder, in one pass: its error does not grow with the number of
    elements, in whatever order they are added, on one device or many.
    """

    def add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out: tuple[jax.Array, ...] = ()
        for high, low, more, more_low in zip(a[::2], a[1::2], b[::2], b[1::2], strict=True):
            total = high + more
            part = total - high
            rest = ((high - (total - part)) + (more - part)) + (low + more_low)
            rounded = total + rest
            out += (rounded, rest - (rounded - total))
        return out

    pairs = tuple(array for term in terms for array in (term, jnp.zeros_like(term)))
    zeros = (jnp.float32(0),) * len(pairs)
    return list(lax.reduce(pairs, zeros, add, tuple(range(terms[0].ndim)))[::2])


def _histogram(codes: jax.Array, bits: int) -> jax.Array:
    # On an Explicit mesh the sharding of the result must be said; elsewhere it must not.
    sharded = any(entry is not None for entry in explicit_spec(codes))
    where: dict[str, Any] = {"out_sharding": PartitionSpec()} if sharded else {}
    return jnp.zeros(2**bits, jnp.uint32).at[codes].add(np.uint32(1), **where)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.uint32)


def _fraction(count: jax.Array, of: jax.Array | np.float32) -> jax.Array:
    return count.astype(jnp.float32) / jnp.maximum(of, np.float32(1))


def _percent(fraction: ArrayLike) -> str:
    return f"{100 * float(fraction):.3g} %"  # type: ignore[arg-type]
