"""Products and quotients that keep their own rounding inside any fusion.

Under `jit` XLA's CPU contracts `a * b + c` to one fused operation with one rounding, merges
`(x * c) * b` and `(x / c) / b` where c and b are uniform, and rewrites a division by anything it
can prove uniform to a multiplication by the reciprocal. These helpers stop all of it; optimization
barriers and `lax.reduce_precision` do not. They hide their operands from derivatives, too, which
would be zero: use them where a rule of its own gives the derivative.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The quiet NaNs with and without a sign, by the width of the float: as integers, no number's
# pattern of either sign is larger.
_QUIET_NAN = {4: (0x7FC00000, 0xFFC00000), 8: (0x7FF8 << 48, 0xFFF8 << 48)}


def product(a: jax.Array, b: jax.Array | np.floating) -> jax.Array:
    """`a * b` of floats: of `a` as it was rounded, and rounded before anything is added to it.

    Args:
      a, b: float32, or both float64; `b` broadcasts.
    """
    return settled(settled(a) * b)


def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b` by IEEE division, of `a` as it was rounded.

    The divisor depends on `a`, so that nothing can be divided by it beforehand: no reciprocal.

    Args:
      a, b: float32, or both float64; `b` broadcasts.
    """
    return settled(a) / jnp.where(a == a, b, jnp.ones_like(b))


def settled(x: jax.Array) -> jax.Array:
    """`x` behind a step that the compiler can neither leave out nor see through.

    The pattern's minimum with the quiet NaN's, once as an unsigned and once as a signed integer:
    the first changes nothing but negative NaNs, the second nothing but positive ones. LLVM leaves
    out the one that the sign decides, where it knows the sign (of numbers made from unsigned
    integers, of magnitudes), but then the other one stays.
    """
    positive, negative = _QUIET_NAN[x.dtype.itemsize]
    unsigned, signed = (np.dtype(f"{kind}{8 * x.dtype.itemsize}") for kind in ("uint", "int"))
    bits = jnp.minimum(lax.bitcast_convert_type(x, unsigned), unsigned.type(negative))
    bits = jnp.minimum(lax.bitcast_convert_type(bits, signed), signed.type(positive))
    return lax.bitcast_convert_type(bits, x.dtype)


def kept_from_zero(u: jax.Array, x: jax.Array) -> jax.Array:
    """Quotients `u` of `x`, those that became zero or subnormal as the least normal number.

    Directed roundings and to odd tell next to nothing from zero: 1e-45 / 448 rounded up to E4M3FN
    is 2**-9. No element format has a step as small as 2**-126, so that it stands for all of them.
    """
    bits = lax.bitcast_convert_type(u, jnp.uint32)
    sign = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x80000000)
    least = np.float32(2.0**-126).view(np.uint32)
    vanished = ((bits & np.uint32(0x7FFFFFFF)) < least) & ~is_zero(x)
    return lax.bitcast_convert_type(jnp.where(vanished, sign | least, bits), jnp.float32)


def is_zero(x: jax.Array) -> jax.Array:
    """Where float32 `x` is zero of either sign, by its pattern: XLA's CPU reads subnormals as zero.

    LLVM makes a float comparison of a pattern's test against zero. So the pattern is `settled`.
    """
    return (lax.bitcast_convert_type(settled(x), jnp.uint32) & np.uint32(0x7FFFFFFF)) == 0
