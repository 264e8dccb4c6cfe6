"""Chooses scales, x ~ q * scale, and quantizes arrays in blocks. Nothing here has derivatives."""

from qtoolkit._names import hint_at_names
from qtoolkit.scaling._awq import awq_factors
from qtoolkit.scaling._blocks import amax
from qtoolkit.scaling._calibration import AbsMax, MinMax, MovingAverage
from qtoolkit.scaling._gptq import gptq
from qtoolkit.scaling._hadamard import hadamard_transform
from qtoolkit.scaling._hessian import Hessian
from qtoolkit.scaling._histogram import MSE, Bins, Percentile
from qtoolkit.scaling._history import AmaxHistory
from qtoolkit.scaling._metrics import Metrics, sqnr_db
from qtoolkit.scaling._metrics_table import MetricsTable, metrics
from qtoolkit.scaling._observer import Observer
from qtoolkit.scaling._qarray import QArray
from qtoolkit.scaling._quantize import quantize
from qtoolkit.scaling._scales import scale_from_amax
from qtoolkit.scaling._smoothing import smoothing_factors
from qtoolkit.scaling._tally import Tally

__all__ = [
    "MSE",
    "AbsMax",
    "AmaxHistory",
    "Bins",
    "Hessian",
    "Metrics",
    "MetricsTable",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Percentile",
    "QArray",
    "Tally",
    "amax",
    "awq_factors",
    "gptq",
    "hadamard_transform",
    "metrics",
    "quantize",
    "scale_from_amax",
    "smoothing_factors",
    "sqnr_db",
]

hint_at_names(__name__)
