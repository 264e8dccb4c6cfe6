"""Calls of wrapped linen modules that are more than a function of arrays. Oracle: plain Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from refused import refused

import qtoolkit as qt

X = jnp.float32(np.random.default_rng(0).normal(size=(4, 8)))
PLAIN = qt.Recipe(None, None)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(8)(x)))


class Branch(nn.Module):
    """Python takes a branch by the numbers of an array."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8)(x)
        return nn.Dense(8)(h if h.sum() > 0 else -h)


class Scan(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, carry, _):
                return nn.Dense(8)(carry), None

        layers = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=3)
        return layers()(x, None)[0]


class Filling(nn.Module):
    @nn.compact
    def __call__(self, x, kept):
        h = nn.Dense(8)(x)
        kept["list"].append(h)
        kept["sum"] = h.sum()
        return nn.Dense(8)(h)


class Steps(nn.Module):
    """A generator, or a function, in place of arrays."""

    def setup(self):
        self.dense = nn.Dense(8)

    def __call__(self, x):
        return self.dense(x)

    def steps(self, x):
        for _ in range(2):
            x = self.dense(x)
            yield x

    def later(self, x):
        y = self.dense(x)
        return lambda z: y + z


class Log:
    def __init__(self):
        self.items = []


class Logging(nn.Module):
    log: Log

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8)(x)
        self.log.items.append(h)
        return h


@pytest.mark.parametrize("net", [Net, Branch, Scan])
@pytest.mark.parametrize("recipe", ["te_current", "te_delayed_hybrid"])
def test_without_jit_a_call_gives_what_it_gives_with_jit(net, recipe):
    wrapped = qt.linen.wrap(net(), getattr(qt.recipes, recipe))
    params = net().init(jax.random.key(0), X)
    with jax.disable_jit():
        found = wrapped.apply(params, X)
        if net is not Branch:
            assert "params" in wrapped.init(jax.random.key(0), X)
    if net is Branch:  # its layers, which are quantized one by one
        plain = qt.linen.wrap(Net(), getattr(qt.recipes, recipe))
        layer = qt.linen.wrap(nn.Dense(8), getattr(qt.recipes, recipe))
        first, second = (params["params"][f"Dense_{i}"] for i in (0, 1))
        h = layer.apply({"params": first}, X)
        expected = layer.apply({"params": second}, h if h.sum() > 0 else -h)
        assert jnp.abs(found - net().apply(params, X)).max() > 1e-3, plain
    else:
        expected = wrapped.apply(params, X)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*have no state:RuntimeWarning")
def test_without_jit_init_takes_a_branch_and_warns_that_nothing_is_kept():
    wrapped = qt.linen.wrap(Branch(), qt.recipes.te_delayed_hybrid)
    with jax.disable_jit():
        variables = wrapped.init(jax.random.key(0), X)
    assert set(variables) == {"params"}
    refused(TypeError, "disable_jit", wrapped.init, jax.random.key(0), X)
    refused(TypeError, "disable_jit", wrapped.apply, variables, X)


@pytest.mark.parametrize("jit", [False, True])
def test_what_a_method_puts_into_its_arguments_is_there_after_the_call(jit):
    params = Filling().init(jax.random.key(0), X, {"list": []})

    def call(module):
        def run(params, x):
            kept = {"list": []}
            return module.apply(params, x, kept), kept

        return (jax.jit(run) if jit else run)(params, X)

    wrapped = qt.linen.wrap(Filling(), PLAIN)
    for _ in range(2):  # the second call is not traced
        found, expected = call(wrapped), call(Filling())
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, expected)
    kept = {"list": []}
    out = qt.linen.wrap(Filling(), qt.recipes.te_current).apply(params, X, kept)
    assert isinstance(kept["sum"], jax.Array)
    assert not jnp.array_equal(out, found[0])


@pytest.mark.parametrize(("method", "kind"), [("steps", "generator"), ("later", "function")])
def test_code_that_runs_later_is_refused(method, kind):
    wrapped = qt.linen.wrap(Steps(), qt.recipes.te_current)
    params = Steps().init(jax.random.key(0), X)
    refused(TypeError, f"Steps.{method} returns a {kind}", wrapped.apply, params, X, method=method)


def test_an_object_that_would_keep_an_array_is_refused():
    params = Logging(Log()).init(jax.random.key(0), X)
    with refused(TypeError, r"Logging\.__call__ keeps an array in an object of Log"):
        qt.linen.wrap(Logging(Log()), qt.recipes.te_current).apply(params, X)


class Generator(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(16)(x)))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(16)(x)))


@pytest.mark.sample("True-te_delayed_hybrid")
@pytest.mark.parametrize("recipe", ["te_current", "te_delayed_hybrid"])
@pytest.mark.parametrize("cast", [False, True])
def test_a_loss_gives_each_module_its_part_of_the_variables(recipe, cast):
    """Their matmuls, whose layers have the same names, are told apart. Oracle: each by itself."""
    first = qt.linen.wrap(Generator(), getattr(qt.recipes, recipe))
    rules = qt.Rules([("^Dense_1$", None)], default=qt.recipes.te_current)
    second = qt.linen.wrap(Critic(), rules)
    modules = {"first": first, "second": second}
    parts = {name: jax.jit(one.init)(jax.random.key(0), X) for name, one in modules.items()}
    names = {name for part in parts.values() for name in part}
    variables = {n: {k: part.get(n, {}) for k, part in parts.items()} for n in names}

    def loss(variables, x):
        if cast:
            half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), variables["params"])
            variables = {**variables, "params": half}
        one, two = ({n: x[key] for n, x in variables.items()} for key in ("first", "second"))
        return jnp.mean(second.apply(two, first.apply(one, x)) ** 2)

    *_, metrics = jax.jit(qt.linen.value_and_grad(loss, metrics=True))(variables, X)
    expected = {"first/Dense_0:kernel", "first/Dense_1:kernel", "second/Dense_0:kernel"}
    assert {name.rsplit("/", 2)[0] for name in metrics} == expected
    for part in expected:
        path = part.split(":")[0].split("/")
        kernel = variables["params"][path[0]][path[1]]["kernel"]
        np.testing.assert_allclose(
            metrics[f"{part}/rhs/amax"], np.abs(kernel).max(), rtol=0.01 if cast else 0
        )
        assert np.isfinite(metrics[f"{part}/cotangent/amax"])
    report = qt.linen.report(loss, variables, X)
    assert {x.path for x in report.quantized} == {x.split(":")[0] for x in expected}
    assert {x.path for x in report.left} == {"second/Dense_1"}
    found = qt.linen.numerics(first, variables, X, loss)
    assert {f"{row.path}:{row.product}" for row in found.rows} == expected
    assert all(float(row.tally.uses) for row in found.rows)


class Half(nn.Module):
    """In bfloat16, with a convolution and attention, whose sums XLA rounds where they stand."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3,), dtype=jnp.bfloat16)(x)
        x = nn.MultiHeadDotProductAttention(num_heads=2, dtype=jnp.bfloat16)(x, x)
        return nn.Dense(8, dtype=jnp.bfloat16)(nn.gelu(x))


def test_what_is_not_rounded_has_the_bits_of_the_plain_module():
    x = jnp.float32(np.random.default_rng(1).normal(size=(2, 16, 8)))
    params = Half().init(jax.random.key(0), x)

    def step(module):
        def loss(params):
            return jnp.mean(module.apply(params, x).astype(jnp.float32) ** 2)

        return jax.jit(jax.value_and_grad(loss))(params)

    wrapped = qt.linen.wrap(Half(), PLAIN)
    jax.tree.map(np.testing.assert_array_equal, step(wrapped), step(Half()))
