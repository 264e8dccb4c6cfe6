"""Wrapped modules whose methods return functions, which hold arrays of the trace.

Oracle: the unquantized model, exactly for a recipe that rounds nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from refused import refused

import qtoolkit as qt

WIDE = qt.Recipe((None, None), gradient=None)
X = jax.random.normal(jax.random.key(0), (3, 4))
W = jax.random.normal(jax.random.key(1), (4, 4))


def split(x, w, layer):
    """The function holds a tracer in a cell, one in a default, and itself."""

    def merge(y, depth=1, *, shift=x[0]):
        return merge(y @ w.T + shift, depth - 1) if depth else layer(y)

    return x @ w, merge


class Linen(nn.Module):
    """As a coupling layer of a normalizing flow: `split` returns how to merge.

    Its function also holds the module, which in the trace is a copy.
    """

    def setup(self):
        self.layer = nn.Dense(4)

    def split(self, x, w):
        return split(x, w, lambda y: self.layer(y))

    def __call__(self, x, w):
        y, merge = self.split(x, w)
        return merge(y, 2)


class Nnx(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def split(self, x, w):
        return split(x, w, lambda y: self.layer(y))

    def __call__(self, x, w):
        y, merge = self.split(x, w)
        return merge(y, 2)


@pytest.mark.filterwarnings("ignore:differentiated without")  # gradients by inputs
@pytest.mark.parametrize("recipe", [WIDE, qt.recipes.te_delayed_hybrid])
@pytest.mark.parametrize("compiled", [False, True])
def test_linen_methods_return_functions(recipe, compiled):
    plain, wrapped = Linen(), qt.linen.wrap(Linen(), recipe)
    variables = wrapped.init(jax.random.key(0), X, W)
    run = jax.jit(wrapped.apply) if compiled else wrapped.apply
    expected = plain.apply({"params": variables["params"]}, X, W)
    tolerance = 1e-6 if recipe is WIDE else 0.2
    assert error(run(variables, X, W), expected) < tolerance
    grads = jax.grad(lambda w: run(variables, X, w).sum())(W)
    expected = jax.grad(lambda w: plain.apply({"params": variables["params"]}, X, w).sum())(W)
    assert error(grads, expected) < tolerance


@pytest.mark.filterwarnings("ignore:differentiated without")  # gradients by inputs
@pytest.mark.parametrize("recipe", [WIDE, qt.recipes.te_delayed_hybrid])
@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit])
def test_nnx_methods_return_functions(recipe, transform):
    plain, wrapped = Nnx(), qt.nnx.wrap(Nnx(), recipe)
    run = transform(lambda model, x, w: model(x, w))
    tolerance = 1e-6 if recipe is WIDE else 0.2
    assert error(run(wrapped, X, W), plain(X, W)) < tolerance
    refused(TypeError, r"Nnx.split returns a function, whose code runs later", wrapped.split, X, W)
    loss, grads = nnx.value_and_grad(lambda model: run(model, X, W).sum())(wrapped)
    expected = nnx.grad(lambda model: run(model, X, W).sum())(plain)
    assert np.isfinite(loss)
    assert error(grads.layer.kernel[...], expected.layer.kernel[...]) < tolerance


def test_functions_that_hold_no_array_stay_as_they_are():
    def activation(x):
        return x * len(shape)

    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(W)

        def __call__(self, x):
            return x @ self.kernel, activation, jnp.tanh

    shape = np.arange(2)
    _, *functions = qt.nnx.wrap(Model(), qt.recipes.te_current)(X)
    assert functions == [activation, jnp.tanh]


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)
