"""Bad input: what was got, what was expected, what to do."""

import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import Float

import qtoolkit as qt

CASTS = {"round_to_format": qt.round_to_format, "encode": qt.encode, "cast": qt.cast}
X = np.ones(3, np.float32)
MADE = Float(4, 3, 7, "fn", "nan").as_format("made")


@pytest.mark.quick
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize(
    ("x", "got"),
    [
        (np.ones(2), "dtype float64"),
        (np.float64(1), "dtype float64"),
        (np.ones(2, np.int32), "dtype int32"),
        (jnp.ones(2, jnp.int32), "dtype int32"),
        (np.ones(2, bool), "dtype bool"),
        (np.ones(2, np.complex64), "dtype complex64"),
        (jnp.ones(2, jnp.float8_e4m3fn), "dtype float8_e4m3fn"),
        (np.array(["1"]), "dtype <U1"),
        (1.0, "type float"),
        (1, "type int"),
        ([1.0, 2.0], "type list"),
        ("1.0", "type str"),
        (None, "type NoneType"),
    ],
)
def test_wrong_sources(name, x, got):
    expected = rf"^{name}: x has {got}, expected float32, float16 or bfloat16; convert it first"
    with pytest.raises(TypeError, match=expected):
        CASTS[name](x, "e4m3fn")


@pytest.mark.parametrize("name", [*CASTS, "decode"])
def test_unknown_formats_raise_with_the_closest_names(name):
    function = CASTS.get(name, qt.decode)
    x = X if name != "decode" else np.ones(3, np.uint8)
    with pytest.raises(ValueError, match=r"unknown format 'e4m3fm'; did you mean 'e4m3fn'"):
        function(x, "e4m3fm")
    with pytest.raises(ValueError, match=r"known: e4m3fn, e5m2, .*int8"):
        function(x, "zzzzzzzz")
    with pytest.raises(TypeError, match=r"format: got 7 of type int, expected a format"):
        function(x, 7)
    with pytest.raises(TypeError, match=r"format: got None of type NoneType"):
        function(x, None)


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("bad", ["nearest", "", "NEAREST_EVEN", None, 0])
def test_unknown_roundings(name, bad):
    with pytest.raises(ValueError, match=rf"^{name}: rounding={bad!r}, expected .*nearest_even"):
        CASTS[name](X, "e4m3fn", rounding=bad)


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("bad", ["satfinite", "", "Finite", None, True])
def test_unknown_saturations(name, bad):
    expected = rf"^{name}: saturation={bad!r}, expected one of finite, propagate, none"
    with pytest.raises(ValueError, match=expected):
        CASTS[name](X, "e4m3fn", saturation=bad)


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("option", ["rounding", "saturation"])
def test_options_of_an_unhashable_or_array_type(name, option):
    with pytest.raises((TypeError, ValueError), match=name):
        CASTS[name](X, "e4m3fn", **{option: ["finite"]})


@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [
        (jnp.float16, "bfloat16"),
        (jnp.bfloat16, "float16"),
        (jnp.float16, Float(5, 2, 40, "ieee", "inf").as_format("tiny")),
        (jnp.float16, Float(5, 2, 8, "ieee", "inf").as_format("large")),
        (jnp.float16, Float(3, 12, 3, "ieee", "inf").as_format("long")),
        (jnp.bfloat16, Float(3, 8, 3, "ieee", "inf").as_format("long")),
        (jnp.bfloat16, qt.IntFormat(name="int10", bits=10)),
        (jnp.float32, qt.IntFormat(name="int32", bits=32)),
        (jnp.float32, qt.IntFormat(name="uint32", bits=32, signed=False)),
    ],
)
def test_dtypes_that_do_not_hold_the_format(dtype, fmt):
    name = qt.format(fmt).name
    why = rf"dtype {np.dtype(dtype)} does not hold every finite value of {name}.*float32"
    with pytest.raises(ValueError, match=f"^round_to_format: {why}"):
        qt.round_to_format(jnp.ones(2, dtype), fmt)
    code = np.ones(2, qt.format(fmt).code_dtype)
    with pytest.raises(ValueError, match=f"^decode: {why}"):
        qt.decode(code, fmt, dtype)
    assert qt.encode(jnp.ones(2, dtype), fmt).dtype == code.dtype  # codes do not need it


@pytest.mark.parametrize(
    ("codes", "fmt", "got"),
    [
        (np.ones(2, np.uint16), "e4m3fn", "dtype uint16, expected uint8"),
        (np.ones(2, np.int8), "e4m3fn", "dtype int8, expected uint8"),
        (np.ones(2, np.float32), "e4m3fn", "dtype float32, expected uint8"),
        (np.ones(2, np.uint8), "bfloat16", "dtype uint8, expected uint16"),
        (jnp.ones(2, jnp.float8_e5m2), "e4m3fn", "dtype float8_e5m2, expected uint8"),
        (
            np.ones(2, np.uint8),
            Float(8, 5, 127, "ieee", "inf").as_format("made"),
            "expected uint16",
        ),
        ([1, 2], "e4m3fn", "type list, expected uint8"),
        (1, "e4m3fn", "type int, expected uint8"),
        ("a", "e4m3fn", "type str, expected uint8"),
    ],
)
def test_decode_refuses_other_codes(codes, fmt, got):
    with pytest.raises(TypeError, match=rf"^decode: codes have .*{got}"):
        qt.decode(codes, fmt)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, jnp.float8_e4m3fn, "uint8"])
def test_decode_refuses_other_target_dtypes(dtype):
    expected = rf"^decode: got dtype {np.dtype(dtype)}, expected float32, float16 or bfloat16"
    with pytest.raises(TypeError, match=expected):
        qt.decode(np.ones(2, np.uint8), "e4m3fn", dtype)


@pytest.mark.parametrize(
    "spec",
    [
        Float(11, 20, 1023, "ieee", "inf"),  # the fields of a cut binary64
        Float(4, 24, 7, "ieee", "inf"),
        Float(8, 3, 128, "ieee", "inf"),
        Float(8, 3, 126, "ieee", "inf"),
        Float(8, 3, 127, "fn", "nan"),
        Float(3, 2, -125, "ieee", "inf"),
    ],
)
def test_formats_beyond_float32_are_refused(spec):
    fmt = spec.as_format("wide")
    why = (
        r"format wide has exponents -?\d+ to -?\d+ and \d+ mantissa bits, expected at most float32"
    )
    for name, function in CASTS.items():
        with pytest.raises(ValueError, match=f"^{name}: {why}"):
            function(X, fmt)
    with pytest.raises(ValueError, match=f"^decode: {why}"):
        qt.decode(np.ones(2, fmt.code_dtype), fmt)


def test_cast_needs_a_dtype_and_names_encode():
    with pytest.raises(TypeError, match=r"^cast: format made has no .*dtype.*use encode"):
        qt.cast(X, MADE)
    assert qt.encode(X, MADE).dtype == np.uint8


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        qt.encode(X, "e4m3fn", "nearest_even")
