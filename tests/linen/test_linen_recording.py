"""linen modules in other people's trainers: `apply(..., mutable=["qtoolkit"])` moves the state.

Oracles: `qt.linen.value_and_grad`, of which other tests show what it does; `Current` scaling.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from state_of import state_of

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


def trained(module, variables, factors):
    """The state after each plain step and each of ours, which must move the same histories."""
    mine = theirs = variables
    for factor in factors:
        value, mine = jax.jit(step, static_argnums=0)(module, mine, factor * X)
        expected, theirs = jax.jit(ours, static_argnums=0)(module, theirs, factor * X)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        for one, other in zip(histories(mine), histories(theirs), strict=True):
            np.testing.assert_array_equal(one[..., :2, :], other[..., :2, :])
            assert one[..., :2, 0].all()
        yield mine, theirs


@pytest.mark.quick
def test_a_trainer_with_the_collection_has_delayed_scales():
    module = qt.linen.wrap(Gated(), FORWARD)
    variables = jax.jit(module.init)(jax.random.key(0), X)
    assert len(histories(variables)) == 8  # of them two are matmuls of activations
    for mine, _ in trained(module, variables, (1, 3)):
        assert not any(history[2].any() for history in histories(mine))


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
    with pytest.warns(RuntimeWarning, match=r"scales of cotangents are computed in the same step"):
        step(both, variables, X)
    with pytest.warns(RuntimeWarning, match=r"histories of delayed scales and keys .* do not mo"):
        jax.grad(lambda x: both.apply(variables, x).sum())(X)


class Compiled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(nn.Dense)(8)(x)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit])
@pytest.mark.parametrize("make", [nn.Dense, lambda n: Transformed("scan"), lambda n: Compiled()])
def test_a_user_is_told_that_there_is_no_state(make, run):
    """As in a `TrainState` with "params" alone. Oracle: `Current` scaling."""
    module = qt.linen.wrap(make(8), FORWARD)
    params = module.init(jax.random.key(0), X)["params"]

    def loss(params, module):
        return jnp.mean(module.apply({"params": params}, X) ** 2)

    run(functools.partial(loss, module=module))(params)  # evaluation says nothing
    with pytest.warns(RuntimeWarning, match=r"differentiated without state: the model has none"):
        got = jax.grad(run(functools.partial(loss, module=module)))(params)
    current = qt.linen.wrap(make(8), Recipe(gradient="e5m2"))
    expected = jax.grad(run(functools.partial(loss, module=current)))(params)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


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


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("gate", nn.initializers.lecun_normal(), (8, 8))
        return jnp.tanh(nn.Dense(8)(x)) @ kernel


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Block()(x), None


def scanned(kind, x):
    scan = nn.scan(kind, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    return scan()(x, None)[0]


def in_cond(x):
    block = Block()
    if block.is_initializing():
        return block(x)
    return nn.cond(x.sum() < 1e9, lambda block, x: block(x), lambda block, x: x, block, x)


def in_vmap(x):
    return nn.vmap(Block, variable_axes={"params": None}, split_rngs={"params": False})()(x)


TRANSFORMED = {
    "scan": lambda x: nn.Dense(8)(scanned(Step, x)),
    "remat": lambda x: nn.remat(Block)()(x),
    "scan of remat": lambda x: scanned(nn.remat(Step), x),
    "vmap": in_vmap,
    "cond": in_cond,
}


class Transformed(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x):
        return TRANSFORMED[self.how](x)


@pytest.mark.quick
@pytest.mark.parametrize("how", TRANSFORMED)
def test_state_moves_inside_of_transformations_of_linen(how):
    """They are not told to carry the collection. Each layer of a scan has a history."""
    module = qt.linen.wrap(Transformed(how), FORWARD)
    variables = jax.jit(module.init)(jax.random.key(0), X)
    *_, (mine, theirs) = trained(module, variables, (1, 9))
    assert bads(mine) == bads(theirs)
    assert sum(bads(mine)) == 1  # the first layer: the second step is nine times as large


def bads(variables):
    leaves, _ = jax.tree_util.tree_flatten_with_path(variables["qtoolkit"])
    return [int(leaf.sum()) for path, leaf in leaves if path[-1].key == "bad"]


def test_an_infinity_in_one_layer_of_a_scan_changes_no_history_where_it_comes():
    """Its kernel holds it, and the first matmul of the next layer gets it: then comes a tanh."""
    module = qt.linen.wrap(Transformed("scan of remat"), FORWARD)
    variables = jax.jit(module.init)(jax.random.key(0), X)
    _, before = jax.jit(step, static_argnums=0)(module, variables, X)
    block = "ScanCheckpointStep_0/Block_0"
    kernel = before["params"]["ScanCheckpointStep_0"]["Block_0"]["gate"]
    poisoned = jax.tree.map(
        lambda x: x.at[1, 0, 0].set(jnp.inf) if x is kernel else x, before["params"]
    )
    _, after = jax.jit(step, static_argnums=0)(module, {**before, "params": poisoned}, X)
    for path, name, bad in ((block, "gate", 1), (f"{block}/Dense_0", "kernel", 2)):
        was, now = (state_of(v, path)[name] for v in (before, after))
        np.testing.assert_array_equal(now["bad"], np.arange(3) == bad)
        for layer in range(3):
            newest = 0 if layer == bad else 1
            np.testing.assert_array_equal(
                now["history"][layer, :2, newest], was["history"][layer, :2, 0]
            )


def sharded(x, kernel):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    return run(x, kernel)


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x, kernel):
        return x @ kernel


class Using(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
        return sharded(x, kernel) if self.how == "shard_map" else Inner()(x, kernel)


@pytest.mark.parametrize("how", ["shard_map", "another module"])
def test_a_parameter_just_made_has_its_name(how):
    """Its matmul found no history under the name that `init` gave it. Oracle: a Dense layer."""
    module = qt.linen.wrap(Using(how), FORWARD)
    variables = module.init(jax.random.key(0), X)
    _, variables = ours(module, variables, X)
    dense = qt.linen.wrap(nn.Dense(8, use_bias=False), FORWARD)
    state = dense.init(jax.random.key(0), X)["qtoolkit"]
    _, expected = ours(dense, {"params": variables["params"], "qtoolkit": state}, X)
    got, expected = (jax.tree.leaves(v["qtoolkit"]) for v in (variables, expected))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
