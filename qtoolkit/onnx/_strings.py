"""Converts text to numbers and numbers to text, exactly, on the host.

Text of any length is read as an exact decimal number. For a float type it is first rounded to
float64, to odd: a number that float64 does not hold becomes the one of its two neighbours whose
pattern is odd. Any later rounding, to at most 51 significant bits, then gives the same as if the
exact number were rounded.
"""

import functools
import math
import re
from collections.abc import Callable
from decimal import ROUND_DOWN, ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from qtoolkit.formats import FLOAT16, FLOAT32, FLOAT64, FloatFormat, Format, IntFormat

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?", re.IGNORECASE)
_WORDS = {"inf": math.inf, "+inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def texts(where: str, x: Any) -> np.ndarray:
    """Strings, bytes (UTF-8) or arrays of these as an array of objects, all of them str."""
    array = np.asarray(x, object) if isinstance(x, str | bytes) else np.asarray(x).astype(object)
    result = np.empty(array.shape, object)
    for index in np.ndindex(array.shape):
        element: Any = array[index]
        if not isinstance(element, str | bytes):
            raise TypeError(
                f"{where}: {_named(index)} is {element!r} of type {type(element).__name__}, "
                "expected str or bytes"
            )
        try:
            result[index] = element.decode() if isinstance(element, bytes) else str(element)
        except UnicodeDecodeError:
            raise ValueError(
                f"{where}: {_named(index)} is {element!r}, which is no UTF-8"
            ) from None
    return result


def to_float64(where: str, x: np.ndarray, *, exact: bool) -> np.ndarray:
    """The numbers that strings spell, in float64: to nearest even if `exact`, else to odd."""

    def convert(text: str) -> float:
        near = float(_WORDS.get(text.lower(), text))  # Python reads decimals correctly rounded
        return near if exact or text.lower() in _WORDS else to_odd(near, _decimal(text))

    return _each(where, x, np.dtype(np.float64), convert)


def to_integers(where: str, x: np.ndarray, fmt: IntFormat, *, nearest: bool) -> np.ndarray:
    """The numbers that strings spell, as integers of `fmt`, in int64 or uint64.

    With `nearest` they are rounded to nearest even and wrapped round to the bits of `fmt`; else
    they are rounded toward zero and clamped. Infinities become the limits, and NaN zero.
    """
    lowest, highest = int(fmt.lowest), int(fmt.max_finite)

    def convert(text: str) -> int:
        word = _WORDS.get(text.lower())
        if word is not None:
            return 0 if math.isnan(word) else (highest if word > 0 else lowest)
        value = int(_decimal(text).to_integral_value(ROUND_HALF_EVEN if nearest else ROUND_DOWN))
        if nearest:
            return (value - lowest) % 2**fmt.bits + lowest
        return min(max(value, lowest), highest)

    return _each(where, x, np.dtype(np.int64 if fmt.signed else np.uint64), convert)


def from_numbers(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Numbers of `fmt` in plain notation, as an array of str: see `onnx.cast`."""
    if isinstance(fmt, IntFormat):
        numerals = [str(int(value)) for value in x.ravel()]
    elif fmt in (FLOAT16, FLOAT32, FLOAT64):
        numerals = [
            np.format_float_positional(value, unique=True, trim="-")
            if np.isfinite(value)
            else _not_finite(float(value))
            for value in x.ravel()
        ]
    else:
        assert isinstance(fmt, FloatFormat)
        codes = np.ascontiguousarray(x).ravel().view(fmt.code_dtype) & (2**fmt.bits - 1)
        numerals = [_of_code(int(code), fmt) for code in codes]
    return np.array(numerals, np.str_).reshape(x.shape)


def _each(where: str, x: np.ndarray, dtype: np.dtype, convert: Callable[[str], Any]) -> np.ndarray:
    """`convert` of each string, which must spell a number."""
    result = np.empty(x.shape, dtype)
    for index in np.ndindex(x.shape):
        text = str(x[index]).strip()
        if not _NUMBER.fullmatch(text) and text.lower() not in _WORDS:
            excerpt = repr(text if len(text) <= 60 else text[:57] + "...")
            raise ValueError(
                f"{where}: {_named(index)} is {excerpt}, expected a number such as '3.14' or "
                "'1e-5', 'INF', '+INF', '-INF' or 'NaN'"
            )
        result[index] = convert(text)
    return result


def _named(index: tuple[int, ...]) -> str:
    return f"x[{', '.join(map(str, index))}]" if index else "x"


def to_odd(near: float, exact: Decimal | Fraction) -> float:
    """`exact` rounded to odd in float64; `near` is the float64 number nearest to it."""
    # Of two neighbours one has an odd pattern. Beyond float64 that is the largest number, not the
    # infinity, so that a later rounding still sees a finite number.
    rounded = type(exact)(near) if math.isfinite(near) else near
    if exact == rounded or int(np.float64(near).view(np.uint64)) & 1:
        return near
    return math.nextafter(near, math.inf if exact > rounded else -math.inf)


def _decimal(text: str) -> Decimal:
    """The exact number; beyond 10**400 perhaps another one that no type tells from it."""
    mantissa, _, exponent = text.lower().partition("e")
    sign = -1 if exponent.startswith("-") else 1
    digits = exponent.lstrip("+-").lstrip("0") or "0"
    size = int(digits) if len(digits) < 9 else 10**9
    most = 400 + len(mantissa)  # beyond every type, and a multiple of 2**400: its low bits are 0
    return Decimal(f"{mantissa}e{sign * min(size, most if sign > 0 else size)}")


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "INF" if value > 0 else "-INF"


@functools.cache
def _of_code(code: int, fmt: FloatFormat) -> str:
    """The shortest decimal that is rounded back to this code; of several, the nearest one."""
    value = fmt.value(code)
    if isinstance(value, float):  # infinite, NaN or -0
        return "-0" if value == 0 else _not_finite(value)
    if value == 0:
        return "0"
    size = code & (fmt.magnitude_count - 1)
    sign, value = "-" if value < 0 else "", abs(value)
    # Casts to E8M0 have three rounding modes, so its numbers are written with all their digits.
    below = value if not fmt.has_zero else (value + fmt.magnitude(size - 1)) / 2
    above = value if not fmt.has_zero else (value + fmt.magnitude(size + 1)) / 2
    even = size % 2 == 0 or not fmt.has_zero
    step = Fraction(10) ** (math.ceil(math.log10(value)) + 1)
    while True:
        step /= 10
        floor = value // step
        for count in sorted((floor, floor + 1), key=lambda n: abs(n * step - value)):
            number = count * step
            if below < number < above or (even and number in (below, above)):
                places = len(str(step.denominator)) - 1
                if places == 0:
                    return f"{sign}{int(number)}"
                text = str(count).rjust(places + 1, "0")
                return sign + f"{text[:-places]}.{text[-places:]}".rstrip("0").rstrip(".")
