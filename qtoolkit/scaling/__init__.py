"""Which scale: x ~ q * scale. Derivative-free."""

from qtoolkit.scaling._amax import amax, quantized_values, scale_from_amax, scaled

__all__ = ["amax", "quantized_values", "scale_from_amax", "scaled"]
