"""Powers of two, exactly: XLA's exp2 and log2 are not, and its products flush subnormals."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._bits import FLOAT32_MANTISSA, exact_from_pattern, from_pattern, pattern, u32
from qtoolkit.casts._floats import codes_of_exact
from qtoolkit.casts._projection import UNCLAMPED
from qtoolkit.formats import FLOAT32

_SQRT2_FRACTION = 0x3504F3  # of sqrt(2) = 1 + f / 2**23, cut


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
    return from_pattern(codes_of_exact(exact, FLOAT32, UNCLAMPED), jnp.float32)


def binary_parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exponent e, int32, and fraction f, uint32, of float32 |x| = 2**e * (1 + f / 2**23).

    Subnormals are normalized, too. Zero has some low exponent; infinities and NaNs have any.
    """
    exact = exact_from_pattern(pattern(x))
    fraction = exact.significand >> np.uint32(exact.top - FLOAT32_MANTISSA)
    return exact.exponent, fraction & u32((1 << FLOAT32_MANTISSA) - 1)


def floor_log2(x: jax.Array) -> jax.Array:
    """The exponent of `binary_parts`."""
    return binary_parts(x)[0]


def nearest_power_of_two(x: jax.Array) -> jax.Array:
    """float32 `x` > 0, from 2**-126 to 2**126, rounded by its logarithm: 1.42 is 2, 1.41 is 1."""
    exponent, fraction = binary_parts(x)
    return power_of_two(exponent + (fraction > u32(_SQRT2_FRACTION)).astype(jnp.int32))
