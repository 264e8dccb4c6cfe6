"""The casts in C: the oracle against other oracles, `qt.encode` and the yardstick against it."""

from fractions import Fraction

import c_casts
import ml_dtypes
import numpy as np
import pytest
from c_casts import (
    FORMATS,
    NUMPY_HAS,
    ROUNDINGS,
    Fields,
    fast_cast,
    reference_decode,
    reference_encode,
)
from casts_oracle import (
    FLOATS,
    VARIANTS,
    Float,
    assert_same_bits,
    assert_same_variants,
    every_16_bit_input,
    every_code,
    every_p3109,
    float32_inputs,
    fraction_code,
    in_one_jit,
    p3109,
    values32,
)
from every_float32 import differences

import qtoolkit as qt

pytestmark = pytest.mark.skipif(c_casts.compiler() is None, reason="no C compiler on PATH")

# Ways of rounding that no shipped format takes: one-bit precision, infinities of P3109, values
# beyond and below float32's, mantissas without a zero.
OTHERS = {
    **{name: every_p3109(8)[name] for name in ("binary8p1se", "binary8p1ue", "binary8p4sf")},
    "binary16p1se": p3109(16, 1, True, True),
    "binary16p16uf": p3109(16, 16, False, False),
    "beyond float32": Float(8, 2, 60, "none", "max"),
    "below float32": Float(8, 2, 200, "fn", "nan"),
    "negative bias": Float(3, 2, -20, "ieee", "inf"),
    "e2m2, unsigned": Float(2, 2, 1, "ieee", "inf", signed=False),
    "e4m3, nan": Float(4, 3, 7, "ieee", "nan"),
    "e5m2 without zero": Float(5, 2, 15, "none", "max", signed=False, zero=False),
}


def fields_of(spec: Float) -> Fields:
    overflow = f"TO_{spec.overflow.upper()}"
    return Fields(
        *(spec.exponent, spec.mantissa, spec.bias, spec.kind.upper(), overflow),
        *(spec.signed, spec.zero),
    )


def spec_of(name: str) -> Float:
    return FLOATS[qt.format(name).name]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or qt.format(name).dtype or f"float6_{name}")


def all_codes(x: np.ndarray, fields: Fields) -> np.ndarray:
    return np.stack([reference_encode(x, fields, *variant) for variant in VARIANTS])


def every_4093rd_float32() -> np.ndarray:
    """A prime stride: all exponents, all ends of the pattern."""
    return np.arange(0, 2**32, 4093, dtype=np.uint32).view(np.float32)


# --- the oracle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_the_fields_were_typed_in_right_twice(name):
    """Those of c_casts, and those that casts_oracle has from the same standards."""
    assert FORMATS[name] == fields_of(spec_of(name))


@pytest.mark.sample("float16", "e5m2", "e5m2fnuz", "e8m0fnu", "e2m1fn")
@pytest.mark.parametrize("name", FORMATS)
def test_the_c_oracle_equals_the_integer_oracle(name):
    """Values, ties and their neighbours, Inf, NaN and random patterns: six modes, three rules."""
    x = float32_inputs(spec_of(name), 2**12)
    assert_same_variants(all_codes(x, FORMATS[name]), every_code(x, spec_of(name)), x)


@pytest.mark.parametrize("spec", OTHERS.values(), ids=OTHERS)
def test_the_c_oracle_equals_the_integer_oracle_elsewhere(spec):
    """Of float32, a part of the patterns with bfloat16's values, ties and their neighbours."""
    x = np.random.default_rng(0).permutation(float32_inputs(FLOATS["bfloat16"], 2**10))[: 2**15]
    assert_same_variants(all_codes(x, fields_of(spec)), every_code(x, spec), x)


@pytest.mark.sample("float16", "e5m2fnuz", "e2m1fn", "binary16p1se")
@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
def test_the_c_oracle_equals_rational_arithmetic(name):
    spec = OTHERS[name] if name in OTHERS else spec_of(name)
    pool = float32_inputs(spec_of("e4m3fn") if name in OTHERS else spec, 2**10)
    x = np.random.default_rng(1).choice(pool[np.isfinite(pool) & (pool != 0)], 100)
    for (rounding, saturation), row in zip(VARIANTS, all_codes(x, fields_of(spec)), strict=True):
        expected = [fraction_code(Fraction(v), spec, saturation, rounding) for v in x.tolist()]
        assert_same_bits(row, np.array(expected, spec.unsigned), x)


@pytest.mark.parametrize("name", [name for name in NUMPY_HAS if name != "e8m0fnu"])
def test_the_c_oracle_equals_ml_dtypes(name):
    """To nearest even without saturation, which is ml_dtypes' own; NaN has many codes there."""
    x = np.concatenate([every_4093rd_float32(), float32_inputs(spec_of(name), 0)])
    x = x[~np.isnan(x)]
    got = reference_encode(x, FORMATS[name], "nearest_even", "none")
    with np.errstate(over="ignore", under="ignore"):
        assert_same_bits(got, x.astype(numpy_dtype(name)).view(got.dtype), x)


@pytest.mark.parametrize("name", FORMATS)
def test_the_c_oracle_decodes_every_code(name):
    """Against the values of the integer oracle, and through the oracle back to the same code."""
    spec = spec_of(name)
    codes = np.arange(2**spec.bits, dtype=spec.unsigned)
    values = reference_decode(codes, FORMATS[name])
    np.testing.assert_array_equal(values.astype(np.float32), values32(codes, spec))
    numbers = ~np.isnan(values)
    back = reference_encode(values[numbers].astype(np.float32), FORMATS[name], "to_odd", "none")
    assert_same_bits(back, codes[numbers])


# --- qt.encode and qt.round_to_format -------------------------------------------------------------


@pytest.mark.sample("float16")
@pytest.mark.parametrize("name", NUMPY_HAS)
def test_encode_equals_the_c_oracle(name):
    """2**20 patterns a prime apart and all edges of the format, in all 18 variants."""
    x = np.concatenate([every_4093rd_float32(), float32_inputs(spec_of(name), 0)])
    got = in_one_jit(qt.encode, name)(x)
    assert_same_variants(got, all_codes(x, FORMATS[name]), x)


@pytest.mark.sample("e4m3fn", "float16")
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e4m3fnuz", "e8m0fnu", "e2m1fn", "float16"])
def test_round_to_format_gives_the_values_of_the_c_oracle(name):
    x = float32_inputs(spec_of(name), 0)
    for variant in [("nearest_even", "finite"), ("toward_negative", "none")]:
        codes = reference_encode(x, FORMATS[name], *variant)
        got = qt.round_to_format(x, name, rounding=variant[0], saturation=variant[1])
        expected = reference_decode(codes, FORMATS[name]).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(got), expected)


# --- what `make exhaustive MODES=all` runs --------------------------------------------------------


def test_all_patterns_are_compared_and_a_wrong_code_is_found():
    """The loop of every_float32 on a part of the patterns, and its counter with a bit flipped."""
    found = differences("e4m3fn", "to_odd", range(0, 2**32, 2**28), chunk=2**12, threads=2)
    assert found["compared"] == 16 * 2**12
    assert set(found["differ"].values()) == {0}
    count = c_casts.difference_counter(FORMATS["e4m3fn"], "nearest_even")
    x = (np.arange(2**12, dtype=np.uint32) + np.uint32(0x43E7F800)).view(np.float32)
    codes = np.stack([qt.encode(x, "e4m3fn", saturation=s) for s in c_casts.SATURATIONS])
    assert count(0x43E7F800, codes) == ([0, 0, 0], [[], [], []])
    codes[0, 77] ^= 1
    codes[2] = codes[0]  # beyond 464 it is NaN that is right
    different, examples = count(0x43E7F800, codes)
    assert different[:2] == [1, 0]
    assert examples[:2] == [[0x43E7F800 + 77], []]
    assert different[2] > 1
    assert len(examples[2]) == 5


# --- the yardstick of the benchmarks --------------------------------------------------------------

SOME = [
    *(("e4m3fn", "nearest_even"), ("e5m2fnuz", "toward_negative"), ("e2m3fn", "nearest_away")),
    *(("e8m0fnu", "to_odd"), ("bfloat16", "toward_positive"), ("ue4m3", "toward_zero")),
]


def check_fast_cast(name, rounding):
    inputs = {"float32": float32_inputs(spec_of(name), 2**10)}
    inputs |= {source: every_16_bit_input(source) for source in ("float16", "bfloat16")}
    for source, x in inputs.items():
        got = np.empty(x.size, FORMATS[name].code_dtype)
        fast_cast(FORMATS[name], rounding, source)(x, got)
        with np.errstate(invalid="ignore"):  # signaling NaNs
            wide = x.astype(np.float32)
        assert_same_bits(got, reference_encode(wide, FORMATS[name], rounding), x)


@pytest.mark.sample("e4m3fn-nearest_even")
@pytest.mark.parametrize(("name", "rounding"), SOME)
def test_the_yardstick_equals_the_c_oracle(name, rounding):
    """Edges of float32, every float16 and bfloat16; a format and mode of each way it rounds."""
    check_fast_cast(name, rounding)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fast_c_casts_equal_the_c_oracle(name, rounding):
    check_fast_cast(name, rounding)
