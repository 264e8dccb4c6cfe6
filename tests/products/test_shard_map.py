"""Casts, scales and products inside `jax.shard_map`, which checks what varies along the mesh.

Each device works on its shard as one device would; those results are the oracle. Devices are
counted when JAX starts, hence the process of its own.
"""

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P
import qtoolkit as qt

assert len(jax.devices()) == 4
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
w = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)
shards = np.split(x, 4)

def sharded(f, *more):
    specs = (P("d"), *(P() for _ in more))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("d")))(x, *more)

def with_gradient(f):
    def both(x):
        y, pull = jax.vjp(lambda x: f(x).astype(jnp.float32), x)
        return jnp.stack([y, *pull(jnp.cos(y)), jax.jvp(f, (x,), (x,))[1].astype(jnp.float32)])
    return both

functions = {
    "quantize": lambda x: qt.quantize(x, "nvfp4").dequantize(),
    "int8": lambda x: qt.quantize(x, "int8").dequantize(),
    "metrics": lambda x: qt.metrics(x, "mxfp8_e4m3").sqnr_db * jnp.ones_like(x),
    "dynamic": lambda x: qt.onnx.dynamic_quantize_linear(x)[0],
    "hadamard": lambda x: qt.scaling.hadamard_transform(x),
}
differentiable = {
    "fake_cast": lambda x: qt.fake_cast(x, "e4m3fn"),
    "fake_convert": lambda x: qt.fake_convert(x, 2.0, 0.5, fmt="e5m2"),
    "core": lambda x: qt.openvino.fake_convert(x, 2.0, arithmetic="openvino"),
    "onnx": lambda x: qt.onnx.cast(x, "FLOAT16"),
    "round_cotangent": lambda x: qt.round_cotangent(x, "e5m2", scaling="tensor"),
    "lsq": lambda x: qt.gradients.lsq(x, 0.1, "int8"),
}
for spec in ("int8", "mxfp4", "mxfp8_e4m3", "nvfp4", "nf4", "int4_group32"):
    differentiable[spec] = lambda x, spec=spec: qt.fake_quantize(x, spec)
functions |= {name: with_gradient(f) for name, f in differentiable.items()}
for name, f in functions.items():
    axis = 1 if name in differentiable else 0  # the results are stacked
    def one(x, f=f, axis=axis):
        return jnp.moveaxis(f(x), axis, 0)
    wanted = np.concatenate([jax.jit(one)(shard) for shard in shards])
    np.testing.assert_array_equal(sharded(one), wanted, err_msg=name)

def loss(w, x):
    return jnp.sum(jnp.sin(qt.einsum("bi,io->bo", x, w)))

model = qt.nnx.wrap(nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), nnx.relu))
graph, params = nnx.split(model)

def model_loss(params, x):
    return jnp.sum(nnx.merge(graph, params)(x) ** 2)

def forward(w, x):
    return jax.jvp(lambda w: loss(w, x), (w,), (w,))[1]

for f, weights in ((loss, w), (model_loss, params)):
    def both(x, weights, f=f):
        by_weights, by_x = jax.grad(f, (0, 1))(weights, x)
        return by_x, by_weights
    in_specs, out_specs = (P("d"), P()), (P("d"), P())
    # What is the same on every device gets the sum of its gradients, as with JAX's own products.
    by_x, by_weights = jax.jit(
        jax.shard_map(both, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    )(x, weights)
    parts = [both(shard, weights) for shard in shards]
    wanted = np.concatenate([part[0] for part in parts])
    np.testing.assert_allclose(by_x, wanted, rtol=1e-5, atol=1e-6)
    summed = jax.tree.map(lambda *leaves: sum(leaves), *(part[1] for part in parts))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, by_weights, summed)
slopes = sharded(lambda x, w: forward(w, x)[None], w)
np.testing.assert_allclose(slopes, [forward(w, shard) for shard in shards], rtol=1e-4)
print("all equal")
"""


@pytest.mark.quick
def test_a_shard_gets_what_it_would_get_alone(on_devices):
    done = on_devices(4, SCRIPT)
    assert done.stdout.strip() == "all equal", done.stderr[-3000:]
