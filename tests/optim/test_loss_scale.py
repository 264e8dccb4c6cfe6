"""Loss scaling. Oracles: the rule of torch.amp.GradScaler replayed in Python, Flax's DynamicScale,
optax on the unscaled gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import qtoolkit as qt
from qtoolkit.optim import dynamic_loss_scale, loss_scale, master_weights, quantize_state

PARAMS = {"w": jnp.asarray([1.0, -2.0, 0.5])}
ADAM = optax.adam(1e-2)


def replayed(good, scale, period, least=1.0, largest=2.0**24):
    """torch.amp.GradScaler.update, with limits."""
    tracker, scales = 0, []
    for is_good in good:
        if not is_good:
            scale, tracker = max(scale / 2, least), 0
        else:
            tracker += 1
            if tracker == period:
                scale, tracker = min(scale * 2, largest), 0
        scales.append(scale)
    return scales


@pytest.mark.quick
def test_scales_follow_the_published_rule_and_skip_bad_steps():
    rng = np.random.default_rng(0)
    good = rng.uniform(size=60) > 0.2
    tx = dynamic_loss_scale(ADAM, initial=8.0, period=3, largest=32.0)
    step, plain_step = jax.jit(tx.update), jax.jit(ADAM.update)
    state, plain = tx.init(PARAMS), ADAM.init(PARAMS)
    scales = []
    for is_good in good:
        grads = {"w": jnp.asarray(rng.normal(size=3), jnp.float32)}
        bad = rng.choice([np.inf, -np.inf, np.nan])
        scaled = jax.tree.map(lambda g: g * loss_scale(state), grads)  # noqa: B023
        scaled = scaled if is_good else {"w": scaled["w"].at[1].set(bad)}
        before = state
        updates, state = step(scaled, state, PARAMS)
        if is_good:
            wanted, plain = plain_step(grads, plain, PARAMS)
            np.testing.assert_allclose(updates["w"], wanted["w"], rtol=1e-6)
        else:
            np.testing.assert_array_equal(updates["w"], np.zeros(3))
            jax.tree.map(np.testing.assert_array_equal, state.inner, before.inner)
        scales.append(float(state.scale))
    assert scales == replayed(good, 8.0, 3, largest=32.0)
    assert int(state.skipped) == np.sum(~good)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, state.inner, plain)


def half_model(wrapped):
    model = nnx.Sequential(
        nnx.Linear(8, 16, dtype=jnp.float16, rngs=nnx.Rngs(0)),
        nnx.Linear(16, 1, dtype=jnp.float16, rngs=nnx.Rngs(1)),
    )
    return qt.nnx.wrap(model) if wrapped else model


def trained(wrapped, batches, scale):
    """Which steps are skipped, and the scales, of float16 compute with float16 gradients."""
    model = half_model(wrapped)
    tx = dynamic_loss_scale(optax.sgd(1e-3), initial=scale, period=4)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def step(params, state, x):
        def loss(params):
            y = nnx.merge(graph, params, rest)(x)
            return jnp.mean(y.astype(jnp.float32) ** 2) * loss_scale(state)

        grads = jax.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, skipped, scales = tx.init(params), [], []
    for x in batches:
        params, state = step(params, state, x)
        skipped.append(int(state.skipped))
        scales.append(float(state.scale))
    return skipped, scales


def test_a_wrapped_model_skips_what_the_plain_one_skips():
    """Infinities, NaNs and batches whose float16 gradients overflow at the scale of the moment."""
    rng = np.random.default_rng(0)
    batches = rng.normal(size=(20, 4, 8)).astype(np.float16)
    batches[3, 0, 0], batches[7, 1, 2] = np.inf, np.nan
    batches[11] *= 3000  # overflows in the forward pass of both
    plain, wrapped = (trained(which, batches, 2.0**10) for which in (False, True))
    assert plain == wrapped
    assert plain[0][-1] >= 3
    unscaled = [np.isfinite(b).all() and np.abs(b).max() < 1000 for b in batches]
    assert np.diff([0, *plain[0]]).tolist() == [int(not good) for good in unscaled]


def test_flax_chooses_the_same_scales():
    """Its period is one step longer than it says: it grows on the step after."""
    flax_scale = DynamicScale(growth_interval=4, scale=2.0**14)
    tx = dynamic_loss_scale(optax.sgd(0.0), initial=2.0**14, period=5)
    state = tx.init(PARAMS)
    inputs = np.where(np.arange(40) % 9 == 8, np.inf, 1.0).astype(np.float32)
    for x in inputs:
        graded = flax_scale.value_and_grad(lambda p: jnp.sum(p["w"]) * x)  # noqa: B023
        flax_scale, good, *_ = graded(PARAMS)
        scaled = jax.tree.map(lambda p: jnp.full_like(p, x) * state.scale, PARAMS)  # noqa: B023
        before = int(state.skipped)
        _, state = tx.update(scaled, state, PARAMS)
        assert bool(good) == (int(state.skipped) == before)
        assert float(flax_scale.scale) == float(state.scale)


AROUND = {
    "chain": lambda tx: optax.chain(tx, optax.scale(1.0)),
    "MultiSteps": lambda tx: tx,
    "inject": lambda tx: optax.inject_hyperparams(
        lambda factor: optax.chain(tx, optax.scale(factor))
    )(factor=1.0),
    "multi_transform": lambda tx: optax.multi_transform({"a": tx}, {"w": "a"}),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "all of ours": lambda tx: tx,
}


@pytest.mark.sample("chain")
@pytest.mark.parametrize("name", AROUND)
def test_other_transforms_go_around_it(name):
    inner = ADAM if name != "MultiSteps" else optax.MultiSteps(ADAM, 2).gradient_transformation()
    if name == "all of ours":
        inner = master_weights(quantize_state(ADAM, "e4m3fn", min_size=1))
    tx = AROUND[name](dynamic_loss_scale(inner, initial=2.0**10, period=2))
    params = {"w": PARAMS["w"].astype(jnp.bfloat16)}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, factor):
        def scaled(p):
            return jnp.sum((p["w"].astype(jnp.float32) - 3) ** 2) * loss_scale(state) * factor

        updates, state = tx.update(jax.grad(scaled)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    params, state = step(params, state, np.inf)
    np.testing.assert_array_equal(params["w"], PARAMS["w"].astype(jnp.bfloat16))
    for _ in range(8):
        params, state = step(params, state, 1.0)
    assert (np.asarray(params["w"], np.float32) > np.asarray(PARAMS["w"])).all()
    assert float(loss_scale(state)) >= 2.0**9


def test_multi_steps_outside_is_right_only_if_all_is_finite():
    """What the docstring says of that order: optax multiplies the sum by 0 to empty it."""
    around = optax.MultiSteps(dynamic_loss_scale(ADAM, initial=2.0**10, period=2), 2)
    plain = optax.MultiSteps(ADAM, 2)
    update, update_plain = jax.jit(around.update), jax.jit(plain.update)
    params, others = PARAMS, PARAMS
    state, other = around.init(params), plain.init(others)
    for step in range(8):
        grads = jax.tree.map(lambda p: p * (step + 1) - 3, PARAMS)  # noqa: B023
        scaled = jax.tree.map(lambda g: g * loss_scale(state), grads)  # noqa: B023
        updates, state = update(scaled, state, params)
        params = optax.apply_updates(params, updates)
        updates, other = update_plain(grads, other, others)
        others = optax.apply_updates(others, updates)
        jax.tree.map(np.testing.assert_array_equal, params, others)
    assert float(loss_scale(state)) == 2.0**12  # two good steps in a row, twice
    for x in (np.inf, 1.0, 1.0, 1.0, 1.0, 1.0):
        before = params
        scaled = jax.tree.map(lambda p: jnp.full_like(p, x), PARAMS)  # noqa: B023
        updates, state = update(scaled, state, params)
        params = optax.apply_updates(params, updates)
        jax.tree.map(np.testing.assert_array_equal, params, before)
    assert not np.isfinite(state.acc_grads["w"]).any()


@pytest.mark.exhaustive
def test_in_an_nnx_optimizer():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, dynamic_loss_scale(ADAM), wrt=nnx.Param)
    assert float(loss_scale(optimizer.opt_state)) == 2.0**16
    grads = nnx.grad(lambda m: jnp.sum(m(jnp.full((1, 3), jnp.inf))))(model)
    before = np.asarray(model.kernel[...])
    optimizer.update(model, grads)
    np.testing.assert_array_equal(model.kernel[...], before)
    assert float(loss_scale(optimizer.opt_state)) == 2.0**15


def test_errors():
    for name, value in (("initial", 3.0), ("factor", 1.5), ("least", 0), ("largest", "2")):
        with pytest.raises(ValueError, match=f"{name}={value!r}, expected a power of two"):
            dynamic_loss_scale(ADAM, **{name: value})
    with pytest.raises(ValueError, match="expected a factor above 1, and scales in rising order"):
        dynamic_loss_scale(ADAM, initial=2.0, least=4.0)
    with pytest.raises(ValueError, match="period=0, expected an integer of 1 to"):
        dynamic_loss_scale(ADAM, period=0)
    with pytest.raises(TypeError, match="dynamic_loss_scale: tx has type NoneType"):
        dynamic_loss_scale(None)
    with pytest.raises(ValueError, match=r"holds 0 states of dynamic_loss_scale, expected one"):
        loss_scale(ADAM.init(PARAMS))
