"""What `qtoolkit formats` prints: the tables of all formats, and the page of one. No JAX here."""

import math
import textwrap
from collections.abc import Iterator
from fractions import Fraction

from qtoolkit.cli._number_line import exact, number_line
from qtoolkit.formats import (
    BLOCK_FORMATS,
    FORMATS,
    BlockFormat,
    FloatFormat,
    Format,
    IntFormat,
    TableFormat,
)

# One table for each kind of format: its columns, named after the kind, and its rows.
FLOAT_HEADER = (
    *("floats", "bits", "s/e/m", "bias", "max", "min normal"),
    *("smallest", "eps", "inf", "NaN codes"),
)
TABLE_HEADER = ("tables", "bits", "values", "lowest", "max", "smallest", "inf", "NaN codes")
INT_HEADER = ("integers", "bits", "lowest", "max")
BLOCK_HEADER = ("blocks", "element", "of", "scale", "rule", "second scale", "bits each")
LEFT = (
    *("floats", "tables", "integers", "inf", "NaN codes"),
    *("blocks", "element", "scale", "rule", "second scale"),
)
FOOTNOTE = (
    "Also: int and uint of 1 to 64 bits (int5), IEEE P3109 of 3 to 16 bits (binary8p3se).\n"
    "`qtoolkit formats NAME` shows one format, in any spelling, and its number line."
)


def format_tables() -> Iterator[tuple[tuple[str, ...], list[list[str]], list[str]]]:
    """Header, rows and right-aligned columns of each table of shipped formats."""
    tables = (
        (FLOAT_HEADER, [float_row(fmt) for fmt in FORMATS if isinstance(fmt, FloatFormat)]),
        (TABLE_HEADER, [_table_row(fmt) for fmt in FORMATS if isinstance(fmt, TableFormat)]),
        (INT_HEADER, [_int_row(fmt) for fmt in FORMATS if isinstance(fmt, IntFormat)]),
        (BLOCK_HEADER, [_block_row(fmt) for fmt in BLOCK_FORMATS]),
    )
    for header, rows in tables:
        yield header, rows, [column for column in header if column not in LEFT]


def float_row(fmt: FloatFormat) -> list[str]:
    return [
        fmt.name,
        str(fmt.bits),
        f"{int(fmt.signed)}/{fmt.exponent_bits}/{fmt.mantissa_bits}",
        str(fmt.bias),
        exact(fmt.max_finite),
        exact(fmt.min_normal),
        exact(fmt.min_subnormal),
        exact(fmt.epsilon),
        "yes" if fmt.has_inf else "no",
        _nan_codes(fmt) if fmt.bits <= 8 else f"{_nan_count(fmt)} codes",
    ]


def _table_row(fmt: TableFormat) -> list[str]:
    return [
        fmt.name,
        str(fmt.bits),
        str(fmt.finite_count),
        exact(fmt.lowest),
        exact(fmt.max_finite),
        exact(fmt.min_positive),
        "yes" if fmt.has_inf else "no",
        _nan_codes(fmt),
    ]


def _int_row(fmt: IntFormat) -> list[str]:
    return [fmt.name, str(fmt.bits), exact(fmt.lowest), exact(fmt.max_finite)]


def _block_row(fmt: BlockFormat) -> list[str]:
    """A published block format: its lengths are all given, and it has a scale."""
    assert fmt.scale is not None
    count = math.prod(length or 1 for length in fmt.block)
    return [
        fmt.name,
        fmt.element.name,
        "x".join(map(str, fmt.block)),
        fmt.scale.name,
        str(fmt.rule),
        "none" if fmt.tensor_scale is None else fmt.tensor_scale.name,
        f"{fmt.element.bits + fmt.scale.bits / count:g}",
    ]


def block_page(fmt: BlockFormat, width: int, *, ascii_only: bool) -> Iterator[str]:
    """The lines of a block format's page: its properties, then the page of its elements."""
    row = dict(zip(BLOCK_HEADER, _block_row(fmt), strict=True))
    yield f"{fmt.name}: blocks of {row['of']} {row['element']} with scales in {row['scale']}"
    yield f"  scale rule    {row['rule']}"
    yield f"  second scale  {row['second scale']}"
    if fmt.element_exponent:
        yield f"  elements      count 2^{fmt.element_exponent}"
    yield f"  bits each     {row['bits each']}"
    yield ""
    yield from format_page(fmt.element, width, ascii_only=ascii_only)


def format_page(fmt: Format, width: int, *, ascii_only: bool) -> Iterator[str]:
    """The lines of one format's page: its properties, then its number line."""
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
    yield ""
    yield from number_line(fmt, width, ascii_only=ascii_only)


def _kind(fmt: Format) -> str:
    if isinstance(fmt, TableFormat):
        return f"a table of {fmt.finite_count} finite values, {_bits(fmt.bits)}"
    if isinstance(fmt, IntFormat):
        if fmt.is_bool:
            return "truth value, 1 for whatever is not zero"
        kind = "two's complement" if fmt.signed else "unsigned"
        return f"{kind} integer of {_bits(fmt.bits)}"
    fields = (
        *(["1 sign"] if fmt.signed else []),
        f"{fmt.exponent_bits} exponent",
        f"{fmt.mantissa_bits} mantissa",
    )
    sign = "" if fmt.signed else "unsigned "
    return f"{sign}float of {_bits(fmt.bits)} ({', '.join(fields)}), bias {fmt.bias}"


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
    yield (
        "stored as",
        f"{fmt.code_dtype}" + (f", or its own dtype {fmt.dtype}" if fmt.dtype else ""),
    )
    if fmt.spellings:
        own = [] if fmt.dtype is None else [fmt.dtype.name]
        yield "spelled", "  ".join(dict.fromkeys((fmt.name, *own, *fmt.spellings)))


def _zeros(fmt: FloatFormat | TableFormat) -> str:
    if isinstance(fmt, TableFormat):
        zeros = [code for code, value in zip(fmt.codes, fmt.finite, strict=True) if value == 0]
    else:
        zeros = [0] * fmt.has_zero + [fmt.sign_code] * fmt.has_negative_zero
    codes = [hexadecimal(code, fmt.bits) for code in zeros]
    return f"{codes[0]}, -0 is {codes[1]}" if len(codes) > 1 else "".join(codes) or "none"


def _infinities(fmt: FloatFormat | TableFormat) -> str:
    if fmt.inf_code is None:
        return "none"
    codes = [hexadecimal(fmt.inf_code, fmt.bits)]
    if isinstance(fmt, FloatFormat) and fmt.signed:
        codes.append(hexadecimal(fmt.sign_code | fmt.inf_code, fmt.bits))
    elif isinstance(fmt, TableFormat) and float("-inf") in fmt.values_by_code:
        codes.append(hexadecimal(fmt.values_by_code.index(float("-inf")), fmt.bits))
    return f"{codes[0]}, -Inf is {codes[1]}" if len(codes) > 1 else codes[0]


def _overflow(fmt: FloatFormat | TableFormat) -> str:
    what = {"INF": "infinity", "NAN": "NaN", "MAX": "the largest value"}[fmt.overflow.name]
    if isinstance(fmt, TableFormat) and fmt.beyond is None:
        return f"numbers saturate; infinity becomes {what}, unless it is clamped"
    return f"becomes {what}, unless it is clamped"


def _nan_count(fmt: FloatFormat | TableFormat) -> str:
    count = sum(map(len, _nan_runs(fmt)))
    return str(count) if count < 10**4 else f"{exact(Fraction(count + 2))}-2"


def _nan_codes(fmt: FloatFormat | TableFormat) -> str:
    """Codes in hexadecimal, runs shortened: 0x7D-7F, FD-FF; "none" where there are none."""
    runs = [dict.fromkeys((run[0], run[-1])) for run in _nan_runs(fmt)]
    text = ", ".join("-".join(hexadecimal(code, fmt.bits)[2:] for code in run) for run in runs)
    return f"0x{text}" if text else "none"


def _nan_runs(fmt: FloatFormat | TableFormat) -> tuple[range, ...]:
    if isinstance(fmt, FloatFormat):
        return fmt.nan_ranges
    return tuple(range(code, code + 1) for code in fmt.nan_codes)


def hexadecimal(code: int, bits: int) -> str:
    """0x7E; as many digits as the format's codes need."""
    return f"0x{code:0{(bits + 3) // 4}X}"


def _bits(count: int) -> str:
    return f"{count} bit{'' if count == 1 else 's'}"
