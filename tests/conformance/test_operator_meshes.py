"""Published operators on Auto and Explicit meshes of eight devices: the bits of one device.

Devices are counted when JAX starts, hence the process of its own.
"""

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from qtoolkit import onnx, openvino, pypto

assert len(jax.devices()) == 8
rng = np.random.default_rng(0)
host = (rng.normal(size=(16, 32)) * np.exp2(rng.integers(-12, 12, (16, 32)))).astype(np.float32)
host[0, :6] = [np.inf, -np.inf, np.nan, 0.0, -0.0, 448.0]
row = np.exp2(rng.integers(-2, 3, 32)).astype(np.float32)
blocks = np.exp2(rng.integers(-2, 3, (16, 4))).astype(np.float32)
zero = rng.integers(-9, 9, 32).astype(np.int8)

def operators(x, row, blocks, zero):
    unsafe = dict(promote_unsafe=True, pytorch_scalar_promotion=True)
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

def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")

arguments = host, row, blocks, zero
expected = jax.jit(operators)(*arguments)
specs = P("a", "b"), P("b"), P("a", None), P("b")
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arguments, specs)]
        for how in (jax.jit(operators), operators):
            for name, got in how(*placed).items():
                np.testing.assert_array_equal(bits(got), bits(expected[name]), err_msg=name)
print("all equal")
"""


@pytest.mark.quick
def test_eight_devices_give_what_one_gives(on_devices):
    done = on_devices(8, SCRIPT)
    assert done.stdout.strip() == "all equal", done.stderr[-3000:]
