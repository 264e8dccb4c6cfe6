"""Policies of `jax.checkpoint` by primitive treat wrapped products as they treat plain ones.

Oracle: the plain model under the same policy, by the number of products that its gradient computes
again.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import qtoolkit as qt

POLICIES = {
    "nothing_saveable": 5,
    "dots_saveable": 0,
    "checkpoint_dots": 0,
    "dots_with_no_batch_dims_saveable": 2,  # the product with a batch axis, and the convolution
    "everything_saveable": 0,
}
NATIVE = dataclasses.replace(qt.recipes.te_current, arithmetic="native")
RECIPES = {
    "te_current": qt.recipes.te_current,
    "te_delayed_hybrid": qt.recipes.te_delayed_hybrid,
    "mxfp8": qt.recipes.mxfp8,
    "native": NATIVE,
    "unquantized": qt.Recipe(None, gradient=None),
}


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.last = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.own = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        x = jnp.sin(self.conv(jnp.sin(self.first(x))))
        x = jnp.sin(jnp.einsum("bij,bkj->bik", x, x))
        return jnp.sin(self.last(jnp.sin(x @ self.own)))


class Module(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.sin(nn.Conv(8, (3,))(jnp.sin(nn.Dense(8)(x))))
        x = jnp.sin(jnp.einsum("bij,bkj->bik", x, x))
        own = self.param("own", nn.initializers.normal(1.0), (8, 8))
        return jnp.sin(nn.Dense(8)(jnp.sin(x @ own)))


def data():
    return jax.random.normal(jax.random.key(1), (2, 8, 8))


def products(jaxpr):
    """The products in a jaxpr; a quantized product's gradients are one `linear_with_transpose`."""
    names = ("dot_general", "conv_general_dilated")
    inner = [getattr(x, "jaxpr", x) for eqn in jaxpr.eqns for x in eqn.params.values()]
    inner += [getattr(x, "jaxpr", x) for e in jaxpr.eqns for x in e.params.get("branches", ())]
    own = sum(eqn.primitive.name in names for eqn in jaxpr.eqns)
    return own + sum(products(x) for x in inner if hasattr(x, "eqns"))


def of_nnx(recipe, policy):
    model = Model() if recipe is None else qt.nnx.wrap(Model(), recipe)
    graph, state = nnx.split(model)
    remat = nnx.remat(lambda model, x: model(x), policy=policy)
    return lambda state, x: remat(nnx.merge(graph, state), x).sum(), state


def of_linen(recipe, policy):
    module = nn.remat(Module, policy=policy)()
    variables = module.init(jax.random.key(0), data())
    if recipe is not None:
        module = qt.linen.wrap(module, recipe)
        variables = {**module.init(jax.random.key(0), data()), **variables}
    return lambda variables, x: module.apply(variables, x).sum(), variables


def recomputed(of, recipe, name):
    """How many products of the forward pass a gradient computes again because of a policy."""
    function, state = of(recipe, getattr(jax.checkpoint_policies, name))
    policy = jax.checkpoint_policies.everything_saveable
    kept, _ = of(recipe, policy)
    counts = [
        products(jax.make_jaxpr(jax.grad(f, allow_int=True))(state, data()).jaxpr)
        for f in (function, kept)
    ]
    return counts[0] - counts[1]


@pytest.mark.parametrize("of", [of_nnx, of_linen])
@pytest.mark.parametrize("name", POLICIES)
def test_plain_models_compute_so_many_again(of, name):
    assert recomputed(of, None, name) == POLICIES[name]


@pytest.mark.filterwarnings("ignore:differentiated without")  # it needs the plain program
@pytest.mark.sample(
    *("nothing_saveable-te_current-of_nnx", "dots_with_no_batch_dims_saveable-mxfp8-of_nnx"),
    "dots_saveable-te_delayed_hybrid-of_linen",
)
@pytest.mark.parametrize("of", [of_nnx, of_linen])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", POLICIES)
def test_wrapped_models_compute_as_many_again(of, recipe, name):
    assert recomputed(of, RECIPES[recipe], name) == POLICIES[name]


@pytest.mark.parametrize("recipe", [qt.recipes.te_delayed_hybrid, NATIVE])
def test_gradients_and_histories_do_not_depend_on_the_policy(recipe):
    x, results = data(), []
    for name in ("nothing_saveable", "dots_saveable"):
        model = qt.nnx.wrap(Model(), recipe, inputs=(x,))
        remat = nnx.remat(lambda model, x: model(x), policy=getattr(jax.checkpoint_policies, name))
        step = nnx.jit(qt.nnx.value_and_grad(lambda model, x, f=remat: f(model, x).sum()))
        _, grads = step(model, x)
        results.append(jax.tree.leaves((grads, nnx.state(model, qt.nnx.ScalingState))))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_names_of_the_user_keep_results():
    x, w = data()[0], data()[1]
    contract = (((1,), (0,)), ((), ()))

    def named(x, w):
        y = qt.dot_general(x, w, contract, recipe=qt.recipes.te_current)
        return jnp.sin(jax.ad_checkpoint.checkpoint_name(y, "mine"))

    counts = []
    for names in (["mine"], ["others"]):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        remat = jax.checkpoint(named, policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(lambda x, w, f=remat: f(x, w).sum(), (0, 1)))(x, w)
        counts.append(products(jaxpr.jaxpr))
    assert counts == [1, 2]
