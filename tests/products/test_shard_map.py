"""Casts, scales and products inside `jax.shard_map`, which checks what varies along the mesh.

Each device works on its shard as one device would; those results are the oracle.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import qtoolkit as qt

pytestmark = [pytest.mark.quick, pytest.mark.devices(4)]

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)
SHARDS = np.split(X, 4)


def _mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))


def _sharded(function, *more):
    specs = (P("d"), *(P() for _ in more))
    sharded = jax.shard_map(function, mesh=_mesh(), in_specs=specs, out_specs=P("d"))
    return jax.jit(sharded)(X, *more)


WITHOUT_DERIVATIVE = {
    "quantize": lambda x: qt.quantize(x, "nvfp4").dequantize(),
    "int8": lambda x: qt.quantize(x, "int8").dequantize(),
    "metrics": lambda x: qt.metrics(x, "mxfp8_e4m3").sqnr_db * jnp.ones_like(x),
    "dynamic": lambda x: qt.onnx.dynamic_quantize_linear(x)[0],
    "hadamard": lambda x: qt.scaling.hadamard_transform(x),
}
DIFFERENTIABLE = {
    "fake_cast": lambda x: qt.fake_cast(x, "e4m3fn"),
    "fake_convert": lambda x: qt.fake_convert(x, 2.0, 0.5, fmt="e5m2"),
    "core": lambda x: qt.openvino.fake_convert(x, 2.0, arithmetic="openvino"),
    "onnx": lambda x: qt.onnx.cast(x, "FLOAT16"),
    "round_cotangent": lambda x: qt.round_cotangent(x, "e5m2", scaling="tensor"),
    "lsq": lambda x: qt.gradients.lsq(x, 0.1, "int8"),
    **{
        spec: functools.partial(qt.fake_quantize, spec=spec)
        for spec in ("int8", "mxfp4", "mxfp8_e4m3", "nvfp4", "nf4", "int4_group32")
    },
}


@pytest.mark.sample("quantize")
@pytest.mark.parametrize("name", WITHOUT_DERIVATIVE)
def test_a_shard_gets_what_it_would_get_alone(name):
    function = WITHOUT_DERIVATIVE[name]
    expected = np.concatenate([jax.jit(function)(shard) for shard in SHARDS])
    np.testing.assert_array_equal(_sharded(function), expected)


@pytest.mark.sample("fake_cast")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_values_and_derivatives_are_those_of_the_shard_alone(name):
    function = DIFFERENTIABLE[name]

    def with_derivatives(x):
        y, pull = jax.vjp(lambda x: function(x).astype(jnp.float32), x)
        _, tangent = jax.jvp(function, (x,), (x,))
        return jnp.stack([y, *pull(jnp.cos(y)), tangent.astype(jnp.float32)], axis=1)

    expected = np.concatenate([jax.jit(with_derivatives)(shard) for shard in SHARDS])
    np.testing.assert_array_equal(_sharded(with_derivatives), expected)


def _loss(w, x):
    return jnp.sum(jnp.sin(qt.einsum("bi,io->bo", x, w)))


@functools.cache
def _split_model():
    return nnx.split(qt.nnx.wrap(nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), nnx.relu)))


def _model_loss(params, x):
    return jnp.sum(nnx.merge(_split_model()[0], params)(x) ** 2)


@pytest.mark.sample("einsum")
@pytest.mark.parametrize("kind", ["einsum", "model"])
def test_replicated_arrays_get_the_sum_of_their_gradients(kind):
    """As with JAX's own products."""
    loss, weights = (_loss, W) if kind == "einsum" else (_model_loss, _split_model()[1])

    def both(x, weights):
        by_weights, by_x = jax.grad(loss, (0, 1))(weights, x)
        return by_x, by_weights

    specs = P("d"), P()
    sharded = jax.jit(jax.shard_map(both, mesh=_mesh(), in_specs=specs, out_specs=specs))
    with jax.numpy_dtype_promotion("standard"):  # flax's
        by_x, by_weights = sharded(X, weights)
        parts = [both(shard, weights) for shard in SHARDS]
    expected = np.concatenate([part[0] for part in parts])
    np.testing.assert_allclose(by_x, expected, rtol=1e-5, atol=1e-6)
    summed = jax.tree.map(lambda *leaves: sum(leaves), *(part[1] for part in parts))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, by_weights, summed)


def test_forward_mode_is_that_of_the_shard_alone():
    def slope(x, w):
        return jax.jvp(lambda w: _loss(w, x), (w,), (w,))[1]

    expected = [slope(shard, W) for shard in SHARDS]
    slopes = _sharded(lambda x, w: slope(x, w)[None], W)
    np.testing.assert_allclose(slopes, expected, rtol=1e-4)
