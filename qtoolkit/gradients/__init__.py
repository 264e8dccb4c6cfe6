"""Derivatives of rounding: estimators, rounded cotangents, and differentiable casts."""

from qtoolkit._names import hint_at_names
from qtoolkit.casts.internal import linear_with_transpose
from qtoolkit.gradients._cotangent import round_cotangent
from qtoolkit.gradients._estimators import Estimator, Ramp
from qtoolkit.gradients._fake_cast import fake_cast
from qtoolkit.gradients._fake_convert import fake_convert
from qtoolkit.gradients._fake_quantize import fake_quantize
from qtoolkit.gradients._learned import lsq, lsq_plus, lsq_scale

__all__ = [
    "Estimator",
    "Ramp",
    "fake_cast",
    "fake_convert",
    "fake_quantize",
    "linear_with_transpose",
    "lsq",
    "lsq_plus",
    "lsq_scale",
    "round_cotangent",
]

hint_at_names(__name__)
