"""What attention loses if its keys and values are kept in few bits, with a rotation and without.

Command: python experiments/kv_cache.py [--seed 0] [--out experiments/results] [--quick]
Claim: in 4 bits a rotated cache has at most 0.7 of the error of one that is not.

The error is |y - y'| / |y| of the output of one head, y in float64 from keys and values that are
not rounded: 512 tokens of 128 features, normal numbers. Four channels of the keys are 12 times as
large, as Figure 2 of arXiv:2402.02750 shows them in language models; half of the queries are close
to a key, so that some weights are large. The transform is that of `KVCache(rotate=True)`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import typer
from benchmarks._results import Out, Recorder, Seed

from qtoolkit.products import KVCache

TOKENS, FEATURES, LARGE = 512, 128, (3, 40, 41, 97)
FORMATS: dict[str, tuple[Any, Any]] = {
    "e4m3fn": ("e4m3fn", "e4m3fn"),
    "int8": ("int8", "int8"),
    "int8 keys, int4 values": ("int8", "int4"),
    "int4": ("int4", "int4"),
    "int4_group32": ("int4_group32", "int4_group32"),
    "mxfp4": ("mxfp4", "mxfp4"),
}


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    logits = q @ k.T / np.sqrt(FEATURES)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


def main(seed: Seed = 0, out: Out = None, quick: bool = False) -> None:
    rng = np.random.default_rng(seed)
    tokens = 128 if quick else TOKENS
    q, k, v = (rng.normal(size=(tokens, FEATURES)) for _ in range(3))
    q[::2] += k[rng.permutation(tokens)][::2] / 2
    k[:, LARGE] *= 12
    exact, rows, errors = attended(q, k, v), {}, {}
    heads = tuple(jnp.asarray(x[None, :, None], jnp.float32) for x in (k, v))
    for name, formats in FORMATS.items():
        row = {}
        for word, rotate in (("as they are", False), ("rotated", True)):
            cache = KVCache(*formats, rotate=rotate)
            kept = cache.store(cache.empty(heads[0].shape), heads, 0)
            found = attended(q, *(np.asarray(x[0, :, 0], np.float64) for x in cache.read(kept)))
            errors[name, rotate] = np.linalg.norm(found - exact) / np.linalg.norm(exact)
            row["bits a number"] = f"{8 * sum(x.nbytes for x in kept) / (2 * k.size):.2f}"
            row[word] = f"{errors[name, rotate]:.4f}"
        rows[name] = row
    with Recorder("kv_cache", out, quick) as recorder:
        recorder.figures("error of attention", rows)
        ratio = errors["int4", True] / errors["int4", False]
        recorder.claim(
            "rotated int4 has at most 0.7 of the error of int4 as it is",
            f"{ratio:.2f}",
            ratio <= 0.7,
        )


if __name__ == "__main__":
    typer.run(main)
