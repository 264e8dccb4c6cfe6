"""FP8-aware training of Flax linen modules, without editing them."""

from qtoolkit._names import hint_at_names
from qtoolkit.linen._allocation import allocate
from qtoolkit.linen._flow import (
    calibrate,
    freeze,
    input_scales,
    numerics,
    sensitivity,
    start_scales,
)
from qtoolkit.linen._layers import FakeConvert, Fp8Conv, Fp8Dense, Fp8Einsum
from qtoolkit.linen._quantize import quantize
from qtoolkit.linen._report import report
from qtoolkit.linen._training import value_and_grad
from qtoolkit.linen._wrap import wrap

__all__ = [
    "FakeConvert",
    "Fp8Conv",
    "Fp8Dense",
    "Fp8Einsum",
    "allocate",
    "calibrate",
    "freeze",
    "input_scales",
    "numerics",
    "quantize",
    "report",
    "sensitivity",
    "start_scales",
    "value_and_grad",
    "wrap",
]

hint_at_names(__name__)
