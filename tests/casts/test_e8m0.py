"""E8M0 scales in few operations, against `fractions` and ml_dtypes."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qtoolkit.casts.internal import e8m0_codes, over_e8m0, positive_to_stored, times_e8m0
from qtoolkit.formats import E4M3FN, E5M2

AMAX = np.concatenate(
    [
        np.float32([0, 1e-45, 1e-39, 2.0**-126, 2.0**-118, 447, 448, 449, 3.4e38]),
        np.ldexp(np.float32(1.75), np.arange(-126, 128)).astype(np.float32),
        np.nextafter(np.float32(1.75), [np.float32(0), np.float32(2)]).astype(np.float32),
        np.random.default_rng(0).integers(0, 0x7F800000, 4096, np.uint32).view(np.float32),
    ]
)


@pytest.mark.parametrize("least", [1, 3 * 2**21, 3 * 2**21 + 1, 2**23])
@pytest.mark.parametrize("exponent", [2, 8, 15])
def test_codes_are_the_exponents_of_amaxes(exponent, least):
    """By fractions: the exponent of amax, one more from the fraction `least` / 2**23 on."""
    expected = []
    for amax in map(Fraction, AMAX.tolist()):
        power = amax.numerator.bit_length() - amax.denominator.bit_length() if amax else -200
        power -= Fraction(2) ** power > amax
        significand = amax / Fraction(2) ** power
        power += significand - 1 >= Fraction(least, 2**23)
        expected.append(min(max(power - exponent, -127), 127) + 127)
    got = jax.jit(lambda x: e8m0_codes(x, exponent, least))(jnp.asarray(AMAX))
    np.testing.assert_array_equal(got, np.uint8(expected))
    assert e8m0_codes(jnp.float32(np.nan), exponent, least) == 255


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize("uniform", [False, True])
def test_products_and_quotients_are_exact(wrap, uniform):
    """By float64, where numbers and results are normal numbers of float32; every code of data."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = values[np.isfinite(values)]
    for code in (0, 1, 100, 245) if uniform else (None,):
        codes = np.arange(246, dtype=np.uint8) if code is None else np.uint8([code])
        x, codes = (a.ravel() for a in np.meshgrid(values, codes))
        power = np.ldexp(1.0, codes.astype(int) - 127)
        times = wrap(lambda x, codes: times_e8m0(x, codes))(jnp.asarray(x), jnp.asarray(codes))
        expected = np.float64(x) * power
        is_normal = np.abs(expected) >= 2.0**-126
        np.testing.assert_array_equal(np.float64(times)[is_normal], expected[is_normal])
        over = wrap(lambda x, codes: over_e8m0(x, codes))(times, jnp.asarray(codes))
        np.testing.assert_array_equal(np.asarray(over)[is_normal], x[is_normal])
    is_nan = times_e8m0(jnp.asarray(values), jnp.full(values.shape, 255, jnp.uint8))
    assert np.isnan(is_nan).all()


def test_zeros_stay_zeros_behind_a_product():
    """The factor of code 0 is 2**127; twice that is infinite."""
    codes = jnp.zeros(64, jnp.uint8)
    y = jax.jit(lambda y: over_e8m0(2 * y, codes))(jnp.zeros(64))
    np.testing.assert_array_equal(y, np.zeros(64))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda fmt: fmt.name)
def test_positive_to_stored(fmt):
    """By ml_dtypes on every positive bfloat16, clamped to the largest value."""
    x = np.arange(1, 2**15, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    dtype = np.dtype(fmt.dtype)
    with np.errstate(invalid="ignore"):  # NaNs
        expected = np.minimum(x, np.float32(fmt.max_finite)).astype(dtype)
    got = np.asarray(jax.jit(lambda x: positive_to_stored(x, fmt))(x))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
