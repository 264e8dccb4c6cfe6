"""Bad input, for all published operators: each error names the operator that was called."""

import functools
import inspect
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

# A call of each operator: its arrays, and the attributes that it needs. Others have defaults.
EXAMPLES = {
    onnx.cast: ({"x": X}, {"to": 17}),
    onnx.cast_like: ({"x": X}, {"like": X}),
    onnx.quantize_linear: ({"x": X, "y_scale": X[:1]}, {}),
    onnx.dequantize_linear: ({"x": np.int8([1]), "x_scale": X[:1]}, {}),
    onnx.dynamic_quantize_linear: ({"x": X}, {}),
    onnx.range: ({"start": X[0], "limit": X[0], "delta": X[0]}, {}),
    onnx.bit_cast: ({"x": X}, {"to": "INT32"}),
    openvino.convert: ({"x": X}, {"destination_type": "f16"}),
    openvino.fake_convert: ({"data": X, "scale": X}, {}),
    openvino.convert_promote_types: ({"x0": X, "x1": X}, {}),
    openvino.promoted_type: ({}, {"type0": "i8", "type1": "i4"}),
    openvino.range: ({"start": 0, "stop": 4, "step": 1}, {"output_type": "f32"}),
    pypto.cast: ({"input": X}, {"dtype": "int16"}),
}


def name_of(function):
    return f"{function.__module__.split('.')[1]}.{function.__name__}"


def calls(of_arrays):
    """ "onnx.cast: to", and the example with another value for that argument."""
    for function, (arrays, attributes) in EXAMPLES.items():
        optional = {"y_zero_point", "x_zero_point", "shift"}
        others = set(inspect.signature(function).parameters) - set(arrays) - optional - {"like"}
        for argument in arrays if of_arrays else sorted(others):
            run = functools.partial(function, **arrays | attributes)
            yield name_of(function), argument, lambda v, a=argument, run=run: run(**{a: v})


def test_every_operator_has_an_example():
    operators = {getattr(m, n) for m in (onnx, openvino, pypto) for n in m.__all__}
    assert {f for f in operators if inspect.isfunction(inspect.unwrap(f))} == set(EXAMPLES)


NARROW = {
    "onnx.cast": [
        *(lambda x, to=to: onnx.cast(x, to) for to in ("FLOAT8E4M3FN", "FLOAT4E2M1", "INT32")),
        *(lambda x, to=to: onnx.cast(x, to) for to in ("FLOAT6E2M3", "FLOAT8E8M0", "BOOL")),
        lambda x: onnx.cast(x, "FLOAT8E8M0", saturate=False),
    ],
    "onnx.cast_like": [lambda x: onnx.cast_like(x, np.int8(0))],
    "onnx.quantize_linear": [
        lambda x: onnx.quantize_linear(x, np.float32(2)),
        lambda x: onnx.quantize_linear(x, X[0], output_dtype=17),
        lambda x: onnx.quantize_linear(x, X[0], output_dtype=27),
        lambda x: onnx.quantize_linear(X, X[0], x.astype(jnp.float8_e5m2)),
    ],
    "onnx.dynamic_quantize_linear": [lambda x: onnx.dynamic_quantize_linear(x)[0]],
    "openvino.convert": [
        lambda x: openvino.convert(x, "f8e4m3"),
        lambda x: openvino.convert(x, "i4"),
        lambda x: openvino.convert(x, "f8e5m2", arithmetic="openvino"),
    ],
    "openvino.convert_promote_types": [
        lambda x: openvino.convert_promote_types(
            x, np.ones(2, jnp.float8_e5m2), promote_unsafe=True, pytorch_scalar_promotion=True
        )[0],
    ],
    "openvino.range": [lambda x: openvino.range(x, 4, 1, output_type="i8", length=3)],
    "pypto.cast": [
        lambda x: pypto.cast(x[None], "int8", extended=True),
        lambda x: pypto.cast(x[None], "hifloat8", extended=True),
    ],
}


def _derivatives(function):
    def total(x):
        return jnp.sum(jnp.asarray(function(x)).astype(jnp.float32))

    yield jax.grad(total)
    yield jax.jit(jax.grad(total))
    yield jax.grad(jax.jit(total))
    yield lambda x: jax.jvp(function, (x,), (x,))


@pytest.mark.parametrize("where", NARROW)
def test_what_has_no_derivative_says_so_and_names_what_has(where):
    for function in NARROW[where]:
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


@each(("where", "dtype", "function"), FROM_NARROW)
def test_cotangents_of_8_bits_are_refused(where, dtype, function):
    """JAX would round them: 1000.3 times as much is NaN in e4m3fn, and e8m0 has no sign."""
    x = jnp.ones(2, dtype)
    for derivative in _derivatives(function):
        refused(TypeError, rf"^{re.escape(where)}: has no derivative from e", derivative, x)


SHAPE = jax.ShapeDtypeStruct((2,), np.float32)
MASKED = np.ma.array(X, mask=[False, True])


@each(("where", "argument", "function"), calls(of_arrays=True))
def test_what_is_no_array(where, argument, function):
    start = rf"^{re.escape(where)}: {argument}"
    refused(TypeError, rf"{start} has type ShapeDtypeStruct", function, SHAPE)
    refused(TypeError, rf"{start} (is a masked array|has)", function, MASKED)
    if where in ("openvino.fake_convert", "openvino.range", "pypto.cast"):  # floats; arrays alone
        return
    for number in (2**64, -(2**63) - 1, 10**400):
        refused(TypeError, rf"{start} is an integer of more than 64 bits", function, number)


@each(("where", "argument", "function"), calls(of_arrays=False))
def test_attributes_are_neither_traced_nor_arrays(where, argument, function):
    wanted = rf"^{re.escape(where)}: (.*\W)?{argument}\W"
    refused((TypeError, ValueError), wanted, jax.jit(function), True)
    refused((TypeError, ValueError), wanted, function, np.array([True, False]))


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


@each("function", SWAPPED)
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
