"""Every kind of source: 64-bit floats with and without x64, narrow floats, bool, scalars, shapes.

The oracle is `casts_oracle.every_code`: integers from the exact value of the source.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import (
    DTYPES,
    FLOATS,
    ROUNDINGS,
    SHIPPED,
    SPECS,
    Float,
    Int,
    assert_same_bits,
    assert_same_variants,
    bits_of,
    codes,
    every_code,
    every_p3109,
    exact,
    float64_inputs,
    in_one_jit,
    op_by_op,
    p3109,
    stochastic_codes,
    values32,
    values64,
)

import qtoolkit as qt

SOME = [(r, "none") for r in ROUNDINGS] + [("nearest_even", "finite"), ("to_odd", "propagate")]
FROM_FLOAT64 = {
    **{
        name: SPECS[name]
        for name in (
            *("e4m3fn", "e5m2", "e4m3fnuz", "e8m0fnu", "ue4m3", "e2m1fn", "e2m3fn", "hifloat8"),
            *("nf4", "posit8", "float16", "bfloat16", "tf32", "float32", "int4", "int8", "uint8"),
            *("int16", "int32", "uint32", "bool"),
        )
    },
    "binary8p1se": every_p3109(8)["binary8p1se"],
    "binary16p1se": p3109(16, 1, True, True),
    "binary16p5uf": p3109(16, 5, False, False),
    "int31": Int(31, True),
}


def _float64(spec) -> np.ndarray:
    """Where float64 does not hold all values and ties, those of a format of the same precision."""
    if isinstance(spec, Float) and (spec.exponent > 10 or spec.bits > 20):
        return np.concatenate([float64_inputs(FLOATS["bfloat16"]), _ties_of_wide_mantissas(spec)])
    return float64_inputs(spec)


def _ties_of_wide_mantissas(spec) -> np.ndarray:
    """Values and ties of 24 and more bits, +-1 ulp of float64, down to the subnormals."""
    rng = np.random.default_rng(11)
    bits = min(spec.mantissa, 51)
    size = 1 + rng.integers(0, 2 ** (bits + 1), 2048) / 2.0 ** (bits + 1)
    low, high = max(-1020, spec.min_step - 3), min(1023, 2**spec.exponent - spec.bias)
    with np.errstate(over="ignore", under="ignore"):
        points = np.ldexp(size, rng.integers(low, high, size.size))
        steps = np.ldexp(rng.integers(1, 64, 512) / 2, max(spec.min_step, -1070))
    largest = [(2 - 2.0 ** -(bits + k)) * 2.0 ** min(high - 2, 1023) for k in (0, 1, 2, 3)]
    points = np.concatenate([points, steps, largest])
    around = [points, np.nextafter(points, 0), np.nextafter(points, np.inf)]
    return np.concatenate([*around, -points])


# Compiled as users compile them: what is shipped, and one format for each other path.
COMPILED = {*SHIPPED, "e8m0fnu", "e2m1fn", "hifloat8", "nf4", "int4", "binary16p1se"}


@pytest.mark.sample("e4m3fn")
@pytest.mark.parametrize("name", FROM_FLOAT64)
def test_float64_under_x64(name):
    """Ties +-1 ulp of float64 and of float32: a float32 in between would lose all of them."""
    spec = FROM_FLOAT64[name]
    x = _float64(spec)
    run = in_one_jit if name in COMPILED else op_by_op
    with jax.enable_x64(True):
        got = run(qt.encode, name, SOME)(x)
    assert_same_variants(got, every_code(x, spec, SOME), x, SOME)


@pytest.mark.sample("e4m3fn")
@pytest.mark.parametrize("name", FROM_FLOAT64)
def test_numpy_float64_without_x64(name):
    """On the host, before anything narrows it."""
    spec = FROM_FLOAT64[name]
    x = _float64(spec)
    some = SOME[::2]
    with contextlib.nullcontext() if name in COMPILED else jax.disable_jit():
        got = [qt.encode(x, name, rounding=r, saturation=s) for r, s in some]
    for row, expected in zip(got, every_code(x, spec, some), strict=True):
        assert_same_bits(row, expected, x)


@pytest.mark.sample("float64-float64")
@pytest.mark.parametrize("name", ["float64", "int64", "uint64", "int33", "uint63"])
@pytest.mark.parametrize("source", [np.float64, np.float32, np.int64, np.uint64, np.int32])
def test_results_of_64_bits_under_x64(name, source):
    spec = SPECS[name] if name in SPECS else Int(int(name[-2:]), name.startswith("int"))
    rng = np.random.default_rng(4)
    if np.dtype(source).kind == "f":
        wide = float64_inputs(SPECS["bfloat16"])
        powers = 2.0 ** np.arange(66)
        near = np.concatenate([powers, powers - 0.5, powers + 0.5, np.nextafter(powers, 0)])
        x = np.concatenate([wide, near, -near, near * 1.5, rng.normal(0, 2.0**62, 999)])
        with np.errstate(over="ignore", invalid="ignore"):
            x = x.astype(source)
    else:
        info = np.iinfo(source)
        x = rng.integers(info.min, info.max, 2**12, source, endpoint=True)
        x = np.concatenate([x, np.array([info.min, info.max, 0, 1, info.max - 1], source)])
    with jax.enable_x64(True):
        got = in_one_jit(qt.encode, name, SOME)(x)
    assert_same_variants(got, every_code(x, spec, SOME), x, SOME)


@pytest.mark.parametrize("x64", [False, True])
def test_float64_is_rounded_from_its_exact_values(x64):
    """In its own dtype, or where JAX has none of 64 bits as float32."""
    x = _float64(SPECS["e4m3fn"])
    with jax.enable_x64(x64):
        got = np.asarray(qt.round_to_format(x, "e4m3fn"))
    dtype = np.float64 if x64 else np.float32
    assert got.dtype == dtype
    expected = values32(codes(x, SPECS["e4m3fn"]), SPECS["e4m3fn"]).astype(dtype)
    number = ~np.isnan(x)
    assert_same_bits(got[number], expected[number], x[number])


@pytest.mark.sample("e4m3fn", "float16", "bfloat16")
@pytest.mark.parametrize("name", ["e4m3fn", "float16", "bfloat16", "int8"])
def test_cast_of_64_bit_inputs(name):
    x = _float64(SPECS[name])
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            got = qt.cast(x, name, saturation="none")
        assert got.dtype == np.dtype(DTYPES[name])
        assert_same_bits(bits_of(got), codes(x, SPECS[name], "none"), x)


NARROW_SOURCES = [name for name in DTYPES if name in FLOATS and FLOATS[name].bits <= 8]
TO = ["e4m3fn", "e5m2", "e8m0fnu", "e2m1fn", "float16", "bfloat16", "float32", "int8", "hifloat8"]


@pytest.mark.sample("e5m2")
@pytest.mark.parametrize("source", NARROW_SOURCES)
def test_every_code_of_every_narrow_float_as_a_source(source):
    """FNUZ's one NaN has no sign to keep."""
    x = np.arange(2 ** FLOATS[source].bits, dtype=np.uint8).view(DTYPES[source])
    some = [("nearest_even", "none"), ("to_odd", "finite"), ("toward_negative", "propagate")]

    @jax.jit
    def compiled(x):
        return [
            [qt.encode(x, name, rounding=r, saturation=s) for r, s in some]
            for name in (*TO, source)
        ]

    for given in (x, jnp.asarray(x)):
        for name, rows in zip((*TO, source), compiled(given), strict=True):
            for row, wanted in zip(rows, every_code(x, SPECS[name], some), strict=True):
                assert_same_bits(row, wanted, x)


@pytest.mark.sample("e5m2", "e4m3fnuz", "e4m3_ieee")
@pytest.mark.parametrize("source", NARROW_SOURCES)
def test_a_format_as_its_own_source_is_the_identity(source):
    spec = FLOATS[source]
    code = np.arange(2**spec.bits, dtype=np.uint8)
    finite = np.isfinite(values64(spec))
    for saturation in ("finite", "none"):
        got = np.asarray(qt.encode(code.view(DTYPES[source]), source, saturation=saturation))
        assert_same_bits(got[finite], code[finite])
        number = ~np.isnan(values64(spec))
        if saturation == "none":
            assert_same_bits(got[number], code[number])
        assert np.isin(got[~number], spec.nan_codes).all()


@pytest.mark.sample("e4m3fn", "e5m2", "e8m0fnu", "e2m1fn", "float16", "bfloat16", "float32", "int8")
@pytest.mark.parametrize("name", TO)
def test_bool_as_a_source(name):
    x = np.array([False, True])
    for given in (x, jnp.asarray(x)):
        assert_same_bits(qt.encode(given, name), codes(x, SPECS[name]), x)


SCALARS = [
    *(True, False, 0, 1, -1, 3, 464, 465, -(2**63), 2**63 - 1, 2**40 + 1, 0.1, -0.0, 464.0),
    *(464.00000000000006, 1e300, 1e-300, float("inf"), float("-inf"), float("nan")),
    *(1 + 2**-8 + 2**-40, 2.0**-10 + 2.0**-60, 16777217.0),
]


@pytest.mark.sample("e4m3fn-x32", "float32-x64", "bool-x32")
@pytest.mark.quick
@pytest.mark.parametrize("enabled", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("name", ["e4m3fn", "bfloat16", "float32", "int8", "nf4", "bool"])
def test_python_scalars_are_64_bit_numbers(name, enabled):
    """The code of the exact value: int as int64, float as float64, bool as bool."""
    with jax.enable_x64(enabled):
        for scalar in SCALARS:
            for rounding in ("nearest_even", "toward_positive"):
                got = qt.encode(scalar, name, rounding=rounding, saturation="none")
                expected = codes(np.asarray(scalar), SPECS[name], "none", rounding)
                assert got.shape == ()
                assert_same_bits(got, expected, np.asarray(scalar))


@pytest.mark.sample("e4m3fn")
@pytest.mark.parametrize("name", ["e4m3fn", "float16", "int8", "posit8"])
def test_strided_and_reversed_numpy_inputs(name):
    wide = _float64(SPECS[name])
    wide = np.sort(wide[~np.isnan(wide)])[: wide.size // 8 * 4].reshape(4, -1)
    repeated = np.broadcast_to(wide[0], (2, *wide[0].shape))
    for x in (wide.T, wide[::-1, ::3], np.asfortranarray(wide), repeated):
        assert_same_bits(qt.encode(x, name), codes(x, SPECS[name]), x)
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype(np.float16)
    assert_same_bits(qt.encode(narrow.T, name), codes(narrow.T, SPECS[name]), narrow.T)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_bytes_of_numpy_in_the_other_order(dtype):
    """Oracle: the same function of the numbers in the machine's own order."""
    functions = {
        "encode": lambda x: qt.encode(x, "e4m3fn"),
        "round_to_format": lambda x: qt.round_to_format(x, "e4m3fn"),
        "fake_cast": lambda x: qt.fake_cast(x, "e4m3fn"),
        "fake_convert": lambda x: qt.fake_convert(x, 1.1, 0.3, fmt="e4m3fn"),
        "quantize": lambda x: qt.quantize(x, "e4m3fn").codes,
        "lsq": lambda x: qt.gradients.lsq(x, 0.1, "int8"),
    }
    x = np.linspace(-3, 3, 64).astype(f"<{dtype}").reshape(8, 8)
    for function in functions.values():
        got, expected = (np.asarray(function(a)) for a in (x.astype(f">{dtype}"), x))
        assert_same_bits(got, expected)


def test_the_oracle_reads_every_source_exactly():
    """Its `exact` against Python's own reading of each code."""
    for name in NARROW_SOURCES:
        spec = FLOATS[name]
        x = np.arange(2**spec.bits, dtype=np.uint8).view(DTYPES[name])
        got = exact(x)
        value = np.ldexp(got.mantissa.astype(np.float64), got.exponent)
        value = np.where(got.negative, -value, value)
        finite = np.isfinite(values64(spec))
        np.testing.assert_array_equal(value[finite], values64(spec)[finite])
        np.testing.assert_array_equal(x.astype(np.float32)[finite], values64(spec)[finite])


@pytest.mark.sample("e4m3fn-A")
@pytest.mark.parametrize("variant", ["A", "B", "C"])
@pytest.mark.parametrize("name", ["e4m3fn", "e2m1fn", "bfloat16", "float16", "int8", "int32"])
def test_stochastic_rounding_of_float64_far_below_one_step(name, variant):
    """A tiny value goes up as rarely as its size says; the oracle is the formula of P3109."""
    rng = np.random.default_rng(17)
    spec = SPECS[name]
    step = 1.0 if isinstance(spec, Int) else 2.0 ** (1 - spec.bias - spec.mantissa)
    x = np.ldexp(1 + rng.random(4096), rng.integers(-70, 3, 4096)) * step
    x *= rng.choice([-1.0, 1.0], x.shape)
    for bits in (1, 5, 24):
        random = rng.integers(0, 2**bits, x.shape, dtype=np.uint32)
        random[::3] = 2**bits - 1
        rounding = qt.Stochastic(variant, bits=bits)
        got = qt.encode(x, name, rounding=rounding, random_bits=random)
        assert_same_bits(got, stochastic_codes(x, spec, variant, bits, random), x)
