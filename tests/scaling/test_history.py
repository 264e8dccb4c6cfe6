"""Delayed scaling's history. Oracle: NumPy's maxima of what was observed."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refused import refused

from qtoolkit.formats import BlockFormat
from qtoolkit.scaling import AmaxHistory
from qtoolkit.scaling.internal import BUCKETS, amax_of, histogram, rolled

TENSOR = BlockFormat.tensor("e4m3fn")


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.quick
@pytest.mark.parametrize("spec", [TENSOR, BlockFormat.token("e4m3fn")], ids=["tensor", "token"])
def test_the_observer_keeps_the_largest_of_the_last_batches(spec):
    axis = None if spec is TENSOR else 1
    state = AmaxHistory.of(spec, (3, 8), history=4, margin=1)
    np.testing.assert_array_equal(state.scale(), np.ones(state.shape))
    amaxes = []
    for seed in range(7):
        x = draw(3, 8, seed=seed) * np.float32(10.0 ** (3 - seed))  # ever smaller
        state = state.observe(x)
        amaxes.append(np.abs(x).max(axis=axis, keepdims=True))
        expected = np.max(amaxes[-4:], axis=0) * np.float32(2)
        np.testing.assert_array_equal(state.amax(), expected)
        np.testing.assert_array_equal(state.scale(), expected / np.float32(448))
    assert (int(state.count), int(state.bad)) == (7, 0)
    assert state.history.shape == (4, *state.shape)
    bad = draw(3, 8)
    for value in (np.nan, np.inf, -np.inf):
        bad[1, 2] = value
        after = state.observe(bad)
        np.testing.assert_array_equal(after.history, state.history)
        assert (int(after.count), int(after.bad)) == (7, 1)
    zeros = state.observe(np.zeros((3, 8), np.float32))
    np.testing.assert_array_equal(zeros.history, state.history)
    assert int(zeros.count) == 8


def test_merged_histories_are_the_larger_ones_of_each_step():
    first = second = AmaxHistory.of(TENSOR, (3, 8), history=2)
    xs = [draw(3, 8, seed=seed) for seed in range(4)]
    for x, y in zip(xs[:2], xs[2:], strict=True):
        first, second = first.observe(x), second.observe(y)
    whole = AmaxHistory.of(TENSOR, (6, 8), history=2)
    for x, y in zip(xs[:2], xs[2:], strict=True):
        whole = whole.observe(np.concatenate([x, y]))
    for merged in (first.merge(second), second.merge(first)):
        np.testing.assert_array_equal(merged.history, whole.history)
        assert int(merged.count) == 4
    other = AmaxHistory.of(TENSOR, (3, 8), history=2, margin=1)
    refused(ValueError, "other has margin=1", first.merge, other)
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second)
    across = jax.vmap(lambda state: state.merge_across("d"), axis_name="d")(stacked)
    np.testing.assert_array_equal(across.history[1], whole.history)


@pytest.mark.parametrize("history", [0, -1, 1.5, True])
def test_a_history_has_a_length(history):
    refused(ValueError, "AmaxHistory: history=", AmaxHistory.of, TENSOR, (3, 8), history=history)


@pytest.mark.parametrize("margin", [0, 1, 3, 64])
def test_a_margin_keeps_amaxes_exact_and_finite(margin):
    """Also subnormal ones. Oracle: Python's fractions."""
    amaxes = np.float32([1e-40, 0.3, 3e38])
    spec = BlockFormat.token("e4m3fn")
    state = AmaxHistory.of(spec, (3, 1), margin=margin).observe(jnp.asarray(amaxes[:, None]))
    largest = Fraction(float(np.finfo(np.float32).max))
    expected = [float(min(Fraction(float(a)) * 2**margin, largest)) for a in amaxes]
    np.testing.assert_array_equal(np.asarray(state.amax(), np.float64)[:, 0], expected)
    assert np.isfinite(state.scale()).all()


def test_the_observer_in_a_scan():
    xs = draw(5, 3, 8)
    state = AmaxHistory.of(TENSOR, (3, 8), history=3)
    state, _ = jax.lax.scan(lambda s, x: (s.observe(x), None), state, xs)
    np.testing.assert_array_equal(state.amax().item(), np.abs(xs[-3:]).max())


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
    return jax.jit(rolled)(jnp.asarray(history), jnp.uint32(bad), jnp.asarray(counts))


def test_bucket_edges_are_at_most_an_eighth_above_amax():
    """Normal numbers: above amax by 0 to 12.5 %; the largest finite number stays finite."""
    edges = jax.jit(
        jax.vmap(lambda a: rolled(jnp.zeros((1, 1)), jnp.uint32(0), histogram(a, a < 0)[None])[0])
    )(AMAXES)
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
