"""The same casts against ml_dtypes and gfloat, and decode of every code."""

import gfloat
import gfloat.formats
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from casts_oracle import (
    DTYPES,
    FLOATS,
    ML_DTYPES,
    ROUNDINGS,
    SHIPPED,
    SOURCES,
    SPECS,
    Float,
    assert_same_bits,
    assert_same_variants,
    bits_of,
    every_p3109,
    float64_inputs,
    in_one_jit,
    inputs,
    op_by_op,
    values32,
    values64,
)

import qtoolkit as qt

SMALL_FLOATS = [name for name, spec in FLOATS.items() if spec.bits <= 16]
# What they do otherwise is asserted in tests of its own below.
SAME_AS_ML_DTYPES = [name for name in ML_DTYPES if name in SMALL_FLOATS and name != "e8m0fnu"]


def _gfloat(spec: Float) -> gfloat.FormatInfo:
    """The same fields in gfloat's words; it is asked to decode all codes below."""
    high_nans = {"ieee": 2**spec.mantissa - 1, "fn": 1}
    return gfloat.FormatInfo(
        "same fields",
        spec.bits,
        spec.mantissa + 1,
        bias=spec.bias,
        is_signed=spec.signed,
        domain=gfloat.Domain.Extended if spec.kind == "ieee" else gfloat.Domain.Finite,
        has_nz=spec.signed and spec.kind != "fnuz",
        num_high_nans=high_nans.get(spec.kind, 0),
        has_subnormals=spec.zero,
        is_twos_complement=False,
    )


def _p3109_info(name: str) -> gfloat.FormatInfo:
    signed, extended = name[-2] == "s", name[-1] == "e"
    bits, precision = name.removeprefix("binary")[:-2].split("p")
    return gfloat.formats.format_info_p3109(
        int(bits),
        int(precision),
        gfloat.Signedness.Signed if signed else gfloat.Signedness.Unsigned,
        gfloat.Domain.Extended if extended else gfloat.Domain.Finite,
    )


GFLOAT = {
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m3fn": gfloat.formats.format_info_ocp_e2m3,
    "e3m2fn": gfloat.formats.format_info_ocp_e3m2,
    "e2m1fn": gfloat.formats.format_info_ocp_e2m1,
    "e8m0fnu": gfloat.formats.format_info_ocp_e8m0,
    "bfloat16": gfloat.formats.format_info_bfloat16,
    "float16": gfloat.formats.format_info_binary16,
    **{
        name: _gfloat(FLOATS[name])
        for name in ("e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e4m3_ieee", "e3m4", "e1m2fn")
    },
    **{name: _p3109_info(name) for name in every_p3109(8)},
}
GFLOAT_MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "toward_positive": gfloat.RoundMode.TowardPositive,
    "toward_negative": gfloat.RoundMode.TowardNegative,
}
GFLOAT_STOCHASTIC = {
    "A": gfloat.RoundMode.StochasticFastest,
    "B": gfloat.RoundMode.StochasticFast,
    "C": gfloat.RoundMode.Stochastic,
}


def _spec(name: str) -> Float:
    return FLOATS[name] if name in FLOATS else every_p3109(8)[name]


# --- encode ---------------------------------------------------------------------------------------


@pytest.mark.sample("e5m2-float32", "e3m2fn-float16")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", SAME_AS_ML_DTYPES)
def test_encode_equals_ml_dtypes(name, source):
    """It never saturates: our "none"; clipped before, our "finite"."""
    x = inputs(source, FLOATS[name], random=2**14)
    spec = FLOATS[name]
    largest = np.float32(float(spec.fraction(spec.max_code)))
    some = [("nearest_even", "none"), ("nearest_even", "finite")]
    with np.errstate(invalid="ignore", over="ignore"):
        wide = x.astype(np.float32)
        clipped = np.clip(wide, -largest, largest)
        expected = [bits_of(v.astype(ML_DTYPES[name])) for v in (wide, clipped)]
    got = in_one_jit(qt.encode, name, some)(x)
    # Which NaN an ml_dtypes or numpy cast writes depends on the payload; the sign does not.
    nan = np.isnan(wide)
    assert_same_variants(got[:, ~nan], np.stack(expected)[:, ~nan], x[~nan], some)
    if spec.nan is not None:
        assert np.isin(got[:, nan], spec.nan_codes).all()


@pytest.mark.quick
@pytest.mark.parametrize("name", ["e2m1fn", "e2m3fn", "e3m2fn"])
def test_nan_to_formats_without_one_is_where_ml_dtypes_differs(name):
    """ml_dtypes writes a zero; CUDA's conversions, and ours, +max."""
    spec = FLOATS[name]
    assert bits_of(np.float32(np.nan).astype(ML_DTYPES[name])) in (0, spec.sign)
    for nan in (np.nan, -np.nan):
        assert int(qt.encode(np.float32(nan), name)) == spec.max_code


def test_e8m0_equals_ml_dtypes_but_for_four_known_things():
    """Ties go away from zero; three faults at and below 2**-127; signs and zero become NaN."""
    x = inputs("float32", FLOATS["e8m0fnu"], random=2**18)
    with np.errstate(invalid="ignore", over="ignore"):
        theirs = bits_of(x.astype(ml_dtypes.float8_e8m0fnu))
    ours = np.asarray(qt.encode(x, "e8m0fnu", rounding="nearest_away", saturation="none"))
    number = ~np.isnan(x)
    size = np.abs(np.where(number, x, np.float32(0)).astype(np.float64))
    low = number & (x > 0) & (size < 2.0**-127 * 1.5)
    assert_same_bits(ours[number & ~low], theirs[number & ~low], x[number & ~low])
    # The next power of two up, for all of (2**-127, 1.5 * 2**-127).
    wrong = low & (size > 2.0**-127)
    assert wrong.any()
    assert set(theirs[wrong].tolist()) == {1}
    assert set(ours[wrong].tolist()) == {0}
    # Below half of the smallest value they write the smallest; it rounds to zero, which is NaN.
    small = low & (size < 2.0**-128)
    assert small.any()
    assert set(theirs[small].tolist()) == {0}
    assert set(ours[small].tolist()) == {255}
    rest = low & ~wrong & ~small
    assert_same_bits(ours[rest], theirs[rest], x[rest])
    assert set(theirs[(x <= 0)].tolist()) == set(ours[(x <= 0)].tolist()) == {255}


def _finite_for(info: gfloat.FormatInfo, x: np.ndarray) -> np.ndarray:
    """Numbers that gfloat takes: no NaN; no negative ones where there is no sign."""
    x = x[~np.isnan(x)]
    return x if info.is_signed else x[(x > 0) | ((x == 0) & ~np.signbit(x))]


@pytest.mark.sample("e4m3fn")
@pytest.mark.parametrize("name", [name for name in GFLOAT if name != "e8m0fnu"])
def test_encode_equals_gfloat(name):
    """`sat` on is our "finite", off our "none"; five roundings (it has no odd one).

    The formats of P3109 are compiled in `test_casts_exact.py`.
    """
    info, spec = GFLOAT[name], _spec(name)
    x = _finite_for(info, inputs("float32", spec, random=2**12))
    x = np.random.default_rng(2).permutation(x)[: 2**15]
    with np.errstate(under="ignore"):
        wide = x.astype(np.float64)
    # Where overflow has nothing to become, it raises, or writes NaN where P3109 has the largest.
    wanted = {"finite": True, "none": False} if spec.overflow != "max" else {"finite": True}
    some = [(rounding, saturation) for rounding in GFLOAT_MODES for saturation in wanted]
    run = in_one_jit if name in FLOATS else op_by_op
    got = run(qt.encode, name, some)(x)
    for (rounding, saturation), row in zip(some, got, strict=True):
        rounded = gfloat.round_ndarray(info, wide, GFLOAT_MODES[rounding], wanted[saturation])
        number = ~np.isnan(rounded)
        expected = gfloat.encode_ndarray(info, rounded[number]).astype(spec.unsigned)
        assert_same_bits(row[number], expected, x[number])
        assert np.isin(row[~number], spec.nan_codes).all()


@pytest.mark.sample("e4m3fn-A", "binary8p1uf-B")
@pytest.mark.parametrize("variant", "ABC")
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e2m1fn", "binary8p4se", "binary8p1uf"])
def test_stochastic_rounding_equals_gfloat(name, variant):
    """Random bits given; gfloat adds them in float64, which is exact for these."""
    info, spec = GFLOAT[name], _spec(name)
    rng = np.random.default_rng(6)
    x = _finite_for(info, inputs("float32", spec, random=2**10))
    x = rng.choice(x[np.isfinite(x)], 2**13)
    keep = np.abs(x) > float(spec.fraction(1)) * 2.0**-9  # or the sum would need more than 53 bits
    x = x[keep]
    for bits in (1, 5, 8):
        random = rng.integers(0, 2**bits, x.size)
        options = {"rounding": qt.Stochastic(variant, bits=bits)}
        got = np.asarray(qt.encode(x, name, random_bits=random.astype(np.uint8), **options))
        rounded = gfloat.round_ndarray(
            info, x.astype(np.float64), GFLOAT_STOCHASTIC[variant], True, random, bits
        )
        assert_same_bits(got, gfloat.encode_ndarray(info, rounded).astype(spec.unsigned), x)


@pytest.mark.sample("e4m3fn")
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn", "bfloat16", "float16"])
def test_float64_inputs_equal_gfloat(name):
    """gfloat works in float64. ml_dtypes goes through float32, and is wrong beside ties."""
    info, spec = GFLOAT[name], FLOATS[name]
    x = _finite_for(info, float64_inputs(spec))
    x = x[(np.abs(x) < 1e290) & ((np.abs(x) > 1e-290) | (x == 0))]  # its own arithmetic overflows
    for rounding, mode in GFLOAT_MODES.items():
        got = np.asarray(qt.encode(x, name, rounding=rounding))
        rounded = gfloat.round_ndarray(info, x, mode, True)
        assert_same_bits(got, gfloat.encode_ndarray(info, rounded).astype(spec.unsigned), x)
    if name in ("e4m3fn", "e5m2", "bfloat16"):
        ours = np.asarray(qt.encode(x, name, saturation="none"))
        with np.errstate(over="ignore"):
            assert np.any(ours != bits_of(x.astype(ML_DTYPES[name])))


def test_int8_equals_numpy_rint_and_clip():
    x = inputs("float32", SHIPPED["int8"], random=2**18)
    x = x[~np.isnan(x)]
    expected = np.clip(np.rint(x), -128, 127).astype(np.int8).view(np.uint8)
    assert_same_bits(qt.encode(x, "int8"), expected, x)


# --- decode ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in ML_DTYPES if name in SMALL_FLOATS])
def test_decode_of_every_code_equals_ml_dtypes(name):
    spec = FLOATS[name]
    code = np.arange(2**spec.bits, dtype=spec.unsigned)
    with np.errstate(invalid="ignore"):
        expected = code.view(ML_DTYPES[name]).astype(np.float32)
    got = np.asarray(qt.decode(code, name))
    nan = np.isnan(expected)
    assert_same_bits(got[~nan], expected[~nan], code[~nan])
    quiet = np.uint32(0x7FC00000)
    negative = (code[nan] >= spec.sign) & spec.signed & (spec.kind != "fnuz")  # whose has no sign
    assert_same_bits(
        bits_of(got)[nan], quiet | (negative.astype(np.uint32) << np.uint32(31)), code[nan]
    )


@pytest.mark.sample(
    *("e4m3fn", "e2m3fn", "e8m0fnu", "e4m3b11fnuz", "e1m2fn", "binary8p3se", "binary8p5sf"),
    *("binary8p7se", "binary8p2uf", "binary8p4ue", "binary8p6uf"),
)
@pytest.mark.parametrize("name", GFLOAT)
def test_decode_of_every_code_equals_gfloat(name):
    spec = _spec(name)
    code = np.arange(2**spec.bits, dtype=spec.unsigned)
    expected = gfloat.decode_ndarray(GFLOAT[name], code.astype(np.int64))
    got = np.asarray(qt.decode(code, name)).astype(np.float64)
    number = ~np.isnan(expected)
    assert_same_bits(got[number], expected[number], code[number])
    assert np.isnan(got[~number]).all()


EVERY = [name for name, spec in SPECS.items() if spec.bits <= 16] + ["binary8p1se", "binary8p8uf"]


def _spec_of_any(name):
    return SPECS[name] if name in SPECS else every_p3109(8)[name]


@pytest.mark.sample("float16", "e2m1fn")
@pytest.mark.parametrize("name", EVERY)
def test_decode_of_every_code_equals_the_oracle(name):
    """Fractions, made float64 and then float32 without error; zeros and NaNs with their signs."""
    spec = _spec_of_any(name)
    code = np.arange(2**spec.bits, dtype=spec.unsigned)
    expected = values32(code, spec)
    assert_same_bits(qt.decode(code, name), expected, code)
    np.testing.assert_array_equal(expected.astype(np.float64), values64(spec))
    np.testing.assert_array_equal(qt.format(name).values(), values64(spec))


def test_decode_of_tf32_codes_equals_the_oracle():
    """All 2**19; the codes are 19 bits, not the 32 in which tensor cores hold them."""
    spec = FLOATS["tf32"]
    code = np.arange(2**spec.bits, dtype=np.uint32)
    assert_same_bits(qt.decode(code, "tf32"), values32(code, spec), code)


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in EVERY if _spec_of_any(name).bits < 8])
def test_decode_takes_the_low_bits_of_a_number(name):
    """All 256 bytes. Oracle: as above, of the code that is left of them."""
    spec = _spec_of_any(name)
    byte = np.arange(256, dtype=np.uint8)
    code = byte & np.uint8(2**spec.bits - 1)
    assert_same_bits(qt.decode(byte, name), values32(code, spec), byte)


@pytest.mark.sample("float16", "e5m2fnuz", "e2m1fn", "uint16")
@pytest.mark.quick
@pytest.mark.parametrize("name", EVERY)
def test_encode_gives_every_code_back(name):
    """In every rounding; NaN codes become the NaN that casts write, with the code's sign."""
    spec = _spec_of_any(name)
    code = np.arange(2**spec.bits, dtype=spec.unsigned)
    value = np.asarray(qt.decode(code, name))
    nan = np.isnan(value)
    negative = np.signbit(value[nan]) * np.uint64(getattr(spec, "sign", 0))
    some = [
        *((rounding, "none") for rounding in ROUNDINGS),
        *(("nearest_even", "propagate"), ("toward_positive", "finite")),
    ]
    for (_, saturation), back in zip(some, in_one_jit(qt.encode, name, some)(value), strict=True):
        kept = ~nan
        if saturation == "finite":  # infinities clamp
            kept &= ~np.isinf(value)
        if name == "e8m0fnu":
            assert kept.sum() == 255
        assert_same_bits(back[kept], code[kept], code[kept])
        if nan.any():
            assert_same_bits(back[nan], (spec.nan + negative).astype(spec.unsigned), code[nan])


@pytest.mark.sample(
    *("e5m2", "e4m3fnuz", "e4m3b11fnuz", "e4m3_ieee", "e8m0fnu", "bfloat16", "int2", "int4"),
    *("int16", "uint8"),
)
@pytest.mark.parametrize("name", [name for name in DTYPES if SPECS[name].bits <= 16])
def test_decode_takes_arrays_of_the_formats_own_dtype(name):
    """As `cast` returns them; the oracle is decode of the codes."""
    spec = SPECS[name]
    code = np.arange(2**spec.bits, dtype=spec.unsigned)
    expected = np.asarray(qt.decode(code, name))
    if name == "bool":
        own = code.astype(bool)
    elif spec.bits in (2, 4) and name != "e2m1fn":
        own = np.array([int(spec.value(int(c))) for c in code]).astype(name)
    else:
        own = code.view(qt.format(name).dtype)
    assert_same_bits(qt.decode(own, name), expected, code)
    assert_same_bits(qt.decode(jnp.asarray(own), name), expected, code)


@pytest.mark.sample(
    *("e4m3fn-float16", "e5m2-float16", "e4m3fnuz-bfloat16", "e5m2fnuz-bfloat16"),
    *("hifloat8-float16", "int8-float16", "int8-bfloat16", "float16-float16"),
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1fn", "hifloat8", "int8")
        for dtype in ("float16", "bfloat16")
    ]
    + [("bfloat16", "bfloat16"), ("float16", "float16"), ("e8m0fnu", "bfloat16")],
)
def test_decode_to_16_bits_holds_the_same_values(name, dtype):
    spec = SPECS[name]
    code = np.arange(2**spec.bits, dtype=spec.unsigned)
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
