"""How far an optimizer with its moments in few bits stays from optax's: losses and bytes.

Command: python experiments/optim_states.py [--steps 400] [--seeds 3] [--muon] [--state e4m3fn ...]
Aim: with moments in E4M3 (`qtoolkit.optim.quantize_state`) the validation loss, the mean of the
last five of twenty evaluations, is within 0.5 % of AdamW's, in at most 0.3 of the bytes.

The model is the demo's byte-level transformer on CPython's help topics; the same initialisation and
the same batches for all. Rows that are not ours show what the parts are for: "naive" rounds both
moments to E4M3 blocks as they are, to nearest or stochastically.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from benchmarks._language_model import (
    CONTEXT,
    ByteTransformer,
    bits_per_byte,
    load_corpus,
    validation_windows,
)
from flax import nnx

import qtoolkit as qt
from qtoolkit.optim import quantize_state

EVALUATIONS, BATCH, PEAK = 20, 32, 3e-3
BLOCKS = qt.BlockFormat(element="e4m3fn", block=(128,))

Transform = optax.GradientTransformation


def naive(tx: Transform, rounding: str) -> Transform:
    """Both moments of `tx` rounded to blocks of E4M3 after each step, and nothing else."""

    def rounded(x: jax.Array, step: jax.Array) -> jax.Array:
        if x.size < 4096:
            return x
        key = jax.random.fold_in(jax.random.key(0), step) if rounding == "stochastic" else None
        spec = BLOCKS if x.shape[-1] >= 128 else qt.BlockFormat.token("e4m3fn")
        return qt.quantize(x, spec, rounding=rounding, key=key).dequantize()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        step, inner = state
        updates, inner = tx.update(updates, inner, params)
        return updates, (step + 1, jax.tree.map(lambda x: rounded(x, step), inner))

    return Transform(lambda params: (jnp.int32(0), tx.init(params)), update)


STATES: dict[str, Callable[[Transform], Transform]] = {
    "float32": lambda tx: tx,
    "e4m3fn": lambda tx: quantize_state(tx, "e4m3fn"),
    "e5m2": lambda tx: quantize_state(tx, "e5m2"),
    "int8": lambda tx: quantize_state(tx, "int8"),
    "mxfp8_e4m3": lambda tx: quantize_state(tx, "mxfp8_e4m3"),
    "e4m3fn nearest": lambda tx: quantize_state(tx, "e4m3fn", rounding="nearest_even"),
    "int8 nearest": lambda tx: quantize_state(tx, "int8", rounding="nearest_even"),
    "nvfp4": lambda tx: quantize_state(tx, "nvfp4"),
    "naive nearest": lambda tx: naive(tx, "nearest_even"),
    "naive stochastic": lambda tx: naive(tx, "stochastic"),
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(graph: Any, tx: Transform, params: Any, state: Any, batches: jax.Array) -> Any:
    """One step for each of `batches`."""

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return bits_per_byte(nnx.merge(graph, params), batch)

    def step(carry: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, state), values = jax.lax.scan(step, (params, state), batches)
    return params, state, values.mean()


@functools.partial(jax.jit, static_argnums=0)
def evaluate(graph: Any, params: Any, windows: jax.Array) -> jax.Array:
    return bits_per_byte(nnx.merge(graph, params), windows)


def final_loss(
    model: nnx.Module, tx: Transform, batches: np.ndarray, windows: jax.Array
) -> tuple[float, int]:
    """The mean of the last five evaluations, and the bytes of the optimizer's state."""
    graph, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    state = tx.init(params)
    losses = []
    for chunk in np.array_split(batches, EVALUATIONS):
        params, state, _ = train(graph, tx, params, state, jnp.asarray(chunk))
        losses.append(float(evaluate(graph, params, windows)))
    return float(np.mean(losses[-5:])), sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def main(
    steps: Annotated[int, typer.Option(min=1)] = 400,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    width: int = 128,
    b2: float = 0.999,
    muon: Annotated[bool, typer.Option(help="Muon in place of AdamW, peak 0.02.")] = False,
    state: Annotated[list[str] | None, typer.Option(help="Names; all if left out.")] = None,
) -> None:
    names = ["float32", *(name for name in state or STATES if name != "float32")]
    unknown = [name for name in names if name not in STATES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}, expected one of {', '.join(STATES)}")
    corpus = load_corpus()
    windows = validation_windows(corpus)
    peak = 0.02 if muon else PEAK
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), max(steps, 2))
    plain = optax.contrib.muon(schedule) if muon else optax.adamw(schedule, b2=b2)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), plain)
    kind = "Muon" if muon else f"AdamW, b2 = {b2}"
    print(f"{corpus.description}; {steps} steps; {seeds} seeds; {kind}")
    print(f"{'moments':<18}{'loss':>8}{'to float32':>12}{'largest':>9}{'bytes':>7}")
    baseline: np.ndarray | None = None
    wide_bytes = 0
    for name in names:
        tx = STATES[name](optimizer)
        losses = []
        for seed in range(seeds):
            starts = np.random.default_rng(seed).integers(
                0, corpus.training.size - CONTEXT, (steps, BATCH)
            )
            batches = corpus.training[starts[..., None] + np.arange(CONTEXT + 1)]
            model = ByteTransformer(width=width, rngs=nnx.Rngs(seed))
            loss, nbytes = final_loss(model, tx, batches, windows)
            losses.append(loss)
        if baseline is None:
            baseline, wide_bytes = np.array(losses), nbytes
        gaps = np.array(losses) / baseline - 1
        print(
            f"{name:<18}{np.mean(losses):8.4f}{gaps.mean():+12.3%}{max(gaps, key=abs):+9.3%}"
            f"{nbytes / wide_bytes:7.3f}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
