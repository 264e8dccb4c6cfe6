"""A small number added again and again, in few bits: nearest stalls, stochastic rounding does not.

Command: python experiments/accumulation.py [--seed 0] [--out experiments/results] [--quick]
Claim: of 100,000 additions of 2**-10, rounded after each one, rounding to nearest and toward zero
lose at least 95 % in bfloat16, E5M2 and E4M3, for they stall as soon as half a step, or a step,
exceeds 2**-10; the mean of 256 stochastic sums is exact to three of its standard errors.

The sum before each rounding is exact: a multiple of 2**-10 below 2**8 needs 18 of 24 bits.
24 random bits are drawn; `random_bits.py` says what fewer do.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import typer
from benchmarks._results import Out, Recorder, Seed

import qtoolkit as qt

INCREMENT = 2.0**-10
RUNS = 256
STOCHASTIC = qt.Stochastic("B", bits=24)


@functools.partial(jax.jit, static_argnames=("fmt", "rounding", "steps"))
def sums(key: jax.Array, fmt: str, rounding: qt.Stochastic | str, steps: int) -> jax.Array:
    """One sum for each run; all alike where the rounding is not stochastic."""

    def add(total, step):
        random = {"key": jax.random.fold_in(key, step)} if rounding == STOCHASTIC else {}
        return qt.round_to_format(total + INCREMENT, fmt, rounding=rounding, **random), None

    return jax.lax.scan(add, jnp.zeros(RUNS), jnp.arange(steps))[0]


def main(seed: Seed = 0, out: Out = None, quick: bool = False) -> None:
    steps = 4_096 if quick else 100_000
    exact = steps * INCREMENT
    rows, kept, errors = {}, [], []
    for fmt in ("bfloat16", "e5m2", "e4m3fn"):
        for rounding in ("nearest_even", "toward_zero", STOCHASTIC):
            found = np.asarray(sums(jax.random.key(seed), fmt, rounding, steps), np.float64)
            mean, error = found.mean(), found.std(ddof=1) / np.sqrt(RUNS)
            name = "stochastic" if rounding == STOCHASTIC else rounding
            rows[f"{fmt}, {name}"] = {"mean of the sums": f"{mean:.3f}", "± error": f"{error:.3f}"}
            if name == "stochastic":
                errors.append(abs(mean - exact) / error)
            else:
                kept.append(mean / exact)
    with Recorder("accumulation", out, quick) as recorder:
        recorder.figures(f"{steps:,} times 2**-10, exactly {exact:.3f}; {RUNS} runs", rows)
        most = 0.5 if quick else 0.05
        recorder.claim(
            f"without stochastic rounding at least {1 - most:.0%} is lost",
            f"at most {max(kept):.2%} is kept",
            max(kept) <= most,
        )
        recorder.claim(
            "stochastic sums are right on average, to three standard errors",
            ", ".join(f"{e:.2f}" for e in errors) + " standard errors off",
            max(errors) <= 3,
        )


if __name__ == "__main__":
    typer.run(main)
