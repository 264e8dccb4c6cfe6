"""SmoothQuant's factors against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qtoolkit.scaling.internal import smoothing_factors


def normal(shape, seed=0):
    """Channels of unlike range along every axis."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    for axis in range(x.ndim):
        unlike = np.exp2(rng.uniform(-6, 6, x.shape[axis]))
        x *= unlike.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
    return x.astype(np.float32)


@pytest.mark.quick
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.75, 1.0])
def test_smoothing_factors_equal_the_published_formula(alpha):
    a, w = np.abs(normal(50)), np.abs(normal(50, 1))
    expected = a.astype(np.float64) ** alpha / w.astype(np.float64) ** (1 - alpha)
    got = smoothing_factors(a, w, alpha)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=2e-6)  # two powers of float32
    powers = smoothing_factors(a, w, alpha, power_of_two=True)
    np.testing.assert_array_equal(powers, np.exp2(np.round(np.log2(expected))))


def test_powers_of_two_are_the_nearest_by_logarithm():
    """The bound is sqrt(2), with a float32 number on either side; alpha 1 and w 1: s = a."""
    below = np.float32(1.4142135)
    above = np.nextafter(below, np.float32(2))
    assert float(below) ** 2 < 2 < float(above) ** 2
    a = np.array([1, below, above, 1.9999999, 2, 3, 0.7, 0.71, 2.0**-126], np.float32)
    got = smoothing_factors(a, np.ones(9, np.float32), 1.0, power_of_two=True)
    np.testing.assert_array_equal(got, [1, 1, 2, 2, 2, 4, 0.5, 1, 2.0**-126])


def test_channels_without_range_keep_factor_one():
    a = np.array([0, 1, 0, np.inf, np.nan, 1, 1e-41, 1, 4], np.float32)
    w = np.array([1, 0, 0, 1, 1, np.inf, 1, 1e-41, 1], np.float32)
    for power_of_two in (False, True):
        got = smoothing_factors(a, w, power_of_two=power_of_two)
        np.testing.assert_array_equal(got, [1, 1, 1, 1, 1, 1, 1, 1, 2])


def test_factors_stay_within_normal_numbers():
    a, w = np.array([3e38, 2.0**-126], np.float32), np.array([2.0**-126, 3e38], np.float32)
    got = smoothing_factors(a, w)
    np.testing.assert_allclose(got, [2.0**126, 2.0**-126], rtol=0.2)
    assert np.all(np.isfinite(1 / np.asarray(got)))
    np.testing.assert_array_equal(smoothing_factors(a, np.ones(2, np.float32), 1.0)[0], 2.0**126)


def test_alpha_of_a_half_balances_both_operands():
    a, w = np.abs(normal(24)), np.abs(normal(24, 1))
    factors = np.asarray(smoothing_factors(a, w))
    np.testing.assert_allclose(a / factors, w * factors, rtol=1e-6)


def test_under_jit_and_vmap():
    a, w = (jnp.abs(normal((3, 16), seed)) for seed in (0, 1))
    expected = jnp.stack([smoothing_factors(*pair) for pair in zip(a, w, strict=True)])
    np.testing.assert_array_equal(jax.vmap(smoothing_factors)(a, w), expected)
    np.testing.assert_array_equal(jax.jit(smoothing_factors)(a, w), smoothing_factors(a, w))
