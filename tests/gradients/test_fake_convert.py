"""fake_convert against numpy with ml_dtypes, step by step, each step rounded once."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from refused import refused

from qtoolkit import Stochastic, fake_cast, fake_convert, round_to_format
from qtoolkit.casts import DETERMINISTIC

TARGETS = [("e4m3fn", ml_dtypes.float8_e4m3fn, 448.0), ("e5m2", ml_dtypes.float8_e5m2, 57344.0)]
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@np.errstate(all="ignore")  # overflow to infinity is meant
def oracle(x, scale, shift, target, largest):
    """numpy and ml_dtypes: every line rounds once to the dtype of x; the cast saturates."""
    u = x * scale
    if shift is not None:
        u = u - shift
    q = np.clip(u.astype(np.float32), -largest, largest).astype(target).astype(x.dtype)
    if shift is not None:
        q = q + shift
    return q / scale


def draw(dtype, shape, seed=0, spread=100.0):
    return (np.random.default_rng(seed).normal(size=shape) * spread).astype(dtype)


def assert_same_bits(got, expected):
    width = f"uint{8 * np.dtype(expected.dtype).itemsize}"
    np.testing.assert_array_equal(np.asarray(got).view(width), expected.view(width))


@pytest.mark.sample(
    "scale_shape0-False-e4m3fn-float8_e4m3fn-448.0-float32",
    "scale_shape0-False-e5m2-float8_e5m2-57344.0-bfloat16",
    "scale_shape2-True-e4m3fn-float8_e4m3fn-448.0-float16",
    "scale_shape3-True-e4m3fn-float8_e4m3fn-448.0-float32",
)
@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fmt", "target", "largest"), TARGETS)
@pytest.mark.parametrize(
    ("scale_shape", "with_shift"), [((), False), ((), True), ((7, 1), True), ((64, 7, 33), True)]
)
def test_bits_eager_jit_and_fused(dtype, fmt, target, largest, scale_shape, with_shift):
    x = draw(dtype, (64, 7, 33))
    scale = (np.random.default_rng(1).uniform(0.3, 3, scale_shape)).astype(dtype)
    shift = draw(dtype, scale_shape, 2, 1.0).astype(dtype) if with_shift else None
    expected = oracle(x, scale, shift, target, largest)

    def f(x, scale, shift):
        return fake_convert(x, scale, shift, fmt=fmt)

    assert_same_bits(f(x, scale, shift), expected)
    assert_same_bits(jax.jit(f)(x, scale, shift), expected)
    # Inside a larger fusion: x comes out of a product, the result goes into one; both are exact.
    fused = jax.jit(lambda x, scale, shift: f(x * 2, scale, shift) * 2)
    assert_same_bits(fused((x / 2).astype(dtype), scale, shift), (expected * 2).astype(dtype))


@pytest.mark.cpu
def test_this_test_sees_the_contraction_that_xla_makes():
    """Without the guard a third of the products differ: the test above can fail."""
    x, s, z = draw(np.float32, 2**14), draw(np.float32, 2**14, 1, 1.0), draw(np.float32, 2**14, 2)
    plain = jax.jit(lambda x, s, z: x * s - z)(x, s, z)
    assert np.mean(np.asarray(plain) != x * s - z) > 0.1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_input_without_shift(dtype):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x = x[np.isfinite(x) & (np.abs(x.astype(np.float64)) >= 2.0**-120)]
    expected = oracle(x, np.asarray(1.5, dtype), None, ml_dtypes.float8_e4m3fn, 448.0)
    assert_same_bits(fake_convert(x, 1.5, fmt="e4m3fn"), expected)


def test_defaults_are_fake_cast_and_keep_negative_zero():
    x = np.concatenate([draw(np.float32, 1000), np.float32([-0.0, 0.0, np.inf, -np.inf])])
    assert_same_bits(fake_convert(x, fmt="e4m3fn"), np.asarray(fake_cast(x, "e4m3fn")))
    # A shift of zero is an addition: -0 + 0 is +0.
    assert not np.signbit(np.asarray(fake_convert(np.float32([-0.0]), 1.0, 0.0, fmt="e5m2")))[0]


MODES = {
    **{rounding: {"rounding": rounding} for rounding in DETERMINISTIC},
    "stochastic": {"rounding": "stochastic", "key": jax.random.key(1)},
    "random_bits": {"rounding": Stochastic("C", bits=8), "random_bits": np.uint8(200)},
}


@pytest.mark.sample(
    *("float32-e4m3fn-none-nearest_even", "float32-e4m3fn-none-to_odd"),
    "float16-int4-propagate-to_odd",
)
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize(
    ("dtype", "fmt", "saturation"),
    [
        (np.float32, "e4m3fn", "none"),
        (np.float16, "int4", "propagate"),
        (ml_dtypes.bfloat16, "e2m1fn", "finite"),
    ],
)
def test_every_mode_rounds_what_was_scaled(dtype, fmt, saturation, name):
    """Oracle: NumPy around `round_to_format`, which has its own tests; a step, a rounding."""
    x, scale, shift = draw(dtype, (7, 33)), np.asarray(1.7, dtype), np.asarray(0.3, dtype)
    mode = {**MODES[name], "saturation": saturation}
    q = np.asarray(round_to_format(x * scale - shift, fmt, **mode))
    got = fake_convert(x, scale, shift, fmt=fmt, **mode)
    with np.errstate(invalid="ignore"):  # NaNs of overflow
        assert_same_nan_or_bits(got, ((q + shift) / scale).astype(dtype))


def assert_same_nan_or_bits(got, expected):
    np.testing.assert_array_equal(np.isnan(np.asarray(got)), np.isnan(expected))
    keep = ~np.isnan(expected)
    assert_same_bits(np.asarray(got)[keep], expected[keep])


@pytest.mark.sample("nearest_even")
@pytest.mark.parametrize("name", MODES)
def test_every_mode_has_the_same_slope(name):
    """dy/dx is the estimator's, one inside, zero outside, whatever the rounding."""
    u = np.float32([447, 448, 449, -448, -449, 0.1, 1e9])
    for scale, shift in ((2.0, None), (0.5, 8.0)):
        x = (u + np.float32(shift or 0)) / np.float32(scale)
        got = jax.grad(
            lambda x, s=scale, z=shift: jnp.sum(fake_convert(x, s, z, fmt="e4m3fn", **MODES[name]))
        )(x)
        np.testing.assert_array_equal(got, [1, 1, 0, 1, 0, 1, 0])


@pytest.mark.sample("nearest_even")
@pytest.mark.parametrize("name", MODES)
def test_gradients_by_scale_and_shift_in_every_mode(name):
    x = draw(np.float32, (40,), spread=300.0)
    s, z = np.float32(1.5), np.float32(3.0)

    def run(x, s, z):
        return fake_convert(x, s, z, fmt="e4m3fn", **MODES[name])

    d = (np.abs(x * s - z) <= 448).astype(np.float32)
    y = np.asarray(run(x, s, z))
    one = (jnp.float32(1),)
    ds = jax.jvp(lambda s: run(x, s, z), (jnp.asarray(s),), one)[1]
    dz = jax.jvp(lambda z: run(x, s, z), (jnp.asarray(z),), one)[1]
    # The published formulas; a few float32 roundings of terms up to 300.
    np.testing.assert_allclose(ds, (d * x - y) / s, rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(dz, (1 - d) / s, rtol=1e-6)


def test_traced_scales_follow_ieee():
    x = np.float32([1.0, -1.0, 0.0])
    f = jax.jit(lambda x, s: fake_convert(x, s, fmt="e4m3fn"))
    np.testing.assert_array_equal(f(x, np.float32(0)), [np.nan] * 3)
    np.testing.assert_array_equal(f(x, np.float32(np.nan)), [np.nan] * 3)
    np.testing.assert_array_equal(f(x, np.float32(np.inf)), [0.0, -0.0, np.nan])
    np.testing.assert_array_equal(f(np.float32([np.nan]), np.float32(2)), [np.nan])


def reference_slopes(x, s, z, fmt="e4m3fn"):
    """The published derivative, written out with the exact forward pass."""
    u = x * s - (0 if z is None else z)
    d = (np.abs(u) <= 448).astype(np.float32)
    y = np.asarray(fake_convert(x, s, z, fmt=fmt))
    return d, (d * x - y) / s, (1 - d) / s


@pytest.mark.sample("eager-False")
@pytest.mark.parametrize("with_shift", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_by_data_scale_and_shift(with_shift, wrap):
    x = draw(np.float32, (5, 6), spread=300.0)
    s = np.random.default_rng(1).uniform(0.5, 2, (5, 1)).astype(np.float32)
    z = draw(np.float32, (5, 1), 2, 10.0) if with_shift else None
    d, ds, dz = reference_slopes(x, s, z)
    assert 0 < d.mean() < 1  # both branches are there

    def total(x, s, z):
        return jnp.sum(fake_convert(x, s, z, fmt="e4m3fn"))

    gx, gs = wrap(jax.grad(total, (0, 1)))(x, s, z)
    np.testing.assert_array_equal(gx, d)
    # Sums of six terms in another order: a few ulp of the largest.
    np.testing.assert_allclose(gs, ds.sum(1, keepdims=True), rtol=1e-5, atol=1e-4)
    if with_shift:
        gz = wrap(jax.grad(total, 2))(x, s, z)
        np.testing.assert_allclose(gz, dz.sum(1, keepdims=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_shift", [False, True])
@pytest.mark.parametrize(("fmt", "target", "largest"), TARGETS)
def test_float64(fmt, target, largest, with_shift):
    """Every step is rounded to float64. Oracle: NumPy; ties that float32 would miss are there."""
    ties = np.array([1.0625, 1.1875, 3.5, 13.0])
    x = np.concatenate([ties + 2.0**-40, ties - 2.0**-40, draw(np.float64, 200), [1e200, -0.0]])
    scale, shift = 1.0, None
    if with_shift:
        scale = np.random.default_rng(1).uniform(0.3, 3, x.shape)
        shift = draw(np.float64, x.shape, 2, 1.0)

    def f(x, scale, shift, gradient="clipped"):
        return fake_convert(x, scale, shift, fmt=fmt, gradient=gradient)

    u = x * scale - (0 if shift is None else shift)
    # To odd to float32 first: rounded to nearest, what lies next to a tie would become one.
    with np.errstate(over="ignore"):
        near = u.astype(np.float32)
    toward = np.nextafter(near, np.where(u > near, np.inf, -np.inf).astype(np.float32))
    is_even = near.view(np.uint32) % 2 == 0
    odd = np.where((near != u) & is_even, toward, near)
    q = np.clip(odd, -largest, largest).astype(target).astype(np.float64)
    expected = (q if shift is None else q + shift) / scale
    with jax.enable_x64(True):
        for wrap in (lambda f: f, jax.jit):
            assert_same_bits(wrap(f)(x, scale, shift), expected)
        if not with_shift:
            return
        weight = np.random.default_rng(3).normal(size=x.shape)
        d = (np.abs(u) <= largest).astype(np.float64)
        slopes = d, (d * x - expected) / scale, (1 - d) / scale
        got = jax.grad(lambda *a: jnp.sum(f(*a) * weight), (0, 1, 2))(x, scale, shift)
        for mine, slope in zip(got, slopes, strict=True):
            assert mine.dtype == np.float64
            np.testing.assert_allclose(mine, slope * weight, rtol=1e-13, atol=1e-13)


def test_a_small_float64_number_is_not_called_zero():
    """Neither by the message nor as a shift. Oracle: E4M3FN's next value above 2**-300 is 2**-9."""
    with jax.enable_x64(True):
        x = jnp.zeros(2, jnp.float64)
        with refused(ValueError, r"scale=1e-299 is 1e-299 in float64"):
            fake_convert(x, 1e-299, fmt="e4m3fn")
        up = fake_convert(x, 1.0, -(2.0**-300), fmt="e4m3fn", rounding="toward_positive")
        np.testing.assert_array_equal(up, [2.0**-9] * 2)


def test_scale_gradient_is_the_derivative_of_the_estimate():
    """Finite differences of the same function with the rounding's error held fixed."""
    x, s, z, h = 1.2345, 1.7, 0.4, 1e-6
    q = float(fake_cast(np.float32([x * s - z]), "e4m3fn")[0])
    error = q - (x * s - z)  # the estimator takes conv(u) as u + error

    def estimate(s, z):
        return (x * s - z + error + z) / s

    expected_s = (estimate(s + h, z) - estimate(s - h, z)) / (2 * h)
    expected_z = (estimate(s, z + h) - estimate(s, z - h)) / (2 * h)
    one = jnp.float32
    got = jax.grad(lambda s, z: fake_convert(one(x), s, z, fmt="e4m3fn"), (0, 1))(one(s), one(z))
    np.testing.assert_allclose(got, [expected_s, expected_z], atol=1e-5)


def test_no_nan_at_infinite_data():
    x = jnp.asarray([jnp.inf, -jnp.inf, 1e30], jnp.float32)
    gx, gs = jax.grad(lambda x, s: jnp.sum(fake_convert(x, s, fmt="e4m3fn")), (0, 1))(
        x, jnp.float32(2)
    )
    np.testing.assert_array_equal(gx, [0, 0, 0])
    assert gs == -(448 / 2 - 448 / 2 + 448 / 2) / 2


@pytest.mark.sample("float32")
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_reverse_mode_agree(dtype):
    x, s, z = draw(dtype, 9), np.asarray(1.3, dtype), np.asarray(0.2, dtype)

    def f(x, s, z):
        return fake_convert(x, s, z, fmt="e5m2", gradient="clipped")

    primals = tuple(map(jnp.asarray, (x, s, z)))
    tangents = tuple(map(jnp.ones_like, primals))
    _, y_dot = jax.jvp(f, primals, tangents)
    pulled = jax.vjp(f, *primals)[1](jnp.ones_like(primals[0]))
    assert [p.dtype for p in pulled] == [dtype] * 3
    total = sum(float(np.sum(np.asarray(p, np.float64))) for p in pulled)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(total, np.asarray(y_dot, np.float64).sum(), rtol=64 * eps)
    jax.hessian(lambda s: jnp.sum(f(primals[0], s, primals[2]).astype(jnp.float32)))(primals[1])


def test_second_derivatives_of_a_soft_estimator():
    """d2y/dx2 of an estimate with slope 1 - tanh(u)^2 is scale times that slope's derivative."""

    @dataclasses.dataclass(frozen=True)
    class Soft:
        def slope(self, x, lower, upper, fmt):
            return 1 - jnp.tanh(x) ** 2

    def f(x, s, z):
        return fake_convert(x, s, z, fmt="e4m3fn", gradient=Soft())

    x, s, z = map(jnp.float32, (0.3, 2.0, 0.1))
    u = 0.3 * 2.0 - 0.1
    curvature = -2 * np.tanh(u) * (1 - np.tanh(u) ** 2)
    np.testing.assert_allclose(jax.hessian(f)(x, s, z), 2.0 * curvature, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(jax.grad(f), 2)(x, s, z), -curvature, rtol=1e-5)
    alone = jax.hessian(lambda x: fake_cast(x, "e4m3fn", gradient=Soft()))(x)
    np.testing.assert_allclose(jax.hessian(f)(x, jnp.float32(1), None), alone, rtol=1e-6)


def test_vmap_and_scan():
    x = draw(np.float32, (3, 8))
    s = np.float32([0.5, 1.5, 2.5])
    expected = oracle(x, s[:, None], None, ml_dtypes.float8_e4m3fn, 448.0)
    mapped = jax.vmap(lambda x, s: fake_convert(x, s, fmt="e4m3fn"))
    assert_same_bits(mapped(x, s), expected)
    scanned = jax.lax.scan(lambda c, a: (c, fake_convert(*a, fmt="e4m3fn")), 0, (x, s))[1]
    assert_same_bits(scanned, expected)


@pytest.mark.parametrize("bad", [0, 0.0, -0.0, float("nan"), float("inf"), np.float64(0)])
def test_a_degenerate_scale_given_as_a_number(bad):
    with refused(ValueError, r"fake_convert: scale=.*expected a finite number other"):
        fake_convert(np.float32([1]), bad, fmt="e4m3fn")


def test_errors():
    x = jnp.ones((2, 3), jnp.float32)
    with refused(ValueError, r"scale=1e-10 is 0.0 in float16"):
        fake_convert(x.astype(jnp.float16), 1e-10, fmt="e4m3fn")
    refused(ValueError, r"scale=1e-40 is 0.0 in float32", fake_convert, x, 1e-40, fmt="e4m3fn")
    refused(ValueError, r"is inf in float32", fake_convert, x, 10**400, fmt="e4m3fn")
    with refused(ValueError, r"shift=nan is nan in float32"):
        fake_convert(x, 1.0, float("nan"), fmt="e4m3fn")
    with refused(ValueError, r"scale has shape \(2,\)"):
        fake_convert(x, jnp.ones(2, jnp.float32), fmt="e4m3fn")
    with refused(ValueError, r"shift has shape \(4, 2, 3\)"):
        fake_convert(x, 1.0, jnp.ones((4, 2, 3), jnp.float32), fmt="e4m3fn")
    with refused(TypeError, r"scale has dtype bfloat16"):
        fake_convert(x, jnp.ones((), jnp.bfloat16), fmt="e4m3fn")
    refused(TypeError, r"scale has type list", fake_convert, x, [1.0], fmt="e4m3fn")
    for wrong in (np.ones(3, np.int32), np.ones(3, ml_dtypes.float8_e5m2)):
        expected = rf"fake_convert: x has dtype {wrong.dtype}, expected float32, float16, bfl"
        refused(TypeError, expected, fake_convert, wrong, fmt="e4m3fn")
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"scale has dtype float32, expected"):
        fake_convert(np.ones(3), np.float32([2, 2, 2]), fmt="e4m3fn")
    with refused(ValueError, r"fake_convert: stochastic rounding got neither key"):
        fake_convert(x, fmt="e4m3fn", rounding="stochastic")
    with refused(ValueError, r"random_bits has shape \(2,\)"):
        fake_convert(x, fmt="e4m3fn", rounding="stochastic", random_bits=np.zeros(2, np.uint16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_gradients_of_scale_and_shift_are_summed_in_float32(dtype):
    """2**18 terms, whose sums leave the range of float16 on their way: three quarters are positive.
    bfloat16 would lose the small ones.

    Oracle: the documented derivatives in float64, summed there and rounded once.
    """
    rng = np.random.default_rng(0)
    inside, beyond = rng.uniform(0.1, 3, 2**17), rng.uniform(400, 500, 2**17)
    x = jnp.asarray(np.stack([inside, beyond]), jnp.float32).astype(dtype)
    scale, shift = (jnp.asarray(value, dtype) for value in (1.25, 0.5))
    signs = np.repeat([1, 1, 1, -1], 2**15)
    weight = jnp.asarray(signs * rng.uniform(1.5, 2, x.shape), jnp.float32).astype(dtype)

    def loss(scale, shift, factor):
        y = fake_convert(x, scale, shift, fmt="e4m3fn")
        return jnp.sum((y * weight).astype(jnp.float32) * factor)

    wide_x, wide_weight, s = np.asarray(x, np.float64), np.asarray(weight, np.float64), float(scale)
    y = np.asarray(fake_convert(x, scale, shift, fmt="e4m3fn"), np.float64)
    d = np.array([[1.0], [0.0]])  # all of `beyond` saturates
    for place, slope, factor in ((0, (d * wide_x - y) / s, 2.0**-9), (1, (1 - d) / s, 0.5)):
        got = float(jax.jit(jax.grad(loss, place))(scale, shift, jnp.float32(factor)))
        terms = slope * wide_weight * factor
        exact = terms.sum()
        # Eight times what 2**18 roundings of float32 add up to at random, and one to the dtype.
        bound = 8 * 2.0 ** (9 - 24) * np.abs(terms).sum()
        assert abs(got - exact) <= bound + float(jnp.finfo(dtype).eps) / 2 * abs(exact)
        assert np.abs(np.cumsum(terms.sum(axis=0))).max() > 65504 > abs(exact)


@pytest.mark.sample("clipped")
@pytest.mark.parametrize("gradient", ["clipped", "identity"])
def test_an_element_under_a_zero_cotangent_adds_nothing(gradient):
    """A masked loss: 0 times a NaN or an infinity would make the sums NaN.

    Oracle: the same without these elements.
    """
    x = jnp.asarray([1.0, jnp.nan, jnp.inf, -2.0, 1e6])
    kept = jnp.asarray([1.0, 0.0, 0.0, 1.0, 1.0])

    def loss(scale, shift, x, mask):
        y = fake_convert(x, scale, shift, fmt="e4m3fn", gradient=gradient)
        return jnp.sum(y * mask)

    gradients = jax.grad(loss, (0, 1))
    scale, shift = jnp.float32(1.3), jnp.float32(0.2)
    got = gradients(scale, shift, x, kept)
    expected = gradients(scale, shift, x[kept == 1], kept[kept == 1])
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert np.isnan(gradients(scale, shift, x, jnp.ones(5))[0])  # where they count, they show


@pytest.mark.devices(8)
@pytest.mark.parametrize("rule", ["clipped", "identity"])
def test_the_gradient_by_data_on_an_explicit_mesh(rule):
    host = np.linspace(-500, 500, 48, dtype=np.float32).reshape(8, 6)
    scale = np.full((8, 1), 2, np.float32)

    def gradient(x):
        return jax.grad(lambda x: fake_convert(x, scale, fmt="e4m3fn", gradient=rule).sum())(x)

    expected = np.asarray(gradient(jnp.asarray(host)))
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        got = gradient(jax.device_put(host, NamedSharding(mesh, PartitionSpec("rows"))))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.devices(8)
@pytest.mark.parametrize("shape", [(), (6,), (8, 1), (1, 6)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_by_parameters_on_an_explicit_mesh(shape, dtype):
    """They are laid out as the parameters are, here whole on each device."""
    host = np.linspace(-500, 500, 48).reshape(8, 6).astype(dtype)
    scale, shift = jnp.full(shape, 2, dtype), jnp.full(shape, 3, dtype)

    def gradients(x):
        def loss(scale, shift):
            return fake_convert(x, scale, shift, fmt="e4m3fn").astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(scale, shift)

    expected = jax.tree.map(np.asarray, gradients(jnp.asarray(host)))
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        got = gradients(jax.device_put(host, NamedSharding(mesh, PartitionSpec("rows"))))
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(*(np.asarray(v, np.float32) for v in (mine, theirs)), rtol=1e-2)
        assert mine.shape == shape
