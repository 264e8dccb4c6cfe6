"""A training step on a GPU: bfloat16, FP8 by the GPU's own products, and emulated.

Command: python experiments/benchmarks/gpu_training.py   (JAX with CUDA; nothing else on the GPU)
What is timed: a step of AdamW of two transformer blocks, d = 4,096, on 8,192 tokens in bfloat16;
`te_current` with `arithmetic="native"` and emulated, and MXFP8, beside the plain step and Flax's
fp8_ops.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from _results import Folder, Quick, Recorder
from _timing import device_of, interleaved
from _training_models import (
    LinenStack,
    NnxStack,
    Running,
    distance_to_one,
    linen_step,
    nnx_step,
)
from flax import linen, nnx
from gpu import PLAIN, RECIPES

import qtoolkit as qt


def main(
    platform: Annotated[str, typer.Option(help='"gpu"; "cpu" to try the script out.')] = "gpu",
    quick: Quick = False,
    results: Folder = None,
) -> None:
    if (device := device_of(platform)) is None:
        return
    width, blocks, tokens = (256, 1, 256) if quick else (4096, 2, 8192)
    length = min(tokens, 1024)
    with Recorder("gpu_training", results, quick) as recorder, jax.default_device(device):
        recorder.origin["host"] += f", {device.device_kind}"
        x = jax.random.normal(jax.random.key(1), (tokens // length, length, width), jnp.bfloat16)
        model = NnxStack(width, width // 128, blocks, rngs=nnx.Rngs(0))
        models = {PLAIN: model}
        for name, recipe in RECIPES.items():
            models[name] = qt.nnx.wrap(nnx.clone(model), recipe)
        steps = {name: nnx_step(m, distance_to_one, x) for name, m in models.items()}
        peer = LinenStack(width, width // 128, blocks, linen.Fp8DotGeneral)
        steps["flax fp8_ops"] = linen_step(peer, x)
        seconds = interleaved({name: Running(step) for name, step in steps.items()}, runs=15)
        title = f"step of bfloat16, {blocks} blocks, d = {width:,}, {tokens:,} tokens"
        recorder.table(title, seconds, PLAIN)


if __name__ == "__main__":
    typer.run(main)
