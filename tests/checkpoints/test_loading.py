"""What `load` and `dequantize` make of files: weights, in the places that `like` has.

Oracles: the values before they were quantized, the folder's own, NumPy.
"""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import qtoolkit as qt
from qtoolkit.checkpoints import (
    compare,
    convert,
    dequantize,
    dequantize_checkpoint,
    load,
    save,
    verify,
)

NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "src"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    x = np.random.default_rng(0).normal(size=(128, 256)).astype(np.float32)
    save(path / "model.safetensors", {NAME: x}, {"format": "pt"})
    return path, x


@pytest.mark.parametrize(
    ("layout", "fmt", "scaling", "decibels"),
    [
        ("compressed-tensors", "e4m3fn", "block", 30),
        ("compressed-tensors", "int8", None, 35),
        ("compressed-tensors", "mxfp8_e4m3", None, 28),
        ("compressed-tensors", "mxfp4", None, 15),
        ("compressed-tensors", "nvfp4", None, 18),
        ("compressed-tensors", "int4_group128", None, 15),
        ("finegrained-fp8", "e4m3fn", None, 30),
        ("modelopt", "e4m3fn", "tensor", 30),
        ("modelopt", "nvfp4", None, 18),
    ],
)
def test_files_of_every_layout_are_dequantized(tmp_path, source, layout, fmt, scaling, decibels):
    src, x = source
    scales = 0.5 if layout == "modelopt" else None
    convert(src, tmp_path / "dst", layout=layout, format=fmt, scaling=scaling, input_scales=scales)
    values = dequantize(load(tmp_path / "dst" / "model.safetensors"))[NAME]
    assert values.dtype == np.float32
    assert 10 * np.log10((x**2).sum() / ((x - values) ** 2).sum()) > decibels
    np.testing.assert_array_equal(values, dequantize(load(tmp_path / "dst"))[NAME])


def test_tensors_of_four_bits_are_loaded(tmp_path):
    """The 16 codes of F4, two to a byte, the first one low."""
    header = {"w": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    data = bytes(2 * i | (2 * i + 1) << 4 for i in range(8))
    (tmp_path / "f4.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    found = load(tmp_path / "f4.safetensors")["w"]
    assert found.dtype == ml_dtypes.float4_e2m1fn
    np.testing.assert_array_equal(found.astype(np.float32), [positive, np.negative(positive)])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("concrete", [True, False])
def test_what_is_loaded_lies_where_like_does(tmp_path, kind, concrete):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    by_rows = NamedSharding(mesh, PartitionSpec("x"))
    x = np.random.default_rng(0).normal(size=(128, 64)).astype(np.float32)
    tensors = {"w": x, "q": qt.quantize(jnp.asarray(x), "e4m3fn"), "b": x[0]}
    save(tmp_path / "a.safetensors", tensors)
    like = {
        name: jax.device_put(jnp.zeros(n), by_rows)
        if concrete
        else jax.ShapeDtypeStruct(n, jnp.float32, sharding=by_rows)
        for name, n in (("w", x.shape), ("q", x.shape))
    }
    like["b"] = jnp.zeros(64)
    found = load(tmp_path / "a.safetensors", like=like)
    assert found["w"].sharding == by_rows
    assert found["q"].codes.sharding == by_rows
    assert found["q"].scale.sharding.is_fully_replicated
    assert len(found["q"].scale.sharding.device_set) == 4
    assert len(found["b"].sharding.device_set) == 1
    np.testing.assert_array_equal(found["w"], x)
    expected = tensors["q"].dequantize()
    np.testing.assert_array_equal(found["q"].dequantize(), expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.int8, np.uint8, np.int32], ids=str)
@pytest.mark.parametrize("layout", ["compressed-tensors", "finegrained-fp8", "modelopt", "plain"])
def test_copied_codes_are_read_by_all(tmp_path, source, layout, dtype):
    path, x = source
    kept = np.arange(64).reshape(8, 8).astype(dtype)
    name = "model.layers.0.self_attn.o_proj.weight"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "config.json").write_text((path / "config.json").read_text())
    save(tmp_path / "src" / "model.safetensors", {NAME: x, name: kept}, {"format": "pt"})
    src, dst = tmp_path / "src", tmp_path / "dst"
    convert(src, dst, layout=layout, skip=["o_proj"])
    assert verify(src, dst).problems == ()
    assert {t.name: t.equal for t in compare(src, dst).tensors} == {NAME: False, name: True}
    dequantize_checkpoint(dst, tmp_path / "unquantized", allow_codes=True)
    for folder in (dst, tmp_path / "unquantized"):
        assert dequantize(load(folder))[name].tobytes() == kept.tobytes()
