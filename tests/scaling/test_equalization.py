"""Channel factors against numpy in float64, and the products that they leave as they are."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qtoolkit.scaling import cross_layer_factors, equalize, smoothing_factors


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
    x, w = normal((40, 24)), normal((24, 30), 1)
    factors = smoothing_factors(np.max(np.abs(x), axis=0), np.max(np.abs(w), axis=1))
    smooth, scaled = equalize(x, w, factors)
    np.testing.assert_allclose(
        np.max(np.abs(smooth), axis=0), np.max(np.abs(scaled), axis=1), rtol=1e-6
    )


def test_equalize_divides_and_multiplies():
    x, w, factors = normal((3, 4, 24)), normal((24, 5), 1), np.abs(normal(24, 2))
    got_x, got_w = equalize(x, w, factors)
    np.testing.assert_allclose(got_x, x.astype(np.float64) / factors, rtol=2e-7)
    np.testing.assert_allclose(got_w, w.astype(np.float64) * factors[:, None], rtol=1e-7)
    before = x.astype(np.float64) @ w
    after = np.asarray(got_x, np.float64) @ np.asarray(got_w, np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(w) * 2.0**-22
    assert np.all(np.abs(before - after) <= bound)
    # Other axes: NHWC images and a kernel of HWIO.
    x, w = normal((2, 24, 3, 3)), normal((5, 3, 24), 1)
    got_x, got_w = equalize(x, w, factors, x_axis=1, w_axis=-1)
    np.testing.assert_allclose(got_x, x / factors[:, None, None], rtol=2e-7)
    np.testing.assert_allclose(got_w, w * factors, rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_powers_of_two_are_folded_exactly(dtype):
    rng = np.random.default_rng(3)
    x = rng.integers(-200, 200, (7, 16)).astype(dtype)
    w = rng.integers(-200, 200, (16, 9)).astype(dtype)
    factors = np.exp2(rng.integers(-5, 6, 16)).astype(np.float32)
    got_x, got_w = equalize(x, w, factors)
    assert got_x.dtype == got_w.dtype == dtype
    before = x.astype(np.float64) @ w.astype(np.float64)
    after = np.asarray(got_x).astype(np.float64) @ np.asarray(got_w).astype(np.float64)
    np.testing.assert_array_equal(before, after)


def test_cross_layer_factors_give_both_layers_the_same_range():
    w1, w2, b = normal((12, 20)), normal((20, 8), 1), normal(20, 2)
    factors = cross_layer_factors(w1, w2)
    r1, r2 = np.max(np.abs(w1), axis=0), np.max(np.abs(w2), axis=1)
    np.testing.assert_allclose(factors, np.sqrt(r1.astype(np.float64) / r2), rtol=2e-6)
    new1, new2 = equalize(w1, w2, factors)
    np.testing.assert_allclose(
        np.max(np.abs(new1), axis=0), np.max(np.abs(new2), axis=1), rtol=1e-6
    )
    x = normal((6, 12), 3).astype(np.float64)

    def network(w1, b, w2):
        w1, b, w2 = (np.asarray(a).astype(np.float64) for a in (w1, b, w2))
        return np.maximum(x @ w1 + b, 0) @ w2

    powers = cross_layer_factors(w1, w2, power_of_two=True)
    new1, new2 = equalize(w1, w2, powers)
    np.testing.assert_array_equal(network(new1, b / powers, new2), network(w1, b, w2))


def test_cross_layer_factors_along_other_axes():
    kernel, following = normal((3, 3, 4, 20)), normal((8, 20), 1)
    kernel[..., 5] = 0
    following[0, 7] = np.inf
    got = cross_layer_factors(kernel, following, axis2=1)
    r1 = np.max(np.abs(kernel), axis=(0, 1, 2)).astype(np.float64)
    r2 = np.max(np.where(np.isfinite(following), np.abs(following), 0), axis=0)
    expected = np.sqrt(r1 / r2)
    expected[5] = 1
    np.testing.assert_allclose(got, expected, rtol=2e-6)


def test_under_jit_and_vmap():
    x, w = jnp.asarray(normal((5, 16))), jnp.asarray(normal((16, 6), 1))

    def smooth(x, w):
        factors = cross_layer_factors(x, w, power_of_two=True)
        return equalize(x, w, factors)

    expected = smooth(x, w)
    for got, wanted in zip(jax.jit(smooth)(x, w), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    many = jax.vmap(smooth)(jnp.stack([x, x[::-1]]), jnp.stack([w, w]))
    np.testing.assert_array_equal(many[0][0], expected[0])


def test_gradients_are_those_of_a_quotient_and_a_product():
    x, w, s = normal((5, 16)), normal((16, 6), 1), np.abs(normal(16, 2))
    c, d = normal((5, 16), 3), normal((16, 6), 4)

    def weighted(x, w, s):
        divided, multiplied = equalize(x, w, s)
        return jnp.sum(divided * c) + jnp.sum(multiplied * d)

    got = jax.grad(weighted, argnums=(0, 1, 2))(x, w, s)
    np.testing.assert_allclose(got[0], c / s, rtol=1e-6)
    np.testing.assert_allclose(got[1], d * s[:, None], rtol=1e-6)
    x, w, s, c, d = (a.astype(np.float64) for a in (x, w, s, c, d))
    expected = np.sum(w * d, axis=1) - np.sum(x * c, axis=0) / s**2
    size = np.sum(np.abs(w * d), axis=1) + np.sum(np.abs(x * c), axis=0) / s**2
    assert np.all(np.abs(np.asarray(got[2]) - expected) <= 1e-6 * size)


def test_masked_elements_do_not_change_gradients_of_factors():
    x = jnp.array([[2.0, jnp.nan]])
    _, back = jax.vjp(lambda f: equalize(x, x, f, w_axis=1), jnp.array([2.0, 4.0]))
    np.testing.assert_array_equal(back((jnp.array([[1.0, 0]]), jnp.array([[1.0, 0]])))[0], [1.5, 0])


def test_errors():
    x, w, s = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32), np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"activation_amax has shape \(4,\), weight_amax \(3,\)"):
        smoothing_factors(s, s[:3])
    with pytest.raises(ValueError, match=r"^smoothing_factors: alpha=1.5, expected 0 to 1"):
        smoothing_factors(s, s, 1.5)
    with pytest.raises(TypeError, match=r"^smoothing_factors: x has dtype float64, expected"):
        smoothing_factors(np.ones(4), s)
    with pytest.raises(ValueError, match=r"w1 has 3 channels along axis 0 of shape \(3, 4\), w2 4"):
        cross_layer_factors(x, w, axis1=0)
    with pytest.raises(ValueError, match=r"axis 2 of w2, an array of shape \(4, 5\), expected -2 "):
        cross_layer_factors(x, w, axis2=2)
    with pytest.raises(ValueError, match=r"^equalize: w has 5 channels along axis 1 of shape"):
        equalize(x, w, s, w_axis=1)
    with pytest.raises(ValueError, match=r"^equalize: axis 0 of w, an array of shape \(\)"):
        equalize(x, np.float32(1), s)
