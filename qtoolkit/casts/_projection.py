"""`Projection`: rounding, saturation and random bits in one object."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike

from qtoolkit.casts._modes import (
    DETERMINISTIC,
    SATURATIONS,
    Rounding,
    Stochastic,
    check_rounding,
)
from qtoolkit.casts._random import Draw, check_draw
from qtoolkit.casts._serialization import serializable
from qtoolkit.formats.internal import add_json_kinds

_STATIC: dict[str, Any] = {"static": True}


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projection:
    """How a value is mapped to a format: rounding, saturation, and bits for stochastic rounding.

    A pytree: `rounding` and `saturation` are static, the arrays of `draw` are leaves. Without a
    draw it is hashable. Public functions have a keyword for each; internally they pass this object.

    Attributes:
      rounding: As in `qtoolkit.round_to_format`; "stochastic" becomes `Stochastic()`.
      saturation: "finite", "propagate" or "none".
      draw: The source of the bits for stochastic rounding. None for other modes, or if the function
        that uses the projection provides them.

    Raises:
      ValueError: Unknown rounding or saturation.

    Source: IEEE P3109 Interim Report v4.0, section on projections.

    Examples:
      >>> down = qt.casts.Projection("toward_zero", saturation="none")
      >>> qt.Operand("e4m3fn", down).projection == down
      True
      >>> hash(down) == hash(qt.casts.Projection("toward_zero", saturation="none"))
      True
    """

    rounding: Rounding = dataclasses.field(default="nearest_even", metadata=_STATIC)
    saturation: str = dataclasses.field(default="finite", metadata=_STATIC)
    draw: Draw | None = None

    def __post_init__(self) -> None:
        rounding = check_rounding("Projection", self.rounding, self.saturation)
        object.__setattr__(self, "rounding", rounding)

    @property
    def random(self) -> jax.Array | None:
        """The random bits of a projection that was `drawn`, else None."""
        return None if self.draw is None else self.draw.bits

    def drawn(self, shape: tuple[int, ...]) -> "Projection":
        """The projection with its random bits drawn: one number for each element of `shape`.

        Call it inside `jit`.
        """
        if self.draw is None:
            return self
        assert isinstance(self.rounding, Stochastic)
        bits = self.draw.random(shape, self.rounding)
        return dataclasses.replace(self, draw=Draw(None, None, bits))

    def reshaped(self, function: Callable[[jax.Array], jax.Array]) -> "Projection":
        """A drawn projection whose bits are reshaped by `function`, as the values were."""
        if self.random is None:
            return self
        return dataclasses.replace(self, draw=Draw(None, None, function(self.random)))


NEAREST = Projection()
UNCLAMPED = Projection(saturation="none")  # as IEEE 754 and `astype` have it
# Made once, because every eager cast needs one.
_WITHOUT_DRAW = {(r, s): Projection(r, s) for r in DETERMINISTIC for s in SATURATIONS}


def projection_of(
    where: str,
    shape: tuple[int, ...],
    rounding: Any,
    saturation: Any,
    key: Any = None,
    random_bits: ArrayLike | None = None,
    index_offset: Any = 0,
) -> Projection:
    """Check the keywords of a public cast of an array of this shape; return them as one object."""
    draws = key is not None or random_bits is not None
    draws = draws or not isinstance(index_offset, int) or index_offset != 0
    if not draws and isinstance(rounding, str) and isinstance(saturation, str):
        known = _WITHOUT_DRAW.get((rounding, saturation))
        if known is not None:
            return known
    rounding = check_rounding(where, rounding, saturation)
    draw = check_draw(where, shape, rounding, key, random_bits, index_offset)
    return Projection(rounding, saturation, draw)


add_json_kinds(Projection, Stochastic)
