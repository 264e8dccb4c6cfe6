"""FP8-aware training of Flax nnx models, without editing them."""

from qtoolkit._names import hint_at_names
from qtoolkit.nnx._allocation import allocate
from qtoolkit.nnx._flow import calibrate, freeze, numerics, sensitivity, start_scales
from qtoolkit.nnx._layers import FakeConvert, Fp8Conv, Fp8Einsum, Fp8Linear
from qtoolkit.nnx._quantize import quantize
from qtoolkit.nnx._report import report
from qtoolkit.nnx._scales import input_scales
from qtoolkit.nnx._state import LsqOffset, LsqScale, Probe, ScalingState
from qtoolkit.nnx._training import roll, value_and_grad
from qtoolkit.nnx._wrap import wrap

__all__ = [
    "FakeConvert",
    "Fp8Conv",
    "Fp8Einsum",
    "Fp8Linear",
    "LsqOffset",
    "LsqScale",
    "Probe",
    "ScalingState",
    "allocate",
    "calibrate",
    "freeze",
    "input_scales",
    "numerics",
    "quantize",
    "report",
    "roll",
    "sensitivity",
    "start_scales",
    "value_and_grad",
    "wrap",
]

hint_at_names(__name__)
