"""product and quotient: their own IEEE rounding, whatever is fused around them.

They belong to casts; the tests are here beside the scales that need them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qtoolkit.casts.internal import product, quotient

COUNT = 2**16


def same(got, expected):
    """Equal bits, NaNs as NaNs."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype == np.float32
    assert got.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


def _random(seed, span=20):
    rng = np.random.default_rng(seed)
    sign = rng.choice([-1, 1], COUNT)
    size = np.ldexp(1 + rng.random(COUNT), rng.integers(-span, span, COUNT))
    return (sign * size).astype(np.float32)


def _terms():
    """x, s, z with z near x*s, where one rounding and two differ most."""
    x, s = _random(1), _random(2)
    z = (x * s) * (1 + np.ldexp(_random(3, 1), -10)).astype(np.float32)
    return x, s, z.astype(np.float32)


SCALES = {
    "elementwise": lambda s: s,
    "scalar": lambda s: s[11],
    "one": lambda s: np.full(1, s[12], np.float32),
}


@pytest.mark.sample("elementwise", "one")
@pytest.mark.quick
@pytest.mark.parametrize("scale", SCALES)
def test_a_product_is_rounded_before_it_is_subtracted_from(scale):
    x, s, z = _terms()
    s = SCALES[scale](s)
    rounded = x * s
    fused = (x.astype(np.float64) * s - z).astype(np.float32)
    expected = rounded - z
    assert np.mean(fused != expected) > 0.1  # an FMA would show
    same(product(jnp.asarray(x), jnp.asarray(s)) - z, expected)
    for function in (
        lambda x, s, z: product(x, s) - z,
        lambda x, s, z: product(s, x) - z,
        lambda x, s, z: -(z - product(x, s)),
        lambda x, s, z: product(x, s) + (-z),
    ):
        same(jax.jit(function)(x, s, z), expected)
    known = jnp.asarray(s)
    same(jax.jit(lambda x, z: product(x, known) - z)(x, z), expected)
    same(jax.vmap(lambda x, z: product(x, known.ravel()[0]) - z)(x, z), x * s.ravel()[0] - z)


@pytest.mark.quick
def test_a_product_inside_a_larger_fusion():
    """The affine step of fake_convert, with reductions and other uses of the same product."""
    x, s, z = _terms()

    @jax.jit
    def larger(x, s, z):
        x, s, z = (v.reshape(64, -1) for v in (x, s, z))
        u = product(x, s)
        first = u - z
        second = jnp.where(first > 0, first, u + z)
        sums = jnp.sum(first * s, axis=1) + jnp.max(jnp.abs(second), axis=1)
        return u.ravel(), first.ravel(), second.ravel(), product(first, s).ravel() - x.ravel(), sums

    u, first, second, third, _ = larger(x, s, z)
    expected = x * s - z
    same(u, x * s)
    same(first, expected)
    same(second, np.where(expected > 0, expected, x * s + z))
    same(third, expected * s - x)


@pytest.mark.quick
def test_products_keep_infinities_zeros_and_nans():
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.5, -1.5, 3e38, -3e38], np.float32)
    a, b = (v.ravel() for v in np.meshgrid(special, special))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = a * b
    for function in (product, jax.jit(product)):
        same(function(jnp.asarray(a), jnp.asarray(b)), expected)
    ones = np.ones_like(a)
    with np.errstate(invalid="ignore"):
        same(jax.jit(lambda a, b, c: product(a, b) - c)(a, b, ones), expected - ones)
    # Every negative and positive NaN pattern is a NaN still.
    nans = np.concatenate([np.arange(0x7F800001, 0x7FFFFFFF, 0x10001), [0x7FFFFFFF]])
    nans = np.concatenate([nans, nans | 0x80000000]).astype(np.uint32).view(np.float32)
    assert np.isnan(np.asarray(jax.jit(product)(nans, np.ones_like(nans)))).all()


@pytest.mark.sample("448.0")
@pytest.mark.parametrize("divisor", [448.0, 3.0, 57344.0, 127.0, 0.1, 1e-20, 6.0])
def test_quotients_by_a_constant_are_ieee(divisor):
    x = _random(4)
    by = np.float32(divisor)
    expected = x / by
    assert np.mean(x * (np.float32(1) / by) != expected) > 0.01  # a reciprocal would show
    constant = jnp.broadcast_to(by, x.shape)
    same(quotient(jnp.asarray(x), constant), expected)
    same(quotient(jnp.asarray(x), jnp.asarray(by)), expected)
    same(jax.jit(lambda x: quotient(x, jnp.asarray(by)))(x), expected)
    same(jax.jit(lambda x: quotient(x, jnp.broadcast_to(by, x.shape)))(x), expected)
    same(jax.jit(lambda x: quotient(x, jnp.full(x.shape, by)) + x)(x), expected + x)
    same(jax.jit(quotient)(x, by), expected)
    same(jax.jit(lambda x, s: quotient(x, jnp.broadcast_to(s, x.shape)))(x, by), expected)
    same(jax.jit(jax.vmap(quotient, in_axes=(0, None)))(x, by), expected)


def test_quotients_by_broadcast_rows_and_columns_are_ieee():
    x = _random(5).reshape(256, 256)
    s = np.abs(_random(6))
    for by in (s.reshape(256, 256), s[:256, None], s[None, :256], s[9], s[:1]):
        expected = x / by
        same(quotient(jnp.asarray(x), jnp.asarray(by)), expected)
        same(jax.jit(quotient)(x, by), expected)
        same(jax.jit(lambda x, s: quotient(x, s) - x)(x, by), expected - x)
        same(jax.jit(lambda x, s: jnp.abs(quotient(x * 2, s)))(x, by), np.abs(x * 2 / by))
        known = jnp.asarray(by)
        same(jax.jit(lambda x, s=known: quotient(x, s) + 1)(x), expected + np.float32(1))


@pytest.mark.quick
def test_quotients_keep_infinities_zeros_and_nans():
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.5, -1.5, 3e38, -3e38], np.float32)
    a, b = (v.ravel() for v in np.meshgrid(special, special))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        expected = a / b
    normal = ~((expected != 0) & (np.abs(expected) < np.float32(2.0**-126)))
    a, b, expected = a[normal], b[normal], expected[normal]
    for function in (quotient, jax.jit(quotient)):
        same(function(jnp.asarray(a), jnp.asarray(b)), expected)


@pytest.mark.quick
def test_affine_round_trip_of_fake_convert_with_three_roundings():
    """(x*s - z + z) / s: each of the four operations rounded once, eager and jitted."""
    x, s, z = _terms()
    expected = ((x * s - z) + z) / s

    def chain(x, s, z):
        return quotient((product(x, s) - z) + z, s)

    for by, wanted in ((s, expected), (s[3], ((x * s[3] - z) + z) / s[3])):
        same(chain(jnp.asarray(x), jnp.asarray(by), jnp.asarray(z)), wanted)
        same(jax.jit(chain)(x, by, z), wanted)
        known = jnp.asarray(by)
        same(jax.jit(lambda x, z, s=known: chain(x, s, z))(x, z), wanted)
