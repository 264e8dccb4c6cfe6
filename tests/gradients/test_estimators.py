"""Estimators: `Ramp` against its formula in float64 NumPy, and users' own in each function."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refused import refused

from qtoolkit import fake_cast, fake_convert, fake_quantize, format
from qtoolkit.gradients import Estimator, Ramp
from qtoolkit.gradients._estimators import ESTIMATORS

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
CLIPPED = ESTIMATORS["clipped"]


def float64(x):
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.asarray(x).astype(np.float64)


def finite(values):
    values = float64(values)
    return np.unique(values[np.isfinite(values)])


def floats(dtype):
    dtype = np.dtype(dtype)
    codes = np.arange(2 ** (8 * dtype.itemsize), dtype=np.dtype(f"u{dtype.itemsize}"))
    return finite(codes.view(dtype))


# What each format holds, from ml_dtypes or from its definition.
GRIDS = {
    "e4m3fn": floats(ml_dtypes.float8_e4m3fn),
    "e5m2": floats(ml_dtypes.float8_e5m2),
    "e4m3fnuz": floats(ml_dtypes.float8_e4m3fnuz),
    "e8m0fnu": floats(ml_dtypes.float8_e8m0fnu),
    "e2m1fn": finite([s * v for s in (-1, 1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]),
    "bfloat16": floats(ml_dtypes.bfloat16),
    "int8": finite(np.arange(-128, 128)),
    "uint4": finite(np.arange(16)),
    "bool": finite([0, 1]),
    "nf4": finite(format("nf4").values()),
    "posit8": finite(format("posit8").values()),
}


@np.errstate(invalid="ignore")
def ramp(rule, x, grid):
    width = rule.width * (grid[-1] - grid[0])
    excess = np.maximum(np.maximum(x - grid[-1], grid[0] - x), 0)
    return np.nan_to_num(np.clip(1 - excess / width, 0, 1))


def slope(rule, x, fmt):
    fmt = format(fmt)
    return jax.jit(rule.slope, static_argnums=(1, 2, 3))(
        jnp.asarray(x), float(fmt.lowest), float(fmt.max_finite), fmt
    )


def assert_slope(rule, x, fmt):
    got = slope(rule, x, fmt)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    expected, got = ramp(rule, float64(x), GRIDS[fmt]), float64(got)
    assert np.isfinite(got).all()
    # Half an ulp of the dtype, and the few of float32 that two products are off.
    tolerance = float(ml_dtypes.finfo(x.dtype).eps) / 2 + 1e-6
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=1e-7)
    np.testing.assert_array_equal(got == 0, expected.astype(x.dtype) == 0)


@pytest.mark.sample("float16-e4m3fn", "bfloat16-int8")
@pytest.mark.parametrize("fmt", ["e4m3fn", "e2m1fn", "int8"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_ramp_on_every_16_bit_input(dtype, fmt):
    assert_slope(Ramp(0.25), np.arange(2**16, dtype=np.uint16).view(dtype), fmt)


def points(grid):
    """float32 at and near every number, midpoint and edge, subnormals, specials, random ones.

    Grids of 2**16 numbers are thinned, their ends and their middle kept.
    """
    if len(grid) > 1000:
        middle = len(grid) // 2
        kept = [*range(100), *range(middle - 300, middle + 300), *range(len(grid) - 100, len(grid))]
        grid = grid[kept]
    lower, upper = grid[:-1], grid[1:]
    length = grid[-1] - grid[0]
    beyond = [grid[-1] + f * (grid[-1] - grid[-2]) for f in (0.2, 0.25, 0.3, 1, 9)]
    beyond += [grid[0] - f * (grid[1] - grid[0]) for f in (0.2, 0.25, 0.3, 1, 9)]
    beyond += [grid[-1] + f * length for f in (0.1, 0.25, 0.3, 5)]
    with np.errstate(over="ignore"):
        x = np.concatenate([grid, (lower + upper) / 2, beyond]).astype(np.float32)
    x = np.concatenate([x, *(np.nextafter(x, np.float32(s * np.inf)) for s in (1, -1))])
    tiny = np.asarray([1, 2, 3, 0x400000, 0x7FFFFF, 0x800000, 0x800001], np.uint32)
    tiny = np.concatenate([tiny, tiny | 0x80000000]).view(np.float32)
    special = np.asarray([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 3.4e38, -3.4e38], np.float32)
    return np.concatenate([x, tiny, special])


@pytest.mark.sample("e4m3fn", "e8m0fnu")
@pytest.mark.parametrize("fmt", GRIDS)
def test_ramp_at_ties_edges_and_subnormals(fmt):
    with np.errstate(over="ignore", invalid="ignore"):
        assert_slope(Ramp(0.25), points(GRIDS[fmt]), fmt)


@pytest.mark.quick
@pytest.mark.parametrize("rule", [Ramp(0.25), CLIPPED], ids=repr)
def test_slopes_outside_are_exact(rule):
    x = jnp.asarray([jnp.nan, -jnp.nan, jnp.inf, -jnp.inf, 1e30, -1e30], jnp.float32)
    np.testing.assert_array_equal(slope(rule, x, "e4m3fn"), np.zeros(6))


def test_clipped_tells_subnormals_from_zero():
    below_zero = np.asarray([0x80000001, 0x807FFFFF, 0x80000000, 0], np.uint32).view(np.float32)
    np.testing.assert_array_equal(slope(CLIPPED, below_zero, "uint4"), [0, 0, 1, 1])


def test_limits_of_ramp():
    x = points(GRIDS["int8"])
    np.testing.assert_array_equal(slope(Ramp(1e-300), x, "int8"), slope(CLIPPED, x, "int8"))
    np.testing.assert_array_equal(slope(Ramp(1e300), x, "int8"), np.isfinite(x))


# Estimators of users: any slope, through every rounding and transformation


@dataclasses.dataclass(frozen=True)
class Bell:
    """A slope that depends on x: 2**-(x / 4)**2."""

    def slope(self, x, lower, upper, fmt):
        return jnp.exp2(-jnp.square(x / 4)).astype(x.dtype)


def bell(x):
    return 2.0 ** -((x / 4) ** 2)


def test_an_estimator_gets_what_is_rounded_the_range_and_the_format():
    calls = []

    class Recorded:
        def slope(self, x, lower, upper, fmt):
            calls.append((x.shape, lower, upper, fmt))
            return 0.5  # a number is a slope, too

    x = jnp.float32([0.3, 500.0])
    y, back = jax.vjp(lambda x: fake_cast(x, "e4m3fn", gradient=Recorded()), x)
    np.testing.assert_array_equal(back(jnp.ones(2))[0], [0.5, 0.5])
    np.testing.assert_array_equal(y, fake_cast(x, "e4m3fn"))
    assert set(calls) == {((2,), -448.0, 448.0, format("e4m3fn"))}


def test_slopes_are_taken_after_scale_and_shift():
    x = np.asarray([0.3, -1.4, 6.6, 400.0], np.float32)
    got = jax.grad(lambda x: jnp.sum(fake_convert(x, 2.0, fmt="e4m3fn", gradient=Bell())))(x)
    np.testing.assert_allclose(got, bell(2.0 * x), rtol=1e-5, atol=1e-30)
    got = jax.grad(lambda x: jnp.sum(fake_quantize(x, "int8", scale=0.5, gradient=Bell())))(x)
    at = np.append(2.0 * x[:3], 800.0)
    np.testing.assert_allclose(got, bell(at), rtol=1e-5, atol=1e-30)


def derivatives(f, x, tangent):
    """Reverse mode in every guise, and forward mode."""

    def total(x):
        return jnp.sum(f(x) * tangent)

    def scanned(x):
        return jax.lax.scan(lambda c, v: (c, f(v)), 0, x)[1]

    reverse = {
        "grad": jax.grad(total)(x),
        "jit": jax.jit(jax.grad(total))(x),
        "vjp": jax.vjp(f, x)[1](tangent)[0],
        "vmap": jax.vmap(jax.grad(lambda x, t: f(x) * t))(x, tangent),
        "remat": jax.jit(jax.grad(jax.checkpoint(total)))(x),
        "scan": jax.grad(lambda x: jnp.sum(scanned(x) * tangent))(x),
    }
    forward = {
        "jvp": jax.jvp(f, (x,), (tangent,))[1],
        "jit": jax.jit(lambda x: jax.jvp(f, (x,), (tangent,))[1])(x),
        "linearize": jax.linearize(f, x)[1](tangent),
        "vmap": jax.vmap(lambda x, t: jax.jvp(f, (x,), (t,))[1])(x, tangent),
        "remat": jax.jvp(jax.checkpoint(f), (x,), (tangent,))[1],
        "scan": jax.jvp(scanned, (x,), (tangent,))[1],
    }
    return {f"{n}, reverse": g for n, g in reverse.items()} | forward


@pytest.mark.sample("Ramp(width=0.25)-float32")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rule", [Ramp(0.25), Bell()], ids=repr)
def test_every_transformation_gives_the_same_derivative(rule, dtype):
    x = jnp.asarray([-500.0, -2.1, 0.3, 7.1, 460.0, 9.3, jnp.nan, jnp.inf], dtype)
    x = x[:6] if isinstance(rule, Bell) else x  # its slope at NaN is NaN
    tangent = jnp.asarray([2, -1, 1, -2, 4, 1, 1, 1], dtype)[: len(x)]
    results = derivatives(lambda x: fake_cast(x, "e4m3fn", gradient=rule), x, tangent)
    expected = slope(rule, x, "e4m3fn") * tangent
    for name, got in results.items():
        assert got.dtype == dtype, name
        np.testing.assert_array_equal(got, results["jvp"], err_msg=name)
    tolerance = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(float64(results["jvp"]), float64(expected), rtol=tolerance)


SECOND = {
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "jitted": lambda f: jax.jit(jax.hessian(f)),
}


@pytest.mark.parametrize("rule", [Ramp(0.25), Bell()], ids=repr)
def test_second_derivatives_differentiate_the_slope(rule):
    x = np.asarray([0.31, -2.1, 5.22, 7.2, -7.9, 20.0], np.float32)
    grid, q = GRIDS["e2m1fn"], float64(fake_cast(x, "e2m1fn"))

    def slope_at(x):
        return bell(x) if isinstance(rule, Bell) else ramp(rule, x, grid)

    h = 1e-5
    by_x = (slope_at(float64(x) + h) - slope_at(float64(x) - h)) / (2 * h)
    expected = np.diag(2 * slope_at(float64(x)) ** 2 + 2 * q * by_x)
    for name, second in SECOND.items():
        got = second(lambda x: jnp.sum(fake_cast(x, "e2m1fn", gradient=rule) ** 2))(x)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_jit_equals_eager():
    rule, x, fmt = Ramp(0.25), jnp.asarray(points(GRIDS["e4m3fn"])), format("e4m3fn")
    with jax.disable_jit():
        eager = rule.slope(x, -448.0, 448.0, fmt)
    np.testing.assert_array_equal(slope(rule, x, fmt), eager)


def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray([0.3, 127.0, 127 + 1e-12, 140.0, jnp.nan], jnp.float64)
        np.testing.assert_array_equal(slope(CLIPPED, x, "int8"), [1, 1, 0, 0, 0])
        expected = ramp(Ramp(0.1), np.asarray(x), GRIDS["int8"])
        np.testing.assert_allclose(slope(Ramp(0.1), x, "int8"), expected, rtol=1e-14)


# The objects


def test_they_are_hashable_constants():
    rules = {Ramp(1), Ramp(1.0), Ramp(np.float32(1)), *ESTIMATORS.values()}
    assert len(rules) == 4
    assert all(isinstance(rule, Estimator) for rule in rules)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ramp(1).width = 0.5


@pytest.mark.quick
@pytest.mark.parametrize("width", [0, -1.0, np.inf, np.nan, "1", True])
def test_the_width_is_checked(width):
    refused(ValueError, rf"Ramp: width={width!r}", Ramp, width)


def test_an_estimator_is_an_object_not_its_class():
    with refused(ValueError, r"gradient=<class .*Ramp'>"):
        fake_cast(jnp.ones(1, jnp.float32), "e4m3fn", gradient=Ramp)
    with refused(ValueError, r"gradient='ramp'"):
        fake_cast(jnp.ones(1, jnp.float32), "e4m3fn", gradient="ramp")
