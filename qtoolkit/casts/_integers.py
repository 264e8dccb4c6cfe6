"""Rounding to integer formats."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._bits import INF, MAGNITUDE, SIGN, Exact, exact_float32_pattern, u32
from qtoolkit.casts._floats import corrections
from qtoolkit.casts._projection import Projection
from qtoolkit.casts._shift import rounded_shift, within_width
from qtoolkit.formats import IntFormat


def codes_of_integers(x: jax.Array, fmt: IntFormat, saturation: str) -> jax.Array:
    """Saturate integers of any dtype and return them as `fmt.code_dtype`."""
    if fmt.is_bool:
        return x.astype(bool).astype(fmt.code_dtype)
    if x.dtype.itemsize == 1:  # also of four bits and less, and bool
        x = x.astype(jnp.int16)
    if saturation != "none":
        info = np.iinfo(x.dtype)
        lowest, largest = max(info.min, int(fmt.lowest)), min(info.max, int(fmt.max_finite))
        x = jnp.clip(x, x.dtype.type(lowest), x.dtype.type(largest))
    return low_bits(x.astype(fmt.code_dtype), fmt)


def int_codes(x: Exact, fmt: IntFormat, projection: Projection) -> jax.Array:
    """Rounds numbers, which need not be normalized, to codes of `fmt`, as `fmt.code_dtype`."""
    if fmt.is_bool:
        return ((x.significand != 0) | x.is_nan).astype(fmt.code_dtype)
    if fmt.bits > 32:
        x = x.in_64_bits()
    dtype, width = x.significand.dtype.type, 8 * x.significand.dtype.itemsize
    drop = np.int32(x.top) - x.exponent
    significand, right = within_width(x.significand, jnp.maximum(drop, 0))
    integer = rounded_shift(significand, jnp.maximum(right, dtype(1)), projection, x.negative)
    left = jnp.clip(-drop, 0, np.int32(width - 1)).astype(dtype)
    shifted = jnp.where(-drop < width, x.significand << left, dtype(0))
    integer = jnp.where(drop > 0, integer, shifted)
    limit = jnp.where(x.negative, dtype(-int(fmt.lowest)), dtype(int(fmt.max_finite)))
    if projection.saturation != "none":
        too_wide = x.exponent >= np.int32(width)
        integer = jnp.where(too_wide, limit, jnp.minimum(integer, limit))
    integer = jnp.where(x.is_inf, limit, integer)
    code = jnp.where(x.negative, -integer, integer)
    code = jnp.where(x.is_nan, dtype(0), code)
    return low_bits(code.astype(fmt.code_dtype), fmt)


def addition_rounds_to(fmt: IntFormat, projection: Projection) -> bool:
    """Whether `integers_by_addition` rounds to `fmt`."""
    return fmt.bits <= 22 and projection.saturation != "none" and not fmt.is_bool


def integers_by_addition(bits: jax.Array, fmt: IntFormat, projection: Projection) -> jax.Array:
    """Round values with float32 patterns `bits` to integers of `fmt`, clamped, as int32."""
    # In a sum with 2**23 float32 has no room for fractions: its adder rounds to nearest even.
    magnitude, negative = bits & u32(MAGNITUDE), bits >= u32(SIGN)
    largest, lowest = (u32(exact_float32_pattern(abs(v))) for v in (fmt.max_finite, fmt.lowest))
    limited = jnp.minimum(magnitude, jnp.where(negative, lowest, largest))
    limited = jnp.where(magnitude > u32(INF), u32(0), limited)
    total = lax.bitcast_convert_type(limited, jnp.float32) + np.float32(2.0**23)
    integer = lax.bitcast_convert_type(total, jnp.int32) - np.float32(2.0**23).view(np.int32)
    nearest = integer.astype(jnp.float32)  # not total - 2**23, which XLA may cancel
    one = u32(exact_float32_pattern(1))
    corrected = corrections(limited, negative, nearest, total, one, projection)
    if corrected is not None:
        over, up = corrected
        integer = integer + up.astype(jnp.int32) - over.astype(jnp.int32)
    return jnp.where(negative, -integer, integer)


def low_bits(codes: jax.Array, fmt: IntFormat) -> jax.Array:
    return codes & fmt.code_dtype.type((1 << fmt.bits) - 1)
