"""Pickles of wrapped models: what comes back is what went in."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import qtoolkit as qt


class Own(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.eye(8))
        self.left = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.left(x) @ self.kernel


class OwnLinen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x @ self.param("kernel", lambda _: jnp.eye(8))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_wrapped_models_are_pickled(copied):
    """Their classes, which have the names of those that were there, are made again."""
    x = jnp.float32(np.random.default_rng(0).normal(size=(4, 8)))
    model = qt.nnx.wrap(Own(), qt.Rules({"left": None}, default=qt.recipes.te_current))
    again = copied(model)
    assert type(again) is type(model)
    assert type(again.left) is type(model.left)
    np.testing.assert_array_equal(again(x), model(x))
    module = qt.linen.wrap(OwnLinen(), qt.recipes.mxfp8)
    variables = module.init(jax.random.key(0), x)
    again = copied(module)
    assert type(again) is type(module)
    np.testing.assert_array_equal(again.apply(variables, x), module.apply(variables, x))
