"""Powers of two and zeros by patterns, against numpy's ldexp and frexp on float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import qtoolkit as qt
from qtoolkit.casts.internal import (
    binary_parts,
    exact_float32,
    from_stored,
    is_zero,
    power_of_two,
    times_from_subnormal,
    times_power_of_two,
    times_to_subnormal,
    to_stored,
)

EDGES = np.array(
    [0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000],
    np.uint32,
)


def _numbers():
    random = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    subnormal = random[:512] & np.uint32(0x807FFFFF)
    every = np.concatenate([EDGES, EDGES | np.uint32(2**31), random, subnormal])
    return every.view(np.float32)


def _bits(x):
    return np.asarray(x).view(np.uint32)


@pytest.mark.quick
def test_every_power_of_two_of_float32():
    exponents = np.arange(-149, 128, dtype=np.int32)
    expected = np.ldexp(1.0, exponents).astype(np.float32)
    np.testing.assert_array_equal(_bits(power_of_two(exponents)), _bits(expected))
    np.testing.assert_array_equal(_bits(jax.jit(power_of_two)(exponents)), _bits(expected))


@pytest.mark.sample("False")
@pytest.mark.quick
@pytest.mark.parametrize("jit", [False, True])
def test_products_with_powers_of_two_are_rounded_once(jit):
    """Oracle: float64 holds the product, numpy narrows it."""
    function = jax.jit(times_power_of_two) if jit else times_power_of_two
    x = _numbers()
    for exponent in (-290, -150, -149, -127, -24, -1, 0, 1, 23, 127, 150, 290):
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            expected = np.ldexp(x.astype(np.float64), exponent).astype(np.float32)
        got = np.asarray(function(x, jnp.int32(exponent)))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
        numbers = ~np.isnan(x)
        np.testing.assert_array_equal(_bits(got)[numbers], _bits(expected)[numbers])


@pytest.mark.quick
@pytest.mark.parametrize("exponent", [-173, -127, -126, -24, -1, 0, 23, 127, 128, 173])
def test_short_products_with_powers_of_two(exponent):
    """Oracle: float64. By an exponent for each element and, what XLA simplifies, one for all."""
    x = _numbers()
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        product = np.ldexp(x.astype(np.float64), exponent)
        expected = product.astype(np.float32)
    small = np.abs(product) < 2.0**-100
    holds = ~np.isnan(x) & ((np.abs(x) >= 2.0**-100) | (x == 0))
    for shape in (x.shape, (1,)):
        given = np.full(shape, exponent, np.int32)

        def both(x, exponent):
            exponent = jnp.broadcast_to(exponent, x.shape)
            wanted = x, exponent, jnp.zeros(x.shape, bool)
            return times_from_subnormal(*wanted), times_to_subnormal(*wanted)

        first, second = map(np.asarray, jax.jit(both)(x, given))
        for got in (first, second):
            assert np.isnan(got[np.isnan(x)]).all()
        exact = ~np.isnan(x) & ~small
        np.testing.assert_array_equal(_bits(first)[exact], _bits(expected)[exact])
        assert (np.abs(first[small]) < 2.0**-100).all()
        np.testing.assert_array_equal(np.signbit(first[small]), np.signbit(x[small]))
        np.testing.assert_array_equal(_bits(second)[holds], _bits(expected)[holds])


def test_a_power_that_is_nan_makes_every_product_nan():
    x = np.array([0.0, 1e-45, 1.0, np.inf, -3e38], np.float32)
    for function in (times_from_subnormal, times_to_subnormal):
        got = jax.jit(function)(x, np.zeros(5, np.int32), np.ones(5, bool))
        assert np.isnan(got).all(), function


def test_exponent_and_fraction_are_those_of_frexp():
    x = _numbers()
    x = x[np.isfinite(x) & (x != 0)]
    exponent, fraction = map(np.asarray, jax.jit(binary_parts)(x))
    significand, wanted = np.frexp(np.abs(x.astype(np.float64)))
    np.testing.assert_array_equal(exponent, wanted - 1)
    np.testing.assert_array_equal(1 + fraction / 2**23, 2 * significand)


@pytest.mark.quick
def test_subnormals_are_not_zero_beside_arithmetic_on_them():
    """LLVM folds a pattern's test against zero to a float comparison where floats are at hand."""
    x = _numbers()
    expected = _bits(x) << 1 == 0

    @jax.jit
    def beside(x):
        return jnp.where(is_zero(x), np.float32(7), jnp.maximum(x / 3, np.float32(2.0**-126)))

    np.testing.assert_array_equal(np.asarray(beside(x)) == 7, expected)
    np.testing.assert_array_equal(jax.jit(is_zero)(x), expected)
    np.testing.assert_array_equal(is_zero(jnp.asarray(x)), expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_number_is_itself_in_float32(name):
    x = np.arange(2**16, dtype=np.uint16).view(np.dtype(getattr(ml_dtypes, name, name)))
    got = np.asarray(jax.jit(exact_float32)(x))
    expected = x.astype(np.float32)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.sample("e8m0fnu")
@pytest.mark.parametrize("name", ["e8m0fnu", "e4m3fn", "e5m2", "bfloat16", "float16", "ue4m3"])
def test_what_is_stored_comes_back(name):
    fmt = qt.format(name)
    codes = np.arange(2**fmt.bits)
    wanted = np.unique([float(fmt.value(int(c))) for c in codes[: fmt.max_code + 1]])
    kept = to_stored(jnp.asarray(wanted, jnp.float32), fmt)
    assert kept.dtype == (fmt.dtype or fmt.code_dtype)
    np.testing.assert_array_equal(_bits(from_stored(kept, fmt)), _bits(wanted.astype(np.float32)))
