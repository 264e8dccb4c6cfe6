"""The formats of IEEE P3109 as `FloatFormat`s."""

import re

import numpy as np

from qtoolkit.formats._float import FloatFormat, Overflow, Specials


def p3109(bits: int, precision: int, *, signed: bool = True, extended: bool = True) -> FloatFormat:
    """The format Binary{bits}p{precision}{s|u}{e|f}.

    Args:
      bits: Width of a code, 3 to 16.
      precision: Significand bits with the leading one: 1 to bits - 1, unsigned to bits.
      signed: With a sign bit.
      extended: With infinities; else the largest finite value is what overflow becomes.

    Returns:
      The format, named "binary8p3se" for `p3109(8, 3)`. One zero, one NaN, subnormals.

    Raises:
      TypeError: `bits` or `precision` is no integer.
      ValueError: One is out of range.

    Source: IEEE P3109 Interim Report v4.0.

    Examples:
      >>> fmt = qt.p3109(8, 3)
      >>> fmt.name, float(fmt.max_finite), fmt.has_inf
      ('binary8p3se', 49152.0, True)
      >>> finite = qt.p3109(8, 3, extended=False)
      >>> finite.name, float(finite.max_finite), finite.has_inf  # one more number
      ('binary8p3sf', 57344.0, False)
    """
    for argument, value in (("bits", bits), ("precision", precision)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"p3109: {argument}={value!r}, expected an integer, as in p3109(8, 3)")
    bits, precision = int(bits), int(precision)  # those of NumPy overflow
    name = f"binary{bits}p{precision}{'s' if signed else 'u'}{'e' if extended else 'f'}"
    if not 3 <= bits <= 16 or not 1 <= precision <= bits - signed:
        raise ValueError(
            f"p3109: bits={bits}, precision={precision}, expected 3 to 16 bits and a precision of "
            f"1 to {'bits - 1' if signed else 'bits'}"
        )
    # Without infinities, P3109 has the codes of formats that others named: NaN is the code of "-0"
    # (FNUZ), or the last one where there is no sign (FN).
    specials = Specials.EXTENDED if extended else Specials.FNUZ if signed else Specials.FN
    return FloatFormat(
        name=name,
        exponent_bits=bits - precision + (not signed),
        mantissa_bits=precision - 1,
        bias=2 ** (bits - precision - signed),
        specials=specials,
        overflow=Overflow.INF if extended else Overflow.MAX,
        signed=signed,
    )


NAMES = tuple(
    f"binary{bits}p{precision}{sign}{infinities}"
    for bits in range(3, 17)
    for sign in "su"
    for precision in range(1, bits + (sign == "u"))
    for infinities in "ef"
)
_NAME = re.compile(r"binary(\d+)p(\d+)(?:([su])([ef]))?", re.IGNORECASE)


def from_name(name: str) -> FloatFormat | None:
    """The format that `name`, such as "Binary8p3se" or its short form "binary8p3", spells."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    bits, precision, sign, infinities = match.groups()
    return p3109(
        int(bits),
        int(precision),
        signed=(sign or "s").lower() == "s",
        extended=(infinities or "e").lower() == "e",
    )
