"""QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear.

Oracle: the page's formulas in numpy, whose float32 and float16 operations are IEEE's, and in
integers; casts of quotients by onnx_oracle.py.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from each import each
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from onnx_oracle import DTYPES, FLOAT8, INTEGERS, codes, expected, wide
from refused import refused

from qtoolkit.onnx import dequantize_linear, dynamic_quantize_linear, quantize_linear

BF16 = np.dtype(ml_dtypes.bfloat16)
INTEGER_OUTPUTS = [name for name, (_, bits) in INTEGERS.items() if bits <= 16]
FLOAT_OUTPUTS = (*FLOAT8, "FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2")


def divided(x, scale, dtype):
    """IEEE division in `dtype`; bfloat16's through float32's, which rounds as the exact one."""
    with np.errstate(all="ignore"):
        if np.dtype(dtype) == BF16:
            return (np.float32(x) / np.float32(scale)).astype(BF16).astype(np.float64)
        return (x.astype(dtype) / scale.astype(dtype)).astype(np.float64)


def quantized(quotient, zero, name):
    lowest, bits = INTEGERS[name]
    whole = np.rint(np.where(np.isnan(quotient), 0, np.clip(quotient, -1e9, 1e9)))
    return np.clip(whole + np.asarray(zero, np.float64), lowest, lowest + 2**bits - 1)


def numbers(dtype, size=4096):
    rng = np.random.default_rng(11)
    x = np.concatenate([rng.normal(0, 30, size), rng.integers(-400, 400, size) / 2, [1e10, -1e10]])
    x = np.concatenate([x, [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e5, -7e4]])
    with np.errstate(over="ignore"):
        return x.astype(dtype)


@pytest.mark.sample("INT2-float32", "UINT2-float16")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("name", INTEGER_OUTPUTS)
def test_integers_by_tensor(name, dtype):
    x = numbers(dtype)
    lowest, bits = INTEGERS[name]
    for scale in (0.5, 0.3, 7.0):
        scale = np.array(scale, dtype)
        quotient = divided(x, scale, dtype)
        for zero in (None, 1, lowest, lowest + 2**bits - 1):
            point = None if zero is None else np.array(zero, DTYPES[name])
            words = {"output_dtype": name} if zero is None else {}
            got = np.asarray(quantize_linear(x, scale, point, **words))
            assert got.dtype == DTYPES[name]
            np.testing.assert_array_equal(
                got.astype(np.float64), quantized(quotient, zero or 0, name)
            )


@pytest.mark.sample("True-FLOAT8E4M3FN", "True-FLOAT6E2M3", "False-FLOAT6E3M2")
@pytest.mark.parametrize("name", FLOAT_OUTPUTS)
@pytest.mark.parametrize("saturate", [True, False])
def test_floats_are_casts_of_the_quotient(name, saturate):
    x = numbers(np.float32)
    scale = np.float32(0.3)
    quotient = divided(x, scale, np.float32)
    for opset in (28, 23, 19):
        if opset < 28 and name not in FLOAT8:
            continue
        wanted = expected(quotient, name, saturate=saturate, opset=opset)
        zero = np.zeros((), DTYPES[name])
        got = quantize_linear(x, scale, zero, saturate=saturate, opset=opset)
        np.testing.assert_array_equal(codes(got, name), wanted)


def test_a_zero_point_of_a_float_type_is_added():
    x, scale = np.float32([-3, 1, 1.25, 500]), np.float32(1)
    got = quantize_linear(x, scale, np.array(2, ml_dtypes.float8_e4m3fn))
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), [-1, 3, 3.25, 448])
    back = dequantize_linear(got, scale, np.array(2, ml_dtypes.float8_e4m3fn))
    np.testing.assert_array_equal(back, [-3, 1, 1.25, 446])


@pytest.mark.sample("INT8")
@pytest.mark.parametrize("name", ["INT8", "UINT4", "FLOAT8E4M3FN"])
def test_granularities_eager_and_jitted(name):
    rng = np.random.default_rng(4)
    x = rng.normal(0, 20, (3, 5, 4)).astype(np.float32)
    shapes = {
        # axis, block_size: shape of the scales
        (0, 0): (3,),
        (1, 0): (5,),
        (-1, 0): (4,),
        (1, 2): (3, 3, 4),
        (2, 4): (3, 5, 1),
        (-3, 2): (2, 5, 4),
        (1, 1): (3, 5, 4),
        (1, 99): (3, 1, 4),
        (7, 0): (1,),
        (-9, 3): (),
    }
    for (axis, block), shape in shapes.items():
        scale = rng.uniform(0.2, 3, shape).astype(np.float32)
        zero = rng.integers(0, 4, shape).astype(np.float32)
        zero = (zero if name in INTEGERS else zero * 0).astype(DTYPES[name])
        wide_scale, wide_zero = scale, zero.astype(np.float32)
        if len(shape) == 1 and shape != (1,):
            form = [1, 1, 1]
            form[axis] = -1
            wide_scale, wide_zero = scale.reshape(form), wide_zero.reshape(form)
        elif block and shape:
            axis_ = axis % 3
            wide_scale, wide_zero = (
                np.take(v.repeat(block, axis_), range(x.shape[axis_]), axis_)
                for v in (scale, wide_zero)
            )
        words = {"axis": axis, "block_size": block}
        got = quantize_linear(x, scale, zero, **words)
        quotient = divided(x, np.broadcast_to(wide_scale, x.shape), np.float32)
        if name in INTEGERS:
            wanted = quantized(quotient, np.broadcast_to(wide_zero, x.shape), name)
        else:
            wanted = expected(quotient, name)
        np.testing.assert_array_equal(codes(got, name), wanted)
        if (axis, block) in ((0, 0), (1, 2)):
            jitted = jax.jit(functools.partial(quantize_linear, **words))
            np.testing.assert_array_equal(codes(jitted(x, scale, zero), name), wanted)
        back = dequantize_linear(got, scale, zero, **words)
        difference = np.asarray(got).astype(np.float32) - wide_zero
        np.testing.assert_array_equal(back, difference * wide_scale)


def test_precision_of_the_division():
    """Of the scale's type; of `precision`, to which both are converted first; of float32."""
    x = numbers(np.float32, 512)
    scale16 = np.array(0.3, np.float16)
    exact = x / np.float32(scale16)
    with np.errstate(over="ignore"):
        narrow = exact.astype(np.float16).astype(np.float64)
    got = quantize_linear(x, scale16)
    np.testing.assert_array_equal(got, quantized(narrow, 0, "UINT8"))
    got = quantize_linear(x, scale16, precision="FLOAT")
    np.testing.assert_array_equal(got, quantized(exact.astype(np.float64), 0, "UINT8"))
    scale = np.float32(0.3)
    for precision, dtype in (("FLOAT16", np.float16), ("BFLOAT16", BF16), (10, np.float16)):
        with np.errstate(over="ignore"):
            operands = x.astype(dtype), scale.astype(dtype)
        wanted = quantized(divided(*operands, dtype), 0, "INT16")
        got = quantize_linear(x, scale, precision=precision, output_dtype="INT16")
        np.testing.assert_array_equal(got, wanted)
    # A million by ten thousand: float16 would hold neither the one nor, as a tie, the answer.
    assert quantize_linear(np.float32([1e6]), np.float16([1e4])) == 100


@pytest.mark.parametrize("exponent", [-127, -126, -3, 0, 5, 127])
def test_scales_of_e8m0_are_exact(exponent):
    scale = np.array(2.0**exponent).astype(ml_dtypes.float8_e8m0fnu)
    rng = np.random.default_rng(5)
    x = np.ldexp(rng.normal(0, 3, 999), np.clip(exponent + 3, -120, 120)).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        quotient = np.ldexp(x.astype(np.float64), -exponent).astype(np.float32)
    got = quantize_linear(x, scale, output_dtype="INT8")
    np.testing.assert_array_equal(got, quantized(quotient.astype(np.float64), 0, "INT8"))
    q = np.arange(-128, 128, dtype=np.int8)
    with np.errstate(over="ignore"):
        product = np.ldexp(q.astype(np.float64), exponent).astype(np.float32)
    got = np.asarray(dequantize_linear(q, scale, output_dtype="FLOAT"))
    np.testing.assert_array_equal(got.view(np.uint32), product.view(np.uint32))
    got = np.asarray(dequantize_linear(q, scale, output_dtype="BFLOAT16"))
    with np.errstate(over="ignore"):
        wanted = product.astype(BF16)
    np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16))


def test_nan_scales_of_e8m0():
    nan = np.array(0xFF, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    assert np.isnan(dequantize_linear(np.int8([1]), nan, output_dtype="FLOAT")).all()
    assert quantize_linear(np.float32([1]), nan, np.uint8(7)) == 7


def test_integers_are_quantized_from_float32():
    x = np.int32([0, 1, -5, 1000, 2**24 + 1, -(2**31)])
    for scale in (np.float32(3), np.int32(3)):
        wanted = quantized(divided(x.astype(np.float32), np.float32(3), np.float32), 0, "INT8")
        np.testing.assert_array_equal(quantize_linear(x, scale, np.int8(0)), wanted)


@pytest.mark.sample("INT2-float32", "UINT2-float16", "FLOAT8E5M2FNUZ-float16")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("name", [*INTEGER_OUTPUTS, *FLOAT_OUTPUTS])
def test_dequantize_every_code(name, dtype):
    if name in INTEGERS:
        lowest, bits = INTEGERS[name]
        q = np.arange(lowest, lowest + 2**bits).astype(DTYPES[name])
    else:
        bits = {"FLOAT4E2M1": 4, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}.get(name, 8)
        q = np.arange(2**bits, dtype=np.uint8).view(DTYPES[name])
    scale = np.array(0.3, dtype)
    zero = np.array(1 if name in INTEGERS else 0, DTYPES[name])
    difference = wide(q) - wide(zero)
    with np.errstate(over="ignore", invalid="ignore"):
        product = difference.astype(np.float32) * scale.astype(np.float32)
        wanted = {"": product.astype(dtype), "FLOAT16": product.astype(np.float16)}
    for output, value in wanted.items():
        got = np.asarray(dequantize_linear(q, scale, zero, output_dtype=output or None))
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got.astype(np.float32), value.astype(np.float32))
        signs = np.signbit(got), np.signbit(value)
        number = ~np.isnan(value.astype(np.float32))
        np.testing.assert_array_equal(signs[0][number], signs[1][number])


def test_dequantize_int32_through_float32():
    x = np.int32([2**24 + 1, -(2**31), 7])
    for zero in (None, np.int32(0), np.zeros(1, np.int32)):
        got = dequantize_linear(x, np.float32(0.1), zero)
        np.testing.assert_array_equal(got, x.astype(np.float32) * np.float32(0.1))
    for zero in (np.int32(1), np.int32([2])):
        with refused(ValueError, r"onnx.dequantize_linear: x is INT32, for which x_zero"):
            dequantize_linear(x, np.float32(0.1), zero)
    with refused(ValueError, "must be None or concrete zeros"):
        jax.jit(dequantize_linear)(x, np.float32(0.1), np.int32(0))


def test_products_are_rounded_before_a_sum():
    """Inside one compiled function, where XLA would fuse them to one rounding."""
    rng = np.random.default_rng(6)
    x = rng.integers(-128, 128, 4096).astype(np.int8)
    scale, bias = np.float32(0.1), rng.normal(0, 5, 4096).astype(np.float32)
    got = jax.jit(lambda q, s, b: dequantize_linear(q, s) + b)(x, scale, bias)
    np.testing.assert_array_equal(got, x.astype(np.float32) * scale + bias)


@pytest.mark.sample("normal", "negative", "wide")
@pytest.mark.parametrize("kind", ["normal", "positive", "negative", "zero", "one", "wide"])
def test_dynamic_quantize_linear(kind):
    x = np.random.default_rng(8).normal(0, 3, (7, 33)).astype(np.float32)
    x = {
        "normal": x,
        "positive": np.abs(x) + 1,
        "negative": -np.abs(x) - 1,
        "zero": x * 0,
        "one": x[:1, :1],
        "wide": x * np.float32(1e30),
    }[kind]
    high, low = np.maximum(x.max(), np.float32(0)), np.minimum(x.min(), np.float32(0))
    scale = (np.float32(1) if high == low else high - low) / np.float32(255)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    wanted = np.clip(np.rint(x / scale) + zero, 0, 255)
    for call in (dynamic_quantize_linear, jax.jit(dynamic_quantize_linear)):
        y, y_scale, y_zero = call(x)
        assert (y.dtype, y_scale.dtype, y_zero.dtype) == (np.uint8, np.float32, np.uint8)
        assert (y.shape, y_scale.shape, y_zero.shape) == (x.shape, (), ())
        assert y_scale == scale
        assert np.asarray(y_zero) == zero
        np.testing.assert_array_equal(y, wanted)


def test_vmap():
    x = np.random.default_rng(9).normal(0, 3, (4, 6)).astype(np.float32)
    scale, zero = np.float32([0.1, 0.2, 0.3, 0.4]), np.int8([0, 1, 2, 3])
    got = jax.vmap(quantize_linear)(x, scale, zero)
    np.testing.assert_array_equal(got, quantize_linear(x, scale, zero, axis=0))
    back = jax.vmap(dequantize_linear)(got, scale, zero)
    np.testing.assert_array_equal(back, dequantize_linear(got, scale, zero, axis=0))


def test_gradients_of_dequantize_linear_are_the_formula_s():
    q = np.int8([[1, -2, 3], [4, 5, -6]])
    zero = np.int8([1, 2])
    scale = jnp.float32([0.5, 0.25])

    def total(s):
        return (dequantize_linear(q, s, zero, axis=0) ** 2).sum()

    difference = q.astype(np.float32) - zero.astype(np.float32)[:, None]
    wanted = (2 * difference**2 * np.asarray(scale)[:, None]).sum(1)
    np.testing.assert_allclose(jax.grad(total)(scale), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(scale), wanted, rtol=1e-6)
    # float16 overflows: nothing moves there.
    scale16 = jnp.float16([1000.0, 100.0])
    y, pullback = jax.vjp(lambda s: dequantize_linear(np.int8([[100, 3]]), s, axis=1), scale16)
    np.testing.assert_array_equal(y, [[np.inf, 300]])
    np.testing.assert_array_equal(pullback(jnp.ones_like(y))[0], [0, 3])
    # Beside data of 8 bits, by which nothing is differentiated.
    x8 = jnp.asarray([1.0, 2.0], jnp.float8_e4m3fn)
    slope = jax.grad(lambda s: dequantize_linear(x8, s).sum())(jnp.float32(4))
    assert slope == 3


@pytest.mark.devices(8)
@pytest.mark.parametrize("shape", [(), (8,), (4,), (8, 2)])
def test_gradients_by_scales_on_an_explicit_mesh(shape):
    """All sums are of integers, and exact in whatever order."""
    codes, scale = np.arange(32, dtype=np.int8).reshape(8, 4), jnp.full(shape, 2, jnp.float32)
    options = {(): {}, (8,): {"axis": 0}, (4,): {"axis": 1}, (8, 2): {"block_size": 2}}[shape]

    def derivatives(codes):
        dequantized = functools.partial(dequantize_linear, codes, **options)
        by_scale = jax.grad(lambda s: dequantized(s).sum())
        tangent = jax.jvp(dequantized, (scale,), (scale,))[1]
        return by_scale(scale), jax.jit(by_scale)(scale), tangent

    expected = jax.tree.map(np.asarray, derivatives(codes))
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        got = derivatives(jax.device_put(codes, NamedSharding(mesh, PartitionSpec("x", "y"))))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_masked_elements_do_not_change_gradients_of_scales():
    """A NaN under a cotangent of 0, as behind a mask; but an infinite cotangent is not lost."""
    x = jnp.asarray([1, jnp.nan, 0], jnp.float8_e4m3fn)
    _, back = jax.vjp(lambda s: dequantize_linear(x, s), jnp.float32(0.5))
    assert back(jnp.array([3.0, 0.0, 1.0]))[0] == 3
    assert jnp.isnan(back(jnp.array([3.0, 0.0, jnp.inf]))[0])


@pytest.mark.parametrize("name", ["INT8", "UINT16", "FLOAT8E5M2"])
def test_derivatives_of_quantize_linear_raise(name):
    zero = np.zeros((), DTYPES[name])
    for point in (None, zero):
        words = {"output_dtype": name} if point is None else {}
        with refused(TypeError, "fake_cast"):
            jax.jvp(
                lambda x, p=point, w=words: quantize_linear(x, np.float32(1), p, **w),
                (jnp.ones(2),),
                (jnp.ones(2),),
            )
    with refused(TypeError, "fake_cast"):
        jax.jvp(dynamic_quantize_linear, (jnp.ones(2),), (jnp.ones(2),))


X = np.zeros((2, 3), np.float32)
ONE = np.float32(1)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# Changes of a call that is right, the last of which is the one that the error names.
QUANTIZE = [
    (ValueError, {"y_scale": ones(2)}),
    (ValueError, {"y_scale": ones(2, 3)}),
    (ValueError, {"block_size": 3, "y_scale": ones(2, 2)}),
    (ValueError, {"opset": 10, "y_scale": ones(3)}),
    (TypeError, {"opset": 21, "y_scale": np.float16(1)}),
    (ValueError, {"y_scale": ones(3), "axis": 2}),
    (ValueError, {"x": X[0], "y_scale": ones(3), "axis": 1}),
    (ValueError, {"opset": 10, "axis": 0}),
    (TypeError, {"axis": 1.0}),
    (ValueError, {"block_size": -1}),
    (ValueError, {"opset": 19, "block_size": 2}),
    (ValueError, {"y_zero_point": ones(3, dtype=np.uint8)}),
    (TypeError, {"y_zero_point": np.uint8(0), "output_dtype": "INT8"}),
    (ValueError, {"opset": 20, "output_dtype": 3}),
    (TypeError, {"y_zero_point": np.uint8(0), "precision": "INT8"}),
    (ValueError, {"opset": 22, "precision": "FLOAT"}),
    (ValueError, {"saturate": 7}),
    (ValueError, {"opset": 13, "saturate": 0}),
    (TypeError, {"y_zero_point": np.zeros((), DTYPES["INT2"]), "opset": 22}),
]
DEQUANTIZE = [
    (TypeError, {"x_zero_point": np.int8(1)}),
    (ValueError, {"opset": 21, "output_dtype": "FLOAT"}),
]


@each(("function", "error", "changes"), [
    *((quantize_linear, *row) for row in QUANTIZE),
    *((dequantize_linear, *row) for row in DEQUANTIZE),
])  # fmt: skip
def test_bad_arguments(function, error, changes):
    right = {"x": X, "y_scale": ONE} if function is quantize_linear else {"x": np.uint8(1)}
    right |= {} if function is quantize_linear else {"x_scale": ONE}
    *_, name = changes
    start = rf"^onnx\.{function.__name__}: (.*\W)?{name}\W"
    refused(error, start, function, **right | changes)


def test_bad_types():
    e8m0 = ONE.astype(DTYPES["FLOAT8E8M0"])
    with refused(TypeError, "onnx.dequantize_linear: the output is FLOAT8E8M0, with opset=28"):
        dequantize_linear(np.uint8(1), e8m0)
    with refused(ValueError, r"onnx.dynamic_quantize_linear: x has shape \(0, 2\)"):
        dynamic_quantize_linear(np.zeros((0, 2), np.float32))
    with refused(TypeError, "x is FLOAT16"):
        dynamic_quantize_linear(np.ones(2, np.float16))
    with refused(TypeError, "onnx.quantize_linear: x is traced, and FLOAT6E2M3 has no JAX array"):
        jax.jit(lambda v: quantize_linear(v, ONE, output_dtype="FLOAT6E2M3"))(X)
