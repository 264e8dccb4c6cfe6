"""Products and quotients that keep their own rounding inside any fusion.

Under `jit` XLA's CPU contracts `a * b + c` to one fused operation with one rounding, merges
`(x * c) * b` and `(x / c) / b` where c and b are uniform, and rewrites a division by anything it
can prove uniform to a multiplication by the reciprocal. These two helpers stop all of it;
optimization barriers and `lax.reduce_precision` do not. They hide their operands from derivatives,
too, which would be zero: use them where a rule of its own gives the derivative.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a * b` in float32: of `a` as it was rounded, and rounded before anything is added to it."""
    return _settled(_settled(a) * b)


def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b` in float32 by IEEE division, of `a` as it was rounded.

    A divisor that depends on `a` shares no reciprocal.
    """
    return _settled(a) / jnp.where(a == a, b, jnp.ones_like(b))


def _settled(x: jax.Array) -> jax.Array:
    """`x`; every pattern but those of negative NaNs as it is, which the compiler cannot know."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(jnp.minimum(bits, np.uint32(0xFFC00000)), jnp.float32)
