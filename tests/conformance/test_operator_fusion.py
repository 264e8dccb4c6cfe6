"""Fusion of published operators with producers of their scales, shifts and limits.

Producers and comparison are those of ../test_fusion.py, which says what XLA does there and tests
the operators with constant parameters.
"""

import pytest
from public_functions import ANY, ranged, wide
from test_fusion import check, equal, halves

from qtoolkit import onnx, openvino

# Of data, scale and shift (or start and step) that all come from the same jit.
OF_THREE = {
    "onnx.quantize_linear": lambda x, s, z: onnx.quantize_linear(x, s[0]),
    "onnx.quantize_linear e5m2": lambda x, s, z: onnx.quantize_linear(
        x, s[0], onnx.cast(z[0], "FLOAT8E5M2")
    ),
    "onnx.dequantize_linear": lambda x, s, z: wide(
        onnx.dequantize_linear(onnx.cast(x, "INT8"), s[0], onnx.cast(z[0], "INT8"))
    ),
    **{
        f"openvino.fake_convert, {arithmetic}": lambda x, s, z, arithmetic=arithmetic: wide(
            openvino.fake_convert(x, s, z, arithmetic=arithmetic)
        )
        for arithmetic in ("exact", "openvino")
    },
    **{
        f"openvino.range {to}": lambda x, s, z, to=to: ranged(z[0, 0], s[0, 0], to)
        for to in ("f32", "f16", "u16")
    },
}
PRODUCERS = {
    "products": lambda a, b: (a + b, a[:1] * b[:1], a[1:2] * b[1:2]),
    "quotients": lambda a, b: (a * b, a[:1] / b[:1], a[1:2] / b[1:2]),
}


@pytest.mark.sample("onnx.quantize_linear-bfloat16")
@pytest.mark.parametrize("dtype", ANY, ids=str)
@pytest.mark.parametrize("name", OF_THREE)
def test_parameters_fused_with_their_producers(name, dtype):
    check(lambda made: OF_THREE[name](*made), PRODUCERS, halves(dtype), equal)
