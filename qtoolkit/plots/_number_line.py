"""Draw the values of formats as ticks on a line."""

from fractions import Fraction
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qtoolkit.formats import FloatFormat, Format, FormatLike, format
from qtoolkit.plots._curves import _figure

_COLOURS = {"normal": "#1f4e79", "subnormal": "#d1495b", "zero": "#222222"}


def number_line(
    fmts: FormatLike | tuple[FormatLike, ...] | list[Any],
    *,
    scale: Literal["symlog", "linear"] = "symlog",
) -> Figure:
    """Draw every finite value of one format, or of several formats in rows.

    Args:
      fmts: A format, or a spelling of one (see `qtoolkit.format`), or a sequence of them, each of
        at most 16 bits.
      scale: The scale of the axis, "linear" or "symlog". "symlog" is logarithmic, except between 0
        and the smallest positive value of the formats, where it is linear.

    Returns:
      The figure; `figure.savefig(path)` writes it to a file.

    Raises:
      ValueError: There is no format, a format has more than 16 bits, or `scale` is unknown.

    Examples:
      >>> figure = qt.plots.number_line(["e4m3fn", "e5m2"])
      >>> figure.savefig("fp8.png")
      >>> [label.get_text().split() for label in figure.axes[0].get_yticklabels()]
      [['e4m3fn', '253', 'values'], ['e5m2', '247', 'values']]
    """
    if scale not in ("symlog", "linear"):
        raise ValueError(f"number_line: scale={scale!r}, expected 'symlog' or 'linear'")
    resolved = [format(f) for f in (fmts if isinstance(fmts, list | tuple) else [fmts])]
    if not resolved:
        raise ValueError("number_line: no formats, expected one or more")
    figure, (axes,) = _figure(9.0, 1.5 + 0.62 * len(resolved))
    kinds = set()
    for row, fmt in enumerate(resolved):
        for kind, values in _values(fmt).items():
            axes.vlines(values, row - 0.3, row + 0.3, color=_COLOURS[kind], linewidth=0.8)
            if len(values):
                kinds.add(kind)
    axes.set_yticks(
        range(len(resolved)), [f"{f.name}\n{f.finite_count:,} values" for f in resolved]
    )
    axes.set_ylim(len(resolved) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    if scale == "symlog":
        _symlog_axis(
            axes,
            min(fmt.min_positive for fmt in resolved),
            max(max(fmt.max_finite, -fmt.lowest) for fmt in resolved),
            negative=any(fmt.lowest < 0 for fmt in resolved),
        )
    handles = [
        Line2D([], [], color=colour, marker="|", linestyle="", markersize=11, label=kind)
        for kind, colour in _COLOURS.items()
        if kind in kinds
    ]
    figure.legend(handles=handles, frameon=False, ncols=len(handles), loc="outside upper right")
    return figure


def _values(fmt: Format) -> dict[str, np.ndarray]:
    """The finite values of each kind; only float formats have subnormal values."""
    values = fmt.values()
    values = np.unique(values[np.isfinite(values)])
    least = float(fmt.min_normal) if isinstance(fmt, FloatFormat) else 0.0
    size = np.abs(values)
    return {
        "normal": values[(size >= least) & (size > 0)],
        "subnormal": values[(size < least) & (size > 0)],
        "zero": values[size == 0],
    }


def _symlog_axis(axes: Any, smallest: Fraction, largest: Fraction, *, negative: bool) -> None:
    """Set a logarithmic axis with about six labels, all at powers of two, and room for "0"."""
    first, last = np.frexp([float(smallest), float(largest)])[1] - 1
    span = int(last - first)
    # `linscale` is the width of the linear part in powers of two: room for the label "0".
    axes.set_xscale("symlog", base=2, linthresh=float(smallest), linscale=max(1.0, span / 16))
    step = max(1, -(-span // 6))
    exponents = [e for e in range(first, last + 1) if e % step == 0]
    ticks = {sign * 2.0**e: f"{'-' * (sign < 0)}2^{{{e}}}" for e in exponents for sign in (-1, 1)}
    axes.set_xticks([0.0, *ticks], ["0", *(f"${label}$" for label in ticks.values())])
    axes.set_xticks([], minor=True)
    # A margin after the largest value, but at most what float64 holds.
    end = 2.0 ** min(last + 1 + span / 30, 1023.9)
    axes.set_xlim(-end if negative else -float(smallest) / 2, end)
