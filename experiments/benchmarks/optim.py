"""An update of AdamW with moments in few bits: time relative to optax's own, and bytes.

Command: python experiments/benchmarks/optim.py   (nothing else should run on the machine)
Target, which a run judges: moments in 8 bits take at most 0.27 of the bytes of float32 ones.

The parameters are those of two transformer blocks of width 512: 6.3 million. Bytes for each are
compared with those of 8-bit optimizers, which are computed, not run: 2 codes and two float32
scales for each block of 2,048 in bitsandbytes (arXiv:2110.02861), each block of 256 in torchao's
AdamW8bit and AdamWFp8.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from _results import Folder, Quick, Recorder
from _timing import interleaved

from qtoolkit.optim import master_weights, quantize_state, stochastic_round_updates

PLAIN, MUON = "optax.adamw, float32", "optax.contrib.muon, float32"
PUBLISHED = {"bitsandbytes, blocks of 2,048": 2 + 8 / 2048, "torchao, blocks of 256": 2 + 8 / 256}


def parameters(width: int, dtype: Any) -> dict[str, jax.Array]:
    shapes = {
        f"{block}/{name}": shape
        for block in range(2)
        for name, shape in {
            "qkv": (width, 3, width),
            "out": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
            "bias": (4 * width,),
        }.items()
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(shapes.items(), keys, strict=True)
    return {n: 0.02 * jax.random.normal(key, shape).astype(dtype) for (n, shape), key in pairs}


def _matrices(params: Any) -> Any:
    """How Muon sees each parameter as a matrix; None: by AdamW."""
    numbers = optax.contrib.MuonDimensionNumbers
    axes = {2: numbers(), 3: numbers(0, (1, 2))}
    # optax also asks for the tree in which masks stand for the parameters of AdamW.
    return {name: axes.get(getattr(x, "ndim", 0)) for name, x in params.items()}


class Update:
    """One update in place: parameters and state are donated, gradients are not."""

    def __init__(self, tx: optax.GradientTransformation, width: int, dtype: Any) -> None:
        self.params = parameters(width, dtype)
        self.state = tx.init(self.params)
        self.grads = parameters(width, dtype)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def update(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.update = update

    def __call__(self) -> Any:
        self.params, self.state = self.update(self.params, self.state, self.grads)
        return self.params

    @property
    def bytes_per_parameter(self) -> float:
        count = sum(p.size for p in self.params.values())
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state)) / count


def main(
    runs: Annotated[int, typer.Option(help="Updates of each row.")] = 25,
    quick: Quick = False,
    results: Folder = None,
) -> None:
    width = 64 if quick else 512
    adamw = optax.adamw(1e-3)
    # Muon is for matrices: qkv is one of [width, 3 * width], and biases get AdamW.
    muon = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=_matrices)
    updates: dict[str, Callable[[], Any]] = {
        PLAIN: Update(adamw, width, jnp.float32),
        **{
            f"quantize_state, {spec}": Update(quantize_state(adamw, spec), width, jnp.float32)
            for spec in ("e4m3fn", "int8", "mxfp8_e4m3")
        },
        "quantize_state, e4m3fn, to nearest": Update(
            quantize_state(adamw, "e4m3fn", rounding="nearest_even"), width, jnp.float32
        ),
        MUON: Update(muon, width, jnp.float32),
        "quantize_state of muon, e4m3fn": Update(
            quantize_state(muon, "e4m3fn"), width, jnp.float32
        ),
        "master_weights, bfloat16": Update(master_weights(adamw), width, jnp.bfloat16),
        "stochastic_round_updates, bfloat16": Update(
            optax.chain(adamw, stochastic_round_updates()), width, jnp.bfloat16
        ),
    }
    with Recorder("optim", results, quick) as recorder:
        title = f"update of two blocks, d = {width}"
        recorder.table(title, interleaved(updates, runs=3 if quick else runs), PLAIN)
        print("\nbytes of state for each parameter")
        sizes = {name: update.bytes_per_parameter for name, update in updates.items()}  # type: ignore[attr-defined]
        for name, size in {**sizes, **PUBLISHED}.items():
            print(f"  {name:<36}{size:7.3f}")
        eight_bits = [n for n in sizes if n.startswith("quantize_state")]
        plain = {n: sizes[MUON if "muon" in n else PLAIN] for n in eight_bits}
        assert all(sizes[n] <= 0.27 * plain[n] for n in eight_bits if not quick), sizes


if __name__ == "__main__":
    typer.run(main)
