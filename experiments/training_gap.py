"""How far FP8 training stays from float32: three seeds, the same initialisation and batches.

Command: python experiments/training_gap.py [--steps 400] [--seeds 0 1 2] [--format e4m3fn]
Claim: the mean of the paired relative gaps in validation loss (each the mean of the last five of
twenty evaluations) is at most 1 %, each gap at most 2 %.
"""

import argparse

import numpy as np

from qtoolkit.demo import load_corpus, train_pair
from qtoolkit.products import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--format", default="e4m3fn")
    arguments = parser.parse_args()
    corpus, recipe = load_corpus(), Recipe(forward=arguments.format)
    formats = f"{recipe.forward.element.name} forward, {recipe.gradient.element.name} gradients"
    print(f"{corpus.description}; {arguments.steps} steps; {formats}")
    print("seed  float32  FP8     gap       step-time ratio")
    gaps = []
    for seed in arguments.seeds:
        wide, quantized, _ = train_pair(corpus, recipe, steps=arguments.steps, seed=seed)
        gaps.append(quantized.final_loss / wide.final_loss - 1)
        ratio = quantized.step_seconds / wide.step_seconds
        print(
            f"{seed:>4}  {wide.final_loss:.4f}   {quantized.final_loss:.4f}  {gaps[-1]:+.3%}   "
            f"{ratio:.2f}",
            flush=True,
        )
    print(f"mean gap {np.mean(gaps):+.3%}, largest {max(gaps, key=abs):+.3%}")


if __name__ == "__main__":
    main()
