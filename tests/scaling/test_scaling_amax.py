"""amax and the scale that follows from it, against numpy, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import qtoolkit as qt
from qtoolkit.casts.internal import exact_float32, quotient
from qtoolkit.scaling import amax

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FORMATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "bfloat16", "float16", "int8")
LARGEST = {
    "e4m3fn": 448,
    "e5m2": 57344,
    "e4m3fnuz": 240,
    "e5m2fnuz": 57344,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float16": 65504,
    "int8": 127,
}


def scaled(x, scale):
    """What the engine rounds."""
    return quotient(exact_float32(jnp.asarray(x)), scale)


def same_bits(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def numpy_amax(x, axis=None):
    """The oracle: float64 holds every source exactly."""
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float64)
    size = np.where(np.isfinite(wide), np.abs(wide), 0)
    return np.max(size, axis=axis, keepdims=axis is not None, initial=0).astype(np.float32)


def _data(dtype, shape=(5, 6, 7)):
    """Rows without, with some, and with nothing but non-finite elements."""
    x = np.random.default_rng(5).normal(0, 30, shape).astype(np.float32)
    x[1, ::2] = np.nan
    x[2, :, ::3] = np.inf
    x[2, :, 1::3] = -np.inf
    x[3] = np.array([np.nan, np.inf, -np.inf, np.nan, -np.nan, np.inf, np.nan], np.float32)
    x[4] = -0.0
    return x.astype(DTYPES[dtype])


@pytest.mark.sample("float32-None", "float16-axis6")
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 1), (-1, 0), (0, 1, 2), ()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_is_over_the_finite_elements(dtype, axis):
    x = _data(dtype)
    expected = numpy_amax(x, axis)
    function = functools.partial(amax, axis=axis)
    same_bits(function(jnp.asarray(x)), expected)
    same_bits(jax.jit(function)(x), expected)


@pytest.mark.sample("float32")
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_of_each_row_alone(dtype):
    """Every mixture of finite and not, so both branches of a shortcut would be taken."""
    x = _data(dtype)
    for row in x:
        same_bits(amax(jnp.asarray(row)), numpy_amax(row))
    each = np.stack([numpy_amax(row) for row in x])
    same_bits(jax.vmap(amax)(x), each)
    same_bits(jax.jit(jax.vmap(amax))(x), each)
    same_bits(jax.lax.map(amax, jnp.asarray(x)), each)
    by_axis = jax.vmap(functools.partial(amax, axis=0))(x)
    same_bits(by_axis, numpy_amax(x, 1))


@pytest.mark.sample("shape0-None-float32", "shape4-axis4-float16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "axis"), [((0,), None), ((3, 0), 1), ((3, 0), 0), ((0, 4), 0), ((2, 0, 3), (1, 2))]
)
def test_amax_of_nothing_is_zero(dtype, shape, axis):
    x = np.zeros(shape, DTYPES[dtype])
    same_bits(amax(jnp.asarray(x), axis), numpy_amax(x, axis))


@pytest.mark.sample("float32")
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_of_scalars_and_extremes(dtype):
    info = ml_dtypes.finfo(DTYPES[dtype])
    for value in (info.max, info.min, info.smallest_normal, 0, -0.0, np.inf, -np.inf, np.nan):
        x = np.asarray(value, np.float32).astype(DTYPES[dtype])
        same_bits(amax(jnp.asarray(x)), numpy_amax(x))
        pair = np.stack([x, np.zeros_like(x)])
        same_bits(amax(jnp.asarray(pair)), numpy_amax(pair))


def test_amax_of_float16_counts_subnormals():
    x = (np.arange(1, 1024, dtype=np.uint16)).view(np.float16)
    for value in x[[0, 1, 2, 511, 1022]]:
        same_bits(amax(jnp.asarray(value)), numpy_amax(np.asarray(value)))


def test_amax_and_scale_have_no_derivative_of_their_own():
    x = np.array([1.0, -3.0, 2.0], np.float32)
    gradient = jax.grad(lambda x: jnp.sum(x * amax(x)))(x)
    np.testing.assert_array_equal(gradient, np.full(3, 3, np.float32))


def _amaxes():
    rng = np.random.default_rng(6)
    pattern = rng.integers(0x00800000, 0x7F800000, 2**16, dtype=np.uint32)
    edges = [0.0, 2.0**-149, 2.0**-130, 2.0**-126, 2.0**-117, 448.0, 1.0, 3.0e38]
    edges += [np.finfo(np.float32).max, np.nextafter(np.float32(448), np.float32(0))]
    return np.concatenate([pattern.view(np.float32), np.array(edges, np.float32)])


@pytest.mark.sample("e4m3fn", "float16")
@pytest.mark.quick
@pytest.mark.parametrize("name", FORMATS)
def test_scale_is_the_ieee_quotient(name):
    """One division, correctly rounded, as numpy's; never below 2**-126; 1 for zero."""
    a = _amaxes()
    fmt = qt.format(name)
    largest = np.float32(LARGEST[name])
    assert float(largest) == LARGEST[name]
    with np.errstate(under="ignore"):
        expected = np.maximum(a / largest, np.float32(2.0**-126))
    expected[a == 0] = 1
    spec = qt.BlockFormat.token(fmt)

    def scale(a):
        return qt.quantize(a[:, None], spec).scale[:, 0]

    same_bits(scale(jnp.asarray(a)), expected)
    same_bits(jax.jit(scale)(a), expected)

    @jax.jit
    def fused(a):
        scales = scale(a * np.float32(1))
        return scales, scales + np.float32(1)

    scales, sums = fused(a)
    same_bits(scales, expected)
    same_bits(sums, expected + np.float32(1))


@pytest.mark.sample("e4m3fn", "e4m3fnuz", "float16")
@pytest.mark.parametrize("name", FORMATS)
def test_no_scale_is_subnormal(name):
    tiny = np.arange(0, 0x02000000, 997, dtype=np.uint32).view(np.float32)
    scale = np.asarray(qt.quantize(tiny[:, None], qt.BlockFormat.token(name)).scale)
    assert scale.min() >= np.float32(2.0**-126)
    by_jax = np.asarray(scaled(jnp.ones_like(scale), jnp.asarray(scale)))
    assert np.isfinite(by_jax).all()
    # A zero stays an exact zero, and what was tiny stays within the format.
    zero = np.asarray(scaled(jnp.zeros_like(scale), jnp.asarray(scale)))
    np.testing.assert_array_equal(zero, 0)


def _pairs(count=2**16):
    """Data and scales whose quotients are all normal numbers."""
    rng = np.random.default_rng(7)
    x = np.ldexp(1 + rng.random(count), rng.integers(-40, 40, count)) * rng.choice([-1, 1], count)
    scale = np.ldexp(1 + rng.random(count), rng.integers(-40, 40, count))
    x = x.astype(np.float32)
    x[:6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0]
    return x, scale.astype(np.float32)


@pytest.mark.sample("elementwise-float32")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["elementwise", "scalar", "rows", "columns"])
def test_scaled_is_one_division(shape, dtype):
    x, scale = _pairs()
    with np.errstate(over="ignore"):
        x = np.nan_to_num(x, nan=np.nan, posinf=np.inf, neginf=-np.inf).astype(DTYPES[dtype])
    x = x.reshape(256, 256)
    scale = {
        "elementwise": scale.reshape(256, 256),
        "scalar": scale[17],
        "rows": scale[:256, None],
        "columns": scale[None, :256],
    }[shape]
    expected = x.astype(np.float32) / scale
    z = np.random.default_rng(8).normal(size=x.shape).astype(np.float32)
    z = z * np.where(np.isfinite(expected), np.abs(expected), np.float32(1))
    same_nan = np.isnan(expected)

    def check(got, wanted):
        got = np.array(got)
        assert np.isnan(got[same_nan]).all()
        got[same_nan] = wanted[same_nan]
        same_bits(got, wanted)

    given = jnp.asarray(scale)
    check(scaled(jnp.asarray(x), given), expected)
    check(jax.jit(scaled)(x, given), expected)
    check(jax.jit(lambda x: scaled(x, given))(x), expected)  # a scale the compiler knows
    check(jax.jit(lambda x, s, z: scaled(x, s) + z)(x, given, z), expected + z)
    check(jax.jit(lambda x, s, z: z - scaled(x, s))(x, given, z), z - expected)
    twice = jax.jit(lambda x, s, z: jnp.tanh(scaled(x, s) - z) + (scaled(x, s) - z))
    rows = jax.jit(lambda x, s, z: jnp.sum(scaled(x, s) + z, axis=0) * 0 + (scaled(x, s) + z))
    difference = expected - z
    tanh = jax.jit(lambda d: jnp.tanh(d))(difference)
    check(twice(x, given, z), np.asarray(tanh) + difference)
    finite = np.isfinite(expected + z).all(axis=0)
    got = np.asarray(rows(x, given, z))
    same_bits(got[:, finite] + np.float32(0), (expected + z)[:, finite] + np.float32(0))


def test_scaled_tensors_reach_the_largest_value_of_the_format():
    """The chain of current scaling: the largest element rounds to the largest value."""
    x = np.random.default_rng(9).normal(size=(64, 64)).astype(np.float32)
    x[3, 4] = np.inf
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "int8"):
        fmt = qt.format(name)
        scale = qt.quantize(x, fmt).scale
        q = np.asarray(qt.round_to_format(scaled(jnp.asarray(x), scale), fmt))
        assert np.abs(q).max() == LARGEST[name]
        assert q[3, 4] == LARGEST[name]
