"""Casts on Auto and Explicit meshes of eight devices: the bits of one device, the sharding of x.

Devices are counted when JAX starts, hence the process of its own. Stochastic rounding is in
`test_casts_stochastic.py`.
"""

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import qtoolkit as qt
from qtoolkit.casts import DETERMINISTIC, SATURATIONS

assert len(jax.devices()) == 8
# Every rounding, every saturation; pairs are in the tests on one device.
MODES = list(zip(DETERMINISTIC, SATURATIONS * 2)) + [("nearest_even", "none")]
rng = np.random.default_rng(0)
host = (rng.normal(size=(16, 32)) * np.exp2(rng.integers(-12, 12, (16, 32)))).astype(np.float32)
host[0, :6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40]
# One format for each way of rounding: by addition, by a shift, by shifts of their own, to
# integers by addition and by shifts, to tables by comparison and by buckets.
FORMATS = ["e4m3fn", "bfloat16", "e8m0fnu", "binary8p1se", "ue4m3", "int8", "int32", "nf4"]
FORMATS += ["hifloat8"]
SOURCES = [np.float32, ml_dtypes.bfloat16, np.int32]

def every_mode(x, fmt):
    fmt = qt.format(fmt)
    out = {}
    for rounding, saturation in MODES:
        how = dict(rounding=rounding, saturation=saturation)
        name = f"{fmt.name} {rounding} {saturation}"
        codes = out["encode " + name] = qt.encode(x, fmt, **how)
        if x.dtype == np.float32 and fmt.name != "int32":
            out["fake_cast " + name] = qt.fake_cast(x, fmt, **how)
    if fmt.dtype is not None:
        out["cast"] = qt.cast(x, fmt)
    if x.dtype == np.float32 and fmt.name != "int32":
        out["decode"] = qt.decode(codes, fmt)
        out["round_to_format"] = qt.round_to_format(x, fmt)
        out["grad"] = jax.grad(lambda x: jnp.sum(qt.fake_cast(x, fmt)))(x)
    if fmt.name == "nf4":  # each device holds whole bytes
        out["packed"] = qt.unpack(qt.pack(codes, fmt, axis=1), fmt, axis=1)
    return out

def bits(x):
    x = np.asarray(x)
    return x.view(bool if x.dtype == bool else f"uint{8 * x.dtype.itemsize}")

def source(dtype):
    if np.dtype(dtype) == np.int32:
        return rng.integers(-2**31, 2**31, host.shape, np.int32) >> rng.integers(0, 31, host.shape)
    with np.errstate(over="ignore"):
        return host.astype(dtype)

meshes = [
    jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
]
for fmt in FORMATS:
    for dtype in SOURCES if fmt == "e4m3fn" else SOURCES[:1]:
        x = source(dtype).astype(dtype)
        together = jax.jit(lambda x, fmt=fmt: every_mode(x, fmt))
        expected = together(jnp.asarray(x))
        for mesh, spec in zip(meshes, (P(None, ("a", "b")), P("a", "b"))):
            where = NamedSharding(mesh, spec)
            with jax.set_mesh(mesh):
                sharded = jax.device_put(x, where)
                compiled = together.lower(sharded).compile()
                text = compiled.as_text()
                for collective in ("all-gather", "all-to-all", "collective-permute"):
                    assert collective not in text, (fmt, collective)
                got = compiled(sharded)
            assert got.keys() == expected.keys()
            for name, wanted in expected.items():
                assert got[name].sharding.is_equivalent_to(where, 2), (name, got[name].sharding)
                np.testing.assert_array_equal(bits(got[name]), bits(wanted), err_msg=name)
# Eager calls.
for mesh in meshes:
    where = NamedSharding(mesh, P("a", "b"))
    with jax.set_mesh(mesh):
        x = jax.device_put(host, where)
        for fmt in ("e4m3fn", "int8", "nf4"):
            codes = qt.encode(x, fmt)
            results = [codes, qt.round_to_format(x, fmt), qt.fake_cast(x, fmt)]
            results += [qt.decode(codes, fmt), jax.grad(lambda x: jnp.sum(qt.fake_cast(x, fmt)))(x)]
            for got in results:
                assert got.sharding.is_equivalent_to(where, 2), (fmt, got.sharding)
            np.testing.assert_array_equal(bits(codes), bits(qt.encode(host, fmt)))
print("all equal")
"""


@pytest.mark.quick
def test_eight_devices_give_what_one_gives(on_devices):
    done = on_devices(8, SCRIPT)
    assert done.stdout.strip() == "all equal", done.stderr[-3000:]
