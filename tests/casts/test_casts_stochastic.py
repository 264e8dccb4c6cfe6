"""Stochastic rounding: its generator, its bias, its streams.

The formulas themselves are enumerated in `test_casts_exact.py`. Statistics here are at fixed seeds;
each family of them stays within what chance exceeds once in a thousand runs of the whole family
(Bonferroni).
"""

import itertools
import math
from fractions import Fraction
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts_oracle import SPECS, assert_same_bits, bits_of, fraction_code, p3109, stochastic_codes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qtoolkit as qt
from qtoolkit.casts._random import _high_product, counter_bits, element_index

VARIANTS = ("A", "B", "C")
KEY = jax.random.key(7)
X = np.random.default_rng(0).normal(0, 20, (6, 35)).astype(np.float32)


def bound(comparisons):
    """Of standard normal statistics, either side."""
    return NormalDist().inv_cdf(1 - 1e-3 / 2 / comparisons)


def stochastic(function, x, key, fmt="e4m3fn", **kwargs):
    return function(x, fmt, rounding="stochastic", key=key, **kwargs)


# The generator.

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


# The bias: how often a number rounds away from zero, against the exact probability.

REPEATS = 2**14
FRACTIONS = [Fraction(1, 64), Fraction(1, 4), Fraction(26215, 2**18), Fraction(1, 2)]
FRACTIONS += [Fraction(4999, 2**13), Fraction(63, 64)]


def probability(v, variant, bits):
    """How many of the 2**bits random numbers round up, by counting: P3109's formulas."""
    if variant == "A":
        ups = math.floor(v * 2**bits)
    elif variant == "B":
        ups = (math.floor(v * 2 ** (bits + 1)) + 1) // 2
    else:
        ups = round(v * 2**bits)  # half to even
    return Fraction(ups, 2**bits)


def places(spec):
    """Codes below a gap: in the subnormals and around their end, in a binade, at the largest."""
    first, last = 2**spec.mantissa, spec.max_code
    middle = last // 2
    codes = {0, 1, first - 1, first, first + 1, middle, last - 1, last}
    return sorted(codes - ({last} if spec.overflow == "max" else set()))  # that one is clamped


@pytest.mark.sample("e4m3fn-3", "e5m2-24", "binary8p1se-5")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("e4m3fn", 3),
        ("e4m3fn", 16),
        ("e5m2", 24),
        ("e2m1fn", 16),
        ("bfloat16", 16),
        ("binary8p1se", 5),
    ],
)
def test_numbers_round_up_as_often_as_they_should(name, bits):
    spec = p3109(8, 1, True, True) if name.startswith("binary") else SPECS[name]
    lower, upper, x, fractions = [], [], [], []
    for code, v, sign in itertools.product(places(spec), FRACTIONS, (1, -1)):
        low, high = spec.fraction(code), spec.fraction(code + 1)
        exact = sign * (low + v * (high - low))
        if abs(float(exact)) < 2.0**-149 or Fraction(float(np.float32(float(exact)))) != exact:
            continue  # bfloat16's subnormals: float32 has 16 bits more
        minus = spec.sign if sign < 0 else 0
        above = code + 1 if code < spec.max_code else spec.overflowed
        lower.append(code + minus if code or spec.signed_zero_and_nan else 0)
        upper.append(above if above == spec.nan and not spec.signed_zero_and_nan else above + minus)
        x.append(float(exact))
        fractions.append(v)
    x = np.repeat(np.float32(x)[:, None], REPEATS, 1)
    lower, upper = (np.array(codes, spec.unsigned)[:, None] for codes in (lower, upper))

    @jax.jit
    def encode(x):
        return [
            qt.encode(x, fmt, rounding=qt.Stochastic(v, bits=bits), saturation="none", key=KEY)
            for v in VARIANTS
        ]

    fmt = qt.format(name)
    statistics = []
    for variant, codes in zip(VARIANTS, map(np.asarray, encode(x)), strict=True):
        ups = codes != lower
        np.testing.assert_array_equal(codes[ups], np.broadcast_to(upper, codes.shape)[ups])
        counts = ups.sum(1)
        p = np.array([float(probability(v, variant, bits)) for v in fractions])
        certain = (p == 0) | (p == 1)
        np.testing.assert_array_equal(counts[certain], (REPEATS * p)[certain])
        # No two elements share a draw, so the counts are independent binomials.
        spread = np.sqrt(REPEATS * p * (1 - p))[~certain]
        statistics += list((counts - REPEATS * p)[~certain] / spread)
        statistics.append((counts - REPEATS * p)[~certain].sum() / np.sqrt((spread**2).sum()))
    assert len(statistics) > 60
    assert np.max(np.abs(statistics)) < bound(len(statistics))


@pytest.mark.sample("int8-finite")
@pytest.mark.parametrize("saturation", ["finite", "propagate", "none"])
@pytest.mark.parametrize("name", ["int8", "uint4", "int16"])
def test_integers_round_up_as_often_as_they_should(name, saturation):
    spec = SPECS[name]
    lowers = [0, 1, 5, spec.highest - 1, spec.highest]
    cases = [(low, v, s) for low in lowers for v in FRACTIONS for s in (1, -1)]
    x = np.float32([s * float(low + v) for low, v, s in cases])
    rounding = {v: qt.Stochastic(v, bits=10) for v in VARIANTS}

    @jax.jit
    def encode(x):
        return [
            qt.encode(x, name, rounding=rounding[v], saturation=saturation, key=KEY)
            for v in VARIANTS
        ]

    def written(magnitude, s):
        value = s * magnitude
        if saturation != "none":
            value = min(max(value, spec.lowest), spec.highest)
        return value % 2**spec.bits

    lower = np.array([written(low, s) for low, _, s in cases])[:, None]
    upper = np.array([written(low + 1, s) for low, _, s in cases])[:, None]
    clamped = (lower == upper)[:, 0]
    assert clamped.any() == (saturation != "none")
    statistics = []
    for variant, codes in zip(VARIANTS, encode(np.repeat(x[:, None], REPEATS, 1)), strict=True):
        codes = np.asarray(codes)
        assert np.all((codes == lower) | (codes == upper))
        counts = (codes != lower).sum(1)
        p = np.array([float(probability(v, variant, 10)) for _, v, _ in cases])
        spread = np.sqrt(REPEATS * p * (1 - p))
        statistics += list(((counts - REPEATS * p) / spread)[~clamped])
    assert np.max(np.abs(statistics)) < bound(len(statistics))


WIDE = [
    ("int32", "float32", 16),
    ("uint32", "float32", 24),
    ("int32", "bfloat16", 23),
    ("int64", "float64", 11),
    ("uint64", "float64", 24),
    ("int64", "float32", 24),
]


@pytest.mark.sample(
    *("int32-float32-16-A", "int32-float32-16-C", "uint32-float32-24-C", "int32-bfloat16-23-B"),
    *("int64-float64-11-B", "uint64-float64-24-A", "uint64-float64-24-B", "int64-float32-24-A"),
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("source", "name", "bits"), WIDE)
def test_full_width_integers_round_up_with_the_right_odds(source, name, bits, variant):
    """Oracle: rational arithmetic, at the random numbers where the decision changes.

    Two bits of 2**31 + 1 that were cut off as one sticky bit made it round up four times as often.
    """
    info, spec = np.iinfo(source), SPECS[name]
    top, width = int(info.max), info.bits
    values = [top, top - 1, top - 2, (top >> 1) + 2, (top >> 1) + 3, (top >> 1) + (1 << width // 3)]
    values += [-v for v in values if info.min < 0] + [info.min + 1 if info.min else 2**24 + 3]
    values += [
        int(v) for v in np.random.default_rng(0).integers(info.max // 2, info.max, 6, source)
    ]
    x, random, expected = [], [], []
    for value in values:
        ups = [0, 1, 2**bits - 2, 2**bits - 1]
        ups += _changes(Fraction(value), spec, variant, bits)
        for r in ups:
            x.append(value)
            random.append(r)
            expected.append(
                fraction_code(Fraction(value), spec, "finite", random=(variant, bits, r))
            )
    with jax.enable_x64(True):
        codes = qt.encode(
            np.array(x, source),
            name,
            rounding=qt.Stochastic(variant, bits=bits),
            random_bits=np.array(random, np.uint32),
        )
    np.testing.assert_array_equal(np.asarray(codes), np.array(expected, codes.dtype))


def _changes(value, spec, variant, bits):
    """The largest random number that rounds `value` as 0 does, and the next."""
    at_zero = fraction_code(value, spec, "finite", random=(variant, bits, 0))
    low, high = 0, 2**bits - 1
    while low < high:
        middle = (low + high + 1) // 2
        same = fraction_code(value, spec, "finite", random=(variant, bits, middle)) == at_zero
        low, high = (middle, high) if same else (low, middle - 1)
    return [low, min(low + 1, 2**bits - 1)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_at_the_edge_finite_saturation_clamps_whatever_the_bits(variant):
    """Between the largest value and the next in line, and beyond: nothing but the largest."""
    spec = SPECS["e4m3fn"]
    x = np.repeat(np.float32([449, 463, 464, 465, 479.9, 480, 1e9])[:, None], 512, 1)
    codes = np.asarray(qt.encode(x, "e4m3fn", rounding=qt.Stochastic(variant), key=KEY))
    np.testing.assert_array_equal(codes, np.full(x.shape, spec.max_code, np.uint8))


@pytest.mark.sample("e4m3fn-A")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2", "e3m2fn"])
def test_the_mean_of_random_numbers_is_kept(name, variant):
    """Their sum moves by no more than independent roundings do; the bias of A is 2**-17 steps."""
    spec = SPECS[name]
    rng = np.random.default_rng(5)
    size = 2**18
    # As many in each binade, the subnormals' and the largest gap included.
    top = float(spec.fraction(spec.max_code))
    low = np.log2(float(spec.fraction(1))) - 1
    x = np.exp2(rng.uniform(low, np.log2(top), size)).astype(np.float32) * rng.choice([-1, 1], size)
    x = x.astype(np.float32)
    q = np.asarray(
        qt.round_to_format(x, name, rounding=qt.Stochastic(variant), key=KEY), np.float64
    )
    values = np.array([float(spec.fraction(code)) for code in range(spec.max_code + 2)])
    at = np.searchsorted(values, np.abs(x), side="right") - 1
    step = values[at + 1] - values[at]
    v = (np.abs(x.astype(np.float64)) - values[at]) / step
    error = (np.abs(q) - np.abs(x)) / step
    assert np.all((error > -1) & (error < 1))
    spread = math.sqrt((v * (1 - v)).sum())
    assert abs(error.sum() + (variant == "A") * size * 2.0**-17) < bound(9) * spread
    # By binade, too: E4M3's 2**18 numbers leave some 14,000 for each.
    binade = np.floor(np.log2(np.abs(x))).astype(int)
    present = np.unique(binade)
    statistics = [
        error[binade == b].sum() / math.sqrt((v * (1 - v))[binade == b].sum() + 1e-300)
        for b in present
    ]
    assert np.max(np.abs(statistics)) < bound(9 * len(present))


# One key, one stream.


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


@pytest.mark.sample("encode")
@pytest.mark.quick
@pytest.mark.parametrize("function", [qt.encode, qt.fake_cast])
def test_the_same_bits_however_it_is_run(function):
    expected = np.asarray(stochastic(function, X, KEY))
    wide = expected.astype(np.float32)

    def run(x, key):
        return stochastic(function, x, key)

    assert_same_bits(jax.jit(run)(X, KEY), expected)
    assert_same_bits(jax.jit(lambda x: run(x, KEY))(X), expected)  # the key a constant
    fused = jax.jit(lambda x, key: run(x * 2, key).astype(jnp.float32) * 4 + 1)
    np.testing.assert_array_equal(fused(X / 2, KEY), wide * 4 + 1)
    transposed = jax.jit(lambda x, key: run(x.T, key).T)  # other layouts, the same indices
    assert_same_bits(transposed(X, KEY), np.asarray(run(X.T, KEY)).T)
    reduced = jax.jit(lambda x, key: jnp.max(run(x, key).astype(jnp.float32), axis=1))
    np.testing.assert_array_equal(reduced(X, KEY), wide.max(1))
    scanned = jax.lax.scan(lambda c, _: (c, run(X, KEY)), 0, length=2)[1]
    assert_same_bits(scanned[1], expected)
    assert_same_bits(jax.checkpoint(run)(X, KEY), expected)
    assert_same_bits(run(X.reshape(5, 42), KEY), expected.reshape(5, 42))  # C order is what counts
    other = np.asarray(run(X, jax.random.key(8)))
    assert 0.2 < np.mean(other.view(np.uint8) != expected.view(np.uint8)) < 0.7 or (
        0.2 < np.mean(other != expected) < 0.7
    )


def test_random_bits_do_not_change_what_the_format_holds():
    values = np.asarray(qt.decode(np.arange(256, dtype=np.uint8), "e4m3fn"))
    for variant in VARIANTS:
        codes = qt.encode(values, "e4m3fn", rounding=qt.Stochastic(variant), key=KEY)
        assert_same_bits(codes, np.arange(256, dtype=np.uint8))


@pytest.mark.sample("threefry2x32")
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_and_raw_ones_are_the_same(impl):
    typed = jax.random.key(11, impl=impl)
    raw = jax.random.key_data(typed)
    expected = stochastic(qt.encode, X, typed)
    assert_same_bits(stochastic(qt.encode, X, raw), expected)
    assert_same_bits(stochastic(qt.encode, X, np.asarray(raw)), expected)
    assert_same_bits(jax.jit(lambda key: stochastic(qt.encode, X, key))(raw), expected)
    others = [stochastic(qt.encode, X, k) for k in (jax.random.split(typed)[0], KEY)]
    assert all(np.mean(np.asarray(other) != np.asarray(expected)) > 0.2 for other in others)


@pytest.mark.sample("encode")
@pytest.mark.quick
@pytest.mark.parametrize("function", [qt.encode, qt.fake_cast])
def test_vmap_over_numbers_and_keys(function):
    keys = jax.random.split(KEY, len(X))
    raw = jax.random.key_data(keys)

    def run(x, key, offset=0):
        return stochastic(function, x, key, index_offset=offset)

    expected = np.stack([np.asarray(run(x, key)) for x, key in zip(X, keys, strict=True)])
    for batch in (keys, raw):
        assert_same_bits(jax.vmap(run)(X, batch), expected)
        assert_same_bits(jax.jit(jax.vmap(run))(X, batch), expected)
        assert_same_bits(jax.lax.map(lambda a: run(*a), (jnp.asarray(X), batch)), expected)
    across = jax.vmap(run, in_axes=(1, 0), out_axes=1)(X.T, keys)
    assert_same_bits(across, expected.T)
    one_key = jax.vmap(run, in_axes=(0, None))(X, KEY)
    assert_same_bits(one_key, np.stack([np.asarray(run(x, KEY)) for x in X]))
    one_x = jax.vmap(run, in_axes=(None, 0))(X[0], keys)
    assert_same_bits(one_x, np.stack([np.asarray(run(X[0], key)) for key in keys]))
    offsets = 35 * np.arange(len(X), dtype=np.uint32)
    continued = jax.vmap(run, in_axes=(0, None, 0))(X, KEY, offsets)
    assert_same_bits(continued, np.asarray(run(X, KEY)))  # rows of one stream


@pytest.mark.sample("0", "8589934585")
@pytest.mark.parametrize(
    "start", [0, 5, 2**16, 2**32 - 3, 2**32, 2**33 - 7, 2**63 - 2, 2**64 - 300]
)
def test_chunks_continue_the_stream(start):
    x = X.ravel()
    whole = np.asarray(stochastic(qt.encode, x, KEY, index_offset=start))
    for cuts in ([3], [1, 2, 4, 100], [7, 150]):
        bounds = [0, *cuts, x.size]
        parts = [
            stochastic(qt.encode, x[a:b], KEY, index_offset=start + a)
            for a, b in itertools.pairwise(bounds)
        ]
        assert_same_bits(np.concatenate(parts), whole, x)
    assert_same_bits(stochastic(qt.encode, x, KEY, index_offset=np.uint64(start)), whole)


def test_chunks_across_the_end_of_the_index_wrap():
    x = X.ravel()
    whole = np.asarray(stochastic(qt.encode, x, KEY, index_offset=2**64 - 4))
    assert_same_bits(stochastic(qt.encode, x[4:], KEY), whole[4:])


@pytest.mark.sample("uint8", "int16", "int32")
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint32])
def test_traced_offsets(dtype):
    x = X.ravel()
    run = jax.jit(lambda offset: stochastic(qt.encode, x, KEY, index_offset=offset))
    for start in (0, 3, 127):
        expected = stochastic(qt.encode, x, KEY, index_offset=start)
        assert_same_bits(run(dtype(start)), expected)
        assert_same_bits(
            stochastic(qt.encode, x, KEY, index_offset=jnp.asarray(start, dtype)), expected
        )


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_offsets_of_64_bits(dtype):
    x = X.ravel()
    starts = (0, 5, 2**32 - 3, 2**40 + 1)
    expected = {start: stochastic(qt.encode, x, KEY, index_offset=start) for start in starts}
    for start in starts:  # an array of NumPy is exact without x64, too
        assert_same_bits(
            stochastic(qt.encode, x, KEY, index_offset=np.array(start, dtype)), expected[start]
        )
    with jax.enable_x64(True):
        run = jax.jit(lambda offset: stochastic(qt.encode, x, KEY, index_offset=offset))
        for start in starts:
            assert_same_bits(run(jnp.asarray(start, dtype)), expected[start])
            assert_same_bits(stochastic(qt.encode, x, KEY, index_offset=start), expected[start])


def test_other_sources_draw_the_same_bits():
    """float64 of NumPy, float16 and integers: the bits depend on the key and the index alone."""
    x = np.asarray(X, np.float16)
    expected = stochastic(qt.encode, x.astype(np.float32), KEY)
    for source in (x, x.astype(np.float64)):
        assert_same_bits(stochastic(qt.encode, source, KEY), expected)
    whole = np.arange(-300, 300, dtype=np.int32)
    expected = stochastic(qt.encode, whole.astype(np.float32), KEY)
    for dtype in (np.int16, np.int32, np.int64):
        assert_same_bits(stochastic(qt.encode, whole.astype(dtype), KEY), expected)


# Random bits of the caller's own.


@pytest.mark.sample("uint8-()", "uint32-(1,)")
@pytest.mark.quick
@pytest.mark.parametrize("shape", [(), (1,), (35,), (6, 1), (1, 35), (6, 35)], ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_random_bits_broadcast_and_only_the_low_ones_count(shape, dtype):
    rng = np.random.default_rng(1)
    given = rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    for variant, bits in (("A", 7), ("B", 8), ("C", 3)):
        rounding = qt.Stochastic(variant, bits=bits)
        low = np.broadcast_to(given & dtype(2**bits - 1), X.shape)
        expected = stochastic_codes(X, SPECS["e5m2"], variant, bits, low)
        got = qt.encode(X, "e5m2", rounding=rounding, random_bits=given)
        assert_same_bits(got, expected, X)
        run = jax.jit(
            lambda r, rounding=rounding: qt.encode(X, "e5m2", rounding=rounding, random_bits=r)
        )
        assert_same_bits(run(given), expected, X)


def test_random_bits_are_mapped_like_the_numbers():
    given = np.random.default_rng(2).integers(0, 2**16, X.shape, np.uint16)

    def run(x, r):
        return qt.fake_cast(x, "e4m3fn", rounding="stochastic", random_bits=r)

    expected = np.asarray(run(X, given))
    assert_same_bits(jax.vmap(run)(X, given), expected)
    assert_same_bits(jax.vmap(run, in_axes=1, out_axes=1)(X, given), expected)
    slopes = jax.vmap(jax.grad(lambda x, r: jnp.sum(run(x, r))))(X, given)
    np.testing.assert_array_equal(slopes, np.ones_like(X))


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


# With derivatives.


@pytest.mark.sample("A")
@pytest.mark.parametrize("variant", VARIANTS)
def test_fake_cast_has_the_clipped_slope_whatever_the_bits(variant):
    x = np.float32([-500, -448, 448, 449, 470, 0, -0.0, 1e-9, 3.3, np.inf, -np.inf, np.nan])
    expected = np.float32([0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0])

    def total(x, key):
        rounding = qt.Stochastic(variant)
        return jnp.sum(jnp.nan_to_num(qt.fake_cast(x, "e4m3fn", rounding=rounding, key=key)))

    def inner(x, key):
        return qt.fake_cast(x, "e4m3fn", rounding=qt.Stochastic(variant), key=key)

    for seed in range(3):
        key = jax.random.key(seed)
        _, tangent = jax.jvp(lambda x, key=key: inner(x, key), (x,), (np.ones_like(x),))
        np.testing.assert_array_equal(tangent, expected)
        (cotangent,) = jax.vjp(lambda x, key=key: inner(x, key), x)[1](np.ones_like(x))
        np.testing.assert_array_equal(cotangent, expected)
    finite = x[np.isfinite(x)]
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(finite, KEY), expected[:9])


@pytest.mark.sample("None")
@pytest.mark.parametrize("shift", [None, 3.0])
def test_fake_convert_rounds_what_it_scaled_with_the_same_bits(shift):
    """Oracle: `round_to_format` of the scaled numbers; powers of two lose nothing."""
    scale = np.float32(4)
    moved = X * scale - np.float32(shift or 0)
    q = np.asarray(stochastic(qt.round_to_format, moved, KEY))
    expected = (q + np.float32(shift) if shift is not None else q) / scale

    def run(x, scale, key):
        return qt.fake_convert(x, scale, shift, fmt="e4m3fn", rounding="stochastic", key=key)

    assert_same_bits(run(X, scale, KEY), expected)
    assert_same_bits(jax.jit(run)(X, scale, KEY), expected)
    keys = jax.random.split(KEY, len(X))
    rows = [np.asarray(run(x, scale, key)) for x, key in zip(X, keys, strict=True)]
    assert_same_bits(jax.vmap(run, in_axes=(0, None, 0))(X, scale, keys), np.stack(rows))
    dx, ds = jax.grad(lambda x, s: jnp.sum(run(x, s, KEY)), (0, 1))(X, scale)
    inside = np.abs(moved) <= 448
    np.testing.assert_array_equal(dx, inside.astype(np.float32))
    # A float32 sum of 210 terms in any order: some ulps of the largest partial sum.
    np.testing.assert_allclose(ds, ((inside * X - expected) / scale).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.sample("none")
@pytest.mark.parametrize("scaling", ["none", "tensor"])
def test_round_cotangent_rounds_with_the_key(scaling):
    """Oracle: `round_to_format` of the cotangent, scaled as documented, with the same key."""
    largest = np.float32(57344)
    cotangent = X * np.float32(1.7)
    one = np.float32(1)
    scale = np.abs(cotangent).max() / largest if scaling == "tensor" else one
    q = stochastic(qt.round_to_format, cotangent * (one / scale), KEY, "e5m2")
    expected = np.asarray(q) * scale

    def back(x, ct, key):
        def through(x):
            return qt.round_cotangent(x, "e5m2", rounding="stochastic", key=key, scaling=scaling)

        y, pull = jax.vjp(through, x)
        return y, pull(ct)[0]

    for run in (back, jax.jit(back)):
        y, got = run(X, cotangent, KEY)
        assert_same_bits(y, X)
        assert_same_bits(got, expected)
    _, tangent = jax.jvp(
        lambda x: qt.round_cotangent(x, "e5m2", rounding="stochastic", key=KEY), (X,), (cotangent,)
    )
    assert_same_bits(tangent, cotangent)  # forward mode rounds nothing
    keys = jax.random.split(KEY, len(X))
    rows = [back(x, c, k)[1] for x, c, k in zip(X, cotangent, keys, strict=True)]
    assert_same_bits(jax.vmap(back)(X, cotangent, keys)[1], np.stack(rows))


def test_round_cotangent_continues_a_stream():
    whole = jax.grad(
        lambda x: jnp.sum(X * qt.round_cotangent(x, "e5m2", rounding="stochastic", key=KEY))
    )(X)
    part = jax.grad(
        lambda x: jnp.sum(
            X[2:] * qt.round_cotangent(x, "e5m2", rounding="stochastic", key=KEY, index_offset=70)
        )
    )(X[2:])
    assert_same_bits(part, np.asarray(whole)[2:])


# Meshes of eight devices.

GIVEN = np.random.default_rng(1).integers(0, 2**16, (16, 24), np.uint16)
ON_MESHES = np.random.default_rng(0).normal(0, 20, GIVEN.shape).astype(np.float32)
FIXED = {"rounding": "stochastic", "key": jax.random.key(3)}
FUNCTIONS = {
    "encode": lambda x, r: qt.encode(x, "e4m3fn", **FIXED),
    "A": lambda x, r: qt.encode(x, "e5m2", **FIXED | {"rounding": qt.Stochastic("A", bits=5)}),
    "C": lambda x, r: qt.encode(x, "bfloat16", **FIXED | {"rounding": qt.Stochastic("C", bits=24)}),
    "int8": lambda x, r: qt.cast(x, "int8", **FIXED),
    "offset": lambda x, r: qt.encode(x, "e4m3fn", **FIXED, index_offset=2**32 - 100),
    "bits": lambda x, r: qt.encode(x, "e4m3fn", rounding="stochastic", random_bits=r),
    "round": lambda x, r: qt.round_to_format(x, "e4m3fn", **FIXED),
    "fake_cast": lambda x, r: qt.fake_cast(x, "e4m3fn", **FIXED),
    "fake_convert": lambda x, r: qt.fake_convert(x, 2.0, 0.5, fmt="e5m2", **FIXED),
    "grad": lambda x, r: jax.grad(lambda x: jnp.sum(qt.fake_cast(x, "e4m3fn", **FIXED) ** 2))(x),
    "cotangent": lambda x, r: jax.grad(
        lambda x: jnp.sum(qt.round_cotangent(x, "e5m2", **FIXED) ** 2)
    )(x),
}


def draw_all(x, r):
    return {name: function(x, r) for name, function in FUNCTIONS.items()}


@pytest.fixture(scope="module")
def on_one_device():
    return draw_all(jnp.asarray(ON_MESHES), jnp.asarray(GIVEN))


@pytest.mark.devices(8)
@pytest.mark.sample("AxisType.Auto")
@pytest.mark.quick
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices_draw_what_one_draws(on_one_device, kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    together = jax.jit(draw_all)
    for spec in (P("a", "b"), P(("a", "b"), None), P(None, "b"), P("b", "a"), P()):
        where = NamedSharding(mesh, spec)
        with jax.set_mesh(mesh):
            x, r = jax.device_put(ON_MESHES, where), jax.device_put(GIVEN, where)
            runs = [together(x, r)]
            if spec == P("a", "b"):
                runs.append(draw_all(x, r))
                text = together.lower(x, r).compile().as_text()
                assert "all-gather" not in text
                assert "all-to-all" not in text
        for got in runs:
            for name, wanted in on_one_device.items():
                assert got[name].sharding.is_equivalent_to(where, 2), (name, spec)
                np.testing.assert_array_equal(bits_of(got[name]), bits_of(wanted), err_msg=name)


@pytest.mark.devices(8)
@pytest.mark.sample("AxisType.Auto")
@pytest.mark.quick
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_offset_of_a_shard_continues_the_stream(on_one_device, kind):
    mesh = jax.make_mesh((8,), ("a",), axis_types=(kind,))
    rows = P("a", None)

    def local(x):
        start = jax.lax.axis_index("a") * x.size
        return qt.encode(x, "e4m3fn", **FIXED, index_offset=start)

    with jax.set_mesh(mesh):
        x = jax.device_put(ON_MESHES, NamedSharding(mesh, rows))
        got = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)(x)
    np.testing.assert_array_equal(got, on_one_device["encode"])
