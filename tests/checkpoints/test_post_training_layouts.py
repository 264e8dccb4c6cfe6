"""What GPTQ made of a Flax model, in layouts of other programs: the same codes and numbers.

Oracle: the served model's own kernels.
"""

import jax
import jax.numpy as jnp
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


def test_a_served_model_is_saved_and_loaded(tmp_path):
    model = Model()
    inputs = [jax.random.normal(jax.random.key(i), (128, 32)) for i in range(2)]
    served = qt.nnx.quantize(model, "int4_group32", inputs, method="gptq", sequential=True)
    qt.checkpoints.save(tmp_path / "served.safetensors", nnx.state(served))
    other = qt.nnx.quantize(Model(), "int4_group32")
    state = qt.checkpoints.load(tmp_path / "served.safetensors", like=nnx.state(other))
    nnx.update(other, state)
    assert bool(jnp.all(other(inputs[0]) == served(inputs[0])))
