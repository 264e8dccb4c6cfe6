"""The generator of stochastic rounding: statistics at fixed seeds, and the index of an element.

Each family of statistics stays within what chance exceeds once in a thousand runs of the whole
family (Bonferroni).
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import SPECS, assert_same_bits, p3109, stochastic_codes
from test_casts_stochastic import KEY, X, bound

import qtoolkit as qt
from qtoolkit.casts._random import _high_product, counter_bits, element_index

DRAWS = 2**20
LAGS = (1, 2, 3, 4, 7, 8, 16, 64, 255, 256, 1024, 65536)
KEYS = [("threefry2x32", seed) for seed in (0, 1, 2, 3, 12345, 2**31)]
KEYS += [("rbg", seed) for seed in (0, 1, 2, 4)]
USED_BYTES = (1, 2, 3)  # at most the upper 24 bits of a hash are used


def chi_square(cells):
    """Pearson's statistic of equally likely cells, normal by Wilson and Hilferty (1931)."""
    expected = cells.sum() / cells.size
    freedom = cells.size - 1
    ratio = ((cells - expected) ** 2).sum() / expected / freedom
    return (ratio ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def uniform(hashes):
    """Of mean 0 and variance 1."""
    return ((hashes >> np.uint32(8)) * 2.0**-24 + 2.0**-25 - 0.5) * math.sqrt(12)


def correlation(a, b):
    return float(np.dot(a, b) / math.sqrt(a.size))


def nibble_pairs(a, b, shift):
    """How often each pair of four bits stands at the same place of `a` and `b`."""
    a, b = ((h >> np.uint32(shift)) & np.uint32(15) for h in (a, b))
    return np.bincount(a * np.uint32(16) + b, minlength=256)


@pytest.fixture(scope="module")
def draws():
    generate = jax.jit(lambda words: counter_bits(words, (DRAWS,)))
    data = [jax.random.key_data(jax.random.key(seed, impl=impl)) for impl, seed in KEYS]
    return [np.asarray(generate(words)) for words in data]


@pytest.mark.quick
def test_bytes_are_uniform(draws):
    statistics = [
        chi_square(np.bincount((hashes >> np.uint32(8 * byte)) & np.uint32(255), minlength=256))
        for hashes in draws
        for byte in USED_BYTES
    ]
    assert np.max(np.abs(statistics)) < bound(len(statistics))


def test_each_bit_is_fair(draws):
    bits = [np.unpackbits(h.view(np.uint8).reshape(-1, 4), axis=1).sum(0) for h in draws]
    ones = np.array(bits, np.int64)[:, 8:]  # the lowest byte is first, and not used
    statistics = (ones - DRAWS / 2) / math.sqrt(DRAWS / 4)
    assert np.max(np.abs(statistics)) < bound(statistics.size)


def test_no_serial_correlation(draws):
    statistics = []
    for hashes in draws:
        u = uniform(hashes)
        statistics += [correlation(u[:-lag], u[lag:]) for lag in LAGS]
    assert np.max(np.abs(statistics)) < bound(len(statistics))


def test_neighbours_are_independent(draws):
    """Chi-square of pairs, which sees what a correlation does not."""
    statistics = [
        chi_square(nibble_pairs(hashes[:-lag], hashes[lag:], shift))
        for hashes in draws[::2]
        for lag in LAGS
        for shift in (28, 20)
    ]
    assert np.max(np.abs(statistics)) < bound(len(statistics))


def test_rows_and_columns_of_a_matrix_are_uncorrelated():
    """The index is that of C order, so columns are lags of the row's length."""
    h = np.asarray(counter_bits(jax.random.key_data(KEY), (1024, 1000)))
    u = uniform(h)
    statistics = [
        correlation(u[a].ravel(), u[b].ravel())
        for a, b in [
            (np.s_[1:], np.s_[:-1]),
            (np.s_[:, 1:], np.s_[:, :-1]),
            (np.s_[1:, 1:], np.s_[:-1, :-1]),
        ]
    ]
    sums = [u.mean(axis) * math.sqrt(u.shape[axis]) for axis in (0, 1)]
    statistics += [*sums[0], *sums[1]]
    assert np.max(np.abs(statistics)) < bound(len(statistics))


def test_other_keys_have_other_bits():
    """Keys that differ in one bit, in order, folded, split, and of either kind."""
    one = jax.random.key(3)
    typed = [one, jax.random.key(4), *jax.random.split(one, 2), jax.random.fold_in(one, 2)]
    words = [np.asarray(jax.random.key_data(key)) for key in typed]
    base = np.uint32([0x12345678, 0x9ABCDEF0])
    flips = [
        base ^ np.uint32(1 << bit) * np.uint32([word, 1 - word])
        for bit in (0, 1, 15, 16, 31)
        for word in (0, 1)
    ]
    zeros = [np.uint32([0, 0]), np.uint32([0, 1]), np.uint32([1, 0]), np.uint32([1, 1])]
    zeros += [np.uint32([0, 0, 0, 0]), np.uint32([0, 0, 0, 1]), np.uint32([0, 1, 0, 0])]
    size = 2**17
    generate = jax.jit(lambda words: counter_bits(words, (size,)))
    statistics = []
    for group in (words, [base, *flips], zeros):
        hashes = [np.asarray(generate(jnp.asarray(w))) for w in group]
        for a, b in itertools.combinations(hashes, 2):
            statistics.append(correlation(uniform(a), uniform(b)))
            statistics.append(chi_square(nibble_pairs(a, b, 28)))
    assert np.max(np.abs(statistics)) < bound(len(statistics))


def test_streams_far_apart_are_uncorrelated():
    """Offsets of 2**32 and more change the upper word of the index alone."""
    words = jax.random.key_data(KEY)
    size = 2**18
    generate = jax.jit(lambda offset: counter_bits(words, (size,), offset))
    offsets = [0, size, 1 << 32, 2 << 32, 3 << 32, 1 << 63, (1 << 32) + size]
    hashes = [
        np.asarray(generate(jnp.asarray(np.uint32([o & 0xFFFFFFFF, o >> 32])))) for o in offsets
    ]
    statistics = []
    for a, b in itertools.combinations(hashes, 2):
        statistics.append(correlation(uniform(a), uniform(b)))
        statistics.append(chi_square(nibble_pairs(a, b, 28)))
    assert np.max(np.abs(statistics)) < bound(len(statistics))


@pytest.mark.sample("e4m3fn")
@pytest.mark.quick
@pytest.mark.parametrize("name", ["e4m3fn", "bfloat16", "int8", "e8m0fnu", "binary6p3se"])
def test_key_and_random_bits_are_the_same_rounding(name):
    """Oracle: P3109's formula on the upper bits of the generator."""
    oracle = p3109(6, 3, True, True) if name.startswith("binary") else SPECS[name]
    for variant, bits in (("A", 5), ("B", 16), ("C", 24)):
        rounding = qt.Stochastic(variant, bits=bits)
        drawn = np.asarray(counter_bits(jax.random.key_data(KEY), X.shape)) >> (32 - bits)
        expected = stochastic_codes(X, oracle, variant, bits, drawn)
        assert_same_bits(qt.encode(X, name, rounding=rounding, key=KEY), expected, X)
        given = qt.encode(X, name, rounding=rounding, random_bits=drawn.astype(np.uint32))
        assert_same_bits(given, expected, X)


# The index of an element.


def test_the_high_product_against_pythons_integers():
    rng = np.random.default_rng(3)
    edges = [0, 1, 2, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000, 0xFFFF0000, 0xFFFFFFFF]
    a = np.array([*edges, *rng.integers(0, 2**32, 2000)], np.uint32)
    high_product = jax.jit(_high_product, static_argnums=1)
    for b in [*edges, *map(int, rng.integers(0, 2**32, 5))]:
        expected = [(int(x) * b) >> 32 for x in a]
        np.testing.assert_array_equal(np.asarray(high_product(a, b)), expected)


@pytest.mark.sample("()", "(0,)", "(2, 0, 3)")
@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (2, 3, 4, 5)], ids=str)
def test_small_arrays_are_counted_in_c_order(shape):
    low, high = element_index(shape)
    assert high is None
    np.testing.assert_array_equal(low, np.arange(math.prod(shape)).reshape(shape))


LARGE = [
    # shape, first element of the piece, shape of the piece
    ((2**20, 2**20), (2**20 - 2, 2**20 - 3), (2, 3)),
    ((2**16, 2**16 + 1), (2**16 - 2, 0), (2, 3)),
    ((3, 2**31, 5), (2, 2**31 - 2, 1), (1, 2, 4)),
    ((2**32 + 8,), (2**32 - 2,), (6,)),
    ((5, 2**32 + 3), (3, 2**32 - 1), (2, 4)),
]


def piece(function, start, size):
    """A slice of an array that is too large to exist; XLA computes what is asked for."""

    def cut(a):
        end = tuple(map(sum, zip(start, size, strict=True)))
        return jax.lax.slice(a, start, end)

    return jax.tree.map(np.asarray, jax.jit(lambda: jax.tree.map(cut, function()))())


@pytest.mark.parametrize(("shape", "start", "size"), LARGE, ids=str)
def test_arrays_of_more_than_2_to_the_32_elements(shape, start, size):
    low, high = piece(lambda: element_index(shape), start, size)
    expected = np.zeros(size, object)
    for place in np.ndindex(size):
        index = 0
        for axis, length in enumerate(shape):
            index = index * length + start[axis] + place[axis]
        expected[place] = index
    np.testing.assert_array_equal(high.astype(object) * 2**32 + low.astype(object), expected)


@pytest.mark.sample("(1048576, 1048576)-(1048574, 1048573)-(2, 3)")
@pytest.mark.parametrize(("shape", "start", "size"), LARGE, ids=str)
def test_large_arrays_are_rounded_as_their_chunks_are(shape, start, size):
    words = jax.random.key_data(KEY)
    got = piece(lambda: counter_bits(words, shape), start, size)
    for row in np.ndindex(size[:-1]):
        first = 0
        for axis, length in enumerate(shape):
            first = first * length + start[axis] + ([*row, 0])[axis]
        offset = jnp.asarray(np.uint32([first & 0xFFFFFFFF, first >> 32]))
        np.testing.assert_array_equal(got[row], counter_bits(words, size[-1:], offset))
