"""Rounding and encoding in few operations, for the cases that quantized matmuls have.

A training step of six blocks rounds in 140 places and encodes in 100, and the time to compile it
grows with the number of operations. With these functions in place of the general ones the step
compiles in nine tenths of the time.
"""

from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._floats import addition_rounds
from qtoolkit.formats import FLOAT16, FloatFormat, Format, Specials


def has_unlimited_values(fmt: Format) -> TypeGuard[FloatFormat]:
    """Whether `unlimited_values` rounds to `fmt`."""
    if not isinstance(fmt, FloatFormat) or not addition_rounds(fmt, "nearest_even"):
        return False
    # The number of least steps of the largest value must be far from float32's end.
    return fmt.has_negative_zero and fmt.max_exponent - _least_exponent(fmt) < 120


def unlimited_values(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Round float32 `x` to nearest even as if `fmt` had no largest value; Inf and NaN stay."""
    # Steps continue beyond the largest value: to 480 and 512 for E4M3FN. Numbers below the lowest
    # normal one are rounded to whole numbers of the least step, 2**-9 for E4M3FN, the others to the
    # significant bits of the format.
    steps = np.float32(2.0 ** -_least_exponent(fmt))
    count = x * steps  # exact; x is read only here, because XLA stores a quotient with two readers
    whole = lax.round(count, lax.RoundingMethod.TO_NEAREST_EVEN)
    significant = lax.reduce_precision(count, 8, fmt.mantissa_bits)
    is_subnormal = jnp.abs(count) < np.float32(1 << fmt.mantissa_bits)
    return jnp.where(is_subnormal, whole, significant) * (1 / steps)


def _least_exponent(fmt: FloatFormat) -> int:
    """The exponent of the least step: -9 for E4M3FN."""
    return fmt.min_exponent - fmt.mantissa_bits


def is_part_of_float16(fmt: Format) -> TypeGuard[FloatFormat]:
    """Whether `codes_through_float16` encodes to `fmt`."""
    if not isinstance(fmt, FloatFormat) or not addition_rounds(fmt, "nearest_even"):
        return False  # values or the ratio could be subnormal numbers of float32
    is_fn = fmt.signed and fmt.specials is Specials.FN
    return is_fn and fmt.exponent_bits < 5 and fmt.mantissa_bits <= 10


def codes_through_float16(
    x: jax.Array, fmt: FloatFormat, *, is_positive: bool = False
) -> jax.Array:
    """The codes of float32 `x`, which holds values of `fmt`, infinities and NaNs; as uint16."""
    # Multiplied by the ratio of the lowest normal numbers, 2**-8 for E4M3FN, values have the same
    # exponent field in float16 as in `fmt`, so their code is the upper bits. Infinities and NaNs
    # have larger fields: they get the code of NaN.
    ratio = np.float32(2.0 ** (FLOAT16.min_exponent - fmt.min_exponent))
    half = lax.bitcast_convert_type((x * ratio).astype(jnp.float16), jnp.uint16)
    magnitude = half if is_positive else half & np.uint16(0x7FFF)
    upper = magnitude >> np.uint16(FLOAT16.mantissa_bits - fmt.mantissa_bits)
    if is_positive:
        return jnp.minimum(upper, np.uint16(fmt.max_code + 1))
    sign = (half >> np.uint16(16 - fmt.bits)) & np.uint16(fmt.sign_code)
    return jnp.minimum(upper, np.uint16(fmt.max_code + 1)) | sign
