"""How far low-precision training stays from bfloat16: three models, every preset, paired seeds.

Command: python experiments/fp8_training.py [--steps 400] [--seeds 3] [--model cnn ...]
    [--recipe te_current ...] [--results experiments/results] [--plot gaps.png] [--quick]
Needs: pip install '.[experiments]' (scikit-learn for its digits; matplotlib for --plot).
Aim: the mean gap of an FP8 recipe to bfloat16 in validation loss (each loss the mean of the last
five of twenty evaluations) is at most 0.5 %, that of nvfp4 at most 3 %.

"transformer" is the demo's byte-level transformer on CPython's help topics; "cnn" two convolutions
and two dense layers on scikit-learn's digits, 8 x 8, a third of them for validation; "cnn_fashion"
the same on Fashion-MNIST with 2,000 of its test images, where its Debian package
(dataset-fashion-mnist) is installed. Labels of images are smoothed by 0.1, so that the loss does
not go to 0, where relative gaps would be noise.

The operands of all matmuls and convolutions are rounded, forward and backward, also in the last
layer. The source of nvfp4 (arXiv:2509.25149) does not quantize the last layers: neither does
"nvfp4, head in float32". "float32" rounds nothing, "bfloat16" the operands and nothing else. For a
seed, all recipes have the same initialisation and the same batches. With --results every run is
stored when it is done, and one that is stored is not run again: an interrupted command goes on.
"""

import functools
import gzip
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from benchmarks._gaps import figure_of_gaps, text_of_gaps
from benchmarks._language_model import (
    CONTEXT,
    ByteTransformer,
    bits_per_byte,
    load_corpus,
    validation_windows,
)
from benchmarks._results import Folder, Quick, Rows
from flax import nnx

import qtoolkit as qt

EVALUATIONS = 20
BFLOAT16 = qt.BlockFormat.tensor("bfloat16", scale=None)
PRESETS = (
    *("te_current", "te_delayed_hybrid", "token_scaled", "mxfp8", "deepseek_v3", "fp8_lm"),
    *("fnuz_amd", "weight_only_e4m3", "nvfp4", "int8_qat", "int4_lsq", "w4a16"),
)
RECIPES: dict[str, qt.Recipe | qt.Rules[qt.Recipe] | None] = {
    "float32": None,
    "bfloat16": qt.Recipe(BFLOAT16, BFLOAT16),
    **{name: getattr(qt.recipes, name) for name in PRESETS},
    "nvfp4, head in float32": qt.Rules({"head": None}, default=qt.recipes.nvfp4),
}
FASHION = Path("/usr/share/datasets/fashion-mnist")


class Problem(NamedTuple):
    """A model and its data.

    Attributes:
      make: The model of a seed.
      loss: Of a model and a batch, whose first array is the model's input.
      draw: A batch of the training data.
      held_out: A batch of the validation data, all of them.
      rate: The largest learning rate.
      data: What identifies the data.
    """

    make: Callable[[int], Any]
    loss: Callable[[Any, Any], jax.Array]
    draw: Callable[[np.random.Generator], Any]
    held_out: Any
    rate: float
    data: str


def transformer(quick: bool) -> Problem:
    corpus, count = load_corpus(), 2 if quick else 32
    sizes = {"width": 32, "layers": 1, "heads": 2} if quick else {}

    def draw(generator: np.random.Generator) -> Any:
        starts = generator.integers(0, corpus.training.size - CONTEXT, count)
        return (jnp.asarray(corpus.training[starts[:, None] + np.arange(CONTEXT + 1)]),)

    return Problem(
        make=lambda seed: ByteTransformer(**sizes, rngs=nnx.Rngs(seed)),
        loss=lambda model, batch: bits_per_byte(model, batch[0]),
        draw=draw,
        held_out=(validation_windows(corpus)[: 2 if quick else None],),
        rate=6e-3,
        data=corpus.description,
    )


class Convolutional(nnx.Module):
    """Of images [..., height, width, 1], ten logits."""

    def __init__(self, side: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(32 * (side // 4) ** 2, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.first(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.second(x)), (2, 2), (2, 2))
        return self.head(nnx.relu(self.hidden(x.reshape(*x.shape[:-3], -1))))


def smoothed_cross_entropy(model: Any, batch: Any) -> jax.Array:
    images, labels = batch
    wanted = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
    return optax.softmax_cross_entropy(model(images), wanted).mean()


class Images(NamedTuple):
    """Images of values in [0, 1] and their labels; the first `training` of them are to train on."""

    images: np.ndarray
    labels: np.ndarray
    training: int
    name: str


def digits() -> Images:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return Images(data.images[order] / 16, data.target[order], 1198, "scikit-learn's digits")


def fashion() -> Images:
    if not FASHION.is_dir():
        raise FileNotFoundError(
            f"{FASHION}: there is none; apt-get install dataset-fashion-mnist, or leave out "
            "--model cnn_fashion"
        )
    parts = [_idx(FASHION / f"{part}-images-idx3-ubyte.gz") for part in ("train", "t10k")]
    labels = [_idx(FASHION / f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k")]
    return Images(
        np.concatenate([parts[0], parts[1][:2000]]) / 255,
        np.concatenate([labels[0], labels[1][:2000]]),
        len(parts[0]),
        "Fashion-MNIST",
    )


def _idx(path: Path) -> np.ndarray:
    """A file of the MNIST family: unsigned bytes behind the sizes of the axes."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">u4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def cnn(load: Callable[[], Images], quick: bool) -> Problem:
    images, labels, training, data = load()
    x, y = jnp.asarray(images[..., None], jnp.float32), jnp.asarray(labels, jnp.int32)

    def draw(generator: np.random.Generator) -> Any:
        rows = generator.choice(training, 16 if quick else 64, replace=False)
        return x[rows], y[rows]

    return Problem(
        make=lambda seed: Convolutional(images.shape[1], nnx.Rngs(seed)),
        loss=smoothed_cross_entropy,
        draw=draw,
        held_out=(x[training:], y[training:]),
        rate=2e-3,
        data=f"{data}, {training} + {len(labels) - training} images",
    )


MODELS: dict[str, Callable[[bool], Problem]] = {
    "transformer": transformer,
    "cnn": functools.partial(cnn, digits),
    "cnn_fashion": functools.partial(cnn, fashion),
}


@functools.cache  # another function would compile again
def steps_of(loss: Any) -> tuple[Any, Any]:
    """A step of training, and the loss on held-out data."""

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer, batch: Any) -> None:
        _, grads = qt.nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)

    return step, nnx.jit(loss)


@functools.cache
def transform(rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), max(steps, 2))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))


def trained(
    problem: Problem, recipe: qt.Recipe | qt.Rules[qt.Recipe] | None, steps: int, seed: int
) -> dict[str, Any]:
    """The losses of one run on held-out data, after every twentieth of the steps."""
    model, batches = problem.make(seed), np.random.default_rng(seed)
    if recipe is not None:
        model = qt.nnx.wrap(model, recipe)
        if isinstance(recipe, qt.Recipe) and any(recipe.learned):
            inputs, *_ = problem.draw(np.random.default_rng(seed))
            qt.nnx.start_scales(model, (inputs[:, :-1] if inputs.ndim == 2 else inputs,))
    optimizer = nnx.Optimizer(model, transform(problem.rate, steps), wrt=nnx.Param)
    step, evaluate = steps_of(problem.loss)
    evaluate_at = sorted({round(steps * i / EVALUATIONS) for i in range(1, EVALUATIONS + 1)} - {0})
    losses, started = [], time.perf_counter()
    for number in range(1, steps + 1):
        step(model, optimizer, problem.draw(batches))
        if number in evaluate_at:
            losses.append(float(evaluate(model, problem.held_out)))
    seconds = round(time.perf_counter() - started, 1)
    return {"data": problem.data, "at": evaluate_at, "losses": losses, "seconds": seconds}


def main(
    steps: Annotated[int, typer.Option(min=1)] = 400,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    model: Annotated[list[str] | None, typer.Option(help="Names; all if left out.")] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Names; all if left out.")] = None,
    results: Folder = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG of the gaps.")] = None,
    quick: Quick = False,
) -> None:
    for given, known in ((model, MODELS), (recipe, RECIPES)):
        unknown = [name for name in given or () if name not in known]
        if unknown:
            raise typer.BadParameter(f"{unknown[0]!r}, expected one of {', '.join(known)}")
    steps, seeds = (min(steps, 4), min(seeds, 2)) if quick else (steps, seeds)
    names = [name for name in RECIPES if not recipe or name in ("float32", "bfloat16", *recipe)]
    here = [name for name in MODELS if name != "cnn_fashion" or FASHION.is_dir()]
    problems = {name: MODELS[name](quick) for name in model or here}
    rows, found = Rows("fp8_training", results), []
    for seed in range(seeds):
        for of, problem in problems.items():
            for name in names:
                key = {"model": of, "recipe": name, "seed": seed, "steps": steps, "quick": quick}
                row = rows.get(**key)
                if row is None:
                    row = rows.add(key, trained(problem, RECIPES[name], steps, seed))
                    print(
                        f"{of} {name} {seed}: {row['losses'][-1]:.4f}, {row['seconds']} s",
                        flush=True,
                    )
                found.append(row)
    print(text_of_gaps(found))
    if plot is not None:
        figure_of_gaps(found).savefig(plot, dpi=150, format="png")


if __name__ == "__main__":
    typer.run(main)
