"""Which scale: x ~ q * scale. Derivative-free."""

from qtoolkit.scaling._amax import amax, scale_from_amax, scaled

__all__ = ["amax", "scale_from_amax", "scaled"]
