"""The types and attributes of every version, and what bad arguments are told.

Oracle: the schemas of the installed onnx. Each probe calls the operator on empty arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from each import each
from onnx_oracle import DTYPES
from refused import got, refused

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


@each(("call", "first"), [
    (lambda opset: ops.cast(np.float32(1), "FLOAT", opset=opset), 1),
    (lambda opset: ops.cast_like(np.float32(1), np.float32(1), opset=opset), 15),
    (lambda opset: ops.quantize_linear(np.float32(1), np.float32(1), opset=opset), 10),
    (lambda opset: ops.dequantize_linear(np.uint8(1), np.float32(1), opset=opset), 10),
    (lambda opset: ops.dynamic_quantize_linear(np.float32(1), opset=opset), 11),
    (lambda opset: ops.range(*np.float32([0, 1, 1]), opset=opset), 11),
    (lambda opset: ops.bit_cast(np.float32(1), "INT32", opset=opset), 26),
])  # fmt: skip
def test_versions_that_do_not_exist(call, first):
    call(first)
    call(np.int64(NEWEST))
    for opset in (first - 1, NEWEST + 1, True, 19.0, None, "28"):
        refused(ValueError, r"opset=", call, opset)


@each("words", [
    {"opset": 18, "saturate": False}, {"opset": 23, "round_mode": "down"},  # came later
    {"saturate": 2}, {"saturate": None}, {"round_mode": "even"}, {"round_mode": None},
    {"arithmetic": "ort"},
])  # fmt: skip
def test_attributes_of_cast(words):
    name, value = [*words.items()][-1]
    refused(ValueError, f"^onnx.cast: {name}={value!r}", ops.cast, np.float32(1), "FLOAT", **words)


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


NO_TYPES = (0, 29, -1, "UNDEFINED", "FLOAT9", "nf4", "float8_e4m3", np.dtype("M8[s]"))


@each(("error", "to", "message"), [
    *((ValueError, to, "to=.* is no type of ONNX") for to in NO_TYPES),
    *((ValueError, to, "to=COMPLEX.* nothing is cast to") for to in ("COMPLEX64", np.complex128)),
    *((TypeError, to, f"to has {got(to)}") for to in (True, None, 1.0, list, {})),
    (TypeError, np.float32(1), "to has type float32"),
])  # fmt: skip
def test_bad_targets(error, to, message):
    refused(error, f"^onnx.cast: {message}", ops.cast, np.float32(1), to)


@each("x", [[1.0], None, 1j, np.zeros(1, "M8[s]"), jax.random.key(0)])
def test_bad_sources(x):
    refused(TypeError, f"^onnx.cast: x has {got(x)}", ops.cast, x, "FLOAT")
    with refused(TypeError, "^onnx.cast: x is COMPLEX64, with opset=28"):
        ops.cast(np.zeros(1, np.complex64), "FLOAT")


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
