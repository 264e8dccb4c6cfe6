"""The soft estimators against their papers' formulas, written out below in float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qtoolkit import fake_cast, fake_convert, format
from qtoolkit.gradients import (
    DSQ,
    EWGS,
    Clipped,
    CotangentEstimator,
    Estimator,
    Identity,
    Ramp,
    ReSTE,
    Zero,
)

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
SOFT = [Ramp(0.25), DSQ(), DSQ(0.01), DSQ(0.9), EWGS(), ReSTE(), ReSTE(o=2, t=1, m=0.25)]
SLOPES = [rule for rule in SOFT if not isinstance(rule, EWGS)]


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


def gaps(x, grid):
    """The neighbours of x in the grid; the outermost two beyond it, and at NaN."""
    i = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    return grid[i], grid[i + 1]


def is_inside(x, grid):
    return (x >= grid[0]) & (x <= grid[-1])


def ramp(rule, x, grid):
    width = rule.width * (grid[-1] - grid[0])
    excess = np.maximum(np.maximum(x - grid[-1], grid[0] - x), 0)
    return np.nan_to_num(np.clip(1 - excess / width, 0, 1))


def soft_rounding(rule, x, grid):
    """The paper's l + Delta * (i + (phi(x) + 1) / 2), l + Delta * i being the lower neighbour."""
    lower, upper = gaps(x, grid)
    delta, m = upper - lower, (lower + upper) / 2
    s, k = 1 / (1 - rule.alpha), np.log(2 / rule.alpha - 1) / delta
    soft = lower + delta * (s * np.tanh(k * (x - m)) + 1) / 2
    return np.where(x < grid[0], grid[0], np.where(x > grid[-1], grid[-1], soft))


def dsq(rule, x, grid):
    lower, upper = gaps(x, grid)
    delta, m = upper - lower, (lower + upper) / 2
    s, k = 1 / (1 - rule.alpha), np.log(2 / rule.alpha - 1) / delta
    slope = delta / 2 * s * k * (1 - np.tanh(k * (x - m)) ** 2)
    return np.where(is_inside(x, grid), slope, 0)


def position(x, grid):
    lower, upper = gaps(x, grid)
    with np.errstate(invalid="ignore"):
        return ((x - lower) - (upper - x)) / (upper - lower)


def reste(rule, x, grid):
    z = np.abs(position(x, grid))
    o, t, m = rule.o, rule.t, rule.m
    slope = 1 / o * np.where(z > m, z, 1) ** ((1 - o) / o)
    cap = m ** (1 / o) / m
    return np.where(z > m, np.where(z <= t, slope, 0), np.where(z <= m, cap, 0))


def ewgs(rule, g, x, q, grid):
    change = rule.delta * np.sign(g) * (x - q) / (grid[-1] - grid[0])
    return np.where(is_inside(x, grid), g * (1 + np.where(is_inside(x, grid), change, 0)), 0)


def expected_slope(rule, x, grid):
    with np.errstate(invalid="ignore"):
        if isinstance(rule, EWGS):
            return is_inside(x, grid).astype(np.float64)
        return {Ramp: ramp, DSQ: dsq, ReSTE: reste}[type(rule)](rule, x, grid)


def slope(rule, x, fmt):
    fmt = format(fmt)
    return jax.jit(rule.slope, static_argnums=(1, 2, 3))(
        jnp.asarray(x), float(fmt.lowest), float(fmt.max_finite), fmt
    )


def away_from_jumps(rule, x, grid):
    """Where float32 cannot put z on the other side of a jump of the slope, 8 ulps of 1 away."""
    if not isinstance(rule, ReSTE):
        return np.ones(x.shape, bool)
    z = np.abs(position(x, grid))
    with np.errstate(invalid="ignore"):
        near = (np.abs(z - rule.m) < 1e-6) | ((z != rule.t) & (np.abs(z - rule.t) < 1e-6))
    return ~near


def assert_slope(rule, x, fmt):
    got = slope(rule, x, fmt)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    wide, got = float64(x), float64(got)
    expected = expected_slope(rule, wide, GRIDS[fmt])
    assert np.isfinite(got).all()
    # Half an ulp of the dtype, and the few of float32 that exp and pow are off.
    tolerance = float(ml_dtypes.finfo(x.dtype).eps) / 2 + 4e-6
    ok = away_from_jumps(rule, wide, GRIDS[fmt])
    np.testing.assert_allclose(got[ok], expected[ok], rtol=tolerance, atol=1e-7)
    np.testing.assert_array_equal((got == 0)[ok], (expected.astype(x.dtype) == 0)[ok])


@pytest.mark.sample(
    "Ramp(width=0.25)-float16-e4m3fn",
    "Ramp(width=0.25)-bfloat16-int8",
    "DSQ(alpha=0.01)-float16-e2m1fn",
    "EWGS(delta=0.001)-float16-int8",
    "ReSTE(o=3.0, t=1.5, m=0.1)-bfloat16-e2m1fn",
)
@pytest.mark.parametrize("fmt", ["e4m3fn", "e2m1fn", "int8"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("rule", SOFT, ids=repr)
def test_slopes_are_the_papers_on_every_16_bit_input(rule, dtype, fmt):
    x = np.arange(2**16, dtype=np.uint16).view(dtype)
    assert_slope(rule, x, fmt)


def points(grid):
    """float32 at and near every number, midpoint and edge, subnormals, specials, random ones.

    Grids of 2**16 numbers are thinned, their ends and their middle kept.
    """
    if len(grid) > 1000:
        middle = len(grid) // 2
        kept = [*range(100), *range(middle - 300, middle + 300), *range(len(grid) - 100, len(grid))]
        grid = grid[kept]
    rng = np.random.default_rng(0)
    lower, upper = grid[:-1], grid[1:]
    inner = [lower + rng.random(len(lower)) * (upper - lower) for _ in range(20)]
    length = grid[-1] - grid[0]
    beyond = [grid[-1] + f * (grid[-1] - grid[-2]) for f in (0.2, 0.25, 0.3, 1, 9)]
    beyond += [grid[0] - f * (grid[1] - grid[0]) for f in (0.2, 0.25, 0.3, 1, 9)]
    beyond += [grid[-1] + f * length for f in (0.1, 0.25, 0.3, 5)]
    with np.errstate(over="ignore"):
        x = np.concatenate([grid, (lower + upper) / 2, *inner, beyond]).astype(np.float32)
    x = np.concatenate([x, *(np.nextafter(x, np.float32(s * np.inf)) for s in (1, -1))])
    tiny = np.asarray([1, 2, 3, 0x400000, 0x7FFFFF, 0x800000, 0x800001], np.uint32)
    tiny = np.concatenate([tiny, tiny | 0x80000000]).view(np.float32)
    special = np.asarray([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 3.4e38, -3.4e38], np.float32)
    return np.concatenate([x, tiny, special])


@pytest.mark.sample(
    "Ramp(width=0.25)-e4m3fn",
    "DSQ(alpha=0.2)-e4m3fnuz",
    "DSQ(alpha=0.9)-e5m2",
    "EWGS(delta=0.001)-e8m0fnu",
    "ReSTE(o=2.0, t=1.0, m=0.25)-e4m3fnuz",
)
@pytest.mark.parametrize("fmt", GRIDS)
@pytest.mark.parametrize("rule", SOFT, ids=repr)
def test_slopes_are_the_papers_at_ties_edges_and_subnormals(rule, fmt):
    with np.errstate(over="ignore", invalid="ignore"):
        assert_slope(rule, points(GRIDS[fmt]), fmt)


@pytest.mark.sample("Ramp(width=0.25)", "DSQ(alpha=0.01)", "ReSTE(o=3.0, t=1.5, m=0.1)")
@pytest.mark.quick
@pytest.mark.parametrize("rule", [*SOFT, Clipped()], ids=repr)
def test_slopes_outside_are_exact(rule):
    x = jnp.asarray([jnp.nan, -jnp.nan, jnp.inf, -jnp.inf, 1e30, -1e30], jnp.float32)
    np.testing.assert_array_equal(slope(rule, x, "e4m3fn"), np.zeros(6))
    below_zero = np.asarray([0x80000001, 0x807FFFFF, 0x80000000, 0], np.uint32).view(np.float32)
    got = slope(rule, below_zero, "uint4")  # to XLA's CPU subnormals are zeros, to us they are not
    if not isinstance(rule, Ramp | ReSTE):
        np.testing.assert_array_equal(np.asarray(got) == 0, [True, True, False, False])


@pytest.mark.sample("e4m3fn-1e-06", "e2m1fn-0.9", "nf4-0.2")
@pytest.mark.parametrize("alpha", [1e-6, 0.2, 0.9])
@pytest.mark.parametrize("fmt", ["e4m3fn", "e2m1fn", "int8", "nf4"])
def test_dsq_is_the_derivative_of_the_soft_rounding(fmt, alpha):
    rule, grid = DSQ(alpha), GRIDS[fmt]
    rng = np.random.default_rng(1)
    x = (grid[:-1] + rng.uniform(0.01, 0.99, (50, len(grid) - 1)) * np.diff(grid)).ravel()
    x = x.astype(np.float32)
    wide = float64(x)
    lower, upper = gaps(wide, grid)
    h = 1e-6 * (upper - lower)
    difference = (soft_rounding(rule, wide + h, grid) - soft_rounding(rule, wide - h, grid)) / (
        2 * h
    )
    # h**2 of the third derivative, (14 / 2)**3 at the most here, and rounding over h.
    np.testing.assert_allclose(slope(rule, x, fmt), difference, rtol=1e-5, atol=1e-7)


def test_dsq_meets_the_numbers_of_the_format():
    rule, grid = DSQ(0.2), GRIDS["e4m3fn"]
    np.testing.assert_allclose(soft_rounding(rule, grid, grid), grid, rtol=1e-15)
    on_grid = np.unique(np.asarray(slope(rule, grid.astype(np.float32), "e4m3fn")))
    assert len(on_grid) == 1
    peak = slope(rule, np.float32(1.0625), "e4m3fn")
    np.testing.assert_allclose(on_grid[0], 0.2 * 1.8 * peak, rtol=1e-6)


def test_limits():
    x = points(GRIDS["int8"])
    clipped = slope(Clipped(), x, "int8")
    np.testing.assert_array_equal(slope(ReSTE(o=1, t=1), x, "int8"), clipped)
    np.testing.assert_allclose(slope(DSQ(1 - 1e-9), x, "int8"), clipped, rtol=1e-6)
    np.testing.assert_array_equal(slope(Ramp(1e-300), x, "int8"), clipped)
    np.testing.assert_array_equal(slope(Ramp(1e300), x, "int8"), np.isfinite(x))


def test_reste_on_two_values_is_the_papers_binarization():
    two = dataclasses.replace(format("nf4"), name="two", values_by_code=(-1.0, 1.0))
    x = np.linspace(-2, 2, 4001, dtype=np.float32)
    z = np.abs(float64(x))
    with np.errstate(divide="ignore"):
        power = z ** (-2 / 3) / 3
    expected = np.where(z <= 1.5, np.where(z > 0.1, power, 0.1 ** (1 / 3) / 0.1), 0)
    clear = np.abs(z - 0.1) > 1e-6
    got = np.asarray(slope(ReSTE(), x, two))
    np.testing.assert_allclose(got[clear], expected[clear], rtol=1e-6)


# EWGS: what acts on cotangents


@pytest.mark.sample("e4m3fn-finite", "int8-finite", "nf4-none", "bfloat16-none")
@pytest.mark.parametrize("saturation", ["finite", "none"])
@pytest.mark.parametrize("fmt", ["e4m3fn", "int8", "nf4", "bfloat16"])
def test_ewgs_scales_the_cotangent_as_the_paper(fmt, saturation):
    rule, x = EWGS(0.3), points(GRIDS[fmt])
    q, pullback = jax.vjp(lambda x: fake_cast(x, fmt, saturation=saturation, gradient=rule), x)
    wide = [float64(v) for v in (x, q)]
    for sign in (1, -1):
        g = sign * np.random.default_rng(2).uniform(0.5, 2, x.shape).astype(np.float32)
        with np.errstate(invalid="ignore"):
            expected = ewgs(rule, float64(g), *wide, GRIDS[fmt])
        np.testing.assert_allclose(pullback(g)[0], expected, rtol=4e-7)  # three roundings


@pytest.mark.parametrize("dtype", DTYPES)
def test_ewgs_rounds_once_to_the_dtype(dtype):
    x = np.asarray([0.3, 1.4, 6.6, -2.5, 127.0, 200.0, -0.49], dtype)
    g = np.asarray([1, -1, 3, -0.7, 2, 1, 0], dtype)
    q, pullback = jax.vjp(lambda x: fake_cast(x, "int8", gradient=EWGS(100)), x)
    expected = ewgs(EWGS(100), *(float64(v) for v in (g, x, q)), GRIDS["int8"])
    (got,) = pullback(jnp.asarray(g))
    assert got.dtype == dtype
    np.testing.assert_allclose(
        float64(got), expected, rtol=float(ml_dtypes.finfo(dtype).eps) / 2 + 4e-7
    )


def test_ewgs_of_unusual_cotangents():
    x = jnp.asarray([1.03, 1e6, jnp.nan, 1.03], jnp.float32)
    _, pullback = jax.vjp(lambda x: fake_cast(x, "e4m3fn", gradient=EWGS()), x)
    np.testing.assert_array_equal(pullback(jnp.full(4, jnp.inf))[0], [np.inf, 0, 0, np.inf])
    np.testing.assert_array_equal(pullback(jnp.full(4, jnp.nan))[0], [np.nan, 0, 0, np.nan])
    np.testing.assert_array_equal(pullback(jnp.zeros(4))[0], np.zeros(4))


@pytest.mark.sample("2.0")
@pytest.mark.parametrize("scale", [2.0, -3.0])
def test_ewgs_through_fake_convert(scale):
    rule, shift = EWGS(10), 0.375
    x = np.asarray([0.3, -1.4, 6.6, -2.53, 100.0, 0.21], np.float32)
    g = np.asarray([1, -1, 3, -0.7, 2, -2], np.float32)

    def f(x, scale, shift):
        return fake_convert(x, scale, shift, fmt="int8", gradient=rule)

    scale, shift = np.float32(scale), np.float32(shift)
    y, pullback = jax.vjp(f, x, scale, shift)
    u = float64(x) * float(scale) - float(shift)
    q = np.clip(np.rint(u), -128, 127)
    u_bar = ewgs(rule, float64(g) / float(scale), u, q, GRIDS["int8"])
    expected = (
        u_bar * scale,
        np.sum(u_bar * x - g * float64(y) / scale),
        np.sum(g / scale - u_bar),
    )
    for got, wanted in zip(pullback(jnp.asarray(g)), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    clipped = jax.jvp(lambda *a: fake_convert(*a, fmt="int8"), (x, scale, shift), (g, scale, shift))
    forward = jax.jvp(f, (x, scale, shift), (g, scale, shift))
    np.testing.assert_array_equal(forward[0], clipped[0])
    np.testing.assert_allclose(forward[1], clipped[1], rtol=1e-5, atol=1e-6)
    only_x = jax.grad(lambda x: jnp.vdot(f(x, scale, None), g))(x)
    assert np.isfinite(only_x).all()


def test_soft_slopes_through_fake_convert():
    x = np.asarray([0.3, -1.4, 6.6, 400.0], np.float32)
    for rule in SLOPES:
        got = jax.grad(lambda x, r=rule: jnp.sum(fake_convert(x, 2.0, fmt="e4m3fn", gradient=r)))(x)
        np.testing.assert_allclose(got, slope(rule, 2 * x, "e4m3fn"), rtol=1e-6)


def test_a_cotangent_estimator_of_the_users_own():
    @dataclasses.dataclass(frozen=True)
    class ClippedCotangent:
        limit: float

        def slope(self, x, lower, upper, fmt):
            return jnp.ones_like(x)

        def cotangent(self, g, x, q, lower, upper, fmt):
            assert (lower, upper, fmt) == (-448.0, 448.0, format("e4m3fn"))
            assert g.shape == x.shape == q.shape
            return jnp.clip(g, -self.limit, self.limit) * (x - q)

    rule = ClippedCotangent(0.5)
    assert isinstance(rule, CotangentEstimator)
    x = jnp.asarray([1.03, 20.0], jnp.float32)
    q, pullback = jax.vjp(lambda x: fake_cast(x, "e4m3fn", gradient=rule), x)
    np.testing.assert_array_equal(
        pullback(jnp.asarray([9.0, 0.1]))[0], np.float32([0.5, 0.1]) * np.asarray(x - q)
    )


# Every transformation, the same derivative


def derivatives(f, x, tangent):
    """Reverse mode in every guise, and forward mode."""

    def total(x):
        return jnp.sum(f(x) * tangent)

    reverse = {
        "grad": jax.grad(total)(x),
        "jit": jax.jit(jax.grad(total))(x),
        "vjp": jax.vjp(f, x)[1](tangent)[0],
        "vmap": jax.vmap(jax.grad(lambda x, t: f(x) * t))(x, tangent),
        "remat": jax.jit(jax.grad(jax.checkpoint(total)))(x),
        "scan": jax.grad(
            lambda x: jnp.sum(jax.lax.scan(lambda c, v: (c, f(v)), 0, x)[1] * tangent)
        )(x),
    }
    forward = {
        "jvp": jax.jvp(f, (x,), (tangent,))[1],
        "jit": jax.jit(lambda x: jax.jvp(f, (x,), (tangent,))[1])(x),
        "linearize": jax.linearize(f, x)[1](tangent),
        "vmap": jax.vmap(lambda x, t: jax.jvp(f, (x,), (t,))[1])(x, tangent),
        "remat": jax.jvp(jax.checkpoint(f), (x,), (tangent,))[1],
        "scan": jax.jvp(lambda x: jax.lax.scan(lambda c, v: (c, f(v)), 0, x)[1], (x,), (tangent,))[
            1
        ],
    }
    return reverse, forward


@pytest.mark.sample("Ramp(width=0.25)-float32")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rule", [Ramp(0.25), DSQ(), EWGS(3), ReSTE()], ids=repr)
def test_every_transformation_gives_the_same_derivative(rule, dtype):
    x = jnp.asarray([-500.0, -2.1, 0.3, 7.1, 460.0, 9.3, jnp.nan, jnp.inf], dtype)
    tangent = jnp.asarray([2, -1, 1, -2, 4, 1, 1, 1], dtype)
    reverse, forward = derivatives(lambda x: fake_cast(x, "e4m3fn", gradient=rule), x, tangent)
    slopes = float64(slope(rule, x, "e4m3fn") * tangent)
    q = float64(fake_cast(x, "e4m3fn"))
    wide = [float64(v) for v in (tangent, x)]
    with np.errstate(invalid="ignore"):
        cotangent = ewgs(rule, *wide, q, GRIDS["e4m3fn"]) if isinstance(rule, EWGS) else slopes
    tolerance = float(ml_dtypes.finfo(dtype).eps)
    for results, expected in ((reverse, cotangent), (forward, slopes)):
        first = next(iter(results.values()))
        for name, got in results.items():
            assert got.dtype == dtype, name
            np.testing.assert_array_equal(got, first, err_msg=name)
        np.testing.assert_allclose(float64(first), expected, rtol=tolerance)


def numeric_derivative(rule, x, grid):
    lower, upper = gaps(x, grid)
    h = 1e-5 * (upper - lower)
    return (expected_slope(rule, x + h, grid) - expected_slope(rule, x - h, grid)) / (2 * h)


SECOND = {
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "jitted": lambda f: jax.jit(jax.hessian(f)),
}


@pytest.mark.sample("Ramp(width=0.25)")
@pytest.mark.parametrize("rule", [Ramp(0.25), DSQ(), ReSTE()], ids=repr)
def test_second_derivatives_differentiate_the_slope(rule):
    x = np.asarray([0.31, -2.1, 5.22, 7.2, -7.9, 20.0], np.float32)
    grid = GRIDS["e2m1fn"]
    wide = float64(x)
    q = float64(fake_cast(x, "e2m1fn"))
    d = expected_slope(rule, wide, grid)
    expected = np.diag(2 * d**2 + 2 * q * numeric_derivative(rule, wide, grid))
    for name, second in SECOND.items():
        h = second(lambda x: jnp.sum(fake_cast(x, "e2m1fn", gradient=rule) ** 2))(x)
        np.testing.assert_allclose(h, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_second_derivatives_of_ewgs_as_stated():
    delta, grid = 0.5, GRIDS["e2m1fn"]
    x = np.asarray([0.31, -2.2, 5.22, 20.0], np.float32)
    q = np.asarray([0.5, -2, 6, 6])
    length, inside = grid[-1] - grid[0], np.asarray([1, 1, 1, 0])
    # d/dx of 2q * (1 + delta * sign(2q) * (x - q) / length): by q the rule itself, for a positive
    # tangent; by x at fixed q the derivative of what is written there.
    expected = np.diag(
        inside * (2 * (1 + delta * (x - q) / length) + 2 * np.abs(q) * delta / length)
    )
    for name in ("hessian", "jitted", "reverse over reverse"):
        h = SECOND[name](lambda x: jnp.sum(fake_cast(x, "e2m1fn", gradient=EWGS(delta)) ** 2))(x)
        np.testing.assert_allclose(h, expected, rtol=1e-6, err_msg=name)
    h = SECOND["forward over forward"](
        lambda x: jnp.sum(fake_cast(x, "e2m1fn", gradient=EWGS(delta)) ** 2)
    )(x)
    np.testing.assert_allclose(h, np.diag(2 * inside), rtol=1e-6)


@pytest.mark.exhaustive
def test_second_derivatives_with_subnormal_gaps_are_finite():
    x = np.asarray([1e-40, 3e-39, 1.0], np.float32)
    for rule in (DSQ(1e-6), ReSTE(m=2**-15)):
        h = jax.hessian(lambda x, r=rule: jnp.sum(fake_cast(x, "bfloat16", gradient=r)))(x)
        assert np.isfinite(h).all()
        np.testing.assert_array_equal(h[~np.eye(3, dtype=bool)], np.zeros(6))


@pytest.mark.sample("Ramp(width=0.25)")
@pytest.mark.parametrize("rule", SOFT, ids=repr)
def test_jit_equals_eager(rule):
    x = jnp.asarray(points(GRIDS["e4m3fn"]))
    fmt = format("e4m3fn")
    with jax.disable_jit():
        eager = rule.slope(x, -448.0, 448.0, fmt)
    np.testing.assert_array_equal(slope(rule, x, fmt), eager)


def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray([0.3, 127.0, 127 + 1e-12, 140.0, jnp.nan], jnp.float64)
        np.testing.assert_array_equal(slope(Clipped(), x, "int8"), [1, 1, 0, 0, 0])
        np.testing.assert_allclose(
            slope(Ramp(0.1), x, "int8"), ramp(Ramp(0.1), np.asarray(x), GRIDS["int8"]), rtol=1e-14
        )
        x = jnp.linspace(-1.1, 1.1, 999, dtype=jnp.float64)
        for rule in (DSQ(), ReSTE(o=2, t=1)):
            expected = expected_slope(rule, np.asarray(x), GRIDS["nf4"])
            np.testing.assert_allclose(slope(rule, x, "nf4"), expected, rtol=1e-12)
        x = jnp.asarray([0.3, 127.0, -5.7, 140.0, jnp.nan], jnp.float64)
        g = jnp.ones(5, jnp.float64)
        got = EWGS().cotangent(g, x, jnp.round(x), -128.0, 127.0, format("int8"))
        expected = ewgs(EWGS(), np.ones(5), np.asarray(x), np.rint(x), GRIDS["int8"])
        np.testing.assert_allclose(got, expected, rtol=1e-14)


# The objects


def test_they_are_hashable_constants():
    rules = {Ramp(1), Ramp(1.0), Ramp(np.float32(1)), DSQ(), EWGS(), ReSTE(), Clipped(), Identity()}
    assert len(rules) == 6
    assert all(isinstance(rule, Estimator) for rule in rules)
    assert [rule for rule in rules if isinstance(rule, CotangentEstimator)] == [EWGS()]
    assert not isinstance(Zero(), CotangentEstimator)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DSQ().alpha = 0.5


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ramp(0), r"Ramp: width=0, expected a finite number above 0"),
        (lambda: Ramp(-1.0), r"Ramp: width=-1\.0, expected a finite number above 0"),
        (lambda: Ramp(np.inf), r"Ramp: width=inf, expected a finite number"),
        (lambda: Ramp("1"), r"Ramp: width='1', expected a finite number"),
        (lambda: Ramp(True), r"Ramp: width=True, expected a finite number"),
        (lambda: DSQ(0.0), r"DSQ: alpha=0\.0, expected a number between 0 and 1"),
        (lambda: DSQ(1), r"DSQ: alpha=1, expected a number between 0 and 1"),
        (lambda: DSQ(np.nan), r"DSQ: alpha=nan, expected a number between 0 and 1"),
        (lambda: EWGS(-1e-9), r"EWGS: delta=-1e-09, expected a number from 0 to 2\*\*64"),
        (lambda: EWGS(None), r"EWGS: delta=None, expected a number from 0 to 2\*\*64"),
        (lambda: ReSTE(o=0.5), r"ReSTE: o=0\.5, expected a finite number of at least 1"),
        (lambda: ReSTE(m=0.0), r"ReSTE: m=0\.0, expected a number from 2\*\*-15 to below 1"),
        (lambda: ReSTE(m=1), r"ReSTE: m=1, expected a number from 2\*\*-15 to below 1"),
        (lambda: ReSTE(t=0.1), r"ReSTE: t=0\.1, expected a finite number above m=0\.1"),
    ],
)
def test_parameters_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_estimator_is_an_object_not_its_class():
    with pytest.raises(ValueError, match=r"gradient=<class .*DSQ'>, expected one of .*DSQ\(\)"):
        fake_cast(jnp.ones(1, jnp.float32), "e4m3fn", gradient=DSQ)
    with pytest.raises(
        ValueError, match=r"gradient='dsq', expected one of identity, clipped, zero"
    ):
        fake_cast(jnp.ones(1, jnp.float32), "e4m3fn", gradient="dsq")
