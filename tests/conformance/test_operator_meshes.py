"""Published operators on Auto and Explicit meshes of eight devices: the bits of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import bits_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qtoolkit import onnx, openvino, pypto


def _arguments():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(16, 32)) * np.exp2(rng.integers(-12, 12, (16, 32)))).astype(np.float32)
    x[0, :6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 448.0]
    row = np.exp2(rng.integers(-2, 3, 32)).astype(np.float32)
    blocks = np.exp2(rng.integers(-2, 3, (16, 4))).astype(np.float32)
    return x, row, blocks, rng.integers(-9, 9, 32).astype(np.int8)


pytestmark = pytest.mark.devices(8)

SPECS = P("a", "b"), P("b"), P("a", None), P("b")


def _operators(x, row, blocks, zero):
    unsafe = {"promote_unsafe": True, "pytorch_scalar_promotion": True}
    out = {
        "e8m0": onnx.cast(x, "FLOAT8E8M0", saturate=False, round_mode="nearest"),
        "fnuz": onnx.cast(x, "FLOAT8E4M3FNUZ", opset=23),
        "reference": onnx.cast(x, "BFLOAT16", arithmetic="reference"),
        "like": onnx.cast_like(x, zero),
        "by row": onnx.quantize_linear(x, row, zero),
        "by number": onnx.quantize_linear(x, np.float32(0.75), np.int8(3)),
        "blocks": onnx.quantize_linear(x, blocks, block_size=8, output_dtype="FLOAT8E5M2"),
        "bits": onnx.bit_cast(x, "UINT32"),
        "fake": openvino.fake_convert(x, row, row),
        "fake, core": openvino.fake_convert(x, row, arithmetic="openvino"),
        "fake, core, shift": openvino.fake_convert(x, row, row, arithmetic="openvino"),
        "convert": openvino.convert(x, "f8e4m3"),
        "convert, core": openvino.convert(x, "f8e5m2", arithmetic="openvino"),
        "promoted": openvino.convert_promote_types(x, zero, **unsafe)[1],
        "int16": pypto.cast(x, "DT_INT16"),
        "integral": pypto.cast(x, "DT_FP32", pypto.CastMode.CAST_CEIL, extended=True),
        "fp4": pypto.cast(x.astype(jnp.bfloat16), "DT_FP4_E2M1X2", extended=True),
        "hf8": pypto.cast(x, "DT_HF8", extended=True),
    }
    codes = out["by row"]
    out["back"] = onnx.dequantize_linear(codes, row, zero)
    out["back from blocks"] = onnx.dequantize_linear(codes, blocks, block_size=8)
    finite = jnp.where(x < 1e9, x, 0.0)
    out["dynamic"], out["scale"], out["zero"] = onnx.dynamic_quantize_linear(finite)
    for arithmetic in ("exact", "openvino"):

        def total(x, scale, arithmetic=arithmetic):
            return openvino.fake_convert(x, scale, arithmetic=arithmetic).sum()

        out["dx " + arithmetic], _ = jax.grad(total, (0, 1))(jnp.clip(x, -9, 9), row)
    return out


@pytest.fixture(scope="module")
def expected():
    return jax.jit(_operators)(*_arguments())


@pytest.mark.sample("AxisType.Auto")
@pytest.mark.quick
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices_give_what_one_gives(expected, kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(_arguments(), SPECS, strict=True)
        ]
        for run in (jax.jit(_operators), _operators):
            got = run(*placed)
            assert got.keys() == expected.keys()
            for name, wanted in expected.items():
                assert got[name].dtype == wanted.dtype, name
                np.testing.assert_array_equal(bits_of(got[name]), bits_of(wanted), err_msg=name)
