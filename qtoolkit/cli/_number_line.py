"""A format's values as text: each with its code where they are few, else their density."""

import bisect
import textwrap
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from qtoolkit.formats import FloatFormat, Format, IntFormat, TableFormat
from qtoolkit.formats.internal import binade

LISTED = 128  # the most values from zero up that are listed; more are drawn as a density
BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " .:-=+*%#"


def number_line(fmt: Format, width: int, *, ascii_only: bool) -> Iterator[str]:
    """The lines of a picture of `fmt`, at most `width` columns wide."""
    small = fmt.finite_count <= 2 * LISTED
    values, negatives = _listed(fmt) if small else ({}, "")
    if small and len(values) <= LISTED:
        yield from _rows(fmt, values, negatives, width)
    else:
        yield from _density(fmt, width, ASCII_BLOCKS if ascii_only else BLOCKS)


def _listed(fmt: Format) -> tuple[dict[Fraction, int], str]:
    """Codes by value, rising; and, where negative values are left out, how to get their codes.

    E4M3FN lists 127 values and says "; negative values: code + 0x80".
    """
    pairs = [(fmt.value(code), code) for code in range(1 << fmt.bits)]
    # Fractions alone: the negative zero is a float, as infinities and NaN are.
    codes = dict(sorted((value, code) for value, code in pairs if isinstance(value, Fraction)))
    positive = {value: code for value, code in codes.items() if value >= 0}
    all_fit = isinstance(fmt, IntFormat) and len(codes) <= 16
    if len(positive) == len(codes) or all_fit:
        return codes, ""
    mirrored = [(code, codes.get(-value)) for value, code in positive.items() if value > 0]
    half, down_to = 1 << (fmt.bits - 1), ""
    if fmt.lowest < -fmt.max_finite:
        down_to = f", down to {exact(fmt.lowest)}"
    if all(negative == code + half for code, negative in mirrored):
        return positive, f"; negative values: code + 0x{half:X}"
    if all(negative == 2 * half - code for code, negative in mirrored):
        return positive, f"; negative values: 0x{2 * half:X} - code{down_to}"
    return codes, ""


def _rows(fmt: Format, values: dict[Fraction, int], negatives: str, width: int) -> Iterator[str]:
    binades: dict[str, list[Fraction]] = {}
    for value in values:
        binades.setdefault(_binade(fmt, value), []).append(value)
    grouped = len(values) > 16 and len(values) > 2 * len(binades)
    yield from textwrap.wrap(
        "number line: codes in hexadecimal, each before its value"
        + (", a row for each power of two" if grouped else "")
        + negatives,
        width,
    )
    digits = (fmt.bits + 3) // 4
    rows: dict[str, list[str]] = {}
    for label, members in binades.items():
        texts = decimals_or_multiples(members) if grouped else [_short(v) for v in members]
        cells = [f"{values[v]:0{digits}X} {text}" for v, text in zip(members, texts, strict=True)]
        rows.setdefault(label if grouped else "", []).extend(cells)
    label_width = max(map(len, rows)) + 2 * grouped
    cell_width = max(len(cell) for row in rows.values() for cell in row) + 2
    columns = max(1, (width - label_width) // cell_width)
    if grouped and columns > 1:
        columns = 1 << (columns.bit_length() - 1)  # a binade of 2**n values fills its lines evenly
    for label, row in rows.items():
        for start in range(0, len(row), columns):
            shown = "".join(cell.ljust(cell_width) for cell in row[start : start + columns])
            yield f"  {'' if start else label:<{label_width}}{shown}".rstrip()


def _short(value: Fraction) -> str:
    return min(decimal(value), exact(value), key=len)


def _binade(fmt: Format, value: Fraction) -> str:
    if value == 0:
        return "zero"
    if isinstance(fmt, FloatFormat) and abs(value) < fmt.min_normal:
        return "subnormal"
    return ("-" if value < 0 else "") + exact(Fraction(2) ** binade(abs(value)))


def _density(fmt: Format, width: int, blocks: str) -> Iterator[str]:
    """A bar for each binade, or for each few where they are too many for the width.

    A bar's height is the logarithm of the number of values in a binade.
    """
    lowest, highest = binade(fmt.min_positive), binade(fmt.max_finite)
    room = width - 4
    binades = highest - lowest + 1
    per_bar = -(-binades // room)
    wide = max(1, min(4, room // binades))
    edges = list(range(lowest, highest + 1, per_bar))
    counts = [
        Fraction(_below(fmt, end) - _below(fmt, start), end - start)
        for start, end in zip(edges, [*edges[1:], highest + 1], strict=True)
    ]
    bits = [max(0, binade(count)) if count else 0 for count in counts]
    levels = [(len(blocks) - 1) * (n + 1) // (max(bits) + 1) for n in bits]
    line = "".join(blocks[max(level, 1)] * wide for level in levels)
    bars = "a bar for each" if per_bar == 1 else f"a bar for every {per_bar} of them"
    yield from textwrap.wrap(
        "number line: the positive values in each power of two, both on logarithmic scales; "
        f"{bars}, the tallest stands for {exact(Fraction(2) ** max(bits))}",
        width,
    )
    yield f"  {line}"
    yield from _axis(fmt, edges, wide, highest, width - 2)


def _axis(fmt: Format, edges: list[int], wide: int, highest: int, room: int) -> Iterator[str]:
    """Marks under the bars and what they stand for."""
    normal = binade(fmt.min_normal) if isinstance(fmt, FloatFormat) else edges[0]
    marks, labels = "", ""
    for exponent in sorted({edges[0], normal, 0, highest} & {*range(edges[0], highest + 1)}):
        column = (bisect.bisect_right(edges, exponent) - 1) * wide
        label = exact(Fraction(2) ** exponent)
        start = min(column, max(room - len(label), 0))
        if labels and start <= len(labels):
            continue  # no room beside the one before
        marks = marks.ljust(column) + "|"
        labels = labels.ljust(start) + label
    yield f"  {marks}"
    yield f"  {labels}"


def _below(fmt: Format, exponent: int) -> int:
    """Number of values, from zero up, that are less than 2**exponent."""
    bound = Fraction(2) ** exponent
    if isinstance(fmt, TableFormat):
        return bisect.bisect_left(fmt.finite, bound) - bisect.bisect_left(fmt.finite, 0)
    if isinstance(fmt, IntFormat):
        return int(min(bound, fmt.max_finite + 1))
    return bisect.bisect_left(range(fmt.max_code + 1), bound, key=fmt.magnitude)


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
    """The shortest decimal that reads back as this float32, or else as this float64."""
    if value.denominator == 1:
        return str(value.numerator)
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.float32(float(value))
    return str(narrow if narrow == value else float(value))


def decimals_or_multiples(values: Sequence[Fraction]) -> list[str]:
    """All values as decimals if those are short, else all as multiples of one power of two.

    1, 1.125, 1.25; but 2^-9, 2*2^-9, 3*2^-9.
    """
    if all(len(decimal(value)) <= 7 and value < 10**6 for value in values):
        return [decimal(value) for value in values]
    step = Fraction(1, max(value.denominator for value in values))
    if step == 1:
        step *= min(value.numerator & -value.numerator for value in values)
    power = exact(step) if step < 1 else f"2^{binade(step)}"
    return [power if value == step else f"{value / step}*{power}" for value in values]
