"""round_cotangent: the identity forward, ml_dtypes' rounding backward, however transformed."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refused import refused

from qtoolkit import BlockFormat, Stochastic, fake_quantize, round_cotangent, round_to_format
from qtoolkit.casts import DETERMINISTIC, SATURATIONS

COTANGENT = np.asarray([1.037, 1e-4, -3e-3, 1000.0, 1e6, 1e-12], np.float32)


@np.errstate(invalid="ignore")  # signalling NaNs
def rounded(x, dtype=ml_dtypes.float8_e5m2, largest=57344.0):
    """The oracle: ml_dtypes, after a clip, since it does not saturate."""
    return np.clip(np.asarray(x, np.float32), -largest, largest).astype(dtype).astype(np.float32)


def identity(x):
    return round_cotangent(x, "e5m2")


@pytest.fixture
def x():
    return jnp.arange(1, 7, dtype=jnp.float32)


def test_forward_is_the_identity(x):
    np.testing.assert_array_equal(identity(x), x)
    np.testing.assert_array_equal(jax.jit(identity)(x), x)
    out, tangent = jax.jvp(identity, (x,), (jnp.asarray(COTANGENT),))
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(tangent, COTANGENT)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_vjp_rounds(x, dtype):
    cotangent = jnp.asarray(COTANGENT[:4], dtype)
    (got,) = jax.vjp(identity, x[:4].astype(dtype))[1](cotangent)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), rounded(cotangent))


MODES = {
    **{rounding: {"rounding": rounding} for rounding in DETERMINISTIC},
    "stochastic": {"rounding": "stochastic", "key": jax.random.key(1)},
    "random_bits": {"rounding": Stochastic("A", bits=8), "random_bits": np.uint8(200)},
}


@pytest.mark.sample("e5m2-nearest_even", "int8-to_odd")
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("fmt", ["e5m2", "int8"])
def test_every_mode_rounds_the_cotangent(x, fmt, name):
    """Oracle: `round_to_format`, which has its own tests."""
    cotangent = np.append(COTANGENT[:5], np.float32(np.inf))
    modes = [{**MODES[name], "saturation": saturation} for saturation in SATURATIONS]

    @jax.jit
    def both_ways(x):
        functions = [functools.partial(round_cotangent, fmt=fmt, **mode) for mode in modes]
        backward = [jax.vjp(f, x)[1](cotangent)[0] for f in functions]
        forward = [jax.jvp(f, (x,), (cotangent,)) for f in functions]
        return backward, forward

    for mode, back, (out, tangent) in zip(modes, *both_ways(x), strict=True):
        np.testing.assert_array_equal(back, round_to_format(cotangent, fmt, **mode))
        np.testing.assert_array_equal(out, x)
        np.testing.assert_array_equal(tangent, cotangent)


def test_every_cotangent_of_16_bits():
    cotangent = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    (got,) = jax.vjp(identity, jnp.zeros(2**16, jnp.bfloat16))[1](jnp.asarray(cotangent))
    np.testing.assert_array_equal(np.asarray(got, np.float32), rounded(cotangent))


def test_every_transformation_rounds_the_same(x):
    cotangent = jnp.asarray(COTANGENT)

    def weighed(x):
        return jnp.sum(identity(x) * cotangent)

    expected = rounded(COTANGENT)
    results = {
        "grad": jax.grad(weighed)(x),
        "jit": jax.jit(jax.grad(weighed))(x),
        "remat": jax.grad(jax.checkpoint(weighed))(x),
        "vmap of grad": jax.vmap(jax.grad(lambda x, c: identity(x) * c))(x, cotangent),
        "grad of vmap": jax.grad(lambda x: jnp.sum(jax.vmap(identity)(x) * cotangent))(x),
        "vmap over axis 1": jax.grad(
            lambda x: jnp.sum(jax.vmap(identity, 1, 1)(x.reshape(2, 3)) * cotangent.reshape(2, 3))
        )(x),
        "linear_transpose": jax.linear_transpose(identity, x)(cotangent)[0],
        "transposed linearize": jax.linear_transpose(jax.linearize(identity, x)[1], x)(cotangent)[
            0
        ],
        "scan": jax.grad(
            lambda x: jnp.sum(jax.lax.scan(lambda c, v: (c, identity(v)), 0, x)[1] * cotangent)
        )(x),
    }
    for name, got in results.items():
        np.testing.assert_array_equal(got, expected, err_msg=name)


def test_a_chain_in_scan_rounds_at_every_link():
    def chain(x):
        return jax.lax.scan(lambda c, _: (identity(c) * 1.1, None), x, length=3)[0]

    expected = np.float32(1)
    for _ in range(3):
        expected = rounded(expected * np.float32(1.1))
    assert jax.grad(chain)(jnp.float32(2)) == expected


@pytest.mark.exhaustive
def test_hessian_and_second_order_forward_mode():
    x = jnp.asarray([0.3, 1.7], jnp.float32)

    def f(x):
        return jnp.sum(identity(x) ** 3)

    # Forward over forward never meets a cotangent; reverse mode rounds the one it meets.
    exact = jnp.diag(6 * x)
    np.testing.assert_allclose(jax.jacfwd(jax.jacfwd(f))(x), exact, rtol=1e-6)
    expected = np.diag(rounded(np.diag(exact)))
    np.testing.assert_array_equal(jax.hessian(f)(x), expected)  # jacfwd(jacrev)
    np.testing.assert_array_equal(jax.jacfwd(jax.grad(f))(x), expected)


def test_two_transposes_are_the_identity(x):
    def transposed(c):
        return jax.linear_transpose(identity, x)(c)[0]

    np.testing.assert_array_equal(jax.linear_transpose(transposed, x)(x)[0], x)


@pytest.mark.sample("-100", "0")
@pytest.mark.parametrize("exponent", [-100, -30, 0, 60])
def test_tensor_scaling_keeps_small_and_large_cotangents(exponent):
    c = (np.random.default_rng(0).normal(size=64) * 2.0**exponent).astype(np.float32)
    scale = np.abs(c).max() / np.float32(57344)
    expected = rounded(c / scale) * scale  # the oracle, in numpy

    def back(c):
        return jax.vjp(lambda x: round_cotangent(x, "e5m2", scaling="tensor"), c)[1](c)[0]

    np.testing.assert_array_equal(back(jnp.asarray(c)), expected)
    np.testing.assert_array_equal(jax.jit(back)(jnp.asarray(c)), expected)
    both = jnp.stack([jnp.asarray(c), 1000 * jnp.asarray(c)])
    np.testing.assert_array_equal(jax.vmap(back)(both)[0], expected)  # a scale for each example


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_tensor_scaling_in_half_precision(dtype):
    """The scale of small cotangents is no float16 number; the result is rounded once."""
    c = jnp.asarray(np.random.default_rng(0).normal(size=64) * 1e-3, dtype)
    wide = np.asarray(c, np.float32)
    scale = np.abs(wide).max() / np.float32(57344)
    expected = (rounded(wide / scale) * scale).astype(dtype)
    (got,) = jax.vjp(lambda x: round_cotangent(x, "e5m2", scaling="tensor"), c)[1](c)
    np.testing.assert_array_equal(np.asarray(got), expected)


def test_an_infinite_cotangent_is_not_taken_for_a_small_one():
    x = jnp.full(3, jnp.inf, jnp.float32)
    (got,) = jax.vjp(lambda x: round_cotangent(x, "e5m2", scaling="tensor"), x)[1](x)
    np.testing.assert_array_equal(got, np.full(3, 57344))


def test_zero_cotangents_stay_exact_zeros():
    x = jnp.ones(4, jnp.float32)
    (got,) = jax.vjp(lambda x: round_cotangent(x, "e5m2", scaling="tensor"), x)[1](0 * x)
    np.testing.assert_array_equal(got, np.zeros(4))


@pytest.mark.parametrize("spec", ["mxfp8_e5m2", BlockFormat.token("e4m3fn")])
def test_a_block_format_has_scales_of_its_own(spec):
    c = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32)
    (got,) = jax.vjp(lambda x: round_cotangent(x, spec), c)[1](c)
    np.testing.assert_array_equal(got, fake_quantize(c, spec))
    with refused(ValueError, "which has scales of its own; omit it"):
        round_cotangent(c, spec, scaling="tensor")


def test_errors(x):
    with refused(TypeError, "round_cotangent: x has dtype int32"):
        round_cotangent(x.astype(jnp.int32), "e5m2")
    refused(TypeError, "x has dtype float64", round_cotangent, np.ones(3), "e5m2")
    with refused(ValueError, "stochastic rounding got neither key nor random_bits"):
        round_cotangent(x, "e5m2", rounding="stochastic")
    with refused(ValueError, "key is given, but rounding='nearest_even' uses no"):
        round_cotangent(x, "e5m2", key=jax.random.key(0))
    refused(ValueError, "scaling='row'", round_cotangent, x, "e5m2", scaling="row")
    with refused(ValueError, "bfloat16 does not hold every finite value of float16"):
        round_cotangent(x.astype(jnp.bfloat16), "float16")
