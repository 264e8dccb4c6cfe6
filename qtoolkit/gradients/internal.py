"""What the packages above need of gradients and users do not."""

from qtoolkit.gradients._learned import LEAST

__all__ = ["LEAST"]
