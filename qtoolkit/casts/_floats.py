"""Rounding to float formats: to their codes, and to their values.

Three ways, one result:

* By addition, the fast way. E4M3FN has steps of 1/8 from 1 to 2. Added to 2**23 steps, 2**20, the
  number 1.3 becomes 2**20 + 1.25, because float32's adder has no room for less than a step there
  and rounds to nearest even, once. The other modes correct that sum by the sign of what it left
  over. Numbers beyond the format are replaced first by the number that their code spells: overflow
  to NaN, code 0x7F of E4M3FN, by 480, what 0x7F would stand for. The way is right wherever neither
  the steps nor the sums leave float32's normal range.
* By a constant shift of the pattern: bfloat16 and TF32, whose codes are the upper bits of float32;
  and E8M0, which begins a binade lower and has no zero.
* By a shift of its own for every element: all others, binary16p16uf or float64 for instance.
"""

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
    widened,
)
from qtoolkit.casts._elementwise import by_platform
from qtoolkit.casts._modes import Rounding, Stochastic
from qtoolkit.casts._projection import UNCLAMPED, Projection
from qtoolkit.casts._shift import rounded_shift, within_width
from qtoolkit.formats import FLOAT16, FLOAT32, FloatFormat, Overflow, Specials


def float_codes(bits: jax.Array, fmt: FloatFormat, projection: Projection) -> jax.Array:
    """Rounds values with float32 patterns `bits` to the codes of `fmt`, as uint32."""
    if addition_rounds(fmt, projection.rounding):
        return _codes_by_addition(bits, fmt, projection)
    if is_upper_part(fmt, FLOAT32):
        return upper_part(bits, fmt, FLOAT32, projection) >> np.uint32(32 - fmt.bits)
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
    is_inf, is_nan = magnitude == u32(INF), magnitude > u32(INF)
    return _finished(code, negative, is_inf, is_nan, fmt, projection)


def float_values(bits: jax.Array, fmt: FloatFormat, projection: Projection) -> jax.Array:
    """Rounds values with float32 patterns `bits` to float32 patterns of values of `fmt`."""
    if is_upper_part(fmt, FLOAT32):
        return upper_part(bits, fmt, FLOAT32, projection)
    if fmt == FLOAT16 and projection == UNCLAMPED:
        return _through_float16(bits)
    if not addition_rounds(fmt, projection.rounding):
        return float_pattern(float_codes(bits, fmt, projection), fmt)
    magnitude, negative = bits & u32(MAGNITUDE), bits >= u32(SIGN)
    limited = _limited(magnitude, negative, fmt, projection)
    binade = _binade(limited, fmt)
    big = _float(binade + u32((FLOAT32_MANTISSA - fmt.mantissa_bits) << FLOAT32_MANTISSA))
    total = _float(limited) + big
    rounded = total - big  # `big` depends on the data: XLA would cancel a constant
    if projection.rounding != "nearest_even":
        step = binade - u32(fmt.mantissa_bits << FLOAT32_MANTISSA)
        over, up = corrections(limited, negative, rounded, total, step, projection)
        step = _float(step)
        zero = jnp.zeros_like(step)
        rounded = rounded + (jnp.where(up, step, zero) - jnp.where(over, step, zero))
    value = _bits(rounded)
    if projection.saturation != "finite" and fmt.overflow is not Overflow.MAX:
        beyond = value > u32(exact_float32_pattern(fmt.max_finite))
        value = jnp.where(beyond, u32(INF if fmt.overflow is Overflow.INF else NAN), value)
    sign = bits & u32(SIGN if fmt.signed else 0)
    if not fmt.signed:
        outside = NAN if projection.saturation == "none" and fmt.has_nan else 0
        value = jnp.where(negative & (value != 0), u32(outside), value)
    if not fmt.has_nan:
        is_nan = magnitude > u32(INF)
        largest = u32(exact_float32_pattern(fmt.max_finite))
        return jnp.where(is_nan, largest, value | sign)
    value = jnp.where(magnitude > u32(INF), u32(NAN), value)
    if fmt.signed and not fmt.has_negative_zero:
        is_signed = value - np.uint32(1) < u32(NAN - 1)  # neither zero nor NaN
        sign = jnp.where(is_signed, sign, u32(0))
    return value | sign


def is_upper_part(fmt: FloatFormat, wide: FloatFormat) -> bool:
    """Whether the codes of `fmt` are the upper bits of the patterns of `wide`.

    True for bfloat16 and TF32 in float32, for E5M2 in float16, and for each format in itself.
    """
    exponents = (fmt.exponent_bits, fmt.bias) == (wide.exponent_bits, wide.bias)
    specials = (fmt.specials, fmt.overflow) == (Specials.IEEE, Overflow.INF)
    return exponents and specials and fmt.signed and fmt.bits <= wide.bits


def upper_part(
    bits: jax.Array, fmt: FloatFormat, wide: FloatFormat, projection: Projection
) -> jax.Array:
    """Rounds patterns of `wide`, float32 or float16, to patterns of values of `fmt`.

    A number that is rounded up beyond the largest one has the pattern of infinity already.
    """
    dtype, shift = bits.dtype.type, wide.mantissa_bits - fmt.mantissa_bits
    magnitude, negative = bits & dtype(wide.sign_code - 1), bits >= dtype(wide.sign_code)
    inf = dtype(wide.max_code + 1)
    value = rounded_shift(magnitude, shift, projection, negative) << dtype(shift)
    if projection.saturation != "none":
        value = jnp.minimum(value, dtype(fmt.max_code << shift))
        if projection.saturation == "propagate":
            value = jnp.where(magnitude == inf, inf, value)
    value = jnp.where(magnitude > inf, dtype(wide.nan_code), value)
    return value | (bits & dtype(wide.sign_code))


def _float16_by_instruction(bits: jax.Array) -> jax.Array:
    """`float_values` for float16, to nearest even and with infinities, by the processor's own cast.

    The selection replaces NaNs by quiet ones without a payload. It also separates the narrowing
    from the widening, which XLA may otherwise remove together. In the same way XLA may remove the
    narrowing together with a widening before it; so NaNs that come here need not be quiet.
    """
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
        x = widened(x)
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
    outside = None
    if not fmt.signed and fmt.bits == 8 * code.dtype.itemsize:
        # A code beyond the largest has wrapped round, and so has one below the lowest.
        end = fmt.max_code + (0 if fmt.has_zero else 1 << mantissa)
        last = (end >> mantissa) - 1
        is_beyond = (binade == dtype(last)) & (quotient > dtype(end - (last << mantissa)))
        is_below = (binade == 0) & (quotient < dtype(1 << mantissa))
        outside = is_below, is_beyond | (binade > dtype(last))
    return _finished(code, x.negative, x.is_inf, x.is_nan, fmt, projection, outside)


def needs_64_bits(fmt: FloatFormat) -> bool:
    """Whether 32-bit significands are too short for `fmt`."""
    return fmt.mantissa_bits > FLOAT32_MANTISSA or fmt.bits > 32


def _finished(
    code: jax.Array,
    negative: jax.Array,
    is_inf: jax.Array | bool,
    is_nan: jax.Array | bool,
    fmt: FloatFormat,
    projection: Projection,
    outside: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Clamps codes of magnitudes, which were rounded without a limit, and sets sign and NaN.

    Args:
      outside: (is below the lowest code, is beyond the largest code). Only formats without zero
        have codes below the lowest. None if `code` has bits to spare, which show both.
    """
    dtype = code.dtype.type
    largest, overflow = dtype(fmt.max_code), dtype(fmt.overflow_code)
    if outside is None:
        below_zero = dtype(-(1 << fmt.mantissa_bits) % 2 ** (8 * code.dtype.itemsize))
        outside = code >= below_zero, code > largest
    is_below, is_beyond = outside
    is_below &= jnp.logical_not(is_inf)
    limit = largest
    if projection.saturation != "finite":
        stays = projection.saturation == "propagate" or _stays_finite(
            projection.rounding, negative, fmt
        )
        limit = jnp.where(jnp.logical_or(is_inf, jnp.logical_not(stays)), overflow, largest)
    code = jnp.where(is_beyond | is_inf, limit, code)
    if not fmt.signed:
        lowest = dtype(
            fmt.nan_code if projection.saturation == "none" and fmt.nan_code is not None else 0
        )
        is_lower = negative & (code != 0) if fmt.has_zero else negative | is_below
        code = jnp.where(is_lower, lowest, code)
    if fmt.nan_code is None:
        sign = jnp.where(negative, dtype(fmt.sign_code), dtype(0))
        return jnp.where(is_nan, largest, code | sign)
    code = jnp.where(is_nan, dtype(fmt.nan_code), code)
    if fmt.signed and not fmt.has_negative_zero:
        negative &= (code != 0) & (code != dtype(fmt.nan_code))
    return code | jnp.where(negative, dtype(fmt.sign_code), dtype(0))


def _stays_finite(rounding: Rounding, negative: jax.Array, fmt: FloatFormat) -> jax.Array | bool:
    """Whether, with saturation "none", a finite number beyond the largest is rounded down to it."""
    match rounding:
        case "toward_zero":
            return True
        case "toward_positive":
            return negative
        case "toward_negative":
            return ~negative
        case "to_odd":
            return fmt.max_code % 2 == 1
    return False


def _codes_by_addition(bits: jax.Array, fmt: FloatFormat, projection: Projection) -> jax.Array:
    magnitude, negative = bits & u32(MAGNITUDE), bits >= u32(SIGN)
    limited = _limited(magnitude, negative, fmt, projection)
    nan_code = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    limited = jnp.where(magnitude > u32(INF), _spelled(fmt, nan_code), limited)
    binade = _binade(limited, fmt)
    # A sum's pattern ends in the number of steps; `first` of them are in the exponent already.
    mask = (1 << fmt.bits) - 1
    first = -((fmt.min_exponent + 127) << fmt.mantissa_bits) & mask
    shift = FLOAT32_MANTISSA - fmt.mantissa_bits
    big = _float((binade + u32(shift << FLOAT32_MANTISSA)) | u32(first))
    total = _float(limited) + big
    code = _bits(total) + (binade >> np.uint32(shift))
    if projection.rounding != "nearest_even":
        step = binade - u32(fmt.mantissa_bits << FLOAT32_MANTISSA)
        nearest = total - big
        over, up = corrections(limited, negative, nearest, total, step, projection)
        code = code - over.astype(jnp.uint32)
        if projection.rounding == "to_odd":  # adds `up`, by a single operation
            code = code | (_bits(nearest) != limited).astype(jnp.uint32)
        else:
            code = code + up.astype(jnp.uint32)
    code &= u32(mask)
    if projection.saturation == "none" and fmt.overflow_code > fmt.max_code + 1:
        code = jnp.where(code == u32(fmt.max_code + 1), u32(fmt.overflow_code), code)
    if not fmt.signed:
        outside = (
            fmt.nan_code if projection.saturation == "none" and fmt.nan_code is not None else 0
        )
        is_outside = (bits > u32(SIGN)) & (bits <= u32(SIGN | INF)) & (code != 0)
        return jnp.where(is_outside, u32(outside), code)
    sign = (bits >> np.uint32(32 - fmt.bits)) & u32(fmt.sign_code)
    if not fmt.has_nan:
        sign = jnp.where(magnitude > u32(INF), u32(0), sign)
    elif not fmt.has_negative_zero:  # NaN is the sign bit alone, so OR leaves it
        sign = jnp.where(code == 0, u32(0), sign)
    return code | sign


def corrections(
    magnitude: jax.Array,
    negative: jax.Array,
    nearest: jax.Array,
    total: jax.Array,
    step: jax.Array | np.uint32,
    projection: Projection,
) -> tuple[jax.Array, jax.Array]:
    """(over, up), such that nearest - over * step + up * step is rounded as `projection` says.

    `over` is true where `nearest` exceeds the magnitude: one step less is the value below it. `up`
    is true where the rounding takes the value above that one. For E4M3FN, with steps of 1/8, 1.3
    has nearest = 1.25; rounded up it has over = 0, up = 1, which is 1.375. In "nearest_away" `over`
    is always false, and `up` true where a tie was rounded toward zero. Patterns are compared as
    integers, so that subnormals count.

    Args:
      magnitude, step: float32 patterns.
      nearest: The magnitude rounded to nearest even.
      total: A sum whose pattern is odd where `nearest` is an odd number of steps.
    """
    rounding, over = projection.rounding, _bits(nearest) > magnitude
    inexact = _bits(nearest) != magnitude
    match rounding:
        case "toward_zero":
            return over, jnp.zeros_like(over)
        case "toward_positive" | "toward_negative":
            return over, inexact & (negative if rounding == "toward_negative" else ~negative)
        case "to_odd":
            # The last bit of `total` is set if `nearest` is odd. The value below the magnitude is
            # `nearest`, or its neighbour of the other parity; go up where it is even.
            odd = _bits(total) << np.uint32(31)
            high = jnp.where(over, u32(SIGN), u32(0))
            return over, inexact & (odd == high)
        case "nearest_away":
            half = _float(step - u32(1 << FLOAT32_MANTISSA))
            return jnp.zeros_like(over), _float(magnitude) - nearest == half
    assert isinstance(rounding, Stochastic)
    assert projection.random is not None
    rest = (_float(magnitude) - nearest) + jnp.where(over, _float(step), np.float32(0))
    return over, _goes_up(rest, step, rounding, projection.random)


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
    """Whether float32 sums round to `fmt`: each step and 2**23 times it must be normal numbers.

    In such formats subnormal inputs, which XLA may read as zero, lie below half a step, and for
    stochastic rounding below what random bits can tell from zero.
    """
    least_step = fmt.min_exponent - fmt.mantissa_bits
    return (
        fmt.has_zero
        and fmt.mantissa_bits >= 1
        and fmt.bits <= 22  # room for `first` beside the steps
        and least_step >= (-100 if isinstance(rounding, Stochastic) else -125)
        and fmt.max_exponent + 1 + FLOAT32_MANTISSA <= 127
    )


def _limited(
    magnitude: jax.Array, negative: jax.Array, fmt: FloatFormat, projection: Projection
) -> jax.Array:
    """Clamps magnitudes to the largest value, or to what the code of overflow would spell."""
    largest, next_one = _spelled(fmt, fmt.max_code), _spelled(fmt, fmt.max_code + 1)
    stays: jax.Array | bool = True
    if projection.saturation == "none" and fmt.overflow is not Overflow.MAX:
        stays = _stays_finite(projection.rounding, negative, fmt)
    if stays is False:
        return jnp.minimum(magnitude, next_one)
    limit = largest if stays is True else jnp.where(stays, largest, next_one)
    limited = jnp.minimum(magnitude, limit)
    if projection.saturation != "finite":
        limited = jnp.where(magnitude == u32(INF), _spelled(fmt, fmt.overflow_code), limited)
    return limited


def _spelled(fmt: FloatFormat, code: int) -> np.uint32:
    return u32(exact_float32_pattern(fmt.magnitude(code)))


def _binade(magnitude: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The exponent field, in place, of the binade whose steps round `magnitude`."""
    return jnp.maximum(magnitude, u32(exact_float32_pattern(fmt.min_normal))) & u32(INF)


def _float(bits: jax.Array | np.uint32) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)
