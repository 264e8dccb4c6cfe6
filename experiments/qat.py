"""int4 weights and activations on scikit-learn's digits: quantized after training, or trained so.

Command: python experiments/qat.py [--seed 0] [--seeds 3] [--out qat.json] [--quick]
Needs: pip install 'qtoolkit[experiments]' (scikit-learn, whose digits are 1,797 images of 8 x 8).

For each seed a float32 classifier (64-48-48-10) is trained, and then compared on a third of the
images that it has not seen:

  PTQ  the trained model with int4 operands and one static scale for each, calibrated on 512
       training images: by the largest magnitude, and by the least squared error
  QAT  the same model trained on for as many steps as before, with learned scales (LSQ)
  wide the same model trained on for as many steps, unquantized: what the further steps alone do

Claim: QAT has the lower loss than PTQ by either observer, on each of three seeds. Seen with 600
steps (loss of PTQ by absmax, by mse, of QAT): 0.154, 0.108, 0.098; 0.174, 0.162, 0.117; 0.167,
0.151, 0.140. The further steps are part of that: unquantized they give 0.092, 0.123, 0.122.
"""

import json
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx

import qtoolkit as qt

INT4 = qt.Recipe(qt.BlockFormat.tensor("int4"), gradient=None)
BATCH = 64


class Classifier(nnx.Module):
    def __init__(self, seed: int):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(64, 48, rngs=rngs)
        self.second = nnx.Linear(48, 48, rngs=rngs)
        self.last = nnx.Linear(48, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss_fn(model: nnx.Module, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


@nnx.jit
def step(model: nnx.Module, optimizer: nnx.Optimizer, batch: tuple[jax.Array, jax.Array]) -> None:
    optimizer.update(model, nnx.grad(loss_fn)(model, batch))


@nnx.jit
def evaluated(model: nnx.Module, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = model(x)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, jnp.mean(logits.argmax(-1) == labels)


def trained(model, x, labels, *, steps: int, rate: float, seed: int):
    """The model after `steps` steps of Adam on batches that `seed` draws."""
    optimizer = nnx.Optimizer(
        model, optax.adam(optax.cosine_decay_schedule(rate, steps)), wrt=nnx.Param
    )
    order = np.random.default_rng(seed)
    for _ in range(steps):
        rows = order.choice(len(x), BATCH, replace=False)
        step(model, optimizer, (x[rows], labels[rows]))
    return model


def run(seed: int, steps: int) -> dict[str, tuple[float, float]]:
    """Loss and accuracy on unseen images, for each way."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    shuffled = np.random.default_rng(seed).permutation(len(digits.data))
    x, labels = digits.data[shuffled].astype(np.float32) / 16, digits.target[shuffled]
    split = 2 * len(x) // 3
    seen, unseen = (x[:split], labels[:split]), (x[split:], labels[split:])

    wide = trained(Classifier(seed), *seen, steps=steps, rate=3e-3, seed=seed)
    results = {"float32": wide}
    quantized = qt.nnx.wrap(wide, INT4)
    batches = [seen[0][i : i + BATCH] for i in range(0, 512, BATCH)]
    for observer in ("absmax", "mse"):
        found = qt.nnx.calibrate(quantized, batches, observer)
        results[f"PTQ, {observer}"] = qt.nnx.freeze(quantized, found)
    learned = qt.nnx.wrap(nnx.clone(wide), qt.recipes.int4_lsq)
    qt.nnx.start_scales(learned, batches[0])
    results["QAT, LSQ"] = trained(learned, *seen, steps=steps, rate=1e-3, seed=seed + 1)
    results["wide, further"] = trained(
        nnx.clone(wide), *seen, steps=steps, rate=1e-3, seed=seed + 1
    )
    return {
        name: tuple(float(value) for value in evaluated(model, *unseen))
        for name, model in results.items()
    }


def main(
    seed: Annotated[int, typer.Option(help="The first one.")] = 0,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="A JSON file of the table.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="60 steps instead of 600.")] = False,
) -> None:
    steps = 60 if quick else 600
    table = {s: run(s, steps) for s in range(seed, seed + seeds)}
    print(f"{steps} steps, loss and accuracy on unseen images")
    print(f"{'':<16}" + "".join(f"{'seed ' + str(s):>18}" for s in table))
    for name in next(iter(table.values())):
        cells = (f"{row[name][0]:9.4f}{row[name][1]:9.2%}" for row in table.values())
        print(f"{name:<16}" + "".join(cells))
    wins = sum(
        row["QAT, LSQ"][0] < min(row["PTQ, absmax"][0], row["PTQ, mse"][0])
        for row in table.values()
    )
    print(f"QAT has the lower loss than both PTQ in {wins} of {len(table)} seeds")
    if out is not None:
        out.write_text(json.dumps({"steps": steps, "results": table}, indent=2))


if __name__ == "__main__":
    typer.run(main)
