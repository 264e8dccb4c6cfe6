"""Linen modules inside `nnx.bridge.ToNNX`: the wrapped model around them quantizes them.

And nnx models inside `nnx.bridge.to_linen`, whose state cannot be rolled.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from refused import refused

import qtoolkit as qt
from qtoolkit.casts import Projection

HYBRID = qt.recipes.te_delayed_hybrid
STOCHASTIC = dataclasses.replace(
    HYBRID, dgrad=(dataclasses.replace(HYBRID.dgrad[0], projection=Projection("stochastic")), None)
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


def test_a_linen_module_in_a_wrapped_model_is_quantized():
    """Oracle: the same layers of nnx, with the parameters of linen."""
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))
    wrapped = qt.nnx.wrap(Mixed(Hidden(), x), qt.recipes.te_current)
    report = qt.nnx.report(wrapped, x)
    assert report.left == ()
    assert {p.path for p in report.quantized} == {"first", "inner"}

    class Plain(nnx.Module):
        def __init__(self):
            self.first = wrapped.first
            self.layers = nnx.List(
                [nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 1, rngs=nnx.Rngs(0))]
            )
            for layer, name in zip(self.layers, ("Dense_1", "Dense_0"), strict=True):
                parameters = getattr(wrapped.inner, name)
                layer.kernel[...], layer.bias[...] = (
                    parameters["kernel"][...],
                    parameters["bias"][...],
                )

        def __call__(self, x):
            return self.layers[1](nnx.relu(self.layers[0](self.first(x))))

    plain = Plain()
    plain.first = Mixed(Hidden(), x).first
    np.testing.assert_array_equal(wrapped(x), qt.nnx.wrap(plain, qt.recipes.te_current)(x))


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
    """Oracle: the linen module itself."""
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))
    rules = qt.Rules({key: None}, qt.Recipe())
    model = kind(Hidden(), x)
    wrapped = qt.nnx.wrap(model, rules, strict=(x,))
    report = qt.nnx.report(wrapped, x)
    assert {p.reason for p in report.left} == {"excluded by a rule"}
    assert {p.path for p in report.left} == {"inner"}
    assert sum(p.count for p in report.left) == 6
    hidden = wrapped.first(x)
    if kind is Around:
        hidden = qt.dot_general(hidden, model.kernel[...], (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(wrapped(x), model.inner(hidden), rtol=1e-5, atol=1e-6)
    again = qt.nnx.wrap(wrapped, qt.Recipe())
    assert qt.nnx.report(again, x).left == ()
    assert isinstance(again.inner, nnx.bridge.ToNNX)


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

    with refused(ValueError, r"^value_and_grad: .*/.* is state of an"):
        qt.linen.value_and_grad(of)(variables)
    with pytest.warns(RuntimeWarning, match="scales of cotangents are computed in the same step"):
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
