"""Products and quotients that keep their own rounding inside any fusion.

Under `jit` XLA's CPU contracts `a * b + c` to one fused operation with one rounding, and rewrites a
division by anything it can prove uniform to a multiplication by the reciprocal. These two helpers
stop both; optimization barriers and `lax.reduce_precision` do not.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a * b` in float32, rounded before anything is added to it.

    The minimum leaves every pattern but those of negative NaNs as it is; the compiler cannot know.
    """
    bits = lax.bitcast_convert_type(a * b, jnp.uint32)
    return lax.bitcast_convert_type(jnp.minimum(bits, np.uint32(0xFFC00000)), jnp.float32)


def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b` in float32 by IEEE division: a divisor that depends on `a` shares no reciprocal."""
    return a / jnp.where(a == a, b, jnp.ones_like(b))
