"""How well a format holds an array: error, saturation, underflow, and which codes are used."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
    check_differentiable,
    exact_float32,
    floor_log2,
    from_magnitude_ordinal,
    is_zero,
    magnitude_ordinal,
    ordinal,
    power_of_two,
    prevent_contraction,
    serializable,
    times_power_of_two,
    types_of,
)
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.scaling._blocks import blocks_of, explicit_spec
from qtoolkit.scaling._elements import Scales
from qtoolkit.scaling._engine import (
    block_codes,
    dequantized,
    scaled_values,
)
from qtoolkit.scaling._find_scales import find_scales, in_float32
from qtoolkit.scaling._quantize import check_quantize
from qtoolkit.scaling._scales import unclamped_range

_DECIBELS = 10 / math.log(10)  # of a power ratio, for one natural logarithm
_LIFT = 60  # arrays below 2**60 are measured in units of 2**-60, in which nothing is subnormal
_LEAST_NORMAL = np.finfo(np.float32).tiny


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Metrics:
    """The error of a quantized array. A pytree of arrays, all scalars but `histogram`.

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
        cells = cells_of(self)
        last = [f"{cells.pop(name)} {name}".strip() for name in ("not finite", "codes used")]
        parts = [f"{name} {text}" for name, text in cells.items()]
        parts += last if self.histogram is not None else last[:1]
        return f"Metrics({', '.join(parts)})"


def cells_of(metrics: Metrics) -> dict[str, str]:
    """The text of each field, by its title, for `repr` and tables."""
    histogram = metrics.histogram
    used = "" if histogram is None else f"{np.count_nonzero(histogram)} of {len(histogram)}"
    return {
        "SQNR": f"{float(metrics.sqnr_db):.2f} dB",
        "max error": f"{float(metrics.max_error):.4g}",
        "cosine": f"{float(metrics.cosine):.6f}",
        "saturated": _percent(metrics.saturated),
        "underflowed": _percent(metrics.flushed),
        "not finite": str(int(metrics.nonfinite)),
        "codes used": used,
    }


def metrics_of(
    x: ArrayLike, spec: SpecLike, scales: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Metrics:
    """`metrics` for one spec."""
    array, spec, fixed, projection = check_quantize("metrics", x, spec, **scales, **keywords)
    array = array if isinstance(array, np.ndarray) else lax.stop_gradient(array)
    with types_of(array):
        return _metrics(array, lax.stop_gradient(fixed), projection, spec)


def sqnr_db(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """Signal to quantization noise: 10 log10(sum x^2 / sum (x - y)^2), in decibels.

    Args:
      x: float32, float16 or bfloat16, any shape, not empty.
      y: The quantized version of `x`: same shape, one of these dtypes.

    Returns:
      float32 scalar, right to 1e-4 dB: see `metrics`. Over elements that are finite in both;
      infinite where they are equal, NaN where there are none.

    Raises:
      TypeError: Another dtype.
      ValueError: The shapes differ, or are empty.

    Gradient: zero.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (10_000,))
      >>> for fmt in ("int4", "int8", "e4m3fn"):
      ...     y = qt.quantize(x, fmt).dequantize()
      ...     print(f"{fmt}: {qt.scaling.sqnr_db(x, y):.1f} dB")
      int4: 16.0 dB
      int8: 41.1 dB
      e4m3fn: 31.6 dB
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
    nothing = jnp.zeros_like(x, dtype=bool)
    return comparison(exact_float32(x), exact_float32(y), nothing).sqnr_db()


@functools.partial(jax.jit, static_argnums=3)
def _metrics(
    x: jax.Array | np.ndarray, fixed: Scales, projection: Projection, spec: BlockFormat
) -> Metrics:
    x = jnp.asarray(x)
    scales, nonzero = find_scales(x, spec, fixed)
    codes = block_codes(x, spec, projection, scales, nonzero)
    y = dequantized(codes, scales, blocks_of(x, spec), spec, jnp.float32)
    saturated = saturates(x, scaled_values(x, spec, scales), spec)
    errors = comparison(in_float32(x), y, saturated)
    return Metrics(
        sqnr_db=errors.sqnr_db(),
        max_error=errors.max_error(),
        cosine=errors.cosine(),
        saturated=_fraction(errors.saturated, jnp.asarray(x.size, jnp.float32)),
        flushed=_fraction(errors.flushed, errors.alive.astype(jnp.float32)),
        nonfinite=errors.nonfinite,
        histogram=occurrences(codes, 2**spec.element.bits) if spec.element.bits <= 8 else None,
    )


def saturates(x: jax.Array, u: jax.Array, spec: BlockFormat) -> jax.Array:
    """Which elements of `x` rounding to nearest clamps; `u` are its `scaled_values`."""
    lowest, highest = map(u.dtype.type, unclamped_range(spec))
    is_beyond = (u < lowest) | (u > highest)
    return is_beyond | jnp.isinf(x)


class Comparison(NamedTuple):
    """Sums and counts that compare an array x with y, the array after rounding.

    Counts are uint32 scalars; sums are over the elements compared.

    Attributes:
      compared: How many elements are finite in x and y.
      saturated: How many were clamped: see `Metrics`.
      alive: How many are finite and not zero.
      flushed: How many of these became zero.
      nonfinite: How many are NaN or infinite.
      amax: float32, the largest finite |x|.
      sums: float32[4], of x x, (x - y)(x - y), y y and x y, each in units of a power of two, so
        that none overflows or underflows.
      exponents: int32[4], of these powers.
      largest: float32, the largest |x - y| in units of 2**-lift.
      lift: int32.
    """

    compared: jax.Array
    saturated: jax.Array
    alive: jax.Array
    flushed: jax.Array
    nonfinite: jax.Array
    amax: jax.Array
    sums: jax.Array
    exponents: jax.Array
    largest: jax.Array
    lift: jax.Array

    def max_error(self) -> jax.Array:
        return times_power_of_two(self.largest, -self.lift)

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


def comparison(x: jax.Array, y: jax.Array, saturated: jax.Array) -> Comparison:
    """Compares float32 arrays x and y; a mask of their shape says which elements saturated."""
    # Sums of squares would overflow or underflow for many an array that float32 holds. So x, y and
    # x - y are each divided by the power of two of their largest magnitude.
    # There are only three reductions, each of several arrays, to save compile time: XLA for CPUs
    # makes one loop of such a reduction, but three loops of a reduction of a single array.
    is_finite = jnp.isfinite(x)
    compared, alive = is_finite & jnp.isfinite(y), is_finite & ~is_zero(x)
    counted = {
        "compared": compared,
        "saturated": saturated,
        "alive": alive,
        "flushed": alive & is_zero(y),
        "nonfinite": ~is_finite,
    }
    finite = jnp.where(is_finite, x, np.float32(0))
    x, y = (jnp.where(compared, a, np.float32(0)) for a in (x, y))
    ordinals = _maxima(*map(magnitude_ordinal, (finite, x, y)))
    has_room = jnp.maximum(*ordinals[1:]) < magnitude_ordinal(jnp.float32(2.0**_LIFT))
    x, y = _lifted(x, has_room), _lifted(y, has_room)
    error = prevent_contraction(x) - y
    largest = jnp.stack(_maxima(*map(jnp.abs, (x, y, error))))
    powers = jnp.clip(floor_log2(largest), -126, 126)  # their reciprocals are normal
    x, y, noise = (a * unit for a, unit in zip((x, y, error), power_of_two(-powers), strict=True))
    lift = jnp.where(has_room, np.int32(_LIFT), np.int32(0))
    exponents = powers[np.array([0, 2, 1, 0])] + powers[np.array([0, 2, 1, 1])] - 2 * lift
    counts, sums = _sums(tuple(counted.values()), (x * x, noise * noise, y * y, x * y))
    return Comparison(
        **dict(zip(counted, counts, strict=True)),
        amax=from_magnitude_ordinal(ordinals[0], jnp.float32),
        sums=jnp.stack(sums),
        exponents=exponents,
        largest=largest[2],
        lift=lift,
    )


def _maxima(*arrays: jax.Array) -> list[jax.Array]:
    """The largest element of each of the arrays, which share a shape and are not negative."""

    def larger(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(map(jnp.maximum, a, b))

    zeros = tuple(x.dtype.type(0) for x in arrays)
    return list(lax.reduce(arrays, zeros, larger, tuple(range(arrays[0].ndim))))


def _lifted(x: jax.Array, has_room: jax.Array) -> jax.Array:
    """`x` in units of 2**-_LIFT where it `has_room`; float arithmetic takes subnormals for zero."""
    subnormal = ordinal(x).astype(jnp.float32) * np.float32(2.0 ** (_LIFT - 149))
    is_normal = jnp.abs(x) >= _LEAST_NORMAL
    return jnp.where(has_room, jnp.where(is_normal, x * np.float32(2.0**_LIFT), subnormal), x)


def _sums(
    masks: tuple[jax.Array, ...], terms: tuple[jax.Array, ...]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """How often each of the masks holds, and the sum of each of the terms; all share a shape."""
    # A reduction of pairs, sum and remainder, in one pass: its error does not grow with the number
    # of elements, in whatever order they are added, on one device or many.

    def add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        n = len(masks)
        out = tuple(x + y for x, y in zip(a[:n], b[:n], strict=True))
        pairs = a[n::2], a[n + 1 :: 2], b[n::2], b[n + 1 :: 2]
        for high, low, more, more_low in zip(*pairs, strict=True):
            total = high + more
            part = total - high
            rest = ((high - (total - part)) + (more - part)) + (low + more_low)
            rounded = total + rest
            out += (rounded, rest - (rounded - total))
        return out

    counts = tuple(mask.astype(jnp.uint32) for mask in masks)
    pairs = tuple(array for term in terms for array in (term, jnp.zeros_like(term)))
    zeros = tuple(x.dtype.type(0) for x in (*counts, *pairs))
    totals = lax.reduce((*counts, *pairs), zeros, add, tuple(range(terms[0].ndim)))
    return list(totals[: len(masks)]), list(totals[len(masks) :: 2])


def occurrences(integers: jax.Array, count: int) -> jax.Array:
    """uint32[count]: how often each of the integers below `count` occurs in an array."""
    # On an Explicit mesh the sharding of the result must be said; elsewhere it must not.
    sharded = any(entry is not None for entry in explicit_spec(integers))
    where: dict[str, Any] = {"out_sharding": PartitionSpec()} if sharded else {}
    return jnp.zeros(count, jnp.uint32).at[integers].add(np.uint32(1), mode="drop", **where)


def _fraction(count: jax.Array, total: jax.Array) -> jax.Array:
    return count.astype(jnp.float32) / jnp.maximum(total, np.float32(1))


def _percent(fraction: ArrayLike) -> str:
    return f"{100 * float(fraction):.3g} %"  # type: ignore[arg-type]
