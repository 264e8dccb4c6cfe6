"""The table of `qtoolkit formats`. No JAX here."""

import itertools
from fractions import Fraction

from qtoolkit.formats import FORMATS, FloatFormat, Format

HEADER = (
    "format",
    "bits",
    "exp",
    "man",
    "bias",
    "max",
    "min normal",
    "min subnormal",
    "epsilon",
    "inf",
    "NaN codes",
)
RIGHT = ("bits", "exp", "man", "bias", "max", "min normal", "min subnormal", "epsilon")


def format_rows() -> list[list[str]]:
    """One row of text for each shipped format; integers have no floating-point properties."""
    return [_row(fmt) for fmt in FORMATS]


def _row(fmt: Format) -> list[str]:
    if not isinstance(fmt, FloatFormat):
        return [fmt.name, str(fmt.bits), *"---", exact(fmt.max_finite), "-", "1", "-", "no", "-"]
    return [
        fmt.name,
        str(fmt.bits),
        str(fmt.exponent_bits),
        str(fmt.mantissa_bits),
        str(fmt.bias),
        exact(fmt.max_finite),
        exact(fmt.min_normal),
        exact(fmt.min_subnormal),
        exact(fmt.epsilon),
        "yes" if fmt.has_inf else "no",
        _ranges(fmt.nan_codes, fmt.bits),
    ]


def exact(value: Fraction) -> str:
    """A positive dyadic number, exactly: 448, 2^-9, 1.9921875*2^127."""
    if value.denominator == 1 and value < 10**6:
        return str(value.numerator)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    significand = value / Fraction(2) ** exponent
    factor = "" if significand == 1 else f"{float(significand)!r}*"
    return f"{factor}2^{exponent}"


def _ranges(codes: tuple[int, ...], bits: int) -> str:
    """Rising codes in hexadecimal, neighbours joined: 0x7D-0x7F 0xFD-0xFF."""
    digits = (bits + 3) // 4
    parts = []
    for _, run in itertools.groupby(enumerate(codes), key=lambda pair: pair[1] - pair[0]):
        members = [code for _, code in run]
        ends = dict.fromkeys((members[0], members[-1]))
        parts.append("-".join(f"0x{code:0{digits}X}" for code in ends))
    return " ".join(parts)
