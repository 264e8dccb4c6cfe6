"""Every property of every shipped format, against tables typed in by hand and two libraries."""

import copy
import dataclasses
import itertools
import pickle
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
from each import each
from refused import refused

import qtoolkit as qt
from qtoolkit import formats
from qtoolkit.formats import FloatFormat, IntFormat, Overflow, Specials, TableFormat

pytestmark = pytest.mark.quick


def two(exponent: int) -> Fraction:
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


FIELDS = (
    *("signed", "exponent_bits", "mantissa_bits", "bias", "specials", "overflow"),
    *("max_finite", "min_normal", "min_subnormal", "max_exponent", "min_exponent"),
    *("max_code", "inf_code", "nan_code", "nans", "finite_count"),
)
IEEE, FN, FNUZ, NONE = Specials.IEEE, Specials.FN, Specials.FNUZ, Specials.NONE
INF, NAN, MAX = Overflow.INF, Overflow.NAN, Overflow.MAX
# IEEE 754-2019; OFP8 1.0; arXiv:2206.02915; OCP MX 1.0; `nans` are the first and last of each run.
ROWS = {
    "float64": (
        *(True, 11, 52, 1023, IEEE, INF),
        *((2 - two(-52)) * two(1023), two(-1022), two(-1074), 1023, -1022),
        *(0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000),
        (*(0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF), *(0xFFF0000000000001, 0xFFFFFFFFFFFFFFFF)),
        2**64 - 2**53 - 1,
    ),
    "float32": (
        *(True, 8, 23, 127, IEEE, INF),
        *((2 - two(-23)) * two(127), two(-126), two(-149), 127, -126),
        *(0x7F7FFFFF, 0x7F800000, 0x7FC00000),
        *((0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF), 2**32 - 2**24 - 1),
    ),
    "tf32": (
        *(True, 8, 10, 127, IEEE, INF),
        *((2 - two(-10)) * two(127), two(-126), two(-136), 127, -126),
        *(0x3FBFF, 0x3FC00, 0x3FE00, (0x3FC01, 0x3FFFF, 0x7FC01, 0x7FFFF), 522239),
    ),
    "float16": (
        *(True, 5, 10, 15, IEEE, INF, 65504, two(-14), two(-24), 15, -14),
        *(0x7BFF, 0x7C00, 0x7E00, (0x7C01, 0x7FFF, 0xFC01, 0xFFFF), 63487),
    ),
    "bfloat16": (
        *(True, 8, 7, 127, IEEE, INF),
        *((2 - two(-7)) * two(127), two(-126), two(-133), 127, -126),
        *(0x7F7F, 0x7F80, 0x7FC0, (0x7F81, 0x7FFF, 0xFF81, 0xFFFF), 65279),
    ),
    "e4m3fn": (
        *(True, 4, 3, 7, FN, NAN, 448, two(-6), two(-9), 8, -6),
        *(0x7E, None, 0x7F, (0x7F, 0x7F, 0xFF, 0xFF), 253),
    ),
    "e5m2": (
        *(True, 5, 2, 15, IEEE, INF, 57344, two(-14), two(-16), 15, -14),
        *(0x7B, 0x7C, 0x7E, (0x7D, 0x7F, 0xFD, 0xFF), 247),
    ),
    "e4m3fnuz": (
        *(True, 4, 3, 8, FNUZ, NAN, 240, two(-7), two(-10), 7, -7),
        *(0x7F, None, 0x80, (0x80, 0x80), 255),
    ),
    "e5m2fnuz": (
        *(True, 5, 2, 16, FNUZ, NAN, 57344, two(-15), two(-17), 15, -15),
        *(0x7F, None, 0x80, (0x80, 0x80), 255),
    ),
    "e4m3b11fnuz": (
        *(True, 4, 3, 11, FNUZ, NAN, 30, two(-10), two(-13), 4, -10),
        *(0x7F, None, 0x80, (0x80, 0x80), 255),
    ),
    "e4m3_ieee": (
        *(True, 4, 3, 7, IEEE, INF, 240, two(-6), two(-9), 7, -6),
        *(0x77, 0x78, 0x7C, (0x79, 0x7F, 0xF9, 0xFF), 239),
    ),
    "e3m4": (
        *(True, 3, 4, 3, IEEE, INF, Fraction(31, 2), two(-2), two(-6), 3, -2),
        *(0x6F, 0x70, 0x78, (0x71, 0x7F, 0xF1, 0xFF), 223),
    ),
    "ue4m3": (
        *(False, 4, 3, 7, FN, NAN, 448, two(-6), two(-9), 8, -6),
        *(0x7E, None, 0x7F, (0x7F, 0x7F), 127),
    ),
    "e8m0fnu": (
        *(False, 8, 0, 127, FN, NAN, two(127), two(-127), two(-127), 127, -127),
        *(0xFE, None, 0xFF, (0xFF, 0xFF), 255),
    ),
    "e2m3fn": (
        *(True, 2, 3, 1, NONE, MAX, Fraction(15, 2), 1, Fraction(1, 8), 2, 0),
        *(0x1F, None, None, (), 63),
    ),
    "e3m2fn": (
        *(True, 3, 2, 3, NONE, MAX, 28, Fraction(1, 4), Fraction(1, 16), 4, -2),
        *(0x1F, None, None, (), 63),
    ),
    "e2m1fn": (*(True, 2, 1, 1, NONE, MAX, 6, 1, Fraction(1, 2), 2, 0), *(0x7, None, None, (), 15)),
    "e1m2fn": (
        *(True, 1, 2, 1, NONE, MAX, Fraction(7, 4), 1, Fraction(1, 4), 0, 0),
        *(0x7, None, None, (), 15),
    ),
}
FLOATS = {name: dict(zip(FIELDS, row, strict=True)) for name, row in ROWS.items()}
EIGHT_BITS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e3m4", "e8m0fnu")
DTYPES = {
    **{name: np.dtype(name) for name in ("float64", "float32", "float16", "bfloat16")},
    **{name: getattr(ml_dtypes, f"float8_{name}") for name in EIGHT_BITS},
    "e4m3_ieee": ml_dtypes.float8_e4m3,
    "e2m1fn": ml_dtypes.float4_e2m1fn,
}
# ml_dtypes has these for FP6, but JAX has not, so they are not the formats' own dtypes.
ORACLES = DTYPES | {"e2m3fn": ml_dtypes.float6_e2m3fn, "e3m2fn": ml_dtypes.float6_e3m2fn}
SMALL = [name for name in FLOATS if name not in ("float64", "float32", "tf32")]
EXACT = ("max_finite", "lowest", "min_normal", "min_positive", "min_subnormal", "epsilon")
INTS = [f"{u}int{bits}" for u in ("", "u") for bits in (2, 4, 8, 16, 32, 64)]


def test_the_formats_that_ship():
    names = [fmt.name for fmt in formats.FORMATS]
    assert sorted(names) == sorted([*FLOATS, *INTS, "bool", "hifloat8", "posit8", "nf4"])
    assert len(set(formats.FORMATS)) == len(formats.FORMATS)
    for fmt in formats.FORMATS:
        assert getattr(formats, fmt.name.upper()) is fmt
        assert fmt.name.upper() in formats.__all__


@pytest.mark.parametrize("name", FLOATS)
def test_every_property(name):
    fmt, expected = qt.format(name), dict(FLOATS[name])
    nans = expected.pop("nans")
    got = {field: getattr(fmt, field) for field in expected}
    assert got == expected
    assert sum(((run[0], run[-1]) for run in fmt.nan_ranges), ()) == nans
    signed, bits = expected["signed"], fmt.bits
    assert bits == signed + expected["exponent_bits"] + expected["mantissa_bits"]
    assert fmt.epsilon == two(-expected["mantissa_bits"])
    assert fmt.sign_code == (2 ** (bits - 1) if signed else 0)
    assert fmt.has_zero == (name != "e8m0fnu")
    assert fmt.lowest == (-fmt.max_finite if signed else two(-127) if name == "e8m0fnu" else 0)
    assert (fmt.has_inf, fmt.has_nan) == (expected["inf_code"] is not None, bool(nans))
    assert fmt.has_negative_zero == (signed and expected["specials"] is not FNUZ)
    codes = {INF: fmt.inf_code, NAN: fmt.nan_code, MAX: fmt.max_code}
    assert fmt.overflow_code == codes[expected["overflow"]]
    assert fmt.needs_scale == (bits <= 8)
    assert fmt.code_dtype == np.dtype(f"uint{max(8, 32 if bits == 19 else bits, bits // 8 * 8)}")
    assert fmt.dtype == (np.dtype(DTYPES[name]) if name in DTYPES else None)
    for field in EXACT:
        assert type(getattr(fmt, field)) is Fraction


@pytest.mark.parametrize("name", SMALL)
def test_all_codes(name):
    """Each code, `value` and `values`, against ml_dtypes and gfloat."""
    fmt = qt.format(name)
    values = fmt.values()
    assert (values.dtype, values.shape) == (np.dtype(np.float64), (2**fmt.bits,))
    if name in ORACLES:
        codes = np.arange(2**fmt.bits, dtype=fmt.code_dtype)
        with np.errstate(invalid="ignore"):  # signalling NaN
            oracle = codes.view(ORACLES[name]).astype(np.float64)
        np.testing.assert_array_equal(values, oracle)
        np.testing.assert_array_equal(
            np.signbit(values[values == 0]), np.signbit(oracle[oracle == 0])
        )
    nans = tuple(np.flatnonzero(np.isnan(values)).tolist())
    assert fmt.nan_codes == nans
    assert fmt.finite_count == len(np.unique(values[np.isfinite(values)]))
    for code in {0, 1, fmt.max_code, fmt.max_code + 1, 2 ** (fmt.bits - 1), 2**fmt.bits - 1}:
        if code < 2**fmt.bits:
            np.testing.assert_array_equal(float(fmt.value(code)), values[code])
    for code in (-1, 2**fmt.bits):
        refused(ValueError, rf"^{name}: code {code}", fmt.value, code)


@pytest.mark.parametrize("name", ["e4m3fn", "e8m0fnu", "binary8p3se", "float16", "int5", "nf4"])
def test_codes_may_be_integers_of_numpy(name):
    """As `encode` returns them; the oracle is the same code as an integer of Python."""
    fmt = qt.format(name)
    codes = np.arange(1 << fmt.bits, dtype=fmt.code_dtype)
    got, expected = map(fmt.value, codes), map(fmt.value, range(1 << fmt.bits))
    assert list(map(repr, got)) == list(map(repr, expected))
    refused(TypeError, f"{name}: code has type float", fmt.value, 1.0)


def test_values_of_the_smallest():
    assert qt.format("e2m1").values().tolist() == [
        *(0, 0.5, 1, 1.5, 2, 3, 4, 6),
        *(-0.0, -0.5, -1, -1.5, -2, -3, -4, -6),
    ]
    quarters = [0.25 * n for n in range(8)]
    assert qt.format("e1m2").values().tolist() == [*quarters, *(-q for q in quarters)]
    assert np.signbit(qt.format("e1m2").values()[8])


@pytest.mark.parametrize("name", ["float64", "float32", "tf32", "int32", "uint17", "uint64"])
def test_too_many_values_to_list(name):
    fmt = qt.format(name)
    refused(ValueError, rf"^{name}: 2\*\*{fmt.bits} codes are too many to list", fmt.values)


def test_formats_of_many_bits_answer_at_once():
    """Neither builds the tuple of all codes of NaN, 2**53 of them."""
    assert formats.FLOAT64.value(0x3FF0000000000000) == 1
    assert formats.FLOAT32.value(0x00000001) == two(-149)
    for code in (0x7F800001, 0x7FC00000, 0xFFFFFFFF):
        assert np.isnan(formats.FLOAT32.value(code))
    assert formats.FLOAT32.value(0xFF800000) == -np.inf
    zero = formats.FLOAT32.value(0x80000000)
    assert zero == 0
    assert np.signbit(zero)
    with refused(ValueError, r"^float32: 16777214 codes of NaN are too many to list"):
        formats.FLOAT32.nan_codes  # noqa: B018
    assert len(formats.TF32.nan_codes) == 2046


@each("bits", range(1, 65))
@each("signed", [True, False])
def test_integers_of_every_width(bits, signed):
    name = f"{'' if signed else 'u'}int{bits}"
    fmt = qt.format(name)
    lowest, highest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    assert fmt == qt.format(name.upper())
    assert (fmt.name, fmt.bits, fmt.signed, fmt.is_bool) == (name, bits, signed, False)
    assert (fmt.lowest, fmt.max_finite, fmt.finite_count) == (lowest, highest, 2**bits)
    assert (fmt.min_positive, fmt.needs_scale) == (1, True)
    widths = [w for w in (8, 16, 32, 64) if w >= bits]
    assert fmt.code_dtype == np.dtype(f"uint{widths[0]}")
    own = bits in (2, 4, 8, 16, 32, 64)
    assert fmt.dtype == (np.dtype(name) if own else None)
    assert type(fmt.max_finite) is type(fmt.lowest) is type(fmt.min_positive) is Fraction
    assert (fmt.value(0), fmt.value(2**bits - 1)) == (0, -1 if signed else highest)
    assert fmt.value(2 ** (bits - 1)) == (lowest if signed else 2 ** (bits - 1))
    # A float of that many bits after the leading one holds every value, one of fewer does not.
    longest = max(abs(lowest).bit_length() - (lowest != 0), highest.bit_length())
    assert fmt.mantissa_bits == max(longest - 1, 0)
    if own:
        info = ml_dtypes.iinfo(name)
        assert (fmt.lowest, fmt.max_finite, fmt.bits) == (info.min, info.max, info.bits)
    if bits <= 8:
        assert fmt.values().tolist() == [*range(highest + 1), *range(lowest, 0)]


def test_bool():
    fmt = formats.BOOL
    assert (fmt.bits, fmt.signed, fmt.is_bool, fmt.dtype) == (1, False, True, np.dtype(bool))
    assert (fmt.lowest, fmt.max_finite, fmt.finite_count) == (0, 1, 2)
    assert fmt.values().tolist() == [0, 1]
    assert fmt != qt.format("uint1")


@pytest.mark.parametrize("name", ORACLES)
def test_ml_dtypes_finfo_agrees(name):
    fmt, info = qt.format(name), ml_dtypes.finfo(ORACLES[name])
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


def described_for_gfloat(name, **changes):
    """gfloat's way to describe a format, from the same published parameters."""
    precision, bias, nans = changes["precision"], changes["bias"], changes.get("nans", 0)
    return gfloat.FormatInfo(
        name,
        k=changes.get("k", 8),
        precision=precision,
        bias=bias,
        is_signed=changes.get("signed", True),
        domain=gfloat.Domain.Extended if changes.get("inf") else gfloat.Domain.Finite,
        has_nz=changes.get("negative_zero", False),
        num_high_nans=nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


GFLOAT = {
    "float64": gfloat.formats.format_info_binary64,
    "float32": gfloat.formats.format_info_binary32,
    "tf32": described_for_gfloat(
        "tf32", k=19, precision=11, bias=127, inf=True, negative_zero=True, nans=1023
    ),
    "float16": gfloat.formats.format_info_binary16,
    "bfloat16": gfloat.formats.format_info_bfloat16,
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e4m3fnuz": described_for_gfloat("e4m3fnuz", precision=4, bias=8),
    "e5m2fnuz": described_for_gfloat("e5m2fnuz", precision=3, bias=16),
    "e4m3b11fnuz": described_for_gfloat("e4m3b11fnuz", precision=4, bias=11),
    "e4m3_ieee": described_for_gfloat(
        "e4m3_ieee", precision=4, bias=7, inf=True, negative_zero=True, nans=7
    ),
    "e3m4": described_for_gfloat(
        "e3m4", precision=5, bias=3, inf=True, negative_zero=True, nans=15
    ),
    "ue4m3": described_for_gfloat("ue4m3", k=7, precision=4, bias=7, signed=False, nans=1),
    "e8m0fnu": gfloat.formats.format_info_ocp_e8m0,
    "e2m3fn": gfloat.formats.format_info_ocp_e2m3,
    "e3m2fn": gfloat.formats.format_info_ocp_e3m2,
    "e2m1fn": gfloat.formats.format_info_ocp_e2m1,
    "e1m2fn": described_for_gfloat("e1m2fn", k=4, precision=3, bias=1, negative_zero=True),
}


@pytest.mark.parametrize("name", FLOATS)
def test_gfloat_agrees(name):
    fmt, info = qt.format(name), GFLOAT[name]
    assert (fmt.bits, fmt.exponent_bits, fmt.bias) == (info.k, info.expBits, info.bias)
    assert fmt.max_finite == Fraction(info.max)
    assert fmt.lowest == Fraction(info.min)
    assert fmt.min_normal == Fraction(info.smallest_normal)
    assert fmt.min_subnormal == Fraction(info.smallest)
    assert fmt.epsilon == Fraction(info.eps)
    assert fmt.max_code == info.code_of_max
    assert sum(map(len, fmt.nan_ranges)) == info.num_nans
    assert fmt.has_inf == (info.num_infs > 0)
    assert fmt.has_negative_zero == info.has_nz
    if fmt.has_inf:
        assert fmt.inf_code == info.code_of_posinf
    if fmt.bits <= 8:
        theirs = [gfloat.decode_float(info, code).fval for code in range(2**fmt.bits)]
        np.testing.assert_array_equal(fmt.values(), theirs)
    else:
        rng = np.random.default_rng(0)
        for code in map(int, rng.integers(0, 2**fmt.bits - 1, 300, dtype=np.uint64)):
            ours, fval = float(fmt.value(code)), gfloat.decode_float(info, code).fval
            np.testing.assert_array_equal(ours, fval)


def test_magnitude_of_codes_above_the_largest():
    assert [qt.format("e4m3fn").magnitude(c) for c in (0, 1, 7, 8, 0x38, 0x7E, 0x7F)] == [
        *(0, Fraction(1, 512), Fraction(7, 512), Fraction(1, 64), 1, 448, 480)
    ]
    assert qt.format("e5m2").magnitude(0x7C) == 65536
    assert qt.format("e4m3fnuz").magnitude(0x80) == 256


def test_formats_of_subnormals_alone():
    """With one exponent bit IEEE leaves field 0: 0, 0.25, 0.5, 0.75 for bias 1 and two bits."""
    fmt = FloatFormat(
        name="made", exponent_bits=1, mantissa_bits=2, bias=1, specials=IEEE, overflow=INF
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
    if fmt.dtype is not None:
        assert dataclasses.replace(fmt, dtype_name=None) != fmt
    assert len({fmt, bare}) == 1


GOOD = {"name": "made", "exponent_bits": 4, "mantissa_bits": 3, "bias": 7}
GOOD |= {"specials": FN, "overflow": NAN}


@each("exponent_bits", range(1, 6))
@each("mantissa_bits", range(5))
@each("bias", [-3, 0, 1, 7, 40])
def test_formats_of_ones_own(exponent_bits, mantissa_bits, bias):
    """ExMy of any bias, under each rule of special codes, against a loop over sign and fields."""
    steps = 2**mantissa_bits
    for specials, signed in itertools.product(Specials, (True, False)):
        magnitudes = [
            Fraction(2) ** (max(e, 1) - bias) * ((e > 0) + Fraction(m, steps))
            for e in range(2**exponent_bits)
            for m in range(steps)
        ]
        size = len(magnitudes)
        inf_and_nan = {  # how many of the top codes are the infinity, and how many NaN
            Specials.IEEE: (1, steps - 1),
            Specials.FN: (0, 1),
            Specials.FNUZ: (0, 0),
            Specials.EXTENDED: (1, 0 if signed else 1),
            Specials.NONE: (0, 0),
        }[specials]
        finite = size - sum(inf_and_nan)
        overflow = Overflow.INF if inf_and_nan[0] else Overflow.MAX
        fields = {"exponent_bits": exponent_bits, "mantissa_bits": mantissa_bits, "bias": bias}
        fields |= {"specials": specials, "overflow": overflow, "signed": signed}
        impossible = specials is Specials.IEEE and mantissa_bits == 0
        if impossible or finite < 2 or (specials is Specials.FNUZ and not signed):
            refused(ValueError, r"^FloatFormat 'made': ", FloatFormat, **GOOD | fields)
            continue
        fmt = FloatFormat(**(GOOD | fields))
        nans = size - finite - inf_and_nan[0]
        positive = [*magnitudes[:finite], *[np.inf] * inf_and_nan[0], *[np.nan] * nans]
        values = np.array([float(value) for value in positive])
        if signed:
            negative = -values
            if specials in (Specials.FNUZ, Specials.EXTENDED):
                negative[0] = np.nan
            values = np.concatenate([values, negative])
        np.testing.assert_array_equal(fmt.values(), values)
        assert len(values) == 2**fmt.bits
        assert fmt.finite_count == len(np.unique(values[np.isfinite(values)]))
        assert fmt.nan_codes == tuple(np.flatnonzero(np.isnan(values)))
        assert fmt.max_finite == magnitudes[finite - 1]
        assert fmt.min_positive == fmt.min_subnormal == magnitudes[1]
        assert (
            Fraction(2) ** fmt.max_exponent
            <= fmt.max_finite
            < Fraction(2) ** (fmt.max_exponent + 1)
        )


@pytest.mark.parametrize("bias", [-2, -1, 0, 1, 3])
def test_epsilon_is_the_step_above_one(bias):
    """Also where 1 is subnormal; the oracle is the list of values."""
    fields = {"exponent_bits": 3, "bias": bias, "specials": NONE, "overflow": MAX}
    fmt = FloatFormat(**GOOD | fields)
    assert fmt.epsilon == min(v for v in fmt.values() if v > 1) - 1


def test_overflow_is_a_field_of_its_own():
    for overflow, code in ((Overflow.NAN, 0x7F), (Overflow.MAX, 0x7E)):
        assert FloatFormat(**(GOOD | {"overflow": overflow})).overflow_code == code
    ieee = GOOD | {"specials": Specials.IEEE}
    codes = {Overflow.INF: 0x78, Overflow.NAN: 0x7C, Overflow.MAX: 0x77}
    for overflow, code in codes.items():
        assert FloatFormat(**(ieee | {"overflow": overflow})).overflow_code == code


BAD_FLOATS = [
    *({"exponent_bits": 0}, {"exponent_bits": -1}, {"exponent_bits": 17}, {"mantissa_bits": -1}),
    *({"bias": 2**17}, {"dtype_name": "float8_e5m2"}, {"dtype_name": "int8"}),
    *({"dtype_name": "bool"}, {"dtype_name": "foo"}, {"dtype_name": "float16"}),
    {"has_zero": False},  # with signed=True
    *({"overflow": INF}, {"overflow": INF, "specials": FNUZ}),  # without an infinity
    {"specials": FNUZ, "signed": False},  # NaN would be -0
    {"exponent_bits": 11, "mantissa_bits": 53},  # 65 bits with the sign
]
BAD_INTS = [
    *({"bits": bits} for bits in (0, -1, 65, 8.0, "8", None)),
    *({"is_bool": True, "bits": bits} for bits in (1, 2, 8)),  # signed, or of more than one bit
    *({"dtype_name": "bool", "bits": 1, "signed": False}, {"dtype_name": "int16", "bits": 8}),
    {"dtype_name": "uint8", "bits": 1, "signed": False, "is_bool": True},
]


@each(("kind", "fields"), [
    *((FloatFormat, GOOD | fields) for fields in BAD_FLOATS), *((IntFormat, f) for f in BAD_INTS)
])  # fmt: skip
def test_bad_constructions_name_the_field(kind, fields):
    (field, value), *_ = (pair for pair in fields.items() if pair not in GOOD.items())
    value = value.name if isinstance(value, Overflow | Specials) else repr(value)
    start = f"^{kind.__name__} 'made': .*{field}={value}"
    refused(ValueError, start, kind, **{"name": "made"} | fields)


@each(("fields", "why"), [
    ({"specials": NONE}, "specials=NONE has no NaN"),
    ({"specials": IEEE, "mantissa_bits": 0}, "leaves no code for NaN"),
    ({"exponent_bits": 1, "mantissa_bits": 0}, "leaves no code for a positive finite value"),
])  # fmt: skip
def test_formats_without_a_code_for_what_they_need(fields, why):
    refused(ValueError, f"^FloatFormat 'made': .*{why}", FloatFormat, **GOOD | fields)


@each(("field", "value"), [
    *(("exponent_bits", 4.0), ("mantissa_bits", "3"), ("bias", None), ("specials", "FN")),
    *(("overflow", "nan"), ("signed", 1), ("has_zero", None), ("name", 3)),
])  # fmt: skip
def test_fields_of_wrong_types_raise(field, value):
    where = "FloatFormat" + (" 'made'" if field != "name" else "")
    refused(TypeError, f"^{where}: {field}={value!r}", FloatFormat, **GOOD | {field: value})


@each(("kind", "fields"), [
    (IntFormat, {"name": "made", "bits": 4, "signed": 2}),  # was a format from -8 to 3
    (IntFormat, {"name": "made", "bits": 4, "is_bool": 2}), (IntFormat, {"bits": 8, "name": 3}),
    (TableFormat, {"values_by_code": (0.0, 1.0), "name": 3}),
])  # fmt: skip
def test_other_fields_of_wrong_types_raise(kind, fields):
    field, value = [*fields.items()][-1]
    refused(TypeError, rf"^{kind.__name__}.*: {field}={value}", kind, **fields)


def test_the_dtype_bool_is_for_truth_values_alone():
    made = IntFormat(name="made", bits=1, signed=False, is_bool=True)
    assert (made.is_bool, made.dtype, made.code_dtype) == (True, None, np.dtype("uint8"))


@pytest.mark.parametrize("kind", [FloatFormat, IntFormat, TableFormat])
def test_constructions_by_keyword_alone(kind):
    with pytest.raises(TypeError, match="positional"):
        kind("made", 8)
    with pytest.raises(TypeError, match="missing"):
        kind(name="made")


@pytest.mark.parametrize(
    "make",
    [
        lambda kind: FloatFormat(**GOOD | {"bias": kind(7), "mantissa_bits": kind(3)}),
        lambda kind: IntFormat(name="made", bits=kind(64)),
        lambda kind: qt.BlockFormat(element="int8", block=(kind(32),), axes=(kind(-1),)),
        lambda kind: qt.Stochastic("A", bits=kind(8)),
        lambda kind: qt.products.Delayed(history=kind(4), margin=kind(1)),
        lambda kind: qt.products.Hadamard(block=kind(16), seed=kind(3)),
        lambda kind: qt.products.Static(kind(2)),
    ],
)
@pytest.mark.parametrize("kind", [np.int64, np.int16])
def test_numbers_of_numpy_are_as_good_as_those_of_python(make, kind):
    """Equal, and kept as Python's: those of NumPy overflow, and JSON does not take them."""
    got, expected = make(kind), make(int)
    assert got == expected
    assert repr(got) == repr(expected)


def test_a_static_scale_may_be_a_float_of_numpy():
    assert qt.products.Static(np.float32(0.5)) == qt.products.Static(0.5)
