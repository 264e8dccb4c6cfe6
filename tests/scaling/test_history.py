"""Delayed scaling's history. Oracle: NumPy's maxima of what was observed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qtoolkit.scaling.internal import BUCKETS, amax_of, histogram, updated_history


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


AMAXES = np.concatenate(
    [
        np.ldexp(1 + np.arange(0, 8) / 8, e).astype(np.float32)  # lower edges of buckets
        for e in (-140, -127, -126, -125, -1, 0, 1, 126, 127)
    ]
    + [np.random.default_rng(0).uniform(1, 2, 50).astype(np.float32)]
    + [np.array([2.0**-149, 2.0**-126, np.finfo(np.float32).max], np.float32)]
)


def rolled_once(counts, history=None, bad=0):
    history = np.zeros((1, 3), np.float32) if history is None else history
    return jax.jit(updated_history)(jnp.asarray(history), jnp.uint32(bad), jnp.asarray(counts))


def test_bucket_edges_are_at_most_an_eighth_above_amax():
    """Normal numbers: above amax by 0 to 12.5 %; the largest finite number stays finite."""

    def edge(a):
        counts = histogram(a, a < 0)[None]
        return updated_history(jnp.zeros((1, 1)), jnp.uint32(0), counts)[0]

    edges = jax.jit(jax.vmap(edge))(AMAXES)
    edges = np.asarray(edges, np.float64).reshape(-1)
    amaxes = AMAXES.astype(np.float64)
    normal = amaxes >= 2.0**-126
    assert (edges[normal] >= amaxes[normal]).all()
    assert (edges[normal] <= 1.125 * amaxes[normal]).all()
    assert np.isfinite(edges).all()
    assert (edges > 0)[normal].all()


def test_amaxes_leave_out_what_is_not_finite():
    x = draw(4, 5)
    found, is_bad = amax_of(x)
    assert (float(found), bool(is_bad)) == (np.abs(x).max(), False)
    x[1, 1] = np.inf
    found, is_bad = amax_of(x)
    assert (float(found), bool(is_bad)) == (np.abs(x[np.isfinite(x)]).max(), True)
    x[2, 2] = np.nan
    assert bool(amax_of(x)[1])
    assert amax_of(jnp.asarray(draw(3), jnp.bfloat16))[0].dtype == jnp.float32


@pytest.mark.sample("1.0", "1e-06")
@pytest.mark.parametrize("weight", [1.0, 1 / 8, 1e-6])
def test_sums_and_means_of_histograms_give_the_maximum(weight):
    """Of micro-batches, shards or uses of one layer: the top bucket is that of all of them."""
    amaxes = np.float32([3.0, 0.0, 1e-20, 100.0, 7.5])
    counts = sum(np.asarray(histogram(a, a < 0)) for a in amaxes) * np.float32(weight)
    history, bad = rolled_once(counts[None])
    alone, _ = rolled_once(histogram(np.float32(100), np.bool_(False))[None])
    np.testing.assert_array_equal(history, alone)
    assert 100 <= float(history[0, 0]) <= 112.5
    assert int(bad) == 0
    assert counts.shape == (BUCKETS,)


def test_nonfinite_steps_and_zero_steps_change_nothing():
    before = np.float32([[3, 2, 1], [30, 20, 0]])
    seen = np.asarray(histogram(np.float32(5), np.bool_(False)))
    zeros = np.asarray(histogram(np.float32(0), np.bool_(False)))
    wrong = np.asarray(histogram(np.float32(9), np.bool_(True)))
    nothing = np.zeros(BUCKETS, np.float32)
    history, bad = rolled_once(np.stack([seen, wrong]), before, 6)
    np.testing.assert_array_equal(history, before)
    assert int(bad) == 7
    for quiet in (zeros, nothing):
        history, bad = rolled_once(np.stack([seen, quiet]), before, 6)
        np.testing.assert_array_equal(history[0, 1:], before[0, :2])
        assert 5 <= float(history[0, 0]) <= 5 * 1.125
        np.testing.assert_array_equal(history[1], before[1])
        assert int(bad) == 6
    # The mean over shards of which one saw an infinity.
    _, bad = rolled_once((seen + wrong)[None] / np.float32(8), before[:1])
    assert int(bad) == 1
