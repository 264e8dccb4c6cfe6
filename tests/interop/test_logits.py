"""A model of nnx is exported and loaded by transformers as it is. Oracle: transformers' logits."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import qtoolkit as qt

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
CONFIG = transformers.LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
    dtype="float32",
)
IDS = np.arange(24).reshape(2, 12) * 5 % 64


class Attention(nnx.Module):
    def __init__(self, rngs):
        sizes = {"q_proj": (128, 128), "k_proj": (128, 64), "v_proj": (128, 64)}
        for name, size in (sizes | {"o_proj": (128, 128)}).items():
            setattr(self, name, nnx.Linear(*size, use_bias=False, rngs=rngs))

    def __call__(self, x):
        def heads(y):
            return y.reshape(*x.shape[:2], -1, 32)

        exponents = jnp.arange(0, 32, 2) / 32
        angles = jnp.arange(x.shape[1])[:, None] / 10000.0**exponents
        cos, sin = (jnp.tile(f(angles), 2)[:, None] for f in (jnp.cos, jnp.sin))

        def turned(y):
            first, second = jnp.split(y, 2, -1)
            return y * cos + jnp.concatenate([-second, first], -1) * sin

        q, k, v = turned(heads(self.q_proj(x))), turned(heads(self.k_proj(x))), self.v_proj(x)
        return self.o_proj(
            jax.nn.dot_product_attention(q, k, heads(v), is_causal=True).reshape(x.shape)
        )


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.gate_proj, self.up_proj = (
            nnx.Linear(128, 256, use_bias=False, rngs=rngs) for _ in range(2)
        )
        self.down_proj = nnx.Linear(256, 128, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.input_layernorm, self.post_attention_layernorm = (
            nnx.RMSNorm(128, rngs=rngs) for _ in range(2)
        )
        self.self_attn, self.mlp = Attention(rngs), MLP(rngs)

    def __call__(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    def __init__(self, rngs):
        self.embed_tokens = nnx.Embed(64, 128, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(128, rngs=rngs)
        self.lm_head = nnx.Linear(128, 64, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def place(name):
    module, _, kind = name.rpartition(".")
    target = f"{'' if module == 'lm_head' else 'model.'}{module}.weight"
    return (target, (1, 0)) if kind == "kernel" else target


def theirs(folder, tree, **options):
    """The logits of transformers with what `export` gives."""
    config = CONFIG.to_dict()
    exported = qt.checkpoints.export(
        tree, config, names=place, layout="compressed-tensors", **options
    )
    config["quantization_config"] = exported.plan.quantization_config
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.asarray(array) for name, array in exported}
    qt.checkpoints.save(folder / "model.safetensors", arrays)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
    )
    with torch.no_grad():
        return model.eval()(torch.tensor(IDS)).logits.numpy()


NVFP4 = qt.Recipe((None, qt.spec("nvfp4").with_(tensor_scale_divides=True)), gradient=None)
CASES = {
    "e4m3fn": ("channel", qt.recipes.weight_only_e4m3),
    "int4_group32": (None, qt.Recipe((None, "int4_group32"), gradient=None)),
    "nvfp4": (
        None,
        qt.policies.join(NVFP4, ["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]),
    ),
}


@pytest.mark.parametrize("fmt", CASES)
def test_transformers_computes_what_was_trained(tmp_path, fmt):
    scaling, recipe = CASES[fmt]
    model = Llama(nnx.Rngs(0))
    wrapped = qt.nnx.wrap(model, qt.Rules({"_proj": recipe}))
    served = qt.nnx.quantize(wrapped)
    ours, plain = wrapped(IDS), model(IDS)
    np.testing.assert_array_equal(served(IDS), ours)
    assert np.abs(np.asarray(ours - plain)).max() > 0.01  # it is quantized
    found = theirs(tmp_path / "served", nnx.state(served, nnx.Param), format=fmt, scaling=scaling)
    if fmt == "nvfp4":  # transformers decompresses it in bfloat16
        state = nnx.state(served, nnx.Param)

        def rounded(x):
            is_stored = isinstance(x, qt.QArray)
            return jnp.float32(x.dequantize().astype(jnp.bfloat16)) if is_stored else x

        state = jax.tree.map(rounded, state, is_leaf=lambda x: isinstance(x, qt.QArray))
        decompressed = nnx.clone(model)
        nnx.update(decompressed, state)
        np.testing.assert_allclose(found, ours, atol=0.02 * np.abs(ours).max())
        ours = decompressed(IDS)
    # Sums of 256 numbers of float32 in another order, through two layers.
    np.testing.assert_allclose(found, ours, rtol=1e-4, atol=1e-4 * np.abs(ours).max())
    # From the trained model, whose kernels are quantized on the way, they are the same.
    if fmt != "int4_group32":  # of which compressed-tensors' scale is another one
        again = theirs(
            tmp_path / "trained", nnx.state(wrapped, nnx.Param), format=fmt, scaling=scaling
        )
        np.testing.assert_array_equal(again, found)
