"""Bad input, for all published operators: each error names the operator that was called."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from each import each
from refused import refused

import qtoolkit as qt
from qtoolkit import onnx, openvino, pypto
from qtoolkit.pypto import CastMode, SaturationMode

X = np.array([1.5, -2.0], np.float32)

pytestmark = pytest.mark.quick

NARROW = [
    *(
        ("onnx.cast", lambda x, to=to: onnx.cast(x, to))
        for to in ("FLOAT8E4M3FN", "FLOAT8E8M0", "FLOAT4E2M1", "FLOAT6E2M3", "INT32", "BOOL")
    ),
    ("onnx.cast", lambda x: onnx.cast(x, "FLOAT8E8M0", saturate=False)),
    ("onnx.cast_like", lambda x: onnx.cast_like(x, np.int8(0))),
    ("onnx.quantize_linear", lambda x: onnx.quantize_linear(x, np.float32(2))),
    ("onnx.quantize_linear", lambda x: onnx.quantize_linear(x, X[0], output_dtype=17)),
    ("onnx.quantize_linear", lambda x: onnx.quantize_linear(x, X[0], output_dtype=27)),
    ("onnx.quantize_linear", lambda x: onnx.quantize_linear(X, X[0], x.astype(jnp.float8_e5m2))),
    ("onnx.dynamic_quantize_linear", lambda x: onnx.dynamic_quantize_linear(x)[0]),
    ("openvino.convert", lambda x: openvino.convert(x, "f8e4m3")),
    ("openvino.convert", lambda x: openvino.convert(x, "i4")),
    ("openvino.convert", lambda x: openvino.convert(x, "f8e5m2", arithmetic="openvino")),
    (
        "openvino.convert_promote_types",
        lambda x: openvino.convert_promote_types(
            x, np.ones(2, jnp.float8_e5m2), promote_unsafe=True, pytorch_scalar_promotion=True
        )[0],
    ),
    ("openvino.range", lambda x: openvino.range(x, 4, 1, output_type="i8", length=3)),
    ("pypto.cast", lambda x: pypto.cast(x[None], "int8", extended=True)),
    ("pypto.cast", lambda x: pypto.cast(x[None], "hifloat8", extended=True)),
]


def _derivatives(function):
    def total(x):
        return jnp.sum(jnp.asarray(function(x)).astype(jnp.float32))

    yield jax.grad(total)
    yield jax.jit(jax.grad(total))
    yield jax.grad(jax.jit(total))
    yield lambda x: jax.jvp(function, (x,), (x,))


@pytest.mark.sample(
    *("onnx.cast-<lambda>0", "onnx.cast-<lambda>2", "onnx.cast-<lambda>4", "onnx.cast-<lambda>5"),
    *("onnx.cast_like-<lambda>", "onnx.quantize_linear-<lambda>2"),
    *("onnx.dynamic_quantize_linear-<lambda>", "openvino.convert-<lambda>0"),
    *("openvino.convert-<lambda>2", "openvino.range-<lambda>", "pypto.cast-<lambda>0"),
)
@pytest.mark.parametrize(("where", "function"), NARROW)
def test_what_has_no_derivative_says_so_and_names_what_has(where, function):
    for derivative in _derivatives(function):
        with refused(TypeError, rf"^{re.escape(where)}: .*fake_(cast|quantize)"):
            derivative(jnp.float32(1.5))


FROM_NARROW = [
    ("onnx.cast", "float8_e4m3fn", lambda x: onnx.cast(x, 1)),
    ("onnx.cast", "float8_e8m0fnu", lambda x: onnx.cast(x, "FLOAT16")),
    ("onnx.dequantize_linear", "float8_e5m2", lambda x: onnx.dequantize_linear(x, X[0])),
    (
        "onnx.dequantize_linear",
        "float8_e8m0fnu",
        lambda s: onnx.dequantize_linear(np.int8([3, -5]), s[0], output_dtype=1),
    ),
    ("openvino.convert", "float8_e4m3fn", lambda x: openvino.convert(x, "f32")),
    (
        "openvino.convert_promote_types",
        "float8_e5m2",
        lambda x: openvino.convert_promote_types(x, X)[0],
    ),
    ("pypto.cast", "float8_e4m3fn", lambda x: pypto.cast(x, "DT_FP32", extended=True)),
    ("cast", "float8_e4m3fnuz", lambda x: qt.cast(x, "float32")),
]


@pytest.mark.sample(
    *("onnx.cast-float8_e4m3fn-<lambda>", "onnx.cast-float8_e8m0fnu-<lambda>"),
    *("onnx.dequantize_linear-float8_e5m2-<lambda>", "openvino.convert-float8_e4m3fn-<lambda>"),
    *("openvino.convert_promote_types-float8_e5m2-<lambda>", "pypto.cast-float8_e4m3fn-<lambda>"),
    "cast-float8_e4m3fnuz-<lambda>",
)
@pytest.mark.parametrize(("where", "dtype", "function"), FROM_NARROW)
def test_cotangents_of_8_bits_are_refused(where, dtype, function):
    """JAX would round them: 1000.3 times as much is NaN in e4m3fn, and e8m0 has no sign."""
    x = jnp.ones(2, dtype)
    for derivative in _derivatives(function):
        refused(TypeError, rf"^{re.escape(where)}: has no derivative from e", derivative, x)


SHAPE = jax.ShapeDtypeStruct((2,), np.float32)
MASKED = np.ma.array(X, mask=[False, True])
ARRAYS = [
    ("onnx.cast: x", lambda x: onnx.cast(x, 17)),
    ("onnx.cast_like: x", lambda x: onnx.cast_like(x, X)),
    ("onnx.quantize_linear: x", lambda x: onnx.quantize_linear(x, X[0])),
    ("onnx.quantize_linear: y_scale", lambda x: onnx.quantize_linear(X, x, axis=0)),
    ("onnx.dequantize_linear: x_scale", lambda x: onnx.dequantize_linear(np.int8([1]), x)),
    ("onnx.dynamic_quantize_linear: x", onnx.dynamic_quantize_linear),
    ("onnx.range: limit", lambda x: onnx.range(X[0], x, X[0])),
    ("onnx.bit_cast: x", lambda x: onnx.bit_cast(x, "INT32")),
    ("openvino.convert: x", lambda x: openvino.convert(x, "f16")),
    ("openvino.fake_convert: data", lambda x: openvino.fake_convert(x, 2.0)),
    ("openvino.fake_convert: scale", lambda x: openvino.fake_convert(X, x)),
    ("openvino.convert_promote_types: x1", lambda x: openvino.convert_promote_types(X, x)),
    ("openvino.range: step", lambda x: openvino.range(0, 4, x, output_type="f32")),
    ("pypto.cast: input", lambda x: pypto.cast(x, "DT_FP16")),
    ("cast: x", lambda x: qt.cast(x, "float16")),
    ("fake_cast: x", lambda x: qt.fake_cast(x, "float16")),
]


@pytest.mark.parametrize(("where", "function"), ARRAYS)
def test_what_has_a_dtype_and_is_no_array(where, function):
    refused(TypeError, rf"^{re.escape(where)} has type ShapeDtypeStruct", function, SHAPE)
    refused(TypeError, rf"^{re.escape(where)} (is a masked array|has)", function, MASKED)


STATIC = [
    ("onnx.cast", "saturate", lambda v: onnx.cast(X, 17, saturate=v)),
    ("onnx.cast", "round_mode", lambda v: onnx.cast(X, 24, round_mode=v)),
    ("onnx.cast", "arithmetic", lambda v: onnx.cast(X, 17, arithmetic=v)),
    ("onnx.cast", "opset", lambda v: onnx.cast(X, 17, opset=v)),
    ("onnx.cast", "to", lambda v: onnx.cast(X, v)),
    ("onnx.cast_like", "saturate", lambda v: onnx.cast_like(X, X, saturate=v)),
    ("onnx.quantize_linear", "saturate", lambda v: onnx.quantize_linear(X, X[0], saturate=v)),
    ("onnx.quantize_linear", "axis", lambda v: onnx.quantize_linear(X, X[0], axis=v)),
    ("onnx.quantize_linear", "block_size", lambda v: onnx.quantize_linear(X, X[0], block_size=v)),
    ("onnx.quantize_linear", "precision", lambda v: onnx.quantize_linear(X, X[0], precision=v)),
    (
        "onnx.dequantize_linear",
        "output_dtype",
        lambda v: onnx.dequantize_linear(np.int8([1]), X[0], output_dtype=v),
    ),
    ("onnx.dynamic_quantize_linear", "opset", lambda v: onnx.dynamic_quantize_linear(X, opset=v)),
    ("onnx.range", "stash_type", lambda v: onnx.range(X[0], X[0], X[0], stash_type=v)),
    ("onnx.range", "limit", lambda v: onnx.range(X[0], v, X[0])),
    ("onnx.bit_cast", "to", lambda v: onnx.bit_cast(X, v)),
    ("openvino.fake_convert", "arithmetic", lambda v: openvino.fake_convert(X, 1.0, arithmetic=v)),
    (
        "openvino.fake_convert",
        "destination_type",
        lambda v: openvino.fake_convert(X, 1.0, destination_type=v),
    ),
    ("openvino.convert", "arithmetic", lambda v: openvino.convert(X, "f16", arithmetic=v)),
    ("openvino.convert", "destination_type", lambda v: openvino.convert(X, v)),
    ("openvino.range", "step", lambda v: openvino.range(0, 4, v, output_type="f32")),
    ("openvino.range", "length", lambda v: openvino.range(0, 4, 1, output_type="f32", length=v)),
    ("openvino.range", "output_type", lambda v: openvino.range(0, 4, 1, output_type=v)),
    ("openvino.promoted_type", "rank0", lambda v: openvino.promoted_type("i8", "i4", rank0=v)),
    (
        "openvino.promoted_type",
        "promote_unsafe",
        lambda v: openvino.promoted_type("i8", "i4", promote_unsafe=v),
    ),
    (
        "openvino.convert_promote_types",
        "u64_integer_promotion_target",
        lambda v: openvino.convert_promote_types(X, X, u64_integer_promotion_target=v),
    ),
    ("pypto.cast", "mode", lambda v: pypto.cast(X, "int16", v)),
    ("pypto.cast", "satmode", lambda v: pypto.cast(X, "int16", CastMode.CAST_RINT, v)),
    ("pypto.cast", "dtype", lambda v: pypto.cast(X, v)),
    ("pypto.cast", "extended", lambda v: pypto.cast(X, "int16", extended=v)),
]


@pytest.mark.parametrize(("where", "argument", "function"), STATIC)
def test_attributes_are_neither_traced_nor_arrays(where, argument, function):
    wanted = rf"^{re.escape(where)}: (.*\W)?{argument}\W"
    refused((TypeError, ValueError), wanted, jax.jit(function), True)
    refused((TypeError, ValueError), wanted, function, np.array([True, False]))


@each("number", [2**64, -(2**63) - 1, 2**70, 10**400])
@each(
    ("where", "function"),
    [
        ("onnx.cast: x", lambda v: onnx.cast(v, 1)),
        ("onnx.cast_like: x", lambda v: onnx.cast_like(v, X)),
        ("onnx.cast: x", lambda v: onnx.cast(v, "STRING")),
        ("onnx.range: start", lambda v: onnx.range(v, 1, 1)),
        ("onnx.bit_cast: x", lambda v: onnx.bit_cast(v, "DOUBLE")),
        ("onnx.quantize_linear: y_scale", lambda v: onnx.quantize_linear(X, v)),
        ("openvino.convert: x", lambda v: openvino.convert(v, "f16")),
        ("openvino.convert_promote_types: x1", lambda v: openvino.convert_promote_types(X, v)),
    ],
)
def test_integers_of_more_than_64_bits(where, function, number):
    refused(TypeError, rf"^{re.escape(where)} is an integer of more than 64 bits", function, number)


def test_integers_of_64_bits():
    largest = float(np.float32(2**64 - 1))
    assert float(onnx.cast(2**64 - 1, 1)) == float(openvino.convert(2**64 - 1, "f32")) == largest
    assert str(onnx.cast(2**64 - 1, "STRING")) == str(2**64 - 1)
    with jax.enable_x64(True):
        assert int(onnx.bit_cast(2**64 - 1, "INT64")) == -1


BIG = np.array([1.5, -1e5], ">f4")
SWAPPED = [
    lambda x: onnx.cast(x, "FLOAT16"),
    lambda x: onnx.quantize_linear(x, x[:1]),
    lambda x: onnx.bit_cast(x, "INT32"),
    lambda x: openvino.convert(x, "f16"),
    lambda x: openvino.convert(x, "f16", arithmetic="openvino"),
    lambda x: openvino.fake_convert(x, x, x),
    lambda x: openvino.fake_convert(x, 2.0, arithmetic="openvino"),
    lambda x: openvino.convert_promote_types(x, x)[1],
    lambda x: openvino.range(x[0], 5, 1, output_type="f32"),
    lambda x: pypto.cast(x, "DT_FP16"),
    lambda x: pypto.cast(x, "DT_FP32"),
    lambda x: pypto.cast(x, "DT_FP32", CastMode.CAST_CEIL, SaturationMode.ON, extended=True),
]


@pytest.mark.sample(
    *("<lambda>0", "<lambda>1", "<lambda>2", "<lambda>4", "<lambda>5", "<lambda>6", "<lambda>7"),
    *("<lambda>9", "<lambda>10"),
)
@pytest.mark.parametrize("function", SWAPPED)
def test_arrays_of_the_other_byte_order(function):
    np.testing.assert_array_equal(function(BIG), function(BIG.astype(np.float32)))


def test_64_bit_types_name_the_operator():
    for where, call in (
        ("onnx.cast", lambda: onnx.cast(X, "INT64")),
        ("onnx.range", lambda: onnx.range(0, 1, 1)),
        ("openvino.convert", lambda: openvino.convert(X, "f64")),
        ("openvino.convert_promote_types", lambda: openvino.convert_promote_types(1.0, 2.0)),
        ("openvino.range", lambda: openvino.range(0, 1, 1, output_type="i64")),
        ("pypto.cast", lambda: pypto.cast(X, "DT_INT64")),
        ("pypto.cast", lambda: pypto.cast(np.ones(2, np.int64), "DT_INT64")),
    ):
        refused(TypeError, rf"^{re.escape(where)}: .*jax_enable_x64", call)


def test_a_scale_of_one_number_fits_no_blocks():
    x, scale = np.float32([1, 2, 3, 4]), np.float32([0.5])
    assert onnx.quantize_linear(x, scale).tolist() == [2, 4, 6, 8]
    assert onnx.quantize_linear(x, scale, axis=0, block_size=4).tolist() == [2, 4, 6, 8]
    with refused(ValueError, r"y_scale has shape \(1,\)"):
        onnx.quantize_linear(x, scale, axis=0, block_size=2)


def test_flags_are_true_and_false_of_numpy_too():
    yes = np.bool_(True)
    assert openvino.promoted_type("i32", "f32", promote_unsafe=yes) == "f32"
    assert pypto.cast(X, "int8", extended=yes).dtype == jnp.int8
    assert onnx.cast(X, 17, saturate=yes).dtype == jnp.float8_e4m3fn
    refused(TypeError, r"mixed input types .* scale is boolean", openvino.fake_convert, X, True)


def test_numbers_that_no_float_holds():
    wanted = r"fake_convert: scale, an integer of \d+ bits, is inf in float32"
    for number in (10**400, 10**5000):
        for call in (openvino.fake_convert, functools.partial(qt.fake_convert, fmt="e4m3fn")):
            refused(ValueError, wanted, call, X, number)


def test_classes_are_neither_arrays_nor_always_dtypes():
    for where, call in (
        ("cast", lambda x: qt.cast(x, "float16")),
        ("onnx.cast", lambda x: onnx.cast(x, "FLOAT16")),
        ("openvino.convert", lambda x: openvino.convert(x, "f16")),
        ("pypto.cast", lambda x: pypto.cast(x, "DT_FP16")),
    ):
        refused(TypeError, rf"^{re.escape(where)}: \w+ has type type", call, np.float32)
    for kind in (np.dtypes.StrDType, np.dtypes.VoidDType, np.dtype, np.generic, np.floating):
        refused((TypeError, ValueError), r"^onnx\.cast: to", onnx.cast, X, kind)


def test_optional_types_are_none_or_zero_and_not_false():
    with refused(TypeError, r"^onnx\.quantize_linear: output_dtype has type bool"):
        onnx.quantize_linear(X, X[0], output_dtype=False)
    for zero in (0, np.int64(0), onnx.DataType.UNDEFINED):
        assert onnx.quantize_linear(X, X[0], output_dtype=zero).dtype == jnp.uint8
        assert onnx.quantize_linear(X, X[0], precision=zero).dtype == jnp.uint8


def test_ranges_too_long():
    zero, tiny, huge = np.float32([0, 1e-3, 1e30])
    refused(ValueError, r"^onnx\.range: \d+ numbers", onnx.range, zero, huge, tiny)
