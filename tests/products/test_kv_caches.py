"""Caches of keys and values in 8 and 4 bits, rotated or not. Oracles: NumPy in float64; the wide
cache of Flax.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from refused import refused
from scipy.linalg import hadamard

import qtoolkit as qt

WIDE = qt.Recipe((None, None), gradient=None)
SHAPE = (2, 6, 3, 32)  # batch, tokens, heads, features


def tokens(count=6, seed=0):
    """Keys and values; one channel of the keys has large numbers, as in language models."""
    k, v = np.random.default_rng(seed).normal(size=(2, 2, count, 3, 32)).astype(np.float32)
    k[..., 5] *= 20
    return jnp.asarray(k), jnp.asarray(v)


def rounded(x, largest):
    scale = np.abs(x).max(-1, keepdims=True) / largest
    return np.clip(np.rint(x / scale), -largest, largest) * scale


def by_numpy(x, largest, signs=None):
    x = np.asarray(x, np.float64)
    if signs is None:
        return rounded(x, largest)
    matrix = signs[:, None] * hadamard(32) / np.sqrt(32)
    return rounded(x @ matrix, largest) @ matrix.T


def signs_of(cache):
    """The signs of the transform, found by transforming a vector of ones one at a time."""
    unit = qt.scaling.hadamard_transform(jnp.eye(32), block=32, key=jax.random.key(cache.seed))
    return np.sign(np.asarray(unit)[:, 0])


@pytest.mark.parametrize("rotate", [False, True])
def test_own_attention_reads_what_it_stored(rotate):
    cache = qt.products.KVCache("int8", "int4", rotate=rotate)
    kept, (k, v) = cache.empty(SHAPE), tokens()

    @jax.jit
    def step(kept, k, v, index):
        kept = cache.store(kept, (k, v), index)
        return kept, cache.read(kept)

    for index in (0, 2, 4):
        kept, read = step(kept, k[:, index : index + 2], v[:, index : index + 2], index)
    signs = signs_of(cache) if rotate else None
    for got, x, largest in zip(read, (k, v), (127, 7), strict=True):
        expected = by_numpy(x, largest, signs)
        # A value in the middle of two codes may fall to either side in float32.
        assert (np.abs(got - expected) > 1e-4 * np.abs(expected).max()).mean() < 0.005
    sizes = [x.nbytes for x in kept]
    assert sizes[0] == 2 * 6 * 3 * (32 + 4)
    assert sizes[1] == 2 * 6 * 3 * (16 + 4)
    np.testing.assert_array_equal(cache.read(cache.empty(SHAPE))[0], np.zeros(SHAPE))


def attended(q, k, v):
    weights = np.einsum("bthf,bshf->bhts", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(weights - weights.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshf->bthf", weights, v)


def test_a_rotation_makes_the_error_of_attention_smaller():
    k, v = tokens(64)
    q = np.random.default_rng(1).normal(size=k.shape)
    exact = attended(q, np.asarray(k, np.float64), np.asarray(v, np.float64))
    errors = {}
    for rotate in (False, True):
        cache = qt.products.KVCache("int4", "int4", rotate=rotate)
        kept = cache.store(cache.empty(k.shape), (k, v), 0)
        errors[rotate] = np.linalg.norm(attended(q, *map(np.asarray, cache.read(kept))) - exact)
    assert errors[True] < 0.7 * errors[False]


FORMATS = [
    ("int8", "int4"),
    qt.products.KVCache("e4m3fn", None),
    qt.products.KVCache("int4", rotate=True),
]


@pytest.mark.parametrize("kv_cache", FORMATS, ids=["pair", "keys alone", "rotated"])
def test_attention_of_nnx_and_linen(kv_cache):
    """Oracle: the wide cache, and that both packages keep the same codes."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 1, 64)), jnp.float32)
    plain = nnx.MultiHeadAttention(2, 64, decode=True, rngs=nnx.Rngs(0))
    plain.init_cache((2, 5, 64))
    wrapped = qt.nnx.wrap(plain, WIDE, kv_cache=kv_cache)
    step = nnx.jit(lambda model, x: model(x))
    for one in x:
        got, expected = step(wrapped, one), step(plain, one)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 0.3

    module = nn.MultiHeadDotProductAttention(2, decode=True)
    linen = qt.linen.wrap(module, WIDE, kv_cache=kv_cache)
    variables = linen.init(jax.random.key(0), jnp.zeros((2, 5, 64)))
    params = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    variables = {"params": params, "cache": variables["cache"]}
    run = jax.jit(lambda variables, x: linen.apply(variables, x, mutable=["cache"]))
    for one in x:
        out, changed = run(variables, one)
        variables = {**variables, **changed}
    np.testing.assert_allclose(out, got, rtol=1e-4, atol=1e-4)
    cache = changed["cache"]
    for name in ("cached_key", "cached_value"):
        ours, theirs = getattr(wrapped, name).get_value(), cache[name]
        assert isinstance(ours, qt.QArray) == isinstance(theirs, qt.QArray)
        if isinstance(ours, qt.QArray):
            assert ours.spec == theirs.spec
            assert ours.rotation == theirs.rotation
            assert np.abs(ours.dequantize() - theirs.dequantize()).max() < 0.2


class OwnAttention(nnx.Module):
    """Attention with a cache of its own, as users write it."""

    def __init__(self, cache, rngs):
        self.query, self.key, self.value = (nnx.Linear(32, 32, rngs=rngs) for _ in range(3))
        self.format, self.kept = cache, nnx.Cache(cache.empty((2, 6, 1, 32)))
        self.index = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        q, k, v = (f(x)[:, :, None] for f in (self.query, self.key, self.value))
        self.kept.set_value(self.format.store(self.kept.get_value(), (k, v), self.index[...]))
        self.index[...] += x.shape[1]
        k, v = self.format.read(self.kept.get_value())
        mask = (jnp.arange(6) < self.index[...])[None, None, None]
        return nnx.dot_product_attention(q, k, v, mask=mask)[:, :, 0]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_module_of_nnx_keeps_its_own_cache(is_wrapped):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 32)), jnp.float32)
    model = OwnAttention(qt.products.KVCache("int8", "int4", rotate=True), nnx.Rngs(0))
    exact = OwnAttention(qt.products.KVCache(None), nnx.Rngs(0))
    model = qt.nnx.wrap(model, WIDE) if is_wrapped else model
    step = nnx.jit(lambda model, x: model(x))
    outs = [step(model, x[:, i : i + 1]) for i in range(6)]
    expected = [step(exact, x[:, i : i + 1]) for i in range(6)]
    error = np.linalg.norm(np.stack(outs) - np.stack(expected)) / np.linalg.norm(expected)
    assert 1e-3 < error < 0.15
    keys, values = model.kept.get_value()
    assert keys.codes.dtype == jnp.uint8
    assert values.codes.shape[-1] == 16
    assert model.index[...] == 6


class OwnLinen(nn.Module):
    cache: qt.products.KVCache

    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.Dense(32, name=name)(x)[:, :, None] for name in ("q", "k", "v"))
        kept = self.variable("cache", "kept", self.cache.empty, (2, 6, 1, 32))
        index = self.variable("cache", "index", jnp.zeros, (), jnp.int32)
        kept.value = self.cache.store(kept.value, (k, v), index.value)
        index.value = index.value + x.shape[1]
        k, v = self.cache.read(kept.value)
        mask = (jnp.arange(6) < index.value)[None, None, None]
        return nn.dot_product_attention(q, k, v, mask=mask)[:, :, 0]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_module_of_linen_keeps_its_own_cache(is_wrapped):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 32)), jnp.float32)
    outs = {}
    for cache in (qt.products.KVCache("int8", "int4"), qt.products.KVCache(None)):
        module = OwnLinen(cache)
        variables = module.init(jax.random.key(0), x[:, :1])
        variables["cache"] = {"kept": cache.empty((2, 6, 1, 32)), "index": jnp.zeros((), jnp.int32)}
        module = qt.linen.wrap(module, WIDE) if is_wrapped else module
        for i in range(6):
            out, changed = module.apply(variables, x[:, i : i + 1], mutable=["cache"])
            variables = {**variables, **changed}
        outs[cache] = out
    quantized, exact = outs.values()
    error = np.linalg.norm(quantized - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 0.15


def test_messages():
    with refused(ValueError, "KVCache: kv_cache=uint8, which has no negative numbers"):
        qt.products.KVCache("uint8")
    cache = qt.products.KVCache("int8")
    kept = cache.empty(SHAPE)
    refused(ValueError, r"axis=3 is that of features", cache.store, kept, tokens(1), 0, axis=-1)
    with refused(ValueError, "wrap: kv_cache=nvfp4"):
        qt.nnx.wrap(nnx.MultiHeadAttention(2, 64, rngs=nnx.Rngs(0)), kv_cache=("int8", "nvfp4"))


def test_tokens_that_do_not_fit():
    """JAX would move them, over the tokens that are there."""
    cache = qt.products.KVCache("int8")
    kept = cache.empty((1, 4, 2, 8))
    one = jnp.ones((1, 2, 2, 8))
    for index in (3, 9, -1):
        with refused(ValueError, r"^KVCache\.store: tokens .* of 4"):
            cache.store(kept, (one, one), index)
    for other in (qt.products.KVCache("int8", rotate=True), qt.products.KVCache("int4")):
        with refused(ValueError, r"store by the KVCache that made it"):
            other.store(kept, (one, one), 0)
    with refused(ValueError, r"shape \(1, 2, 1, 8\)"):
        cache.store(kept, (one[:, :, :1], one[:, :, :1]), 0)
