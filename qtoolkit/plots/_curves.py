"""Loss curves, the errors of the tensors of a checkpoint, and figures without pyplot."""

import itertools
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_STYLES = (
    *(("#1f4e79", "-"), ("#d1495b", "--"), ("#3b7a57", "-."), ("#7a5195", ":")),
    *(("#e08a00", "-"), ("#777777", "--")),
)
_MOST = 40  # tensors whose names are written
_LONGEST = 48  # characters of a name


def loss_curves(
    path: str | PathLike[str],
    steps: Sequence[int],
    curves: Mapping[str, Sequence[float]],
    gap_to: str | None = None,
) -> None:
    """Write a PNG with one curve for each entry of `curves`, in bits per byte, over `steps`.

    Args:
      path: Of the file.
      steps: What is on the horizontal axis.
      curves: Names and losses, as many as there are steps.
      gap_to: Name of a curve; a panel below shows how far the others are from it, in percent, on an
        axis that is linear up to 1 % and logarithmic above.

    Examples:
      >>> curves = {"float32": [8.0, 5.0, 4.0], "e4m3fn": [8.0, 5.1, 4.1]}
      >>> qt.plots.loss_curves("losses.png", [0, 100, 200], curves, gap_to="float32")
    """
    figure, upper = _figure(7.0, 4.2 if gap_to is None else 6.2, 1 if gap_to is None else 2)
    axes, *below = upper
    styles = dict(zip(curves, itertools.cycle(_STYLES), strict=False))
    for name, (colour, dashes) in styles.items():
        losses = curves[name]
        axes.plot(
            steps, losses, dashes, color=colour, linewidth=1.8, label=f"{name}: {losses[-1]:.3f}"
        )
    axes.set_ylabel("validation loss, bits per byte")
    axes.legend(frameon=False, title="last evaluation")
    for panel in below:
        for name, (colour, dashes) in styles.items():
            gaps = [
                100 * (loss / reference - 1)
                for loss, reference in zip(curves[name], curves[gap_to or name], strict=True)
            ]
            panel.plot(steps, gaps, dashes, color=colour, linewidth=1.8)
        panel.set_yscale("symlog", linthresh=1.0)
        panel.yaxis.set_major_formatter(lambda gap, _: f"{gap:g} %")
        panel.set_ylabel(f"gap to {gap_to}")
    upper[-1].set_xlabel("step")
    _save(figure, path)


def sqnr_by_tensor(decibels: Mapping[str, float], *, axes: Any = None) -> Any:
    """Draw a point for each tensor, in the order given, over its SQNR.

    Args:
      decibels: Finite SQNR by the name of the tensor. Of more than 40 only the lowest 40 are drawn.
      axes: The matplotlib Axes to draw on; None for those of a new figure.

    Returns:
      The Axes, not written anywhere: `axes.figure.savefig(path)`.

    Raises:
      ValueError: There are none.

    Examples:
      >>> axes = qt.plots.sqnr_by_tensor({"up": 31.5, "down": 31.6})
      >>> [label.get_text() for label in axes.get_yticklabels()]
      ['up', 'down']
      >>> axes.figure.savefig("sqnr.png")
    """
    if not decibels:
        raise ValueError("sqnr_by_tensor: no tensors, expected one or more")
    lowest = set(sorted(decibels, key=lambda name: decibels[name])[:_MOST])
    points = {name: value for name, value in decibels.items() if name in lowest}
    if axes is None:
        _, (axes,) = _figure(8.0, 1.4 + 0.22 * len(points))
    places = list(range(len(points)))
    axes.plot(list(points.values()), places, "o", color=_STYLES[0][0], markersize=4.5)
    axes.set_yticks(places, [_short(name) for name in points], fontsize=7)
    axes.set_ylim(len(points) - 0.5, -0.5)  # the first one on top
    axes.set_xlabel("SQNR in dB")
    rest = len(decibels) - len(points)
    axes.set_title(f"The {len(points)} lowest of {len(decibels)} tensors" if rest else "")
    return axes


def _short(name: str) -> str:
    """A name for an axis: the end says more; a dollar sign would begin a formula."""
    text = name if name.isprintable() else ascii(name)
    text = text if len(text) <= _LONGEST else "..." + text[3 - _LONGEST :]
    return text.replace("$", r"\$")


def _figure(width: float, height: float, panels: int = 1):  # type: ignore[no-untyped-def]
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no window system, and no global state of pyplot
    ratios = [2, *[1] * (panels - 1)]
    column = figure.subplots(panels, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes in column:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    return figure, column


def _save(figure: Figure, path: str | PathLike[str]) -> None:
    figure.savefig(path, dpi=150, format="png")
