"""The SQNR of every tensor of a checkpoint."""

from collections.abc import Mapping
from typing import Any

from qtoolkit.plots._curves import _STYLES, _figure

_MOST = 40  # tensors whose names are written
_LONGEST = 48  # characters of a name


def sqnr_by_tensor(decibels: Mapping[str, float], *, axes: Any = None) -> Any:
    """Draws a point for each tensor, in the order given, over its SQNR.

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
