"""Block formats on Auto and Explicit meshes of eight devices: the bits of one device.

Devices are counted when JAX starts, hence the process of its own.
"""

import pytest

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import qtoolkit as qt

assert len(jax.devices()) == 8
kind = getattr(AxisType, sys.argv[1])
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
rng = np.random.default_rng(0)
host = (rng.normal(size=(16, 256)) * np.exp2(rng.integers(-9, 9, (16, 8)).repeat(32, 1)))
host = host.astype(np.float32)
host[0, :4] = [np.inf, -0.0, 0.0, -np.inf]
host[1, 100], host[2, 200] = np.nan, np.nan
host[3, :64] = 0
host[4, 64:96] *= np.float32(2.0**-140)
key = jax.random.key(0)
UINT4 = qt.BlockFormat(element="uint4", block=(32,), zero_point=True)
TILES = qt.BlockFormat(element="e4m3fn", block=(2, 32))
TOKENS = qt.BlockFormat.token("int8")
# Rows, the blocked axis, both, and one axis over the whole mesh.
ROWS, BLOCKS, BOTH, WHOLE = P("a", None), P(None, "b"), P("a", "b"), P(None, ("a", "b"))
PLACES = {
    "mxfp8_e4m3": [BOTH],
    "nvfp4": [WHOLE],
    "int4_group32": [ROWS, BLOCKS, BOTH],
    UINT4: [BLOCKS],
    TILES: [ROWS, BOTH],
    TOKENS: [ROWS, BOTH],  # blocks that are a whole axis, sharded or not
    "int8": [BOTH],
}

def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")

def run(x, spec):
    q = qt.quantize(x, spec)
    return q, q.dequantize(), qt.fake_quantize(x, spec)

def same(got, wanted, name):
    np.testing.assert_array_equal(bits(got), bits(wanted), err_msg=str(name))

jitted = jax.jit(run, static_argnums=1)
expected = {spec: jitted(jnp.asarray(host), spec) for spec in PLACES}
for spec, places in PLACES.items():
    for place in places:
        name, where = (str(spec), place), NamedSharding(mesh, place)
        with jax.set_mesh(mesh):
            q, y, fake = got = jitted(jax.device_put(host, where), spec)
        for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected[spec]), strict=True):
            same(leaf, other, name)
        for leaf in (q.codes, y, fake):
            assert leaf.sharding.is_equivalent_to(where, 2), (name, leaf.sharding)

# Eager calls; packed codes where shards hold whole bytes; random bits; derivatives.
with jax.set_mesh(mesh):
    where = NamedSharding(mesh, BOTH)
    x = jax.device_put(host, where)
    q = qt.quantize(x, "int4_group32")
    assert q.codes.sharding.is_equivalent_to(where, 2)
    same(q.dequantize(), expected["int4_group32"][1], "eager")
    same(qt.fake_quantize(x, "int4_group32"), expected["int4_group32"][2], "eager")
    packed = qt.quantize(x, "int4_group32", packed=True)
    random = qt.quantize(x, "int4_group32", rounding="stochastic", key=key)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(qt.fake_quantize(x, TILES))))(x)
    assert slope.sharding.is_equivalent_to(where, 2)
same(packed.codes, qt.quantize(host, "int4_group32", packed=True).codes, "packed")
same(random.codes, qt.quantize(host, "int4_group32", rounding="stochastic", key=key).codes, "key")
same(slope, jax.grad(lambda x: jnp.sum(qt.fake_quantize(x, TILES)))(jnp.asarray(host)), "slope")

# Blocks that cross shards: XLA moves them on an Auto mesh; an Explicit one is told.
crossing = [((16, 264), BOTH, "int4_group32"), ((16, 64), WHOLE, "nvfp4")]
for shape, place, spec in crossing:
    data = rng.normal(size=shape).astype(np.float32)
    with jax.set_mesh(mesh):
        x = jax.device_put(data, NamedSharding(mesh, place))
        for function in (qt.quantize, qt.fake_quantize):
            if kind is AxisType.Explicit:
                for call in (function, jax.jit(function, static_argnums=1)):
                    try:
                        call(x, spec)
                    except ValueError as error:
                        message = str(error)
                    assert f"axis 1 has {shape[1]} elements in" in message, message
                    assert "expected whole blocks of" in message, message
                    assert "reshard x" in message, message
                    del message
            else:
                got = function(x, spec)
                got = got.dequantize() if function is qt.quantize else got
                same(got, qt.fake_quantize(data, spec), (shape, spec))
print("all equal")
"""


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_eight_devices_give_what_one_gives(axis_type, on_devices):
    done = on_devices(8, SCRIPT, axis_type)
    assert done.stdout.strip() == "all equal", done.stderr[-3000:]
