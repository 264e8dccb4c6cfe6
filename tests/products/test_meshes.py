"""Casts and products on Auto and Explicit meshes of two devices; one device is the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qtoolkit as qt

pytestmark = pytest.mark.devices(2)

HOST = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
NUMBERS = (((1,), (0,)), ((), ()))

CASTS = {
    "encode": lambda x: qt.encode(x, "e4m3fn"),
    "fake_cast": lambda x: qt.fake_cast(x, "e4m3fn"),
    "fake_convert": lambda x: qt.fake_convert(x, 2.0, 0.5, fmt="e5m2"),
    "cotangent": jax.grad(lambda x: jnp.sum(qt.round_cotangent(x, "e5m2", scaling="tensor") ** 2)),
}


def _loss(x, w):
    return jnp.sum(jnp.sin(qt.dot_general(x, w, NUMBERS)))


@functools.cache
def _model():
    layers = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1))
    return qt.nnx.wrap(nnx.Sequential(*layers))


PRODUCTS = {
    "dot": lambda x: qt.dot_general(x, WEIGHTS, NUMBERS),
    "gradients": lambda x: jax.grad(_loss, (0, 1))(x, jnp.asarray(WEIGHTS)),
    "model": lambda x: nnx.grad(lambda model, x: jnp.mean(model(x) ** 2))(_model(), x),
}

every_kind = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


@pytest.mark.sample(
    *("encode-AxisType.Auto", "fake_convert-AxisType.Explicit", "fake_cast-AxisType.Auto"),
    "cotangent-AxisType.Explicit",
)
@pytest.mark.quick
@every_kind
@pytest.mark.parametrize("name", CASTS)
def test_casts_on_two_devices_give_what_one_gives(name, kind):
    function = CASTS[name]
    expected = function(jnp.asarray(HOST))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("d", None))
    with jax.set_mesh(mesh):
        for run in (function, jax.jit(function)):
            got = run(jax.device_put(HOST, rows))
            assert got.sharding.is_equivalent_to(rows, 2), got.sharding
            np.testing.assert_array_equal(got, expected)


@pytest.mark.sample("dot-AxisType.Auto")
@pytest.mark.quick
@every_kind
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_two_devices_give_what_one_gives(name, kind):
    """Up to the order of the sums."""
    with jax.numpy_dtype_promotion("standard"):  # flax's
        expected = PRODUCTS[name](jnp.asarray(HOST))
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            got = PRODUCTS[name](jax.device_put(HOST, NamedSharding(mesh, P("d", None))))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, got, expected)


def test_random_signs_are_constants_inside_a_shard_too():
    """NVFP4's Hadamard transform and one of the whole array, in one program under a mesh."""
    key = jax.random.key(0)
    host = np.tile(HOST, (4, 1))  # 32 rows, of which each shard has whole blocks

    def gradient(x, w):
        return jax.grad(lambda w: _nvfp4(x, w, key))(w)

    # All shards are alike, and so is their mean.
    expected = gradient(jnp.asarray(host[:16]), jnp.asarray(WEIGHTS))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    @jax.jit
    def program(x, w):
        def shard(x, w):
            return jax.lax.pmean(gradient(x, jax.lax.pcast(w, "d", to="varying")), "d")

        sharded = jax.shard_map(shard, in_specs=(P("d"), P()), out_specs=P())
        return gradient(x, w), sharded(x, w)

    with jax.set_mesh(mesh):
        whole, sharded = program(jax.device_put(host, NamedSharding(mesh, P("d"))), WEIGHTS)
    np.testing.assert_allclose(sharded, expected, rtol=1e-5, atol=1e-5)
    assert np.isfinite(whole).all()


def _nvfp4(x, w, key):
    return jnp.sum(jnp.sin(qt.dot_general(x, w, NUMBERS, recipe=qt.recipes.nvfp4, key=key)))


@pytest.mark.sample(
    "te_current-AxisType.Auto", "mxfp8-AxisType.Explicit", "token_scaled-AxisType.Auto"
)
@every_kind
@pytest.mark.parametrize("name", ["te_current", "token_scaled", "mxfp8"])
def test_mapped_products_of_arrays_sharded_elsewhere(kind, name):
    """Oracle: the same products on one device. JAX maps no `lax.cond` of sharded arrays where
    its predicate is one for each example, as whether a tensor is zero is.
    """
    recipe = getattr(qt.recipes, name)
    numbers = (((1,), (0,)), ((), ()))
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 3, 32))).at[:, 1].set(0.0)
    w = jnp.float32(np.random.default_rng(1).normal(size=(3, 32, 32)))

    def products(x, w):
        product = functools.partial(qt.dot_general, dimension_numbers=numbers, recipe=recipe)
        return jax.vmap(product, (1, 0), 1)(x, w)

    def run(x, w):
        return products(x, w), jax.grad(lambda x: jnp.sum(products(x, w) ** 2))(x)

    expected = jax.jit(run)(x, w)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        got = jax.jit(run)(placed, jax.device_put(w, NamedSharding(mesh, P())))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.sample("e4m3fn-AxisType.Auto", "nvfp4-AxisType.Explicit", "mxfp8_e4m3-AxisType.Auto")
@every_kind
@pytest.mark.parametrize("spec", ["e4m3fn", "mxfp8_e4m3", "nvfp4"])
def test_mapped_quantizing_of_arrays_sharded_elsewhere(kind, spec):
    """Oracle: the same values on one device."""
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 3, 32))).at[:, 1].set(0.0)
    x = x.at[0, 0, :2].set(jnp.array([jnp.nan, jnp.inf])).at[1, 1, 3].set(jnp.inf)
    run = jax.jit(jax.vmap(lambda x: qt.fake_quantize(x, spec), 1, 1))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        got = run(jax.device_put(x, NamedSharding(mesh, P("data"))))
    np.testing.assert_array_equal(got, run(x))
