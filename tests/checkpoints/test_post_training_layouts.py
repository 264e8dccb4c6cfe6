"""What GPTQ made of a Flax model, in layouts of other programs: the same codes and numbers.

Oracles: the served model's own kernels, and NumPy's formulas of compressed-tensors' documentation.
"""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import qtoolkit as qt

LAYER = "model.layers.0.mlp"
NAMES = {"up/kernel": f"{LAYER}.up_proj.weight", "down/kernel": f"{LAYER}.down_proj.weight"}
SPECS = {
    "int4_group32": qt.spec("int4_group32").with_(rule="range"),
    "nvfp4": qt.spec("nvfp4").with_(tensor_scale_divides=True),
}


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def weights(model):
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    values = {"/".join(map(str, path)): parameter.get_value() for path, parameter in flat}
    return {
        name: value.unpack().T if isinstance(value, qt.QArray) else value.T
        for path, name in NAMES.items()
        for value in [values[path]]
    }


@pytest.mark.parametrize("name", SPECS)
def test_codes_of_gptq_are_written_as_loaders_want_them(name, tmp_path):
    model = Model()
    inputs = [jax.random.normal(jax.random.key(i), (128, 32)) for i in range(2)]
    served = qt.nnx.quantize(model, SPECS[name], inputs, method="gptq")
    folders = {kind: tmp_path / kind for kind in ("unquantized", "served", "layout")}
    for kind, which in (("unquantized", model), ("served", served)):
        folders[kind].mkdir()
        (folders[kind] / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        qt.checkpoints.save(folders[kind] / "model.safetensors", weights(which))
    options = {"format": name, "layout": "compressed-tensors"}
    qt.checkpoints.convert(folders["served"], folders["layout"], **options)
    loaded = qt.checkpoints.load(folders["layout"])
    for weight, expected in weights(served).items():
        np.testing.assert_array_equal(loaded[weight].unpack().codes, expected.codes)
        np.testing.assert_allclose(
            loaded[weight].dequantize(), expected.dequantize(), rtol=1e-6, atol=0
        )
    compared = qt.checkpoints.compare(folders["unquantized"], folders["layout"])
    assert all(10 < row.sqnr_db < 30 for row in compared.tensors)


DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": "f4", "U8": "u1", "I32": "i4", "I64": "i8"}


def raw_tensors(path):
    """The arrays of a safetensors file, by its specification."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, about in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = (start + place for place in about["data_offsets"])
            array = np.frombuffer(data[first:last], DTYPES[about["dtype"]])
            tensors[name] = array.reshape(about["shape"])
    return tensors


def numbers(name, tensors, weight):
    """pack-quantized: eight nibbles + 8 in an int32, the first lowest; nvfp4-pack-quantized: two
    E2M1 codes in a byte, the first lowest, times E4M3 scales over the global scale.
    """
    packed, scale = tensors[f"{weight}_packed"], tensors[f"{weight}_scale"]
    if name == "nvfp4":
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        scale = scale.astype(np.float64) / tensors[f"{weight}_global_scale"].astype(np.float64)
        return values * np.repeat(scale, 16, 1)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    codes = (packed.view(np.uint32)[..., None] >> shifts & 15).reshape(len(packed), -1)
    return (codes.astype(np.int64) - 8) * np.repeat(scale.astype(np.float64), 32, 1)


@pytest.mark.parametrize("method", ["gptq", "awq+gptq"])
@pytest.mark.parametrize("name", SPECS)
def test_what_loaders_compute_is_nearer_than_rounding(name, method, tmp_path):
    model, mixing = Model(), jax.random.normal(jax.random.key(9), (32, 32)) * 0.3 + jnp.eye(32)
    inputs = [jax.random.normal(jax.random.key(i), (128, 32)) @ mixing for i in range(2)]
    rules = qt.Rules([("down", SPECS[name])], default=None).map(
        lambda spec: None if spec is None else qt.Recipe((None, spec), gradient=None)
    )
    errors, x = {}, np.asarray(inputs[0], np.float64)
    for way in ("nearest", method):
        options = () if way == "nearest" else (inputs,)
        served = qt.nnx.quantize(model, rules, *options, method=way)
        folder = tmp_path / way.replace("+", "-")
        folder.mkdir()
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        qt.checkpoints.save(folder / "model.safetensors", weights(served))
        target = tmp_path / f"{folder.name}-layout"
        qt.checkpoints.convert(
            folder, target, format=name, layout="compressed-tensors", skip=["up_proj"]
        )
        tensors = raw_tensors(target / "model.safetensors")
        up = tensors[NAMES["up/kernel"]].astype(np.float64)
        down = numbers(name, tensors, NAMES["down/kernel"])
        y = np.maximum(x @ up.T, 0) @ down.T
        np.testing.assert_allclose(served(inputs[0]), y, rtol=1e-3, atol=1e-4)
        errors[way] = np.square(y - np.asarray(model(inputs[0]))).sum()
    assert errors[method] < 0.7 * errors["nearest"]


def test_a_served_model_is_saved_and_loaded(tmp_path):
    model = Model()
    inputs = [jax.random.normal(jax.random.key(i), (128, 32)) for i in range(2)]
    served = qt.nnx.quantize(model, "int4_group32", inputs, method="gptq", sequential=True)
    qt.checkpoints.save(tmp_path / "served.safetensors", nnx.state(served))
    other = qt.nnx.quantize(Model(), "int4_group32")
    state = qt.checkpoints.load(tmp_path / "served.safetensors", like=nnx.state(other))
    nnx.update(other, state)
    assert bool(jnp.all(other(inputs[0]) == served(inputs[0])))
