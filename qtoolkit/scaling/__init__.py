"""Chooses scales, x ~ q * scale, and quantizes arrays in blocks. Nothing here has derivatives."""

from qtoolkit._names import hint_at_names
from qtoolkit.scaling._blocks import amax
from qtoolkit.scaling._calibration import AbsMax, MinMax, MovingAverage
from qtoolkit.scaling._gptq import gptq
from qtoolkit.scaling._hadamard import hadamard_transform
from qtoolkit.scaling._hessian import Hessian
from qtoolkit.scaling._histogram import MSE, Bins, Percentile
from qtoolkit.scaling._metrics import Metrics, metrics, sqnr_db
from qtoolkit.scaling._qarray import QArray
from qtoolkit.scaling._quantize import quantize

__all__ = [
    "MSE",
    "AbsMax",
    "Bins",
    "Hessian",
    "Metrics",
    "MinMax",
    "MovingAverage",
    "Percentile",
    "QArray",
    "amax",
    "gptq",
    "hadamard_transform",
    "metrics",
    "quantize",
    "sqnr_db",
]

hint_at_names(__name__)
