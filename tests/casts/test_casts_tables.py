"""Formats that are tables: NF4, HiFloat8, posit8 and ones made by users.

`test_casts_exact.py` has every 16-bit input and every float32 mark of the shipped ones; here are
values by hand, and tables whose codes, ties, specials and ends are unlike those.
"""

import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest
from casts_oracle import (
    ROUNDINGS,
    SATURATIONS,
    SPECS,
    TABLES,
    VARIANTS,
    Float,
    Table,
    assert_same_bits,
    assert_same_variants,
    every_16_bit_input,
    every_code,
    float32_inputs,
    float64_inputs,
    fraction_code,
    in_one_jit,
    integer_inputs,
    values64,
)
from each import each
from refused import refused
from test_casts_exact import assert_codes

import qtoolkit as qt

MADE = {
    "unsorted": Table((3.0, -1.0, 0.0, 0.5), "max"),
    "ties at the third": Table((0.0, 3.0, -3.0, 9.0), "max", ties=(-1.0, 1.0, 5.0)),
    "with everything": Table((0.0, 1.0, 2.5, np.inf, np.nan, -1.0, -2.5, -np.inf), "inf", None, 4),
    "nan at overflow": Table((0.0, 0.1, 1.0, 7.0, -0.1, -1.0, -7.0, np.nan), "nan", None, 8.0),
    "max at overflow": Table((0.0, 0.25, 1.0, 7.0, -0.25, -1.0, -7.0, np.nan), "max", None, 9.0),
    "odd largest code": Table((0.0, 1.0, 2.0, 4.0, np.inf, -np.inf, -2.0, -4.0), "inf", None, 8.0),
    "no negatives": Table((0.0, 0.5, 4.0, 100.0), "max"),
    "subnormal": Table((0.0, 1e-40, 2e-39, 4e-38), "max"),
    "one bit": Table((-1.0, 1.0), "max", ties=(0.0,)),
}
# One value each becomes a float32 first, so that ties are exact in float64.
MADE = {
    name: Table(
        tuple(float(np.float32(v)) for v in table.values), table.overflow, table.ties, table.beyond
    )
    for name, table in MADE.items()
}
# A tie or a direction between -1 and 1 has no smaller magnitude: left out of these.
DIRECTED = [v for v in VARIANTS if v[0] not in ("toward_zero", "nearest_away")]


@pytest.mark.sample("unsorted")
@pytest.mark.parametrize("name", MADE)
def test_user_made_tables_equal_the_exact_oracle(name):
    """float32 marks +-1 ulp and all 2**16 bfloat16 inputs, against the comparing oracle."""
    spec = MADE[name]
    fmt = spec.as_format(name)
    some = DIRECTED if name == "one bit" else VARIANTS
    for x in (float32_inputs(spec, 2**12), every_16_bit_input("bfloat16")):
        assert_same_variants(
            in_one_jit(qt.encode, fmt, some)(x), every_code(x, spec, some), x, some
        )


@pytest.mark.sample("unsorted")
@pytest.mark.parametrize("name", ["unsorted", "with everything", "ties at the third"])
def test_round_to_format_of_tables_is_decode_of_encode(name):
    spec = MADE[name]
    fmt = spec.as_format(name)
    x = float32_inputs(spec, 2**12)
    for rounding, saturation in itertools.product(("nearest_even", "to_odd"), SATURATIONS):
        options = {"rounding": rounding, "saturation": saturation}
        got = qt.round_to_format(x, fmt, **options)
        assert_same_bits(got, qt.decode(qt.encode(x, fmt, **options), fmt), x)


@pytest.mark.sample("nf4")
@pytest.mark.parametrize("name", [name for name, spec in TABLES.items() if spec.ties is None])
def test_tables_round_to_the_nearest_by_rational_arithmetic(name):
    """One input at a time: |x - value| as Fractions, where the ties are the midpoints."""
    spec = TABLES[name]
    rng = np.random.default_rng(3)
    x = rng.choice(float32_inputs(spec, 2**8), 400)
    limit = 2.0**15 * 1.2
    x = x[np.abs(x) < limit]
    finite = {c: Fraction(v) for c, v in enumerate(spec.values) if math.isfinite(v)}
    got = np.asarray(qt.encode(x, name))
    for value, code in zip(x.tolist(), got.tolist(), strict=True):
        distance = {c: abs(v - Fraction(value)) for c, v in finite.items()}
        least = min(distance.values())
        assert distance[code] == least
        rivals = [c for c, d in distance.items() if d == least]
        assert len(rivals) == 1 or code % 2 == 0 or all(c % 2 for c in rivals)


# arXiv:2305.14314; arXiv:2409.16626; Standard for Posit Arithmetic (2022).
BY_HAND = {
    "nf4": [
        (0.0, 7), (-0.0, 7), (1e9, 15), (-np.inf, 0), (np.nan, 15), (0.04, 8), (0.039, 7),
        (-0.9, 0),
    ],
    "hifloat8": [
        (1.0, 0x08), (-1.0, 0x88), (0.0, 0x00), (-0.0, 0x00), (2.0**15, 0x6E), (1e9, 0x6E),
        (-np.inf, 0xEE), (np.nan, 0x80), (2.0**-22, 0x01), (2.0**-15, 0x7E),
    ],
    "posit8": [
        (1.0, 0x40), (-1.0, 0xC0), (2.0**24, 0x7F), (1e30, 0x7F), (-1e30, 0x81), (2.0**-24, 0x01),
        (1e-30, 0x01), (-1e-30, 0xFF), (0.0, 0x00), (np.nan, 0x80), (np.inf, 0x7F),
        # Between 2**20 and 2**24 the next bit is the exponent's upper one: the tie is 2**22.
        (2.0**22, 0x7E), (2.0**22 + 1, 0x7F), (2.0**22 - 1, 0x7E),
    ],
}  # fmt: skip
BEYOND = {
    "hifloat8": [
        (np.inf, (0x6E, 0x6F, 0x6F)), (-np.inf, (0xEE, 0xEF, 0xEF)),
        (1.25 * 2.0**15, (0x6E, 0x6E, 0x6E)),  # the tie beyond: 0x6E is even
        (1.26 * 2.0**15, (0x6E, 0x6E, 0x6F)), (-1e30, (0xEE, 0xEE, 0xEF)),
    ],
    "posit8": [(-np.inf, (0x81, 0x80, 0x80)), (1e30, (0x7F, 0x7F, 0x7F))],
    "nf4": [(np.inf, (15, 15, 15)), (5.0, (15, 15, 15))],
}  # fmt: skip


@pytest.mark.quick
@each("name", BY_HAND)
def test_tables_by_hand(name):
    assert_codes(name, [{}], [(x, (code,)) for x, code in BY_HAND[name]])
    assert_codes(name, [{"saturation": saturation} for saturation in SATURATIONS], BEYOND[name])


def test_hifloat8_by_the_papers_table():
    """arXiv:2409.16626, table 2: 38 binades, 253 finite values, ends and how many per binade."""
    values = values64(TABLES["hifloat8"])
    np.testing.assert_array_equal(qt.format("hifloat8").values(), values)
    positive = np.sort(values[np.isfinite(values) & (values > 0)])
    assert positive[0] == 2.0**-22
    assert positive[-1] == 2.0**15
    _, exponents = np.frexp(positive)
    per_binade = dict(zip(*np.unique(exponents - 1, return_counts=True), strict=True))
    expected = dict.fromkeys(range(-22, -15), 1)
    expected |= {e: 8 if abs(e) <= 3 else 4 if abs(e) <= 7 else 2 for e in range(-15, 16)}
    assert len(expected) == 38
    expected[15] = 1  # the other is infinity
    assert per_binade == expected
    assert np.isfinite(values).sum() == 253


def test_posit8_by_the_standard():
    """Standard for Posit Arithmetic (2022): monotone in two's complement, reciprocal ends."""
    values = values64(TABLES["posit8"])
    np.testing.assert_array_equal(qt.format("posit8").values(), values)
    by_integer = values[np.arange(-127, 128) % 256]
    assert np.all(np.diff(by_integer) > 0)
    np.testing.assert_array_equal(by_integer, -by_integer[::-1])
    powers = by_integer[by_integer > 0]
    assert powers[0] == 2.0**-24
    assert powers[-1] == 2.0**24
    assert {1.0, 1.125, 4.0, 16.0, 1.875} <= set(powers.tolist())


@pytest.mark.sample("nf4")
@pytest.mark.parametrize("name", TABLES)
def test_float64_and_64_bit_integers_to_tables(name):
    """Without x64, ties +-1 ulp of float64."""
    spec = TABLES[name]
    some = [("nearest_even", "none"), ("nearest_away", "finite"), ("toward_negative", "none")]
    for x in (float64_inputs(spec), integer_inputs("int64"), integer_inputs("uint64")):
        for (rounding, saturation), row in zip(some, every_code(x, spec, some), strict=True):
            got = qt.encode(x, name, rounding=rounding, saturation=saturation)
            assert_same_bits(got, row, x)


def stochastic_code(x, fmt, rounding, random, saturation):
    """Of one float32 number, by NumPy: its neighbours, IEEE's difference and quotient, P3109."""
    line = list(zip(fmt.finite, fmt.codes, strict=True))
    if fmt.beyond is not None and saturation == "none" and fmt.overflow.name != "MAX":
        ends = [fmt.values_by_code.index(end) if end in fmt.values_by_code else fmt.nan_code
                for end in (-math.inf, math.inf)]  # fmt: skip
        line = [(-fmt.beyond, ends[0])] * fmt.signed + line + [(fmt.beyond, ends[1])]
    below = [entry for entry in line if entry[0] <= x] or line[:1]
    above = [entry for entry in line if entry[0] >= x] or line[-1:]
    (lower, low), (upper, high) = below[-1], above[0]
    if lower >= upper:
        return low if below[-1] in above or x >= upper else high
    toward, away = (high, low) if upper <= 0 else (low, high)
    start = upper if upper <= 0 else lower
    v = Fraction(float(np.abs(x - np.float32(start)) / np.float32(upper - lower)))
    n = rounding.bits
    if rounding.variant == "A":
        up = math.floor(v * 2**n) + random >= 2**n
    elif rounding.variant == "B":
        up = math.floor(v * 2 ** (n + 1)) + 2 * random + 1 >= 2 ** (n + 1)
    else:
        up = round(v * 2**n) + random >= 2**n  # Python's `round` goes to even
    return away if up else toward


@pytest.mark.sample(
    *("nf4-A-finite", "nf4-C-none", "posit8-A-none", "unsorted-A-finite"),
    *("ties at the third-B-finite", "with everything-A-none", "with everything-C-finite"),
    *("nan at overflow-B-none", "max at overflow-C-none", "odd largest code-C-finite"),
    *("subnormal-A-finite", "one bit-B-finite"),
)
@pytest.mark.parametrize("saturation", ["finite", "none"])
@pytest.mark.parametrize("variant", ["A", "B", "C"])
@pytest.mark.parametrize("name", [*TABLES, *MADE])
def test_stochastic_rounding_to_tables(name, variant, saturation):
    fmt = qt.format(name) if name in TABLES else MADE[name].as_format(name)
    if name == "subnormal":
        with refused(ValueError, r"^encode: stochastic rounding to subnormal, whose"):
            qt.encode(np.ones(3, np.float32), fmt, rounding="stochastic", key=jax.random.key(0))
        return
    rng = np.random.default_rng(0)
    rounding = qt.Stochastic(variant, bits=5)
    ends = np.float32([fmt.lowest, fmt.max_finite])
    x = [*fmt.finite, *(0.0, -0.0), *(1.3 * ends), *rng.uniform(*(1.1 * ends), 300)]
    x = np.float32([*x, *(rng.choice(fmt.finite, 300) * rng.uniform(0.7, 1.4, 300))])
    random = rng.integers(0, 32, x.shape, np.uint32)
    got = qt.encode(x, fmt, rounding=rounding, random_bits=random, saturation=saturation)
    expected = [
        stochastic_code(value, fmt, rounding, int(bits), saturation)
        for value, bits in zip(x, random, strict=True)
    ]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", TABLES)
def test_stochastic_rounding_to_tables_is_right_on_average(name):
    fmt = qt.format(name)
    rng = np.random.default_rng(1)
    at = rng.integers(0, fmt.finite_count - 1, 20)
    lower, upper = np.array(fmt.finite)[at], np.array(fmt.finite)[at + 1]
    x = np.float32(lower + (upper - lower) * rng.uniform(size=20))
    many = np.broadcast_to(x, (20_000, 20))
    options = {"rounding": "stochastic", "key": jax.random.key(3)}
    y = np.asarray(qt.round_to_format(many, fmt, **options), np.float64)
    assert (np.isclose(y, lower) | np.isclose(y, upper)).all()
    # Five standard deviations of a mean of 20,000 draws: sqrt(1/4 / 20,000) of a gap each.
    assert (np.abs(y.mean(0) - x) < 5 * 0.5 / np.sqrt(20_000) * (upper - lower)).all()
    ends = np.float32(fmt.finite)
    np.testing.assert_array_equal(qt.round_to_format(ends, fmt, **options), ends)
    assert np.isnan(float(qt.round_to_format(np.float32(np.nan), fmt, **options))) == fmt.has_nan
    infinite = np.float32([np.inf, -np.inf])
    got = qt.round_to_format(infinite, fmt, **options)
    np.testing.assert_array_equal(got, np.float32([fmt.max_finite, fmt.lowest]))
    doubles = qt.encode(many[:100].astype(np.float64), fmt, **options)  # the same stream
    np.testing.assert_array_equal(doubles, qt.encode(many[:100], fmt, **options))


def test_shipped_tables_are_all_here():
    shipped = {fmt.name for fmt in qt.formats.FORMATS if isinstance(fmt, qt.TableFormat)}
    assert shipped == set(TABLES)
    assert set(TABLES) <= set(SPECS)
    assert len(ROUNDINGS) == 6


def test_values_beyond_the_dtype_of_x():
    fmt = qt.TableFormat(name="wide", values_by_code=(-1e60, -1.0, 1.0, 1e60))
    x = np.array([-np.inf, -3e38, -2, 0.5, 3e38, np.inf], np.float32)
    for rounding, codes in (
        ("nearest_even", [0, 1, 1, 2, 2, 3]),
        ("toward_positive", [0, 1, 1, 2, 3, 3]),
        ("toward_negative", [0, 0, 0, 1, 2, 3]),
    ):
        np.testing.assert_array_equal(qt.encode(x, fmt, rounding=rounding), codes)


@pytest.mark.parametrize("beyond", [7.0, np.inf, 6.0])
def test_what_lies_beyond_a_table_is_checked(beyond):
    with refused(ValueError, "expected more than the largest"):
        qt.TableFormat(
            name="made",
            values_by_code=(-7.0, 0.0, 1.0, np.nan),
            overflow=qt.formats.Overflow.NAN,
            beyond=beyond,
        )


def test_subnormals_of_float32_survive_in_float64():
    fmt = qt.TableFormat(name="small", values_by_code=(0.0, 2.0**-149, 2.0**-127, 1.0))
    with jax.enable_x64(True):
        decoded = qt.decode(np.arange(4, dtype=np.uint8), fmt, np.float64)
        rounded = qt.round_to_format(np.array([2.0**-149, 2.0**-127, 0.9]), fmt)
    np.testing.assert_array_equal(decoded, fmt.values())
    np.testing.assert_array_equal(rounded, fmt.values()[1:])


def test_integers_to_tables_beyond_exact_floats():
    fmt = qt.TableFormat(name="far", values_by_code=(0.0, 2.0**31 - 1, 1e20, -3.0))
    x = np.array([5, 2**30, 2**31 - 1, -(2**31)], np.int32)
    refused(TypeError, r"exact as a float32; enable 64-bit types .*, or convert", qt.encode, x, fmt)
    with jax.enable_x64(True):  # float64 holds every int32
        np.testing.assert_array_equal(qt.encode(x, fmt), [0, 1, 1, 3])
        with refused(TypeError, r"exact as a float64; convert x to a float dtype$"):
            qt.encode(x.astype(np.int64), fmt)


@pytest.mark.parametrize(
    ("field", "value"),
    [("values_by_code", None), ("values_by_code", "abcd"), ("ties", 3), ("beyond", "far")],
)
def test_fields_of_tables_that_are_no_numbers(field, value):
    fields = {"values_by_code": (0.0, 1.0), field: value}
    refused(TypeError, f"'odd': {field}=", qt.TableFormat, name="odd", **fields)


WORDS = [(6, 58, 1, True), (6, 58, 1, False), (9, 55, 255, False), (9, 23, 255, False)]


@pytest.mark.sample(
    *("6-58-1-True-fn-nearest_even-finite", "6-58-1-True-fn-toward_positive-none"),
    *("6-58-1-False-fn-nearest_even-none", "6-58-1-False-ieee-nearest_even-finite"),
    *("9-55-255-False-fn-toward_zero-finite", "9-55-255-False-ieee-toward_positive-finite"),
    *("9-23-255-False-fn-toward_zero-none", "9-23-255-False-ieee-toward_positive-none"),
)
@pytest.mark.parametrize("saturation", ["finite", "none"])
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero", "toward_positive"])
@pytest.mark.parametrize("kind", ["fn", "ieee"])
@pytest.mark.parametrize(("exponent", "mantissa", "bias", "zero"), WORDS)
def test_unsigned_formats_that_fill_a_word(
    exponent, mantissa, bias, zero, kind, rounding, saturation
):
    """Codes beyond the largest have no room there. Oracle: rational arithmetic."""
    overflow = {"fn": "nan", "ieee": "inf"}[kind]
    spec = Float(exponent, mantissa, bias, kind, overflow, signed=False, zero=zero)
    fmt = spec.as_format("word")
    x = [float(spec.fraction(spec.max_code) / d) for d in (1, 2, Fraction(4, 3), Fraction(1, 2))]
    x += [float(spec.fraction(code)) for code in (0, 1, 2**mantissa, spec.max_code // 2)]
    x += [x[0] * 0.999, x[0] * 1.0001, 1.0, 1.7e308, -1.0]
    with jax.enable_x64(True):
        codes = qt.encode(np.array(x), fmt, rounding=rounding, saturation=saturation)
    expected = [fraction_code(Fraction(v), spec, saturation, rounding) for v in x]
    assert [int(code) for code in codes] == expected


def test_infinity_beyond_a_format_without_zero():
    fmt = qt.FloatFormat(
        name="high",
        exponent_bits=2,
        mantissa_bits=4,
        bias=-176,
        specials=qt.formats.Specials.NONE,
        overflow=qt.formats.Overflow.MAX,
        signed=False,
        has_zero=False,
    )
    x = np.array([np.inf, 1.0, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(qt.encode(x, fmt), [0x3F, 0, 0, 0x3F])
