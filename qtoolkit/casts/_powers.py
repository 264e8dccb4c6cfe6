"""Powers of two, exactly: XLA's exp2 and log2 are not, and its products flush subnormals."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._bits import (
    FLOAT32_MANTISSA,
    MAGNITUDE,
    exact_from_pattern,
    from_pattern,
    from_stored_codes,
    pattern,
    stored_codes,
    u32,
)
from qtoolkit.casts._floats import codes_of_exact
from qtoolkit.casts._sources import codes_of, values_of
from qtoolkit.formats import FLOAT32, FloatFormat


def exact_float32(x: jax.Array) -> jax.Array:
    """float16, bfloat16 or float32 as float32, subnormals included."""
    return x if x.dtype == jnp.float32 else from_pattern(pattern(x), jnp.float32)


def is_zero(x: jax.Array) -> jax.Array:
    """Where float32 `x` is zero of either sign, by its pattern: XLA's CPU reads subnormals as zero.

    LLVM makes a float comparison of a pattern's test against zero; that it is a pattern of `x` is
    hidden from it by a minimum that changes nothing but NaNs, as in `product`.
    """
    bits = jnp.minimum(pattern(x), np.uint32(0xFFC00000))
    return (bits & u32(MAGNITUDE)) == 0


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent as float32, for int32 exponents from -149, the least subnormal, to 127."""
    normal = (exponent + np.int32(127)) << np.int32(FLOAT32_MANTISSA)
    subnormal = np.int32(1) << jnp.clip(exponent + np.int32(149), 0, 31)
    bits = jnp.where(exponent >= -126, normal, subnormal)
    return lax.bitcast_convert_type(bits, jnp.float32)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """float32 `x` * 2**exponent as IEEE has it: rounded once to nearest even where it is subnormal.

    Args:
      x: float32, any shape; subnormals count.
      exponent: int32, broadcasts to the shape of `x`.
    """
    exact = exact_from_pattern(pattern(x))
    exact = exact._replace(exponent=exact.exponent + exponent)
    return from_pattern(codes_of_exact(exact, FLOAT32, "nearest_even", "none", None), jnp.float32)


def binary_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exponent e, int32, and fraction f, uint32, of float32 |x| = 2**e * (1 + f / 2**23).

    Subnormals are normalized, too. Zero has some low exponent; infinities and NaNs have any.
    """
    exact = exact_from_pattern(pattern(x))
    fraction = exact.significand >> np.uint32(exact.top - FLOAT32_MANTISSA)
    return exact.exponent, fraction & u32((1 << FLOAT32_MANTISSA) - 1)


def stored(x: jax.Array, fmt: FloatFormat, saturation: str = "finite") -> jax.Array:
    """float32 `x` rounded to nearest even, in the dtype of `fmt`, or its codes without one."""
    if fmt == FLOAT32:
        return x
    codes = codes_of(x, fmt, "nearest_even", saturation, None)
    return codes if fmt.dtype is None else from_stored_codes(codes, fmt)


def from_stored(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The float32 values, subnormals included, of what `stored` gave."""
    if fmt == FLOAT32:
        return x
    codes = x if fmt.dtype is None else stored_codes(x, fmt)
    return values_of(codes, fmt, jnp.float32)
