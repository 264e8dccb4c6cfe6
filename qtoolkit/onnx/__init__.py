"""The casting and quantizing operators of ONNX, as its published pages say."""

from qtoolkit._names import hint_at_names
from qtoolkit.onnx._bit_cast import bit_cast
from qtoolkit.onnx._cast import cast, cast_like
from qtoolkit.onnx._quantize import dequantize_linear, dynamic_quantize_linear, quantize_linear
from qtoolkit.onnx._range import range
from qtoolkit.onnx._types import DataType

__all__ = [
    "DataType",
    "bit_cast",
    "cast",
    "cast_like",
    "dequantize_linear",
    "dynamic_quantize_linear",
    "quantize_linear",
    "range",
]

hint_at_names(__name__)
