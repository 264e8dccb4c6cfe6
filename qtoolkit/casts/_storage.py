"""Conversions of float32 to other dtypes and back, by bit patterns.

XLA may remove an `astype` to a narrow dtype and the `astype` back, so that a number is never
rounded. It does not remove operations on bit patterns.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from qtoolkit.casts._bits import codes_from_dtype, dtype_from_codes, from_pattern, pattern
from qtoolkit.casts._codes import codes_of, round_values, values_of
from qtoolkit.casts._compact import (
    codes_through_float16,
    has_unlimited_values,
    is_part_of_float16,
    unlimited_values,
)
from qtoolkit.casts._powers import binary_parts, power_of_two
from qtoolkit.casts._projection import NEAREST, UNCLAMPED, Projection
from qtoolkit.formats import FLOAT32, FloatFormat, format


def in_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round float32 to nearest even to float16 or bfloat16, infinite on overflow; keep float64."""
    return x if dtype == x.dtype else from_pattern(pattern(rounded_to(x, dtype)), dtype)


def rounded_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The float32 values of `in_dtype`."""
    return x if dtype == x.dtype else round_values(x, format(dtype), UNCLAMPED)


def to_stored(x: jax.Array, fmt: FloatFormat, projection: Projection = NEAREST) -> jax.Array:
    """Round float32 `x` to `fmt`: to the format's own dtype, or to codes if it has none."""
    if fmt == FLOAT32:
        return x
    codes = codes_of(x, fmt, projection)
    return codes if fmt.dtype is None else dtype_from_codes(codes, fmt)


def positive_to_stored(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """As `to_stored`, for positive numbers and NaN; with fewer operations if `fmt` allows it."""
    if not (has_unlimited_values(fmt) and is_part_of_float16(fmt) and fmt.dtype is not None):
        return to_stored(x, fmt)
    limited = jnp.minimum(x, np.float32(float(fmt.max_finite)))
    codes = codes_through_float16(unlimited_values(limited, fmt), fmt, is_positive=True)
    return dtype_from_codes(codes, fmt)


def from_stored(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The float32 values, subnormals included, of a result of `to_stored`."""
    if fmt == FLOAT32:
        return x
    codes = x if fmt.dtype is None else codes_from_dtype(x, fmt)
    return values_of(codes, fmt, jnp.float32)


def power_to_stored(exponent: jax.Array, is_nan: jax.Array, fmt: FloatFormat) -> jax.Array:
    """`to_stored` of 2**exponent, a value of `fmt` and float32; NaN where `is_nan`."""
    if not _holds_exponents(fmt):
        x = jnp.where(is_nan, np.float32(np.nan), power_of_two(exponent))
        return to_stored(x, fmt)
    codes = jnp.where(is_nan, np.int32(fmt.max_code + 1), exponent + np.int32(fmt.bias))
    codes = codes.astype(fmt.code_dtype)
    return codes if fmt.dtype is None else dtype_from_codes(codes, fmt)


def power_from_stored(x: jax.Array, fmt: FloatFormat) -> tuple[jax.Array, jax.Array]:
    """The exponent, int32, of a stored power of two, and whether it is NaN."""
    if not _holds_exponents(fmt):
        value = from_stored(x, fmt)
        return binary_parts(value)[0], jnp.isnan(value)
    codes = (x if fmt.dtype is None else codes_from_dtype(x, fmt)).astype(jnp.int32)
    return codes - np.int32(fmt.bias), codes == np.int32(fmt.max_code + 1)


def _holds_exponents(fmt: FloatFormat) -> bool:
    """Whether every code is a biased exponent of float32, or the only NaN, as in E8M0."""
    is_plain = fmt.mantissa_bits == 0 and not (fmt.has_zero or fmt.signed or fmt.has_inf)
    return is_plain and fmt.has_nan and -149 <= fmt.min_exponent <= fmt.max_exponent <= 127
