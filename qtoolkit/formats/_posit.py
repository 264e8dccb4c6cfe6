"""Posits as tables."""

import functools
import math
import re

import numpy as np

from qtoolkit.formats._float import Overflow
from qtoolkit.formats._table import TableFormat


def posit(n: int, es: int = 2) -> TableFormat:
    """The posit of `n` bits with `es` exponent bits.

    Rounding to nearest is that of the standard, on the encoding: numbers between two posits tie at
    the posit of one bit more between them, not at their midpoint, and ties go to the even code. No
    number but 0 becomes 0, and none becomes NaR: beyond the ends all become the largest posit of
    their sign. Other roundings go by values, as in every format: toward zero, 1e-30 becomes 0.
    Infinities become NaR, the code that decodes to NaN, where they are not clamped.

    Args:
      n: Width of a code, 2 to 16.
      es: Width of the exponent field, 0 up to where the largest posit, 2**(2**es * (n - 2)), is
        still a float64. The standard has 2.

    Returns:
      The format, named "posit16" for `posit(16)` and "posit8es1" for `posit(8, 1)`;
      `qtoolkit.format` knows these names.

    Raises:
      TypeError: `n` or `es` is no integer.
      ValueError: One is out of range.

    Source: Standard for Posit Arithmetic (2022); other `es`: Gustafson and Yonemoto (2017).

    Examples:
      >>> fmt = qt.posit(8)
      >>> fmt is qt.format("posit8"), float(fmt.max_finite), float(fmt.min_positive)
      (True, 16777216.0, 5.960464477539063e-08)
      >>> qt.round_to_format(jnp.asarray([1e-30, 0.3, 1e30]), fmt)
      Array([5.9604645e-08, 3.1250000e-01, 1.6777216e+07], dtype=float32)
      >>> qt.posit(16, 1).name
      'posit16es1'
    """
    for name, value in (("n", n), ("es", es)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"posit: {name}={value!r}, expected an integer, as in posit(8, 2)")
    if not 2 <= n <= 16:
        raise ValueError(f"posit: n={n}, expected 2 to 16 bits")
    # The ties are posits of a bit more, whose ends are 2**es times further out.
    if not 0 <= es <= 10 or (n - 1) << es > 1022:
        raise ValueError(
            f"posit: es={es} with n={n}, expected 0 or more, and a largest posit, "
            f"2**(2**es * {n - 2}), that is a float64"
        )
    return _posit(int(n), int(es))


@functools.cache
def _posit(n: int, es: int) -> TableFormat:
    half = 1 << (n - 1)
    # As two's-complement integers, codes are in the order of their values. Between the codes c and
    # c + 1 lies the code 2 * c + 1 of a posit with one bit more: the tie. Next to zero the tie is
    # zero itself, because no other number is rounded to zero.
    low = range(1 - half, half - 1)
    return TableFormat(
        name=f"posit{n}" if es == 2 else f"posit{n}es{es}",
        values_by_code=tuple(_value(code, n, es) for code in range(1 << n)),
        overflow=Overflow.NAN,
        ties=tuple(
            0.0 if c in (-1, 0) else _value((2 * c + 1) % (4 * half), n + 1, es) for c in low
        ),
    )


def _value(code: int, bits: int, exponent_bits: int) -> float:
    """What a code stands for: sign, regime, exponent, fraction."""
    if code == 0:
        return 0.0
    if code == 1 << (bits - 1):
        return math.nan  # NaR
    if code >> (bits - 1):
        return -_value((1 << bits) - code, bits, exponent_bits)
    text = f"{code:0{bits}b}"[1:]
    # The regime is a run of equal bits that the other bit ends: 110 is 1, 10 is 0, 01 is -1.
    run = len(text) - len(text.lstrip(text[0]))
    regime = run - 1 if text[0] == "1" else -run
    rest = text[run + 1 :]
    # Exponent bits that do not fit into the code are 0.
    exponent = int(rest[:exponent_bits].ljust(exponent_bits, "0") or "0", 2)
    fraction = rest[exponent_bits:]
    significand = 1 + (int(fraction, 2) / (1 << len(fraction)) if fraction else 0)
    return math.ldexp(significand, (regime << exponent_bits) + exponent)


_NAME = re.compile(r"posit([1-9]\d?)(?:es(\d\d?))?", re.IGNORECASE)


def posit_from_name(name: str) -> TableFormat | None:
    """The posit that `name` spells, None if it spells none."""
    match = _NAME.fullmatch(name)
    if not match:
        return None
    return posit(int(match[1]), 2 if match[2] is None else int(match[2]))


POSIT8 = posit(8)
