"""How a value becomes a code and back: the one layer that knows bits."""

from qtoolkit.casts._affine import product, quotient
from qtoolkit.casts._bits import SOURCES, check_holds, check_source
from qtoolkit.casts._casts import (
    cast,
    check_arguments,
    decode,
    encode,
    round_to_format,
    round_values,
)

__all__ = [
    "SOURCES",
    "cast",
    "check_arguments",
    "check_holds",
    "check_source",
    "decode",
    "encode",
    "product",
    "quotient",
    "round_to_format",
    "round_values",
]
