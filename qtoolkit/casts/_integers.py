"""Rounding to integer formats."""

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts._bits import Exact, widened
from qtoolkit.casts._modes import Rounding, rounded_shift
from qtoolkit.formats import IntFormat


def codes_of_integers(x: jax.Array, fmt: IntFormat, saturation: str) -> jax.Array:
    """Integers of any dtype to codes of `fmt`, as `fmt.code_dtype`: no rounding."""
    if fmt.is_bool:
        return (x != 0).astype(fmt.code_dtype)
    if x.dtype.itemsize == 1:  # of four bits and less, and bool, too
        x = x.astype(jnp.int16)
    if saturation != "none":
        info = np.iinfo(x.dtype)
        x = jnp.clip(x, max(info.min, int(fmt.lowest)), min(info.max, int(fmt.max_finite)))
    return _low_bits(x.astype(fmt.code_dtype), fmt)


def int_codes(
    x: Exact, fmt: IntFormat, rounding: Rounding, saturation: str, random: jax.Array | None
) -> jax.Array:
    """Rounds numbers, which need not be normalized, to codes of `fmt`, as `fmt.code_dtype`."""
    if fmt.is_bool:
        return ((x.significand != 0) | x.is_nan).astype(fmt.code_dtype)
    if fmt.bits > 32:
        x = widened(x)
    dtype, width = x.significand.dtype.type, 8 * x.significand.dtype.itemsize
    drop = np.int32(x.top) - x.exponent
    right = jnp.clip(drop, 0, np.int32(width - 1)).astype(dtype)
    if random is not None:
        random = random.astype(dtype)
    integer = rounded_shift(
        x.significand, jnp.maximum(right, dtype(1)), rounding, x.negative, random
    )
    left = jnp.clip(-drop, 0, np.int32(width - 1)).astype(dtype)
    shifted = jnp.where(-drop < width, x.significand << left, dtype(0))
    integer = jnp.where(drop > 0, integer, shifted)
    limit = jnp.where(x.negative, dtype(-int(fmt.lowest)), dtype(int(fmt.max_finite)))
    if saturation != "none":
        too_wide = x.exponent >= np.int32(width)
        integer = jnp.where(too_wide, limit, jnp.minimum(integer, limit))
    integer = jnp.where(x.is_inf, limit, integer)
    code = jnp.where(x.negative, -integer, integer)
    code = jnp.where(x.is_nan, dtype(0), code)
    return _low_bits(code.astype(fmt.code_dtype), fmt)


def _low_bits(codes: jax.Array, fmt: IntFormat) -> jax.Array:
    return codes & fmt.code_dtype.type((1 << fmt.bits) - 1)
