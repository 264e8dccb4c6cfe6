"""Weights of few bits. Oracles: NumPy with ml_dtypes, and optax on float32 weights."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from refused import refused

import qtoolkit as qt
from qtoolkit.optim import master_weights, stochastic_round_updates

HALVES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def landed(p, u, seed=0, fmt=None):
    tx = stochastic_round_updates(fmt, seed=seed)
    updates, _ = tx.update(u, tx.init(p), p)
    return updates, optax.apply_updates(p, updates)


def pairs(dtype):
    """Weights and updates over 2**60 of ratio, cancelling ones among them, and specials."""
    rng = np.random.default_rng(0)
    n = 20_000
    most = 2.0**12 if dtype == "float16" else 2.0**60
    p = (rng.normal(size=n) * np.exp2(rng.uniform(-12, 12, n))).astype(dtype)
    u = rng.normal(size=n) * np.exp2(rng.uniform(-60, np.log2(most), n))
    u[: n // 4] = -p[: n // 4].astype(np.float64) * (1 + np.exp2(rng.uniform(-30, 0, n // 4)))
    u[-4:] = [np.inf, -np.inf, np.nan, 0]
    return p, u.astype(np.float32)


@pytest.mark.quick
@HALVES
def test_apply_updates_lands_on_a_neighbour_of_the_sum(dtype):
    """Oracle: the two neighbours in the dtype of the float32 sum, by NumPy."""
    p, u = pairs(dtype)
    updates, new = jax.jit(landed)(jnp.asarray(p), jnp.asarray(u))
    assert updates.dtype == jnp.float32
    assert new.dtype == np.dtype(dtype)
    got = np.asarray(new).astype(np.float64)
    wanted = p.astype(np.float32) + u
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(got[np.isinf(wanted)], wanted[np.isinf(wanted)])
    x = wanted[finite]
    largest = ml_dtypes.finfo(dtype).max
    nearest = np.clip(x, -float(largest), float(largest)).astype(dtype)
    away = np.where(nearest.astype(np.float64) < x, np.inf, -np.inf).astype(dtype)
    other = np.nextafter(nearest, away)
    other = np.where(nearest.astype(np.float64) == x, nearest, other).astype(np.float64)
    is_nearest = got[finite] == nearest.astype(np.float64)
    assert (is_nearest | (got[finite] == other)).all()
    assert 0.05 < np.mean(~is_nearest) < 0.5


@pytest.mark.quick
@HALVES
@pytest.mark.parametrize("fmt", [None, "e4m3fn"])
def test_apply_updates_lands_exactly_on_what_is_drawn(dtype, fmt):
    """The numbers of `round_to_format` with the same bits, whatever the sizes of p and u."""
    p, u = map(jnp.asarray, pairs(dtype))
    _, new = landed(p, u, seed=9, fmt=fmt)
    key = jnp.asarray([9, 1, 0, 0], jnp.uint32)  # seed, step, and no path: a single array
    total = p.astype(jnp.float32) + u
    drawn = qt.round_to_format(total, fmt or dtype, rounding="stochastic", key=key)
    drawn = jnp.where(jnp.isfinite(total), drawn, total)
    np.testing.assert_array_equal(new.astype(jnp.float32), drawn.astype(dtype).astype(jnp.float32))


@pytest.mark.quick
def test_small_updates_add_up():
    """1,000 updates of 2**-12 to weights of 1: rounded to nearest nothing moves."""
    p = jnp.ones(256, jnp.bfloat16)
    tx = stochastic_round_updates()

    @jax.jit
    def run(p, state):
        def step(carry, _):
            p, state = carry
            updates, state = tx.update(jnp.full(p.shape, 2.0**-12), state, p)
            return (optax.apply_updates(p, updates), state), None

        return jax.lax.scan(step, (p, state), length=1000)[0]

    p, state = run(p, tx.init(p))
    assert int(state.step) == 1000
    # Standard deviation of the mean: sqrt(1000 * 2**-7 * 2**-12 / 256) = 0.0027.
    assert abs(float(p.astype(jnp.float32).mean()) - (1 + 1000 * 2.0**-12)) < 0.012


def test_updates_of_float32_and_masked_weights_do_not_change():
    params = {"half": jnp.ones(4, jnp.bfloat16), "wide": jnp.ones(4)}
    grads = {"half": jnp.full(4, 0.3), "wide": jnp.full(4, 0.3)}
    tx = optax.chain(optax.sgd(1.0), stochastic_round_updates())
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["wide"], -grads["wide"])
    masked = optax.masked(stochastic_round_updates(), {"half": False, "wide": True})
    updates, _ = masked.update(grads, masked.init(params), params)
    np.testing.assert_array_equal(updates["half"], grads["half"])


def test_every_step_leaf_and_seed_draws_its_own_bits():
    p = {name: jnp.ones(512, jnp.bfloat16) for name in "ab"}
    u = jax.tree.map(lambda x: jnp.full(x.shape, 0.003), p)
    tx = stochastic_round_updates()
    state = tx.init(p)
    first, state = tx.update(u, state, p)
    second, _ = tx.update(u, state, p)
    other, _ = tx.update(u, tx.init(p)._replace(seed=jnp.uint32(1)), p)
    draws = [first["a"], first["b"], second["a"], other["a"]]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert 0.3 < np.mean(np.asarray(a) == np.asarray(b)) < 0.7


def quadratic(params, x):
    y = x @ params["w"].astype(jnp.float32) + params["b"].astype(jnp.float32)
    return jnp.mean((y - 1) ** 2)


def half_params(dtype):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(16, 4)), dtype)
    return {"w": w, "b": jnp.zeros(4, dtype)}


AROUND = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "inject": lambda tx: optax.inject_hyperparams(
        lambda factor: optax.chain(optax.scale(factor), tx)
    )(factor=1.0),
    "multi_transform": lambda tx: optax.multi_transform({"a": tx}, {"w": "a", "b": "a"}),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
}


@HALVES
def test_master_weights_train_as_float32_does(dtype):
    """Oracle: optax on float32 weights, given the gradients at the rounded weights."""
    x = jnp.float32(np.random.default_rng(0).normal(size=(8, 16)))
    tx = master_weights(optax.adamw(3e-3))
    params = half_params(dtype)
    state = tx.init(params)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    plain = optax.adamw(3e-3)
    plain_state = plain.init(wide)

    # In a program of its own: else XLA's GPUs widen gradients that were never rounded for optax.
    gradient = jax.jit(jax.grad(quadratic))

    @jax.jit
    def step(params, state, wide, plain_state, grads):
        updates, state = tx.update(grads, state, params)
        wide_grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        more, plain_state = plain.update(wide_grads, plain_state, wide)
        new = optax.apply_updates(params, updates), state
        return *new, optax.apply_updates(wide, more), plain_state

    for _ in range(20):
        grads = gradient(params, x)
        params, state, wide, plain_state = step(params, state, wide, plain_state, grads)
        for name, p in params.items():
            np.testing.assert_allclose(state.master[name], wide[name], rtol=1e-6)
            np.testing.assert_array_equal(p, np.asarray(state.master[name]).astype(dtype))
    assert jax.tree.leaves(state.inner)[1].dtype == jnp.float32


def test_master_weights_of_float32_cost_nothing():
    params = {"w": jnp.ones(8), "half": jnp.ones(8, jnp.bfloat16)}
    state = master_weights(optax.sgd(1.0)).init(params)
    assert state.master["w"] is None
    assert state.master["half"].dtype == jnp.float32


@pytest.mark.sample("master-alone")
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("kind", ["master", "stochastic"])
def test_other_transforms_go_around_them(name, kind):
    adam = optax.adam(1e-2)
    inside = {
        "master": master_weights(adam),
        "stochastic": optax.chain(adam, stochastic_round_updates()),
    }[kind]
    tx = AROUND[name](inside)
    params = half_params("bfloat16")
    x = jnp.float32(np.random.default_rng(0).normal(size=(8, 16)))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        value, grads = jax.value_and_grad(quadratic)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = tx.init(params), []
    for _ in range(30):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values[-1] < 0.85 * values[0]
    assert params["w"].dtype == jnp.bfloat16


@pytest.mark.exhaustive
def test_in_an_nnx_optimizer_and_under_vmap():
    model = nnx.Linear(16, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    chained = optax.chain(optax.adam(1e-2), stochastic_round_updates())
    for tx in (chained, master_weights(optax.adam(1e-2))):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        grads = nnx.grad(lambda m: jnp.mean(m(jnp.ones((2, 16))) ** 2))(model)
        before = np.asarray(model.kernel[...])
        optimizer.update(model, grads)
        assert model.kernel.dtype == jnp.bfloat16
        assert np.any(before != np.asarray(model.kernel[...]))
    p, u = jnp.ones((3, 64), jnp.bfloat16), jnp.full((3, 64), 0.003)
    tx = stochastic_round_updates()
    states = jax.vmap(tx.init)(p)._replace(seed=jnp.arange(3, dtype=jnp.uint32))
    updates, _ = jax.vmap(tx.update)(u, states, p)
    for i in range(3):
        alone, _ = tx.update(u[i], jax.tree.map(lambda s, i=i: s[i], states), p[i])
        np.testing.assert_array_equal(updates[i], alone)


def test_errors():
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    tx = stochastic_round_updates()
    with refused(TypeError, r"stochastic_round_updates: the update got no params"):
        tx.update(params, tx.init(params))
    refused(TypeError, r"w: dtype float8_e4m3fn", tx.init, {"w": jnp.ones(4, jnp.float8_e4m3fn)})
    with refused(ValueError, r"stochastic_round_updates: w: .*float16"):
        stochastic_round_updates("float16").init(params)
    refused(ValueError, r"seed=1\.5", stochastic_round_updates, seed=1.5)
    refused(TypeError, "master_weights: tx has type str", master_weights, "adam")
    tx = master_weights(optax.sgd(1.0))
    with refused(TypeError, "master_weights: the update got no params"):
        tx.update(params, tx.init(params))
