"""The types and attributes of every version, and what bad arguments are told.

Oracle: the schemas of the installed onnx. Each probe calls the operator on empty arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx_oracle import DTYPES
from refused import refused

from qtoolkit import onnx as ops
from qtoolkit.onnx import DataType

ARRAYS = {
    **{name: np.zeros(0, dtype) for name, dtype in DTYPES.items()},
    "STRING": np.zeros(0, np.str_),
    "COMPLEX64": np.zeros(0, np.complex64),
    "COMPLEX128": np.zeros(0, np.complex128),
}
NEWEST = 28


def schema_types(operator, opset, parameter) -> set[str]:
    from onnx.defs import get_schema

    schema = get_schema(operator, opset)
    sides = {p.name: p.type_str for p in (*schema.inputs, *schema.outputs)}
    (allowed,) = [
        constraint.allowed_type_strs
        for constraint in schema.type_constraints
        if constraint.type_param_str == sides[parameter]
    ] or [[sides[parameter]]]
    return {name.removeprefix("tensor(").removesuffix(")").upper() for name in allowed}


def accepted(call) -> set[str]:
    found, foreign = set(), []
    for name in ARRAYS:
        try:
            with jax.enable_x64(True):
                call(name)
        except (TypeError, ValueError) as error:
            foreign += [] if str(error).startswith("onnx.") else [str(error)]
            continue
        found.add(name)
    assert not foreign  # every error names the operator
    return found


@pytest.mark.quick
def test_numbers_are_those_of_onnx():
    from onnx import TensorProto

    numbers = dict(TensorProto.DataType.items())
    assert {t.name: t.value for t in DataType} == numbers


@pytest.mark.sample("1", "19")
@pytest.mark.parametrize("opset", [1, 5, 6, 9, 13, 19, 21, 23, 24, 25, 28])
def test_types_of_cast(opset):
    x = np.zeros(0, np.float32)
    to = accepted(lambda name: ops.cast(x, name, opset=opset))
    assert to == schema_types("Cast", opset, "output")
    sources = accepted(lambda name: ops.cast(ARRAYS[name], "FLOAT", opset=opset))
    assert sources == schema_types("Cast", opset, "input")


@pytest.mark.parametrize("opset", [15, 19, 21, 23, 24, 25, 28])
def test_types_of_cast_like(opset):
    x = np.zeros(0, np.float32)
    to = accepted(lambda name: ops.cast_like(x, ARRAYS[name], opset=opset))
    assert to == schema_types("CastLike", opset, "output")
    sources = accepted(lambda name: ops.cast_like(ARRAYS[name], x, opset=opset))
    assert sources == schema_types("CastLike", opset, "input")


@pytest.mark.sample("10", "24")
@pytest.mark.parametrize("opset", [10, 13, 19, 21, 23, 24, 25, 28])
def test_types_of_quantize_linear(opset):
    def scaled(name):
        shared = 19 <= opset < 23  # x and y_scale have one type
        return ops.quantize_linear(ARRAYS[name], scale_of(name if shared else "FLOAT"), opset=opset)

    assert accepted(scaled) == schema_types("QuantizeLinear", opset, "x")
    x, one = np.zeros(0, np.float32), np.float32(1)
    got = accepted(lambda name: ops.quantize_linear(x, one, scale_of(name), opset=opset))
    assert got == schema_types("QuantizeLinear", opset, "y_zero_point")
    if opset >= 21:
        by_name = accepted(lambda n: ops.quantize_linear(x, one, output_dtype=n, opset=opset))
        assert by_name == got


def scale_of(name):
    return np.ones(1, ARRAYS[name].dtype)


@pytest.mark.parametrize("opset", [10, 13, 23, 24, 28])
def test_scale_types_of_quantize_linear(opset):
    x = np.zeros(0, np.float32)
    got = accepted(lambda name: ops.quantize_linear(x, scale_of(name), opset=opset))
    assert got == schema_types("QuantizeLinear", opset, "y_scale")


@pytest.mark.parametrize("opset", [19, 21])
def test_scales_share_the_type_of_x_before_opset_23(opset):
    for x in ("FLOAT", "FLOAT16", "BFLOAT16", "INT32"):
        got = accepted(lambda n, x=x: ops.quantize_linear(ARRAYS[x], scale_of(n), opset=opset))
        assert got == {x}


@pytest.mark.sample("10", "19", "24", "28")
@pytest.mark.parametrize("opset", [10, 13, 19, 21, 23, 24, 25, 28])
def test_types_of_dequantize_linear(opset):
    one, x = np.float32(1), np.zeros(0, np.uint8)
    got = accepted(lambda name: ops.dequantize_linear(ARRAYS[name], one, opset=opset))
    assert got == schema_types("DequantizeLinear", opset, "x")
    words = {"output_dtype": "FLOAT"} if opset >= 23 else {}
    got = accepted(lambda name: ops.dequantize_linear(x, scale_of(name), opset=opset, **words))
    assert got == schema_types("DequantizeLinear", opset, "x_scale")
    if opset >= 23:
        got = accepted(lambda n: ops.dequantize_linear(x, one, output_dtype=n, opset=opset))
        assert got == schema_types("DequantizeLinear", opset, "y")


@pytest.mark.parametrize("opset", [11, 27, 28])
def test_types_of_range(opset):
    got = accepted(lambda name: ops.range(*[scale_of(name)[0]] * 3, opset=opset))
    assert got == schema_types("Range", opset, "output")


@pytest.mark.parametrize("opset", [26, 28])
def test_types_of_bit_cast(opset):
    got = accepted(lambda name: ops.bit_cast(ARRAYS[name], name, opset=opset))
    assert (
        got == schema_types("BitCast", opset, "input") == schema_types("BitCast", opset, "output")
    )


def test_types_of_dynamic_quantize_linear():
    got = accepted(lambda name: ops.dynamic_quantize_linear(np.ones(2, ARRAYS[name].dtype)))
    assert got == schema_types("DynamicQuantizeLinear", NEWEST, "x")


@pytest.mark.sample(
    "<lambda>-1", "<lambda>-15", "<lambda>-10_0", "<lambda>-11_0", "<lambda>-11_1", "<lambda>-26"
)
@pytest.mark.parametrize(
    ("call", "first"),
    [
        (lambda opset: ops.cast(np.float32(1), "FLOAT", opset=opset), 1),
        (lambda opset: ops.cast_like(np.float32(1), np.float32(1), opset=opset), 15),
        (lambda opset: ops.quantize_linear(np.float32(1), np.float32(1), opset=opset), 10),
        (lambda opset: ops.dequantize_linear(np.uint8(1), np.float32(1), opset=opset), 10),
        (lambda opset: ops.dynamic_quantize_linear(np.float32(1), opset=opset), 11),
        (lambda opset: ops.range(*np.float32([0, 1, 1]), opset=opset), 11),
        (lambda opset: ops.bit_cast(np.float32(1), "INT32", opset=opset), 26),
    ],
)
def test_versions_that_do_not_exist(call, first):
    call(first)
    call(np.int64(NEWEST))
    for opset in (first - 1, NEWEST + 1, True, 19.0, None, "28"):
        refused(ValueError, r"opset=", call, opset)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"saturate": False, "opset": 18}, "saturate=False with opset=18.*came with opset 19"),
        ({"round_mode": "down", "opset": 23}, "round_mode='down' with opset=23.* opset 24"),
        ({"saturate": 2}, "onnx.cast: saturate=2, expected True or False"),
        ({"saturate": None}, "saturate=None, expected True or False"),
        ({"round_mode": "even"}, "round_mode='even', expected 'up' or 'down' or 'nearest'"),
        ({"round_mode": None}, "round_mode=None, expected 'up'"),
        ({"arithmetic": "ort"}, "arithmetic='ort', expected 'exact' or 'reference'"),
    ],
)
def test_attributes_of_cast(words, message):
    refused(ValueError, message, ops.cast, np.float32(1), "FLOAT", **words)


def test_saturate_is_an_integer_in_models():
    for saturate, code in ((1, 0x7E), (0, 0x7F), (np.int64(1), 0x7E), (np.bool_(False), 0x7F)):
        got = ops.cast(np.float32([1e9]), "FLOAT8E4M3FN", saturate=saturate)
        assert np.asarray(got).view(np.uint8) == code


@pytest.mark.parametrize(
    "to",
    [
        *(17, np.int64(17), DataType.FLOAT8E4M3FN, "FLOAT8E4M3FN", "float8e4m3fn"),
        *("tensor(float8e4m3fn)", "e4m3fn", "float8_e4m3fn", jnp.float8_e4m3fn),
        *(np.dtype("float8_e4m3fn"), jnp.dtype("float8_e4m3fn")),
    ],
)
def test_spellings_of_a_type(to):
    assert ops.cast(np.float32(1), to).dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("to", "dtype"),
    [
        ("float", "float32"),
        ("double", "float64"),
        (float, "float64"),
        (bool, "bool"),
        (int, "int64"),
    ],
)
def test_words_that_differ_between_onnx_and_numpy(to, dtype):
    with jax.enable_x64(True):
        assert ops.cast(np.float32(1), to).dtype == dtype


@pytest.mark.parametrize("to", [str, np.str_, bytes, object, np.dtype(object), "string", 8, "U4"])
def test_spellings_of_text(to):
    if to == "U4":
        to = np.dtype("U4")
    assert ops.cast(np.float32(1), to).tolist() == "1"


@pytest.mark.parametrize(
    ("to", "error", "message"),
    [
        (0, ValueError, r"onnx.cast: to=0 is no type of ONNX, expected a number from 1 to 28"),
        (29, ValueError, "to=29 is no type of ONNX"),
        (-1, ValueError, "to=-1 is no type of ONNX"),
        ("UNDEFINED", ValueError, "to='UNDEFINED' is no type of ONNX"),
        ("FLOAT9", ValueError, "to='FLOAT9' is no type of ONNX"),
        ("nf4", ValueError, "to='nf4' is no type of ONNX"),
        ("float8_e4m3", ValueError, "is no type of ONNX"),
        (np.dtype("M8[s]"), ValueError, "is no type of ONNX"),
        (
            "COMPLEX64",
            ValueError,
            "to=COMPLEX64 is a type that nothing is cast to; expected one of",
        ),
        (np.complex128, ValueError, "to=COMPLEX128 is a type that nothing is cast to"),
        (True, TypeError, "onnx.cast: to has type bool, expected a number of TensorProto.DataType"),
        (None, TypeError, "to has type NoneType, expected"),
        (1.0, TypeError, "to has type float, expected"),
        (np.float32(1), TypeError, "to has type float32, expected"),
        (list, TypeError, "to has type type, expected"),
        ({}, TypeError, "to has type dict, expected"),
    ],
)
def test_bad_targets(to, error, message):
    refused(error, message, ops.cast, np.float32(1), to)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0], "onnx.cast: x has type list, expected an array of a type of ONNX"),
        (None, "x has type NoneType"),
        (1j, "x has type complex"),
        (np.zeros(1, "M8[s]"), r"x has dtype datetime64\[s\], expected"),
        (np.zeros(1, np.complex64), "x is COMPLEX64, with opset=28; expected BFLOAT16, BOOL"),
        (np.ma.masked_array([1.0, 2.0]), "onnx.cast: x is a masked array, expected one without"),
        (jax.random.key(0), "x has type|x has dtype key"),
    ],
)
def test_bad_sources(x, message):
    refused(TypeError, message, ops.cast, x, "FLOAT")


def test_types_that_came_later_say_when():
    with refused(ValueError, "to=INT2 came with opset 25, got opset=24"):
        ops.cast(np.float32(1), "INT2", opset=24)
    with refused(TypeError, "x is INT4, which came with opset 21, with opset=19"):
        ops.cast(np.zeros(1, DTYPES["INT4"]), "FLOAT", opset=19)


@pytest.mark.parametrize("to", ["DOUBLE", "INT64", "UINT64"])
def test_results_of_64_bits_need_x64(to):
    for x in (np.float32(1), "1", np.float64(1)):
        refused(TypeError, f"onnx.cast: {to} is needed.*jax_enable_x64", ops.cast, x, to)
        with jax.enable_x64(True):
            assert ops.cast(x, to).dtype == DTYPES[to]


def test_64_bit_sources_are_exact_without_x64():
    x = np.array([1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-11])
    got = np.asarray(ops.cast(x, "FLOAT16"))
    np.testing.assert_array_equal(got.view(np.uint16), [0x3C01, 0x3C00])
    assert ops.cast(2**40, "INT32") == 0  # numbers of Python have 64 bits
    assert ops.cast(0.1, "FLOAT") == np.float32(0.1)


def test_traced_values_where_the_result_is_no_jax_array():
    for to in ("FLOAT6E2M3", "STRING"):
        with refused(TypeError, f"onnx.cast: x is traced, and {to} has no JAX array"):
            jax.jit(lambda v, to=to: ops.cast(v, to))(jnp.ones(2))
        with refused(TypeError, "outside of jit, vmap and grad"):
            jax.vmap(lambda v, to=to: ops.cast(v, to))(jnp.ones(2))


def test_cast_like_takes_the_dtype_alone():
    x = np.float32([1.5, 300])
    for like in (jnp.zeros((2, 3), jnp.int8), jax.ShapeDtypeStruct((4,), jnp.int8), np.int8(3)):
        np.testing.assert_array_equal(ops.cast_like(x, like), np.int8([1, 127]))
    np.testing.assert_array_equal(ops.cast_like(x, "text"), ["1.5", "300"])
    jitted = jax.jit(ops.cast_like)(x, jnp.zeros(3, jnp.float8_e5m2))
    assert jitted.dtype == jnp.float8_e5m2
    refused(TypeError, r"onnx\.cast_like: like has type list", ops.cast_like, x, [1])
    with refused(TypeError, r"onnx\.cast_like: like is FLOAT6E2M3, with opset=28"):
        ops.cast_like(x, np.zeros(1, DTYPES["FLOAT6E2M3"]))
    refused(ValueError, r"onnx\.cast_like: round_mode='x'", ops.cast_like, x, x, round_mode="x")


def test_foreign_byte_order():
    x = np.array([1.5, -2], ">f4")
    np.testing.assert_array_equal(ops.cast(x, "BFLOAT16").astype(np.float32), [1.5, -2])
    np.testing.assert_array_equal(ops.bit_cast(x, "UINT32"), [0x3FC00000, 0xC0000000])
    swapped = x.astype(np.dtype(DTYPES["BFLOAT16"]).newbyteorder(">"))
    assert ops.cast(swapped, "STRING").tolist() == ["1.5", "-2"]
