"""Loss curves, the errors of the tensors of a checkpoint, and figures without pyplot."""

import itertools
from collections.abc import Mapping, Sequence
from os import PathLike

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_STYLES = (
    *(("#1f4e79", "-"), ("#d1495b", "--"), ("#3b7a57", "-."), ("#7a5195", ":")),
    *(("#e08a00", "-"), ("#777777", "--")),
)


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
