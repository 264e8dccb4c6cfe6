"""float64 of NumPy and Python's numbers where JAX has no 64-bit types: one rounding, to 32 bits.

Oracle: the nearest value of a format by exact fractions, of NumPy's float64 quotients for blocks.
"""

import bisect
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refused import refused

import qtoolkit as qt
from qtoolkit import formats

VALUES = ("e4m3fn", "e5m2", "e2m1fn", "float16", "bfloat16", "float32", "int8", "nf4")


def nearest(x, fmt):
    """float64 numbers to the nearest finite values of `fmt`, ties to the even code, as float64."""
    if fmt.bits > 16:
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)
    values = fmt.values()
    codes = [c for c in range(1 << fmt.bits) if np.isfinite(values[c])]
    codes = [c for c in codes if values[c] != 0 or not np.signbit(values[c])]
    codes.sort(key=values.__getitem__)
    ordered = [Fraction(values[c]) for c in codes]

    def one(number):
        exact = Fraction(float(number))
        at = bisect.bisect_left(ordered, exact)
        if at in (0, len(ordered)):
            return ordered[min(at, len(ordered) - 1)]
        below, above = exact - ordered[at - 1], ordered[at] - exact
        if below == above:
            return ordered[at - (codes[at] % 2 == 1)]
        return ordered[at - (below < above)]

    return np.array([float(one(n)) for n in np.ravel(x)]).reshape(np.shape(x))


def near_ties(fmt, count=300):
    """float64 numbers on ties of `fmt` and next to them, closer than float32 can tell."""
    rng = np.random.default_rng(0)
    if fmt.bits > 16:
        x = rng.normal(size=count)
        ties = np.float64(x.astype(np.float32)) * (1 + 2.0**-24)
    else:
        values = np.unique(fmt.values()[np.isfinite(fmt.values())])
        ties = (values[1:] + values[:-1]) / 2
        ties = ties[rng.permutation(len(ties))[:count]]
    return np.concatenate([ties * (1 + d) for d in (0, 1e-12, -1e-12)] + [rng.normal(size=count)])


@pytest.mark.parametrize("name", VALUES)
def test_casts_round_the_exact_number(name):
    fmt = qt.format(name)
    x = near_ties(fmt)
    expected = nearest(x, fmt)
    for cast in (qt.fake_cast, qt.round_to_format):
        for got in (cast(x, fmt), jax.jit(lambda cast=cast: cast(x, fmt))()):
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, expected)
        one = cast(float(x[1]), fmt), cast(x[1], fmt), cast(x.astype(">f8")[1:2], fmt)
        assert {y.dtype for y in one} == {np.dtype("float32")}
        assert {float(y.reshape(())) for y in one} == {expected[1]}
    usual = (np.abs(x) > 1e-30) & (np.abs(x) < 1e30)
    x, expected = x[usual], expected[usual]
    if fmt.mantissa_bits <= 21:  # without a shift, with a scale of 2**n
        for scale in (1.0, np.float32(0.5), jnp.float32(8)):
            got = qt.fake_convert(x / np.float64(scale), scale, fmt=fmt)
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, expected / np.float64(scale))


def test_integers_keep_what_jax_makes_of_them():
    x = np.array([2**40 + 1, 5, -7, -(2**62)])
    got = qt.round_to_format(x, "int8")
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, np.clip(x, -128, 127))
    assert qt.round_to_format(np.uint64([2**63]), "uint4").dtype == np.uint32
    assert int(qt.round_to_format(300, "uint8")) == 255
    with refused(ValueError, "dtype int32 does not hold every finite value of uint32"):
        qt.round_to_format(x, "uint32")


def test_the_format_must_fit_float32():
    wide = qt.FloatFormat(
        name="wide", exponent_bits=8, mantissa_bits=4, bias=200,
        specials=formats.Specials.IEEE, overflow=formats.Overflow.INF,
    )  # fmt: skip
    for cast in (qt.fake_cast, qt.round_to_format):
        refused(ValueError, "dtype float32 does not hold every finite value of", cast, 0.3, wide)


def test_random_bits_and_derivatives_of_64_bit_numbers():
    """The stream is that of the float32 array: 1.03125 is a quarter above 1 in E4M3FN."""
    x = np.full(64, 1.03125)
    keys = jax.random.split(jax.random.key(0), 3)
    rounded = [
        jax.vmap(lambda key, x=x: qt.fake_cast(x, "e4m3fn", rounding="stochastic", key=key))(keys)
        for x in (x, jnp.asarray(x, jnp.float32))
    ]
    np.testing.assert_array_equal(*rounded)
    slope = jax.grad(lambda s: (s * qt.fake_cast(x, "e4m3fn")).sum())(2.0)
    assert float(slope) == 64
    by_scale = jax.grad(lambda s: qt.fake_convert(x, s, fmt="e4m3fn").sum())(jnp.float32(1))
    assert float(by_scale) == pytest.approx(64 * (1.03125 - 1))


BLOCKS = [
    *formats.BLOCK_FORMATS,
    qt.BlockFormat.tensor("e4m3fn"),
    qt.BlockFormat.channel("int8"),
    qt.BlockFormat.tensor("float16", scale=None),
    qt.BlockFormat.token("uint8", zero_point=True),
]


@pytest.mark.sample(
    *("mxfp8_e4m3", "mxint8", "deepseek_128x128_e8m0", "int4_group128"),
    "uint8 by token@-1, zero_point=True",
)
@pytest.mark.parametrize("spec", BLOCKS, ids=lambda spec: spec.name)
def test_blocks_divide_the_exact_numbers(spec):
    """Elements next to ties, closer than float32 can tell, divided in float64 by stored scales."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(128, 128)) * np.exp2(rng.integers(-3, 4, (128, 1)))
    first = qt.quantize(x, spec)
    scale, zero = whole(first), 0
    if spec.zero_point:
        zero = spread(first.zero_point, first)
        ties = rng.integers(-100, 100, x.shape) + 0.5
    else:
        values = np.unique(spec.element.values()[np.isfinite(spec.element.values())])
        ties = rng.choice((values[1:] + values[:-1])[1:-1] / 2, x.shape)
    x = ties * scale * (1 + rng.choice([0, 1e-12, -1e-12], x.shape))
    if spec.zero_point:
        elements = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
    else:
        elements = nearest(x / scale, spec.element)
        elements = np.maximum(elements, -127) if spec.narrow_range else elements
    expected = (elements * scale).astype(np.float32)
    scales = given(first)
    q = qt.quantize(x, spec, **scales)
    assert (q.dtype, q.dequantize().dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(q.dequantize(), expected)
    jitted = jax.jit(lambda scales: qt.fake_quantize(x, spec, **scales))
    for y in (qt.fake_quantize(x, spec, **scales), jitted(scales)):
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y, expected)
    found = qt.metrics(x, spec, **scales)
    np.testing.assert_allclose(found.max_error, np.abs(x - expected).max(), rtol=1e-4)
    noise = 10 * np.log10(np.sum(x**2) / np.sum((x - expected) ** 2))
    np.testing.assert_allclose(found.sqnr_db, noise, rtol=1e-4)


def test_float64_scales_from_float32_powers_from_exact_amax():
    x = np.random.default_rng(0).normal(size=(8, 128))
    for spec in ("int8", "e4m3fn", "nvfp4", "int4_group32", "deepseek_1x128"):
        narrow = qt.quantize(x.astype(np.float32), spec)
        np.testing.assert_array_equal(
            np.asarray(qt.quantize(x, spec).scale), np.asarray(narrow.scale)
        )
    for amax, scale in ((448.0, 1), (448 * (1 + 1e-12), 2), (448 * (1 - 1e-12), 1)):
        q = qt.quantize(np.full((1, 32), amax), "mxfp8_e4m3")  # the least 2**e that never clamps
        assert float(q.scale[0, 0]) == scale
    q = qt.quantize(np.float64([1e300, -1.0, np.inf] + [0] * 29), "mxfp4")
    assert np.isfinite(np.asarray(q.dequantize())).all()
    assert float(qt.fake_quantize(-0.75, "int8")) == -0.75


def given(q):
    fields = {name: getattr(q, name) for name in ("scale", "tensor_scale", "zero_point")}
    return {name: value for name, value in fields.items() if value is not None}


def whole(q):
    """What an element is multiplied by, float64."""
    if q.scale is None:
        return 1.0
    scale = np.asarray(q.scale).astype(np.float64)
    if q.tensor_scale is not None:
        scale = (scale * float(q.tensor_scale)).astype(np.float32).astype(np.float64)
    return spread(scale, q) * 2.0**q.spec.element_exponent


def spread(per_block, q):
    per_block = np.asarray(per_block)
    for axis, (n, length) in enumerate(zip(q.shape, q.blocks.lengths, strict=True)):
        per_block = np.take(per_block, np.arange(n) // length, axis)
    return per_block
