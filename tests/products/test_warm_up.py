"""Policies. Oracles: the plain model in a warm-up, the wrapped one after it; reports for layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from refused import refused

import qtoolkit as qt

X = jnp.float32(np.random.default_rng(0).normal(size=(8, 16)))


def stack():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(*(nnx.Linear(16, 16, rngs=rngs) for _ in range(4)))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.quick
@pytest.mark.sample("value_and_grad0-recipe1", "value_and_grad1-recipe0")
@pytest.mark.parametrize("recipe", [qt.recipes.te_current, qt.recipes.te_delayed_hybrid])
@pytest.mark.parametrize("by", [qt.nnx.value_and_grad, nnx.value_and_grad])
@pytest.mark.filterwarnings("ignore:differentiated without")
def test_the_first_steps_are_in_high_precision_by_one_program(recipe, by):
    model = qt.nnx.wrap(stack(), qt.policies.warm_up(recipe, 2))
    traces = []

    @nnx.jit
    def step(model, x):
        traces.append(None)
        return by(loss)(model, x)

    plain = nnx.jit(nnx.value_and_grad(loss))(stack(), X)
    for _ in range(2):
        value, grads = step(model, X)
        np.testing.assert_allclose(value, plain[0], rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), grads, plain[1])
    other = qt.nnx.wrap(stack(), recipe)
    if by is nnx.value_and_grad:  # then the forward pass has recorded the warm-up
        by(loss)(other, X)
    wanted, wanted_grads = nnx.jit(by(loss))(other, X)
    value, grads = step(model, X)
    np.testing.assert_allclose(value, wanted, rtol=1e-3)
    assert abs(value / plain[0] - 1) > 1e-2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4), grads, wanted_grads
    )
    assert len(traces) == 1


def test_reports_and_json_know_the_warm_up():
    recipe = qt.policies.warm_up(qt.recipes.te_current, 3)
    assert qt.recipes.from_json(qt.recipes.to_json(recipe)) == recipe
    model = qt.nnx.wrap(stack(), recipe)
    assert str(qt.nnx.report(model, X)) == str(
        qt.nnx.report(qt.nnx.wrap(stack(), qt.recipes.te_current), X)
    )
    refused(ValueError, r"warm_up=-1", qt.policies.warm_up, recipe, -1)
    with refused(ValueError, r"the recipe has a warm-up, whose steps a layer counts"):
        qt.einsum("ij,jk->ik", X, X.T, recipe=recipe)


def test_a_linen_module_warms_up():
    plain = linen.Dense(4)
    module = qt.linen.wrap(plain, qt.policies.warm_up(qt.recipes.te_current, 1))
    variables = module.init(jax.random.key(0), X)
    current = qt.linen.wrap(plain, qt.recipes.te_current)
    step = qt.linen.value_and_grad(lambda v, x: jnp.mean(module.apply(v, x) ** 2))
    for expected in (plain, current):
        value, _, state = step(variables, X)
        wanted = jnp.mean(expected.apply({"params": variables["params"]}, X) ** 2)
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
        variables = {**variables, "qtoolkit": state}


@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 0), (0, 1)])
def test_first_and_last_layers_stay(first, last):
    policy = qt.policies.first_last_high_precision(qt.recipes.te_current, first=first, last=last)
    model = qt.nnx.wrap(stack(), policy, inputs=(X,))
    left = {product.path for product in qt.nnx.report(model, X).left}
    expected = [f"layers/{i}" for i in range(4)]
    assert left == {*expected[:first], *expected[4 - last :]}
    module = linen.Sequential([linen.Dense(16) for _ in range(4)])
    wrapped = qt.linen.wrap(module, policy, inputs=(X,))
    report = qt.linen.report(wrapped, wrapped.init(jax.random.key(0), X), X)
    expected = [f"layers_{i}" for i in range(4)]
    assert {p.path for p in report.left} == {*expected[:first], *expected[4 - last :]}


def test_more_last_layers_than_there_are():
    policy = qt.policies.first_last_high_precision(qt.recipes.te_current, first=0, last=5)
    module = linen.Sequential([linen.Dense(16) for _ in range(4)])
    for wrap, model in ((qt.nnx.wrap, stack()), (qt.linen.wrap, module)):
        refused(ValueError, r"^wrap: .*none of 4 layers", wrap, model, policy, inputs=(X,))


def test_rules_without_a_recipe():
    """Without a default nothing would be quantized, in silence in linen."""
    for wrap, model in ((qt.nnx.wrap, stack()), (qt.linen.wrap, linen.Dense(4))):
        for rules in ({}, {"Dense_0": None}):
            refused(ValueError, r"^wrap: the rules exclude every", wrap, model, qt.Rules(rules))


def test_the_order_of_layers_has_to_be_known():
    policy = qt.policies.first_last_high_precision(qt.recipes.te_current)
    for wrap, model in ((qt.nnx.wrap, stack()), (qt.linen.wrap, linen.Dense(4))):
        refused(ValueError, r"no inputs to trace the model with; write wrap", wrap, model, policy)
    with refused(ValueError, r"first=-1"):
        qt.policies.first_last_high_precision(qt.recipes.te_current, first=-1)
