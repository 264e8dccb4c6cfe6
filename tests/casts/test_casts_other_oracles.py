"""The same casts against ml_dtypes and gfloat, and decode of every code."""

import gfloat
import gfloat.formats
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from casts_oracle import (
    SHIPPED,
    SOURCES,
    Float,
    assert_same_bits,
    bits_of,
    inputs,
)

import qtoolkit as qt

ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
FNUZ = {
    "k": 8,
    "is_signed": True,
    "domain": gfloat.Domain.Finite,
    "has_nz": False,
    "num_high_nans": 0,
    "has_subnormals": True,
    "is_twos_complement": False,
}
GFLOAT = {
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e4m3fnuz": gfloat.FormatInfo("e4m3fnuz", precision=4, bias=8, **FNUZ),
    "e5m2fnuz": gfloat.FormatInfo("e5m2fnuz", precision=3, bias=16, **FNUZ),
    "bfloat16": gfloat.formats.format_info_bfloat16,
    "float16": gfloat.formats.format_info_binary16,
}
LARGEST = {
    "e4m3fn": 448,
    "e5m2": 57344,
    "e4m3fnuz": 240,
    "e5m2fnuz": 57344,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float16": 65504,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ML_DTYPES)
def test_encode_equals_ml_dtypes(name, source):
    """It never saturates: our "none"; clipped before, our "finite"."""
    x = inputs(source, SHIPPED[name], random=2**18)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = x.astype(np.float32)
        clipped = np.clip(wide, -np.float32(LARGEST[name]), np.float32(LARGEST[name]))
        for saturation, before in (("none", wide), ("finite", clipped)):
            expected = bits_of(before.astype(ML_DTYPES[name]))
            got = np.asarray(qt.encode(x, name, saturation=saturation))
            # Which NaN an ml_dtypes or numpy cast writes depends on the payload; the sign does not.
            nan = np.isnan(wide)
            assert_same_bits(got[~nan], expected[~nan], x[~nan])
            assert np.isnan(got[nan].view(ML_DTYPES[name])).all()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", GFLOAT)
def test_encode_equals_gfloat(name, source):
    """`sat` on is our "finite", off our "none"; it writes one NaN for all."""
    x = inputs(source, SHIPPED[name], random=2**16)
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float32).astype(np.float64)
    for saturation, sat in (("finite", True), ("none", False)):
        rounded = gfloat.round_ndarray(GFLOAT[name], exact, gfloat.RoundMode.TiesToEven, sat)
        expected = gfloat.encode_ndarray(GFLOAT[name], rounded).astype(SHIPPED[name].unsigned)
        got = np.asarray(qt.encode(x, name, saturation=saturation))
        nan = np.isnan(rounded)
        assert_same_bits(got[~nan], expected[~nan], x[~nan])
        assert np.isnan(got[nan].view(ML_DTYPES[name])).all()


def test_int8_equals_numpy_rint_and_clip():
    x = inputs("float32", SHIPPED["int8"], random=2**18)
    x = x[~np.isnan(x)]
    expected = np.clip(np.rint(x), -128, 127).astype(np.int8).view(np.uint8)
    assert_same_bits(qt.encode(x, "int8"), expected, x)


@pytest.mark.quick
@pytest.mark.parametrize("name", ML_DTYPES)
def test_decode_of_every_code_equals_ml_dtypes(name):
    spec = SHIPPED[name]
    assert isinstance(spec, Float)
    code = np.arange(2 * spec.sign, dtype=spec.unsigned)
    with np.errstate(invalid="ignore"):
        expected = code.view(ML_DTYPES[name]).astype(np.float32)
    got = np.asarray(qt.decode(code, name))
    nan = np.isnan(expected)
    assert_same_bits(got[~nan], expected[~nan], code[~nan])
    quiet = np.uint32(0x7FC00000)
    negative = (code[nan] >= spec.sign) & (spec.kind != "fnuz")  # the FNUZ NaN has no sign
    assert_same_bits(
        bits_of(got)[nan], quiet | (negative.astype(np.uint32) << np.uint32(31)), code[nan]
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", SHIPPED)
def test_encode_gives_every_code_back(name):
    spec = SHIPPED[name]
    count = 2 * spec.sign if isinstance(spec, Float) else 256
    code = np.arange(count, dtype=spec.unsigned)
    value = np.asarray(qt.decode(code, name))
    for saturation in ("finite", "propagate", "none"):
        back = np.asarray(qt.encode(value, name, saturation=saturation))
        kept = ~np.isnan(value)
        if saturation == "finite":  # infinities clamp
            kept &= ~np.isinf(value)
        assert_same_bits(back[kept], code[kept], code[kept])
    # Also from the array that `cast` returns, which has the format's own dtype.
    own = jnp.asarray(code.view(qt.format(name).dtype))
    assert_same_bits(qt.decode(own, name), value, code)
    assert_same_bits(qt.decode(np.asarray(own), name), value, code)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "int8")
        for dtype in ("float16", "bfloat16")
    ]
    + [("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_decode_to_16_bits_holds_the_same_values(name, dtype):
    spec = SHIPPED[name]
    count = 2 * spec.sign if isinstance(spec, Float) else 256
    code = np.arange(count, dtype=spec.unsigned)
    got = qt.decode(code, name, SOURCES[dtype])
    assert got.dtype == SOURCES[dtype]
    wide = np.asarray(qt.decode(code, name))
    with np.errstate(invalid="ignore"):
        assert_same_bits(np.asarray(got).astype(np.float32), wide, code)


def test_int8_decodes_as_twos_complement():
    code = np.arange(256, dtype=np.uint8)
    expected = code.view(np.int8).astype(np.float32)
    assert_same_bits(qt.decode(code, "int8"), expected)
    assert_same_bits(qt.decode(code.view(np.int8), "int8"), expected)
