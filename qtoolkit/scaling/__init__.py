"""Which scale: x ~ q * scale. Block formats, quantized arrays. Derivative-free."""

from qtoolkit.scaling._amax import amax, quantized_values
from qtoolkit.scaling._qarray import QArray
from qtoolkit.scaling._quantize import check_quantize, quantize
from qtoolkit.scaling._rounding import (
    Rounder,
    Scales,
    block_values,
    find_scales,
    in_dtype,
    scaled_values,
)
from qtoolkit.scaling._scales import scale_from_amax, scaled

__all__ = [
    "QArray",
    "Rounder",
    "Scales",
    "amax",
    "block_values",
    "check_quantize",
    "find_scales",
    "in_dtype",
    "quantize",
    "quantized_values",
    "scale_from_amax",
    "scaled",
    "scaled_values",
]
