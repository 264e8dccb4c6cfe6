"""A training step of a transformer block stack, plain and wrapped for FP8.

Command: python experiments/benchmarks/training.py   (nothing else should run on the machine)
Claim: emulated FP8 costs at most a tenth of a step (d = 512, 1,024 tokens, two blocks, float32).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _timing import interleaved, print_table
from flax import nnx

from qtoolkit.demo import Block
from qtoolkit.nnx import wrap

WIDTH, HEADS, BLOCKS, BATCH, LENGTH = 512, 8, 2, 8, 128


class Stack(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(WIDTH, HEADS, rngs=rngs) for _ in range(BLOCKS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        for block in self.blocks:
            x = block(x, mask)
        return x


@nnx.jit
def step(model: Stack, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def stepper(model: Stack, x: jax.Array) -> Callable[[], Any]:
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
    return lambda: step(model, optimizer, x)


def main() -> None:
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))
    plain = Stack(rngs=nnx.Rngs(0))
    functions = {
        "plain float32": stepper(plain, x),
        "qtoolkit.nnx.wrap, E4M3 / E5M2": stepper(wrap(nnx.clone(plain)), x),
    }
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    title = f"training step, {BLOCKS} blocks, d = {WIDTH}, {BATCH * LENGTH:,} tokens"
    print_table(title, interleaved(functions, runs=20), "plain float32")


if __name__ == "__main__":
    main()
