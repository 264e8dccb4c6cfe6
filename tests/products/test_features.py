"""Scales of tokens go along the features, wherever a model has moved these.

Oracle: causality itself. What comes before the last token may not move by a bit with it; and the
same model written with einsum, whose operands nothing transposes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import qtoolkit as qt

BATCH, TOKENS, WIDTH, HEADS = 2, 16, 16, 2
X = jnp.float32(np.random.default_rng(0).normal(size=(BATCH, TOKENS, WIDTH)))
STACKED = (BATCH * HEADS, TOKENS, WIDTH // HEADS)
SCORES = {  # of queries and keys [batch, heads, tokens, features]
    "einsum": lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k),
    "swapaxes": lambda q, k: q @ k.swapaxes(-1, -2),
    "mT": lambda q, k: q @ k.mT,
    "transpose": lambda q, k: q @ jnp.transpose(k, (0, 1, 3, 2)),
    "moveaxis": lambda q, k: q @ jnp.moveaxis(k, -1, -2),
    "einsum of transposed": lambda q, k: jnp.einsum("bhqd,bhdk->bhqk", q, k.mT),
    "scaled": lambda q, k: q @ (k.mT * 0.5) * 2,
    "masked": lambda q, k: q @ jnp.where(jnp.isnan(k.mT), 0, k.mT),
    "reshaped": lambda q, k: (q.reshape(STACKED) @ k.mT.reshape(BATCH * HEADS, -1, TOKENS)).reshape(
        BATCH, HEADS, TOKENS, TOKENS
    ),
    "broadcast": lambda q, k: (q[:, :, None] @ k.mT[:, :, None])[:, :, 0],
    "broadcast to": lambda q, k: (
        q[:, :, None] @ jnp.broadcast_to(k.mT[:, :, None], (BATCH, HEADS, 1, 8, TOKENS))
    )[:, :, 0],
    "joined": lambda q, k: q @ jnp.concatenate([k.mT[..., :5], k.mT[..., 5:]], -1),
    "remat": lambda q, k: jax.checkpoint(lambda q, turned: q @ turned)(q, k.mT),
    "jit": lambda q, k: jax.jit(lambda q, turned: q @ turned)(q, k.mT),
    "other side": lambda q, k: (k @ q.mT).mT,
    "scan": lambda q, k: jax.lax.scan(lambda _, a: (None, a[0] @ a[1]), None, (q, k.mT))[1],
}


def attended(scores, qkv):
    q, k, v = (
        part.reshape(BATCH, TOKENS, HEADS, -1).swapaxes(1, 2) for part in jnp.split(qkv, 3, -1)
    )
    seen = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores(q, k), -1e30)
    return (jax.nn.softmax(seen) @ v).swapaxes(1, 2).reshape(BATCH, TOKENS, -1)


class Attention(nnx.Module):
    def __init__(self, name):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
        self.name = name

    def __call__(self, x):
        return self.out(attended(SCORES[self.name], self.qkv(x)))


class LinenAttention(nn.Module):
    name_of_scores: str

    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(attended(SCORES[self.name_of_scores], nn.Dense(3 * WIDTH)(x)))


class Turned(nnx.Module):
    """Kernels on the left of columns of features, whose results are turned back."""

    def __init__(self):
        self.first = nnx.Param(jnp.float32(np.random.default_rng(1).normal(size=(24, WIDTH))))
        self.second = nnx.Param(jnp.float32(np.random.default_rng(2).normal(size=(WIDTH, 24))))

    def __call__(self, x):
        hidden = (self.first @ x.mT).mT
        scores = jnp.tril(hidden @ hidden.mT)  # two activations
        return (self.second @ (scores @ hidden).mT).mT


def moved(call, axis=1):
    """How far outputs move before the last place of an axis, when the input there does."""
    last = (slice(None),) * axis + (-1,)
    before, after = call(X), call(X.at[last].multiply(30.0))
    rest = (slice(None),) * axis + (slice(-1),)
    return np.abs(np.asarray(after - before))[rest].max()


@nnx.jit
def run(model, x):
    return model(x)


@pytest.mark.sample("einsum")
@pytest.mark.parametrize("name", SCORES)
def test_attention_of_ones_own_is_causal(name):
    """Except where nothing says which axis the features are: jax.numpy.flip of them, and such."""
    wrapped = qt.nnx.wrap(Attention(name), qt.recipes.token_scaled)
    assert moved(functools.partial(run, wrapped)) == 0
    assert moved(functools.partial(run, qt.nnx.wrap(Attention(name), qt.recipes.te_current))) > 0
    if name not in ("scaled", "other side"):  # which compute other numbers, or in another order
        alike = qt.nnx.wrap(Attention("einsum"), qt.recipes.token_scaled)
        np.testing.assert_allclose(run(wrapped, X), run(alike, X), rtol=2e-6, atol=2e-6)


@pytest.mark.sample("scores first")
@pytest.mark.parametrize("is_left", [False, True], ids=["scores first", "scores last"])
def test_scores_with_keys_first_are_cut_by_queries(is_left):
    class KeysFirst(nnx.Module):
        def __init__(self):
            self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            q, k, v = jnp.split(self.qkv(x), 3, -1)
            seen = jnp.triu(jnp.ones((TOKENS, TOKENS), bool))
            scores = jax.nn.softmax(jnp.where(seen, k @ q.mT, -1e30), axis=-2)  # [keys, queries]
            return (v.mT @ scores).mT if is_left else jnp.einsum("bkq,bkd->bqd", scores, v)

    assert moved(functools.partial(run, qt.nnx.wrap(KeysFirst(), qt.recipes.token_scaled))) == 0


@pytest.mark.sample("swapaxes")
@pytest.mark.parametrize("name", ["swapaxes", "mT", "einsum"])
def test_so_it_is_in_linen(name):
    module = qt.linen.wrap(LinenAttention(name), qt.recipes.token_scaled)
    variables = module.init(jax.random.key(0), X)
    assert moved(jax.jit(functools.partial(module.apply, variables))) == 0


@pytest.mark.quick
def test_kernels_as_lhs():
    assert moved(functools.partial(run, qt.nnx.wrap(Turned(), qt.recipes.token_scaled))) == 0


@pytest.mark.quick
@pytest.mark.parametrize("subscripts", ["btd,df->btf", "bdt,df->bft", "tbd,df->fbt", "dbt,df->tbf"])
def test_what_meets_a_kernel_is_cut_where_the_product_sums(subscripts):
    """nnx.Einsum; and by a rewritten jnp.einsum the same numbers. Oracle: NumPy, by tokens."""
    given = subscripts.split(",")[0]
    layer = nnx.Einsum(subscripts, (WIDTH, 8), rngs=nnx.Rngs(0))
    x = np.asarray(jnp.einsum(f"btd->{given}", X))
    recipe = qt.Recipe((qt.BlockFormat.token("e4m3fn"), None), gradient=None)
    wrapped = qt.nnx.wrap(layer, recipe)
    axis = given.index("d")
    amax = np.abs(x).max(axis=axis, keepdims=True)
    scale = (amax / np.float32(448)).astype(np.float32)
    q = np.asarray(qt.round_to_format(x / scale, "e4m3fn")) * scale
    kernel = np.asarray(layer.kernel[...])
    expected = np.einsum(subscripts, q.astype(np.float64), kernel.astype(np.float64))
    np.testing.assert_allclose(run(wrapped, x), expected, rtol=1e-5, atol=1e-5)


def test_cotangents_are_cut_along_the_kernels_output_features():
    """Example 1 has a large cotangent at one token: no other token's gradient moves."""
    layer = nnx.Einsum("bdt,df->bft", (WIDTH, 8), rngs=nnx.Rngs(0))
    wrapped = qt.nnx.wrap(layer, qt.recipes.token_scaled)
    x = X.swapaxes(1, 2)
    graph, state = nnx.split(wrapped)
    _, back = jax.vjp(lambda x: nnx.merge(graph, state)(x), x)
    ct = jnp.float32(np.random.default_rng(5).normal(size=(BATCH, 8, TOKENS)))
    (plain,), (large,) = back(ct), back(ct.at[1, :, 3].multiply(1000.0))
    where = np.argwhere(np.any(np.asarray(plain != large), axis=1))
    assert where.tolist() == [[1, 3]]
