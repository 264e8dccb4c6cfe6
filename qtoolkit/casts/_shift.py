"""The integer shift that each rounding mode rounds."""

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts._modes import MODES, goes_up
from qtoolkit.casts._projection import Projection


def rounded_shift(
    bits: jax.Array,
    count: jax.Array | int,
    projection: Projection,
    negative: jax.Array,
    parity: jax.Array | int = 0,
) -> jax.Array:
    """Magnitudes `bits` / 2**count, rounded once.

    `bits` are unsigned integers, so small that adding 2**count does not overflow; `count` is 0 to
    the width less one; `parity` is 1 where an even quotient stands for an odd code.
    """
    rounding, one = projection.rounding, bits.dtype.type(1)
    if isinstance(count, int) and count == 0:
        return bits
    constant = count if isinstance(count, int) else 0
    count = jnp.asarray(count, bits.dtype)
    floor = bits >> count
    step = one << count
    if isinstance(rounding, str):
        # A number that is added before the shift carries into the quotient where it goes up.
        mode, odd, zero = MODES[rounding], (floor ^ parity) & one, bits.dtype.type(0)
        if mode.is_directed:
            up = goes_up(mode.above_middle, negative, odd == one)
            return floor if up is False else (bits + jnp.where(up, step - one, zero)) >> count
        half = step >> one
        if mode.at_middle == "odd":
            return (bits + ((half - one) + odd)) >> count
        up = goes_up(mode.at_middle, negative, odd == one)
        return (bits + jnp.where(up, half, half - one)) >> count
    assert projection.random is not None
    random = projection.random.astype(bits.dtype)
    if rounding.variant == "A" and constant and constant <= rounding.bits:
        # v has no more than `count` bits, so adding the upper random bits gives the same carry.
        return (bits + (random >> bits.dtype.type(rounding.bits - constant))) >> count
    up = rounding.goes_up(_scaled(bits & (step - one), count, rounding.bits + 2), random)
    return floor + up.astype(bits.dtype)


def within_width(bits: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`bits` and an int32 `count` >= 0, changed so that the shift is shorter than the width.

    A longer shift is done here in part, to odd: the last bit is set where bits were cut off.
    """
    dtype, last = bits.dtype.type, 8 * bits.dtype.itemsize - 1
    beyond = jnp.clip(count - np.int32(last), 0, last).astype(dtype)
    upper = bits >> beyond
    cut = ((upper << beyond) != bits).astype(dtype)
    return upper | cut, jnp.minimum(count, np.int32(last)).astype(dtype)


def _scaled(rest: jax.Array, count: jax.Array, bits: int) -> jax.Array:
    """`rest / 2**count * 2**bits`, to odd: the last bit is set where bits were cut off."""
    dtype = rest.dtype.type
    last = dtype(8 * rest.dtype.itemsize - 1)
    right = jnp.clip(count, dtype(bits), dtype(bits) + last) - dtype(bits)
    left = dtype(bits) - jnp.minimum(count, dtype(bits))
    cut = (rest & ((dtype(1) << right) - dtype(1))) != 0
    return jnp.where(count >= bits, (rest >> right) | cut.astype(rest.dtype), rest << left)
