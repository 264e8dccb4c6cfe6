"""How a value becomes a code and back: the one layer that knows bits."""

from qtoolkit.casts._affine import product, quotient
from qtoolkit.casts._bits import check_holds
from qtoolkit.casts._casts import (
    cast,
    check_arguments,
    decode,
    encode,
    random_of,
    round_to_format,
)
from qtoolkit.casts._modes import DETERMINISTIC, SATURATIONS, Rounding, Stochastic
from qtoolkit.casts._pack import pack, unpack
from qtoolkit.casts._random import Draw
from qtoolkit.casts._sources import (
    FLOATS,
    check_differentiable,
    round_values,
)
from qtoolkit.casts._tree import cast_tree

__all__ = [
    "DETERMINISTIC",
    "FLOATS",
    "SATURATIONS",
    "Draw",
    "Rounding",
    "Stochastic",
    "cast",
    "cast_tree",
    "check_arguments",
    "check_differentiable",
    "check_holds",
    "decode",
    "encode",
    "pack",
    "product",
    "quotient",
    "random_of",
    "round_to_format",
    "round_values",
    "unpack",
]
