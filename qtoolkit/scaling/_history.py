"""Delayed scaling: scales from the largest magnitudes of earlier batches.

Each use of an array contributes a histogram with a single entry: 1 in the bucket of its amax. These
are added up, as gradients are, whatever a program does with a layer: scan, vmap, several uses,
shards, micro-batches, sums or means of gradients. The highest bucket of the sum that is not empty
is that of the largest amax.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    bucket,
    bucket_edge,
    exact_float32,
    from_magnitude_ordinal,
)
from qtoolkit.scaling._blocks import largest_magnitude, magnitude_or_infinity

Array = jax.Array

_BITS = 3  # the upper edge of a bucket is at most 12.5 % above amax
BUCKETS = 256 << _BITS
BAD_BUCKET = BUCKETS - 1  # the bucket of arrays with an infinity or a NaN
_LARGEST = np.uint32(0x7F7FFFFF)
FAR = np.float32(2)  # a magnitude counts as bad if it is beyond what saturates by this factor


def histogram(amax: Array, is_bad: Array) -> Array:
    """float32[BUCKETS]: 1 in the bucket of `amax`; if the array `is_bad`, also in `BAD_BUCKET`."""
    at = bucket(amax, _BITS).astype(jnp.int32)
    places = lax.broadcasted_iota(jnp.int32, (BUCKETS,), 0)
    marks = (places == at) | (is_bad & (places == BAD_BUCKET))
    return marks.astype(jnp.float32)


def amax_of(x: Array) -> tuple[Array, Array]:
    """The largest finite magnitude of `x`, a float32 scalar, and whether not all is finite."""
    return largest_magnitude(x), ~jnp.all(jnp.isfinite(exact_float32(x)))


def amax_to_keep(x: Array) -> tuple[Array, Array]:
    """`amax_of` by one reduction, with an amax of 0 where `is_bad`: a history skips such a step."""
    amax = magnitude_or_infinity(x)
    is_bad = ~jnp.isfinite(amax)
    return jnp.where(is_bad, np.float32(0), amax), is_bad


def updated_history(history: Array, bad: Array, counts: Array) -> tuple[Array, Array]:
    """Updates float32[..., arrays, steps] histories, the newest amax first, after one more step.

    Args:
      history: float32[..., arrays, steps]: amaxes, the newest first; 0 where there was none yet.
      bad: uint32[...], the steps with an infinity or a NaN, and those with an array whose amax was
        more than `FAR` times the largest of its history, which scales it.
      counts: float32[..., arrays, BUCKETS], the sum of histograms of the step.

    Returns:
      The new `history` and `bad`. A step with an infinity or a NaN in any of the arrays changes no
      history. Nor does one in which an array was not seen, or held only zeros.
    """
    is_bad = jnp.any(counts[..., BAD_BUCKET] != 0, axis=-1)
    buckets = lax.broadcasted_iota(jnp.uint32, counts.shape, counts.ndim - 1)
    top = jnp.max(jnp.where((counts != 0) & (buckets < BAD_BUCKET), buckets, 0), axis=-1)
    edge = jnp.minimum(bucket_edge(top + np.uint32(1), _BITS), _LARGEST)
    amax = jnp.where(top > 0, from_magnitude_ordinal(edge, jnp.float32), 0)
    longer = jnp.concatenate([amax[..., None], history[..., :-1]], axis=-1)
    is_good = (top > 0) & ~is_bad[..., None]
    before = jnp.max(history, axis=-1)
    # Halved, not doubled: twice a large float32 is an infinity.
    is_far = jnp.any((before > 0) & (amax / FAR > before), axis=-1)
    new_bad = bad + (is_bad | is_far).astype(jnp.uint32)
    return jnp.where(is_good[..., None], longer, history), new_bad
