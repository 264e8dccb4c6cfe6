"""Which scale: x ~ q * scale. Derivative-free."""

from qtoolkit.scaling._amax import amax, needs_scale, quantized_values, scale_from_amax, scaled

__all__ = ["amax", "needs_scale", "quantized_values", "scale_from_amax", "scaled"]
