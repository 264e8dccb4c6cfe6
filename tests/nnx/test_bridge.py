"""Linen modules inside `nnx.bridge.ToNNX`: wrapped ones are rolled, others are in the report.

And nnx models inside `nnx.bridge.to_linen`, whose state cannot be rolled.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from state_of import arrays_of, history_of

import qtoolkit as qt
from qtoolkit.casts import Projection

HYBRID = qt.recipes.te_delayed_hybrid
STOCHASTIC = dataclasses.replace(
    HYBRID,
    dgrad=(dataclasses.replace(HYBRID.dgrad[0], projection=Projection("stochastic")), None),
)


class Hidden(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(8)(x)))


class Mixed(nnx.Module):
    def __init__(self, inner: nn.Module, x: jax.Array) -> None:
        self.first = nnx.Linear(16, 16, rngs=nnx.Rngs(1))
        self.inner = nnx.bridge.ToNNX(inner, rngs=nnx.Rngs(0)).lazy_init(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(self.first(x))


def loss(model, x):
    return (model(x) ** 2).mean()


@pytest.mark.sample("delayed, stochastic")
@pytest.mark.parametrize("recipe", [STOCHASTIC, HYBRID], ids=["delayed, stochastic", "delayed"])
def test_a_wrapped_linen_module_is_rolled_as_by_linen(recipe):
    """Oracle: `qtoolkit.linen.value_and_grad` of the same module, for four steps."""
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))
    module = qt.linen.wrap(Hidden(), recipe)
    model = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)
    graph = nnx.split(model)[0]
    variables = module.init(jax.random.key(0), x)
    kept = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    variables = {**variables, "params": {name: kept[name] for name in variables["params"]}}
    by_nnx = nnx.jit(qt.nnx.value_and_grad(loss))
    by_linen = jax.jit(qt.linen.value_and_grad(lambda v, x: (module.apply(v, x) ** 2).mean()))
    for step in range(1, 5):
        value, grads = by_nnx(model, step * x)
        expected, expected_grads, state = by_linen(variables, step * x)
        variables = {**variables, "qtoolkit": state}
        assert value == expected
        jax.tree.map(np.testing.assert_array_equal, arrays_of(model), arrays_of(state))
        for layer, wanted in expected_grads.items():
            got = nnx.to_pure_dict(grads)[layer]
            jax.tree.map(np.testing.assert_array_equal, dict(wanted), dict(got))
    assert nnx.split(model)[0] == graph  # no probe stays behind, and jit traces once


@pytest.mark.exhaustive
def test_it_is_rolled_inside_a_wrapped_model_beside_nnx_layers():
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))
    model = qt.nnx.wrap(Mixed(qt.linen.wrap(Hidden(), HYBRID), x), HYBRID)
    assert not qt.nnx.report(model, x).left
    inner = np.abs(model.first(x)).max()
    qt.nnx.value_and_grad(loss)(model, x)
    found = history_of(model, "inner/Dense_1")
    assert inner <= found[0, 0] <= inner * 1.125  # known to 12.5 %
    assert np.all(found[:, 1:] == 0)


def test_a_step_that_fails_leaves_no_probe_behind():
    x = jnp.ones((4, 16))
    model = nnx.bridge.ToNNX(qt.linen.wrap(Hidden(), HYBRID), rngs=nnx.Rngs(0)).lazy_init(x)
    graph = nnx.split(model)[0]
    with pytest.raises(ZeroDivisionError):
        qt.nnx.value_and_grad(lambda model, x: model(x).sum() / (1 // 0))(model, x)
    assert nnx.split(model)[0] == graph


def test_what_wrap_cannot_reach_is_in_the_report():
    x = jnp.ones((4, 16))
    report = qt.nnx.report(qt.nnx.wrap(Mixed(Hidden(), x)), x)
    left = [line for line in report.left if line.part == "forward"]
    assert len(left) == 2
    assert all(line.where.startswith("test_bridge.py") for line in left)


class Around(Mixed):
    """A module with a product of its own around the linen module."""

    def __init__(self, inner: nn.Module, x: jax.Array) -> None:
        super().__init__(inner, x)
        self.kernel = nnx.Param(jnp.eye(16) * 0.3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(self.first(x) @ self.kernel[...])


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "key"), [(Mixed, "inner"), (Around, nnx.bridge.ToNNX)])
def test_a_rule_leaves_a_linen_module(kind, key):
    """Oracle: the linen module itself, which `wrap` cannot reach, but a rewritten one around it."""
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))
    rules = qt.Rules({key: None}, qt.Recipe())
    model = kind(Hidden(), x)
    wrapped = qt.nnx.wrap(model, rules, strict=(x,))
    report = qt.nnx.report(wrapped, x)
    assert {(p.path, p.reason) for p in report.left} == {("inner", "excluded by a rule")}
    assert sum(p.count for p in report.left) == 6
    hidden = wrapped.first(x)
    if kind is Around:
        hidden = qt.dot_general(hidden, model.kernel[...], (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(wrapped(x), model.inner(hidden), rtol=1e-5, atol=1e-6)
    again = qt.nnx.wrap(wrapped, qt.Recipe())
    assert {p.reason for p in qt.nnx.report(again, x).left} != {"excluded by a rule"}
    assert type(again.inner) is nnx.bridge.ToNNX


def test_a_rule_does_not_leave_what_linen_has_wrapped():
    x = jnp.ones((4, 16))
    rules = qt.Rules({"inner": None}, qt.Recipe())
    wrapped = qt.nnx.wrap(Around(qt.linen.wrap(Hidden()), x), rules, strict=(x,))
    report = qt.nnx.report(wrapped, x)
    assert not report.left
    assert sum(p.count for p in report.quantized) == 12


class Wrapped(nnx.Module):
    def __init__(self, recipe, *, rngs):
        self.key = qt.nnx.wrap(nnx.Linear(16, 4, rngs=rngs), recipe)

    def __call__(self, x):
        return self.key(x)


class AroundBridged(nn.Module):
    recipe: qt.Recipe

    @nn.compact
    def __call__(self, x):
        return nnx.bridge.to_linen(Wrapped, self.recipe)(nn.Dense(16)(x))


@pytest.mark.parametrize("recipe", [STOCHASTIC, HYBRID], ids=["delayed, stochastic", "delayed"])
def test_linens_value_and_grad_refuses_state_of_nnx(recipe):
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))
    module = AroundBridged(recipe)
    variables = module.init(jax.random.key(0), x)

    def of(variables):
        return (module.apply(variables, x) ** 2).mean()

    with pytest.raises(ValueError, match=r"^value_and_grad: .*/.* is state of an"):
        qt.linen.value_and_grad(of)(variables)
    with pytest.warns(RuntimeWarning, match="those of cotangents are current ones"):
        grads = jax.grad(lambda p: of({**variables, "params": p}))(variables["params"])
    assert np.isfinite(grads["Dense_0"]["kernel"]).all()


def test_an_nnx_model_without_state_trains_in_a_linen_module():
    """Oracle: `jax.value_and_grad`, since there is nothing to roll."""
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))
    module = AroundBridged(qt.recipes.te_current)
    variables = module.init(jax.random.key(0), x)

    def of(variables):
        return (module.apply(variables, x) ** 2).mean()

    value, grads, state = qt.linen.value_and_grad(of)(variables)
    wanted = jax.value_and_grad(lambda p: of({**variables, "params": p}))(variables["params"])
    jax.tree.map(np.testing.assert_array_equal, (value, grads), wanted)
    assert state == {}
