"""Every property of every shipped format, against tables typed in by hand and two libraries."""

import copy
import dataclasses
import pickle
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest

import qtoolkit as qt
from qtoolkit import formats
from qtoolkit.formats import FloatFormat, IntFormat, Overflow, Specials

pytestmark = pytest.mark.quick


def two(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


# OFP8 1.0, arXiv:2206.02915, IEEE 754-2019; bfloat16 is the upper half of binary32.
FLOATS = {
    "e4m3fn": {
        "bits": 8,
        "exponent_bits": 4,
        "mantissa_bits": 3,
        "bias": 7,
        "max_finite": Fraction(448),
        "min_normal": two(-6),
        "min_subnormal": two(-9),
        "epsilon": Fraction(1, 8),
        "max_exponent": 8,
        "min_exponent": -6,
        "max_code": 0x7E,
        "inf_code": None,
        "nan_code": 0x7F,
        "nan_codes": (0x7F, 0xFF),
        "overflow_code": 0x7F,
        "finite_count": 253,
        "has_inf": False,
        "has_negative_zero": True,
    },
    "e5m2": {
        "bits": 8,
        "exponent_bits": 5,
        "mantissa_bits": 2,
        "bias": 15,
        "max_finite": Fraction(57344),
        "min_normal": two(-14),
        "min_subnormal": two(-16),
        "epsilon": Fraction(1, 4),
        "max_exponent": 15,
        "min_exponent": -14,
        "max_code": 0x7B,
        "inf_code": 0x7C,
        "nan_code": 0x7E,
        "nan_codes": (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF),
        "overflow_code": 0x7C,
        "finite_count": 247,
        "has_inf": True,
        "has_negative_zero": True,
    },
    "e4m3fnuz": {
        "bits": 8,
        "exponent_bits": 4,
        "mantissa_bits": 3,
        "bias": 8,
        "max_finite": Fraction(240),
        "min_normal": two(-7),
        "min_subnormal": two(-10),
        "epsilon": Fraction(1, 8),
        "max_exponent": 7,
        "min_exponent": -7,
        "max_code": 0x7F,
        "inf_code": None,
        "nan_code": 0x80,
        "nan_codes": (0x80,),
        "overflow_code": 0x80,
        "finite_count": 255,
        "has_inf": False,
        "has_negative_zero": False,
    },
    "e5m2fnuz": {
        "bits": 8,
        "exponent_bits": 5,
        "mantissa_bits": 2,
        "bias": 16,
        "max_finite": Fraction(57344),
        "min_normal": two(-15),
        "min_subnormal": two(-17),
        "epsilon": Fraction(1, 4),
        "max_exponent": 15,
        "min_exponent": -15,
        "max_code": 0x7F,
        "inf_code": None,
        "nan_code": 0x80,
        "nan_codes": (0x80,),
        "overflow_code": 0x80,
        "finite_count": 255,
        "has_inf": False,
        "has_negative_zero": False,
    },
    "bfloat16": {
        "bits": 16,
        "exponent_bits": 8,
        "mantissa_bits": 7,
        "bias": 127,
        "max_finite": (2 - two(-7)) * two(127),
        "min_normal": two(-126),
        "min_subnormal": two(-133),
        "epsilon": two(-7),
        "max_exponent": 127,
        "min_exponent": -126,
        "max_code": 0x7F7F,
        "inf_code": 0x7F80,
        "nan_code": 0x7FC0,
        "nan_codes": (*range(0x7F81, 0x8000), *range(0xFF81, 0x10000)),
        "overflow_code": 0x7F80,
        "finite_count": 65279,
        "has_inf": True,
        "has_negative_zero": True,
    },
    "float16": {
        "bits": 16,
        "exponent_bits": 5,
        "mantissa_bits": 10,
        "bias": 15,
        "max_finite": Fraction(65504),
        "min_normal": two(-14),
        "min_subnormal": two(-24),
        "epsilon": two(-10),
        "max_exponent": 15,
        "min_exponent": -14,
        "max_code": 0x7BFF,
        "inf_code": 0x7C00,
        "nan_code": 0x7E00,
        "nan_codes": (*range(0x7C01, 0x8000), *range(0xFC01, 0x10000)),
        "overflow_code": 0x7C00,
        "finite_count": 63487,
        "has_inf": True,
        "has_negative_zero": True,
    },
}
DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "int8": np.int8,
}
EXACT = ("max_finite", "lowest", "min_normal", "min_subnormal", "epsilon")


def test_the_formats_that_ship():
    assert tuple(f.name for f in formats.FORMATS) == tuple(DTYPES)
    shipped = (formats.E4M3FN, formats.E5M2, formats.E4M3FNUZ, formats.E5M2FNUZ)
    shipped = (*shipped, formats.BFLOAT16, formats.FLOAT16, formats.INT8)
    assert list(formats.FORMATS) == list(shipped)
    assert len(set(formats.FORMATS)) == len(formats.FORMATS)


@pytest.mark.parametrize("name", FLOATS)
def test_every_property(name):
    fmt = qt.format(name)
    got = {field: getattr(fmt, field) for field in FLOATS[name]}
    assert got == FLOATS[name]
    assert fmt.lowest == -FLOATS[name]["max_finite"]
    assert fmt.sign_code == 2 ** (FLOATS[name]["bits"] - 1)
    assert fmt.code_dtype == np.dtype(f"uint{FLOATS[name]['bits']}")
    assert fmt.dtype == np.dtype(DTYPES[name])
    assert fmt.dtype.name == fmt.dtype_name
    for field in EXACT:
        assert type(getattr(fmt, field)) is Fraction


def test_int8():
    fmt = qt.format("int8")
    assert (fmt.bits, fmt.signed, fmt.lowest, fmt.max_finite) == (8, True, -128, 127)
    assert (fmt.min_subnormal, fmt.finite_count, fmt.mantissa_bits) == (1, 256, 6)
    assert fmt.dtype == np.dtype(np.int8)
    assert fmt.code_dtype == np.dtype(np.uint8)
    assert type(fmt.max_finite) is type(fmt.lowest) is type(fmt.min_subnormal) is Fraction
    info = ml_dtypes.iinfo(np.int8)
    assert (fmt.lowest, fmt.max_finite, fmt.bits) == (info.min, info.max, info.bits)


@pytest.mark.parametrize(
    ("bits", "signed", "lowest", "highest", "code"),
    [
        (1, True, -1, 0, "uint8"),
        (1, False, 0, 1, "uint8"),
        (2, True, -2, 1, "uint8"),
        (4, True, -8, 7, "uint8"),
        (4, False, 0, 15, "uint8"),
        (8, False, 0, 255, "uint8"),
        (9, True, -256, 255, "uint16"),
        (16, False, 0, 65535, "uint16"),
        (17, False, 0, 131071, "uint32"),
        (32, True, -(2**31), 2**31 - 1, "uint32"),
        (32, False, 0, 2**32 - 1, "uint32"),
    ],
)
def test_user_made_integers(bits, signed, lowest, highest, code):
    fmt = IntFormat(name="made", bits=bits, signed=signed)
    assert (fmt.lowest, fmt.max_finite, fmt.finite_count) == (lowest, highest, 2**bits)
    assert fmt.code_dtype == np.dtype(code)
    assert fmt.dtype is None
    # A float of that many bits after the leading one holds every value, one of fewer does not.
    longest = max(abs(lowest).bit_length() - (lowest != 0), highest.bit_length())
    assert fmt.mantissa_bits == max(longest - 1, 0)


@pytest.mark.parametrize("name", FLOATS)
def test_ml_dtypes_finfo_agrees(name):
    fmt, info = qt.format(name), ml_dtypes.finfo(DTYPES[name])
    assert fmt.bits == info.bits
    assert fmt.mantissa_bits == info.nmant
    assert fmt.exponent_bits == info.iexp
    for ours, theirs in (
        (fmt.max_finite, info.max),
        (fmt.lowest, info.min),
        (fmt.min_normal, info.smallest_normal),
        (fmt.min_subnormal, info.smallest_subnormal),
        (fmt.epsilon, info.eps),
    ):
        assert ours == Fraction(float(theirs))


@pytest.mark.parametrize("name", FLOATS)
def test_gfloat_agrees(name):
    fnuz = {
        "k": 8,
        "is_signed": True,
        "domain": gfloat.Domain.Finite,
        "has_nz": False,
        "num_high_nans": 0,
        "has_subnormals": True,
        "is_twos_complement": False,
    }
    info = {
        "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
        "e5m2": gfloat.formats.format_info_ocp_e5m2,
        "e4m3fnuz": gfloat.FormatInfo("e4m3fnuz", precision=4, bias=8, **fnuz),
        "e5m2fnuz": gfloat.FormatInfo("e5m2fnuz", precision=3, bias=16, **fnuz),
        "bfloat16": gfloat.formats.format_info_bfloat16,
        "float16": gfloat.formats.format_info_binary16,
    }[name]
    fmt = qt.format(name)
    assert (fmt.bits, fmt.exponent_bits, fmt.bias) == (info.k, info.expBits, info.bias)
    assert fmt.max_finite == Fraction(info.max)
    assert fmt.lowest == Fraction(info.min)
    assert fmt.min_normal == Fraction(info.smallest_normal)
    assert fmt.min_subnormal == Fraction(info.smallest_subnormal)
    assert fmt.epsilon == Fraction(info.eps)
    assert fmt.max_code == info.code_of_max
    assert len(fmt.nan_codes) == info.num_nans
    assert fmt.has_inf == (info.num_infs > 0)
    assert fmt.has_negative_zero == info.has_nz
    if fmt.has_inf:
        assert fmt.inf_code == info.code_of_posinf
    values = [gfloat.decode_float(info, code) for code in range(2**fmt.bits)]
    nans = tuple(v.code for v in values if np.isnan(v.fval))
    assert fmt.nan_codes == nans
    assert fmt.nan_code in nans
    assert fmt.finite_count == len({v.fval for v in values if np.isfinite(v.fval)})
    for code in range(fmt.max_code + 1):
        assert fmt.magnitude(code) == Fraction(values[code].fval)


def test_magnitude_of_codes_above_the_largest_is_the_next_in_line():
    assert [qt.format("e4m3fn").magnitude(c) for c in (0, 1, 7, 8, 0x38, 0x7E, 0x7F)] == [
        *(0, Fraction(1, 512), Fraction(7, 512), Fraction(1, 64), 1, 448, 480)
    ]
    assert qt.format("e5m2").magnitude(0x7C) == 65536
    assert qt.format("e4m3fnuz").magnitude(0x80) == 256


def test_formats_of_subnormals_alone():
    """With one exponent bit IEEE leaves field 0: 0, 0.25, 0.5, 0.75 for bias 1 and two bits."""
    fmt = FloatFormat(
        name="made",
        exponent_bits=1,
        mantissa_bits=2,
        bias=1,
        specials=Specials.IEEE,
        overflow=Overflow.INF,
    )
    assert (fmt.max_code, fmt.inf_code, fmt.nan_code, fmt.nan_codes) == (
        *(3, 4, 6),
        (5, 6, 7, 13, 14, 15),
    )
    assert (fmt.max_finite, fmt.min_subnormal, fmt.finite_count) == (Fraction(3, 4), two(-2), 7)
    assert fmt.max_exponent == -1


@pytest.mark.parametrize("fmt", formats.FORMATS, ids=lambda fmt: fmt.name)
def test_frozen_hashable_and_equal_whatever_the_spellings(fmt):
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        del fmt.name
    fmt.max_finite  # noqa: B018  (a cached property must not change the hash or equality)
    bare = dataclasses.replace(fmt, spellings=())
    assert bare == fmt
    assert hash(bare) == hash(fmt)
    assert "spellings" not in repr(fmt)
    for other in (copy.copy(fmt), copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt))):
        assert other == fmt
        assert hash(other) == hash(fmt)
    assert dataclasses.replace(fmt, name="other") != fmt
    assert dataclasses.replace(fmt, dtype_name=None) != fmt
    assert len({fmt, bare}) == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"exponent_bits": 0}, "exponent_bits=0, mantissa_bits=3; expected at least one bit"),
        ({"mantissa_bits": 0}, "exponent_bits=4, mantissa_bits=0; expected at least one bit"),
        ({"exponent_bits": -1}, "exponent_bits=-1"),
        ({"exponent_bits": 8, "mantissa_bits": 24}, "at most 32 bits with the sign"),
        ({"overflow": Overflow.INF}, "overflow=INF, but specials=FN has no infinity"),
        (
            {"overflow": Overflow.INF, "specials": Specials.FNUZ},
            "overflow=INF, but specials=FNUZ has no infinity",
        ),
    ],
)
def test_bad_float_constructions_raise(fields, why):
    good = {
        "name": "made",
        "exponent_bits": 4,
        "mantissa_bits": 3,
        "bias": 7,
        "specials": Specials.FN,
        "overflow": Overflow.NAN,
    }
    assert FloatFormat(**good).max_finite == 448
    with pytest.raises(ValueError, match=f"^FloatFormat 'made': .*{why}"):
        FloatFormat(**(good | fields))


@pytest.mark.parametrize("bits", [0, -1, 33, 64])
def test_bad_integer_constructions_raise(bits):
    with pytest.raises(ValueError, match=rf"^IntFormat 'made': bits={bits}, expected 1 to 32"):
        IntFormat(name="made", bits=bits)


@pytest.mark.parametrize("kind", [FloatFormat, IntFormat])
def test_constructions_by_keyword_alone(kind):
    with pytest.raises(TypeError, match="positional"):
        kind("made", 8)
    with pytest.raises(TypeError, match="missing"):
        kind(name="made")
