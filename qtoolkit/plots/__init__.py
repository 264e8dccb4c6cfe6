"""Pictures. The only package that loads matplotlib (the `plots` extra)."""

from qtoolkit.plots._curves import loss_curves, weight_errors
from qtoolkit.plots._number_line import number_line

__all__ = ["loss_curves", "number_line", "weight_errors"]
