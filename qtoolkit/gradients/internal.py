"""What the packages above need of gradients and users do not."""

from qtoolkit.gradients._linear import varying_alike

__all__ = ["varying_alike"]
