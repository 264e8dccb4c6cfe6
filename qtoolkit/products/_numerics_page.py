"""A report of numerics as one page of HTML that needs nothing else."""

import html
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from qtoolkit.products._numerics import Numerics, Row

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
table { border-collapse: collapse; }
th, td { padding: .25em .7em; text-align: left; border-bottom: 1px solid #ddd; }
th { position: sticky; top: 0; background: #fff; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.bad { background: #fde0dd; } tr.poor { background: #fff3cd; }
svg { display: block; } .range { fill: #e3ecf5; } .bar { fill: #1f4e79; } .zero { fill: #b0413e; }
p { max-width: 60em; }
"""
_WIDTH, _HEIGHT = 200, 34
_NUMBERS = 5  # where the columns of numbers begin


def page(numerics: "Numerics") -> str:
    """The page; paths and formats are escaped."""
    from qtoolkit.products._numerics import HEADER, severity_of

    head = "".join(f"<th>{html.escape(name)}</th>" for name in (*HEADER, "log2 |x|"))
    body = []
    for row in numerics.rows:
        cells = "".join(
            f"<td{' class=n' if i >= _NUMBERS else ''}>{html.escape(cell)}</td>"
            for i, cell in enumerate(row.cells())
        )
        severity = severity_of(row)
        opening = f'<tr class="{severity}">' if severity else "<tr>"
        body.append(f"{opening}{cells}<td>{_histogram(row)}</td></tr>")
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in numerics.notes)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>qtoolkit numerics</title><style>{_STYLE}</style></head><body>"
        "<h1>Numerics</h1><p>What rounding does to every operand. Red: below 10 dB, more than 1 % "
        "saturated or 25 % became zero, NaNs or infinities; yellow: 20 dB, 0.1 %, 5 %. Histograms: "
        "elements by binade, height logarithmic; blue band: what the format holds with the largest "
        "scale, to the right of it elements saturate, to the left they become zero; red bar: exact "
        "zeros.</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(body)}\n</tbody></table>"
        f"{notes}</body></html>\n"
    )


def _histogram(row: "Row") -> str:
    """Bars by exponent, over the range of the format."""
    counts = row.histogram
    if not counts:
        return ""
    band = _band(row)
    first, last = min(counts), max(counts)
    if band is not None:
        first, last = min(first, band[0]), max(last, band[1])
    width = _WIDTH / (last - first + 3)

    def left(exponent: float) -> float:
        return (exponent - first + 2) * width

    tallest = np.log1p(max(counts.values()))
    label = f"{row.path} {row.operand}: binades 2**{min(counts)} to 2**{max(counts)}"
    parts = [
        f'<svg width="{_WIDTH}" height="{_HEIGHT + 12}" role="img" '
        f'aria-label="{html.escape(label)}">'
    ]
    if band is not None:
        span = (band[1] - band[0] + 1) * width
        parts.append(
            f'<rect class="range" x="{left(band[0]):.1f}" y="0" width="{span:.1f}" '
            f'height="{_HEIGHT}"/>'
        )
    zeros = float(np.asarray(row.tally.exponents)[0])
    bars = [("zero", 0.0, zeros)] if zeros else []
    bars += [("bar", left(exponent), count) for exponent, count in counts.items()]
    for name, x, count in bars:
        height = min(_HEIGHT * np.log1p(count) / tallest, _HEIGHT)
        parts.append(
            f'<rect class="{name}" x="{x:.1f}" y="{_HEIGHT - height:.1f}" '
            f'width="{max(width - 0.6, 0.5):.1f}" height="{height:.1f}"/>'
        )
    for exponent, anchor in ((min(counts), "start"), (max(counts), "end")):
        x = left(exponent) + (width if anchor == "end" else 0)
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT + 10}" font-size="9" text-anchor="{anchor}">'
            f"{exponent}</text>"
        )
    return "".join([*parts, "</svg>"])


def _band(row: "Row") -> tuple[int, int] | None:
    """The exponents of the least and the largest number that the format holds."""
    if row.limits is None:
        return None
    scale = float(row.tally.largest_scale) or 1.0
    least, largest = (np.frexp(limit * scale)[1] - 1 for limit in row.limits)
    return int(least), int(largest)
