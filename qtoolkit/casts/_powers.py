"""Exact powers of two, and the E8M0 scales of MX formats.

XLA's exp2 and log2 are not exact, and its products read and return subnormal numbers as zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._affine import prevent_merging
from qtoolkit.casts._bits import (
    FLOAT32_MANTISSA,
    INF,
    MAGNITUDE,
    NAN,
    SIGN,
    from_pattern,
    pattern,
    u32,
)
from qtoolkit.casts._elementwise import elementwise

_HIDDEN = 1 << FLOAT32_MANTISSA  # the significand's leading one
_NAN_CODE = 255  # of E8M0
_SQRT2_FRACTION = 0x3504F3  # of sqrt(2) = 1 + f / 2**23, cut


@elementwise
def power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent as float32, for int32 exponents from -149, the least subnormal, to 127."""
    normal = (exponent + np.int32(127)) << np.int32(FLOAT32_MANTISSA)
    subnormal = np.int32(1) << jnp.clip(exponent + np.int32(149), 0, 31)
    bits = jnp.where(exponent >= -126, normal, subnormal)
    return lax.bitcast_convert_type(bits, jnp.float32)


@elementwise
def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`x` * 2**exponent as IEEE 754 says, for float32 `x` and int32 exponents, with subnormals."""
    bits = pattern(x)
    magnitude = bits & u32(MAGNITUDE)
    significand, field = _normalized(magnitude)
    field += exponent
    normal = (field << np.int32(FLOAT32_MANTISSA)).astype(jnp.uint32) + (significand - u32(_HIDDEN))
    normal = jnp.where(field < 255, normal, u32(INF))
    drop = jnp.clip(1 - field, 1, FLOAT32_MANTISSA + 2).astype(jnp.uint32)
    subnormal = significand >> drop
    rest = significand - (subnormal << drop)
    is_up = rest + (subnormal & np.uint32(1)) > np.uint32(1) << (drop - np.uint32(1))
    result = jnp.where(field > 0, normal, subnormal + is_up.astype(jnp.uint32))
    stays = magnitude - np.uint32(1) >= u32(INF - 1)  # zero, infinity, NaN
    result = jnp.where(stays, magnitude, result)
    result = jnp.where(magnitude > u32(INF), u32(NAN), result)
    return from_pattern(result | (bits & u32(SIGN)), jnp.float32)


@elementwise
def times_from_subnormal(x: jax.Array, exponent: jax.Array, is_nan: jax.Array) -> jax.Array:
    """`x` * 2**exponent for `x` that may be subnormal, by a few floating-point products.

    Exact where it is 2**-100 or more; other results are below 2**-100, too. NaN where `is_nan`.
    Exponents are int32 from -252 to 252. Subnormal numbers of a float64 `x` count as zeros.
    """
    if x.dtype == jnp.float64:
        first, second = _halves(exponent, is_nan)
        return x * first.astype(x.dtype) * second.astype(x.dtype)
    # XLA's CPU reads subnormals as zeros. A subnormal x is its pattern, an integer, times 2**-149.
    bits = pattern(x)
    magnitude = bits & u32(MAGNITUDE)
    is_subnormal = magnitude < u32(_HIDDEN)
    steps = magnitude.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-100)
    steps = from_pattern(pattern(steps) | (bits & u32(SIGN)), jnp.float32)
    first, second = _halves(exponent, is_nan)
    y = jnp.where(is_subnormal, steps, x) * first
    return jnp.where(is_subnormal, y * np.float32(2.0**-49), y) * second


@elementwise
def times_to_subnormal(x: jax.Array, exponent: jax.Array, is_nan: jax.Array) -> jax.Array:
    """`x` * 2**exponent as IEEE 754 says, subnormals too, for `x` of 2**-100 or more, or 0."""
    bits = pattern(x)
    first, second = _halves(exponent, is_nan)
    steps = from_pattern(bits & u32(MAGNITUDE), jnp.float32) * np.float32(2.0**75)
    steps = steps * first * np.float32(2.0**74) * second
    # The pattern of a subnormal result is its number of steps of 2**-149. The sum with 2**23 rounds
    # that number to an integer.
    whole = pattern(steps + np.float32(_HIDDEN)) - np.float32(_HIDDEN).view(np.uint32)
    subnormal = from_pattern(whole | (bits & u32(SIGN)), jnp.float32)
    # Without `prevent_merging` XLA multiplies the halves first where they are the same everywhere.
    return jnp.where(steps < np.float32(_HIDDEN), subnormal, prevent_merging(x * first) * second)


def _halves(exponent: jax.Array, is_nan: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two normal numbers whose product is 2**exponent; the first one is NaN where `is_nan`."""
    half = exponent >> np.int32(1)
    first, second = (
        lax.bitcast_convert_type((part + np.int32(127)) << np.int32(FLOAT32_MANTISSA), jnp.float32)
        for part in (half, exponent - half)
    )
    return jnp.where(is_nan, np.float32(np.nan), first), second


@elementwise
def binary_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exponent e, int32, and fraction f, uint32, of float32 |x| = 2**e * (1 + f / 2**23)."""
    # Also of subnormals. Zero has a low exponent; that of infinities and NaNs is unspecified.
    significand, field = _normalized(pattern(x) & u32(MAGNITUDE))
    return field - np.int32(127), significand - u32(_HIDDEN)


def _normalized(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Significand, uint32 from 2**23 to 2**24 - 1, and exponent field, int32, of a magnitude.

    A magnitude is a float32 pattern without sign. Subnormals have fields below 1, zero has -23.
    """
    shift = jnp.maximum(lax.clz(magnitude), np.uint32(8)) - np.uint32(8)  # of subnormals
    significand = ((magnitude & u32(_HIDDEN - 1)) << shift) | u32(_HIDDEN)
    field = jnp.maximum(magnitude >> np.uint32(FLOAT32_MANTISSA), np.uint32(1))
    return significand, field.astype(jnp.int32) - shift.astype(jnp.int32)


def floor_log2(x: jax.Array) -> jax.Array:
    """The exponent of `binary_parts`."""
    return binary_parts(x)[0]


@elementwise
def nearest_power_of_two(x: jax.Array) -> jax.Array:
    """float32 `x` > 0, from 2**-126 to 2**126, rounded by its logarithm: 1.42 is 2, 1.41 is 1."""
    exponent, fraction = binary_parts(x)
    return power_of_two(exponent + (fraction > u32(_SQRT2_FRACTION)).astype(jnp.int32))


# The code of 2**e in E8M0 is e + 127, which is also the exponent field of the float32 number 2**e.
# So an addition to the pattern of an amax gives the code, and a shift of the code gives the factor.
# This requires that 2**-e is a normal number, and that subnormal data may count as zero.


@elementwise
def e8m0_codes(amax: jax.Array, exponent: int, least_fraction: int) -> jax.Array:
    """uint8 codes of the scales 2**e of blocks with float32 `amax`: at most 253, 255 for NaN."""
    # e is the exponent of `amax` less `exponent`, that of the largest element (2 or more), and one
    # more where the fraction of `amax`, in units of 2**-23, is `least_fraction` or more: adding
    # 2**23 - least_fraction to the pattern carries into the field. Zero and subnormal numbers get
    # code 0.
    field = (pattern(amax) + np.uint32(2**FLOAT32_MANTISSA - least_fraction)) >> np.uint32(
        FLOAT32_MANTISSA
    )
    codes = jnp.maximum(field, np.uint32(exponent)) - np.uint32(exponent)
    return jnp.where(jnp.isnan(amax), np.uint32(_NAN_CODE), codes).astype(jnp.uint8)


@elementwise
def over_e8m0(x: jax.Array, codes: jax.Array) -> jax.Array:
    """float32 `x / 2**e`, exact; subnormal numbers may be read and returned as zero."""
    # Codes are at most 253, because 2**-126 is float32's lowest normal number.
    # `prevent_merging`: of `(2 * y) / 2**-127` XLA would make `y * 2**128`, which is NaN for y = 0.
    field = np.uint32(2 * 127) - codes.astype(jnp.uint32)
    return prevent_merging(x) * from_pattern(field << np.uint32(FLOAT32_MANTISSA), jnp.float32)


@elementwise
def times_e8m0(q: jax.Array, codes: jax.Array) -> jax.Array:
    """float32 `q * 2**e`, NaN for code 255; subnormal numbers may be read and returned as zero."""
    # 2**-127 is subnormal. So half of q is multiplied by 2**(e + 1). Without `prevent_merging` XLA
    # would move the half to a factor that is the same everywhere.
    field = codes.astype(jnp.uint32) + np.uint32(1)
    factor = from_pattern(field << np.uint32(FLOAT32_MANTISSA), jnp.float32)
    factor = jnp.where(field > np.uint32(_NAN_CODE), np.float32(np.nan), factor)
    return prevent_merging(q * np.float32(0.5)) * factor
