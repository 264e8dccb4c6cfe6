"""What `qtoolkit formats` prints: the tables of all formats, and the page of one. No JAX here."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from qtoolkit.formats import (
    BLOCK_FORMATS,
    FORMATS,
    BlockFormat,
    FloatFormat,
    Format,
    IntFormat,
    Overflow,
    TableFormat,
)
from qtoolkit.formats.internal import binade

# The columns of a table for each kind of format, the first named after the kind.
_FLOATS = {
    "floats": lambda fmt: fmt.name,
    "bits": lambda fmt: str(fmt.bits),
    "s/e/m": lambda fmt: f"{int(fmt.signed)}/{fmt.exponent_bits}/{fmt.mantissa_bits}",
    "bias": lambda fmt: str(fmt.bias),
    "max": lambda fmt: exact(fmt.max_finite),
    "min normal": lambda fmt: exact(fmt.min_normal),
    "smallest": lambda fmt: exact(fmt.min_subnormal),
    "eps": lambda fmt: exact(fmt.epsilon),
    "inf": lambda fmt: "yes" if fmt.has_inf else "no",
    "NaN codes": lambda fmt: _nan_codes(fmt) if fmt.bits <= 8 else f"{_nan_count(fmt)} codes",
}
_TABLES = {
    "tables": lambda fmt: fmt.name,
    "bits": _FLOATS["bits"],
    "values": lambda fmt: str(fmt.finite_count),
    "lowest": lambda fmt: exact(fmt.lowest),
    "max": _FLOATS["max"],
    "smallest": lambda fmt: exact(fmt.min_positive),
    "inf": _FLOATS["inf"],
    "NaN codes": lambda fmt: _nan_codes(fmt),
}
_INTS = {"integers": lambda fmt: fmt.name} | {
    key: _TABLES[key] for key in ("bits", "lowest", "max")
}
_BLOCKS = {
    "blocks": lambda fmt: fmt.name,
    "element": lambda fmt: fmt.element.name,
    "of": lambda fmt: "x".join(map(str, fmt.block)),
    "scale": lambda fmt: fmt.scale.name,
    "rule": lambda fmt: str(fmt.rule),
    "tensor scale": lambda fmt: "none" if fmt.tensor_scale is None else fmt.tensor_scale.name,
    "bits each": lambda fmt: f"{fmt.element.bits + fmt.scale.bits / math.prod(fmt.block):g}",
}
_ALIGNED_LEFT = {"floats", "tables", "integers", "inf", "NaN codes"}
_ALIGNED_LEFT |= {"blocks", "element", "scale", "rule", "tensor scale"}
FOOTNOTE = (
    "Also: int and uint of 1 to 64 bits (int5), IEEE P3109 of 3 to 16 bits (binary8p3se).\n"
    "`qtoolkit formats NAME` shows one format, in any spelling."
)


def format_tables() -> Iterator[tuple[list[str], list[list[str]], list[str]]]:
    kinds: Any = ((_FLOATS, FloatFormat), (_TABLES, TableFormat), (_INTS, IntFormat))
    tables = [(columns, [f for f in FORMATS if isinstance(f, kind)]) for columns, kind in kinds]
    for columns, formats in (*tables, (_BLOCKS, BLOCK_FORMATS)):
        rows = [[cell(fmt) for cell in columns.values()] for fmt in formats]
        yield list(columns), rows, [column for column in columns if column not in _ALIGNED_LEFT]


def block_page(fmt: BlockFormat, width: int) -> Iterator[str]:
    """The lines of a block format's page: its properties, then the page of its elements."""
    row = {column: cell(fmt) for column, cell in _BLOCKS.items()}
    yield f"{fmt.name}: blocks of {row['of']} {row['element']} with scales in {row['scale']}"
    yield f"  scale rule    {row['rule']}"
    yield f"  tensor scale  {row['tensor scale']}"
    if fmt.element_exponent:
        yield f"  elements      count 2^{fmt.element_exponent}"
    yield f"  bits each     {row['bits each']}"
    yield ""
    yield from format_page(fmt.element, width)


def format_page(fmt: Format, width: int) -> Iterator[str]:
    """The lines of one format's page: its properties."""
    yield f"{fmt.name}: {_kind(fmt)}"
    properties = [*_properties(fmt)]
    indent = max(len(name) for name, _ in properties) + 4
    for name, text in properties:
        yield from textwrap.wrap(
            text,
            width,
            initial_indent=f"  {name}".ljust(indent),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _kind(fmt: Format) -> str:
    if isinstance(fmt, TableFormat):
        return f"a table of {fmt.finite_count} finite values, {_bits(fmt.bits)}"
    if isinstance(fmt, IntFormat):
        if fmt.is_bool:
            return "truth value, 1 for whatever is not zero"
        kind = "two's complement" if fmt.signed else "unsigned"
        return f"{kind} integer of {_bits(fmt.bits)}"
    sign, unsigned = ("1 sign, ", "") if fmt.signed else ("", "unsigned ")
    fields = f"{sign}{fmt.exponent_bits} exponent, {fmt.mantissa_bits} mantissa"
    return f"{unsigned}float of {_bits(fmt.bits)} ({fields}), bias {fmt.bias}"


def _properties(fmt: Format) -> Iterator[tuple[str, str]]:
    yield "max", exact(fmt.max_finite)
    yield "lowest", exact(fmt.lowest)
    if isinstance(fmt, FloatFormat):
        yield "min normal", exact(fmt.min_normal)
        subnormals = fmt.has_zero and fmt.mantissa_bits
        yield "min subnormal", exact(fmt.min_subnormal) if subnormals else "no subnormals"
        yield "epsilon", exact(fmt.epsilon)
    elif isinstance(fmt, TableFormat):
        yield "smallest", exact(fmt.min_positive)
    yield "finite values", f"{fmt.finite_count:,}"
    if not isinstance(fmt, IntFormat):
        yield "zero", _zeros(fmt)
        yield "infinity", _infinities(fmt)
        yield "NaN", f"{_nan_codes(fmt)} ({_nan_count(fmt)})" if fmt.has_nan else "none"
        yield "overflow", _overflow(fmt)
    own = f", or values of dtype {fmt.dtype}" if fmt.dtype else ""
    yield "stored as", f"codes of dtype {fmt.code_dtype}{own}"
    if fmt.spellings:
        names = [] if fmt.dtype is None else [fmt.dtype.name]
        yield "spelled", "  ".join(dict.fromkeys((fmt.name, *names, *fmt.spellings)))


def _zeros(fmt: FloatFormat | TableFormat) -> str:
    if isinstance(fmt, TableFormat):
        zeros = [code for code, value in zip(fmt.codes, fmt.finite, strict=True) if value == 0]
    else:
        zeros = [0] * fmt.has_zero + [fmt.sign_code] * fmt.has_negative_zero
    return ", -0 is ".join(_hexadecimal(code, fmt) for code in zeros) or "none"


def _infinities(fmt: FloatFormat | TableFormat) -> str:
    codes = [] if fmt.inf_code is None else [fmt.inf_code]
    if codes and isinstance(fmt, FloatFormat) and fmt.signed:
        codes.append(fmt.sign_code | codes[0])
    elif isinstance(fmt, TableFormat) and float("-inf") in fmt.values_by_code:
        codes.append(fmt.values_by_code.index(float("-inf")))
    return ", -Inf is ".join(_hexadecimal(code, fmt) for code in codes) or "none"


def _overflow(fmt: FloatFormat | TableFormat) -> str:
    what = "infinity" if fmt.overflow is Overflow.INF else "NaN"
    if isinstance(fmt, TableFormat) and fmt.beyond is None:
        rule = f'; infinity becomes {what} with saturation="propagate" or "none"'
    else:
        rule = f'; becomes {what} with saturation="none"'
    return "clamped to the largest value" + ("" if fmt.overflow is Overflow.MAX else rule)


def _nan_count(fmt: FloatFormat | TableFormat) -> str:
    count = sum(map(len, _nan_runs(fmt)))
    return str(count) if count < 10**4 else f"{exact(Fraction(count + 2))}-2"


def _nan_codes(fmt: FloatFormat | TableFormat) -> str:
    """Codes in hexadecimal, runs shortened: 0x7D-7F, FD-FF; "none" where there are none."""
    runs = [dict.fromkeys((run[0], run[-1])) for run in _nan_runs(fmt)]
    text = ", ".join("-".join(_hexadecimal(code, fmt)[2:] for code in run) for run in runs)
    return f"0x{text}" if text else "none"


def _nan_runs(fmt: FloatFormat | TableFormat) -> Sequence[range]:
    if isinstance(fmt, FloatFormat):
        return fmt.nan_ranges
    return [range(code, code + 1) for code in fmt.nan_codes]


def _hexadecimal(code: int, fmt: Format) -> str:
    return f"0x{code:0{(fmt.bits + 3) // 4}X}"


def _bits(count: int) -> str:
    return f"{count} bit{'' if count == 1 else 's'}"


def exact(value: Fraction) -> str:
    """A number, exactly and short: 448, 2^-9, 1.75, 7*2^-9, (2-2^-7)*2^127, 2^63-1."""
    if value < 0:
        return f"-{exact(-value)}"
    if value.denominator == 1 and value < 10**6:
        return str(value.numerator)
    exponent = binade(value)
    significand = value / Fraction(2) ** exponent
    if significand == 1:
        return f"2^{exponent}"
    if value == 2 ** (exponent + 1) - 1:
        return f"2^{exponent + 1}-1"
    if len(decimal(value)) <= 8 and Fraction(decimal(value)) == value:
        return decimal(value)
    steps = significand.denominator.bit_length() - 1
    if 2 - significand == Fraction(1, significand.denominator) and steps > 4:
        return f"(2-2^-{steps})*2^{exponent}" if exponent else f"2-2^-{steps}"
    if significand.numerator < 2**10:
        return f"{significand.numerator}*2^{exponent - steps}"
    return decimal(value)


def decimal(value: Fraction) -> str:
    """The shortest decimal that reads back as `value`, as a float32 if it is one, else float64."""
    if value.denominator == 1:
        return str(value.numerator)
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(float(value))
    return str(single if single == value else float(value))
