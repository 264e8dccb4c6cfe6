"""Rounding to table formats, by counting the thresholds that a number has reached.

The threshold between two neighbours is the least number that is rounded to the upper one, so every
deterministic mode is a list of thresholds, made here with exact numbers. Numbers are compared by
integer keys in their order: patterns, with the sign turned into that of the integer.
"""

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._elementwise import look_up
from qtoolkit.casts._projection import Projection
from qtoolkit.formats import Overflow, TableFormat


def table_codes(x: jax.Array, fmt: TableFormat, projection: Projection) -> jax.Array:
    """Rounds float32 or float64 numbers to the codes of `fmt`, as `fmt.code_dtype`."""
    rounding, saturation = projection.rounding, projection.saturation
    assert isinstance(rounding, str)
    dtype = np.dtype(x.dtype)
    bits = 8 * dtype.itemsize
    unsigned, signed = np.dtype(f"uint{bits}"), np.dtype(f"int{bits}")
    pattern = lax.bitcast_convert_type(x, unsigned)
    magnitude = (pattern & unsigned.type(2 ** (bits - 1) - 1)).astype(signed)
    key = jnp.where(pattern >> unsigned.type(bits - 1) == 0, magnitude, -magnitude)
    thresholds, codes = _ladder(fmt, rounding, saturation, dtype)
    code = _code_at(key, thresholds, codes)
    infinity = _key(np.inf, dtype)
    if saturation != "finite" and fmt.overflow is not Overflow.MAX:
        for end in (np.inf, -np.inf):
            code = jnp.where(key == _key(end, dtype), code.dtype.type(_overflow(fmt, end)), code)
    nan = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return jnp.where(magnitude > infinity, code.dtype.type(nan), code)


def table_values(codes: jax.Array, fmt: TableFormat, dtype: np.dtype) -> jax.Array:
    """The values of codes of `fmt`, in a dtype that holds them."""
    return look_up(fmt.values().astype(dtype), codes.astype(jnp.int32))


def _code_at(key: jax.Array, thresholds: np.ndarray, codes: np.ndarray) -> jax.Array:
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
    values, codes = [Fraction(value) for value in fmt.finite], list(fmt.codes)
    # Codes that are even or odd decide ties. `beyond` has no code in the format, so it counts as
    # the code after the largest: after 0x7E it is odd, and a tie between the two goes down.
    parities = list(codes)
    ties = [Fraction(tie) for tie in fmt.ties or ()]
    ties = ties or [(a + b) / 2 for a, b in itertools.pairwise(values)]
    if fmt.beyond is not None and saturation == "none" and fmt.overflow is not Overflow.MAX:
        beyond = Fraction(fmt.beyond)
        if not _stays(fmt, rounding, positive=True):
            ties.append((values[-1] + beyond) / 2)
            values.append(beyond)
            parities.append(parities[-1] + 1)
            codes.append(_overflow(fmt, np.inf))
        if fmt.signed and not _stays(fmt, rounding, positive=False):
            ties.insert(0, (values[0] - beyond) / 2)
            values.insert(0, -beyond)
            parities.insert(0, parities[0] + 1)
            codes.insert(0, _overflow(fmt, -np.inf))
    gaps = zip(itertools.pairwise(values), itertools.pairwise(parities), ties, strict=True)
    keys = [_threshold(*gap, rounding, dtype) for gap in gaps]
    signed = np.dtype(f"int{8 * dtype.itemsize}")
    return np.array(keys, signed), np.array(codes, fmt.code_dtype)


def _threshold(
    values: tuple[Fraction, Fraction],
    codes: tuple[int, int],
    tie: Fraction,
    rounding: str,
    dtype: np.dtype,
) -> int:
    """Key of the least number that is rounded to the upper one of two neighbours.

    Args:
      values, codes: Those of the lower neighbour, then those of the upper one.
      tie: The number halfway between them, or the one that the format has instead.
    """
    lower, upper = values
    # `up`: whether the tie, or in directed modes all between the neighbours, goes to the upper one.
    odd_up = codes[0] % 2 == 0 and codes[1] % 2 == 1
    even_up = codes[0] % 2 == 1 and codes[1] % 2 == 0
    positive = lower >= 0
    match rounding:
        case "nearest_even" | "nearest_away":
            up = even_up if rounding == "nearest_even" else positive
            if tie in values:  # a value of the format is rounded to itself
                up = tie == upper
            return _key_of(tie, dtype, included=up)
        case "to_odd":
            up = odd_up
        case "toward_zero":
            up = not positive
        case _:
            up = rounding == "toward_positive"
    return _key_of(lower, dtype, included=False) if up else _key_of(upper, dtype, included=True)


def _stays(fmt: TableFormat, rounding: str, *, positive: bool) -> bool:
    """Whether, with saturation "none", finite overflow is rounded down to the largest magnitude."""
    if rounding == "to_odd":
        return fmt.codes[-1 if positive else 0] % 2 == 1
    return rounding in ("toward_zero", "toward_negative" if positive else "toward_positive")


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
