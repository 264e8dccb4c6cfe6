"""What rounding does to every operand of a model, as a map of layers by operands."""

import math
from os import PathLike
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from qtoolkit.plots._curves import _save

_DECIBELS = (0.0, 40.0)  # the ends of the colour scale
_LEAST = 1e-4  # per cent, where the logarithmic scale of lost elements begins


def numerics_map(numerics: Any, path: str | PathLike[str]) -> None:
    """Write a PNG: SQNR in dB, and the percentages that saturated and that became zero.

    A row for each matmul, a column for each operand that is rounded in its own way. Grey: not
    measured, or not quantized.

    Args:
      numerics: A `Numerics`, or what has `rows` like it.

    Raises:
      ValueError: It has no rows.
    """
    rows = [row for row in numerics.rows if row.limits is not None]
    if not rows:
        raise ValueError(
            "numerics_map: nothing is rounded, expected a report with one rounded operand or more"
        )
    layers = list(dict.fromkeys(_layer(row) for row in rows))
    columns = list(dict.fromkeys(_column(row) for row in rows))
    columns.sort(key=_order)
    panels = [
        (f"SQNR, dB ({_DECIBELS[1]:g} and more: yellow)", "viridis", lambda tally: tally.sqnr_db),
        ("saturated, %", "Reds", lambda tally: 100 * tally.saturated_fraction),
        ("became zero, %", "Reds", lambda tally: 100 * tally.flushed_fraction),
    ]
    norms = [Normalize(*_DECIBELS), LogNorm(_LEAST, 100), LogNorm(_LEAST, 100)]
    widest = max(map(len, layers))
    figure = Figure(
        figsize=(2.2 + 0.08 * widest + 3 * (0.8 + 0.75 * len(columns)), 2.2 + 0.34 * len(layers)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    subplots = zip(figure.subplots(1, 3, sharey=True), panels, norms, strict=True)
    for place, (axes, (title, colours, value), norm) in enumerate(subplots):
        cells = np.full((len(layers), len(columns)), np.nan)
        for row in rows:
            if float(row.tally.uses):
                cells[layers.index(_layer(row)), columns.index(_column(row))] = value(row.tally)
        _draw(figure, axes, cells, colours, norm)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=35, ha="right")
        if not place:
            axes.set_yticks(range(len(layers)), layers, fontsize=8)
    _save(figure, path)


def _draw(figure: Figure, axes: Any, cells: np.ndarray, colours: str, norm: Any) -> None:
    axes.set_facecolor("#d9d9d9")
    finite = np.clip(cells, norm.vmin, norm.vmax)
    image = axes.imshow(finite, cmap=colours, norm=norm, aspect="auto")
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02).ax.tick_params(labelsize=7)
    for (i, j), value in np.ndenumerate(cells):
        if not math.isnan(value):
            # Light on dark: what colour lies under the text.
            red, green, blue, _ = image.cmap(norm(finite[i, j]))
            is_dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            axes.text(
                j, i, _cell(value), ha="center", va="center", fontsize=7,
                color="white" if is_dark else "black",
            )  # fmt: skip


def _cell(value: float) -> str:
    return f"{value:.1f}" if math.isinf(value) or value >= 10 else f"{value:.2g}"


def _layer(row: Any) -> str:
    return f"{row.path or '(model)'}:{row.product}"


def _column(row: Any) -> str:
    return f"{row.operand}, {row.parts.replace('forward', 'fwd')}"


def _order(column: str) -> tuple[int, str]:
    for place, name in enumerate(("lhs, fwd", "rhs, fwd", "cotangent, dgrad")):
        if column.startswith(name):
            return place, column
    return 3, column
