"""States of wrapped models in loops and checkpoints that were written for plain ones.

Oracles: the same training with the model as an object; the model that was wrapped after it was
restored.
"""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from refused import refused

import qtoolkit as qt
from qtoolkit.products import Delayed, Operand, Recipe

RECIPES = {"delayed": qt.recipes.te_delayed_hybrid, "nvfp4": qt.recipes.nvfp4}
KEPT = {"delayed": "history", "nvfp4": "key"}
OURS = nnx.Any(qt.nnx.ScalingState, qt.nnx.Probe)
X = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.norm(self.up(x))))


def loss(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def assert_same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(got), nnx.to_pure_dict(expected))


@pytest.mark.parametrize("name", RECIPES)
def test_loops_that_carry_statistics_carry_histories_and_keys(name):
    model = qt.nnx.wrap(Net(), RECIPES[name])
    graphdef, params, rest = nnx.split(qt.nnx.wrap(Net(), RECIPES[name]), nnx.Param, nnx.BatchStat)

    @jax.jit
    def step(params, rest, x):
        model = nnx.merge(graphdef, params, rest)
        _, grads = qt.nnx.value_and_grad(loss)(model, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        return params, nnx.state(model, nnx.BatchStat)

    @nnx.jit
    def step_of_object(model, x):
        _, grads = qt.nnx.value_and_grad(loss)(model, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        nnx.update(model, params)

    started = dict(nnx.to_flat_state(rest))
    for factor in (1, 3):
        params, rest = step(params, rest, factor * X)
        step_of_object(model, factor * X)
    assert_same(rest, nnx.state(model, nnx.BatchStat))
    moved = [path for path, kept in nnx.to_flat_state(rest) if jnp.any(kept[...] != started[path])]
    # The second step is three times as large as the history, which counts as bad.
    also = {"bad"} if name == "delayed" else set()
    assert {path[-1] for path in moved} - {"mean", "var"} == {KEPT[name]} | also


@pytest.mark.parametrize("name", RECIPES)
def test_filters_that_miss_the_state_name_the_right_one(name):
    model = qt.nnx.wrap(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), RECIPES[name])
    with refused(ValueError, r"nnx.split\(model, nnx.Param, nnx.BatchStat\) takes it"):
        nnx.split(model, nnx.Param)
    assert len(nnx.split(model, nnx.Param, nnx.BatchStat)) == 3
    with refused(ValueError, "selects nothing that Linear trains"):
        qt.nnx.value_and_grad(loss, wrt=nnx.BatchStat)(model, X)


@pytest.mark.parametrize("name", RECIPES)
def test_a_loop_averages_only_the_statistics_of_the_model(name):
    """As between devices: a mean of keys is none, and one of histories would be too small."""
    model = qt.nnx.wrap(Net(), RECIPES[name])

    def averaged(state):
        return jax.vmap(lambda _: jax.lax.pmean(state, "data"), axis_name="data")(jnp.arange(1))

    def update(kind):
        mean = averaged(nnx.state(model, kind))
        nnx.update(model, jax.tree.map(lambda x: x[0], mean))

    update(nnx.All(nnx.BatchStat, nnx.Not(OURS)))
    model(X)
    update(nnx.BatchStat)
    refused(ValueError, r"(bad|key) of a matmul has dtype float32", model, X)


def by_update(plain, wrapped, folder):
    return nnx.state(plain)


def by_orbax(plain, wrapped, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "step", nnx.state(plain))
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "step", nnx.state(wrapped, nnx.Not(OURS)))


def by_msgpack(plain, wrapped, folder):
    stored = serialization.to_bytes(nnx.to_pure_dict(nnx.state(plain)))
    target = nnx.to_pure_dict(nnx.state(wrapped, nnx.Not(OURS)))
    return jax.tree.map(jnp.asarray, serialization.from_bytes(target, stored))


@pytest.mark.parametrize("restored", [by_update, by_orbax, by_msgpack])
@pytest.mark.parametrize("name", RECIPES)
def test_the_state_of_the_plain_model_fits_a_wrapped_one(name, restored, tmp_path):
    plain = Net(seed=1)
    wrapped = qt.nnx.wrap(Net(), RECIPES[name])
    kept = jax.tree.map(jnp.copy, nnx.state(wrapped, qt.nnx.ScalingState))
    nnx.update(wrapped, restored(plain, wrapped, tmp_path))
    np.testing.assert_array_equal(wrapped(X), qt.nnx.wrap(plain, RECIPES[name])(X))
    assert_same(nnx.state(wrapped, qt.nnx.ScalingState), kept)


def test_the_state_of_another_recipe_is_refused_with_what_fits():
    def wrapped(recipe, seed):
        return qt.nnx.wrap(Net(seed), recipe)

    def delayed(steps):
        return Recipe(*(Operand(fmt, scaling=Delayed(steps)) for fmt in ("e4m3fn", "e5m2")))

    state, model = nnx.state(wrapped(delayed(4), 1)), wrapped(qt.recipes.nvfp4, 0)
    with refused(ValueError, "the state has bad for a matmul whose recipe keeps none"):
        nnx.update(model, state)
    rest = nnx.filter_state(state, nnx.Not(OURS))
    nnx.update(model, rest)
    np.testing.assert_array_equal(model(X), wrapped(qt.recipes.nvfp4, 1)(X))
    current = wrapped(qt.recipes.te_current, 0)
    nnx.update(current, rest)
    np.testing.assert_array_equal(current(X), wrapped(qt.recipes.te_current, 1)(X))
    longer = wrapped(delayed(16), 0)
    nnx.update(longer, state)
    refused(ValueError, "a history of 4 steps", longer, X)
