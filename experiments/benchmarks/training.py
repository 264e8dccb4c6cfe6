"""A training step, plain and wrapped for FP8: how long it takes, to trace and to compile, too.

Command: python experiments/benchmarks/training.py   (nothing else should run on the machine)
Claim: emulated FP8 costs at most 1.05 times the plain step at d = 512 (two blocks, 1,024 tokens),
1.35 times at d = 64 (a language model of six blocks, 512 tokens); tracing takes at most twice as
long, compiling three times.

Tracing is `lower`, compiling is `compile` of what it returns; before each, all caches are cleared.
"""

import gc
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from _results import Folder, Quick, Recorder, at_most
from _timing import interleaved
from flax import nnx

from qtoolkit.demo import CONTEXT, Block, ByteTransformer, bits_per_byte
from qtoolkit.nnx import wrap

PLAIN, WRAPPED = "plain float32", "qtoolkit.nnx.wrap, E4M3 / E5M2"

Loss = Callable[[nnx.Module, jax.Array], jax.Array]


class Stack(nnx.Module):
    """Blocks alone: nearly all of a step is matrix products."""

    def __init__(self, width: int, heads: int, blocks: int, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(blocks)])

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        for block in self.blocks:
            x = block(x, mask)
        return x


def distance_to_one(model: Stack, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


def stack(width: int, tokens: int) -> tuple[nnx.Module, Loss, jax.Array]:
    length = 128
    x = jax.random.normal(jax.random.key(1), (tokens // length, length, width))
    return Stack(width, heads=8, blocks=2, rngs=nnx.Rngs(0)), distance_to_one, x


def language_model(width: int, tokens: int) -> tuple[nnx.Module, Loss, jax.Array]:
    # One byte more than the context: the last one is only predicted.
    windows = jax.random.randint(jax.random.key(1), (tokens // CONTEXT, CONTEXT + 1), 0, 256)
    model = ByteTransformer(width, layers=6, heads=4, rngs=nnx.Rngs(0))
    return model, bits_per_byte, windows.astype(jnp.uint8)


class Training:
    """A model, its optimizer and its step."""

    def __init__(self, model: nnx.Module, loss: Loss, batch: jax.Array) -> None:
        optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
        self.arguments = model, optimizer, batch

        def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
            value, grads = nnx.value_and_grad(loss)(model, batch)
            optimizer.update(model, grads)
            return value

        self.make_jitted = lambda: nnx.jit(step)
        self.jitted = self.make_jitted()

    def step(self) -> jax.Array:
        return self.jitted(*self.arguments)

    def trace_and_compile(self) -> tuple[float, float]:
        """Seconds of each, from nothing."""
        jax.clear_caches()
        gc.collect()
        jitted = self.make_jitted()
        start = time.perf_counter()
        lowered = jitted.lower(*self.arguments)
        traced = time.perf_counter()
        lowered.compile()
        return traced - start, time.perf_counter() - traced


def trace_and_compile(
    trainings: dict[str, Training], runs: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Seconds of tracing and seconds of compiling; the first turn warms up."""
    seconds: dict[str, list[Any]] = {name: [] for name in trainings}
    for _ in range(runs + 1):
        for name, training in trainings.items():
            seconds[name].append(training.trace_and_compile())
    both = {name: np.asarray(pairs)[1:] for name, pairs in seconds.items()}
    return {n: pairs[:, 0] for n, pairs in both.items()}, {n: p[:, 1] for n, p in both.items()}


def measure(
    recorder: Recorder,
    title: str,
    problem: tuple[nnx.Module, Loss, jax.Array],
    step_limit: float,
    runs: tuple[int, int],
) -> None:
    plain, loss, batch = problem
    models = {PLAIN: plain, WRAPPED: wrap(nnx.clone(plain))}
    trainings = {name: Training(model, loss, batch) for name, model in models.items()}
    # Before anything is compiled: clearing the caches would cost the steps theirs.
    traced, compiled = trace_and_compile(trainings, runs[1])
    steps = interleaved({name: t.step for name, t in trainings.items()}, runs=runs[0])
    for what, seconds, limit in (
        ("training step", steps, step_limit),
        ("tracing it", traced, 2),
        ("compiling it", compiled, 3),
    ):
        recorder.table(f"{what}, {title}", seconds, PLAIN, {WRAPPED: [at_most(limit, PLAIN)]})


def main(
    runs: Annotated[int, typer.Option(help="Steps of each row.")] = 25,
    compilations: Annotated[int, typer.Option(help="Times that each is traced, compiled.")] = 5,
    quick: Quick = False,
    results: Folder = None,
) -> None:
    counts = (3, 1) if quick else (runs, compilations)
    with Recorder("training", results, quick) as recorder:
        title = "two blocks, d = 512, 1,024 tokens"
        measure(recorder, title, stack(width=512, tokens=1024), 1.05, counts)
        title = "language model of six blocks, d = 64, 512 tokens"
        measure(recorder, title, language_model(width=64, tokens=512), 1.35, counts)


if __name__ == "__main__":
    typer.run(main)
