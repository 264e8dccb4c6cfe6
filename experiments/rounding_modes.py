"""A trained classifier of digits in small formats, rounded in five ways, without any scale.

Command: python experiments/rounding_modes.py [--seed 0] [--out experiments/results] [--quick]
Needs: pip install '.[experiments]' (scikit-learn, whose digits are 1,797 images of 8 x 8).

The classifier of qat.py is rounded after training, in two ways: the operands of each product alone,
summed in float32; and the operands and every partial sum, as in an accumulator of the format.
Accuracy is that on a third of the images, which it has not seen. Stochastic rounding: the mean of 4
keys.

Claim: where every sum is rounded to E5M2, the directed modes collapse, by 10 points and more, while
stochastic rounding stays within 10; operands alone in any mode and format cost less than 2 points.
Source: the formats and modes of pychop's exps/quantization_results.csv, on other data.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import typer
from benchmarks._results import Out, Recorder, Seed
from qat import Classifier, digits, trained

import qtoolkit as qt

FORMATS = ("bfloat16", "e4m3fn", "e5m2")
ROUNDINGS = (
    *("nearest_even", "stochastic", "toward_zero"),
    *("toward_positive", "toward_negative"),
)
KEYS = 4


def product(rounded, x, kernel, every_sum: bool) -> jax.Array:
    """`x @ kernel` of rounded operands; `rounded(array, i)` has bits of its own for each i."""
    x, kernel = rounded(x, 0), rounded(kernel, 1)
    if not every_sum:
        return x @ kernel

    def add(total, term):
        index, column, row = term
        return rounded(total + column[:, None] * row, index), None

    terms = 2 + jnp.arange(len(kernel)), x.T, kernel
    return jax.lax.scan(add, jnp.zeros((len(x), kernel.shape[1])), terms)[0]


@functools.partial(jax.jit, static_argnames=("fmt", "rounding", "every_sum"))
def accuracy(key, layers, x, labels, fmt: str, rounding: str, every_sum: bool) -> jax.Array:
    for layer, (kernel, bias) in enumerate(layers):
        mine = jax.random.fold_in(key, layer)

        def rounded(array, index, mine=mine):
            random = {"key": jax.random.fold_in(mine, index)} if rounding == "stochastic" else {}
            return qt.round_to_format(array, fmt, rounding=rounding, **random)

        x = product(rounded, x if layer == 0 else jax.nn.relu(x), kernel, every_sum) + bias
    return jnp.mean(x.argmax(-1) == labels)


def main(seed: Seed = 0, out: Out = None, quick: bool = False) -> None:
    seen, (x, labels) = digits(seed)
    steps = 60 if quick else 1_000
    model = trained(Classifier(seed), *seen, steps=steps, rate=3e-3, seed=seed)
    layers = [(v.kernel[...], v.bias[...]) for v in (model.first, model.second, model.last)]
    wide = float(np.mean(np.asarray(model(x)).argmax(-1) == labels))
    roundings = ("stochastic", "toward_positive") if quick else ROUNDINGS
    found = {}
    for every_sum in (True,) if quick else (False, True):
        for fmt in ("e5m2",) if quick else FORMATS:
            for mode in roundings:
                keys = jax.random.split(jax.random.key(seed), KEYS if mode == "stochastic" else 1)
                some = [accuracy(key, layers, x, labels, fmt, mode, every_sum) for key in keys]
                found[every_sum, fmt, mode] = float(np.mean(some))
    with Recorder("rounding_modes", out, quick) as recorder:
        for every_sum, what in ((False, "operands"), (True, "operands and every sum")):
            kept = {(f, m): value for (e, f, m), value in found.items() if e == every_sum}
            rows = {m: {f: f"{v:.2%}" for (f, k), v in kept.items() if k == m} for m in roundings}
            if kept:
                title = f"{what} rounded: accuracy on {len(x)} images, {wide:.2%} in float32"
                recorder.figures(title, rows)
        lost = {key: wide - value for key, value in found.items()}
        directed = min(lost[True, "e5m2", mode] for mode in roundings if "toward" in mode)
        recorder.claim(
            "every sum in E5M2: directed modes lose 10 points or more, stochastic rounding less",
            f"{100 * directed:.1f} points or more, {100 * lost[True, 'e5m2', 'stochastic']:.1f}",
            directed >= 0.1 > lost[True, "e5m2", "stochastic"],
        )
        if not quick:
            most = max(value for (every_sum, *_), value in lost.items() if not every_sum)
            recorder.claim(
                "operands alone cost less than 2 points", f"at most {100 * most:.1f}", most < 0.02
            )


if __name__ == "__main__":
    typer.run(main)
