"""How a value becomes a code and back: the one layer that knows bits."""

from qtoolkit._names import hint_at_names
from qtoolkit.casts._casts import cast, decode, encode, round_to_format
from qtoolkit.casts._modes import DETERMINISTIC, SATURATIONS, Stochastic
from qtoolkit.casts._pack import pack, unpack
from qtoolkit.casts._projection import Projection

__all__ = [
    "DETERMINISTIC",
    "SATURATIONS",
    "Projection",
    "Stochastic",
    "cast",
    "decode",
    "encode",
    "pack",
    "round_to_format",
    "unpack",
]

hint_at_names(__name__)
