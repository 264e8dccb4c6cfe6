"""Stochastic rounding: its bias, its streams.

The formulas themselves are enumerated in `test_casts_exact.py`; the generator has `test_random.py`.
Statistics here are at fixed seeds; each family of them stays within what chance exceeds once in a
thousand runs of the whole family (Bonferroni).
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

VARIANTS = ("A", "B", "C")
KEY = jax.random.key(7)
X = np.random.default_rng(0).normal(0, 20, (6, 35)).astype(np.float32)


def bound(comparisons):
    """Of standard normal statistics, either side."""
    return NormalDist().inv_cdf(1 - 1e-3 / 2 / comparisons)


def stochastic(function, x, key, fmt="e4m3fn", **kwargs):
    return function(x, fmt, rounding="stochastic", key=key, **kwargs)


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
