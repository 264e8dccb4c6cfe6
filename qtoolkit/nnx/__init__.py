"""FP8-aware training of Flax nnx models, without editing them."""

from qtoolkit.nnx._layers import FakeConvert, Fp8Conv, Fp8Einsum, Fp8Linear
from qtoolkit.nnx._numerics import numerics
from qtoolkit.nnx._report import report
from qtoolkit.nnx._serialization import register
from qtoolkit.nnx._state import Probe, ScalingState, roll, value_and_grad
from qtoolkit.nnx._wrap import wrap

register()

__all__ = [
    "FakeConvert",
    "Fp8Conv",
    "Fp8Einsum",
    "Fp8Linear",
    "Probe",
    "ScalingState",
    "numerics",
    "report",
    "roll",
    "value_and_grad",
    "wrap",
]
