"""A second call with other shapes, or other types of arguments, in both shells."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import qtoolkit as qt

X = jnp.float32(np.random.default_rng(0).normal(size=(4, 16)))


class OfNnx(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(0.3 * jnp.eye(16))
        self.layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x if x.ndim == 1 else self.layer(x) @ self.kernel[...]


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(0.3), (16, 16))
        layer = nn.Dense(16)
        return x if x.ndim == 1 else layer(x) @ kernel


def nnx_call():
    wrapped = qt.nnx.wrap(OfNnx(), qt.recipes.te_current)
    return wrapped, nnx.jit(lambda model, x: model(x))


def linen_call():
    module = qt.linen.wrap(OfLinen(), qt.recipes.te_current)
    variables = module.init(jax.random.key(0), X)
    return (
        lambda x: module.apply(variables, x),
        lambda _, x: jax.jit(module.apply)(variables, x),
    )


@pytest.mark.parametrize("first", [X[:0], X[0]], ids=["empty", "a vector"])
@pytest.mark.parametrize("made", [nnx_call, linen_call])
def test_a_first_call_without_matmuls_says_nothing_of_other_shapes(made, first):
    call, jitted = made()
    for x in (first, first, X, first):  # the oracle is the same call under jit, which has no memory
        np.testing.assert_array_equal(call(x), jitted(call, x))


def told(layer, x, kind):
    """A result that says what `kind` is."""
    return layer(x) * (2 if kind is True else 3 if type(kind) is float else 1)


class TellingNnx(OfNnx):
    def __call__(self, x, kind):
        return told(self.layer, x, kind)


class TellingLinen(nn.Module):
    @nn.compact
    def __call__(self, x, kind):
        return told(nn.Dense(16), x, kind)


def test_equal_arguments_of_other_types_are_other_arguments():
    model = TellingNnx()
    wrapped = qt.nnx.wrap(model, qt.Recipe(None, None))
    module = TellingLinen()
    variables = module.init(jax.random.key(0), X, 1)
    same = qt.linen.wrap(module, qt.Recipe(None, None))
    for kind in (1, True, 1):
        np.testing.assert_allclose(wrapped(X, kind), model(X, kind), rtol=1e-6)
    for kind in (1, True, 1.0, 1):
        expected = module.apply(variables, X, kind)
        np.testing.assert_allclose(same.apply(variables, X, kind), expected, rtol=1e-6)
