"""Rounding to float formats: to their codes, and to their values.

There are three ways to round a magnitude. `_finish` then handles overflow, NaN and sign for all.

* By addition, the fast way. E4M3FN has steps of 1/8 from 1 to 2. Added to 2**23 steps, 2**20, the
  number 1.3 becomes 2**20 + 1.25, because float32's adder has no room for less than a step there
  and rounds to nearest even, once. The other modes correct that sum by the sign of what it left
  over. Magnitudes are limited first to the code after the largest one: 480 for E4M3FN. The way is
  right wherever neither the steps nor the sums leave float32's normal range.
* By a constant shift of the pattern: bfloat16 and TF32, whose codes are the upper bits of float32;
  and E8M0, which begins a binade lower and has no zero.
* By a shift of its own for every element: all others, binary16p16uf or float64 for instance.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._bits import (
    FLOAT32_MANTISSA,
    INF,
    MAGNITUDE,
    NAN,
    SIGN,
    Exact,
    exact_float32_pattern,
    exact_from_pattern,
    float_pattern,
    u32,
)
from qtoolkit.casts._elementwise import by_platform
from qtoolkit.casts._modes import MODES, Rounding, Stochastic, goes_up, stays_finite
from qtoolkit.casts._projection import UNCLAMPED, Projection
from qtoolkit.casts._shift import rounded_shift, within_width
from qtoolkit.formats import FLOAT16, FLOAT32, FloatFormat, Overflow, Specials


def float_codes(bits: jax.Array, fmt: FloatFormat, projection: Projection) -> jax.Array:
    """Rounds values with float32 patterns `bits` to the codes of `fmt`, as uint32."""
    if addition_rounds(fmt, projection.rounding):
        return _by_addition(bits, fmt, projection, to_codes=True)
    if is_upper_part(fmt, FLOAT32):
        return upper_part(bits, fmt, FLOAT32, projection, to_codes=True)
    if fmt.has_zero or fmt.min_exponent != -127:
        return codes_of_exact(exact_from_pattern(bits), fmt, projection)
    magnitude, negative = bits & u32(MAGNITUDE), bits >= u32(SIGN)
    # The lowest binade of `fmt` is subnormal in float32. Zero becomes the code below the lowest.
    lowered = jnp.where(
        magnitude < u32(1 << FLOAT32_MANTISSA),
        magnitude << np.uint32(1),
        magnitude + u32(1 << FLOAT32_MANTISSA),
    )
    shift, below_zero = FLOAT32_MANTISSA - fmt.mantissa_bits, np.uint32(1 << fmt.mantissa_bits)
    parity = int(fmt.mantissa_bits == 0)
    code = rounded_shift(lowered, shift, projection, negative, parity) - below_zero
    number = _Number(negative, magnitude == u32(INF), magnitude > u32(INF), _code_sign(bits, fmt))
    is_below = code >= u32(-(1 << fmt.mantissa_bits))
    ends = _code_ends(fmt, np.uint32)
    return _finish(code, number, fmt, ends, projection, is_below=is_below)


def float_values(bits: jax.Array, fmt: FloatFormat, projection: Projection) -> jax.Array:
    """Rounds values with float32 patterns `bits` to float32 patterns of values of `fmt`."""
    if is_upper_part(fmt, FLOAT32):
        return upper_part(bits, fmt, FLOAT32, projection, to_codes=False)
    if fmt == FLOAT16 and projection == UNCLAMPED:
        return _through_float16(bits)
    if addition_rounds(fmt, projection.rounding):
        return _by_addition(bits, fmt, projection, to_codes=False)
    return float_pattern(float_codes(bits, fmt, projection), fmt)


class _Number(NamedTuple):
    """What `_finish` needs to know of the number that was rounded."""

    negative: jax.Array
    is_inf: jax.Array | bool
    is_nan: jax.Array | bool
    sign: jax.Array  # the sign bit where the result has it, else 0


class _Ends(NamedTuple):
    """The special results: codes of a format, or float32 patterns of its values."""

    largest: Any
    overflow: Any
    nan: Any


def _code_ends(fmt: FloatFormat, dtype: Any) -> _Ends:
    nan = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return _Ends(dtype(fmt.max_code), dtype(fmt.overflow_code), dtype(nan))


def _value_ends(fmt: FloatFormat) -> _Ends:
    largest = u32(exact_float32_pattern(fmt.max_finite))
    overflow = {Overflow.MAX: largest, Overflow.INF: u32(INF), Overflow.NAN: u32(NAN)}
    return _Ends(largest, overflow[fmt.overflow], u32(NAN) if fmt.has_nan else largest)


def _code_sign(bits: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The sign bit of patterns, moved to where codes have it."""
    dtype = bits.dtype.type
    return (bits >> dtype(8 * bits.dtype.itemsize - fmt.bits)) & dtype(fmt.sign_code)


class _Overflow(enum.Enum):
    """How `_finish` learns which codes are above the largest one, if not by a mask."""

    COMPARED = enum.auto()  # those greater than the largest one
    DONE = enum.auto()  # none: overflow has the right code already


def _finish(
    code: jax.Array,
    number: _Number,
    fmt: FloatFormat,
    ends: _Ends,
    projection: Projection,
    *,
    is_below: jax.Array | None = None,
    overflow: jax.Array | _Overflow = _Overflow.COMPARED,
) -> jax.Array:
    """Clamps codes (or patterns) of rounded magnitudes, and sets NaN and the sign.

    Args:
      is_below: For formats without a zero: which codes are below the lowest one.
      overflow: Which codes are above the largest one, as that of an infinity is: a mask where codes
        have wrapped round, so that they cannot be compared.
    """
    saturation = projection.saturation
    stays = _overflow_stays(fmt, projection, number.negative)
    if overflow is _Overflow.COMPARED and stays is True:
        code = jnp.minimum(code, ends.largest)
    elif overflow is not _Overflow.DONE:
        is_beyond = code > ends.largest if overflow is _Overflow.COMPARED else overflow
        code = jnp.where(is_beyond, _either(stays, ends.largest, ends.overflow), code)
    if saturation != "finite" and stays is not False and ends.overflow != ends.largest:
        code = jnp.where(number.is_inf, ends.overflow, code)
    if not fmt.signed:
        outside = ends.nan if saturation == "none" and fmt.has_nan else code.dtype.type(0)
        is_outside = number.negative & (code != 0)
        if is_below is not None:
            is_outside = number.negative | is_below
        return jnp.where(number.is_nan, ends.nan, jnp.where(is_outside, outside, code))
    if not fmt.has_nan:  # NaN becomes the largest value
        return jnp.where(number.is_nan, ends.nan, code | number.sign)
    code = jnp.where(number.is_nan, ends.nan, code)
    sign = number.sign
    if not fmt.has_negative_zero:  # zero and NaN have no sign; as a code NaN is the sign bit alone
        is_signed = code - code.dtype.type(1) < ends.nan - code.dtype.type(1)
        sign = jnp.where(code != 0 if ends.nan == fmt.sign_code else is_signed, sign, 0)
    return code | sign


def _overflow_stays(fmt: FloatFormat, projection: Projection, negative: jax.Array) -> Any:
    """Whether finite overflow becomes the largest value; True or False if that is certain."""
    if projection.saturation != "none" or fmt.overflow is Overflow.MAX:
        return True
    return stays_finite(projection.rounding, negative, largest_is_odd=fmt.max_code % 2 == 1)


def _either(condition: Any, if_true: Any, if_false: Any) -> Any:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return jnp.where(condition, if_true, if_false)


def is_upper_part(fmt: FloatFormat, wide: FloatFormat) -> bool:
    """Whether the codes of `fmt` are the upper bits of the patterns of `wide`."""
    # True for bfloat16 and TF32 in float32, for E5M2 in float16, and for each format in itself.
    exponents = (fmt.exponent_bits, fmt.bias) == (wide.exponent_bits, wide.bias)
    specials = (fmt.specials, fmt.overflow) == (Specials.IEEE, Overflow.INF)
    return exponents and specials and fmt.signed and fmt.bits <= wide.bits


def upper_part(
    bits: jax.Array,
    fmt: FloatFormat,
    wide: FloatFormat,
    projection: Projection,
    *,
    to_codes: bool,
) -> jax.Array:
    """Rounds patterns of `wide`, float32 or float16, to codes or patterns of values of `fmt`."""
    dtype, shift = bits.dtype.type, wide.mantissa_bits - fmt.mantissa_bits
    magnitude, negative = bits & dtype(wide.sign_code - 1), bits >= dtype(wide.sign_code)
    inf = dtype(wide.max_code + 1)
    code = rounded_shift(magnitude, shift, projection, negative)
    ends, sign = _code_ends(fmt, dtype), bits & dtype(wide.sign_code)
    if to_codes:
        sign = sign >> dtype(shift)
    else:
        code, ends = code << dtype(shift), _Ends(*(end << dtype(shift) for end in ends))
    number = _Number(negative, magnitude == inf, magnitude > inf, sign)
    overflow = _Overflow.COMPARED
    if projection.saturation == "none":  # rounding up beyond the largest gives infinity already
        number, overflow = number._replace(is_inf=False), _Overflow.DONE
    return _finish(code, number, fmt, ends, projection, overflow=overflow)


def _float16_by_instruction(bits: jax.Array) -> jax.Array:
    """`float_values` for float16, to nearest even, with infinities, by the processor's own cast."""
    # The selection replaces NaNs by quiet ones without a payload. It also separates the narrowing
    # from the widening, which XLA may otherwise remove together. In the same way XLA may remove the
    # narrowing together with a widening before it; so NaNs that come here need not be quiet.
    half = lax.bitcast_convert_type(_float(bits).astype(jnp.float16), jnp.uint16)
    magnitude = half & np.uint16(0x7FFF)
    magnitude = jnp.where(magnitude > np.uint16(0x7C00), np.uint16(0x7E00), magnitude)
    half = lax.bitcast_convert_type(magnitude | (half & np.uint16(0x8000)), jnp.float16)
    return _bits(half.astype(jnp.float32))


def _float16_and_nans_by_hand(bits: jax.Array) -> jax.Array:
    """The same where the instructions do not keep the sign of NaNs, as those of GPUs do not."""
    is_nan = (bits & u32(MAGNITUDE)) > u32(INF)
    return jnp.where(is_nan, (bits & u32(SIGN)) | u32(NAN), _float16_by_instruction(bits))


_through_float16 = by_platform(
    "through_float16",
    cpu=_float16_by_instruction,
    others=_float16_and_nans_by_hand,
    aval=lambda bits: bits,
)


def codes_of_exact(x: Exact, fmt: FloatFormat, projection: Projection) -> jax.Array:
    """Rounds normalized numbers to the codes of `fmt`, as unsigned integers of their width."""
    if needs_64_bits(fmt):
        x = x.in_64_bits()
    dtype, mantissa = x.significand.dtype.type, fmt.mantissa_bits
    exponent = jnp.minimum(x.exponent, np.int32(fmt.max_exponent + 1))
    binade = jnp.maximum(exponent, np.int32(fmt.min_exponent)) - np.int32(fmt.min_exponent)
    # Below the lowest normal binade the step stays, so the shift grows.
    drop = np.int32(x.top - mantissa) + jnp.maximum(np.int32(fmt.min_exponent) - exponent, 0)
    significand, drop = within_width(x.significand, drop)
    binade = binade.astype(dtype)
    parity = (binade + dtype(not fmt.has_zero)) & dtype(1) if mantissa == 0 else 0
    quotient = rounded_shift(significand, drop, projection, x.negative, parity)
    code = (binade << dtype(mantissa)) + quotient
    if not fmt.has_zero:
        code -= dtype(1 << mantissa)
    is_below = code >= dtype(-(1 << mantissa) % 2 ** (8 * code.dtype.itemsize))
    is_beyond = code > dtype(fmt.max_code)
    if not fmt.signed and fmt.bits == 8 * code.dtype.itemsize:
        # A code beyond the largest has wrapped round, and so has one below the lowest.
        end = fmt.max_code + (0 if fmt.has_zero else 1 << mantissa)
        last = (end >> mantissa) - 1
        is_beyond = (binade == dtype(last)) & (quotient > dtype(end - (last << mantissa)))
        is_beyond |= binade > dtype(last)
        is_below = (binade == 0) & (quotient < dtype(1 << mantissa))
    is_below &= jnp.logical_not(x.is_inf)
    sign = jnp.where(x.negative, dtype(fmt.sign_code), dtype(0))
    number, ends = _Number(x.negative, x.is_inf, x.is_nan, sign), _code_ends(fmt, dtype)
    return _finish(
        code, number, fmt, ends, projection,
        is_below=None if fmt.has_zero else is_below, overflow=is_beyond | x.is_inf,
    )  # fmt: skip


def needs_64_bits(fmt: FloatFormat) -> bool:
    """Whether 32-bit significands are too short for `fmt`."""
    return fmt.mantissa_bits > FLOAT32_MANTISSA or fmt.bits > 32


def _by_addition(
    bits: jax.Array, fmt: FloatFormat, projection: Projection, *, to_codes: bool
) -> jax.Array:
    """`float_codes` or `float_values` by float32's adder, where `addition_rounds`."""
    magnitude, negative = bits & u32(MAGNITUDE), bits >= u32(SIGN)
    stays = _overflow_stays(fmt, projection, negative)
    limit = _either(stays, _spelled(fmt, fmt.max_code), _spelled(fmt, fmt.max_code + 1))
    limited = jnp.minimum(magnitude, limit)
    lowest = u32(exact_float32_pattern(fmt.min_normal))
    binade = jnp.maximum(limited, lowest) & u32(INF)  # the power of two below the magnitude
    step = binade - u32(fmt.mantissa_bits << FLOAT32_MANTISSA)
    shift, mask = FLOAT32_MANTISSA - fmt.mantissa_bits, (1 << fmt.bits) - 1
    many_steps = binade + u32(shift << FLOAT32_MANTISSA)
    if to_codes:
        # A sum's pattern ends in the number of steps; these steps are in the exponent already.
        many_steps |= u32(-((fmt.min_exponent + 127) << fmt.mantissa_bits) & mask)
    total = _float(limited) + _float(many_steps)
    # Not cancelled by XLA, because `many_steps` depends on the data.
    nearest = total - _float(many_steps)
    corrected = corrections(limited, negative, nearest, total, step, projection)
    if to_codes:
        code = _bits(total) + (binade >> np.uint32(shift))
        if corrected is not None:
            over, up = corrected
            code = code - over.astype(jnp.uint32)
            if projection.rounding == "to_odd":  # the same in fewer operations
                code |= (_bits(nearest) != limited).astype(jnp.uint32)
            else:
                code += up.astype(jnp.uint32)
        code &= u32(mask)
        ends, sign = _code_ends(fmt, np.uint32), _code_sign(bits, fmt)
    else:
        if corrected is not None:
            over, up = (jnp.where(is_off, _float(step), np.float32(0)) for is_off in corrected)
            nearest = nearest + (up - over)
        code, ends, sign = _bits(nearest), _value_ends(fmt), bits & u32(SIGN)
    # The limit leaves at most the code after the largest, which mostly is that of overflow.
    is_right = stays is True or (to_codes and ends.overflow == ends.largest + 1)
    number = _Number(negative, magnitude == u32(INF), magnitude > u32(INF), sign)
    overflow = _Overflow.DONE if is_right else _Overflow.COMPARED
    return _finish(code, number, fmt, ends, projection, overflow=overflow)


def corrections(
    magnitude: jax.Array,
    negative: jax.Array,
    nearest: jax.Array,
    total: jax.Array,
    step: jax.Array | np.uint32,
    projection: Projection,
) -> tuple[jax.Array, jax.Array] | None:
    """Corrects magnitudes rounded to nearest even, `nearest`, to what `projection` says.

    For E4M3FN, with steps of 1/8, 1.3 has nearest = 1.25; rounded up it is one step more.

    Args:
      magnitude, step: float32 patterns.
      total: A sum whose pattern is odd where `nearest` is an odd number of steps.

    Returns:
      Where one step is to be subtracted, and where one is to be added; None if nowhere.
    """
    rounding = projection.rounding
    over = _bits(nearest) > magnitude  # then the value below the magnitude is one step less
    if isinstance(rounding, Stochastic):
        assert projection.random is not None
        rest = (_float(magnitude) - nearest) + jnp.where(over, _float(step), np.float32(0))
        return over, _goes_up(rest, step, rounding, projection.random)
    mode = MODES[rounding]
    odd = (_bits(total) << np.uint32(31)) != jnp.where(over, u32(SIGN), u32(0))
    if mode.is_directed:
        is_inexact = _bits(nearest) != magnitude
        return over, is_inexact & goes_up(mode.above_middle, negative, odd)
    if mode.at_middle == "odd":
        return None
    half = _float(step - u32(1 << FLOAT32_MANTISSA))
    rest, up = _float(magnitude) - nearest, goes_up(mode.at_middle, negative, odd)
    return (rest == -half) & jnp.logical_not(up), (rest == half) & up


def _goes_up(
    rest: jax.Array, step: jax.Array | np.uint32, rounding: Stochastic, random: jax.Array
) -> jax.Array:
    """Whether to round up magnitudes that lie `rest` above a multiple of the step `step`."""

    def times(bits: int) -> jax.Array:  # rest / step * 2**bits, exactly
        return rest * _float(u32((254 + bits) << FLOAT32_MANTISSA) - step)

    if rounding.variant == "A" or (rounding.variant == "B" and rounding.bits < 24):
        # `Stochastic.goes_up` compares floor(t) with an integer; t itself compares alike.
        bits, random = rounding.bits, random.astype(jnp.int32)
        if rounding.variant == "B":
            bits, random = bits + 1, 2 * random + np.int32(1)
        return times(bits) >= (np.int32(1 << bits) - random).astype(jnp.float32)
    scaled = times(rounding.bits + 2)
    fraction = scaled.astype(jnp.int32)
    if rounding.variant == "C":
        fraction |= (fraction.astype(jnp.float32) != scaled).astype(jnp.int32)
    return rounding.goes_up(fraction.astype(jnp.uint32), random)


def addition_rounds(fmt: FloatFormat, rounding: Rounding) -> bool:
    """Whether float32 sums round to `fmt`: each step and 2**23 times it must be normal numbers."""
    # In such formats subnormal inputs, which XLA may read as zero, lie below half a step, and for
    # stochastic rounding below what random bits can tell from zero.
    least_step = fmt.min_exponent - fmt.mantissa_bits
    return (
        fmt.has_zero
        and fmt.mantissa_bits >= 1
        and fmt.bits <= 22  # room for the steps that are in the exponent
        and least_step >= (-100 if isinstance(rounding, Stochastic) else -125)
        and fmt.max_exponent + 1 + FLOAT32_MANTISSA <= 127
    )


def _spelled(fmt: FloatFormat, code: int) -> np.uint32:
    return u32(exact_float32_pattern(fmt.magnitude(code)))


def _float(bits: jax.Array | np.uint32) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)
