"""Casts and products on Auto and Explicit meshes of two devices; one device is the oracle.

Devices are counted when JAX starts, hence the process of its own.
"""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import qtoolkit as qt

assert len(jax.devices()) == 2
mesh = jax.make_mesh((2,), ("d",), axis_types=(getattr(AxisType, sys.argv[1]),))
host = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
weights = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
numbers = (((1,), (0,)), ((), ()))
rows = NamedSharding(mesh, P("d", None))

def loss(x, w):
    return jnp.sum(jnp.sin(qt.dot_general(x, w, numbers)))

model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1)))
fp8 = qt.nnx.wrap(model)
casts = {
    "encode": lambda x: qt.encode(x, "e4m3fn"),
    "fake_cast": lambda x: qt.fake_cast(x, "e4m3fn"),
    "fake_convert": lambda x: qt.fake_convert(x, 2.0, 0.5, fmt="e5m2"),
    "cotangent": jax.grad(lambda x: jnp.sum(qt.round_cotangent(x, "e5m2", scaling="tensor") ** 2)),
}
products = {
    "dot": lambda x: qt.dot_general(x, weights, numbers),
    "grads": lambda x: jax.grad(loss, (0, 1))(x, jnp.asarray(weights)),
    "model": lambda x: nnx.grad(lambda model, x: jnp.mean(model(x) ** 2))(fp8, x),
}
expected = {name: f(jnp.asarray(host)) for name, f in (casts | products).items()}
with jax.set_mesh(mesh):
    x = jax.device_put(host, rows)
    for name, f in casts.items():
        for run in (f, jax.jit(f)):
            got = run(x)
            assert got.sharding.is_equivalent_to(rows, 2), (name, got.sharding)
            np.testing.assert_array_equal(got, expected[name], err_msg=name)
    for name, f in products.items():
        got = f(x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name),
            got,
            expected[name],
        )
print("all equal")
"""


@pytest.mark.quick
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_two_devices_give_what_one_gives(axis_type):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, axis_type],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout.strip() == "all equal", done.stderr[-2000:]
