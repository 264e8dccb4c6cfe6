"""Bad input of `quantize`, `dequantize` and `fake_quantize`: what was got, what was expected."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refused import refused

import qtoolkit as qt
from qtoolkit.formats import BlockFormat

pytestmark = pytest.mark.quick

X = np.ones((4, 64), np.float32)
KEY = jax.random.key(0)
UINT8 = BlockFormat.tensor("uint8", zero_point=True)
EVERY = {"quantize": qt.quantize, "fake_quantize": qt.fake_quantize}


def scales(value, count=2, dtype=np.float32):
    return np.full((4, count), value, dtype)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("x", "got"),
    [
        (np.ones((4, 64)), "dtype float64"),
        (np.ones((4, 64), np.int32), "dtype int32"),
        (np.ones((4, 64), bool), "dtype bool"),
        (np.ones((4, 64), np.complex64), "dtype complex64"),
        (np.ones((4, 64), ml_dtypes.float8_e4m3fn), "dtype float8_e4m3fn"),
        (1.0, "type float"),
        ([1.0], "type list"),
        (None, "type NoneType"),
    ],
)
def test_wrong_sources(name, x, got):
    if got in ("dtype float64", "type float"):  # taken where JAX has none
        with jax.enable_x64(True), pytest.raises(TypeError, match=rf"^{name}: x has {got}, exp"):
            EVERY[name](x, "int8")
        return
    expected = rf"^{name}: x has {got}, expected float32, float16 or bfloat16; convert it first"
    refused(TypeError, expected, EVERY[name], x, "int8")


@pytest.mark.parametrize("name", EVERY)
def test_what_fits_no_block(name):
    function = EVERY[name]
    for shape, spec in (((4, 0), "int8"), ((0, 64), "mxfp4"), ((0,), "int8"), ((0,), "bfloat16")):
        refused(ValueError, rf"^{name}: .*is empty", function, np.ones(shape, np.float32), spec)
    with refused(ValueError, rf"^{name}: mxfp4: a block has 32 .* only 31; use a short"):
        function(X[:, :31], "mxfp4")
    with refused(ValueError, rf"^{name}: mxfp4@0: a block has 32 .* axis 0.* only 4"):
        function(X, qt.formats.MXFP4.along(0))
    for axis in (2, -3):
        with refused(ValueError, rf"^{name}: mxfp4@{axis}: .*from -2 to 1; choose them"):
            function(X, qt.formats.MXFP4.along(axis))
    with refused(ValueError, rf"^{name}: deepseek_128x128: .*shape \(128,\)"):
        function(np.ones(128, np.float32), "deepseek_128x128")
    refused(ValueError, rf"^{name}: mxfp4: got a scalar", function, np.float32(1), "mxfp4")


@pytest.mark.parametrize("name", EVERY)
def test_unknown_names(name):
    function = EVERY[name]
    refused(ValueError, r"unknown format 'mxfp5'; did you mean 'mxfp4' or", function, X, "mxfp5")
    for bad in (None, 7):
        refused(TypeError, f"got {bad} of type ", function, X, bad)
    refused(ValueError, rf"^{name}: rounding='up'", function, X, "mxfp4", rounding="up")
    refused(ValueError, rf"^{name}: saturation='clip'", function, X, "mxfp4", saturation="clip")
    with refused(TypeError, "no argument 'axis'; axes are a part of the format"):
        function(X, "mxfp4", axis=0)
    with refused(ValueError, r"^fake_quantize: gradient='ste'"):
        qt.fake_quantize(X, "int8", gradient="ste")
    refused(TypeError, "no argument 'packed'", qt.fake_quantize, X, "int4", packed=True)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("fmt", ["int32", "bool", "int64"])
def test_elements_that_cannot_be_scaled(name, fmt):
    refused(ValueError, f"element={fmt} cannot be scaled: .*or scale=None", EVERY[name], X, fmt)


@pytest.mark.parametrize("name", EVERY)
def test_random_bits(name):
    function, random = EVERY[name], {"rounding": "stochastic"}
    with refused(ValueError, rf"^{name}: stochastic rounding got neither key nor"):
        function(X, "mxfp4", **random)
    with refused(ValueError, rf"^{name}: key is given, but rounding='nearest_even'"):
        function(X, "mxfp4", key=KEY)
    with refused(ValueError, rf"^{name}: random_bits has shape \(4, 2\)"):
        function(X, "mxfp4", random_bits=np.zeros((4, 2), np.uint16), **random)
    with refused(ValueError, rf"^{name}: index_offset is given without a key"):
        function(X, "mxfp4", index_offset=64)


# Given scales.


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("spec", "value", "wanted"),
    [
        ("int4_group32", scales(1, 3), r"\(4, 3\), expected \(4, 2\), one for each block"),
        ("int4_group32", scales(1, 1), r"\(4, 1\), expected \(4, 2\)"),
        ("int4_group32", np.ones(2, np.float32), r"\(2,\), expected \(4, 2\)"),
        ("int4_group32", 1.0, r"\(\), expected \(4, 2\)"),
        ("mxfp4", scales(1, 1, ml_dtypes.float8_e8m0fnu), r"\(4, 1\), expected \(4, 2\)"),
        ("int8", scales(1, 2), r"\(4, 2\), expected \(1, 1\)"),
        ("int8", np.ones(1, np.float32), r"\(1,\), expected \(1, 1\)"),
    ],
)
def test_scales_of_another_shape(name, spec, value, wanted):
    refused(ValueError, rf"^{name}: scale has shape {wanted}", EVERY[name], X, spec, scale=value)
    traced = jax.jit(lambda x, scale: EVERY[name](x, spec, scale=scale))
    if not isinstance(value, float):
        refused(ValueError, rf"^{name}: scale has shape {wanted}", traced, X, value)


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, np.nan, np.inf, -np.inf, 1e-300, 1e300])
def test_scales_that_are_not_positive_and_finite(bad):
    """As numbers and in arrays; 1e-300 and 1e300 are zero and infinite in float32."""
    wanted = r"^quantize: scale.* is .*, expected a positive number"
    refused(ValueError, wanted, qt.quantize, X, "int8", scale=bad)
    refused(ValueError, r"^quantize: tensor_scale.* is ", qt.quantize, X, "nvfp4", tensor_scale=bad)
    if bad in (1e-300, 1e300):
        return
    value = scales(1.0)
    value[3, 1] = bad
    for spec in ("int4_group32", "mxfp4"):
        with pytest.raises(ValueError, match=wanted + r".*1 of 8 are not") as error:
            qt.quantize(X, spec, scale=value)
        assert "at (3, 1)" in str(error.value)
    with refused(ValueError, r"^fake_quantize: scale is .* at \(3, 1\)"):
        qt.fake_quantize(X, "int4_group32", scale=jnp.asarray(value))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan])
def test_scales_in_their_own_dtype_are_checked_too(bad):
    value = np.ones((4, 4), ml_dtypes.float8_e4m3fn)
    value[3, 1] = bad
    with refused(ValueError, r"^quantize: scale is .* at \(3, 1\)"):
        qt.quantize(X, "nvfp4", scale=value, tensor_scale=1.0)
    if np.isnan(bad):
        powers = np.full((4, 2), 127, np.uint8)
        powers[3, 1] = 0xFF
        with refused(ValueError, r"^quantize: scale is nan at \(3, 1\)"):
            qt.quantize(X, "mxfp4", scale=powers.view(ml_dtypes.float8_e8m0fnu))


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (np.ones((1, 1)), "float64"),
        (np.ones((1, 1), np.int32), "int32"),
        (np.ones((1, 1), ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        ("1", "str"),
        ([[1.0]], "list"),
    ],
)
def test_scales_of_another_dtype(value, got):
    refused(TypeError, rf"^quantize: scale has d?type {got}", qt.quantize, X, "int8", scale=value)
    if got != "float8_e4m3fn":
        with refused(TypeError, rf"^quantize: scale has d?type {got}, .*float8_e8m0fnu"):
            qt.quantize(X, "mxfp4", scale=value)


def test_scales_that_the_format_has_not():
    with refused(ValueError, r"^quantize: tensor_scale is given, and mxfp4 has none; remove it"):
        qt.quantize(X, "mxfp4", tensor_scale=1.0)
    with refused(ValueError, r"^quantize: scale is given, and bfloat16.* has none; remove it"):
        qt.quantize(X, "bfloat16", scale=1.0)
    with refused(ValueError, r"^quantize: zero_point is given, and int8.* has none; remove it"):
        qt.quantize(X, "int8", zero_point=0)
    with refused(ValueError, r"^quantize: zero_point is given, and mxfp4 has none; remove it"):
        qt.quantize(X, "mxfp4", zero_point=0)
    with refused(ValueError, r"^quantize: scale without tensor_scale for nvfp4"):
        qt.quantize(X, "nvfp4", scale=np.ones((4, 4), np.float32))
    for shape in ((1,), (1, 1), (2,)):
        with refused(ValueError, r"^quantize: tensor_scale has shape "):
            qt.quantize(X, "nvfp4", tensor_scale=np.ones(shape, np.float32))


# Zero points.


@pytest.mark.parametrize("name", EVERY)
def test_scale_and_zero_point_come_together(name):
    with refused(ValueError, rf"^{name}: zero_point alone is given "):
        EVERY[name](X, UINT8, zero_point=3)
    refused(ValueError, rf"^{name}: scale alone is given ", EVERY[name], X, UINT8, scale=0.5)
    with refused(ValueError, rf"^{name}: saturation='none' with zero points"):
        EVERY[name](X, UINT8, saturation="none")


@pytest.mark.parametrize(
    "value",
    [
        256,
        -1,
        2**40,
        -(2**31) - 1,
        np.full((1, 1), 256, np.int32),
        np.full((1, 1), -1, np.int8),
        np.full((1, 1), 2**40, np.int64),
        np.full((1, 1), 2**32 - 1, np.uint32),
    ],
    ids=repr,
)
def test_zero_points_beyond_the_integers(value):
    with refused(ValueError, r"^quantize: zero_point "):
        qt.quantize(X, UINT8, scale=0.5, zero_point=value)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (1.0, "float"),
        (True, "bool"),
        ("1", "str"),
        ([[1]], "list"),
        (np.ones((1, 1), np.float32), "float32"),
        (np.ones((1, 1), bool), "bool"),
    ],
)
def test_zero_points_of_another_type(value, got):
    with refused(TypeError, rf"^quantize: zero_point has {got}"):
        qt.quantize(X, UINT8, scale=0.5, zero_point=value)


def test_zero_points_of_another_shape():
    for value in (np.ones((2, 1), np.int32), np.ones(1, np.int32), np.ones((4, 64), np.int32)):
        with refused(ValueError, r"^quantize: zero_point has shape .* \(1, 1\)"):
            qt.quantize(X, UINT8, scale=0.5, zero_point=value)


# Packing, dequantizing.


@pytest.mark.parametrize("spec", ["int8", "mxfp8_e4m3", "int3", "int16", "uint5"])
def test_widths_that_cannot_be_packed(spec):
    bits = qt.formats.spec(spec).element.bits
    refused(ValueError, f"^quantize: packed=True .* {bits} bits", qt.quantize, X, spec, packed=True)


def test_a_scalar_cannot_be_packed():
    refused(ValueError, "packed=True for a scalar", qt.quantize, np.float32(1), "int4", packed=True)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, bool, "e4m3fn", jnp.float8_e4m3fn])
def test_dequantize_to_another_dtype(dtype):
    q = qt.quantize(X, "int8")
    refused(TypeError, r"^dequantize: dtype ", q.dequantize, dtype)
