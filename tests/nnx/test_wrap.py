"""nnx.wrap: which products change, that nothing else does, and the cases that break qwix."""

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from refused import refused
from state_of import histories_of, recipe_of

import qtoolkit as qt
from qtoolkit import Recipe
from qtoolkit.formats import Rules
from qtoolkit.nnx import wrap


class Everything(nnx.Module):
    """One of each layer that has a hook, one that has none, and a layer used twice."""

    def __init__(self, dtype=None, *, rngs):
        self.linear = nnx.Linear(16, 16, dtype=dtype, rngs=rngs)
        self.general = nnx.LinearGeneral(16, (4, 4), dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, dtype=dtype, rngs=rngs)
        self.einsum = nnx.Einsum("btd,df->btf", (16, 8), (8,), dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.conv = nnx.Conv(8, 4, (3,), dtype=dtype, rngs=rngs)
        self.again = self.linear

    def __call__(self, x):
        x = self.general(self.linear(x)).reshape(x.shape)
        x = self.again(self.attention(x))
        return self.conv(self.norm(self.einsum(x)))


@pytest.fixture
def model():
    return Everything(rngs=nnx.Rngs(0))


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 8, 16))


def apply(model, x):
    return model(x)


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.quick
def test_parameters_are_shared_and_the_original_is_untouched(model, x):
    before = model(x)
    wrapped = wrap(model)
    assert isinstance(wrapped, Everything)
    assert type(wrapped).__name__ == "Everything"
    assert type(model) is Everything
    assert wrapped.linear.kernel is model.linear.kernel
    assert wrapped.again is wrapped.linear
    assert jax.tree.structure(nnx.state(wrapped)) == jax.tree.structure(nnx.state(model))
    assert not np.array_equal(wrapped(x), before)
    np.testing.assert_array_equal(model(x), before)
    np.testing.assert_allclose(wrapped(x), before, atol=0.5)  # another rounding, the same model


@pytest.mark.exhaustive
def test_both_models_in_any_order_eager_and_jitted(model, x):
    wrapped = wrap(model)
    # Eager and jitted float32 products differ in the last bits, the same call does not.
    wide, quantized = model(x), wrapped(x)
    jitted = nnx.jit(apply)
    for _ in range(2):
        np.testing.assert_allclose(jitted(model, x), wide, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(jitted(wrapped, x), quantized, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(wrapped(x), quantized)
        np.testing.assert_array_equal(model(x), wide)


def test_a_function_traced_before_wrapping_is_traced_again(model, x):
    """qwix 0.1.8 reuses the old trace: a difference of exactly zero."""
    traces = []

    @nnx.jit
    def f(model, x):
        traces.append(1)
        return model(x)

    wide = f(model, x)
    first, second = wrap(model), wrap(model)
    assert np.abs(np.asarray(f(first, x) - wide)).max() > 1e-3
    np.testing.assert_array_equal(f(second, x), f(first, x))
    assert len(traces) == 2  # equal recipes share a trace
    np.testing.assert_array_equal(f(model, x), wide)
    assert len(traces) == 2


def test_a_batch_of_the_kernels_shape():
    """qwix 0.1.8 takes both operands for weights and stops."""
    linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    x = jnp.float32(np.random.default_rng(1).normal(size=(16, 16)))
    expected = qt.dot_general(x, linear.kernel[...], (((1,), (0,)), ((), ()))) + linear.bias[...]
    for run in (apply, nnx.jit(apply)):
        np.testing.assert_allclose(run(wrap(linear), x), expected, rtol=1e-6)
    assert jax.vmap(wrap(linear))(x[None]).shape == (1, 16, 16)


LAYERS = {
    "Linear": lambda rngs, **o: nnx.Linear(16, 8, rngs=rngs, **o),
    "LinearGeneral": lambda rngs, **o: nnx.LinearGeneral(16, (2, 4), rngs=rngs, **o),
    "Einsum": lambda rngs, **o: nnx.Einsum("btd,df->btf", (16, 8), (8,), rngs=rngs, **o),
    "Conv": lambda rngs, **o: nnx.Conv(16, 8, (3,), rngs=rngs, **o),
}


@pytest.mark.sample("Linear")
@pytest.mark.parametrize("layer", LAYERS)
def test_every_hook_quantizes_the_forward_and_the_gradients(layer, x):
    module = LAYERS[layer](nnx.Rngs(0))
    wrapped = wrap(module)
    wide = nnx.grad(loss)(module, x)
    quantized = nnx.grad(loss)(wrapped, x)
    difference = np.linalg.norm(wide["kernel"] - quantized["kernel"])
    assert 0.001 < difference / np.linalg.norm(wide["kernel"]) < 0.2


def test_attention_is_made_of_four_wrapped_projections(x):
    attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
    wrapped = wrap(attention)
    for name in ("query", "key", "value", "out"):
        assert recipe_of(getattr(wrapped, name)) == Recipe()
    assert not np.array_equal(wrapped(x), attention(x))


@pytest.mark.sample("Linear")
@pytest.mark.parametrize("layer", LAYERS)
def test_weights_are_rounded_from_their_own_dtype(layer, x):
    """Float32 parameters of a bfloat16 layer: the oracle rounds the float32 ones, by ml_dtypes."""
    module = LAYERS[layer](nnx.Rngs(0), dtype=jnp.bfloat16)
    kernel = np.asarray(module.kernel[...])
    scale = np.abs(kernel).max() / np.float32(448)
    rounded = (kernel * (1 / scale)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact = nnx.clone(module)
    exact.kernel[...] = jnp.asarray(rounded * 2.0**-9)  # small, and bfloat16 holds it
    # E4M3 inputs up to 448 are their own rounding, so only the weights' rounding is left.
    grid = np.linspace(-448, 448, x.size).reshape(x.shape).astype(ml_dtypes.float8_e4m3fn)
    grid = jnp.asarray(grid.astype(np.float32), jnp.bfloat16)
    unquantized = wrap(exact, Recipe(forward=None, gradient=None))
    expected = np.asarray(unquantized(grid), np.float64) * 2.0**9 * scale
    got = wrap(module)(grid)
    assert got.dtype == jnp.bfloat16
    # Two results rounded to bfloat16, of sums in another order.
    tolerance = 2.0**-6 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance)


@pytest.mark.exhaustive
def test_training_the_wrapped_model_trains_the_original(model, x):
    wrapped = wrap(model)
    optimizer = nnx.Optimizer(wrapped, optax.adamw(1e-2), wrt=nnx.Param)
    before = float(loss(model, x))

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    losses = [float(step(wrapped, optimizer, x)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert float(loss(model, x)) < 0.5 * before
    assert wrapped.linear.kernel is model.linear.kernel


def test_wrapping_again_replaces_the_recipe(model, x):
    e5m2 = Recipe(forward="e5m2")
    twice = wrap(wrap(model), e5m2)
    np.testing.assert_array_equal(twice(x), wrap(model, e5m2)(x))
    np.testing.assert_allclose(
        wrap(wrap(model), Recipe(forward=None, gradient=None))(x), model(x), rtol=1e-5, atol=1e-5
    )


class Parts(nnx.Module):
    """Layers; a part that somebody has wrapped; a layer that is always quantized."""

    def __init__(self, recipe):
        rngs = nnx.Rngs(0)
        self.own = nnx.Linear(16, 16, rngs=rngs)
        self.part = wrap(nnx.Sequential(nnx.Linear(16, 16, rngs=rngs)), recipe)
        self.always = qt.nnx.Fp8Linear(16, 16, rngs=rngs, recipe=recipe)
        self.last = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.last(self.always(self.part(nnx.relu(self.own(x)))))


def test_parts_that_were_wrapped_by_themselves_keep_their_recipes():
    """As in linen. Oracle: the parts, called one after the other."""
    delayed, other = qt.recipes.te_delayed_hybrid, Recipe("e5m2")
    model, x = Parts(delayed), jnp.linspace(-1, 2, 64).reshape(4, 16)
    wrapped = wrap(wrap(model, qt.recipes.mxfp8, inputs=(x,)), other, inputs=(x,))  # the whole
    qt.nnx.value_and_grad(lambda m: jnp.sum(m(x)))(wrapped)  # moves the histories of the parts
    inner = wrapped.always(wrapped.part(nnx.relu(wrap(model.own, other)(x))))
    np.testing.assert_array_equal(wrapped(x), wrap(model.last, other)(inner))
    assert all(np.any(history) for history in histories_of(wrapped))
    assert len(histories_of(wrapped)) == 2
    shown = {p.path: p.operands for p in qt.nnx.report(wrapped, x).quantized if p.part == "forward"}
    assert {path for path, text in shown.items() if "delayed" in text} == {
        "part/layers/0",
        "always",
    }
    policy = qt.policies.first_last_high_precision(other, last=0)
    left = {p.path for p in qt.nnx.report(wrap(Parts(delayed), policy, inputs=(x,)), x).left}
    assert left == {"own"}
    refused(ValueError, "rule 'part' matches nothing", wrap, model, Rules({"part": None}, other))
    with refused(ValueError, "all layers of List are in parts that were wrapped by themselves"):
        wrap(nnx.List([model.part]), other)
    assert len(qt.nnx.report(wrap(nnx.List([model.part]), delayed)[0], x).quantized) == 2


@pytest.mark.exhaustive
def test_wrapped_models_survive_split_merge_clone_and_remat(model, x):
    wrapped = wrap(model)
    expected = wrapped(x)
    graph, state = nnx.split(wrapped)
    np.testing.assert_array_equal(nnx.merge(graph, state)(x), expected)
    np.testing.assert_array_equal(nnx.clone(wrapped)(x), expected)
    plain = nnx.grad(loss)(wrapped, x)
    remat = nnx.grad(lambda model, x: jnp.mean(nnx.remat(apply)(model, x) ** 2))(wrapped, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, remat)


@pytest.mark.exhaustive
def test_float16_and_bfloat16_models(x):
    for dtype in (jnp.float16, jnp.bfloat16):
        model = Everything(dtype, rngs=nnx.Rngs(0))
        wrapped = wrap(model)
        out, grads = nnx.value_and_grad(lambda m, x: jnp.mean(m(x).astype(jnp.float32) ** 2))(
            wrapped, x.astype(dtype)
        )
        assert np.isfinite(out)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_subclasses_are_wrapped(x):
    class Scaled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    linear = Scaled(16, 4, rngs=nnx.Rngs(0))
    assert not np.array_equal(wrap(linear)(x), linear(x))


A, B = Recipe(forward="e4m3fn"), Recipe(forward="e5m2")


class Block(nnx.Module):
    def __init__(self, *, rngs, shared=None):
        self.mlp = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.shared = shared


class Plain(nnx.Module, pytree=False):
    """No JAX container: only Flax can look inside."""

    def __init__(self, shared, *, rngs):
        self.inner = nnx.data([nnx.Linear(4, 4, rngs=rngs), shared])


class Nest(nnx.Module):
    """Every way of holding a layer, and one layer that is reached by all of them."""

    def __init__(self, *, rngs):
        shared = nnx.Linear(4, 4, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs), Block(shared=shared, rngs=rngs)])
        self.held = nnx.data({"x": shared, "y": [Block(rngs=rngs)]})
        self.named = nnx.Dict(plain=Plain(shared, rngs=rngs))
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.again = shared
        self.conv = nnx.Conv(4, 4, (1,), rngs=rngs)


@pytest.fixture(scope="module")
def nest():
    return Nest(rngs=nnx.Rngs(0))


PATHS = (
    *("blocks/0/mlp", "blocks/1/mlp", "again", "held/y/0/mlp", "named/plain/inner/0", "conv"),
    *(f"attention/{name}" for name in ("query", "key", "value", "out")),
)
SHARED = ("blocks/1/shared", "held/x", "named/plain/inner/1", "again")


def recipes(model):
    """The recipe of each quantized layer of a Nest."""
    found = {}
    for path in PATHS:
        layer = model
        for part in path.split("/"):
            try:
                layer = getattr(layer, part)
            except AttributeError:
                layer = layer[int(part) if part.isdigit() else part]
        if recipe_of(layer) is not None:
            found[path] = recipe_of(layer)
    return found


@pytest.mark.sample("rules0-default0-expected0", "rules5-None-expected5", "rules10-None-expected10")
@pytest.mark.parametrize(
    ("rules", "default", "expected"),
    [
        ({}, A, dict.fromkeys(PATHS, A)),
        ({r"blocks/\d+/mlp": A}, None, dict.fromkeys(PATHS[:2], A)),
        ({"blocks/0": A, "blocks": B}, None, {PATHS[0]: A, PATHS[1]: B, "again": B}),
        ({"blocks": None, "mlp": B, "^named/plain/inner/0$": A}, None, {PATHS[3]: B, PATHS[4]: A}),
        ({nnx.Conv: A}, None, {"conv": A}),
        ({nnx.MultiHeadAttention: None, nnx.LinearGeneral: A, nnx.Conv: A}, None, {"conv": A}),
        ({nnx.MultiHeadAttention: A}, None, dict.fromkeys(PATHS[6:], A)),
        ({"query": None, nnx.LinearGeneral: A}, None, dict.fromkeys(PATHS[7:], A)),
        ({Block: A}, None, dict.fromkeys((PATHS[0], PATHS[1], PATHS[3], "again"), A)),
        ({Plain: A}, None, dict.fromkeys((PATHS[4], "again"), A)),
        ({Nest: A}, None, dict.fromkeys(PATHS, A)),
        ({nnx.LayerNorm: None, "norm$": None, "^again$": A}, None, {"again": A}),
    ],
)
def test_rules_choose_a_recipe_for_each_layer(nest, rules, default, expected):
    wrapped = wrap(nest, Rules(rules, default))
    assert recipes(wrapped) == expected
    assert recipes(nest) == {}
    assert wrapped.blocks[0].mlp.kernel is nest.blocks[0].mlp.kernel
    assert jax.tree.structure(nnx.state(wrapped)) == jax.tree.structure(nnx.state(nest))


@pytest.mark.parametrize("path", SHARED)
def test_a_shared_layer_is_matched_under_every_path(nest, path):
    """`nnx.iter_modules` gives one of its paths only."""
    wrapped = wrap(nest, Rules({"^" + path + "$": A}))
    assert recipes(wrapped) == {"again": A}
    assert wrapped.again is wrapped.blocks[1].shared is wrapped.held["x"]
    # Two rules that match different paths of it: the order of the rules decides.
    others = [other for other in SHARED if other != path]
    assert recipes(wrap(nest, Rules([(path, B), *((o, A) for o in others)])))["again"] == B


def test_wrapped_by_rules_or_one_by_one(nest):
    """Oracle: wrapping the layers themselves."""
    x = jnp.float32(np.random.default_rng(2).normal(size=(3, 4)))
    wrapped = wrap(nest, Rules({"blocks/0/mlp": A, "conv": None}, default=B))
    np.testing.assert_array_equal(wrapped.blocks[0].mlp(x), wrap(nest.blocks[0].mlp, A)(x))
    np.testing.assert_array_equal(wrapped.blocks[1].mlp(x), wrap(nest.blocks[1].mlp, B)(x))
    np.testing.assert_array_equal(wrapped.conv(x), nest.conv(x))


def test_the_last_rules_decide(nest):
    """A layer that they leave, by None or by not matching it, computes as before it was wrapped."""
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)
    once = wrap(nest, Rules({"mlp": A}))
    assert set(recipes(once)) == {PATHS[0], PATHS[1], PATHS[3]}
    for rules in (Rules({"mlp": None, "conv": B}), Rules({"conv": B})):
        twice = wrap(once, rules)
        assert recipes(twice) == {"conv": B}
        np.testing.assert_array_equal(twice.blocks[0].mlp(x), nest.blocks[0].mlp(x))


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"blokcs": A, "mlp": A}, ValueError, r"^wrap: rule 'blokcs' matches nothing, expected"),
        ({"blokcs": None, "mlp": A}, ValueError, r"^wrap: rule 'blokcs' matches nothing, expected"),
        # A list computes nothing; "^blocks/" would leave what is in it.
        ({"^blocks$": None, "mlp": A}, ValueError, r"^wrap: rule '\^blocks\$' matches nothing"),
        ({nnx.Einsum: A, "mlp": A}, ValueError, "^wrap: rule Einsum matches nothing"),
        (
            {"norm": A, "mlp": A},
            ValueError,
            "^wrap: rule 'norm' matches blocks/0/norm, and LayerNorm has no matmul",
        ),
        ({"mlp": None}, ValueError, "^wrap: the rules exclude every layer, .* for one or more"),
        ({}, ValueError, "^wrap: the rules exclude every layer"),
        ({"mlp": "e4m3fn"}, TypeError, "^Rules: rule 'mlp': wrap: recipe has type str, expected"),
    ],
)
def test_rules_that_cannot_be_meant(nest, rules, error, message):
    refused(error, message, wrap, nest, Rules(rules))


def test_rules_leave_alone_what_could_not_be_wrapped(nest):
    def own(*args, **kwargs):
        raise NotImplementedError

    model = nnx.clone(nest)
    model.conv.conv_general_dilated = own
    assert wrap(model, Rules({"conv": None}, A)).conv.conv_general_dilated is own


def test_a_cycle_is_left_to_flax():
    class Child(nnx.Module):
        def __init__(self, parent):
            self.parent = parent
            self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    parent = nnx.Module()
    parent.child = Child(parent)
    refused(ValueError, "Found cycle in the graph", wrap, parent)


def test_errors(model):
    refused(TypeError, r"wrap: model has type dict", wrap, {})
    refused(TypeError, r"wrap: recipe has type str", wrap, model, "e4m3fn")
    with refused(ValueError, r"LayerNorm has no layer to quantize"):
        wrap(nnx.LayerNorm(4, rngs=nnx.Rngs(0)))


def test_functions_of_the_user_s_own_for_a_product(x):
    """Oracle: the layer with Flax's functions. Wrapping would have discarded them."""
    calls = []

    def own(*args, **kwargs):
        calls.append(args)
        return jax.lax.dot_general(*args, **kwargs)

    def promoting(*args, **kwargs):
        calls.append(args)
        return flax.nnx.nn.dtypes.promote_dtype(*args, **kwargs)

    plain, layer = (nnx.Linear(16, 8, rngs=nnx.Rngs(0)) for _ in range(2))
    layer.dot_general, layer.promote_dtype = own, promoting
    np.testing.assert_array_equal(wrap(layer)(x), wrap(plain)(x))
    assert len(calls) == 2


@pytest.mark.quick
def test_a_method_that_returns_its_module():
    class Filling(nnx.Module):
        def __init__(self):
            self.kernel, self.last = nnx.Param(jnp.eye(4)), nnx.Variable(jnp.zeros((2, 4)))

        def fill(self, x):
            self.last[...] = x @ self.kernel[...]
            return self

    wrapped = wrap(Filling())
    assert wrapped.fill(jnp.ones((2, 4))) is wrapped
    np.testing.assert_allclose(wrapped.last[...], np.ones((2, 4)), rtol=1e-6)


def test_the_report_of_an_unwrapped_model_blames_no_rule():
    """As where what `wrap` returned was not used."""
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    qt.nnx.wrap(model)
    left = qt.nnx.report(model, jnp.ones((1, 4))).left
    assert {product.reason for product in left} == {"no layer of the model is wrapped"}


@pytest.mark.parametrize("remat", [False, True])
def test_spectral_norm_estimates_in_high_precision(remat):
    """Its statistics are those of the module that is not wrapped, bit for bit."""

    class Normed(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.norm = nnx.SpectralNorm(nnx.Linear(8, 6, rngs=rngs), rngs=rngs)
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (6, 5)))

        def __call__(self, x):
            run = lambda norm, x: norm(x, update_stats=True)  # noqa: E731
            return (nnx.remat(run) if remat else run)(self.norm, x) @ self.kernel

    x = jax.random.normal(jax.random.key(1), (3, 8))
    plain, wrapped = Normed(), qt.nnx.wrap(Normed(), qt.Recipe("int4"))
    report = qt.nnx.report(wrapped, x)
    assert {p.path for p in report.left} == {"norm", "norm/layer_instance"}
    assert {p.path for p in report.quantized} == {"norm/layer_instance", "(model)"}
    assert not np.allclose(wrapped(x), plain(x))
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m.norm) for m in (wrapped, plain)))
    again = qt.nnx.report(qt.nnx.wrap(wrapped, qt.Recipe("int8")), x)
    assert {p.path for p in again.left} == {p.path for p in report.left}
