"""Products and quotients that are rounded as IEEE says, inside any fusion and on any platform.

Under `jit` XLA for CPUs contracts `a * b + c` to one operation with a single rounding. It merges
`(x * c) * b` and `(x / c) / b` if c and b are uniform. It replaces a division with a multiplication
by the reciprocal if it sees that the divisor repeats along an axis. On GPUs the division of float32
is off by up to two units in the last place, for a third of random operands. The functions here
prevent all of this; optimization barriers and `lax.reduce_precision` do not. Their derivative is
zero, so use them only inside functions that have a derivative rule.
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
    """`a * b` of float32 or float64, rounded once: XLA does not contract it into an FMA."""
    return prevent_contraction(prevent_merging(a) * b)


@elementwise
def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b` of float32 or float64 by IEEE division, not merged with what makes `a`."""
    return ieee_quotient(prevent_merging(a), b)


def _division(a: jax.Array, b: jax.Array) -> jax.Array:
    # If XLA sees that b repeats along an axis, it multiplies by reciprocals, and every sixth
    # quotient is wrong in its last bit. So each element selects its divisor instead of 1, by a
    # condition that is always true. The condition depends on the element's place, because in a
    # repeated row one that depends on values would repeat, too. It selects from b and 1, because
    # XLA may see that two equal divisors are equal constants.
    return lax.div(a, jnp.where(is_somewhere(a), b, b.dtype.type(1)))


def _corrected_quotient(
    a: jax.Array, b: jax.Array, divide: Callable[[jax.Array, jax.Array], jax.Array] = lax.div
) -> jax.Array:
    """IEEE's `a / b` of float32, where `divide` is up to two units in the last place off."""
    # Significands are integers of 24 bits, and so is `whole`, their rounded quotient. The division
    # gives it to within two units; the code corrects up to three. The remainder `dividend - whole *
    # divisor`, exact modulo 2**32, says how many units to add. There are no ties: the quotient of
    # two such numbers never lies halfway between two floats. Where an operand or the quotient is
    # subnormal, zero, infinite or NaN, the result is that of the division.
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
def prevent_merging(x: jax.Array) -> jax.Array:
    """`x`, protected so that XLA does not merge its product or quotient with one that follows."""
    # Not enough before an addition, see `prevent_contraction`: LLVM removes this protection from
    # numbers that it knows to be positive.
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, unsigned)
    bits = jnp.minimum(bits, unsigned.type(_QUIET_NAN[x.dtype.itemsize][1]))
    return lax.bitcast_convert_type(bits, x.dtype)


@elementwise
def prevent_contraction(x: jax.Array) -> jax.Array:
    """`x`, protected so that the compiler does not contract its product with an addition."""
    # The minimum with the pattern of a quiet NaN changes no number: as unsigned integers only
    # negative NaNs are larger, as signed ones only positive NaNs. LLVM removes one of the two if it
    # knows the sign of x, as for magnitudes, but never both.
    positive, negative = _QUIET_NAN[x.dtype.itemsize]
    unsigned, signed = (np.dtype(f"{kind}{8 * x.dtype.itemsize}") for kind in ("uint", "int"))
    bits = jnp.minimum(lax.bitcast_convert_type(x, unsigned), unsigned.type(negative))
    bits = jnp.minimum(lax.bitcast_convert_type(bits, signed), signed.type(positive))
    return lax.bitcast_convert_type(bits, x.dtype)


@elementwise
def without_underflow(u: jax.Array, x: jax.Array) -> jax.Array:
    """The quotients `u` of `x`; where one underflowed to zero, 2**-126 with the sign of x."""
    # Directed roundings and "to_odd" must tell the smallest number from zero: 1e-45 / 448 rounded
    # up to E4M3FN is 2**-9. No element format has steps as small as 2**-126, so 2**-126 is rounded
    # as any smaller number would be.
    bits = lax.bitcast_convert_type(u, jnp.uint32)
    sign = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x80000000)
    least = np.float32(2.0**-126).view(np.uint32)
    underflows = ((bits & np.uint32(0x7FFFFFFF)) < least) & ~is_zero(x)
    return lax.bitcast_convert_type(jnp.where(underflows, sign | least, bits), jnp.float32)


@elementwise
def is_zero(x: jax.Array) -> jax.Array:
    """Whether float32 `x` is 0 or -0. A comparison would also say so of subnormals."""
    # LLVM turns the test of a pattern back into a float comparison, unless the guard protects it.
    bits = lax.bitcast_convert_type(prevent_contraction(x), jnp.uint32)
    return (bits & np.uint32(0x7FFFFFFF)) == 0


# `quotient` of arrays of one shape; XLA may merge it with a product or quotient that makes `a`.
ieee_quotient = by_platform(
    "ieee_quotient",
    cpu=_division,
    others=lambda a, b: (_division if a.dtype == jnp.float64 else _corrected_quotient)(a, b),
    aval=lambda a, _: a,
)
