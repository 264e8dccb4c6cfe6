"""The rounding itself, on float32 patterns: to a format's codes, and to its values.

Two ways, one result. By addition: beside 2**23 steps of the target, float32's own adder has no room
for a fraction of a step and rounds to nearest even, once. It is the fast way, and right wherever
neither the steps nor those sums leave float32's normal range; what has no finite result is put in
as the number that the code of its result spells. By shift: integers alone, for the formats with
wider exponents, bfloat16 first of all.
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
    exact_float32_pattern,
    float_pattern,
    u32,
)
from qtoolkit.formats import FloatFormat, IntFormat, Overflow

SATURATIONS = ("finite", "propagate", "none")


def float_codes(bits: jax.Array, fmt: FloatFormat, saturation: str) -> jax.Array:
    """Rounds values with float32 patterns `bits` to the codes of `fmt`, as uint32."""
    magnitude = bits & u32(MAGNITUDE)
    if _addition_rounds(fmt):
        limited = _limit(magnitude, fmt, saturation)
        limited = jnp.where(magnitude > u32(INF), _spelled(fmt, fmt.nan_code), limited)
        binade = _binade(limited, fmt)
        # A sum's pattern ends in the number of steps; `first` of them are in the exponent already.
        first = -((fmt.min_exponent + 127) << fmt.mantissa_bits) & ((1 << fmt.bits) - 1)
        shift = FLOAT32_MANTISSA - fmt.mantissa_bits
        big = (binade + u32(shift << FLOAT32_MANTISSA)) | u32(first)
        code = _bits(_float(limited) + _float(big)) + (binade >> np.uint32(shift))
        code &= u32((1 << fmt.bits) - 1)
        if saturation == "none" and fmt.overflow_code > fmt.max_code + 1:
            code = jnp.where(code == u32(fmt.max_code + 1), u32(fmt.overflow_code), code)
    else:
        code = _codes_by_shift(magnitude, fmt, saturation)
    sign = (bits >> np.uint32(32 - fmt.bits)) & u32(fmt.sign_code)
    if not fmt.has_negative_zero:  # FNUZ: NaN is the sign bit alone, so OR leaves it
        sign = jnp.where(code == 0, u32(0), sign)
    return code | sign


def float_values(bits: jax.Array, fmt: FloatFormat, saturation: str) -> jax.Array:
    """Rounds values with float32 patterns `bits` to float32 patterns of values of `fmt`."""
    if not _addition_rounds(fmt):
        return float_pattern(float_codes(bits, fmt, saturation), fmt)
    magnitude = bits & u32(MAGNITUDE)
    limited = _limit(magnitude, fmt, saturation)
    shift = FLOAT32_MANTISSA - fmt.mantissa_bits
    big = _float(_binade(limited, fmt) + u32(shift << FLOAT32_MANTISSA))
    value = _bits((_float(limited) + big) - big)  # of the data: XLA would cancel a constant
    if saturation != "finite" and fmt.overflow is not Overflow.MAX:
        beyond = value > u32(exact_float32_pattern(fmt.max_finite))
        value = jnp.where(beyond, u32(INF if fmt.overflow is Overflow.INF else NAN), value)
    value = jnp.where(magnitude > u32(INF), u32(NAN), value)
    sign = bits & u32(SIGN)
    if not fmt.has_negative_zero:
        is_signed = value - np.uint32(1) < u32(NAN - 1)  # neither zero nor NaN
        sign = jnp.where(is_signed, sign, u32(0))
    return value | sign


def _addition_rounds(fmt: FloatFormat) -> bool:
    """Whether float32 sums round to `fmt`: its steps and 2**23 of each are normal numbers.

    Subnormal inputs, which XLA may read as zero, then lie below half a step.
    """
    least_step = fmt.min_exponent - fmt.mantissa_bits
    return least_step >= -125 and fmt.max_exponent + 1 + FLOAT32_MANTISSA <= 127


def _limit(magnitude: jax.Array, fmt: FloatFormat, saturation: str) -> jax.Array:
    """Clamps to the largest finite value, or to what the code of an unclamped result spells."""
    beyond = saturation == "none" and fmt.overflow is not Overflow.MAX
    limited = jnp.minimum(magnitude, _spelled(fmt, fmt.max_code + beyond))
    if saturation == "propagate":
        limited = jnp.where(magnitude == u32(INF), _spelled(fmt, fmt.overflow_code), limited)
    return limited


def _spelled(fmt: FloatFormat, code: int) -> np.uint32:
    return u32(exact_float32_pattern(fmt.magnitude(code)))


def _binade(magnitude: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The exponent field, in place, of the binade whose steps round `magnitude`."""
    return jnp.maximum(magnitude, u32(exact_float32_pattern(fmt.min_normal))) & u32(INF)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _codes_by_shift(magnitude: jax.Array, fmt: FloatFormat, saturation: str) -> jax.Array:
    """The codes, without sign, of values with float32 patterns `magnitude`."""
    shift = FLOAT32_MANTISSA - fmt.mantissa_bits
    min_field = fmt.min_exponent + 127
    code = _shift_right_to_nearest_even(magnitude, shift) - u32(
        (min_field - 1) << fmt.mantissa_bits
    )
    if min_field > 1:  # else the format's subnormals are float32's own
        field = magnitude >> np.uint32(FLOAT32_MANTISSA)
        hidden = jnp.where(field > 0, u32(1 << FLOAT32_MANTISSA), u32(0))
        significand = (magnitude & u32((1 << FLOAT32_MANTISSA) - 1)) | hidden
        drop = np.uint32(min_field + shift) - jnp.maximum(field, np.uint32(1))
        drop = jnp.minimum(drop, np.uint32(25))  # 25 bits below the step: zero
        subnormal = _shift_right_to_nearest_even(significand, drop)
        code = jnp.where(field < u32(min_field), subnormal, code)
    if saturation == "none":
        code = jnp.where(code > u32(fmt.max_code), u32(fmt.overflow_code), code)
    else:
        code = jnp.minimum(code, u32(fmt.max_code))
        if saturation == "propagate":
            code = jnp.where(magnitude == u32(INF), u32(fmt.overflow_code), code)
    return jnp.where(magnitude > u32(INF), u32(fmt.nan_code), code)


def _shift_right_to_nearest_even(bits: jax.Array, count: int | jax.Array) -> jax.Array:
    """Bits / 2**count, rounded once; `bits` below 2**31."""
    if isinstance(count, int):
        if count == 0:
            return bits
        count = jnp.uint32(count)
    odd = (bits >> count) & np.uint32(1)
    half = np.uint32(1) << (count - np.uint32(1))
    return (bits + (half - np.uint32(1)) + odd) >> count


def int_codes(bits: jax.Array, fmt: IntFormat, saturation: str) -> jax.Array:
    """Rounds values with float32 patterns `bits` to the codes of `fmt`, as uint32."""
    magnitude = bits & u32(MAGNITUDE)
    negative = bits >= u32(SIGN)
    integer = _nearest_integer(magnitude)
    limit = jnp.where(negative, u32(-int(fmt.lowest)), u32(int(fmt.max_finite)))
    if saturation == "none":
        integer = jnp.where(magnitude == u32(INF), limit, integer)
    else:
        beyond_32_bits = magnitude >= u32(exact_float32_pattern(2**32))
        integer = jnp.where(beyond_32_bits, limit, jnp.minimum(integer, limit))
    code = jnp.where(negative, -integer, integer)
    code = jnp.where(magnitude > u32(INF), u32(0), code)
    return code & u32((1 << fmt.bits) - 1)


def _nearest_integer(magnitude: jax.Array) -> jax.Array:
    """The low 32 bits of |x| rounded to the nearest integer, ties to even."""
    field = magnitude >> np.uint32(FLOAT32_MANTISSA)
    big = np.float32(2.0**FLOAT32_MANTISSA)
    small = _bits(_float(magnitude) + big) - big.view(np.uint32)
    significand = (magnitude & u32((1 << FLOAT32_MANTISSA) - 1)) | u32(1 << FLOAT32_MANTISSA)
    left = field - np.uint32(150)  # from 2**23 on x is an integer: its significand, shifted
    shifted = jnp.where(left < np.uint32(32), significand << left, u32(0))
    return jnp.where(field < np.uint32(150), small, shifted)
