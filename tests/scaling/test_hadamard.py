"""The Walsh-Hadamard transform against Sylvester's matrices in numpy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refused import refused

from qtoolkit.scaling import hadamard_transform, quantize, sqnr_db

KEY = jax.random.key(7)


def sylvester(n):
    """The oracle: H of 2n is [[H, H], [H, -H]]; float64, not divided by anything."""
    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.block([[h, h], [h, -h]])
    return h


def by_matrix(x, block, axis, signs=None):
    """float64; along `axis`, each block times diag(signs) times H / sqrt(block)."""
    moved = np.moveaxis(np.asarray(x).astype(np.float64), axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, block)
    blocks = blocks if signs is None else blocks * signs
    out = blocks @ sylvester(block) / np.sqrt(block)
    return np.moveaxis(out.reshape(moved.shape), -1, axis)


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def signs_of(key, block):
    """The signs that are in use, read off the transform of the unit vectors: D H H = D."""
    unit = hadamard_transform(jnp.eye(block), block=block, key=key)
    return np.diag(by_matrix(unit, block, -1)).round(3)


@pytest.mark.sample("shape0-1--1", "shape2-4-0", "shape5-1024--1")
@pytest.mark.parametrize(
    ("shape", "block", "axis"),
    [
        ((3, 32), 1, -1),
        ((3, 32), 2, 1),
        ((4, 6, 5), 4, 0),
        ((2, 48, 3), 16, 1),
        ((256,), 128, 0),
        ((2, 2048), 1024, -1),
    ],
)
def test_each_block_is_multiplied_by_the_matrix_of_sylvester(shape, block, axis):
    x = normal(shape)
    got = hadamard_transform(x, block=block, axis=axis)
    assert got.shape == shape
    assert got.dtype == jnp.float32
    # log2(block) additions of numbers whose squares sum up to at most those of a block.
    bound = 2.0**-24 * (2 + np.log2(block)) * np.sqrt(block) * np.max(np.abs(x))
    np.testing.assert_allclose(got, by_matrix(x, block, axis), rtol=0, atol=bound)
    back = hadamard_transform(got, block=block, axis=axis)  # its own inverse
    np.testing.assert_allclose(back, x, rtol=0, atol=2 * bound)


@pytest.mark.quick
def test_integers_are_exact_in_blocks_of_16():
    x = np.random.default_rng(1).integers(-1000, 1000, (7, 64)).astype(np.float32)
    got = hadamard_transform(x)
    np.testing.assert_array_equal(got, by_matrix(x, 16, -1))
    np.testing.assert_array_equal(hadamard_transform(got), x)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_floats_are_rounded_once(dtype):
    """Sums are those of float32, here exact, which numpy and ml_dtypes round to nearest even."""
    x = np.random.default_rng(2).integers(-100, 100, (5, 32)).astype(dtype)
    got = hadamard_transform(x)
    assert got.dtype == dtype
    expected = by_matrix(x, 16, -1).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), expected.view(np.uint16))


@pytest.mark.sample("1")
@pytest.mark.parametrize("block", [1, 16, 32])
def test_signs_come_first_and_are_shared_by_all_blocks(block):
    signs = signs_of(KEY, block)
    assert set(np.abs(signs)) == {1.0}
    if block > 1:
        assert set(signs) == {1.0, -1.0}
        assert np.any(signs != signs_of(jax.random.key(8), block))
    x = normal((96, 3))
    got = hadamard_transform(x, block=block, axis=0, key=KEY)
    np.testing.assert_allclose(got, by_matrix(x, block, 0, signs), rtol=0, atol=1e-5)
    back = hadamard_transform(got, block=block, axis=0, key=KEY, inverse=True)
    np.testing.assert_allclose(back, x, rtol=0, atol=1e-5)


def test_a_key_of_the_old_kind_is_the_same_key():
    x = normal((2, 16))
    old = jax.random.key_data(KEY)
    np.testing.assert_array_equal(hadamard_transform(x, key=old), hadamard_transform(x, key=KEY))


@pytest.mark.sample("plain")
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "random"])
def test_products_over_the_axis_stay(key):
    x, w = normal((5, 64), 3), normal((64, 7), 4)
    turned = hadamard_transform(x, key=key), hadamard_transform(w, axis=0, key=key)
    product = np.asarray(turned[0], np.float64) @ np.asarray(turned[1], np.float64)
    np.testing.assert_allclose(product, x.astype(np.float64) @ w, rtol=0, atol=1e-5)


def test_an_outlier_costs_less_where_it_is_spread():
    """Why one does it: with outliers, INT4 beside one scale for 32 elements."""
    x = normal((64, 64), 5)
    x[::4, 3] *= 30
    turned = hadamard_transform(x, block=32, key=KEY)
    y = hadamard_transform(
        quantize(turned, "int4_group32").dequantize(), block=32, key=KEY, inverse=True
    )
    plain = quantize(x, "int4_group32").dequantize()
    quiet = np.delete(x, 3, axis=1)
    assert sqnr_db(quiet, np.delete(y, 3, axis=1)) > 3 + sqnr_db(quiet, np.delete(plain, 3, axis=1))


def test_derivatives_are_those_of_a_linear_function():
    x, c = jnp.asarray(normal((3, 32))), jnp.asarray(normal((3, 32), 6))
    for inverse in (False, True):
        turn = functools.partial(hadamard_transform, key=KEY, inverse=inverse)
        back = functools.partial(hadamard_transform, key=KEY, inverse=not inverse)
        grad = jax.grad(lambda x, turn=turn: jnp.sum(turn(x) * c))(x)
        np.testing.assert_allclose(grad, back(c), rtol=0, atol=1e-6)
        _, tangent = jax.jvp(turn, (x,), (c,))
        np.testing.assert_allclose(tangent, turn(c), rtol=0, atol=1e-6)


def test_under_jit_and_vmap():
    x = jnp.asarray(normal((3, 4, 32)))
    expected = hadamard_transform(x, key=KEY)
    turn = functools.partial(hadamard_transform, key=KEY)
    np.testing.assert_array_equal(jax.jit(turn)(x), expected)
    np.testing.assert_array_equal(jax.vmap(turn)(x), expected)
    keys = jax.random.split(KEY, 3)
    each = jax.vmap(lambda x, key: hadamard_transform(x, key=key))(x, keys)
    for i in range(3):
        np.testing.assert_array_equal(each[i], hadamard_transform(x[i], key=keys[i]))


def test_errors():
    x = np.ones((4, 48), np.float32)
    refused(ValueError, r"^hadamard_transform: block=12", hadamard_transform, x, block=12)
    refused(ValueError, r"^hadamard_transform: block=0", hadamard_transform, x, block=0)
    refused(ValueError, r"^hadamard_transform: block=4.0", hadamard_transform, x, block=4.0)
    with refused(ValueError, r"axis -1 of shape \(4, 48\) has length 48"):
        hadamard_transform(x, block=32)
    refused(ValueError, r"axis 2 of x, an array of shape \(4, 48\)", hadamard_transform, x, axis=2)
    refused(ValueError, r"shape \(\)", hadamard_transform, jnp.float32(1))
    with refused(TypeError, r"^hadamard_transform: x has dtype int32"):
        hadamard_transform(np.ones(16, np.int32))
