"""`ErrorSums`: sums and counts of what rounding did to an array; errors are computed from them.

Two records add up to that of both arrays, so parts of an array, steps and devices are measured one
by one. Their fields are arrays of JAX, in programs too, or numbers of NumPy.

Three functions make them:

* `error_sums` in JAX is exact for arrays of any magnitudes, sizes and shardings.
* `slab_sums` in JAX is right to 1e-4 for 2**20 numbers of one matrix, as the converter needs them.
  It is there because `error_sums` takes longer than all else of a conversion. CPU time for a slab
  of 2**20 bfloat16 numbers, with scales and codes of E4M3FN by channel: 2.1 ms by `slab_sums`,
  11.4 ms by `error_sums`, 5.7 ms by `error_sums` with plain sums of 1024 numbers in the place of
  its exact ones, and only the sums that are read here.
* `weight_errors` in NumPy is for two versions of a weight that are both on the host.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    floor_log2,
    from_magnitude_ordinal,
    is_zero,
    magnitude_ordinal,
    ordinal,
    power_of_two,
    prevent_contraction,
    times_power_of_two,
)
from qtoolkit.scaling._observer import SUM, Merge, Mergeable

Array = jax.Array
_LARGEST = {"merge": Merge(max, lax.pmax)}  # of numbers that are known

# A sum of products can be too large or too small for float32. So it is stored in one of ten slots,
# which its size selects: slot i counts in units of 2**(64 * i - 384). Float32 holds the sums of any
# arrays then. Its rounding errors are small compared with the other sums in the slot.
SLOTS, _SLOT_BITS, _FIRST = 10, 6, -384
_OF_ONE = -_FIRST >> _SLOT_BITS  # the slot that counts in units of 1
_UNITS = 2.0 ** (_FIRST + (np.arange(SLOTS) << _SLOT_BITS))
_DECIBELS = 10 / math.log(10)  # of a power ratio, for one natural logarithm

_LIFT = 60  # arrays below 2**60 are measured in units of 2**-60, in which nothing is subnormal
_LEAST_NORMAL = np.finfo(np.float32).tiny

_SUMMED = 2**10  # squares of a slab in one float32 sum; these sums are added in float64
# How many squares NumPy adds in the dtype of the array, before the sum is added in float64.
_CHUNK = 2**11
# If magnitudes are at most 2**55, errors are at most 2**56. A sum of 2**11 squares is then at most
# 2**(2 * 56 + 11) = 2**123, and fits float32.
_SAFE_EXPONENT = 55


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ErrorSums(Mergeable):
    """Sums and counts over the elements of an array x, of which rounding made y.

    Attributes:
      elements: How many there are.
      compared: How many are finite in x and in y. All sums and maxima are over these.
      nonfinite: How many are NaN or infinite in x.
      nonzero: How many are finite in x, and not zero.
      flushed: How many of these are zero in y.
      saturated: How many were clamped: see `Metrics`.
      moments: [4, 10], sums of x x, (x - y)(x - y), y y and x y, in slots by their size.
    """

    elements: Any = dataclasses.field(default=0, metadata=SUM)
    compared: Any = dataclasses.field(default=0, metadata=SUM)
    nonfinite: Any = dataclasses.field(default=0, metadata=SUM)
    nonzero: Any = dataclasses.field(default=0, metadata=SUM)
    flushed: Any = dataclasses.field(default=0, metadata=SUM)
    saturated: Any = dataclasses.field(default=0, metadata=SUM)
    moments: Any = dataclasses.field(default_factory=lambda: np.zeros((4, SLOTS)), metadata=SUM)

    def __add__(self, other: Self) -> Self:
        return self.merge(other)

    # What follows from the sums: numbers of Python, or float32 where the sums are traced.

    @property
    def sqnr_db(self) -> Any:
        """10 log10(sum x^2 / sum (x - y)^2), as in `metrics`."""
        xp, sums, exponents = self._sums()
        signal, noise = sums[..., 0], sums[..., 1]
        units = (exponents[..., 0] - exponents[..., 1]).astype(sums.dtype)
        with np.errstate(divide="ignore", invalid="ignore"):  # log(0) is -inf
            decibels = (xp.log(signal) - xp.log(noise)) * _DECIBELS + units * (10 * math.log10(2))
        is_exact = (noise == 0) & (self.compared > 0)
        return _number(xp.where(is_exact, np.inf, decibels))

    @property
    def cosine(self) -> Any:
        """The cosine of the angle between x and y, as in `metrics`."""
        xp, sums, exponents = self._sums()
        signal, image, overlap = (sums[..., i] for i in (0, 2, 3))
        # Exponents are multiples of 64, so half of their sum is an integer.
        units = exponents[..., 3] - (exponents[..., 0] + exponents[..., 2]) // 2
        norms = xp.sqrt(signal) * xp.sqrt(image)
        cosine = xp.ldexp(overlap / xp.where(norms > 0, norms, 1), units)
        both_zero = (signal == 0) & (image == 0)
        return _number(xp.where(both_zero, 1, xp.clip(cosine, -1, 1)))

    @property
    def saturated_fraction(self) -> Any:
        """How many of all elements were clamped."""
        return self._fraction(self.saturated, self.elements)

    @property
    def flushed_fraction(self) -> Any:
        """How many of the elements that were finite and not zero became zero."""
        return self._fraction(self.flushed, self.nonzero)

    def _fraction(self, count: Any, total: Any) -> Any:
        if isinstance(count, jax.core.Tracer):
            count, total = (jnp.asarray(n, jnp.float32) for n in (count, total))
            return count / jnp.maximum(total, np.float32(1))
        if not isinstance(count, int):
            count, total = (np.asarray(n, np.float64) for n in (count, total))
        return _number(count / np.maximum(total, 1))

    def _sums(self) -> tuple[Any, Any, Any]:
        """A module with `log`; the four sums, and the exponents of the powers of two they count."""
        if not isinstance(self.moments, jax.core.Tracer):
            sums = np.asarray(self.moments, np.float64) @ _UNITS
            return np, sums, np.zeros(sums.shape, np.int32)
        # Of float32 the highest slot that is not empty, in its units, and the one below.
        slots = lax.broadcasted_iota(jnp.int32, self.moments.shape, self.moments.ndim - 1)
        top = jnp.max(jnp.where(self.moments != 0, slots, 0), axis=-1, keepdims=True)
        below = jnp.where(slots == top - 1, np.float32(2.0 ** -(1 << _SLOT_BITS)), np.float32(0))
        highest = jnp.sum(self.moments * jnp.where(slots == top, np.float32(1), below), axis=-1)
        return jnp, highest, (top[..., 0] << np.int32(_SLOT_BITS)) + np.int32(_FIRST)


def _number(x: Any) -> Any:
    """An array of NumPy without axes as a number of Python."""
    is_known = isinstance(x, np.ndarray | np.generic) and np.ndim(x) == 0
    return x.item() if is_known else x


class ArrayErrors(NamedTuple):
    """What `error_sums` finds.

    Attributes:
      sums: Counts are uint32, moments float32.
      amax: float32, the largest finite |x|.
      max_error: float32, the largest |x - y|.
    """

    sums: ErrorSums
    amax: Array
    max_error: Array


def error_sums(x: Array, y: Array, saturated: Array) -> ArrayErrors:
    """Of float32 arrays x and y; a mask of their shape says which elements saturated."""
    # Sums of squares would overflow or underflow for many an array that float32 holds. So x, y and
    # x - y are each divided by the power of two of their largest magnitude.
    # There are only three reductions, each of several arrays, to save compile time: XLA for CPUs
    # makes one loop of such a reduction, but three loops of a reduction of a single array.
    is_finite = jnp.isfinite(x)
    compared, nonzero = is_finite & jnp.isfinite(y), is_finite & ~is_zero(x)
    masks = {
        "compared": compared,
        "nonfinite": ~is_finite,
        "nonzero": nonzero,
        "flushed": nonzero & is_zero(y),
        "saturated": saturated,
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
    counts, sums = _sums(tuple(masks.values()), (x * x, noise * noise, y * y, x * y))
    return ArrayErrors(
        ErrorSums(
            elements=jnp.asarray(x.size, jnp.float32),  # the size may be symbolic
            **dict(zip(masks, counts, strict=True)),
            moments=_in_slots(jnp.stack(sums), exponents),
        ),
        amax=from_magnitude_ordinal(ordinals[0], jnp.float32),
        max_error=times_power_of_two(largest[2], -lift),
    )


def _in_slots(sums: Array, exponents: Array) -> Array:
    """[4, SLOTS], from sums that count powers of two with these exponents."""
    power = exponents - np.int32(_FIRST)
    slot, rest = power >> np.int32(_SLOT_BITS), power & np.int32(2**_SLOT_BITS - 1)
    is_slot = np.arange(SLOTS, dtype=np.int32)[None] == slot[:, None]
    return jnp.where(is_slot, (sums * power_of_two(rest))[:, None], np.float32(0))


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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightErrors(ErrorSums):
    """The sums of a weight in a file, in numbers of NumPy: float64. All are 0 for no weight.

    The sums of y y and of x y are NaN: nobody asks for the cosine of a weight.

    Attributes:
      max_error: The largest |x - y|.
      differing: How many elements have x != y; two NaNs count as equal.
      overflowed: How many finite elements a cast without scales clamped.
      max_scale: The largest scale; 0 without scales.
    """

    max_error: float = dataclasses.field(default=0.0, metadata=_LARGEST)
    differing: int = dataclasses.field(default=0, metadata=SUM)
    overflowed: int = dataclasses.field(default=0, metadata=SUM)
    max_scale: float = dataclasses.field(default=0.0, metadata=_LARGEST)

    @property
    def known_sqnr_db(self) -> float | None:
        """`sqnr_db`; None if all of x is 0, or a sum is not finite."""
        signal, noise = self.moments[:2, _OF_ONE].tolist()
        is_known = signal > 0 and math.isfinite(signal) and math.isfinite(noise)
        return self.sqnr_db if is_known else None


def _moments(signal: float, noise: float) -> np.ndarray:
    moments = np.zeros((4, SLOTS))
    moments[:, _OF_ONE] = signal, noise, np.nan, np.nan
    return moments


class SlabSums(NamedTuple):
    """What `slab_sums` adds up in a program, for `slab_errors` on the host.

    Attributes:
      sums: [4, ...]: of (factor * x)^2 and of (factor * (x - y))^2 over elements that are finite;
        how many elements are not finite in x; how many finite ones exceed a limit.
      factor: A power of two such that squares stay in the range of float32.
    """

    sums: Array
    factor: Array


def slab_sums(x: Array, y: Array, amax: Array, limit: float | None) -> SlabSums:
    """Of float32 matrices x and y, where `amax` is the largest |x|; subnormal y may count as 0."""
    exponent = jnp.frexp(amax)[1]
    factor = jnp.ldexp(jnp.float32(1), -jnp.clip(exponent, -126, 126))
    scaled = x * factor
    error = scaled - y * factor
    compared, is_finite = jnp.isfinite(scaled) & jnp.isfinite(error), jnp.isfinite(x)
    terms = [jnp.where(compared, part * part, jnp.float32(0)) for part in (scaled, error)]
    exceeds = jnp.zeros_like(x)
    if limit is not None:
        exceeds = ((jnp.abs(x) > np.float32(limit)) & is_finite).astype(jnp.float32)
    terms += [(~is_finite).astype(jnp.float32), exceeds]
    rows = (x.shape[0], -1) if x.shape[1] % _SUMMED else (-1, _SUMMED)
    return SlabSums(jnp.stack([jnp.sum(term.reshape(rows), axis=1) for term in terms]), factor)


def slab_errors(size: int, sums: SlabSums, max_scales: Sequence[float]) -> list[WeightErrors]:
    """The errors of some slabs of this size, from stacked sums and the largest scale of each."""
    totals = sums.sums.astype(np.float64).sum(axis=2)
    totals[:, :2] /= np.square(sums.factor.astype(np.float64))[:, None]
    pairs = zip(totals.tolist(), max_scales, strict=True)
    return [
        WeightErrors(
            elements=size,
            compared=size - int(nonfinite),
            nonfinite=int(nonfinite),
            moments=_moments(signal, noise),
            overflowed=int(overflowed),
            max_scale=max_scale,
        )
        for (signal, noise, nonfinite, overflowed), max_scale in pairs
    ]


def weight_errors(x: np.ndarray, y: np.ndarray, clamped: np.ndarray | None = None) -> WeightErrors:
    """Of two flat arrays of float32, or of float64; `clamped` says which x were clamped."""
    size, saturated = x.size, 0 if clamped is None else int(np.count_nonzero(clamped))
    nonfinite, nonzero = 0, int(np.count_nonzero(x))
    differing = int(np.count_nonzero(x != y))
    is_compared = np.isfinite(x) & np.isfinite(y)
    if not is_compared.all():
        nonfinite = size - int(np.count_nonzero(np.isfinite(x)))
        nonzero -= nonfinite
        differing -= int(np.count_nonzero(np.isnan(x) & np.isnan(y)))
        x, y = x[is_compared], y[is_compared]
    largest = max(float(np.max(np.abs(a), initial=0)) for a in (x, y))
    if largest and not 2.0**-_SAFE_EXPONENT < largest < 2.0**_SAFE_EXPONENT:
        x, y = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        error = x - y
        moments = _moments(_squares(x), _squares(error))
    return WeightErrors(
        elements=size,
        compared=x.size,
        nonfinite=nonfinite,
        nonzero=nonzero,
        flushed=int(np.count_nonzero((y == 0) & (x != 0))),
        saturated=saturated,
        moments=moments,
        max_error=float(np.max(np.abs(error), initial=0)),
        differing=differing,
    )


def _squares(x: np.ndarray) -> float:
    """The sum of squares: chunks in the dtype of `x`, the sum of chunks in float64."""
    chunks = (x[start : start + _CHUNK] for start in range(0, x.size, _CHUNK))
    return sum(float(np.dot(chunk, chunk)) for chunk in chunks)
