"""Models that nobody here wrote, as they are: wrapped, reported, trained for a step.

Command: python experiments/public_models.py [--flax FOLDER] [--bonsai FOLDER] [--only NAME ...]
It installs nothing. Packages: "transformers<4.51" (the last of its Flax models; PyTorch is not
needed), recurrentgemma with jaxtyping and "typeguard<3", timesfm, jraph. Folders: clones of
github.com/google/flax (its examples) and of github.com/jax-ml/bonsai. A model whose source is
missing is named and skipped. (FlaxT5 is not here: it needs an older JAX.)

Every model is small and random. It is wrapped with `te_current` and trained one step of Adam
towards random targets. Printed are the products that ran (forward and backward), how many are
quantized and what the others are; the loss before and after the step; the cosine between the
gradients of the wrapped and the plain model. The command fails where
- the report has a product that is left;
- it has none, but running the program shows one: `watched` evaluates each equation and asks whether
  both operands of a product hold values of E4M3 or E5M2 alone;
- the loss is not finite, or the cosine is at most 0.98.
"""

import collections
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx

import qtoolkit as qt

os.environ.update(USE_TORCH="0", USE_TF="0", USE_FLAX="1")  # transformers, which imports all else

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


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
    options: dict[str, Any]
    variables: Any = None
    rngs: Any = None

    def wrapped(self) -> "Task":
        wrap = qt.nnx.wrap if self.variables is None else qt.linen.wrap
        return self._replace(model=wrap(self.model, qt.recipes.te_current))

    def report(self) -> qt.products.Report:
        if self.variables is None:
            return qt.nnx.report(self.model, *self.arguments, **self.options)
        return qt.linen.report(
            self.model, self.variables, *self.arguments, rngs=self.rngs, **self.options
        )

    def function(self) -> tuple[Any, Callable[[Any], list[jax.Array]]]:
        """The parameters, and the outputs of floats as a function of them."""
        if self.variables is None:
            graph, parameters, others = nnx.split(self.model, nnx.Param, ...)

            def call(parameters: Any) -> Any:
                model = nnx.merge(graph, parameters, others, copy=True)
                return model(*self.arguments, **self.options)
        else:
            parameters = self.variables["params"]

            def call(parameters: Any) -> Any:
                variables = {**self.variables, "params": parameters}
                mutable = [name for name in variables if name != "params"]
                out = self.model.apply(
                    variables, *self.arguments, rngs=self.rngs, mutable=mutable, **self.options
                )
                return out[0]  # not what it writes

        return parameters, lambda p: [x for x in jax.tree.leaves(call(p)) if _is_float(x)]


def linen(module: Any, *arguments: Any, rngs: Any = None, **options: Any) -> Task:
    keys = {"params": jax.random.key(0), **(rngs or {})}
    init = jax.jit(lambda keys: module.init(keys, *arguments, **options))
    return Task(module, arguments, options, init(keys), rngs)


# --- transformers: linen ------------------------------------------------------------------------

TOKENS = np.random.default_rng(0).integers(3, 90, (4, 16)).astype(np.int32)
MASK, POSITIONS = np.ones_like(TOKENS), np.broadcast_to(np.arange(16), TOKENS.shape)
PIXELS = np.random.default_rng(1).standard_normal((4, 32, 32, 3)).astype(np.float32)
_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def _module(name: str, configured: str, input_shape: Any = (1, 1), **fields: Any) -> Any:
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, configured)(**fields)
    model = getattr(transformers, name)(config, _do_init=False, input_shape=input_shape)
    return model.module


def bert() -> Task:
    module = _module("FlaxBertForMaskedLM", "BertConfig", **_SMALL)
    heads = np.ones((1, 4), np.float32)
    return linen(module, TOKENS, MASK, np.zeros_like(TOKENS), POSITIONS, heads)


def gpt2(decode: bool = False) -> Task:
    module = _module(
        *("FlaxGPT2LMHeadModel", "GPT2Config"), vocab_size=97, n_embd=64, n_layer=1, n_head=4
    )
    if not decode:
        return linen(module, TOKENS, MASK, POSITIONS)
    return _decoding(module, TOKENS, MASK, POSITIONS)


def _decoding(module: Any, tokens: Any, mask: Any, positions: Any) -> Task:
    """One token more, with a cache that `init_cache` made."""
    made = linen(module, tokens, mask, positions, init_cache=True)
    _, filled = module.apply(
        made.variables, tokens[:, :8], mask, positions[:, :8], mutable=["cache"]
    )
    variables = {"params": made.variables["params"], "cache": filled["cache"]}
    return Task(module, (tokens[:, 8:9], mask, positions[:, 8:9]), {}, variables)


def llama(decode: bool = False) -> Task:
    module = _module("FlaxLlamaForCausalLM", "LlamaConfig", **_SMALL)
    return (_decoding if decode else linen)(module, TOKENS, MASK, POSITIONS)


def bart() -> Task:
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")}
    module = _module(
        *("FlaxBartForConditionalGeneration", "BartConfig"),
        vocab_size=97,
        d_model=64,
        max_position_embeddings=32,
        **(layers | heads | widths),
    )
    return linen(module, TOKENS, MASK, TOKENS[:, ::-1], MASK, POSITIONS, POSITIONS)


def vit() -> Task:
    fields = {**_SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10}
    module = _module("FlaxViTForImageClassification", "ViTConfig", (1, 32, 32, 3), **fields)
    return linen(module, PIXELS)


def huggingface_resnet() -> Task:
    module = _module(
        *("FlaxResNetForImageClassification", "ResNetConfig", (1, 32, 32, 3)),
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        num_labels=10,
    )
    return linen(module, PIXELS, deterministic=False)


def whisper() -> Task:
    layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
    module = _module(
        *("FlaxWhisperForConditionalGeneration", "WhisperConfig", (1, 8, 32)),
        vocab_size=97,
        d_model=64,
        num_mel_bins=8,
        max_source_positions=16,
        **{"max_target_positions": 16, "decoder_start_token_id": 1, **special},
        **(layers | heads | widths),
    )
    audio = np.random.default_rng(2).standard_normal((4, 8, 32)).astype(np.float32)
    return linen(module, audio, TOKENS, MASK, POSITIONS)


# --- recurrentgemma: linen, a linear recurrence with a derivative of its own ---------------------


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


# --- timesfm: nnx ---------------------------------------------------------------------------------


def timesfm() -> Task:
    transformer = importlib.import_module("timesfm.flax.transformer")
    configs = importlib.import_module("timesfm.configs")
    config = configs.TransformerConfig(
        model_dims=64,
        hidden_dims=128,
        num_heads=4,
        attention_norm="rms",
        feedforward_norm="rms",
        qk_norm="rms",
        use_bias=False,
        use_rotary_position_embeddings=True,
        ff_activation="swish",
        fuse_qkv=False,
    )
    model = transformer.Transformer(config, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (4, 16, 64))
    return Task(model, (x, jnp.zeros((4, 16), bool)), {})


# --- Flax's own examples --------------------------------------------------------------------------


def _example(folder: str, name: str = "models") -> Any:
    """A file of an example, whose folder it imports its neighbours from."""
    for known in [key for key, module in sys.modules.items() if _is_of_example(module)]:
        del sys.modules[known]
    place = str(_folders["flax"] / "examples" / folder)
    sys.path.insert(0, place)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(place)


def _is_of_example(module: Any) -> bool:
    at = str(_folders["flax"] / "examples")
    return (getattr(module, "__file__", None) or "").startswith(at)


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


def lm1b() -> Task:
    models = _example("lm1b")
    return linen(models.TransformerLM(models.TransformerConfig(**_TRANSLATION)), TOKENS)


def lm1b_decoding() -> Task:
    models = _example("lm1b")
    module = models.TransformerLM(models.TransformerConfig(**_TRANSLATION, decode=True))
    variables = module.init(jax.random.key(0), TOKENS)  # a cache for all 16 tokens
    return Task(module, (TOKENS[:, :1],), {}, variables)


def imagenet() -> Task:
    models = _example("imagenet")
    module = models.ResNet50(num_classes=10, num_filters=8)
    return linen(module, PIXELS, train=False)
    # Fresh statistics would let the activations of fifty layers grow without bound.


def seq2seq() -> Task:
    models = _example("seq2seq")
    module = models.Seq2seq(teacher_force=True, hidden_size=32, vocab_size=97)
    words = np.eye(97, dtype=np.float32)[TOKENS]
    return linen(module, words, words, rngs={"lstm": jax.random.key(1)})


def sst2() -> Task:
    models = _example("sst2")
    module = models.TextClassifier(
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
    models = _example("vae")
    digits = np.random.default_rng(3).random((8, 784), np.float32)
    return linen(models.VAE(latents=20), digits, jax.random.key(1))


def ppo() -> Task:
    frames = np.random.default_rng(4).integers(0, 256, (4, 84, 84, 4)).astype(np.uint8)
    return linen(_example("ppo").ActorCritic(num_outputs=4), frames)


def graph_network() -> Task:
    models = _example("ogbg_molpcba")
    jraph = importlib.import_module("jraph")
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
    module = models.GraphNet(
        latent_size=32, num_mlp_layers=2, message_passing_steps=2, output_globals_size=8
    )
    return linen(module, graphs)


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
        attention_types=[configs.AttentionType.LOCAL_SLIDING],
        sliding_window_size=8,
    )
    model = transformer.Transformer(config, rngs=nnx.Rngs(0))
    if decode:
        cache = model.init_cache(cache_size=16, batch_size=4)
        return Task(model, (TOKENS[:, :1], POSITIONS[:, :1], cache, np.ones((4, 1, 16), bool)), {})
    causal = np.broadcast_to(np.tri(16, dtype=bool), (4, 16, 16))
    return Task(model, (TOKENS, POSITIONS, None, causal), {})


# --- bonsai: nnx ----------------------------------------------------------------------------------


def _bonsai(name: str) -> Any:
    place = str(_folders["bonsai"])
    sys.path.insert(0, place)
    try:
        return importlib.import_module(f"bonsai.models.{name}.modeling")
    finally:
        sys.path.remove(place)


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
    model = modeling.Qwen3(config, rngs=nnx.Rngs(0))
    cache = modeling.init_cache(config, 4, 16, 0, jnp.float32)
    return Task(model, (TOKENS,), {"cache": cache, "segment_ids": MASK})


def bonsai_resnet() -> Task:
    modeling = _bonsai("resnet")
    model = modeling.ResNet(modeling.ModelConfig([1, 1, 1, 1], num_classes=10), rngs=nnx.Rngs(0))
    return Task(model, (PIXELS,), {})


def bonsai_convnext() -> Task:
    modeling = _bonsai("convnext")
    config = modeling.ModelConfig((1, 1, 1, 1), (16, 32, 48, 64), 0.0, 10)
    model = modeling.ConvNeXt(config, rngs=nnx.Rngs(0))
    return Task(model, (PIXELS,), {"rngs": jax.random.key(1), "train": True})


def bonsai_umt5() -> Task:
    modeling = _bonsai("umt5")
    config = modeling.ModelConfig(
        vocab_size=97, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4, dropout_rate=0.0
    )
    model = modeling.UMT5Model(config, rngs=nnx.Rngs(0))
    return Task(model, (TOKENS, MASK, TOKENS[:, ::-1], MASK), {})


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
    return Task(modeling.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), (TOKENS,), {})


MODELS: dict[str, Callable[[], Task]] = {
    "transformers BERT": bert,
    "transformers GPT-2": gpt2,
    "transformers GPT-2, decoding": lambda: gpt2(decode=True),
    "transformers Llama": llama,
    "transformers Llama, decoding": lambda: llama(decode=True),
    "transformers BART": bart,
    "transformers ViT": vit,
    "transformers ResNet": huggingface_resnet,
    "transformers Whisper": whisper,
    "recurrentgemma Griffin": griffin,
    "timesfm Transformer": timesfm,
    "flax wmt": wmt,
    "flax lm1b": lm1b,
    "flax lm1b, decoding": lm1b_decoding,
    "flax imagenet ResNet-50": imagenet,
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
_folders: dict[str, Path] = {}


# --- what is checked ------------------------------------------------------------------------------


def watched(function: Callable[..., Any], argument: Any) -> Callable[[Any], tuple[Any, Any]]:
    """`function` run equation by equation; it also gives a flag for each product.

    The flag says whether both operands hold values of 8 bits. Products of integers are no products
    here; one in a loop counts once; what stands in a `while_loop` does not count.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(argument)

    @jax.jit
    def run(argument: Any) -> Any:
        outs, flags = _run(closed.jaxpr, closed.consts, jax.tree.leaves(argument))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs), flags

    return run


Flags = list[jax.Array]  # for each product, whether both operands hold values of 8 bits


def _run(jaxpr: Any, consts: Any, inputs: Any) -> tuple[list[Any], Flags]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    flags: Flags = []
    for eqn in jaxpr.eqns:
        operands = [atom.val if hasattr(atom, "val") else values[atom] for atom in eqn.invars]
        outs, inner = _equation(eqn, operands)
        values.update(zip(eqn.outvars, outs, strict=True))
        flags += inner
    return [atom.val if hasattr(atom, "val") else values[atom] for atom in jaxpr.outvars], flags


def _equation(eqn: Any, operands: list[Any]) -> tuple[list[Any], Flags]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(params, operands)
    if name == "cond":
        return _cond(params, operands)
    if name == "linear_with_transpose":  # evaluates this function of residuals and operands
        n, forward = params["residuals"], params["forward"]
        closed = jax.make_jaxpr(forward)(tuple(operands[:n]), tuple(operands[n:]))
        return _run(closed.jaxpr, closed.consts, operands)
    inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    if inner is not None and name != "while":
        return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
    outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    is_product = name in PRODUCTS and _is_float(eqn.outvars[0].aval)
    flags = [_has_8_bits(operands[0]) & _has_8_bits(operands[1])] if is_product else []
    return (outs if eqn.primitive.multiple_results else [outs]), flags


def _scan(params: Any, operands: list[Any]) -> tuple[list[Any], Flags]:
    if "ft_in" in params:  # jax 0.12
        consts, carries, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        consts, carries = params["num_consts"], params["num_carry"]
    closed, kept, rest = params["jaxpr"], operands[:consts], operands[consts:]

    def step(carry: Any, xs: Any) -> Any:
        outs, flags = _run(closed.jaxpr, closed.consts, [*kept, *carry, *xs])
        return outs[:carries], (outs[carries:], flags)

    given = rest[:carries], rest[carries:]
    length, reverse = params["length"], params["reverse"]
    carry, (ys, flags) = jax.lax.scan(step, *given, length=length, reverse=reverse)
    return [*carry, *ys], [jnp.all(flag) for flag in flags]


def _cond(params: Any, operands: list[Any]) -> tuple[list[Any], Flags]:
    """All branches run, and one result is taken."""
    index, *rest = operands
    outs, flags = zip(*(_run(b.jaxpr, b.consts, rest) for b in params["branches"]), strict=True)
    taken = [jax.lax.select_n(index, *column) for column in zip(*outs, strict=True)]
    return taken, [flag for of_branch in flags for flag in of_branch]


def _has_8_bits(x: jax.Array) -> jax.Array:
    """Whether all values are of E4M3 (4 significant bits, steps of 2^-9) or of E5M2."""
    x = x.astype(jnp.float32)
    significand, _ = jnp.frexp(x)
    return jnp.any(
        jnp.stack(
            [
                jnp.all(
                    (jnp.mod(significand * 2.0**bits, 1) == 0)
                    & (jnp.mod(x * 2.0**step, 1) == 0)
                    & (jnp.abs(x) <= largest)
                )
                for bits, step, largest in ((4, 9, 448.0), (3, 16, 57344.0))
            ]
        )
    )


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


class Outcome(NamedTuple):
    losses: tuple[float, float]
    cosine: float
    products: int
    rounded: int


def train_a_step(plain: Task, wrapped: Task) -> Outcome:
    parameters, outputs = wrapped.function()
    plain_parameters, plain_outputs = plain.function()
    shapes = jax.eval_shape(plain_outputs, plain_parameters)
    keys = jax.random.split(jax.random.key(7), len(shapes))
    targets = [jax.random.normal(k, s.shape) for k, s in zip(keys, shapes, strict=True)]

    def loss_of(outputs: Callable[[Any], list[jax.Array]]) -> Callable[[Any], jax.Array]:
        def loss(parameters: Any) -> jax.Array:
            pairs = zip(outputs(parameters), targets, strict=True)
            return sum(jnp.mean((out.astype(jnp.float32) - t) ** 2) for out, t in pairs)

        return loss

    step = watched(jax.value_and_grad(loss_of(outputs)), parameters)
    (before, grads), flags = step(parameters)
    wanted = jax.jit(jax.grad(loss_of(plain_outputs)))(plain_parameters)
    optimizer = optax.adam(1e-3)
    updates, _ = optimizer.update(grads, optimizer.init(parameters), parameters)
    (after, _), _ = step(optax.apply_updates(parameters, updates))
    rounded = sum(bool(np.all(flag)) for flag in flags)
    return Outcome((float(before), float(after)), _cosine(grads, wanted), len(flags), rounded)


def _cosine(tree: Any, other: Any) -> float:
    a, b = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(t)])
        for t in (tree, other)
    )
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def show(name: str, make: Callable[[], Task]) -> Iterator[str]:
    """Prints what became of a model; gives what is wrong with it."""
    plain = make()
    wrapped = plain.wrapped()
    report = wrapped.report()
    outcome = train_a_step(plain, wrapped)
    done = sum(product.count for product in report.quantized)
    left = sum(product.count for product in report.left)
    before, after = outcome.losses
    print(
        f"{name:<30}{done + left:>5} products, {done:>4} quantized;"
        f" loss {before:.4f} -> {after:.4f}; cosine {outcome.cosine:.4f};"
        f" ran {outcome.rounded} of {outcome.products}"
    )
    for product in report.left:
        place = f"{product.path or '-'} {product.where}"
        print(f"    left {product.count} {product.part} {product.operands}: {product.reason}")
        print(f"        at {place}")
    if report.left:
        yield f"{left} products are left"
    elif outcome.rounded != outcome.products:
        yield f"of {outcome.products} products that ran, {outcome.rounded} are rounded"
    if not (np.isfinite(before) and np.isfinite(after)):
        yield "the loss is not finite"
    if not outcome.cosine > 0.98:
        yield f"gradients have cosine {outcome.cosine:.4f} to the plain model's"


def main(
    flax: Annotated[Path | None, typer.Option(help="A clone of google/flax.")] = None,
    bonsai: Annotated[Path | None, typer.Option(help="A clone of jax-ml/bonsai.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Parts of names.")] = None,
) -> None:
    _folders.update({k: v for k, v in (("flax", flax), ("bonsai", bonsai)) if v is not None})
    wrong: collections.Counter[str] = collections.Counter()
    for name, make in MODELS.items():
        if only and not any(part in name for part in only):
            continue
        try:
            for problem in show(name, make):
                print(f"    WRONG: {problem}")
                wrong[name] += 1
        except (ImportError, KeyError) as error:
            if isinstance(error, KeyError) and error.args[0] not in ("flax", "bonsai"):
                raise
            print(f"{name:<30}skipped: {error} is missing")
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
