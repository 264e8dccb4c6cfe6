"""fake_cast: its values are those of decode(encode(x)), its derivative the estimator's slope."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qtoolkit import decode, encode, fake_cast
from qtoolkit.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, FLOAT16, INT8
from qtoolkit.gradients import Clipped, Estimator, Identity, Zero

EIGHT_BITS = [E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, INT8]
EDGES = {E4M3FN: (-448.0, 448.0), E5M2: (-57344.0, 57344.0), INT8: (-128.0, 127.0)}


def all_inputs(dtype):
    return np.arange(2**16, dtype=np.uint16).view(dtype)


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


@pytest.mark.quick
@pytest.mark.parametrize("saturation", ["finite", "propagate", "none"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("fmt", EIGHT_BITS, ids=lambda fmt: fmt.name)
def test_equals_decode_of_encode_on_every_16_bit_input(fmt, dtype, saturation):
    x = all_inputs(dtype)
    expected = decode(encode(x, fmt, saturation=saturation), fmt, dtype)
    got = fake_cast(x, fmt, saturation=saturation)
    np.testing.assert_array_equal(bits(got), bits(expected))


@pytest.mark.parametrize("fmt", [*EIGHT_BITS, FLOAT16], ids=lambda fmt: fmt.name)
def test_equals_decode_of_encode_on_random_float32_patterns(fmt):
    x = np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint32).view(np.float32)
    np.testing.assert_array_equal(bits(fake_cast(x, fmt)), bits(decode(encode(x, fmt), fmt)))


@pytest.mark.parametrize("fmt", list(EDGES), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_clipped_slope_at_the_edges(fmt, wrap):
    lower, upper = EDGES[fmt]
    up, down = np.float32(np.inf), np.float32(-np.inf)
    inside = [lower, np.nextafter(np.float32(lower), up), -0.0, 0.0, 1e-30, upper]
    outside = [np.nextafter(np.float32(upper), up), np.nextafter(np.float32(lower), down)]
    outside += [np.inf, -np.inf, np.nan, 3e38]
    x = jnp.asarray([*inside, *outside], jnp.float32)
    gradient = wrap(jax.grad(lambda x: jnp.sum(fake_cast(x, fmt))))(x)
    np.testing.assert_array_equal(gradient, [1.0] * len(inside) + [0.0] * len(outside))


@pytest.mark.parametrize(
    ("gradient", "expected"), [("identity", [1, 1, 1, 1]), ("zero", [0] * 4), (Identity(), [1] * 4)]
)
def test_other_estimators(gradient, expected):
    x = jnp.asarray([1.0, 1e6, jnp.inf, jnp.nan], jnp.float32)
    got = jax.grad(lambda x: jnp.sum(fake_cast(x, E4M3FN, gradient=gradient)))(x)
    np.testing.assert_array_equal(got, expected)


def test_no_nan_from_an_infinite_cotangent_outside_the_range():
    x = jnp.asarray([1e6, 1.0], jnp.float32)
    _, pullback = jax.vjp(lambda x: fake_cast(x, E4M3FN), x)
    np.testing.assert_array_equal(pullback(jnp.full(2, jnp.inf))[0], [0, np.inf])


def test_an_estimator_of_the_users_own():
    class Half:
        def slope(self, x, lower, upper, fmt):
            assert (lower, upper, fmt) == (-448.0, 448.0, E4M3FN)
            return jnp.full_like(x, 0.5)

    assert isinstance(Half(), Estimator)
    assert jax.grad(lambda x: fake_cast(x, E4M3FN, gradient=Half()))(jnp.float32(3)) == 0.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_every_transformation_gives_the_same_derivative(dtype):
    x = jnp.asarray([-500.0, -2.0, 0.3, 7.0, 460.0], dtype)
    slope = np.asarray([0, 1, 1, 1, 0], np.float32)

    def f(x):
        return fake_cast(x, E4M3FN)

    tangent = jnp.full_like(x, 2)
    results = {
        "jvp": jax.jvp(f, (x,), (tangent,))[1],
        "linearize": jax.linearize(f, x)[1](tangent),
        "vjp": jax.vjp(f, x)[1](tangent)[0],
        "vmap": jax.vmap(jax.grad(lambda x: 2 * f(x)))(x),
        "remat": jax.vjp(jax.checkpoint(f), x)[1](tangent)[0],
        "scan": jax.grad(lambda x: 2 * jnp.sum(jax.lax.scan(lambda c, v: (c, f(v)), 0, x)[1]))(x),
    }
    for name, got in results.items():
        assert got.dtype == dtype, name
        np.testing.assert_array_equal(np.asarray(got, np.float32), 2 * slope, err_msg=name)


def test_hessian_of_a_square_is_that_of_the_estimate():
    x = jnp.asarray([1.1, 449.0, -3.0], jnp.float32)
    for estimate, slope in (("clipped", [1, 0, 1]), ("identity", [1, 1, 1]), ("zero", [0, 0, 0])):
        h = jax.hessian(lambda x, g=estimate: jnp.sum(fake_cast(x, E4M3FN, gradient=g) ** 2))(x)
        np.testing.assert_array_equal(h, 2 * np.diag(slope))


def test_estimators_are_hashable_constants():
    assert len({Clipped(), Clipped(), Identity(), Zero()}) == 3


def test_errors():
    x = jnp.ones(3, jnp.float32)
    with pytest.raises(TypeError, match=r"fake_cast: x has dtype int32, expected float32"):
        fake_cast(jnp.ones(3, jnp.int32), E4M3FN)
    with pytest.raises(TypeError, match=r"fake_cast: x has type float, expected float32"):
        fake_cast(1.0, E4M3FN)
    with pytest.raises(ValueError, match=r"unknown format 'e4m3'; did you mean 'e4m3fn'"):
        fake_cast(x, "e4m3")
    with pytest.raises(ValueError, match=r"fake_cast: rounding='up', expected one of nearest_even"):
        fake_cast(x, E4M3FN, rounding="up")
    with pytest.raises(
        ValueError, match=r"saturation=True, expected one of finite, propagate, none"
    ):
        fake_cast(x, E4M3FN, saturation=True)
    with pytest.raises(
        ValueError, match=r"gradient='ste', expected one of identity, clipped, zero"
    ):
        fake_cast(x, E4M3FN, gradient="ste")
    with pytest.raises(ValueError, match=r"gradient=<class .*Clipped'>, expected one of"):
        fake_cast(x, E4M3FN, gradient=Clipped)
    with pytest.raises(ValueError, match=r"float16 does not hold every finite value of bfloat16"):
        fake_cast(x.astype(jnp.float16), "bfloat16")
