"""Layers of Flax as formulas in NumPy, for the tests of nnx and linen.

Operands of their own products are rounded by ml_dtypes.
"""

import ml_dtypes
import numpy as np


def q(x):
    """E4M3FN by one scale for the tensor, float64."""
    x = np.asarray(x, np.float32)
    scale = np.abs(x).max() / np.float32(448)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def taps(kernel, x):
    kernel = q(kernel)
    count = x.shape[1] - len(kernel) + 1
    return sum(q(x)[:, i : i + count] @ tap for i, tap in enumerate(kernel))


def attention(query, key, value, out, x):
    """Of its own products: the projections by these kernels are other layers', left as they are."""
    heads = [np.einsum("btd,dhf->bthf", x, kernel) for kernel in (query, key, value)]
    query, key, value = (np.asarray(h, np.float32) for h in heads)
    query = query / np.float32(np.sqrt(query.shape[-1]))
    scores = np.einsum("bqhf,bkhf->bhqk", q(query), q(key)).astype(np.float32)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    seen = np.einsum("bhqk,bkhf->bqhf", q(weights), q(value))
    return np.einsum("bqhf,hfd->bqd", seen, out)
