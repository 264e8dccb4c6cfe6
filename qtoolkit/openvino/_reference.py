"""How OpenVINO's core rounds where it does not round to nearest even: its defects, kept."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts import round_values
from qtoolkit.formats import FLOAT16


def to_float16(x: jax.Array) -> jax.Array:
    """float32 `x` rounded by the core's class `float16`, as float32.

    To nearest even, overflow to infinity. What lies below 2**-15 and in the last 2**-12 before a
    power of two comes out doubled: rounding its significand carries into the exponent, then the
    subnormal is built from the new exponent and the old significand.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    tiny = magnitude - np.uint32(1 << 23) < np.uint32(111 << 23)
    carries = (magnitude & np.uint32(0x007FF000)) == np.uint32(0x007FF000)
    bits = jnp.where(tiny & carries, bits + np.uint32(1 << 23), bits)
    doubled = lax.bitcast_convert_type(bits, jnp.float32)
    return round_values(doubled, FLOAT16, "nearest_even", "none")


def to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 `x` rounded by the core's class `bfloat16`, as float32.

    Truncated where the last bit kept is 0, else rounded half up; NaNs take part as bits do.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = bits + ((bits & np.uint32(0x10000)) >> np.uint32(1))
    return lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), jnp.float32)
