"""The words for roundings and saturations, and `Stochastic`."""

import dataclasses
from typing import Any

import jax

from qtoolkit.formats.internal import plain_number

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

    Examples:
      >>> x = jnp.full(10_000, 1.03125)  # a quarter of the way from 1 to 1.125
      >>> y = qt.round_to_format(x, "e4m3fn", rounding=qt.Stochastic("B"), key=jax.random.key(0))
      >>> np.unique(y), round(float(y.mean()), 3)
      (array([1.   , 1.125], dtype=float32), 1.032)
    """

    variant: str = "B"
    bits: int = 16

    def __post_init__(self) -> None:
        if self.variant not in ("A", "B", "C"):
            raise ValueError(f"Stochastic: variant={self.variant!r}, expected 'A', 'B' or 'C'")
        object.__setattr__(self, "bits", plain_number(self.bits))
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
