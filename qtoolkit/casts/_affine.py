"""Products and quotients that are rounded as IEEE says, inside any fusion and on any platform.

Under `jit` XLA for CPUs contracts `a * b + c` to one operation with a single rounding. It merges
`(x * c) * b` and `(x / c) / b` if c and b are uniform. It replaces a division by the multiplication
by a reciprocal if it sees that the divisor repeats along an axis. On GPUs the division of float32
is off by up to two units in the last place, for a third of random operands. The functions here
prevent all of this; optimization barriers and `lax.reduce_precision` do not. Their derivative is
zero: use them only inside of functions with a derivative rule of their own.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts._elementwise import by_platform, elementwise, is_somewhere

# The quiet NaNs with and without a sign, by the width of the float: as integers, no number's
# pattern of either sign is larger.
_QUIET_NAN = {4: (0x7FC00000, 0xFFC00000), 8: (0x7FF8 << 48, 0xFFF8 << 48)}


@elementwise
def product(a: jax.Array, b: jax.Array | np.floating) -> jax.Array:
    """`a * b` of float32, or of float64: of `a` as it was rounded, and rounded before anything is
    added to it.
    """
    return settled(unmerged(a) * b)


@elementwise
def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b` of float32, or of float64, by IEEE division, of `a` as it was rounded."""
    return ieee_quotient(unmerged(a), b)


def _division(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b`, with b disguised so that XLA cannot see whether it repeats along an axis.

    If XLA sees that, it multiplies by reciprocals, and every sixth quotient is wrong in its last
    bit. So each element selects its divisor or 1, and always the former. What it selects depends on
    its place in the array, not on its value: in a repeated row values repeat, and so would the
    selection. With two equal divisors to select from, XLA may see that they are equal constants.
    """
    return lax.div(a, jnp.where(is_somewhere(a), b, b.dtype.type(1)))


def _corrected_quotient(
    a: jax.Array, b: jax.Array, divide: Callable[[jax.Array, jax.Array], jax.Array] = lax.div
) -> jax.Array:
    """IEEE's `a / b` of float32 where `divide` is up to two units in the last place off.

    Significands are integers of 24 bits, and so is `whole`, their rounded quotient. The division
    gives it to within two units, three allowed for; the remainder `dividend - whole * divisor`,
    exact modulo 2**32, says how many to add. The quotient of two such numbers never lies halfway
    between two floats: no ties. Where an operand or the quotient is subnormal, zero, infinite or
    NaN, the division itself is the result.
    """
    one, fraction = np.uint32(127 << 23), np.uint32((1 << 23) - 1)
    a_bits, b_bits = (lax.bitcast_convert_type(x, jnp.uint32) for x in (a, b))
    a_part, b_part = a_bits & fraction, b_bits & fraction
    below = (a_part < b_part).astype(jnp.uint32)  # 1 where the quotient would lie in (1/2, 1)
    guess = divide(
        lax.bitcast_convert_type(a_part | (one + (below << np.uint32(23))), jnp.float32),
        lax.bitcast_convert_type(b_part | one, jnp.float32),
    )
    whole = lax.bitcast_convert_type(guess, jnp.uint32) - (one - np.uint32(1 << 23))
    divisor = b_part | np.uint32(1 << 23)
    dividend = (a_part | np.uint32(1 << 23)) << (np.uint32(23) + below)
    rest = lax.bitcast_convert_type(dividend - whole * divisor, jnp.int32) * np.int32(2)
    step = lax.bitcast_convert_type(divisor, jnp.int32)
    for odd in (1, 3, 5):
        whole += (rest > np.int32(odd) * step).astype(jnp.uint32)
        whole -= (rest < np.int32(-odd) * step).astype(jnp.uint32)
    a_field, b_field = (
        ((bits >> np.uint32(23)) & np.uint32(0xFF)).astype(jnp.int32) for bits in (a_bits, b_bits)
    )
    field = a_field - b_field + np.int32(127) - below.astype(jnp.int32)
    magnitude = (field.astype(jnp.uint32) << np.uint32(23)) + (whole - np.uint32(1 << 23))
    quotient = magnitude | ((a_bits ^ b_bits) & np.uint32(1 << 31))
    is_normal = (field > 0) & (field < np.int32(255))
    for part in (a_field, b_field):
        is_normal &= (part > 0) & (part < np.int32(255))
    return jnp.where(is_normal, lax.bitcast_convert_type(quotient, jnp.float32), divide(a, b))


@elementwise
def unmerged(x: jax.Array) -> jax.Array:
    """`x`, unchanged, behind an operation that XLA does not see through: it will not merge the
    product or quotient that `x` may be with one that follows.

    It is the first half of `settled`, and no guard before an addition: LLVM removes it from numbers
    that it knows to be positive.
    """
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, unsigned)
    bits = jnp.minimum(bits, unsigned.type(_QUIET_NAN[x.dtype.itemsize][1]))
    return lax.bitcast_convert_type(bits, x.dtype)


@elementwise
def settled(x: jax.Array) -> jax.Array:
    """`x`, unchanged, behind an operation that the compiler can neither remove nor see through.

    The operation is a minimum of the bit pattern with that of a quiet NaN, once as unsigned and
    once as signed integers. It changes no number: the first may change only negative NaNs, the
    second only positive ones. If LLVM knows the sign of x, as for magnitudes, it removes one of the
    two, but never both.
    """
    positive, negative = _QUIET_NAN[x.dtype.itemsize]
    unsigned, signed = (np.dtype(f"{kind}{8 * x.dtype.itemsize}") for kind in ("uint", "int"))
    bits = jnp.minimum(lax.bitcast_convert_type(x, unsigned), unsigned.type(negative))
    bits = jnp.minimum(lax.bitcast_convert_type(bits, signed), signed.type(positive))
    return lax.bitcast_convert_type(bits, x.dtype)


@elementwise
def kept_from_zero(u: jax.Array, x: jax.Array) -> jax.Array:
    """The quotients `u` of `x`, with 2**-126 in place of those that became zero or subnormal.

    The directed roundings and "to_odd" must tell the smallest number from zero: 1e-45 / 448 rounded
    up to E4M3FN is 2**-9. No element format has steps as small as 2**-126, so it is rounded as any
    smaller number would be.
    """
    bits = lax.bitcast_convert_type(u, jnp.uint32)
    sign = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x80000000)
    least = np.float32(2.0**-126).view(np.uint32)
    vanished = ((bits & np.uint32(0x7FFFFFFF)) < least) & ~is_zero(x)
    return lax.bitcast_convert_type(jnp.where(vanished, sign | least, bits), jnp.float32)


@elementwise
def is_zero(x: jax.Array) -> jax.Array:
    """Where float32 `x` is zero of either sign, by its pattern: XLA's CPU reads subnormals as zero.

    LLVM makes a float comparison of a pattern's test against zero. So the pattern is `settled`.
    """
    return (lax.bitcast_convert_type(settled(x), jnp.uint32) & np.uint32(0x7FFFFFFF)) == 0


def _quotient_elsewhere(a: jax.Array, b: jax.Array) -> jax.Array:
    return _division(a, b) if a.dtype == jnp.float64 else _corrected_quotient(a, b)


# `quotient` of an `a` that is no product or quotient, which XLA might merge with this; one shape.
ieee_quotient = by_platform(
    "ieee_quotient", cpu=_division, others=_quotient_elsewhere, aval=lambda a, _: a
)
