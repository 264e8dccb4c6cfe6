"""Pictures. The only package that loads matplotlib (the `plots` extra)."""

try:
    import matplotlib as mpl  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "qtoolkit.plots: matplotlib is not installed; write pip install matplotlib",
        name=error.name,
    ) from error

from qtoolkit._names import hint_at_names
from qtoolkit.plots._curves import loss_curves
from qtoolkit.plots._errors import error_against_magnitude
from qtoolkit.plots._histograms import code_histogram
from qtoolkit.plots._number_line import number_line

__all__ = [
    "code_histogram",
    "error_against_magnitude",
    "loss_curves",
    "number_line",
]

hint_at_names(__name__)
