"""Public Flax models, small and random: how each is made and what it is called with.

`FOLDERS` says where the clones are whose files are imported, see `public_models.py`.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

os.environ.update(USE_TORCH="0", USE_TF="0", USE_FLAX="1")  # transformers, which imports all else

FOLDERS: dict[str, Path] = {}  # "flax" and "bonsai"


class Task(NamedTuple):
    """A model and what it is called with.

    Attributes:
      model: Of nnx or linen.
      arguments, options: Of the call.
      variables: Of a linen module, as `init` returns them.
      rngs: Of a linen module's `apply`.
    """

    model: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  # nobody writes it
    variables: Any = None
    rngs: Any = None


def linen(module: Any, *arguments: Any, rngs: Any = None, **options: Any) -> Task:
    keys = {"params": jax.random.key(0), **(rngs or {})}
    init = jax.jit(lambda keys: module.init(keys, *arguments, **options))
    return Task(module, arguments, options, init(keys), rngs)


TOKENS = np.random.default_rng(0).integers(3, 90, (4, 16)).astype(np.int32)
MASK, POSITIONS = np.ones_like(TOKENS), np.broadcast_to(np.arange(16), TOKENS.shape)
PIXELS = np.random.default_rng(1).standard_normal((4, 32, 32, 3)).astype(np.float32)


# --- transformers: linen --------------------------------------------------------------------------

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def _hugging_face(name: str, config: str, input_shape: Any = (1, 1), **fields: Any) -> Any:
    transformers = importlib.import_module("transformers")
    configured = getattr(transformers, config)(**fields)
    made = getattr(transformers, name)(configured, _do_init=False, input_shape=input_shape)
    return made.module


def _decoding(module: Any) -> Task:
    """One token more, after eight that are in the cache."""
    made = linen(module, TOKENS, MASK, POSITIONS, init_cache=True)
    eight = TOKENS[:, :8], MASK, POSITIONS[:, :8]
    _, filled = module.apply(made.variables, *eight, mutable=["cache"])
    variables = {"params": made.variables["params"], "cache": filled["cache"]}
    return Task(module, (TOKENS[:, 8:9], MASK, POSITIONS[:, 8:9]), {}, variables)


def bert() -> Task:
    module = _hugging_face("FlaxBertForMaskedLM", "BertConfig", **_SMALL)
    heads = np.ones((1, 4), np.float32)
    return linen(module, TOKENS, MASK, np.zeros_like(TOKENS), POSITIONS, heads)


def gpt2_decoding() -> Task:
    sizes = {"vocab_size": 97, "n_embd": 64, "n_layer": 1, "n_head": 4}
    return _decoding(_hugging_face("FlaxGPT2LMHeadModel", "GPT2Config", **sizes))


def llama() -> Task:
    module = _hugging_face("FlaxLlamaForCausalLM", "LlamaConfig", **_SMALL)
    return linen(module, TOKENS, MASK, POSITIONS)


def llama_decoding() -> Task:
    return _decoding(_hugging_face("FlaxLlamaForCausalLM", "LlamaConfig", **_SMALL))


def bart() -> Task:
    sizes = {"layers": 1, "attention_heads": 4, "ffn_dim": 128}
    fields = {f"{part}_{k}": v for part in ("encoder", "decoder") for k, v in sizes.items()}
    fields |= {"vocab_size": 97, "d_model": 64, "max_position_embeddings": 32}
    module = _hugging_face("FlaxBartForConditionalGeneration", "BartConfig", **fields)
    return linen(module, TOKENS, MASK, TOKENS[:, ::-1], MASK, POSITIONS, POSITIONS)


def vit() -> Task:
    fields = {**_SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10}
    name, shape = "FlaxViTForImageClassification", (1, 32, 32, 3)
    return linen(_hugging_face(name, "ViTConfig", shape, **fields), PIXELS)


def hugging_face_resnet() -> Task:
    fields = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 10}
    name, shape = "FlaxResNetForImageClassification", (1, 32, 32, 3)
    module = _hugging_face(name, "ResNetConfig", shape, layer_type="basic", **fields)
    return linen(module, PIXELS, deterministic=False)


# --- recurrentgemma: linen, a linear recurrence with a derivative of its own; timesfm: nnx --------


def griffin() -> Task:
    common = importlib.import_module("recurrentgemma.common")
    griffin = importlib.import_module("recurrentgemma.jax.griffin")
    kinds = common.TemporalBlockType
    config = common.GriffinConfig(
        vocab_size=97,
        width=64,
        mlp_expanded_width=128,
        num_heads=4,
        block_types=(kinds.RECURRENT, kinds.ATTENTION),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=16,
        logits_soft_cap=30.0,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )
    return linen(griffin.Griffin(config), jnp.asarray(TOKENS), jnp.asarray(POSITIONS))


def timesfm() -> Task:
    transformer = importlib.import_module("timesfm.flax.transformer")
    configs = importlib.import_module("timesfm.configs")
    config = configs.TransformerConfig(
        model_dims=64,
        hidden_dims=128,
        num_heads=4,
        ff_activation="swish",
        **dict.fromkeys(("attention_norm", "feedforward_norm", "qk_norm"), "rms"),
        use_bias=False,
        use_rotary_position_embeddings=True,
        fuse_qkv=False,
    )
    x = jax.random.normal(jax.random.key(1), (4, 16, 64))
    model = transformer.Transformer(config, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    for path, parameter in nnx.to_flat_state(state):
        if path[-1] == "scale":  # of norms: made as zeros, which would make all gradients zero
            parameter[...] = jnp.ones_like(parameter[...])
    nnx.update(model, state)
    return Task(model, (x, jnp.zeros((4, 16), bool)))


# --- Flax's own examples: linen, and Gemma of nnx -------------------------------------------------


def _imported(name: str, place: Path) -> Any:
    sys.path.insert(0, str(place))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(place))


def _example(folder: str, name: str = "models") -> Any:
    """A file of an example, whose folder it imports its neighbours from; most have one `models`."""
    examples = FOLDERS["flax"] / "examples"
    for known, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(examples)):
            del sys.modules[known]
    return _imported(name, examples / folder)


_TRANSLATION = {
    "vocab_size": 97,
    "output_vocab_size": 97,
    "emb_dim": 64,
    "num_heads": 4,
    "num_layers": 1,
    "qkv_dim": 64,
    "mlp_dim": 128,
    "max_len": 16,
    "deterministic": True,
}


def wmt() -> Task:
    models = _example("wmt")
    shared = {"share_embeddings": True, "logits_via_embedding": True}
    config = models.TransformerConfig(**_TRANSLATION, **shared)
    return linen(models.Transformer(config), TOKENS, TOKENS[:, ::-1])


def lm1b_decoding() -> Task:
    models = _example("lm1b")
    module = models.TransformerLM(models.TransformerConfig(**_TRANSLATION, decode=True))
    variables = module.init(jax.random.key(0), TOKENS)  # a cache for all 16 tokens
    return Task(module, (TOKENS[:, :1],), {}, variables)


def seq2seq() -> Task:
    module = _example("seq2seq").Seq2seq(teacher_force=True, hidden_size=32, vocab_size=97)
    words = np.eye(97, dtype=np.float32)[TOKENS]
    return linen(module, words, words, rngs={"lstm": jax.random.key(1)})


def sst2() -> Task:
    module = _example("sst2").TextClassifier(
        embedding_size=32,
        hidden_size=32,
        vocab_size=97,
        output_size=2,
        dropout_rate=0.0,
        word_dropout_rate=0.0,
        unk_idx=1,
        deterministic=True,
    )
    return linen(module, TOKENS, np.array([16, 12, 8, 16]))


def vae() -> Task:
    digits = np.random.default_rng(3).random((8, 784), np.float32)
    return linen(_example("vae").VAE(latents=20), digits, jax.random.key(1))


def ppo() -> Task:
    frames = np.random.default_rng(4).integers(0, 256, (4, 84, 84, 4)).astype(np.uint8)
    return linen(_example("ppo").ActorCritic(num_outputs=4), frames)


def graph_network() -> Task:
    models, jraph = _example("ogbg_molpcba"), importlib.import_module("jraph")
    draw = np.random.default_rng(5)
    graphs = jraph.GraphsTuple(
        nodes=jnp.asarray(draw.standard_normal((12, 9)), jnp.float32),
        edges=jnp.asarray(draw.standard_normal((20, 3)), jnp.float32),
        senders=jnp.asarray(draw.integers(0, 12, 20)),
        receivers=jnp.asarray(draw.integers(0, 12, 20)),
        n_node=jnp.array([5, 7]),
        n_edge=jnp.array([8, 12]),
        globals=jnp.ones((2, 1)),
    )
    sizes = {"latent_size": 32, "num_mlp_layers": 2, "message_passing_steps": 2}
    return linen(models.GraphNet(**sizes, output_globals_size=8), graphs)


def gemma(decode: bool = False) -> Task:
    transformer = _example("gemma", "transformer")
    configs = importlib.import_module("transformer_cfg")
    config = configs.TransformerConfig(
        num_layers=1,
        num_embed=97,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        sliding_window_size=8,
        attention_types=[configs.AttentionType.LOCAL_SLIDING],
    )
    model = transformer.Transformer(config, rngs=nnx.Rngs(0))
    if decode:
        cache = model.init_cache(cache_size=16, batch_size=4)
        return Task(model, (TOKENS[:, :1], POSITIONS[:, :1], cache, np.ones((4, 1, 16), bool)))
    causal = np.broadcast_to(np.tri(16, dtype=bool), (4, 16, 16))
    return Task(model, (TOKENS, POSITIONS, None, causal))


# --- bonsai: nnx ----------------------------------------------------------------------------------


def _bonsai(name: str) -> Any:
    return _imported(f"bonsai.models.{name}.modeling", FOLDERS["bonsai"])


def bonsai_qwen3() -> Task:
    modeling = _bonsai("qwen3")
    config = modeling.ModelConfig(
        num_layers=1,
        vocab_size=97,
        emb_dim=64,
        mlp_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        rope_scaling_factor=1,
        local_rope_theta=10_000.0,
        norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    cache = modeling.init_cache(config, 4, 16, 0, jnp.float32)
    model = modeling.Qwen3(config, rngs=nnx.Rngs(0))
    return Task(model, (TOKENS,), {"cache": cache, "segment_ids": MASK})


def bonsai_resnet() -> Task:
    modeling = _bonsai("resnet")
    config = modeling.ModelConfig([1, 1, 1, 1], num_classes=10)
    return Task(modeling.ResNet(config, rngs=nnx.Rngs(0)), (PIXELS,))


def bonsai_convnext() -> Task:
    modeling = _bonsai("convnext")
    config = modeling.ModelConfig((1, 1, 1, 1), (16, 32, 48, 64), 0.0, 10)
    model = modeling.ConvNeXt(config, rngs=nnx.Rngs(0))
    return Task(model, (PIXELS,), {"rngs": jax.random.key(1), "train": True})


def bonsai_umt5() -> Task:
    modeling = _bonsai("umt5")
    config = modeling.ModelConfig(
        vocab_size=97,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
    )
    model = modeling.UMT5Model(config, rngs=nnx.Rngs(0))
    return Task(model, (TOKENS, MASK, TOKENS[:, ::-1], MASK))


def bonsai_mamba2() -> Task:
    modeling = _bonsai("mamba2")
    config = modeling.ModelConfig(
        vocab_size=97,
        hidden_size=64,
        state_size=16,
        head_dim=16,
        chunk_size=8,
        num_hidden_layers=1,
    )
    return Task(modeling.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), (TOKENS,))


MODELS: dict[str, Callable[[], Task]] = {
    "transformers BERT": bert,
    "transformers GPT-2, decoding": gpt2_decoding,
    "transformers Llama": llama,
    "transformers Llama, decoding": llama_decoding,
    "transformers BART": bart,
    "transformers ViT": vit,
    "transformers ResNet": hugging_face_resnet,
    "recurrentgemma Griffin": griffin,
    "timesfm Transformer": timesfm,
    "flax wmt": wmt,
    "flax lm1b, decoding": lm1b_decoding,
    "flax seq2seq": seq2seq,
    "flax sst2": sst2,
    "flax vae": vae,
    "flax ppo": ppo,
    "flax ogbg_molpcba GraphNet": graph_network,
    "flax gemma": gemma,
    "flax gemma, decoding": lambda: gemma(decode=True),
    "bonsai Qwen3": bonsai_qwen3,
    "bonsai ResNet": bonsai_resnet,
    "bonsai ConvNeXt": bonsai_convnext,
    "bonsai UMT5": bonsai_umt5,
    "bonsai Mamba2": bonsai_mamba2,
}
