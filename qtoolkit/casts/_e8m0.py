"""Scales of MX formats, E8M0 codes, in few operations.

The code of 2**e in E8M0 is e + 127, which is also the exponent field of the float32 number 2**e. So
an addition to the pattern of an amax gives the code, and a shift of the code gives the factor. This
requires that 2**-e is a normal number, and that subnormal data may count as zero.
"""

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts._affine import unmerged
from qtoolkit.casts._bits import FLOAT32_MANTISSA, from_pattern, pattern
from qtoolkit.casts._elementwise import elementwise

_NAN_CODE = 255


@elementwise
def e8m0_codes(amax: jax.Array, exponent: int, least_fraction: int) -> jax.Array:
    """The codes of the scales 2**e of blocks, as uint8.

    e is the exponent of `amax` less `exponent`, and one more where the fraction of `amax` is
    `least_fraction` or more: adding 2**23 - least_fraction to the pattern carries into the field.

    Args:
      amax: float32, not negative. Zero and subnormal numbers get code 0, infinities any.
      exponent: Of the largest element, 2 or more.
      least_fraction: From 1, in units of 2**-23; 2**23 if no fraction makes it one more.

    Returns:
      At most 253; for a NaN 255, which is E8M0's.
    """
    field = (pattern(amax) + np.uint32(2**FLOAT32_MANTISSA - least_fraction)) >> np.uint32(
        FLOAT32_MANTISSA
    )
    codes = jnp.maximum(field, np.uint32(exponent)) - np.uint32(exponent)
    return jnp.where(jnp.isnan(amax), np.uint32(_NAN_CODE), codes).astype(jnp.uint8)


@elementwise
def over_e8m0(x: jax.Array, codes: jax.Array) -> jax.Array:
    """float32 `x / 2**e`, exact; subnormal numbers may be read and returned as zero.

    Args:
      codes: uint8 of at most 253: 2**-126 is float32's lowest normal number.
    """
    # `unmerged`: of `(2 * y) / 2**-127` XLA would make `y * 2**128`, which is NaN for y = 0.
    field = np.uint32(2 * 127) - codes.astype(jnp.uint32)
    return unmerged(x) * from_pattern(field << np.uint32(FLOAT32_MANTISSA), jnp.float32)


@elementwise
def times_e8m0(q: jax.Array, codes: jax.Array) -> jax.Array:
    """float32 `q * 2**e`; subnormal numbers may be read and returned as zero.

    Args:
      codes: uint8 of at most 253, or 255, for which the result is NaN.
    """
    # 2**-127 is subnormal. So half of q is multiplied by 2**(e + 1). Without `unmerged` XLA would
    # move the half to a factor that is the same everywhere.
    field = codes.astype(jnp.uint32) + np.uint32(1)
    factor = from_pattern(field << np.uint32(FLOAT32_MANTISSA), jnp.float32)
    factor = jnp.where(field > np.uint32(_NAN_CODE), np.float32(np.nan), factor)
    return unmerged(q * np.float32(0.5)) * factor
