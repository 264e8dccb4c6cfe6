"""The knapsack of `allocate`: the oracle tries every combination."""

import itertools

import numpy as np
import pytest
from each import each
from refused import refused

from qtoolkit.post_training._allocation import Allocation, knapsack


def brute_force(sizes, costs, limit):
    every = itertools.product(range(sizes.shape[1]), repeat=len(sizes))
    rows = np.arange(len(sizes))
    fitting = [c for c in every if sizes[rows, list(c)].sum() <= limit]
    return min(costs[rows, list(c)].sum() for c in fitting)


@each("seed", range(20))
@each("scale", [1, 97_003])
def test_the_sum_is_the_least_of_all_up_to_the_stated_gap(seed, scale):
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 50, (5, 4)) * scale
    costs = random.exponential(size=(5, 4)) * (1 + sizes.max() - sizes)
    low, high = sizes.min(1).sum(), sizes.max(1).sum()
    limit = int(random.integers(low, high + 1))
    chosen, gap = knapsack(sizes, costs, limit)
    rows = np.arange(5)
    assert sizes[rows, list(chosen)].sum() <= limit
    found, least = costs[rows, list(chosen)].sum(), brute_force(sizes, costs, limit)
    assert least <= found <= least + gap + 1e-9
    if scale == 1:  # sizes are units: the result is exact
        assert found == pytest.approx(least)
        assert gap == pytest.approx(0)


def test_a_cost_that_is_no_number_is_the_last_resort():
    sizes = np.array([[4, 1], [4, 1]])
    costs = np.array([[0.0, np.nan], [0.0, 1.0]])
    assert knapsack(sizes, costs, 5)[0] == (0, 1)
    assert knapsack(sizes, costs, 2)[0] == (1, 1)


def test_the_limit_may_be_the_least_size_and_not_less():
    sizes = np.array([[10_007, 5_003], [20_011, 5_003]])
    costs = np.array([[0.0, 1.0], [0.0, 1.0]])
    assert knapsack(sizes, costs, 10_006)[0] == (1, 1)
    with refused(ValueError, r"bytes=10,005, and the smallest .* takes 10,006"):
        knapsack(sizes, costs, 10_005)


def test_rules_are_printed_as_a_table():
    sizes, costs = [[5, 9], [5, 9]], [[3.0, 0.1], [2.0, 0.5]]
    found = Allocation(["a", "b.c"], ["int4", "int8"], ["r4", "r8"], sizes, costs, 14)
    assert (found.lookup("a"), found.lookup("b.c"), found.lookup("bxc")) == ("r8", "r4", None)
    assert (found.size, found.cost) == (14, 2.1)
    text = str(found)
    assert "a      int8    9         +0.1        +3    +0.1" in text
    assert "14 of 14" in text
