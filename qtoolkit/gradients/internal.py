"""What the packages above need of gradients and users do not."""

from qtoolkit.gradients._learned import LEAST
from qtoolkit.gradients._widths import differentiable_in_dtype, differentiable_widened

__all__ = ["LEAST", "differentiable_in_dtype", "differentiable_widened"]
