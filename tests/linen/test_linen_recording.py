"""linen modules in other people's trainers: `apply(..., mutable=["qtoolkit"])` moves the state.

Oracles: `qt.linen.value_and_grad`, of which other tests show what it does; `Current` scaling.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import qtoolkit as qt
from qtoolkit.products import Delayed, Operand, Recipe

FORWARD = Recipe(Operand("e4m3fn", scaling=Delayed(4)), "e5m2")
BOTH = Recipe(Operand("e4m3fn", scaling=Delayed(4)), Operand("e5m2", scaling=Delayed(4)))
X = jnp.float32(np.random.default_rng(0).normal(size=(2, 4, 8)))


class Gated(nn.Module):
    """Layers of Flax, of which attention runs others in a traced method, and a product."""

    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2)(nn.Dense(8)(x), x)
        return x @ self.param("gate", nn.initializers.lecun_normal(), (8, 8))


def step(module, variables, x):
    """As a trainer has it for `batch_stats`."""

    def loss(params):
        y, updates = module.apply({**variables, "params": params}, x, mutable=["qtoolkit"])
        return jnp.mean(y**2), updates

    (value, updates), _ = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    return value, {**variables, **updates}


def ours(module, variables, x):
    loss = qt.linen.value_and_grad(lambda variables, x: jnp.mean(module.apply(variables, x) ** 2))
    value, _, state = loss(variables, x)
    return value, {**variables, "qtoolkit": state}


def histories(variables):
    leaves, _ = jax.tree_util.tree_flatten_with_path(variables["qtoolkit"])
    return [np.asarray(leaf) for path, leaf in leaves if path[-1].key == "history"]


@pytest.mark.quick
def test_a_trainer_that_carries_the_collection_has_delayed_scales():
    module = qt.linen.wrap(Gated(), FORWARD)
    mine = theirs = jax.jit(module.init)(jax.random.key(0), X)
    assert len(histories(mine)) == 8  # of them two are products of activations
    for factor in (1, 3):
        value, mine = jax.jit(step, static_argnums=0)(module, mine, factor * X)
        expected, theirs = jax.jit(ours, static_argnums=0)(module, theirs, factor * X)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        for one, other in zip(histories(mine), histories(theirs), strict=True):
            np.testing.assert_array_equal(one[:2], other[:2])
            assert one[:2, 0].all()
            assert not one[2].any()


def test_evaluation_moves_nothing():
    module = qt.linen.wrap(Gated(), FORWARD)
    variables = jax.jit(module.init)(jax.random.key(0), X)
    _, variables = jax.jit(step, static_argnums=0)(module, variables, X)
    _, updates = module.apply(variables, 100 * X, mutable=["qtoolkit"])
    jax.tree.map(np.testing.assert_array_equal, updates["qtoolkit"], variables["qtoolkit"])


def test_keys_advance():
    module = qt.linen.wrap(nn.Dense(8), qt.recipes.nvfp4)
    variables = module.init(jax.random.key(0), X)
    for _ in range(2):
        _, variables = step(module, variables, X)
    (key,) = jax.tree.leaves(variables["qtoolkit"])
    assert int(key[1]) == 2


def test_a_user_is_told():
    both = qt.linen.wrap(nn.Dense(8), BOTH)
    variables = both.init(jax.random.key(0), X)
    with pytest.warns(RuntimeWarning, match=r"those of cotangents are current ones; different"):
        step(both, variables, X)
    with pytest.warns(RuntimeWarning, match=r"histories of delayed scales and keys .* do not mo"):
        jax.grad(lambda x: both.apply(variables, x).sum())(X)


class Layer(nn.Module):
    recipe: Recipe

    @nn.compact
    def __call__(self, x, _):
        return qt.linen.wrap(nn.Dense(8, parent=None), self.recipe)(x), None


def test_a_scan_that_maps_the_collection_carries_it():
    axes = {"params": 0, "qtoolkit": 0}
    scan = nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs={"params": True}, length=3)
    module = scan(FORWARD)
    variables = module.init(jax.random.key(0), X, None)

    def plain(params):
        (y, _), updates = module.apply(
            {**variables, "params": params}, X, None, mutable=["qtoolkit"]
        )
        return jnp.mean(y**2), updates

    _, updates = jax.grad(plain, has_aux=True)(variables["params"])
    loss = qt.linen.value_and_grad(lambda v: jnp.mean(module.apply(v, X, None)[0] ** 2))
    _, _, state = loss(variables)
    (mine,), (theirs,) = histories(updates), histories({"qtoolkit": state})
    assert mine.shape == (3, 3, 4)
    np.testing.assert_array_equal(mine[:, :2], theirs[:, :2])


def test_layers_in_an_inner_scan_need_value_and_grad():
    """A plain trainer is told so; ours moves their histories."""

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(8)(x), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Cell, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return scan()(x, None)[0]

    module = qt.linen.wrap(Stack(), FORWARD)
    variables = module.init(jax.random.key(0), X)
    with pytest.warns(RuntimeWarning, match=r"inside of nn.scan, nn.remat or nn.vmap needs value_"):
        _, after = step(module, variables, X)
    assert not any(history.any() for history in histories(after))
    _, _, state = qt.linen.value_and_grad(lambda v: jnp.mean(module.apply(v, X) ** 2))(variables)
    assert all(history[:2, 0].all() for history in histories({"qtoolkit": state}))
