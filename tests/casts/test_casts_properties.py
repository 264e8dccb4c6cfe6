"""What holds for every format and every input: few examples drawn, each a big array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import (
    FLOATS,
    ROUNDINGS,
    SATURATIONS,
    SMALL,
    SOURCES,
    Float,
    Int,
    assert_same_bits,
    codes,
    every_p3109,
    exact,
    float32_inputs,
    stochastic_codes,
)
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import qtoolkit as qt

# Compiling takes longer than Hypothesis likes, and the autouse fixture only sets a JAX option.
few = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking would compile hundreds of casts
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NAMES = [*SMALL, "float16", "bfloat16", "tf32", "binary8p1se", "binary8p3ue", "binary6p2sf"]
NAMES.remove("bool")
SIGNED = [n for n in NAMES if n in FLOATS and FLOATS[n].signed] + ["binary8p1se", "binary6p2sf"]


@st.composite
def arrays(draw, size: int = 2**13) -> np.ndarray:
    """float32: all patterns, or numbers about some magnitude, with halves of small integers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    about = draw(st.integers(-150, 130))
    patterns = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        near = np.ldexp(rng.normal(size=size), about).astype(np.float32)
        coarse = np.ldexp(rng.integers(-64, 65, size) / 2.0, about // 8).astype(np.float32)
    halves = (rng.integers(-300, 301, size) / 2).astype(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    drawn = np.concatenate([patterns, near, coarse, halves, special])
    return rng.permutation(drawn)[:size]


names = st.sampled_from(NAMES)
roundings = st.sampled_from(ROUNDINGS)
saturations = st.sampled_from(SATURATIONS)


def _numbers(x: np.ndarray) -> np.ndarray:
    return x[~np.isnan(x)]


def _value(x, name, rounding, saturation="finite") -> np.ndarray:
    code = qt.encode(x, name, rounding=rounding, saturation=saturation)
    return np.asarray(qt.decode(code, name))


@pytest.mark.exhaustive
@few
@given(arrays(), names, roundings)
def test_casts_are_monotone(x, name, rounding):
    x = np.sort(_numbers(x))
    assert np.all(np.diff(_value(x, name, rounding)) >= 0)


@few
@given(arrays(), names, roundings, saturations)
def test_casts_are_idempotent(x, name, rounding, saturation):
    x = _numbers(x)
    options = {"rounding": rounding, "saturation": saturation}
    code = np.asarray(qt.encode(x, name, **options))
    value = np.asarray(qt.decode(code, name))
    number = ~np.isnan(value)
    again = np.asarray(qt.encode(value, name, **options))
    assert_same_bits(again[number], code[number], x[number])


@few
@given(arrays(), st.sampled_from(SIGNED), roundings, saturations)
def test_casts_are_odd_and_the_directions_mirror_each_other(x, name, rounding, saturation):
    """Signed formats; bits compared, so the zeros too, but for formats with one zero."""
    x = _numbers(x)
    mirrored = {"toward_positive": "toward_negative", "toward_negative": "toward_positive"}
    there = _value(x, name, rounding, saturation)
    back = -_value(-x, name, mirrored.get(rounding, rounding), saturation)
    number = ~np.isnan(there)
    np.testing.assert_array_equal(there[number], back[number])
    np.testing.assert_array_equal(np.isnan(there), np.isnan(back))


@settings(few, max_examples=8)
@given(arrays(), names)
def test_every_rounding_is_one_of_two_neighbours(x, name):
    """Between the two directed ones, which enclose what lies in the format's range."""
    x = _numbers(x)
    low, high = _value(x, name, "toward_negative"), _value(x, name, "toward_positive")
    fmt = qt.format(name)
    inside = (x >= float(fmt.lowest)) & (x <= float(fmt.max_finite))
    assert np.all(low[inside] <= x[inside])
    assert np.all(x[inside] <= high[inside])
    for rounding in ROUNDINGS:
        value = _value(x, name, rounding)
        assert np.all((value == low) | (value == high))
    exact_ones = inside & (low == high)
    np.testing.assert_array_equal(low[exact_ones], x[exact_ones])


@pytest.mark.exhaustive
@few
@given(arrays(2**12), names, roundings, saturations)
def test_jit_vmap_and_x64_change_no_bit(x, name, rounding, saturation):
    """Eager, inside a larger jit, under vmap, and x64 on: all as the oracle says."""

    def encode(x):
        return qt.encode(x, name, rounding=rounding, saturation=saturation)

    eager = np.asarray(encode(x))
    square = x.reshape(64, -1)
    larger = jax.jit(lambda x: encode(jnp.flip(jnp.flip(x))) + np.uint8(0).astype(eager.dtype))
    assert_same_bits(larger(x), eager, x)
    assert_same_bits(np.asarray(jax.vmap(encode)(square)).ravel(), eager, x)
    with jax.enable_x64(True):
        assert_same_bits(encode(x), eager, x)
    spec = {**SMALL, **FLOATS, **every_p3109(8), **every_p3109(6)}[name]
    assert_same_bits(eager, codes(x, spec, saturation, rounding), x)


@pytest.mark.exhaustive
@few
@given(st.integers(0, 2**32), names, roundings, saturations)
def test_integers_are_cast_as_the_floats_that_hold_them(seed, name, rounding, saturation):
    rng = np.random.default_rng(seed)
    x = rng.integers(-(2**24), 2**24, 2**10) >> rng.integers(0, 24, 2**10)
    expected = qt.encode(x.astype(np.float32), name, rounding=rounding, saturation=saturation)
    for dtype in (np.int32, np.int64):
        got = qt.encode(x.astype(dtype), name, rounding=rounding, saturation=saturation)
        assert_same_bits(got, expected, x)


@few
@given(arrays(2**12), names, roundings, saturations)
def test_narrow_sources_are_cast_as_the_float32_that_holds_them(x, name, rounding, saturation):
    for source in ("float16", "bfloat16"):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            narrow = x.astype(SOURCES[source])
            wide = narrow.astype(np.float32)
        options = {"rounding": rounding, "saturation": saturation}
        assert_same_bits(
            qt.encode(narrow, name, **options), qt.encode(wide, name, **options), narrow
        )


@st.composite
def float_specs(draw) -> Float:
    """Any format that can be made, of up to 20 bits."""
    signed = draw(st.booleans())
    zero = draw(st.sampled_from([True, True, True, False])) or signed
    exponent, mantissa = draw(st.integers(1, 8)), draw(st.integers(0, 11)) if zero else 0
    kind = draw(st.sampled_from(["ieee", "fn", "fnuz", "extended", "none"]))
    overflow = draw(st.sampled_from(["inf", "nan", "max"]))
    assume(not (kind == "ieee" and mantissa == 0))
    assume(not (kind == "fnuz" and not signed))
    assume(not (overflow == "inf" and kind not in ("ieee", "extended")))
    assume(not (overflow == "nan" and kind == "none"))
    bias = draw(st.integers(-10, 2**exponent + 20))
    spec = Float(exponent, mantissa, bias, kind, overflow, signed, zero)
    assume(spec.max_code >= 1)
    return spec


@pytest.mark.exhaustive
@settings(few, max_examples=40)
@given(float_specs(), roundings, saturations)
def test_any_format_that_can_be_made_is_cast_as_the_oracle_says(spec, rounding, saturation):
    fmt = spec.as_format("drawn")
    x = float32_inputs(spec, 2**10)
    got = qt.encode(x, fmt, rounding=rounding, saturation=saturation)
    assert_same_bits(got, codes(x, spec, saturation, rounding), x)


@settings(few, max_examples=12)
@given(float_specs(), st.sampled_from("ABC"), st.integers(1, 24), saturations, arrays(2**12))
def test_stochastic_rounding_of_any_format(spec, variant, bits, saturation, x):
    fmt = spec.as_format("drawn")
    x = np.concatenate([x, np.random.default_rng(bits).choice(float32_inputs(spec, 2**8), 2**12)])
    random = np.random.default_rng(1).integers(0, 2**bits, x.size, dtype=np.uint32)
    rounding = qt.Stochastic(variant, bits=bits)
    got = qt.encode(x, fmt, rounding=rounding, saturation=saturation, random_bits=random)
    assert_same_bits(got, stochastic_codes(x, spec, variant, bits, random, saturation), x)


@settings(few, max_examples=12)
@given(st.integers(1, 32), st.booleans(), roundings, saturations, arrays())
def test_any_integer_width_is_cast_as_the_oracle_says(bits, signed, rounding, saturation, x):
    spec = Int(bits, signed)
    got = qt.encode(x, spec.as_format("drawn"), rounding=rounding, saturation=saturation)
    assert_same_bits(got, codes(x, spec, saturation, rounding), x)


@pytest.mark.quick
def test_the_drawn_arrays_reach_everything():
    """Subnormals, infinities and NaNs of both signs are among 50 draws' patterns."""
    x = np.concatenate([np.random.default_rng(i).integers(0, 2**32, 2**10) for i in range(50)])
    source = exact(x.astype(np.uint32).view(np.float32))
    assert source.negative.any()
    assert source.is_nan.any()
    assert (source.exponent < -149 + 23 - 52).any()
