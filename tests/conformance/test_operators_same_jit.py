"""Published operators on values made in the same jit: as on the same values as arguments.

Producers, consumer and comparison are those of ../test_same_jit.py, which says what XLA does there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_same_jit import HALF_PRODUCERS, KNOWN_PRODUCERS, check, equal, halves, known, wide

from qtoolkit import onnx, openvino, pypto
from qtoolkit.pypto import CastMode

F32, F16, BF16 = (np.dtype(d) for d in (jnp.float32, jnp.float16, jnp.bfloat16))
HALF, ANY = (BF16, F16), (BF16, F16, F32)


def dequantized(x):
    """Codes by a scale and a zero point that the compiler knows."""
    codes = onnx.cast(x, "UINT8")
    return wide(onnx.dequantize_linear(codes, x.dtype.type(1.1), np.uint8(3)))


def promoted(x):
    other = np.ones(3, F16 if x.dtype == BF16 else BF16)
    return openvino.convert_promote_types(x, other, promote_unsafe=True)[0]


@functools.partial(jax.jit, static_argnums=2)  # concrete arguments would say how many elements
def ranged(start, step, to):
    return openvino.range(start, 0, step, output_type=to, length=999)


OF_ONE = {
    "onnx.cast": (lambda x: onnx.cast(x, "FLOAT8E4M3FN"), HALF),
    "onnx.cast float": (lambda x: wide(onnx.cast(x, "FLOAT")), HALF),
    "onnx.cast e8m0": (lambda x: onnx.cast(x, "FLOAT8E8M0", saturate=False), (BF16,)),
    "onnx.cast_like": (lambda x: onnx.cast_like(x, np.int32(0)), HALF),
    "onnx.quantize_linear": (lambda x: onnx.quantize_linear(x, x.dtype.type(0.03)), ANY),
    "onnx.quantize_linear precision": (
        lambda x: onnx.quantize_linear(x, np.float32(0.03), np.int8(3), precision="FLOAT16"),
        (BF16, F32),
    ),
    "onnx.quantize_linear e5m2": (
        lambda x: onnx.quantize_linear(x, x.dtype.type(1.1), np.array(2, jnp.float8_e5m2)),
        (BF16, F32),
    ),
    "onnx.dequantize_linear": (dequantized, ANY),
    "onnx.dynamic_quantize_linear": (onnx.dynamic_quantize_linear, (F32,)),
    "onnx.bit_cast": (lambda x: onnx.bit_cast(x, f"UINT{8 * x.dtype.itemsize}"), HALF),
    "openvino.convert": (lambda x: openvino.convert(x, "f8e4m3"), HALF),
    **{
        f"openvino.convert {to}, core": (
            lambda x, to=to: openvino.convert(x, to, arithmetic="openvino"),
            ANY,
        )
        for to in ("f8e4m3", "f8e5m2", "bf16", "f32")
    },
    **{
        f"openvino.fake_convert {to}, {arithmetic}": (
            lambda x, to=to, arithmetic=arithmetic: wide(
                openvino.fake_convert(x, 1.1, 0.3, destination_type=to, arithmetic=arithmetic)
            ),
            ANY,
        )
        for to, arithmetic in (("f8e4m3", "exact"), ("f8e4m3", "openvino"), ("f8e5m2", "openvino"))
    },
    "openvino.convert_promote_types": (promoted, HALF),
    "openvino.range": (lambda x: wide(ranged(x[0, 0], x[0, 1], "bf16")), ANY),
    "pypto.cast": (lambda x: pypto.cast(x, "DT_FP32"), HALF),
    "pypto.cast int32": (lambda x: pypto.cast(x, "DT_INT32", CastMode.CAST_CEIL), HALF),
    "pypto.cast fp4": (lambda x: pypto.cast(x, "DT_FP4_E2M1X2", extended=True), (BF16,)),
    "pypto.cast integral": (
        lambda x: wide(pypto.cast(x, "DT_FP32", CastMode.CAST_FLOOR, extended=True)),
        (F32,),
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n, (_, dtypes) in OF_ONE.items() for d in dtypes], ids=str
)
def test_values_made_in_the_same_jit(name, dtype):
    function, _ = OF_ONE[name]
    if dtype == F32:
        check(function, KNOWN_PRODUCERS, known(), equal)
    else:
        check(function, HALF_PRODUCERS, halves(dtype), equal)


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ANY, ids=str)
@pytest.mark.parametrize("name", OF_THREE)
def test_parameters_made_in_the_same_jit(name, dtype):
    check(lambda made: OF_THREE[name](*made), PRODUCERS, halves(dtype), equal)
