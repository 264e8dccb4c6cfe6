"""Pictures. The only package that loads matplotlib (the `plots` extra)."""

from qtoolkit.plots._curves import loss_curves, weight_errors

__all__ = ["loss_curves", "weight_errors"]
