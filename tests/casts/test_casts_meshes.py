"""Casts on Auto and Explicit meshes of eight devices: the bits of one device, the sharding of x.

Stochastic rounding is in `test_casts_stochastic.py`.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from casts_oracle import ROUNDINGS, SATURATIONS, assert_same_bits, bits_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qtoolkit as qt

pytestmark = [pytest.mark.quick, pytest.mark.devices(8)]

# Every rounding, every saturation; pairs are in the tests on one device.
MODES = [*zip(ROUNDINGS, SATURATIONS * 2, strict=True), ("nearest_even", "none")]
# One format for each way of rounding: by addition, by a shift, by shifts of their own, to
# integers by addition and by shifts, to tables by comparison and by buckets.
FORMATS = ["e4m3fn", "bfloat16", "e8m0fnu", "binary8p1se", "ue4m3", "int8", "int32", "nf4"]
FORMATS += ["hifloat8"]
CASES = [(fmt, np.float32) for fmt in FORMATS]
CASES += [("e4m3fn", ml_dtypes.bfloat16), ("e4m3fn", np.int32)]
PLACES = [(AxisType.Auto, P(None, ("a", "b"))), (AxisType.Explicit, P("a", "b"))]


def _inputs(dtype):
    rng = np.random.default_rng(0)
    shape = (16, 32)
    if np.dtype(dtype) == np.int32:
        return rng.integers(-(2**31), 2**31, shape, np.int32) >> rng.integers(0, 31, shape)
    x = (rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, shape))).astype(np.float32)
    x[0, :6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40]
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def _every_mode(x, fmt):
    fmt = qt.format(fmt)
    valued = x.dtype == np.float32 and fmt.name != "int32"  # float32 holds the format
    out = {}
    for rounding, saturation in MODES:
        how = {"rounding": rounding, "saturation": saturation}
        codes = out[f"encode {rounding} {saturation}"] = qt.encode(x, fmt, **how)
        if valued:
            out[f"fake_cast {rounding} {saturation}"] = qt.fake_cast(x, fmt, **how)
    if fmt.dtype is not None:
        out["cast"] = qt.cast(x, fmt)
    if valued:
        out["decode"] = qt.decode(codes, fmt)
        out["round_to_format"] = qt.round_to_format(x, fmt)
        out["grad"] = jax.grad(lambda x: jnp.sum(qt.fake_cast(x, fmt)))(x)
    if fmt.name == "nf4":  # each device holds whole bytes
        out["packed"] = qt.unpack(qt.pack(codes, fmt, axis=1), fmt, axis=1)
    return out


def _mesh(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)


@pytest.mark.sample("e4m3fn-float32")
@pytest.mark.parametrize(("fmt", "dtype"), CASES)
def test_eight_devices_give_what_one_gives(fmt, dtype):
    x = _inputs(dtype).astype(dtype)
    together = jax.jit(lambda x: _every_mode(x, fmt))
    expected = together(x)
    for kind, spec in PLACES:
        mesh = _mesh(kind)
        where = NamedSharding(mesh, spec)
        with jax.set_mesh(mesh):
            sharded = jax.device_put(x, where)
            compiled = together.lower(sharded).compile()
            got = compiled(sharded)
        for collective in ("all-gather", "all-to-all", "collective-permute"):
            assert collective not in compiled.as_text()
        assert got.keys() == expected.keys()
        for name, wanted in expected.items():
            assert got[name].sharding.is_equivalent_to(where, 2), (name, got[name].sharding)
            np.testing.assert_array_equal(bits_of(got[name]), bits_of(wanted), err_msg=name)


@pytest.mark.sample("e4m3fn-AxisType.Auto")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("fmt", ["e4m3fn", "int8", "nf4"])
def test_eager_calls_keep_the_sharding(kind, fmt):
    host = _inputs(np.float32)
    mesh = _mesh(kind)
    where = NamedSharding(mesh, P("a", "b"))
    with jax.set_mesh(mesh):
        x = jax.device_put(host, where)
        codes = qt.encode(x, fmt)
        results = [codes, qt.round_to_format(x, fmt), qt.fake_cast(x, fmt), qt.decode(codes, fmt)]
        results.append(jax.grad(lambda x: jnp.sum(qt.fake_cast(x, fmt)))(x))
    for got in results:
        assert got.sharding.is_equivalent_to(where, 2), got.sharding
    assert_same_bits(codes, qt.encode(host, fmt))
