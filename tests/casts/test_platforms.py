"""What is written for GPUs and TPUs alone, run here: the versions that XLA's CPU does not take."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import assert_same_bits
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import qtoolkit as qt
from qtoolkit.casts._affine import _corrected_quotient
from qtoolkit.casts._bits import _by_widening_magnitudes, _narrowed_by_hand
from qtoolkit.casts._floats import _float16_and_nans_by_hand
from qtoolkit.casts.internal import on_cpu, quotient


def off_by(units):
    """Division whose results are this many units in the last place too large."""

    def divide(a, b):
        place = lax.bitcast_convert_type(a / b, jnp.int32) + np.int32(units)
        return lax.bitcast_convert_type(place, jnp.float32)

    return divide


@pytest.mark.cpu  # a GPU's division is off already
@pytest.mark.parametrize("units", range(-3, 4))
def test_quotients_are_ieee_however_the_division_is_off(units):
    """Oracle: NumPy's division, over all exponents whose quotients are normal numbers."""
    rng = np.random.default_rng(units + 3)
    patterns = rng.integers(0, 2**32, (2, 2**18), dtype=np.uint32)
    a, b = patterns.view(np.float32)
    b[2**12 : 2**13] = a[2**12 : 2**13]
    b[2**13 : 2**14] = 448
    with np.errstate(all="ignore"):
        b[: 2**12] = np.nextafter(a[: 2**12], np.float32(np.inf))  # next to one
        expected = a / b
    least, largest = np.float32(2.0**-126), np.float32(2.0**127)
    kept = np.ones(a.shape, bool)
    for x in (a, b, expected):
        kept &= (np.abs(x) >= least) & (np.abs(x) < largest)
    assert kept.mean() > 0.5
    got = jax.jit(lambda a, b: _corrected_quotient(a, b, off_by(units)))(a[kept], b[kept])
    assert_same_bits(np.asarray(got), expected[kept])


@pytest.mark.cpu  # which reads subnormals as zero
def test_other_quotients_are_the_divisions_own():
    a = np.array([0, -0.0, 1, 3e38, np.inf, 1, np.nan, 1, 2.0**-126, -3e38], np.float32)
    b = np.array([2, 3, 0, 0.1, 2, np.inf, 1, np.nan, 4, 0.5], np.float32)
    with np.errstate(all="ignore"):
        expected = a / b
    expected[8] = 0  # subnormal, which XLA's CPU makes zero
    np.testing.assert_array_equal(jax.jit(_corrected_quotient)(a, b), expected)


def test_float16_keeps_the_sign_of_nans():
    """Oracle: NumPy, for the patterns of all float16 numbers and the NaNs of float32."""
    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC00000], np.uint32).view(np.float32)
    x = np.concatenate([numbers, nans])
    with np.errstate(invalid="ignore"):
        half = x.astype(np.float16).view(np.uint16)
    half = np.where(np.isnan(x), (half & 0x8000) | 0x7E00, half).astype(np.uint16)
    np.testing.assert_array_equal(np.asarray(_narrowed_by_hand(x)).view(np.uint16), half)
    wide = half.view(np.float16).astype(np.float32)
    patterns = _by_widening_magnitudes(jnp.asarray(half.view(np.float16)))
    assert_same_bits(np.asarray(patterns).view(np.float32), wide)
    values = _float16_and_nans_by_hand(jnp.asarray(x.view(np.uint32)))
    assert_same_bits(np.asarray(values).view(np.float32), wide)


def test_batches_of_quotients():
    a, b = np.arange(1, 13, dtype=np.float32).reshape(3, 4), np.float32(3)
    np.testing.assert_array_equal(jax.vmap(quotient, (0, None))(a, b), a / b)
    np.testing.assert_array_equal(jax.vmap(quotient, (1, None))(a, b), (a / b).T)
    np.testing.assert_array_equal(jax.vmap(quotient, (None, 0))(a[0], a[:, :1]), a[0] / a[:, :1])
    assert jax.grad(lambda a: quotient(a, b))(np.float32(2)) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_without_jit(dtype):
    x = np.linspace(-3, 3, 64, dtype=dtype).reshape(2, 32)
    functions = {
        "fake_cast": lambda: qt.fake_cast(x, "e4m3fn"),
        "fake_convert": lambda: qt.fake_convert(x, 1.1, 0.3, fmt="e4m3fn"),
        "quantize": lambda: qt.quantize(x, "e4m3fn").dequantize(),
    }
    for name, function in functions.items():
        expected = np.asarray(function())
        with jax.disable_jit():
            assert_same_bits(np.asarray(function()), expected, name)


@pytest.mark.sample("float32")
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_second_derivatives(dtype):
    def squares(x):
        return jnp.sum(jnp.square(qt.fake_cast(x, "e4m3fn")))

    np.testing.assert_array_equal(jax.hessian(squares)(np.ones(2, dtype)), 2 * np.eye(2))


@pytest.mark.devices(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_vmap_along_an_axis_of_a_mesh(kind):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    expected = np.stack([qt.fake_quantize(row, "e4m3fn") for row in x])
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
        got = jax.jit(jax.vmap(lambda row: qt.fake_quantize(row, "e4m3fn")))(placed)
    assert_same_bits(np.asarray(got), expected)


@pytest.mark.devices(2)
@pytest.mark.parametrize("other", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("depth", [0, 2])
def test_quotients_on_a_mesh_some_axes_of_which_are_explicit(other, depth):
    """Divisors are selected by masks, which have to be sharded as they are."""
    mesh = jax.make_mesh((2, 1), ("d", "e"), axis_types=(AxisType.Explicit, other))
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    function = lambda x: qt.fake_convert(x, 1.1, 0.3, fmt="e4m3fn")  # noqa: E731
    expected = np.asarray(function(x))
    for _ in range(depth):
        function = jax.vmap(function)
    with jax.set_mesh(mesh):
        got = jax.jit(function)(jax.device_put(x, NamedSharding(mesh, PartitionSpec("d", "e"))))
    assert_same_bits(np.asarray(got), expected)


def test_the_platform_is_known_where_a_program_is_compiled():
    chosen = jax.jit(lambda x: lax.cond(on_cpu(), lambda x: x + 1, lambda x: x - 1, x))
    here = jax.default_backend() == "cpu"
    assert chosen(np.float32(0)) == (1 if here else -1)
    shape = jax.ShapeDtypeStruct((), np.float32)
    for platform in ("cpu", "cuda", "tpu"):
        text = chosen.trace(shape).lower(lowering_platforms=(platform,)).as_text()
        assert re.findall(r"dense<(true|false)>", text) == [str(platform == "cpu").lower()]
