"""`value_and_grad(loss, metrics=True)`. Oracles: NumPy and ml_dtypes; the step without metrics."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx
from refused import refused
from state_of import history_of, keyed_by_kernel

import qtoolkit as qt
from qtoolkit.products import Operand, Recipe, Static

X = jnp.float32(np.random.default_rng(0).normal(size=(64, 16))).at[0, 0].set(40.0)
STATIC = Recipe(Operand("e4m3fn", scaling=Static(2.0**-7)), "e5m2")


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def by_matmul(metrics):
    """The flat metrics as {matmul: {operand: {number: value}}}."""
    nested = {}
    for name, value in metrics.items():
        matmul, operand, number = name.rsplit("/", 2)
        nested.setdefault(matmul, {}).setdefault(operand, {})[number] = value
    return nested


def expected(x, scale, fmt=ml_dtypes.float8_e4m3fn, largest=464):
    """Of E4M3 everything up to 464, halfway to 480, rounds to 448."""
    u = np.abs(np.asarray(x, np.float32)) / np.float32(scale)
    q = np.minimum(u, 448).astype(fmt).astype(np.float32)
    return {
        "saturated": np.mean(u > largest),
        "underflowed": np.mean((q == 0) & (u != 0)),
        "bad": np.mean(~(u <= 2 * largest)),
        "amax": np.abs(x).max(),
        "scale": scale,
    }


@pytest.mark.quick
def test_a_trainer_that_drops_the_state_sees_what_saturates():
    """Oracle: NumPy, with the scale of the only step whose history was kept."""
    recipe = qt.recipes.te_delayed_hybrid
    model = qt.nnx.wrap(nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)), recipe)
    qt.nnx.value_and_grad(loss)(model, X)
    graph, state = nnx.split(model)
    scale = history_of(model)[0, 0] / np.float32(448)

    @jax.jit
    def step(state, x):
        model = nnx.merge(graph, state)
        _, _, metrics = qt.nnx.value_and_grad(loss, metrics=True)(model, x)
        return metrics, nnx.state(model)

    kept = state
    for steps in range(3):
        metrics, _ = step(state, 100 * X)  # the new state is dropped
        (operands,) = by_matmul(metrics).values()
        wanted = expected(100 * X, scale)
        for part in ("saturated", "bad"):
            assert wanted[part] > 0.1
            np.testing.assert_allclose(operands["lhs"][part], wanted[part], rtol=1e-6)
        metrics, kept = step(kept, 100 * X)
        (operands,) = by_matmul(metrics).values()
        assert (operands["lhs"]["bad"] > 0) == (steps == 0)
    # Evaluation computes with the same scale.
    x = np.clip(100 * X / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    w = np.asarray(model.kernel[...])
    of_kernel = history_of(model)[1, 0] / np.float32(448)
    w = (w / of_kernel).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_allclose(model(100 * X), x @ w * scale * of_kernel, rtol=1e-5)


@pytest.mark.quick
def test_a_step_says_what_its_rounding_lost():
    model = qt.nnx.wrap(nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)), STATIC)
    step = nnx.jit(qt.nnx.value_and_grad(loss, metrics=True))
    x = 2 * X
    value, grads, found = step(model, x)
    plain, wanted = nnx.jit(qt.nnx.value_and_grad(loss))(model, x)
    np.testing.assert_array_equal(value, plain)
    jax.tree.map(np.testing.assert_array_equal, grads, wanted)
    (operands,) = by_matmul(found).values()
    assert set(operands) == {"lhs", "rhs", "cotangent"}
    kernel = model.kernel[...]
    for name, array in (("lhs", x), ("rhs", kernel)):
        for part, number in expected(array, 2.0**-7).items():
            np.testing.assert_allclose(operands[name][part], number, rtol=1e-6, err_msg=part)
    assert operands["lhs"]["saturated"] > operands["lhs"]["bad"] > 0
    cotangent = 2 * np.asarray(model(x)) / (64 * 8)
    np.testing.assert_allclose(operands["cotangent"]["amax"], np.abs(cotangent).max(), rtol=1e-5)


def test_infinities_are_bad():
    model = qt.nnx.wrap(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), STATIC)
    *_, found = qt.nnx.value_and_grad(loss, metrics=True)(model, X.at[1, 1].set(jnp.inf))
    (operands,) = by_matmul(found).values()
    np.testing.assert_allclose(operands["lhs"]["bad"], 2 / X.size)


class Twice(nnx.Module):
    def __init__(self):
        self.shared = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.idle = nnx.Linear(16, 16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.shared(self.shared(x)) + jax.lax.stop_gradient(self.idle(x))


def test_shares_are_of_each_use_and_nan_without_a_gradient():
    model = qt.nnx.wrap(Twice(), qt.recipes.te_delayed_hybrid, inputs=(X,))
    hidden = float(jnp.max(jnp.abs(model.shared(X))))  # by current scales, as in the first step
    *_, found = nnx.jit(qt.nnx.value_and_grad(loss, metrics=True))(model, X)
    found = keyed_by_kernel(by_matmul(found))
    assert set(found) == {"shared:kernel", "shared:kernel#2", "idle:kernel"}
    uses = [found[name]["lhs"] for name in ("shared:kernel", "shared:kernel#2")]
    amaxes = sorted(float(use["amax"]) for use in uses)
    np.testing.assert_allclose(amaxes, sorted([40, hidden]), rtol=1e-6)
    assert [float(use["saturated"]) for use in uses] == [0, 0]
    assert np.isnan(found["idle:kernel"]["lhs"]["amax"])
    histories = [history_of(model, "shared", name)[0, 0] for name in ("kernel", "kernel#2")]
    for history, amax in zip(sorted(histories), amaxes, strict=True):  # they are rolled as ever
        assert amax < history <= 1.125 * amax


@pytest.mark.parametrize("recipe", [qt.recipes.mxfp8, qt.recipes.nvfp4, qt.recipes.token_scaled])
def test_scales_of_blocks_too(recipe):
    model = qt.nnx.wrap(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), recipe)
    *_, found = nnx.jit(qt.nnx.value_and_grad(loss, metrics=True))(model, X)
    (operands,) = by_matmul(found).values()
    assert all(np.isfinite(x) for x in jax.tree.leaves(operands))
    np.testing.assert_allclose(operands["lhs"]["amax"], 40)


def test_linen_gives_the_same():
    module = qt.linen.wrap(linen.Dense(8, use_bias=False), STATIC)
    variables = module.init(jax.random.key(0), X)
    model = qt.nnx.wrap(nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)), STATIC)
    model.kernel[...] = variables["params"]["kernel"]
    step = qt.linen.value_and_grad(lambda v, x: jnp.mean(module.apply(v, x) ** 2), metrics=True)
    *_, found = jax.jit(step)(variables, X)
    *_, wanted = nnx.jit(qt.nnx.value_and_grad(loss, metrics=True))(model, X)
    (mine,), (theirs,) = (by_matmul(metrics).values() for metrics in (found, wanted))
    for operand, numbers in theirs.items():
        for name, number in numbers.items():
            np.testing.assert_allclose(mine[operand][name], number, rtol=1e-5)


class Two(nnx.Module):
    def __init__(self, size, rngs):
        self.a = nnx.Linear(16, 16, rngs=rngs)
        self.b = nnx.Linear(16, size, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


@pytest.mark.sample("te_delayed_hybrid")
@pytest.mark.parametrize("recipe", ["te_current", "te_delayed_hybrid"])
def test_models_that_were_wrapped_each_by_itself_are_told_apart(recipe):
    """Their layers have the same names. Oracle: each model's own kernels and rules."""
    rules = qt.Rules([("^b$", None)], default=qt.recipes.te_current)
    actor = qt.nnx.wrap(Two(16, nnx.Rngs(0)), getattr(qt.recipes, recipe))
    critic = qt.nnx.wrap(Two(1, nnx.Rngs(1)), rules)
    models = nnx.Dict(actor=actor, critic=critic)

    def both(models, x):
        return jnp.mean(models.critic(models.actor(x)) ** 2)

    *_, found = nnx.jit(qt.nnx.value_and_grad(both, metrics=True))(models, X)
    kernels = {"actor/a": actor.a, "actor/b": actor.b, "critic/a": critic.a}
    found = by_matmul(found)
    assert set(found) == {f"{path}:kernel" for path in kernels}
    for path, layer in kernels.items():
        operands = found[f"{path}:kernel"]
        np.testing.assert_allclose(operands["rhs"]["amax"], np.abs(layer.kernel[...]).max())
        assert np.isfinite(operands["cotangent"]["amax"])
    report = qt.nnx.report(both, models, X)
    assert {x.path for x in report.quantized} == set(kernels)
    assert {x.path for x in report.left} == {"critic/b"}
    rows = qt.nnx.numerics(models, X, both).rows
    assert {row.path for row in rows} == set(kernels)
    assert all(float(row.tally.uses) for row in rows)
    refused(ValueError, "different recipes", qt.nnx.freeze, models, qt.nnx.calibrate(actor, [X]))
