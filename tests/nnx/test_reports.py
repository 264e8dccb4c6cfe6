"""Reports of the whole: multiplications, native products, methods, losses, axis names, histories.

Oracles: multiplications counted by hand; the dtypes of the operands in the compiled program.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from refused import refused

import qtoolkit as qt

NATIVE = ("te_current", "mxfp8", "nvfp4", "deepseek_v3", "token_scaled", "te_delayed_hybrid")


class Model(nnx.Module):
    """A product of 8 x 64 x 32 and, in each of five iterations, one of 8 x 32 x 32."""

    def __init__(self, axis_name=None):
        rngs = nnx.Rngs(0)
        self.up, self.mix = nnx.Linear(64, 32, rngs=rngs), nnx.Linear(32, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, axis_name=axis_name, rngs=rngs)

    def encode(self, x):
        return self.up(x)

    def __call__(self, x):
        def step(h, _):
            return self.mix(h), None

        return self.norm(jax.lax.scan(step, self.encode(x), length=5)[0])


class Module(nn.Module):
    def setup(self):
        self.up, self.down = nn.Dense(32), nn.Dense(4)
        self.norm = nn.BatchNorm(use_running_average=False, axis_name="batch")

    def encode(self, x):
        return self.up(x)

    def __call__(self, x):
        return self.norm(self.down(self.encode(x)))


X = jnp.ones((8, 64))
PARTS = ("forward", "backward")
UP, MIX = 8 * 64 * 32, 5 * 8 * 32 * 32


def summary(report):
    return next(line for line in str(report).splitlines() if "matmuls quantized" in line)


def parts(report):
    return [(p.path, p.part) for p in report.quantized]


def test_multiplications_are_counted_by_hand():
    wrapped = qt.nnx.wrap(Model(), qt.Rules({"mix": None}, default=qt.recipes.te_current))
    found = qt.nnx.report(wrapped, X)
    # No parameter is in the input of `up`: its gradient is not computed.
    assert [(p.part, p.multiplications) for p in found.quantized] == [
        ("forward", UP),
        ("wgrad", UP),
    ]
    left = {part: sum(p.multiplications for p in found.left if p.part == part) for part in PARTS}
    assert left == {"forward": MIX, "backward": 2 * MIX}
    share = f"{2 * UP / (2 * UP + 3 * MIX):.1%}"
    assert summary(found) == f"2 of 5 matmuls quantized, {share} of all multiplications"
    assert f"{MIX / (2 * UP + 3 * MIX):.1%}" in str(found)


@pytest.mark.parametrize(
    ("function", "shapes", "multiplications"),
    [
        (lambda x, w: jnp.einsum("bti,io->bto", x, w), [(2, 3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (lambda x, w: jnp.einsum("bij,bkj->bik", x, w), [(2, 3, 4), (2, 5, 4)], 2 * 3 * 4 * 5),
        # A kernel of 3 x 4 features for each of 2 x 8 positions and 5 features.
        (
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
            ),
            [(2, 8, 4), (3, 4, 5)],
            2 * 8 * 5 * 3 * 4,
        ),
        (
            lambda x, w: jax.lax.ragged_dot(x, w, jnp.asarray([2, 4])),
            [(6, 4), (2, 4, 5)],
            6 * 4 * 5,
        ),
    ],
)
@pytest.mark.parametrize("recipe", [qt.recipes.te_current, qt.Recipe(None, gradient=None)])
def test_multiplications_of_every_kind(function, shapes, multiplications, recipe):
    class Own(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones(shapes[1]))

        def __call__(self, x):
            return function(x, self.kernel[...])

    found = qt.nnx.report(qt.nnx.wrap(Own(), recipe), jnp.ones(shapes[0]))
    products = found.quantized + found.left
    assert [p.multiplications for p in products] == [multiplications] * 2  # forward, by the kernel


def test_products_in_a_shard_map_run_in_each_shard():
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def loss(model, x):
        return jax.shard_map(
            lambda x: x @ x.T, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
        )(model.encode(x)).sum()

    wrapped = qt.nnx.wrap(Model(), qt.Rules({"up": qt.recipes.te_current}))
    left = qt.nnx.report(loss, wrapped, jnp.ones((8 * mesh.size, 64))).left
    assert next(p.multiplications for p in left if p.part == "forward") == 8 * 8 * 32 * mesh.size


@pytest.mark.filterwarnings("ignore:differentiated without")
@pytest.mark.parametrize("name", NATIVE)
def test_a_native_product_that_is_emulated_says_so(name):
    recipe = dataclasses.replace(getattr(qt.recipes, name), arithmetic="native")
    wrapped = qt.nnx.wrap(nnx.Linear(256, 256, rngs=nnx.Rngs(0)), recipe)
    x = jnp.ones((256, 256))
    found = qt.nnx.report(wrapped, x)
    says = [p.operands.rsplit(" ", 1)[1] for p in found.quantized]
    assert set(says) <= {"(native)", "(emulated)"}

    # The oracle: what the program multiplies, by the dtypes in its text.
    def loss(model, x):
        return model(x).sum()

    def step(state, x):
        return nnx.grad(loss)(nnx.merge(graph, state), x)

    graph, state = nnx.split(wrapped)
    text = jax.jit(step).lower(state, x).as_text()
    narrow = re.findall(r"(?:dot_general|scaled_dot).*?: \(tensor<[^>]*f(?:8|4)E", text)
    assert bool(narrow) == ("(native)" in says)
    emulated = says.count("(emulated)")
    assert (f"{emulated} of them emulated" in summary(found)) == bool(emulated)
    assert emulated == (2 if name == "deepseek_v3" else 0)


def test_emulated_recipes_say_nothing_of_it():
    found = qt.nnx.report(qt.nnx.wrap(Model(), qt.recipes.deepseek_v3), X)
    assert "emulated" not in str(found)


def test_methods_losses_and_strict():
    wrapped = qt.nnx.wrap(Model(), qt.Rules({"up": qt.recipes.te_current}))
    assert parts(qt.nnx.report(wrapped, X, method="encode")) == [
        ("up", part) for part in ("forward", "wgrad")
    ]
    assert not qt.nnx.report(wrapped, X, method="encode").left

    def loss(model, batch):
        return jnp.mean(model.encode(batch) ** 2) + jnp.sum(batch @ batch.T), {"aux": batch}

    found = qt.nnx.report(loss, wrapped, X)
    assert len(found.quantized) == 2
    assert {p.operands for p in found.left if p.part == "forward"} == {
        "float32[8, 64] x float32[64, 8]"
    }
    rules = qt.Rules({"up": qt.recipes.te_current, "mix": None})
    qt.nnx.wrap(Model(), rules, strict=lambda model: model(X))
    qt.nnx.wrap(Model(), rules, strict={"x": X, "method": "encode"})
    with refused(ValueError, r"1 matmuls of Model are not quantized, and no rule excludes them"):
        qt.nnx.wrap(Model(), rules, strict=lambda model: loss(model, X))
    refused(TypeError, r"after a function comes nothing.*report\(loss, model", qt.nnx.report, loss)
    with refused(TypeError, "method='encode' and a function"):
        qt.nnx.report(loss, wrapped, X, method="encode")


@pytest.mark.parametrize("axis", ["batch", "data-parallel"])
def test_models_that_need_an_axis_name(axis):
    wrapped = qt.nnx.wrap(Model(axis), qt.recipes.te_current)
    assert len(qt.nnx.report(wrapped, X).quantized) == 5  # two of `up`, three of `mix`
    recipe = dataclasses.replace(qt.recipes.te_current, axis_names=(axis,))
    assert len(qt.nnx.report(qt.nnx.wrap(Model(), recipe), X).quantized) == 5
    refused(NameError, "mine", qt.nnx.report, lambda model, x: mine(model(x)), wrapped, X)  # noqa: F821


def test_linen_methods_losses_and_axis_names():
    module = qt.linen.wrap(Module(), qt.recipes.te_delayed_hybrid)
    init = jax.vmap(lambda x: module.init(jax.random.key(0), x), axis_name="batch")
    variables = jax.tree.map(lambda x: x[0], init(X[None]))
    found = qt.linen.report(module, variables, X)
    assert len(found.quantized) == 5
    assert all("no history yet" in p.operands for p in found.quantized)
    assert {p.path for p in qt.linen.report(module, variables, X, method="encode").quantized} == {
        "up"
    }

    def loss(variables, x):
        return module.apply(variables, x, method="encode").sum()

    assert len(qt.linen.report(loss, variables, X).quantized) == 2
    with refused(TypeError, "method is given for a function"):
        qt.linen.report(loss, variables, X, method="encode")


def test_empty_products_are_no_lines():
    """`lax.associative_scan` multiplies arrays without elements."""

    class Scan(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((3, 4, 4)))

        def __call__(self, x):
            return jax.lax.associative_scan(jnp.matmul, x * self.kernel)

    x = jnp.ones((3, 4, 4))
    jaxpr = str(jax.make_jaxpr(Scan())(x))
    real = jaxpr.count("dot_general") - len(re.findall(r"f32\[0,\d+,\d+\] = dot_general", jaxpr))
    found = qt.nnx.report(qt.nnx.wrap(Scan(), qt.recipes.te_current), x)
    assert sum(p.count for p in found.quantized if p.part == "forward") == real
    assert not found.left


def test_integers_are_the_reason():
    class Own(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones((64, 4)))

        def __call__(self, x):
            return x @ self.kernel + jnp.ones((8, 2), int) @ jnp.ones((2, 4), int)

    wrapped = qt.nnx.wrap(Own(), qt.recipes.te_current, strict=(X,))
    (left,) = qt.nnx.report(wrapped, X).left
    assert left.reason == "integers are not rounded"


def test_a_layer_without_a_history_says_so():
    wrapped = qt.nnx.wrap(Model(), qt.recipes.te_delayed_hybrid)
    assert all("current: no history yet" in p.operands for p in qt.nnx.report(wrapped, X).quantized)
    qt.nnx.value_and_grad(lambda model: model.encode(X).sum())(wrapped)
    labels = {p.path: p.operands for p in qt.nnx.report(wrapped, X).quantized}
    assert "delayed" in labels["up"]
    assert "no history" not in labels["up"]
    assert "current: no history yet" in labels["mix"]


def test_a_row_says_once_that_there_is_no_history():
    report = qt.nnx.report(qt.nnx.wrap(Model(), qt.recipes.te_delayed_hybrid), X)
    first, second = str(report).splitlines()[1:3]
    pair, grads = "e4m3fn by tensor, current", "e5m2 by tensor, current"
    ends = "no history yet"
    forward, dgrad, wgrad = f"{pair} x {pair}", f"{grads} x {pair}", f"{pair} x {grads}"
    assert re.split(r" {2,}", first) == ["up", forward, "-", wgrad, "2", ends]
    assert re.split(r" {2,}", second) == ["mix", forward, dgrad, wgrad, "3", ends]
    current = str(qt.nnx.report(qt.nnx.wrap(Model(), qt.recipes.te_current), X))
    assert "history" not in current


class Scores(nnx.Module):
    """A matmul of two activations: only a trace finds it, so without `inputs` it has no state."""

    def __init__(self):
        self.up = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

    def __call__(self, x):
        h = self.up(x)
        return h @ h.T


def test_a_matmul_without_state_is_not_called_delayed():
    wrapped = qt.nnx.wrap(Scores(), qt.recipes.te_delayed_hybrid)
    loss = qt.nnx.value_and_grad(lambda model, x: jnp.mean(model(x)))
    with pytest.warns(RuntimeWarning, match="inputs="):
        loss(wrapped, X)
    up, scores = (
        [p.operands for p in qt.nnx.report(wrapped, X).quantized if (p.path == "up") == is_up]
        for is_up in (True, False)
    )
    assert all("delayed" in operands for operands in up)
    assert all("delayed" not in operands and "current: no state" in operands for operands in scores)


def test_the_total_is_the_last_line():
    wrapped = qt.nnx.wrap(Model(), qt.Rules({"mix": qt.recipes.te_current}, default=None))
    report = qt.nnx.report(wrapped, X, method="encode")
    assert report.unreached == ("mix",)
    *_, unreached, total = str(report).splitlines()
    assert unreached == "ran no matmul with these inputs: mix"
    assert total == "0 of 2 matmuls quantized"  # forward, and by the kernel


@pytest.mark.parametrize("left", [None, qt.Recipe((None, None), gradient=None)])
def test_products_that_are_recomputed_count_once(left):
    class Two(nn.Module):
        remat: bool

        @nn.compact
        def __call__(self, x):
            def pair(module, x):
                return nn.Dense(64, name="b")(jnp.tanh(nn.Dense(64, name="a")(x)))

            return (nn.remat(pair) if self.remat else pair)(self, x)

    def found(remat):
        rules = qt.Rules({"b": qt.recipes.te_current, "a": left}, default=None)
        module = qt.linen.wrap(Two(remat), rules)
        return qt.linen.report(module, module.init(jax.random.key(0), X), X)

    gradient = jax.grad(lambda v: Two(True).apply(v, X).sum())
    jaxpr = str(jax.make_jaxpr(gradient)(Two(True).init(jax.random.key(0), X)))
    assert jaxpr.count("dot_general") > 5  # by kernels, and by the input of the second
    assert summary(found(True)) == summary(found(False))
    assert summary(found(True)) == "3 of 5 matmuls quantized, 60.0% of all multiplications"
