"""Type promotion: the smallest format that holds every value of others."""

import functools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from qtoolkit.formats._element import binade
from qtoolkit.formats._float import FloatFormat
from qtoolkit.formats._int import IntFormat
from qtoolkit.formats._names import FORMATS, Format, format
from qtoolkit.formats._table import TableFormat

# Every format with a JAX dtype, in the order in which `promote` tries them: by bits, and those of
# equal bits as its docstring lists them. bfloat16 stands before float16 because products of FP8
# values overflow float16: 448 * 448 is 200,704, its largest value 65,504.
INTEGERS: list[Format] = sorted(
    (fmt for fmt in FORMATS if isinstance(fmt, IntFormat)), key=lambda fmt: (fmt.bits, fmt.signed)
)
FLOATS = [
    format(name)
    for name in (
        *("e2m1fn", "e4m3fn", "e5m2", "e4m3_ieee", "e3m4", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz"),
        *("e8m0fnu", "bfloat16", "float16", "float32", "float64"),
    )
]


def promote(a: Any, b: Any, *more: Any) -> Format:
    """The smallest format with a JAX dtype that holds every value of `a` and of `b`.

    Values are the finite numbers, and NaN and the infinities where a format has them; the zeros
    count as one. Integers promote to an integer, anything else to a float. Smallest is what has the
    fewest bits; among those, what comes first in

    * bool, uint2, int2, uint4, int4, uint8, int8, and so on: unsigned first
    * e2m1fn
    * e4m3fn, e5m2, e4m3_ieee, e3m4, e4m3fnuz, e5m2fnuz, e4m3b11fnuz, e8m0fnu
    * bfloat16, float16
    * float32
    * float64

    So an argument of this list that holds all others is the result: uint3 and uint4 give uint4.
    Equal formats are their own result, with a JAX dtype or without. The order of the arguments does
    not matter, but promoting in steps can give a float of more bits than promoting at once: e4m3fn
    and e5m2 give bfloat16, which with float16 gives float32; `promote("e4m3fn", "e5m2", "float16")`
    is float16, which holds all three.

    Args:
      a, b, more: Formats, or any spellings of them, see `qtoolkit.format`.

    Returns:
      A format of `qtoolkit.formats`; its dtype is `promote(a, b).dtype`.

    Raises:
      ValueError: No format with a JAX dtype holds them all: int64 and float32, say, or int64 and
        uint64, which NumPy and JAX would round. Or a format is unknown.
      TypeError: An argument is no format.

    Examples:
      >>> qt.promote("e4m3fn", "e5m2").name  # what holds 5 exponent bits and 3 of mantissa
      'bfloat16'
      >>> qt.promote("int8", "uint8").name
      'int16'
      >>> qt.promote("int8", "e4m3fn").name
      'bfloat16'
    """
    return _promoted(frozenset(format(spec) for spec in (a, b, *more)))


@functools.lru_cache(maxsize=2**12)
def _promoted(formats: frozenset[Format]) -> Format:
    if len(formats) == 1:
        (same,) = formats
        return same
    integers = all(isinstance(fmt, IntFormat) for fmt in formats)
    candidates = INTEGERS if integers else FLOATS
    common = next((c for c in candidates if all(_holds(c, fmt) for fmt in formats)), None)
    if common is None:
        names = sorted(fmt.name for fmt in formats)
        raise ValueError(
            f"promote: no {'integer' if integers else 'float'} format with a JAX dtype holds every "
            f"value of {', '.join(names[:-1])} and {names[-1]}; choose which of them may be "
            "rounded, and cast it first"
        )
    return common


@functools.lru_cache(maxsize=2**12)
def _holds(candidate: Format, fmt: Format) -> bool:
    """Whether every value of `fmt` is one of `candidate`."""
    if candidate == fmt:
        return True
    if (fmt.has_nan and not candidate.has_nan) or (fmt.has_inf and not candidate.has_inf):
        return False

    def contains(value: Fraction) -> bool:
        if not candidate.lowest <= value <= candidate.max_finite:
            return False
        if value == 0 or isinstance(candidate, IntFormat):  # which is compared with integers alone
            return True
        assert isinstance(candidate, FloatFormat)
        # The step of `candidate` at this magnitude, 2**exponent, must divide the value.
        exponent = max(binade(abs(value)), candidate.min_exponent) - candidate.mantissa_bits
        return (value / Fraction(2) ** exponent).denominator == 1

    return all(map(contains, _marks(fmt)))


def _marks(fmt: Format) -> Iterator[Fraction]:
    """A few values of `fmt`: a binary format that holds these holds every value of `fmt`.

    The values of one binade, 2**e to 2**(e + 1), are a fixed step apart, a power of two in both
    formats, and the step never shrinks towards larger numbers. So two neighbours per binade decide:
    E5M2 has steps of 1/4 from 1 to 2, and what holds 1 and 1.25 has a step of 1/4 or finer there,
    hence 1.5 and 1.75. Of integers the ends decide: what holds int8's 127, which is odd, has steps
    of one up to there. Tables have no such order; all their values are compared.
    """
    if isinstance(fmt, TableFormat):
        yield from map(Fraction, fmt.finite)
        return
    yield fmt.max_finite
    yield fmt.lowest
    if isinstance(fmt, FloatFormat):
        for first in range(0, fmt.max_code + 1, 1 << fmt.mantissa_bits):
            for code in range(first, min(first + 2, fmt.max_code + 1)):
                yield fmt.magnitude(code)
