"""What a number format is: frozen data with every property derived and exact. No JAX here."""

from qtoolkit.formats._float import FloatFormat, Overflow, Specials
from qtoolkit.formats._int import IntFormat
from qtoolkit.formats._names import (
    BFLOAT16,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FLOAT16,
    FORMATS,
    INT8,
    Format,
    format,
)

__all__ = [
    "BFLOAT16",
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "FLOAT16",
    "FORMATS",
    "INT8",
    "FloatFormat",
    "Format",
    "IntFormat",
    "Overflow",
    "Specials",
    "format",
]
