"""Rounding to table formats, by counting the thresholds that a number has reached.

The threshold between two neighbours is the least number that is rounded to the upper one. So every
deterministic mode is a list of thresholds, computed here exactly. Numbers are compared by integer
keys: their patterns, with the sign of the number as the sign of the integer. Stochastic rounding
looks up the two neighbours in the same way and measures where between them a number lies.
"""

import functools
import itertools
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._affine import prevent_contraction, quotient
from qtoolkit.casts._bits import holds
from qtoolkit.casts._elementwise import look_up
from qtoolkit.casts._modes import MODES, Mode, Stochastic, goes_up, stays_finite
from qtoolkit.casts._projection import Projection
from qtoolkit.formats import FLOAT32, Overflow, TableFormat

_LEAST_GAP = Fraction(1, 2**126)  # XLA's CPU reads less as zero


def table_codes(x: jax.Array, fmt: TableFormat, projection: Projection) -> jax.Array:
    """Rounds float32 or float64 numbers to the codes of `fmt`, as `fmt.code_dtype`."""
    rounding, saturation = projection.rounding, projection.saturation
    dtype = np.dtype(x.dtype)
    bits = 8 * dtype.itemsize
    unsigned, signed = np.dtype(f"uint{bits}"), np.dtype(f"int{bits}")
    pattern = lax.bitcast_convert_type(x, unsigned)
    magnitude = (pattern & unsigned.type(2 ** (bits - 1) - 1)).astype(signed)
    key = jnp.where(pattern >> unsigned.type(bits - 1) == 0, magnitude, -magnitude)
    if isinstance(rounding, Stochastic):
        code = _stochastic_codes(x, key, fmt, projection)
    else:
        code = _entry_at(key, *_ladder(fmt, rounding, saturation, dtype))
    infinity = _key(np.inf, dtype)
    if saturation != "finite" and fmt.overflow is not Overflow.MAX:
        for end in (np.inf, -np.inf):
            code = jnp.where(key == _key(end, dtype), code.dtype.type(_overflow(fmt, end)), code)
    nan = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return jnp.where(magnitude > infinity, code.dtype.type(nan), code)


def table_values(codes: jax.Array, fmt: TableFormat, dtype: np.dtype) -> jax.Array:
    """The values of codes of `fmt`, in a dtype that holds them."""
    return look_up(fmt.values().astype(dtype), codes.astype(jnp.int32))


def _stochastic_codes(
    x: jax.Array, key: jax.Array, fmt: TableFormat, projection: Projection
) -> jax.Array:
    """Codes of `x`; the probability of rounding up grows linearly between two magnitudes."""
    assert isinstance(projection.rounding, Stochastic)
    assert projection.random is not None
    thresholds, gaps = _gaps(fmt, projection.saturation, np.dtype(x.dtype))
    gap = _entry_at(key, thresholds, np.arange(len(gaps.start), dtype=np.int32))
    start, width = look_up(gaps.start, gap), look_up(gaps.width, gap)
    v = quotient(jnp.abs(prevent_contraction(x) - start), width)
    bits = projection.rounding.bits + 2
    scaled = jnp.minimum(v, v.dtype.type(1)) * v.dtype.type(2.0**bits)
    fraction = scaled.astype(jnp.int32)
    fraction |= (fraction.astype(scaled.dtype) != scaled).astype(jnp.int32)
    away = projection.rounding.goes_up(fraction.astype(jnp.uint32), projection.random)
    return jnp.where(away, look_up(gaps.away, gap), look_up(gaps.toward, gap))


class _Gaps(NamedTuple):
    """The gaps between neighbouring values, and one beyond each end, where both codes are the same.

    Attributes:
      start: The end of the gap that is nearer to zero.
      width: The distance to the other end.
      toward, away: The codes of the two ends.
    """

    start: np.ndarray
    width: np.ndarray
    toward: np.ndarray
    away: np.ndarray


@functools.lru_cache(maxsize=64)
def _gaps(fmt: TableFormat, saturation: str, dtype: np.dtype) -> tuple[np.ndarray, _Gaps]:
    """The keys at which gaps after the first begin, and the gaps, in rising order."""
    values, codes, _, _ = _line(fmt, "stochastic", saturation)
    gaps = [(values[0], Fraction(1), codes[0], codes[0])]
    for (lower, upper), (low, high) in zip(
        itertools.pairwise(values), itertools.pairwise(codes), strict=True
    ):
        is_negative = upper <= 0
        ends = (upper, high, low) if is_negative else (lower, low, high)
        gaps.append((ends[0], upper - lower, *ends[1:]))
    gaps.append((values[-1], Fraction(1), codes[-1], codes[-1]))
    signed = np.dtype(f"int{8 * dtype.itemsize}")
    keys = [_key_of(value, dtype, included=True) for value in values]
    start, width, toward, away = zip(*gaps, strict=True)
    numbers = (np.array([float(n) for n in column], dtype) for column in (start, width))
    return np.array(keys, signed), _Gaps(
        *numbers, *(np.array(column, fmt.code_dtype) for column in (toward, away))
    )


def check_stochastic(where: str, fmt: TableFormat) -> None:
    """ValueError if float32 cannot measure how far a number lies between two values."""
    values = [Fraction(value) for value in fmt.finite]
    least = min(upper - lower for lower, upper in itertools.pairwise(values))
    largest = max(fmt.max_finite, -fmt.lowest, Fraction(fmt.beyond or 0))
    if not holds(fmt, np.float32) or least < _LEAST_GAP or 2 * largest > FLOAT32.max_finite:
        raise ValueError(
            f"{where}: stochastic rounding to {fmt.name}, whose values or gaps float32 does not "
            "hold, expected float32 values, gaps of 2**-126 and more and values below 2**127; use "
            "another rounding"
        )


def _entry_at(key: jax.Array, thresholds: np.ndarray, codes: np.ndarray) -> jax.Array:
    """`codes[i]`, i the number of `thresholds` that `key` has reached."""
    width = 8 * thresholds.dtype.itemsize
    # Look up the upper bits of the key, as few as leave one threshold at most to compare with.
    for bits in range(8, 17):
        shift = width - bits
        first = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).astype(thresholds.dtype) << shift
        least = np.searchsorted(thresholds, first, side="right")
        most = np.searchsorted(thresholds, first + ((1 << shift) - 1), side="right")
        if (most - least).max() > 1:
            continue
        bucket = (key >> key.dtype.type(shift)) + key.dtype.type(2 ** (bits - 1))
        never = np.array([np.iinfo(thresholds.dtype).max], thresholds.dtype)
        reached = key >= look_up(np.concatenate([thresholds, never])[least], bucket)
        return jnp.where(reached, look_up(codes[most], bucket), look_up(codes[least], bucket))
    rank = jnp.zeros_like(key)  # else a binary search, in a ladder as long as a power of two
    steps = [1 << n for n in reversed(range(len(thresholds).bit_length()))]
    last = np.array(np.iinfo(thresholds.dtype).max, thresholds.dtype)
    ladder = np.full(2 * steps[0], last)
    ladder[: len(thresholds)] = thresholds
    for step in steps:
        reached = key >= look_up(ladder, rank + key.dtype.type(step - 1))
        rank = rank + reached.astype(key.dtype) * key.dtype.type(step)
    return look_up(np.append(codes, np.repeat(codes[-1:], len(ladder))), rank)


@functools.lru_cache(maxsize=256)
def _ladder(
    fmt: TableFormat, rounding: str, saturation: str, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """The thresholds' keys in rising order, and the codes between them."""
    values, codes, parities, ties = _line(fmt, rounding, saturation)
    gaps = zip(itertools.pairwise(values), itertools.pairwise(parities), ties, strict=True)
    keys = [_threshold(*gap, rounding, dtype) for gap in gaps]
    signed = np.dtype(f"int{8 * dtype.itemsize}")
    return np.array(keys, signed), np.array(codes, fmt.code_dtype)


def _line(
    fmt: TableFormat, rounding: str, saturation: str
) -> tuple[list[Fraction], list[int], list[int], list[Fraction]]:
    """The values that numbers may become, rising, with codes, parities and the ties between."""
    values, codes = [Fraction(value) for value in fmt.finite], list(fmt.codes)
    # A tie goes to the even code. In HIFLOAT8 40,960 is the tie between 32,768, code 0x6E, and
    # `beyond`, 49,152. `beyond` has no code, so it counts as the next one, 0x6F, which is odd: the
    # tie goes down.
    parities = list(codes)
    ties = [Fraction(tie) for tie in fmt.ties or ()]
    ties = ties or [(a + b) / 2 for a, b in itertools.pairwise(values)]
    if fmt.beyond is not None and saturation == "none" and fmt.overflow is not Overflow.MAX:
        beyond = Fraction(fmt.beyond)
        if not stays_finite(rounding, False, largest_is_odd=fmt.codes[-1] % 2 == 1):
            ties.append((values[-1] + beyond) / 2)
            values.append(beyond)
            parities.append(parities[-1] + 1)
            codes.append(_overflow(fmt, np.inf))
        if fmt.signed and not stays_finite(rounding, True, largest_is_odd=fmt.codes[0] % 2 == 1):
            ties.insert(0, (values[0] - beyond) / 2)
            values.insert(0, -beyond)
            parities.insert(0, parities[0] + 1)
            codes.insert(0, _overflow(fmt, -np.inf))
    return values, codes, parities, ties


def _threshold(
    values: tuple[Fraction, Fraction],
    codes: tuple[int, int],
    tie: Fraction,
    rounding: str,
    dtype: np.dtype,
) -> int:
    """Key of the least number that is rounded to the upper one of two neighbours."""
    # `values` and `codes` are of the lower neighbour, then of the upper one. `tie` is the number
    # halfway between them, or the format's own.
    lower, upper = values
    negative = lower < 0
    smaller = int(negative)  # the neighbour nearer to zero
    mode = MODES[rounding]
    if (codes[0] - codes[1]) % 2 == 0:  # both even or both odd: the lower one is taken
        mode = Mode(*("negative" if when in ("odd", "even") else when for when in mode))
    below, at, above = (goes_up(when, negative, codes[smaller] % 2 == 1) for when in mode)
    if tie in values:  # a value of the format is rounded to itself
        at = tie == values[1 - smaller]
    if negative:  # to the larger magnitude is to the lower neighbour
        below, at, above = not above, not at, not below
    if below:
        return _key_of(lower, dtype, included=False)
    return _key_of(tie, dtype, included=at) if above else _key_of(upper, dtype, included=True)


def _overflow(fmt: TableFormat, end: float) -> int:
    if fmt.overflow is Overflow.INF and end in fmt.values_by_code:
        return fmt.values_by_code.index(end)
    if fmt.overflow is Overflow.NAN and fmt.nan_code is not None:
        return fmt.nan_code
    return fmt.codes[-1 if end > 0 else 0]


def _key_of(value: Fraction, dtype: np.dtype, *, included: bool) -> int:
    """Key of the least number of `dtype` that is above `value`, or at it if `included`."""
    with np.errstate(over="ignore"):
        near = np.asarray(float(value), dtype)
    if np.isinf(near):  # beyond the dtype: infinity, or the number after minus infinity
        return _key(near, dtype) + int(near < 0)
    exact = Fraction(float(near))
    return _key(near, dtype) + int(exact < value or (exact == value and not included))


def _key(value: float | np.ndarray, dtype: np.dtype) -> int:
    signed = np.dtype(f"int{8 * dtype.itemsize}")
    magnitude = int(np.abs(np.asarray(value, dtype)).view(signed))
    return -magnitude if value < 0 else magnitude
