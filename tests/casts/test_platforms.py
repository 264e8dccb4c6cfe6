"""The casts on meshes, in batches and without jit; what a program for another platform takes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import assert_same_bits
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import qtoolkit as qt
from qtoolkit.casts.internal import on_cpu, quotient


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
