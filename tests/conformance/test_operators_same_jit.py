"""Published operators behind, and before, other code of the same jit: the bits of eager calls.

XLA widens a bfloat16 number that was made in the same jit without rounding it first, contracts
products and sums to one rounding, and leaves out what it can prove about signs and constants. The
oracle is the same operator on concrete arrays, which the other tests compare with the published
implementations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qtoolkit import onnx, openvino, pypto
from qtoolkit.pypto import CastMode

F32, F16, BF16 = "float32", "float16", "bfloat16"
HALF, ANY = (BF16, F16), (BF16, F16, F32)


def quantized(target, **options):
    """By a scale and a zero point that the same jit makes, too."""

    def function(x):
        scale = x[:, :1] * x[:, :1] + x.dtype.type(0.25)
        return onnx.quantize_linear(x, scale[:, 0], axis=0, output_dtype=target, **options)

    return function


def dequantized(x):
    codes, zero = onnx.quantize_linear(x, x[0, 0], output_dtype="INT8"), np.full(64, 3, np.int8)
    return onnx.dequantize_linear(codes, x[0] * x[1], zero, output_dtype=x.dtype)


def divided(x):
    return onnx.quantize_linear(x, x[0, 0], np.array(2, jnp.float8_e5m2), precision="FLOAT16")


def faked(destination, arithmetic, **options):
    def function(x):
        scale, shift = x[:1] * x[1:2], x[2:3] * x[3:4]
        options = {"destination_type": destination, "arithmetic": arithmetic}
        constant = openvino.fake_convert(x, 1.1, 0.3, **options)
        return (
            openvino.fake_convert(x, scale, **options),
            constant,
            openvino.fake_convert(x, scale, shift, **options),
        )

    return function


def ranged(output_type):
    def function(x):
        start, step = x[0, 0] * x[0, 1], x[1, 0] * x[1, 1]
        return openvino.range(start, 0, step, output_type=output_type, length=999)

    return function


def promoted(x):
    other = np.ones(3, jnp.float16 if x.dtype == jnp.bfloat16 else jnp.bfloat16)
    return openvino.convert_promote_types(x, other, promote_unsafe=True)[0]


CASES = {
    "onnx.cast e4m3fn": (lambda x: onnx.cast(x, "FLOAT8E4M3FN"), ANY),
    "onnx.cast e8m0": (lambda x: onnx.cast(abs(x), "FLOAT8E8M0", saturate=False), ANY),
    "onnx.cast float": (lambda x: onnx.cast(x, "FLOAT"), HALF),
    "onnx.cast int4": (lambda x: onnx.cast(x, "INT4"), ANY),
    "onnx.cast_like int32": (lambda x: onnx.cast_like(x, np.int32(0)), ANY),
    "onnx.quantize_linear int8": (quantized("INT8"), ANY),
    "onnx.quantize_linear e5m2": (quantized("FLOAT8E5M2", saturate=False), ANY),
    "onnx.quantize_linear precision": (divided, ANY),
    "onnx.dequantize_linear": (dequantized, ANY),
    "onnx.dynamic_quantize_linear": (onnx.dynamic_quantize_linear, (F32,)),
    "onnx.bit_cast": (
        lambda x: onnx.bit_cast(x, f"UINT{8 * x.dtype.itemsize}"),
        ANY,
    ),
    "openvino.convert f8e4m3": (lambda x: openvino.convert(x, "f8e4m3"), ANY),
    "openvino.convert i16": (lambda x: openvino.convert(x, "i16"), ANY),
    **{
        f"openvino.convert {to}, core": (
            lambda x, to=to: openvino.convert(x, to, arithmetic="openvino"),
            ANY,
        )
        for to in ("f8e4m3", "f8e5m2", "bf16", "f16", "f32")
    },
    **{
        f"openvino.fake_convert {to}, {arithmetic}": (faked(to, arithmetic), ANY)
        for to in ("f8e4m3", "f8e5m2")
        for arithmetic in ("exact", "openvino")
    },
    "openvino.convert_promote_types": (promoted, HALF),
    **{f"openvino.range {to}": (ranged(to), ANY) for to in ("f16", "bf16", "f32", "i16")},
    "pypto.cast fp32": (lambda x: pypto.cast(x, "DT_FP32"), HALF),
    "pypto.cast int32": (lambda x: pypto.cast(x, "DT_INT32", CastMode.CAST_CEIL), ANY),
    "pypto.cast fp4": (lambda x: pypto.cast(x, "DT_FP4_E2M1X2", extended=True), (BF16,)),
    "pypto.cast integral": (
        lambda x: pypto.cast(x, "DT_FP32", CastMode.CAST_FLOOR, extended=True),
        (F32,),
    ),
}


def carried(a, b):
    def step(carry, row):
        carry = carry + row
        return carry, carry

    return jax.lax.scan(step, b[0], a)[1]


FLOATS = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "gelu": lambda a, b: jax.nn.gelu(a),
    "exp": lambda a, b: jnp.exp(a),
    "quotient": lambda a, b: a / b,
    "scan": carried,
}
# What LLVM knows the sign of, or XLA the value.
KNOWN = {
    "uint8": lambda a, b: jnp.round(jnp.abs(a)).astype(jnp.uint8).astype(a.dtype),
    "uint16": lambda a, b: jnp.round(jnp.abs(a) * 9).astype(jnp.uint16).astype(a.dtype),
    "arange": lambda a, b: jnp.arange(a.size).reshape(a.shape).astype(a.dtype) + 1,
    "abs": lambda a, b: jnp.abs(a),
    "constant": lambda a, b: jnp.full(a.shape, 1.3, a.dtype),
}


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, (_, ds) in CASES.items() for d in ds])
def test_in_one_jit_as_eager(name, dtype):
    rng = np.random.default_rng(5)
    a, b = (jnp.asarray(rng.normal(0, 8, (64, 64)), dtype) for _ in range(2))
    function, _ = CASES[name]

    def used(x, b):
        """The results and, of floats, a sum that must not fuse with what made them."""
        found = jax.tree.leaves(function(x))
        return found + [
            y + jnp.resize(b, y.shape).astype(y.dtype) for y in found if y.dtype in (F32, BF16, F16)
        ]

    producers = FLOATS | KNOWN
    together = jax.jit(lambda a, b: {n: used(make(a, b), b) for n, make in producers.items()})(a, b)
    for producer, make in producers.items():
        apart = used(jax.jit(make)(a, b), b)
        for i, (got, expected) in enumerate(zip(together[producer], apart, strict=True)):
            np.testing.assert_array_equal(
                bits(got), bits(expected), err_msg=f"{name} behind {producer}, result {i}"
            )
