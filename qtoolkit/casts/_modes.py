"""Rounding modes: their names, and the integer shift that each of them rounds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DETERMINISTIC = (
    "nearest_even",
    "nearest_away",
    "toward_zero",
    "toward_positive",
    "toward_negative",
    "to_odd",
)
ROUNDINGS = (*DETERMINISTIC, "stochastic")
SATURATIONS = ("finite", "propagate", "none")
MAX_RANDOM_BITS = 24


@dataclasses.dataclass(frozen=True)
class Stochastic:
    """Stochastic rounding with `bits` random bits R, 0 <= R < 2**bits.

    With v the fraction of a step by which a magnitude exceeds the lower neighbour, the magnitude is
    rounded up where, with N bits,

    * "A": floor(v * 2**N) + R >= 2**N,
    * "B": floor(v * 2**(N + 1)) + 2 * R + 1 >= 2**(N + 1),
    * "C": v * 2**N, rounded to the nearest even integer, + R >= 2**N.

    A value of the format is never moved. The probability of rounding up is v cut to N bits under
    A, and v rounded to them under B and C.

    Attributes:
      variant: "A", "B" or "C".
      bits: 1 to 24. One draw has as many bits, whatever the format.

    Source: IEEE P3109 Interim Report v4.0, StochasticA, StochasticB, StochasticC.
    """

    variant: str = "B"
    bits: int = 16

    def __post_init__(self) -> None:
        if self.variant not in ("A", "B", "C"):
            raise ValueError(f"Stochastic: variant={self.variant!r}, expected 'A', 'B' or 'C'")
        if type(self.bits) is not int or not 1 <= self.bits <= MAX_RANDOM_BITS:
            raise ValueError(
                f"Stochastic: bits={self.bits!r}, expected an integer from 1 to {MAX_RANDOM_BITS}"
            )

    def goes_up(self, fraction: jax.Array, random: jax.Array) -> jax.Array:
        """Whether to round up, from v * 2**(N + 2), its last bit set where bits were cut off."""
        if self.variant == "A":
            return (fraction >> 2) + random >= 1 << self.bits
        if self.variant == "B":
            return (fraction >> 1) + 2 * random + 1 >= 2 << self.bits
        nearest_even = (fraction + 1 + ((fraction >> 2) & 1)) >> 2
        return nearest_even + random >= 1 << self.bits


Rounding = str | Stochastic


def check_rounding(where: str, rounding: Any, saturation: Any) -> Rounding:
    """The rounding that `rounding` names or is; ValueError where it or `saturation` is unknown."""
    if not isinstance(saturation, str) or saturation not in SATURATIONS:
        raise ValueError(
            f"{where}: saturation={saturation!r}, expected one of {', '.join(SATURATIONS)}"
        )
    if isinstance(rounding, Stochastic):
        return rounding
    if not isinstance(rounding, str) or rounding not in ROUNDINGS:
        raise ValueError(
            f"{where}: rounding={rounding!r}, expected one of {', '.join(ROUNDINGS)} or a "
            "qtoolkit.Stochastic"
        )
    return Stochastic() if rounding == "stochastic" else rounding


def rounded_shift(
    bits: jax.Array,
    count: jax.Array | int,
    rounding: Rounding,
    negative: jax.Array,
    random: jax.Array | None = None,
    parity: jax.Array | int = 0,
) -> jax.Array:
    """Magnitudes `bits` / 2**count, rounded once.

    Args:
      bits: Unsigned integers, so small that adding 2**count does not overflow.
      count: 0 to the width less one, an integer or an array of the dtype of `bits`.
      negative: Sign of what `bits` is the magnitude of.
      random: The random bits of stochastic rounding, of the dtype of `bits`.
      parity: 1 where an even quotient stands for an odd code.
    """
    one = bits.dtype.type(1)
    if isinstance(count, int) and count == 0:
        return bits
    constant = count if isinstance(count, int) else 0
    count = jnp.asarray(count, bits.dtype)
    floor = bits >> count
    step = one << count
    match rounding:
        case "toward_zero":
            return floor
        case "nearest_even":
            odd = (floor ^ parity) & one
            return (bits + ((step >> one) - one) + odd) >> count
        case "nearest_away":
            return (bits + (step >> one)) >> count
        case "toward_positive" | "toward_negative":
            away = negative if rounding == "toward_negative" else ~negative
            return (bits + jnp.where(away, step - one, bits.dtype.type(0))) >> count
        case "to_odd":
            inexact = (bits & (step - one)) != 0
            return floor + (inexact & ((floor ^ parity) & one == 0)).astype(bits.dtype)
    assert isinstance(rounding, Stochastic)
    assert random is not None
    if rounding.variant == "A" and constant and constant <= rounding.bits:
        # v has no more than `count` bits, so adding the upper random ones carries as all would.
        return (bits + (random >> bits.dtype.type(rounding.bits - constant))) >> count
    up = rounding.goes_up(_scaled(bits & (step - one), count, rounding.bits + 2), random)
    return floor + up.astype(bits.dtype)


def within_width(bits: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`bits` and an int32 `count` of at least 0, so that the shift by `count` is one of the width.

    What lies beyond it is shifted at once, to odd: the last bit is set where bits were cut off.
    """
    dtype, last = bits.dtype.type, 8 * bits.dtype.itemsize - 1
    beyond = jnp.clip(count - np.int32(last), 0, last).astype(dtype)
    kept = bits >> beyond
    cut = ((kept << beyond) != bits).astype(dtype)
    return kept | cut, jnp.minimum(count, np.int32(last)).astype(dtype)


def _scaled(rest: jax.Array, count: jax.Array, bits: int) -> jax.Array:
    """Rest / 2**count * 2**bits, to odd: the last bit is set where bits were cut off."""
    dtype = rest.dtype.type
    last = dtype(8 * rest.dtype.itemsize - 1)
    right = jnp.clip(count, dtype(bits), dtype(bits) + last) - dtype(bits)
    left = dtype(bits) - jnp.minimum(count, dtype(bits))
    cut = (rest & ((dtype(1) << right) - dtype(1))) != 0
    return jnp.where(count >= bits, (rest >> right) | cut.astype(rest.dtype), rest << left)
