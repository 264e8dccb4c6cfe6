"""How far low-precision training stays from float32: recipes and seeds, the same batches for all.

Command: python experiments/fp8_training.py [--steps 400] [--seeds 3] [--recipe te_current ...]
Aim, to be shown by a run of full length: the mean gap of an FP8 recipe to bfloat16 in validation
loss (each loss the mean of the last five of twenty evaluations) is at most 0.5 %, that of nvfp4 at
most 3 %.

The model is the demo's byte-level transformer on CPython's help topics. All its products but the
look-up of embeddings are rounded, forward and backward. "bfloat16" rounds the operands of all
products to bfloat16 and nothing else. With --plot the gap of each recipe to float32 becomes a
picture: one curve for each recipe, the mean over seeds.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import qtoolkit as qt
from qtoolkit.demo import load_corpus, train_pair
from qtoolkit.plots import loss_curves

BASELINE = "bfloat16"
WIDE = qt.BlockFormat.tensor("bfloat16", scale=None)
RECIPES = {
    BASELINE: qt.Recipe(WIDE, WIDE),
    **{
        name: getattr(qt.recipes, name)
        for name in (
            *("te_current", "te_delayed_hybrid", "token_scaled", "mxfp8", "deepseek_v3", "fp8_lm"),
            *("fnuz_amd", "nvfp4", "int8_qat", "w4a16", "weight_only_e4m3"),
        )
    },
}


def main(
    steps: int = 400,
    seeds: int = 3,
    recipe: Annotated[list[str] | None, typer.Option(help="Names; all if left out.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A PNG of the gaps.")] = None,
) -> None:
    names = [BASELINE, *(name for name in recipe or RECIPES if name != BASELINE)]
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}, expected one of {', '.join(RECIPES)}")
    corpus = load_corpus()
    print(f"{corpus.description}; {steps} steps; {seeds} seeds")
    print(
        f"{'recipe':<18}{'loss':>8}{'to float32':>12}{'to bfloat16':>13}{'largest':>9}{'step':>7}"
    )
    baseline: np.ndarray | None = None
    curves: dict[str, list[float]] = {}
    evaluated_at: list[int] = []
    for name in names:
        pairs = [train_pair(corpus, RECIPES[name], steps=steps, seed=s) for s in range(seeds)]
        wide, quantized = (
            np.array([run.final_loss for run in runs])
            for runs in ([p.wide for p in pairs], [p.quantized for p in pairs])
        )
        baseline = quantized if baseline is None else baseline
        to_baseline = quantized / baseline - 1
        ratio = np.median([p.quantized.step_seconds / p.wide.step_seconds for p in pairs])
        print(
            f"{name:<18}{quantized.mean():8.4f}{(quantized / wide - 1).mean():+12.3%}"
            f"{to_baseline.mean():+13.3%}{max(to_baseline, key=abs):+9.3%}{ratio:7.2f}",
            flush=True,
        )
        evaluated_at = pairs[0].evaluated_at
        gaps = [np.array(p.quantized.losses) / np.array(p.wide.losses) - 1 for p in pairs]
        curves[name] = list(100 * np.mean(gaps, axis=0))
    if plot is not None:
        loss_curves(plot, evaluated_at, curves)


if __name__ == "__main__":
    typer.run(main)
