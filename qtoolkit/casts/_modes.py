"""The words for roundings and saturations, and `Stochastic`."""

import dataclasses
from typing import Any, NamedTuple

import jax

from qtoolkit.formats.internal import plain_number


class Mode(NamedTuple):
    """When a magnitude between two neighbouring values is rounded up to the larger one.

    Each attribute is "never", "always", "positive" or "negative" (the sign of the number), "odd" or
    "even" (the code of the smaller neighbour).
    """

    below_middle: str
    at_middle: str
    above_middle: str

    @property
    def is_directed(self) -> bool:
        """Whether it makes no difference where between the neighbours the magnitude lies."""
        return self.below_middle == self.at_middle == self.above_middle


# The one definition of the deterministic modes: shifts, sums and tables follow it.
MODES = {
    "nearest_even": Mode("never", "odd", "always"),
    "nearest_away": Mode("never", "always", "always"),
    "toward_zero": Mode("never", "never", "never"),
    "toward_positive": Mode("positive", "positive", "positive"),
    "toward_negative": Mode("negative", "negative", "negative"),
    "to_odd": Mode("even", "even", "even"),
}
DETERMINISTIC = tuple(MODES)
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


def goes_up(when: str, negative: Any, odd: Any) -> Any:
    """Whether an attribute of a `Mode` says so; True and False where the arguments do not matter.

    Args:
      negative, odd: Booleans, or arrays of them.
    """
    match when:
        case "positive":
            return _not(negative)
        case "negative":
            return negative
        case "odd":
            return odd
        case "even":
            return _not(odd)
    return when == "always"


def stays_finite(rounding: Rounding, negative: Any, *, largest_is_odd: bool) -> Any:
    """Whether, with saturation "none", finite overflow is rounded down to the largest magnitude."""
    if rounding not in MODES:  # stochastic
        return False
    return _not(goes_up(MODES[rounding].above_middle, negative, largest_is_odd))


def _not(x: Any) -> Any:
    return not x if isinstance(x, bool) else ~x


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
