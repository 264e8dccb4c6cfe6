"""A mixture of experts: its router in high precision, its experts quantized, also on a mesh.

Oracle: the same model written with `qtoolkit.ragged_dot` and plain products by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from refused import refused

import qtoolkit as qt

RECIPE = qt.recipes.te_current
X = jax.random.normal(jax.random.key(0), (8, 16))
EXPERTS, ROUTER = (
    jax.random.normal(jax.random.key(i), shape) / 4 for i, shape in ((1, (2, 16, 16)), (2, (16, 2)))
)
RULES = qt.Rules({"moe/router_weights": None, "moe": RECIPE})


def mixed(x, experts, router, ragged=lax.ragged_dot):
    weights = jax.nn.softmax(x @ router)
    sizes = jnp.array([3, 5], jnp.int32)
    return ragged(x, experts, sizes) * weights[:, :1]


def on_a_mesh(x, experts, router):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    specs = {"in_specs": (P("d"), P(), P()), "out_specs": P("d")}
    return jax.shard_map(mixed, mesh=mesh, **specs)(x, experts, router)


def by_hand(x, experts, router):
    return mixed(x, experts, router, lambda *args: qt.ragged_dot(*args, recipe=RECIPE))


class Nnx(nnx.Module):
    def __init__(self, function):
        self.experts, self.router_weights = nnx.Param(EXPERTS), nnx.Param(ROUTER)
        self.function = function

    def __call__(self, x):
        return self.function(x, self.experts[...], self.router_weights[...])


class Around(nnx.Module):
    def __init__(self, function):
        self.moe = Nnx(function)

    def __call__(self, x):
        return self.moe(x)


class Linen(nn.Module):
    function: object

    @nn.compact
    def __call__(self, x):
        experts = self.param("experts", lambda _: EXPERTS)
        router = self.param("router_weights", lambda _: ROUTER)
        return self.function(x, experts, router)


class LinenAround(nn.Module):
    function: object

    @nn.compact
    def __call__(self, x):
        return Linen(self.function, name="moe")(x)


def of_nnx(function):
    model = qt.nnx.wrap(Around(function), RULES)
    graph, state = nnx.split(model)

    def run(experts, router, x):
        copied = nnx.merge(graph, state, copy=True)
        copied.moe.experts.set_value(experts)
        copied.moe.router_weights.set_value(router)
        return copied(x)

    return run, qt.nnx.report(model, X)


def of_linen(function):
    module = qt.linen.wrap(LinenAround(function), RULES)

    def run(experts, router, x):
        return module.apply({"params": {"moe": {"experts": experts, "router_weights": router}}}, x)

    params = {"params": {"moe": {"experts": EXPERTS, "router_weights": ROUTER}}}
    return run, qt.linen.report(module, params, X)


@pytest.mark.parametrize("function", [mixed, on_a_mesh], ids=["plain", "shard_map"])
@pytest.mark.parametrize("kind", [of_nnx, of_linen])
def test_the_router_stays_and_the_experts_are_quantized(kind, function):
    run, report = kind(function)
    loss = lambda f: lambda *args: jnp.sum(jnp.sin(f(*args)))  # noqa: E731
    got = jax.grad(loss(lambda e, r, x: run(e, r, x)), (0, 1, 2))(EXPERTS, ROUTER, X)
    expected = jax.grad(loss(lambda e, r, x: by_hand(x, e, r)), (0, 1, 2))(EXPERTS, ROUTER, X)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    plain = jax.grad(loss(lambda e, r, x: mixed(x, e, r)), (0, 1, 2))(EXPERTS, ROUTER, X)
    assert not np.allclose(got[0], plain[0], rtol=1e-4)
    left = [p for p in report.left if p.part == "forward"]
    assert [(p.path, p.reason) for p in left] == [("moe", "excluded by a rule")]


def test_a_rule_for_a_parameter_that_is_not_there_is_refused():
    with refused(ValueError, r"rule 'moe/ruoter' matches nothing"):
        qt.nnx.wrap(Around(mixed), qt.Rules({"moe/ruoter": None}, RECIPE))
