"""A training step, plain and in emulated FP8: its time, tracing, compiling and peak memory.

Command: python experiments/benchmarks/training.py   (nothing else should run on the machine)
Target, which a run judges: emulated FP8 costs at most 1.05 times the plain step at d = 512 (two
blocks, 1,024 tokens), 1.35 times at d = 64 (a language model of six blocks, 512 tokens), and less
than with qwix or Flax's fp8_ops; tracing takes at most twice as long, compiling three times.

Tracing is `lower`, compiling is `compile` of what it returns; before each, all caches are cleared.
Memory is that of temporary arrays, as the compiled program states it. qwix is left out of the
language model: 0.1.8 fails in the gradient of its convolution. At d = 512 the two recipes with
blocks have rows of their own, without a target.
"""

import gc
import time
from typing import Annotated, Any

import jax
import numpy as np
import typer
from _results import Folder, Quick, Recorder, at_most, faster_by
from _timing import interleaved
from _training_models import (
    LinenStack,
    NnxStack,
    Running,
    Step,
    by_qwix,
    distance_to_one,
    language_model,
    linen_step,
    nnx_step,
)
from flax import linen, nnx

import qtoolkit as qt

PLAIN, WRAPPED = "plain float32", "wrapped, E4M3 / E5M2"
BLOCKS = {"wrapped, MXFP8": qt.recipes.mxfp8, "wrapped, NVFP4": qt.recipes.nvfp4}


def trace_and_compile(step: Step) -> tuple[float, float, int]:
    """Seconds of each, from nothing, and the bytes of temporary arrays."""
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    # A new function: JAX keeps what it knows of the old one.
    lowered = jax.jit(lambda *arguments: step.function(*arguments)).lower(*step.arguments)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    return traced - start, done - traced, compiled.memory_analysis().temp_size_in_bytes


def measure(
    recorder: Recorder, title: str, steps: dict[str, Step], limit: float, runs: int, turns: int
) -> None:
    # Before anything is compiled to run: clearing the caches would cost the steps theirs.
    found: dict[str, list[Any]] = {name: [] for name in steps}
    for _ in range(turns + 1):  # the first turn warms up
        for name, step in steps.items():
            found[name].append(trace_and_compile(step))
    seconds = interleaved({name: Running(step) for name, step in steps.items()}, runs=runs)
    peers = [name for name in steps if name not in (PLAIN, WRAPPED, *BLOCKS)]
    promises = {WRAPPED: [at_most(limit, PLAIN), *([faster_by(1, *peers)] if peers else [])]}
    recorder.table(f"training step, {title}", seconds, PLAIN, promises)
    for column, what, factor in ((0, "tracing", 2), (1, "compiling", 3)):
        seconds = {n: np.array([row[column] for row in rows[1:]]) for n, rows in found.items()}
        promises = {WRAPPED: [at_most(factor, PLAIN)]}
        recorder.table(f"{what} it, {title}", seconds, PLAIN, promises)
    peaks = {name: rows[0][2] for name, rows in found.items()}
    recorder.memory(f"temporary memory of it, {title}", peaks, PLAIN)


def nnx_steps(
    model: nnx.Module, loss: Any, batch: jax.Array, recipes: dict[str, qt.Recipe], peers: bool
) -> dict[str, Step]:
    models = {PLAIN: model, WRAPPED: qt.nnx.wrap(nnx.clone(model))}
    models |= {name: qt.nnx.wrap(nnx.clone(model), recipe) for name, recipe in recipes.items()}
    if peers and (quantized := by_qwix(model, batch)) is not None:
        models["qwix"] = quantized
    return {name: nnx_step(m, loss, batch) for name, m in models.items()}


def linen_steps(width: int, heads: int, blocks: int, batch: jax.Array) -> dict[str, Step]:
    plain = LinenStack(width, heads, blocks)
    modules = {
        PLAIN: plain,
        WRAPPED: qt.linen.wrap(plain),
        "flax fp8_ops": LinenStack(width, heads, blocks, linen.Fp8DotGeneral),
    }
    return {name: linen_step(module, batch) for name, module in modules.items()}


def main(
    runs: Annotated[int, typer.Option(help="Steps of each row.")] = 25,
    turns: Annotated[int, typer.Option(help="Times that each is traced, compiled.")] = 5,
    quick: Quick = False,
    results: Folder = None,
) -> None:
    counts = (3, 1) if quick else (runs, turns)
    with Recorder("training", results, quick) as recorder:
        for width, heads, blocks, tokens, limit in ((512, 8, 2, 1024, 1.05), (64, 4, 6, 512, 1.35)):
            if quick:
                blocks, tokens = 1, 128
            x = jax.random.normal(jax.random.key(1), (tokens // 128, 128, width))
            title = f"{blocks} blocks, d = {width}, {tokens:,} tokens"
            stack = NnxStack(width, heads, blocks, rngs=nnx.Rngs(0))
            recipes = BLOCKS if width == 512 else {}
            steps = nnx_steps(stack, distance_to_one, x, recipes, peers=True)
            measure(recorder, f"nnx, {title}", steps, limit, *counts)
            steps = linen_steps(width, heads, blocks, x)
            measure(recorder, f"linen, {title}", steps, limit, *counts)
        if not quick:
            title = "nnx, language model of six blocks, d = 64, 512 tokens"
            steps = nnx_steps(*language_model(width=64, tokens=512), recipes={}, peers=False)
            measure(recorder, title, steps, 1.35, *counts)


if __name__ == "__main__":
    typer.run(main)
