"""How many random bits stochastic rounding needs: its bias, exactly, for every number of them.

Command: python experiments/random_bits.py [--seed 0] [--out experiments/results] [--quick]
Claim: with N random bits and all 2**N patterns of them taken once, the mean of the results is off
by 0 to 2**-N of a step, downward, under IEEE P3109's StochasticA, and by at most 2**-(N + 1) in
either direction under B and C. A smaller update than that never moves a number.

There is no chance in it but the choice of v: 512 multiples of 2**-20 (fewer for many bits), where
float32 holds 1 + v / 8 exactly, rounded to E4M3.
Source: IEEE P3109 Interim Report v4.0, section 4.7.4; Fitzgibbon and Felix, ARITH 2025.
"""

import jax.numpy as jnp
import numpy as np
import typer
from benchmarks._results import Out, Recorder, Seed

import qtoolkit as qt

STEP = 0.125  # of E4M3 between 1 and 2


def biases(variant: str, bits: int, fractions: np.ndarray) -> np.ndarray:
    """Mean over all patterns of (rounded - exact), in steps, for each fraction."""
    x = (1 + fractions * STEP).astype(np.float32)
    some = fractions[: max(2**22 >> bits, 1)]
    x = np.broadcast_to(x[: len(some), None], (len(some), 2**bits))
    patterns = jnp.broadcast_to(jnp.arange(2**bits, dtype=jnp.uint32), x.shape)
    mode = qt.Stochastic(variant, bits=bits)
    y = qt.round_to_format(x, "e4m3fn", rounding=mode, random_bits=patterns)
    return (np.asarray(y, np.float64).mean(axis=1) - 1) / STEP - some


def main(seed: Seed = 0, out: Out = None, quick: bool = False) -> None:
    generator = np.random.default_rng(seed)
    fractions = generator.integers(0, 2**20, 512) / 2**20
    fractions[:2] = 2.0**-20, 1 - 2.0**-20  # the hardest
    rows, holds, stuck = {}, [], []
    for bits in (1, 2, 4) if quick else (1, 2, 4, 6, 8, 10, 12, 16):
        row = {}
        for variant, low, high in (("A", -1, 0), ("B", -0.5, 0.5), ("C", -0.5, 0.5)):
            bias = biases(variant, bits, fractions) * 2**bits
            row[f"{variant}: least"] = f"{bias.min():+.3f}"
            row[f"{variant}: mean"] = f"{bias.mean():+.3f}"
            row[f"{variant}: largest"] = f"{bias.max():+.3f}"
            stuck.append(bias[0] == -(2.0**-20) * 2**bits)
            holds.append(low <= bias.min() and bias.max() <= high)
        rows[f"{bits} bits"] = row
    with Recorder("random_bits", out, quick) as recorder:
        recorder.figures("bias in units of 2**-N of a step", rows)
        recorder.claim(
            "A is off by 0 to 2**-N of a step, downward; B and C by at most half of that",
            f"{sum(holds)} of {len(holds)} combinations",
            all(holds),
        )
        recorder.claim(
            "an update of 2**-20 of a step never moves a number",
            f"{sum(stuck)} of {len(stuck)} combinations",
            all(stuck),
        )


if __name__ == "__main__":
    typer.run(main)
