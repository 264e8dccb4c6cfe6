"""Which scale: x ~ q * scale. Block formats, quantized arrays. Derivative-free."""

from qtoolkit.scaling._amax import amax, quantized_values
from qtoolkit.scaling._calibration import AbsMax, MinMax, MovingAverage, Observer
from qtoolkit.scaling._equalization import cross_layer_factors, equalize, smoothing_factors
from qtoolkit.scaling._hadamard import hadamard_transform
from qtoolkit.scaling._histogram import MSE, Bins, Entropy, Percentile
from qtoolkit.scaling._metrics import Metrics, metrics, sqnr_db
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
from qtoolkit.scaling._scales import kept_range, scale_from_amax, scaled

__all__ = [
    "MSE",
    "AbsMax",
    "Bins",
    "Entropy",
    "Metrics",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Percentile",
    "QArray",
    "Rounder",
    "Scales",
    "amax",
    "block_values",
    "check_quantize",
    "cross_layer_factors",
    "equalize",
    "find_scales",
    "hadamard_transform",
    "in_dtype",
    "kept_range",
    "metrics",
    "quantize",
    "quantized_values",
    "scale_from_amax",
    "scaled",
    "scaled_values",
    "smoothing_factors",
    "sqnr_db",
]
