"""A small byte-level transformer on real English: what the demo and other experiments train.

The text is CPython's own help topics (`pydoc_data.topics`), which every Python brings along.
Nothing here knows of quantization but `train_pair`, which wraps the model for its second run, and
`with_astype`, which does without the toolkit for its third.
"""

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.nnx import value_and_grad, wrap
from qtoolkit.products import Recipe

CONTEXT = 64
BATCH = 32
VALIDATION_WINDOWS = 192
EVALUATIONS = 20
PEAK_LEARNING_RATE = 6e-3
# Flax's own deviation, 0.09 at width 128, needs twice the steps before attention lowers the loss.
EMBEDDING_DEVIATION = 0.35


class Corpus(NamedTuple):
    """Bytes to train on, bytes to validate on, and what identifies them."""

    training: np.ndarray
    validation: np.ndarray
    description: str


def load_corpus() -> Corpus:
    """CPython's help topics; every tenth topic is for validation only.

    Topics quote one another, so training excludes every paragraph that has a line of more than 30
    characters in common with a validation topic.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "the module pydoc_data.topics is missing, expected the one that ships with "
            "CPython; install the full Python (Debian: python3-full)"
        ) from error
    texts = list(dict.fromkeys(topics[name] for name in sorted(topics)))  # some topics are aliases
    held_out = list(dict.fromkeys(_paragraphs(texts[9::10])))
    lines = {line for paragraph in held_out for line in paragraph.split("\n") if len(line) > 30}
    disjoint = [part for part in _paragraphs(texts) if lines.isdisjoint(part.split("\n"))]
    disjoint = [part for part in disjoint if part not in set(held_out)]
    training, validation = (
        np.frombuffer("\n\n".join(parts).encode(), np.uint8) for parts in (disjoint, held_out)
    )
    digest = hashlib.sha256(training.tobytes() + validation.tobytes()).hexdigest()[:12]
    sizes = f"{training.size:,} bytes for training, {validation.size:,} for validation"
    return Corpus(training, validation, f"text of pydoc_data.topics: {sizes}, sha256 {digest}")


def _paragraphs(texts: list[str]) -> list[str]:
    return [paragraph for text in texts for paragraph in text.split("\n\n")]


class Block(nnx.Module):
    """Attention, then an MLP, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class ByteTransformer(nnx.Module):
    """Logits of the next byte, for every position of a batch of byte strings."""

    def __init__(
        self, width: int = 128, layers: int = 2, heads: int = 4, *, rngs: nnx.Rngs
    ) -> None:
        embedding = nnx.initializers.normal(EMBEDDING_DEVIATION)
        self.embed_bytes = nnx.Embed(256, width, embedding_init=embedding, rngs=rngs)
        self.embed_positions = nnx.Embed(CONTEXT, width, embedding_init=embedding, rngs=rngs)
        self.mix = nnx.Conv(width, width, (4,), padding="CAUSAL", rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # A causal convolution gives every position the last four bytes, which attention alone
        # would take many steps to find.
        x = self.mix(self.embed_bytes(tokens))
        x = x + self.embed_positions(jnp.arange(tokens.shape[-1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def bits_per_byte(model: ByteTransformer, windows: jax.Array) -> jax.Array:
    """Mean cross entropy of the bytes 1.. of each window given those before, in bits."""
    windows = windows.astype(jnp.int32)
    logits = model(windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return losses.mean() / math.log(2)


@nnx.jit
def _train_step(model: ByteTransformer, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    loss, grads = value_and_grad(bits_per_byte)(model, windows)
    optimizer.update(model, grads)
    return loss


evaluate = nnx.jit(bits_per_byte)


@dataclasses.dataclass
class TrainingRun:
    """One model in training: its validation curve and the seconds of every step."""

    model: ByteTransformer
    optimizer: nnx.Optimizer
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def step(self, windows: jax.Array) -> None:
        start = time.perf_counter()
        jax.block_until_ready(_train_step(self.model, self.optimizer, windows))
        self.seconds.append(time.perf_counter() - start)

    @property
    def step_seconds(self) -> float:
        """The median step, without the first one, which compiles, if there are others."""
        return float(np.median(self.seconds[1:] or self.seconds))

    @property
    def final_loss(self) -> float:
        """Mean of the last five evaluations, in bits per byte."""
        return float(np.mean(self.losses[-5:]))


class TrainingPair(NamedTuple):
    """Runs of one initialisation on the same batches, and the steps of their evaluations.

    Attributes:
      wide: In float32.
      quantized: Wrapped by a recipe.
      evaluated_at: Steps.
      naive: By `astype` alone, where that was asked for.
    """

    wide: TrainingRun
    quantized: TrainingRun
    evaluated_at: list[int]
    naive: TrainingRun | None = None

    @property
    def runs(self) -> list[TrainingRun]:
        return [self.wide, self.quantized, *([] if self.naive is None else [self.naive])]


def train_pair(
    corpus: Corpus,
    recipe: Recipe,
    *,
    steps: int,
    seed: int,
    naive: DTypeLike | None = None,
    report: Callable[[int, TrainingPair], None] = lambda step, pair: None,
) -> TrainingPair:
    """Train one model in float32 and a copy of it wrapped by `recipe`, each step with both.

    Args:
      corpus: Where the batches come from.
      recipe: For the copy.
      steps: Optimizer steps of each.
      seed: Of the initialisation and of the batches.
      naive: A dtype, for a third model `with_astype`.
      report: Called with the number of steps that all models did: before the first step, after
        each model's first one, which compiles, and after every step.
    """
    model = ByteTransformer(rngs=nnx.Rngs(seed))
    models = [model, wrap(nnx.clone(model), recipe)]
    if naive is not None:
        models.append(with_astype(model, naive))
    float32, quantized, *rest = (
        TrainingRun(m, nnx.Optimizer(m, _transform(steps), wrt=nnx.Param)) for m in models
    )
    pair = TrainingPair(float32, quantized, [], *rest)
    batches = np.random.default_rng(seed)
    held_out_windows = validation_windows(corpus)
    evaluate_at = {round(steps * i / EVALUATIONS) for i in range(1, EVALUATIONS + 1)} - {0}
    report(0, pair)
    for step in range(1, steps + 1):
        starts = batches.integers(0, corpus.training.size - CONTEXT, BATCH)
        windows = jnp.asarray(_windows(corpus.training, starts))
        for run in pair.runs:
            run.step(windows)
            if step == 1:
                report(0, pair)
        if step in evaluate_at:
            pair.evaluated_at.append(step)
            for run in pair.runs:
                run.losses.append(float(evaluate(run.model, held_out_windows)))
        report(step, pair)
    return pair


def continuation(
    model: ByteTransformer, prompt: bytes, length: int, *, temperature: float = 0.5, seed: int = 0
) -> str:
    """The text that the model writes after `prompt`, which has at least `CONTEXT` bytes."""
    window = jnp.asarray(np.frombuffer(prompt[-CONTEXT:], np.uint8).astype(np.int32))
    keys = jax.random.split(jax.random.key(seed), length)
    written = _sample(model, window, keys, temperature)
    return bytes(np.asarray(written, np.uint8)).decode(errors="replace")


@nnx.jit
def _sample(
    model: ByteTransformer, window: jax.Array, keys: jax.Array, temperature: jax.Array
) -> jax.Array:
    def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model(window[None])[0, -1]
        byte = jax.random.categorical(key, logits / temperature)
        return jnp.append(window[1:], byte), byte

    return lax.scan(next_byte, window, keys)[1]


def with_astype(model: ByteTransformer, dtype: DTypeLike) -> ByteTransformer:
    """A copy of `model` that only casts the operands of its matmuls to `dtype` and back.

    There is no scale, and autodiff goes back through the casts: it rounds cotangents to `dtype`,
    too. The recipes must be better than this.
    """
    copy = nnx.clone(model)
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, nnx.Linear | nnx.LinearGeneral):
            module.dot_general = _ByAstype(dtype, lax.dot_general)
        elif isinstance(module, nnx.Conv):
            module.conv_general_dilated = _ByAstype(dtype, lax.conv_general_dilated)
        elif isinstance(module, nnx.MultiHeadAttention):
            module.attention_fn = _AttentionByAstype(dtype)
    return copy


@dataclasses.dataclass(frozen=True)
class _ByAstype:
    """A matmul or convolution of two arrays that were cast to `dtype` and back."""

    dtype: DTypeLike
    product: Callable[..., jax.Array]

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return self.product(_cast(lhs, self.dtype), _cast(rhs, self.dtype), *args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _AttentionByAstype:
    dtype: DTypeLike

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, mask: jax.Array, **_: Any
    ) -> jax.Array:
        query, key, value = (_cast(x, self.dtype) for x in (query, key, value))
        scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / math.sqrt(query.shape[-1])
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        return jnp.einsum("...hqk,...khd->...qhd", _cast(weights, self.dtype), value)


def _cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return x.astype(dtype).astype(x.dtype)


@functools.cache  # a new transform is a new function, for which the training step compiles again
def _transform(steps: int) -> optax.GradientTransformation:
    warmup = max(1, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK_LEARNING_RATE, warmup, max(steps, 2))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))


def validation_windows(corpus: Corpus) -> jax.Array:
    """The same windows for everyone, spread evenly over the validation text."""
    starts = np.linspace(0, corpus.validation.size - CONTEXT - 1, VALIDATION_WINDOWS).astype(int)
    return jnp.asarray(_windows(corpus.validation, starts))


def _windows(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return text[starts[:, None] + np.arange(CONTEXT + 1)]
