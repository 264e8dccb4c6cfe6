"""Attention's cache in few bits. Oracles: the wide cache, with a bound from the formats' steps in
NumPy float64; itself, rewound.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refused import refused

import qtoolkit as qt
from qtoolkit.products import Recipe
from qtoolkit.scaling import QArray

HEADS, FEATURES, LENGTH = 2, 16, 6
WIDE = Recipe((None, None), gradient=None)
TOKENS = jnp.asarray(np.random.default_rng(0).normal(size=(LENGTH, 3, 1, FEATURES)), jnp.float32)


def attention():
    made = nnx.MultiHeadAttention(HEADS, FEATURES, decode=True, rngs=nnx.Rngs(0))
    made.init_cache((3, LENGTH, FEATURES))
    return made


@nnx.jit
def step(model, x):
    return model(x)


@pytest.mark.quick
def test_rewound_and_replayed_it_gives_the_same_bits():
    plain = attention()
    model = qt.nnx.wrap(plain, WIDE, kv_cache="e4m3fn")
    outs = [step(model, x) for x in TOKENS]
    codes = model.cached_key.get_value().codes
    model.cache_index[...] = jnp.array(2)
    for x, expected in zip(TOKENS[2:], outs[2:], strict=True):
        np.testing.assert_array_equal(step(model, x), expected)
    np.testing.assert_array_equal(model.cached_key.get_value().codes, codes)
    model.init_cache((3, LENGTH, FEATURES))
    assert isinstance(model.cached_key.get_value(), QArray)
    for x, expected in zip(TOKENS, outs, strict=True):
        np.testing.assert_array_equal(step(model, x), expected)
    assert plain.cache_index[...] == 0  # the original's cache is its own
    assert not np.any(plain.cached_key[...])


def test_each_token_is_rounded_once():
    """Oracle: `qt.quantize` of the keys that the wide cache holds."""
    plain = attention()
    model = qt.nnx.wrap(plain, WIDE, kv_cache="e4m3fn")
    for x in TOKENS[:4]:
        step(model, x), step(plain, x)
    kept, keys = model.cached_key.get_value(), plain.cached_key[...]
    expected = qt.quantize(keys, qt.BlockFormat.token("e4m3fn"))
    np.testing.assert_array_equal(kept.codes[:, :4], expected.codes[:, :4])
    np.testing.assert_array_equal(kept.scale[:, :4], expected.scale[:, :4])
    assert keys.nbytes / kept.nbytes == 4 * 8 / (8 + 4)  # 8 features to a head, a float32 scale


def test_the_output_is_close_to_that_of_the_wide_cache():
    """A key k_t differs by at most e_t = max|k_t| * 2**-4 in each feature: half a step of E4M3 is
    2**-4 of an element, and smaller for subnormals. A logit moves by at most
    d = max_t |q|_1 e_t / sqrt(features), a weight by the factor exp(2 d), and the values
    by max|v_t| * 2**-4; the projection after that is linear.
    """
    plain = attention()
    model = qt.nnx.wrap(plain, WIDE, kv_cache="e4m3fn")
    for x in TOKENS:
        got, expected = step(model, x), step(plain, x)
    q = np.asarray(plain.query(TOKENS[-1]), np.float64)[:, 0]  # [batch, heads, features]
    k, v = (np.asarray(c[...], np.float64) for c in (plain.cached_key, plain.cached_value))
    logit = np.abs(q).sum(-1) * (np.abs(k).max(-1) * 2.0**-4).max(1) / np.sqrt(q.shape[-1])
    largest = np.abs(v).max((1, 3))  # [batch, heads]
    moved = largest * (np.exp(2 * logit) - 1 + 2.0**-4 * np.exp(2 * logit))
    kernel = np.abs(np.asarray(plain.out.kernel[...], np.float64)).sum(1)  # [heads, out]
    bound = np.einsum("bh,ho->bo", moved, kernel)
    difference = np.abs(np.asarray(got - expected))[:, 0]
    assert np.all(difference <= bound + 1e-5)
    assert difference.max() > 1e-4  # the cache is not wide


@pytest.mark.sample("int4")
@pytest.mark.parametrize(
    "spec", ["int4", qt.BlockFormat(element="e4m3fn", block=(8,), scale="e8m0fnu")]
)
def test_other_formats(spec):
    model = qt.nnx.quantize(attention(), qt.recipes.weight_only_e4m3, kv_cache=spec)
    first = model(TOKENS[0])
    model(TOKENS[1])
    model.cache_index[...] = jnp.array(0)
    np.testing.assert_array_equal(model(TOKENS[0]), first)


@pytest.mark.quick
@pytest.mark.parametrize("spec", ["uint8", "e8m0fnu", qt.BlockFormat.token("uint4")])
def test_a_cache_holds_negative_numbers(spec):
    """Oracle: keys and values have both signs, so without one about half of them would be lost."""
    with refused(ValueError, r"kv_cache=\w+, which has no negative numbers"):
        qt.nnx.wrap(attention(), WIDE, kv_cache=spec)


def test_zero_points_hold_negative_numbers_as_well():
    """Oracle: an 8-bit code with a zero point is off by at most a step, range / 255."""
    plain = attention()
    spec = qt.BlockFormat.token("uint8", zero_point=True)
    model = qt.nnx.wrap(plain, WIDE, kv_cache=spec)
    step(model, TOKENS[0]), step(plain, TOKENS[0])
    got = np.asarray(model.cached_key.get_value().dequantize())
    expected = np.asarray(plain.cached_key[...])
    assert expected.min() < 0
    np.testing.assert_allclose(got, expected, atol=2 * np.abs(expected).max() / 255)


@pytest.mark.quick
def test_messages():
    with refused(ValueError, "kv_cache=e4m3fn by tensor"):
        qt.nnx.wrap(attention(), WIDE, kv_cache=qt.BlockFormat.tensor("e4m3fn"))
    refused(ValueError, "kv_cache=nvfp4", qt.nnx.wrap, attention(), WIDE, kv_cache="nvfp4")
    with refused(ValueError, r"for Linear, which has no nnx.MultiHeadAttention"):
        qt.nnx.wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), kv_cache="e4m3fn")
    model = qt.nnx.wrap(attention(), WIDE, kv_cache="e4m3fn")
    with pytest.raises(ValueError, match="expected key shape"):  # Flax's own
        model(jnp.ones((3, 2, FEATURES)))
    assert isinstance(model.cached_key.get_value(), QArray)  # as it was
    assert jax.tree.leaves(nnx.state(model, nnx.Cache))


def test_a_cache_in_another_format_is_converted():
    first = qt.nnx.wrap(attention(), WIDE, kv_cache="e4m3fn")
    step(first, TOKENS[0])
    second = qt.nnx.wrap(first, WIDE, kv_cache="int8")
    assert second.cached_key.get_value().spec.element == qt.format("int8")
    assert first.cached_key.get_value().spec.element == qt.format("e4m3fn")
    np.testing.assert_allclose(step(second, TOKENS[1]), step(first, TOKENS[1]), atol=0.05)
