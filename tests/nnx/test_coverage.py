"""Which products of a model `wrap` reaches, by a count of its jaxpr that shares nothing with it.

Comments say what the code before this one, and qwix 0.1.8, reached of all forward products.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.numpy import dot as multiply
from refused import refused

import qtoolkit as qt
from qtoolkit.products import Recipe

PRODUCTS = (
    *("dot_general", "scaled_dot", "conv_general_dilated"),
    *("ragged_dot", "ragged_dot_general"),
)


def subjaxprs(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if hasattr(item, "jaxpr"):
                yield item.jaxpr
            elif hasattr(item, "eqns"):
                yield item


def counted(jaxpr, inside=False, names=PRODUCTS):
    """(quantized, plain): a product is quantized inside of a custom derivative of ours."""
    total = np.zeros(2, int)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in names:
            total[0 if inside else 1] += 1
        ours = inside or (eqn.primitive.name == "jit" and "qtoolkit" in eqn.params["name"])
        for inner in subjaxprs(eqn):
            total += counted(inner, ours, names)
    return total


def forward_products(model, inputs):
    graph, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(*x))(state, inputs)
    return tuple(counted(jaxpr.jaxpr))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 16, rngs=rngs)
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.linear(self.embed(tokens)))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, decode=True, rngs=rngs)
        self.head = nnx.Linear(16, 11, rngs=rngs)
        self.attention.init_cache((2, 6, 16))

    def __call__(self, tokens):
        return self.head(self.attention(self.embed(tokens)))


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.router = nnx.Linear(16, 3, rngs=rngs)
        self.up = nnx.Einsum("td,edf->tef", (3, 16, 8), rngs=rngs)
        self.down = nnx.Einsum("tef,efd->ted", (3, 8, 16), rngs=rngs)

    def __call__(self, x):
        weights = jax.nn.softmax(self.router(x))
        return jnp.einsum("ted,te->td", self.down(nnx.relu(self.up(x))), weights)


class Ragged(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, 16, 8)))
        self.out = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(lax.ragged_dot(x, self.kernel[...], jnp.array([2, 2, 2])))


class Own(nnx.Linear):
    """Wrapped to nothing before: its own `@` went past the hook, with a difference of 0.0."""

    def __call__(self, x):
        return x @ self.kernel[...] + self.bias[...]


class Mixed(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (
            nnx.Param(jax.random.normal(rngs.params(), shape)) for shape in ((16, 8), (8, 8))
        )
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        y = jnp.dot(self.linear(x @ self.first[...]), self.second[...])
        y = lax.dot_general(y, self.second[...], (((1,), (0,)), ((), ())))
        return jax.jit(helper)(y, self.second[...]) @ self.second[...]


def helper(x, kernel):
    return jnp.einsum("bi,io->bo", x, kernel)


class Keeping(nnx.Module):
    """As in timesfm: the function that computes the products is an attribute."""

    def __init__(self, function, rngs):
        self.attention_fn = function
        self.query = nnx.LinearGeneral(16, (4, 4), rngs=rngs)

    def __call__(self, x):
        return self._attend(self.query(x))

    def _attend(self, x):
        return self.attention_fn(x, x, x)


class Looped(nnx.Module):
    """A product in scan, cond, remat and while."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(0.3 * jax.random.normal(rngs.params(), (16, 16)))

    def __call__(self, x):
        kernel = self.kernel[...]
        x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ kernel), None), x, None, length=2)
        x = lax.cond(x[0, 0] > 0, lambda x: x @ kernel, lambda x: -x @ kernel, x)
        x = jax.checkpoint(lambda x: x @ kernel)(x)
        return lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ kernel), x)


def lora(rngs):
    b = nnx.initializers.normal()
    return nnx.LoRA(16, 2, 8, base_module=nnx.Linear(16, 8, rngs=rngs), b_initializer=b, rngs=rngs)


def recurrent(cell):
    return lambda rngs: nnx.RNN(cell(16, 8, rngs=rngs), rngs=rngs)


x, sequence, image = (
    jax.random.normal(jax.random.key(i), shape)
    for i, shape in enumerate([(6, 16), (2, 6, 16), (2, 8, 8, 4)])
)
tokens = jnp.arange(12).reshape(2, 6) % 11

MODELS = {
    "attention": (nnx.MultiHeadAttention, sequence, 6),  # 4 / 6
    "decoder with a cache": (Decoder, tokens[:, :1], 7),  # 5 / 7
    "tied embedding": (Tied, tokens, 2),  # 1 / 2; qwix 1 / 2
    "experts": (Experts, x, 4),  # 3 / 4
    "ragged experts": (Ragged, x, 2),  # 1 / 2
    "LSTM": (recurrent(nnx.LSTMCell), sequence, 8),
    "optimized LSTM": (recurrent(nnx.OptimizedLSTMCell), sequence, 2),
    "GRU": (recurrent(nnx.GRUCell), sequence, 2),
    "LoRA": (lora, x, 3),  # 1 / 3
    "LoRALinear": (lambda rngs: nnx.LoRALinear(16, 8, lora_rank=2, rngs=rngs), x, 3),
    "ConvTranspose": (
        lambda rngs: nnx.ConvTranspose(4, 8, (3, 3), strides=2, rngs=rngs),
        image,
        1,
    ),  # 0
    "convolution": (
        lambda rngs: nnx.Conv(
            4, 8, (3, 3), 2, feature_group_count=2, padding="CIRCULAR", rngs=rngs
        ),
        image,
        1,
    ),  # qwix: a TypeError in the backward pass
    "own product": (lambda rngs: Own(16, 8, rngs=rngs), x, 1),  # 0 / 1
    "own products beside a layer": (Mixed, x, 6),  # 1 / 4; qwix 2 / 4
    "own products in control flow": (Looped, x, 4),
    "a function of Flax as attribute": (
        functools.partial(Keeping, nnx.dot_product_attention),
        sequence,
        3,
    ),
    "a function of JAX as attribute": (
        functools.partial(Keeping, functools.partial(jax.nn.dot_product_attention, scale=0.5)),
        sequence,
        3,
    ),
}


def made(name):
    make = MODELS[name][0]
    if make is nnx.MultiHeadAttention:
        return make(4, 16, decode=False, rngs=nnx.Rngs(0))
    return make(rngs=nnx.Rngs(0))


@pytest.mark.sample("attention", "LSTM", "ConvTranspose", "own products beside a layer")
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_reached(name):
    _, batch, count = MODELS[name]
    model, wrapped = made(name), qt.nnx.wrap(made(name))
    quantized, plain = forward_products(wrapped, (batch,))
    # `cond` has a product in each branch.
    assert (quantized, plain) == (count + (name == "own products in control flow"), 0)
    assert forward_products(model, (batch,))[0] == 0
    report = qt.nnx.report(wrapped, batch)
    assert report.left == ()
    assert sum(p.count for p in report.quantized if p.part == "forward") == quantized
    assert type(wrapped).__name__ == type(model).__name__
    assert isinstance(wrapped, type(model))


@pytest.mark.sample("own products beside a layer")
@pytest.mark.parametrize("name", ["own products beside a layer", "tied embedding", "LoRA"])
def test_values_and_gradients_follow_the_plain_model(name):
    _, batch, _ = MODELS[name]

    def loss(model):
        return jnp.mean(model(batch) ** 2)

    model, wrapped = made(name), qt.nnx.wrap(made(name))
    (_, plain), (_, grads) = (nnx.jit(nnx.value_and_grad(loss))(m) for m in (model, wrapped))
    a, b = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (plain, grads)
    )
    assert 0 < np.linalg.norm(a - b) < 0.3 * np.linalg.norm(a)
    np.testing.assert_array_equal(model(batch), made(name)(batch))


@pytest.mark.sample("own products beside a layer")
@pytest.mark.parametrize("name", ["own products beside a layer", "attention"])
def test_native_blocks_train_and_every_product_is_reported(name):
    """Oracle: the emulated products, which multiply the same numbers."""
    _, batch, count = MODELS[name]
    recipe = qt.recipes.mxfp8
    emulated, native = (
        qt.nnx.wrap(made(name), dataclasses.replace(recipe, arithmetic=arithmetic))
        for arithmetic in ("emulate", "native")
    )
    graph, state = nnx.split(native)
    jaxpr = jax.make_jaxpr(lambda s: nnx.merge(graph, s)(batch))(state)
    assert tuple(counted(jaxpr.jaxpr)) == (count, 0)
    assert tuple(counted(jaxpr.jaxpr, names=("scaled_dot",))) == (count, 0)
    report, of_emulated = (qt.nnx.report(model, batch) for model in (native, emulated))
    assert report.left == ()
    total, natively = (
        sum(p.count for p in one.quantized if end in p.operands)
        for one, end in ((of_emulated, ""), (report, "(native)"))
    )
    assert natively == total

    @nnx.jit
    def step(model):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
        rate = 0.01 / optax.tree.norm(grads)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - rate * g, params, nnx.state(grads)))
        return loss

    # Roundings of later layers may fall otherwise where sums differ in their last bit.
    losses = [[float(step(model)) for _ in range(3)] for model in (native, emulated)]
    np.testing.assert_allclose(*losses, rtol=1e-2)
    assert losses[0][0] > losses[0][1] > losses[0][2]


def test_scaled_products_of_the_users_own_are_reported():
    class Scaled(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(16, 6, rngs=nnx.Rngs(0))

        def __call__(self, x):
            q, scale = x.astype(jnp.float8_e4m3fn), jnp.ones((6, 1), jnp.float8_e8m0fnu)
            q, scale = jax.lax.stop_gradient((q, scale))
            numbers = (((1,), (1,)), ((), ()))
            scales = {"lhs_scale": scale, "rhs_scale": scale}
            return jax.lax.scaled_dot(q, q, dimension_numbers=numbers, **scales) + self.linear(x)

    report = qt.nnx.report(qt.nnx.wrap(Scaled()), x)
    (left,) = report.left
    assert left.operands == "float8_e4m3fn[6, 16] x float8_e4m3fn[6, 16]"
    assert left.reason == "its operands are rounded already"
    assert len(report.quantized) == 2


def test_a_product_of_ones_own_is_that_of_dot_general():
    """Oracle: `qt.dot_general` by hand; a bfloat16 copy of a kernel is not what is rounded."""
    layer = Own(16, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    expected = qt.dot_general(x, layer.kernel[...], (((1,), (0,)), ((), ()))) + layer.bias[...]
    np.testing.assert_allclose(qt.nnx.wrap(layer)(x), expected, rtol=1e-6)

    class Half(nnx.Module):
        def __init__(self):
            self.kernel = layer.kernel

        def __call__(self, x):
            return x @ self.kernel[...].astype(jnp.bfloat16)

    half = x.astype(jnp.bfloat16)
    expected = qt.dot_general(half, layer.kernel[...], (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(qt.nnx.wrap(Half())(half), expected)


def test_modules_that_change_state_while_they_compute():
    class Counting(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.eye(16))
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x, *, double=False):
            self.calls[...] += 1
            y = self.dropout(x @ self.kernel[...])
            return 2 * y if double else y

    wrapped = qt.nnx.wrap(Counting())
    first, second = wrapped(x, double=True), nnx.jit(lambda m, x: m(x))(wrapped, x)
    assert int(wrapped.calls[...]) == 2
    assert not np.array_equal(first != 0, second != 0)  # dropout drew twice


class Cache(nnx.Module):
    def __init__(self):
        self.seen = nnx.Variable(jnp.zeros_like(x))


class Caching(nnx.Module):
    """Writes a cache that it is called with, as decoders of public models do, and returns it."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.eye(16) * 0.3)

    def __call__(self, x, cache, scale):
        cache.seen[...] = cache.seen[...] + x @ self.kernel[...]
        return cache.seen[...] * scale[...], cache


@pytest.mark.quick
@pytest.mark.parametrize(
    "run", [lambda model, *args: model(*args), nnx.jit(lambda m, *a: m(*a)[0])]
)
def test_modules_and_variables_among_the_arguments_are_state(run):
    model, scale = qt.nnx.wrap(Caching()), nnx.Variable(jnp.float32(2))
    cache, once = Cache(), model(x, Cache(), scale)[0] / 2
    run(model, x, cache, scale)
    out = run(model, x, cache, scale)
    np.testing.assert_allclose(cache.seen[...], 2 * once, rtol=1e-6)
    assert not isinstance(out, tuple) or out[1] is cache
    assert len(qt.nnx.report(model, x, cache, scale).quantized) == 2  # forward, by the kernel


def test_results_that_are_no_arrays():
    class Talking(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.eye(16))

        def __call__(self, x):
            return {"y": x @ self.kernel[...], "name": "talking", "size": 16, "none": None}

    wrapped = qt.nnx.wrap(Talking())
    out = wrapped(x)
    assert (out["name"], out["size"], out["none"]) == ("talking", 16, None)
    assert not np.array_equal(out["y"], x)
    assert len(qt.nnx.report(wrapped, x).quantized) == 2  # forward, by the kernel


@pytest.mark.exhaustive
def test_attention_weights_are_sown_as_before():
    attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
    wrapped = qt.nnx.wrap(attention)

    def weights(model):
        _, found = nnx.capture(lambda m: m(sequence, sow_weights=True), nnx.Intermediate)(model)
        return jax.tree.leaves(found)[0]

    np.testing.assert_allclose(weights(wrapped), weights(attention), atol=0.05)
    assert not np.array_equal(weights(wrapped), weights(attention))


def test_rules_decide_for_each_module():
    """A module with products of its own does not take those of a layer that a rule leaves."""

    class Around(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
            self.own = Own(16, 16, rngs=nnx.Rngs(1))
            self.kernel = nnx.Param(jnp.eye(16))

        def __call__(self, x):
            return self.own(self.inner(x)) @ self.kernel[...]

    def paths(rules):
        wrapped = qt.nnx.wrap(Around(), rules)
        report = qt.nnx.report(wrapped, x)
        return (
            {p.path for p in report.quantized},
            {p.path for p in report.left if p.reason == "excluded by a rule"},
        )

    recipe = Recipe()
    assert paths(qt.Rules({"inner": None}, recipe)) == ({"own", "(model)"}, {"inner"})
    assert paths(qt.Rules({Own: None}, recipe)) == ({"inner", "(model)"}, {"own"})
    assert paths(qt.Rules({"^$": None}, recipe)) == ({"inner", "own"}, {"(model)"})
    assert paths(qt.Rules({nnx.Linear: recipe})) == ({"inner", "own"}, {"(model)"})


def test_a_layer_that_came_after_wrap_is_quantized():
    """Oracle: the same model, wrapped when it had that layer."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=rngs) for _ in range(3)))
    rules = qt.Rules({"layers/1": None}, Recipe())
    wrapped = qt.nnx.wrap(model, rules)
    head = nnx.Linear(16, 4, rngs=rngs)
    wrapped.layers[2] = model.layers[2] = head
    afresh = qt.nnx.wrap(model, rules)
    for one in (wrapped, afresh):
        report = qt.nnx.report(one, x)
        assert {(p.path, p.reason) for p in report.left} == {("layers/1", "excluded by a rule")}
        assert {p.path for p in report.quantized} == {"layers/0", "layers/2"}
    np.testing.assert_array_equal(wrapped(x), afresh(x))
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(wrapped, x), afresh(x))
    assert np.abs(wrapped(x) - model(x)).max() > 1e-3
    by_none = qt.nnx.wrap(model, qt.Rules({"layers/0": Recipe()}))
    by_none.layers[2] = nnx.Linear(16, 4, rngs=rngs)
    reasons = {p.path: p.reason for p in qt.nnx.report(by_none, x).left}
    assert reasons == dict.fromkeys(("layers/1", "layers/2"), "excluded by a rule")


class Static(nnx.Module):
    """Its product stands in a static method, or in a class method that a class around it has."""

    def __init__(self):
        self.query = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    @staticmethod
    def scores(query, key):
        return query @ key.T

    def __call__(self, x):
        return self.scores(self.query(x), x)


class Class(Static):
    @classmethod
    def scores(cls, query, key):
        return query @ key.T


@pytest.mark.quick
@pytest.mark.parametrize("kind", [Static, Class])
def test_static_methods_and_class_methods(kind):
    """Oracle: the same product in a method of its own. It failed for want of an argument."""

    class Plain(Static):
        def scores(self, query, key):
            return query @ key.T

    for change in (qt.nnx.wrap, lambda model: qt.nnx.quantize(model, qt.recipes.te_current)):
        np.testing.assert_array_equal(change(kind())(x), change(Plain())(x))
    wrapped = qt.nnx.wrap(nnx.Sequential(kind()), strict=(x,))
    assert {p.path for p in qt.nnx.report(wrapped, x).quantized} == {"layers/0/query", "layers/0"}
    left = qt.nnx.wrap(kind(), qt.Rules({"query": Recipe()}), strict=(x,))
    assert {p.reason for p in qt.nnx.report(left, x).left} == {"excluded by a rule"}
    assert sum(p.count for p in qt.nnx.report(kind(), x).left) == 4  # by no input
    np.testing.assert_array_equal(wrapped.layers[0].scores(x, x), x @ x.T)  # there is no module


class Held:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


class Outside(nnx.Module):
    """Its product stands in an object that is called."""

    def __init__(self, function):
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.kernel = nnx.Param(jnp.eye(16))
        self.function = Held(function)

    def __call__(self, x):
        return self.function(self.linear(x), self.kernel[...])


@jax.custom_vjp
def own_derivative(x, kernel):
    return x @ kernel


def _value(x, kernel):
    return x @ kernel, (x, kernel)


own_derivative.defvjp(_value, lambda kept, dy: (dy @ kept[1].T, kept[0].T @ dy))


def on_a_mesh(x, kernel):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    specs = {"in_specs": (jax.P("d"), jax.P()), "out_specs": jax.P("d")}
    return jax.shard_map(lambda x, kernel: x @ kernel, mesh=mesh, **specs)(x, kernel)


class Calling(nnx.Module):
    """Calls a function in a method whose code names a product, so that it is rewritten."""

    def __init__(self, function):
        self.kernel = nnx.Param(jnp.eye(16))
        self.function = function

    def __call__(self, x):
        return self.function(x, self.kernel[...]) @ self.kernel[...]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "done", "left"), [(Outside, ["linear"] * 2, 3), (Calling, ["(model)"] * 3, 2)]
)
def test_a_product_in_a_function_that_is_run_as_it_is(kind, done, left):
    """Oracle: by hand, one product forward, one by the kernel, one by an input of parameters."""
    report = qt.nnx.report(qt.nnx.wrap(kind(own_derivative)), x)
    assert [p.path for p in report.quantized] == done
    (forward,) = (p for p in report.left if p.part == "forward")
    assert forward.path == "(model)"
    assert forward.reason.startswith("inside of custom_vjp: call qtoolkit.dot_general there")
    assert sum(p.count for p in report.left) == left
    assert all(p.where.startswith("test_coverage.py:") for p in report.left)


@pytest.mark.quick
def test_a_product_in_a_shard_map_is_quantized():
    """Oracle: the same products without a mesh, of one shard."""
    model = Calling(on_a_mesh)
    found = qt.nnx.report(qt.nnx.wrap(model), x)
    assert (sum(p.count for p in found.quantized), found.left) == (5, ())
    plain = Calling(lambda x, kernel: x @ kernel)
    np.testing.assert_array_equal(
        qt.nnx.wrap(model)(x), nnx.jit(lambda m: m(x))(qt.nnx.wrap(plain))
    )


@nnx.jit
def jitted_helper(model, x):
    model.calls[...] += 1
    return x @ model.kernel[...]


@functools.partial(jax.jit, static_argnums=2)
def jitted_product(x, kernel, repeat):
    return jnp.matvec(kernel.T, x) * repeat


class Helped(nnx.Module):
    def __init__(self, by_nnx):
        self.kernel, self.calls = nnx.Param(jnp.eye(16) * 0.3), nnx.Variable(jnp.zeros(()))
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.by_nnx = by_nnx

    def __call__(self, x):
        y = self.linear(x)
        if self.by_nnx:
            return jitted_helper(self, y)
        return jitted_product(y, self.kernel[...], 1)


@pytest.mark.quick
@pytest.mark.parametrize("by_nnx", [False, True])
def test_helpers_in_jit_are_reached(by_nnx):
    """Oracle: the same product by `qt.dot_general`. They were left, and no rule could say so."""
    wrapped = qt.nnx.wrap(Helped(by_nnx), strict=(x,))
    assert wrapped.calls[...] == 0
    expected = qt.dot_general(wrapped.linear(x), wrapped.kernel[...], (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(wrapped(x), expected, rtol=1e-5, atol=1e-6)
    assert wrapped.calls[...] == by_nnx
    left = qt.nnx.wrap(Helped(by_nnx), qt.Rules({"^$": None}, Recipe()), strict=(x,))
    assert {p.reason for p in qt.nnx.report(left, x).left} == {"excluded by a rule"}


def test_a_rule_leaves_products_of_objects_that_a_module_calls():
    """A rule of None for the module had no effect. Oracle of values: by hand."""
    model = Outside(nnx.jit(lambda x, kernel: x @ kernel))
    for rules in ({"^$": None, "linear": Recipe()}, {"linear": Recipe()}):
        default = Recipe() if "^$" in rules else None
        wrapped = qt.nnx.wrap(model, qt.Rules(rules, default), strict=(x,))
        report = qt.nnx.report(wrapped, x)
        assert {(p.path, p.reason) for p in report.left} == {("(model)", "excluded by a rule")}
        assert {p.path for p in report.quantized} == {"linear"}
        np.testing.assert_array_equal(wrapped(x), wrapped.linear(x) @ model.kernel[...])
    again = qt.nnx.wrap(wrapped, Recipe(), strict=(x,))
    assert isinstance(again, Outside)
    assert len(type(again).__mro__) == len(Outside.__mro__) + 1  # not a subclass of a subclass
    numbers = (((1,), (0,)), ((), ()))
    expected = qt.dot_general(again.linear(x), model.kernel[...], numbers, recipe=Recipe())
    np.testing.assert_allclose(again(x), expected, rtol=1e-6)


def rounded(array):
    """E4M3FN by one scale, by ml_dtypes."""
    scale = np.abs(array).max() / np.float32(448)
    return jnp.asarray((array / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale)


def imported(x, kernel):
    from jax.numpy import einsum as sum_of_products

    return sum_of_products("bi,io->bo", x, kernel)


precisely = functools.partial(jnp.matmul, precision="highest")
FUNCTIONS = {  # what the module calls, and the shapes of its operands
    "vecdot": (lambda x, kernel: jnp.vecdot(x, kernel), (6, 16), (6, 16)),
    "matvec": (lambda x, kernel: jnp.matvec(kernel, x), (6, 16), (8, 16)),
    "vecmat": (lambda x, kernel: jnp.vecmat(x, kernel), (6, 16), (16, 8)),
    "multi_dot": (lambda x, kernel: jnp.linalg.multi_dot([x, kernel]), (6, 16), (16, 8)),
    "correlate": (lambda x, kernel: jnp.correlate(x, kernel), (16,), (3,)),
    "convolve": (lambda x, kernel: jnp.convolve(x, kernel), (16,), (3,)),
    "alias": (lambda x, kernel: multiply(x, kernel), (6, 16), (16, 8)),
    "import inside": (imported, (6, 16), (16, 8)),
    "operator": (lambda x, kernel: operator.matmul(x, kernel), (6, 16), (16, 8)),
    "partial": (lambda x, kernel: precisely(x, kernel), (6, 16), (16, 8)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_the_function_is_called(name):
    """Oracle: the function itself, of operands that ml_dtypes has rounded."""
    product, *shapes = FUNCTIONS[name]
    rng = np.random.default_rng(6)
    inputs, kernel = (np.float32(rng.normal(size=shape)) for shape in shapes)

    class Only(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.asarray(kernel))

        def __call__(self, x):
            return product(x, self.kernel[...])

    wrapped = qt.nnx.wrap(Only(), qt.recipes.te_current, strict=(inputs,))
    expected = product(rounded(inputs), rounded(kernel))
    np.testing.assert_allclose(wrapped(inputs), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(wrapped(inputs) - Only()(inputs)).max() > 1e-3


def test_what_is_left_is_in_the_report_with_its_line():
    """The matmul of a loss: no module runs it."""

    def loss(model):
        return jnp.sum(model(x) @ jnp.ones((16, 16)))

    report = qt.nnx.report(loss, qt.nnx.wrap(Outside(lambda x, kernel: x @ kernel)))
    assert [p.path for p in report.quantized] == ["linear"] * 2 + ["(model)"] * 3
    forward, backward = report.left
    assert (forward.part, backward.part) == ("forward", "backward")
    for product in report.left:
        assert (product.path, product.count) == ("", 1)
        assert product.reason == "computed by itself, in no wrapped layer"
        assert product.where.startswith("test_coverage.py:")
    text = str(report)
    assert "5 of 7 matmuls quantized" in text
    assert "test_coverage.py:" in text
    with refused(ValueError, r"2 matmuls of Outside are not quantized, and no rule excludes them"):
        qt.nnx.wrap(Outside(lambda x, kernel: x @ kernel), strict=loss)
    wrapped = qt.nnx.wrap(Outside(lambda x, kernel: x), strict=(x,))
    assert qt.nnx.report(wrapped, x).left == ()


LIBRARY = {
    "solve": Held(lambda x, kernel: jnp.linalg.solve(kernel, x.T)),
    "matvec": Held(lambda x, kernel: jnp.matvec(kernel, x)),
    "correlate": Held(lambda x, kernel: jnp.correlate(x[0], kernel[0])),
    "inverse": Held(lambda x, kernel: jnp.linalg.inv(kernel)),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_what_a_library_computes_has_the_line_that_calls_it(name):
    """JAX cuts the tracebacks of these functions before they reach the user's line."""
    rules = qt.Rules({"linear": Recipe()})
    left = qt.nnx.report(qt.nnx.wrap(Outside(LIBRARY[name].function), rules), x).left
    line = LIBRARY[name].function.__code__.co_firstlineno
    assert {p.part for p in left} == {"forward", "backward"}
    assert {p.where for p in left} == {f"test_coverage.py:{line}"}


def test_what_a_library_computes_in_a_module_has_a_line():
    """Once inlined, nothing keeps the user's line of `inv`: its own is given."""

    class Inverse(nnx.Module):
        def __call__(self, x):
            return x @ jnp.linalg.inv(x.T @ x + jnp.eye(16))

    report = qt.nnx.report(qt.nnx.wrap(Inverse()), x)
    assert report.left
    assert all(p.where for p in report.left)

    class Normed(nnx.Module):
        def __init__(self):
            linear = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
            self.norm = nnx.SpectralNorm(linear, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x, update_stats=True)

    report = qt.nnx.report(qt.nnx.wrap(Normed()), x)
    assert report.left
    assert all(p.where.startswith("test_coverage.py:") for p in report.left)


class Complex(nnx.Module):
    def __init__(self):
        self.kernel, self.linear = nnx.Param(jnp.eye(16)), nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x) @ (self.kernel[...] * 1j)


def test_complex_products_are_left_for_a_reason_of_their_own():
    """They passed as integers, which no rule need leave."""
    report = qt.nnx.report(qt.nnx.wrap(Complex()), x)
    assert all("complex64" in p.operands for p in report.left)
    assert all(p.reason.startswith("complex numbers are not rounded") for p in report.left)
    assert {p.part for p in report.left} == {"forward", "backward"}
    with refused(ValueError, r"3 matmuls of Complex are not quantized, and no rule excludes them"):
        qt.nnx.wrap(Complex(), strict=(x,))
    left = qt.nnx.wrap(Complex(), qt.Rules({"^$": None}, Recipe()), strict=(x,))
    assert {p.reason for p in qt.nnx.report(left, x).left} == {"excluded by a rule"}


class Keywords(nnx.Module):
    def __init__(self, left):
        self.linear, self.left = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), left

    def __call__(self, *, batch, flag):
        y = self.linear(batch["x"])
        return own_derivative(y, batch["x"].T) if self.left and flag else y


def test_strict_by_keywords():
    """A mapping names the inputs; one that is itself an input stands in a tuple."""
    inputs = {"batch": {"x": x}, "flag": True}
    qt.nnx.wrap(Keywords(False), strict=inputs)
    qt.nnx.wrap(Keywords(True), strict={**inputs, "flag": False})
    with refused(ValueError, r"2 matmuls of Keywords are not quantized, and no rule excludes them"):
        qt.nnx.wrap(Keywords(True), strict=inputs)

    class Batch(nnx.Linear):
        def __call__(self, batch):
            return super().__call__(batch["x"])

    qt.nnx.wrap(Batch(16, 16, rngs=nnx.Rngs(0)), strict=({"x": x},))
    qt.nnx.wrap(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), strict=x)


def test_strict_refuses_what_quantizes_nothing():
    class Unused(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return x

    with refused(ValueError, "no matmul of Unused is quantized with these inputs"):
        qt.nnx.wrap(Unused(), strict=(x,))
    assert qt.nnx.report(qt.nnx.wrap(Unused()), x).unreached == ("linear",)


def test_the_report_of_a_plain_model_has_everything_left():
    report = qt.nnx.report(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), x)
    assert report.quantized == ()
    assert sum(p.count for p in report.left) == 2  # forward, by the kernel
    refused(TypeError, r"report: model has type dict", qt.nnx.report, {}, x)


LOGITS = 64


class Language(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(LOGITS, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x, is_causal=True)
        x = x + self.down(nnx.gelu(self.up(x)))
        return self.embed.attend(x)


def moved(recipe, calibrate=False):
    """By how much the last token moves earlier logits, and another example those of the first."""
    model = qt.nnx.wrap(Language(nnx.Rngs(0)), recipe)
    batch = jax.random.randint(jax.random.key(3), (2, 12), 0, LOGITS)
    if calibrate:
        qt.nnx.value_and_grad(lambda m, t: jnp.mean(m(t) ** 2))(model, batch)
    run = nnx.jit(lambda m, t: m(t))
    # Exactly equal inputs to sums that a compiler may order otherwise for other shapes: the same
    # shape each time.
    ends = jnp.stack([batch.at[:, -1].set(token) for token in range(0, LOGITS, 8)])
    outs = [np.asarray(run(model, tokens))[:, :-1] for tokens in ends]
    others = [run(model, batch.at[1].set(i))[0] for i in (3, 40)]
    return max(np.abs(out - outs[0]).max() for out in outs), np.abs(others[0] - others[1]).max()


@pytest.mark.sample("te_current")
@pytest.mark.parametrize("name", ["te_current", "token_scaled", "te_delayed_hybrid", "plain"])
def test_which_scales_are_causal(name):
    recipe = Recipe(None, None) if name == "plain" else getattr(qt.recipes, name)
    earlier, other = moved(recipe, calibrate=name == "te_delayed_hybrid")
    if name == "te_current":
        assert earlier > 0.01
        assert other > 0.01
    else:
        assert earlier == other == 0


def test_messages():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    refused(TypeError, r"write qtoolkit.Recipe\('mxfp4'\)", qt.nnx.wrap, linear, qt.spec("mxfp4"))
    with refused(ValueError, r"wrap: rule Conv matches nothing"):
        qt.nnx.wrap(linear, qt.Rules({nnx.Conv: Recipe()}, Recipe()))
    with refused(ValueError, r"rule LayerNorm matches layers/1, and LayerNorm has no"):
        qt.nnx.wrap(
            nnx.Sequential(linear, nnx.LayerNorm(4, rngs=nnx.Rngs(0))),
            qt.Rules({nnx.LayerNorm: Recipe()}, Recipe()),
        )
    narrow = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    narrow.kernel = nnx.Param(linear.kernel[...].astype(jnp.float8_e4m3fn))
    with refused(TypeError, r"Linear.kernel has dtype float8_e4m3fn"):
        qt.nnx.wrap(nnx.Sequential(narrow))
    stored = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    stored.kernel = nnx.Param(qt.quantize(linear.kernel[...], "e4m3fn"))
    refused(TypeError, r"Linear.kernel is a QArray", qt.nnx.wrap, stored)


@pytest.mark.exhaustive
def test_a_model_that_is_closed_over():
    """By JAX's own transformations: a method that changes nothing writes nothing."""
    for make in (lambda: made("attention"), lambda: made("LoRA"), lambda: made("own product")):
        model = qt.nnx.wrap(make())
        batch = sequence if isinstance(model, nnx.MultiHeadAttention) else x
        expected = model(batch)
        np.testing.assert_allclose(jax.jit(lambda v, m=model: m(v))(batch), expected, atol=1e-5)
        grads = jax.grad(lambda v, m=model: jnp.sum(m(v)))(batch)
        assert np.isfinite(grads).all()
        assert jax.vmap(model)(batch[None]).shape == (1, *expected.shape)
        np.testing.assert_array_equal(model(batch), expected)


@pytest.mark.exhaustive
def test_what_an_own_attention_function_closes_over_is_that_of_the_first_call():
    """Oracle: `nnx.jit` of the plain model."""
    temperature = nnx.Variable(jnp.ones(()))

    def attend(query, *args, **options):
        return nnx.dot_product_attention(query * temperature[...], *args, **options)

    plain = nnx.MultiHeadAttention(4, 16, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
    for call in (qt.nnx.wrap(plain), functools.partial(nnx.jit(lambda m, x: m(x)), plain)):
        temperature[...] = jnp.ones(())
        before = call(sequence)
        temperature[...] = jnp.full((), 5.0)
        np.testing.assert_array_equal(call(sequence), before)


def test_what_counts_as_a_kernel():
    """A scaled kernel is one; a rounding of the user's own is kept, half precision is not."""
    recipe = Recipe((None, "e4m3fn"), gradient=None)
    kernel = jnp.float32(np.random.default_rng(5).normal(size=(16, 16)))
    numbers = (((1,), (0,)), ((), ()))

    class Scaled(nnx.Module):
        def __init__(self, change):
            self.kernel = nnx.Param(kernel)
            self.change = change

        def __call__(self, x):
            return x @ self.change(self.kernel[...])

    def rounded(weights, inputs=x):
        return qt.dot_general(inputs, weights, numbers, recipe=recipe)

    for change in (lambda w: 0.5 * w, lambda w: w * 0.5, lambda w: w / jnp.linalg.norm(w)):
        got = qt.nnx.wrap(Scaled(change), recipe)(x)
        np.testing.assert_allclose(got, rounded(change(kernel)), rtol=1e-5, atol=1e-5)
    narrow = lambda w: w.astype(jnp.float8_e5m2).astype(jnp.float32)  # noqa: E731
    got = qt.nnx.wrap(Scaled(narrow), recipe)(x)
    np.testing.assert_allclose(got, rounded(narrow(kernel)), rtol=1e-5, atol=1e-5)
    half = x.astype(jnp.bfloat16)
    got = qt.nnx.wrap(Scaled(lambda w: w.astype(jnp.bfloat16).T), recipe)(half)
    np.testing.assert_array_equal(got, rounded(kernel.T, half))


def test_what_a_recipe_leaves_wide_is_left_in_the_report():
    report = qt.nnx.report(qt.nnx.wrap(made("attention"), qt.recipes.w4a16), sequence)
    assert {p.reason for p in report.left} == {"unquantized by the recipe"}
    assert sum(p.count for p in report.quantized) == 5  # forward, and one by an input of parameters
    assert report.unexplained == ()
    qt.nnx.wrap(made("attention"), qt.recipes.w4a16, strict=(sequence,))


def test_weight_only_recipes_round_kernels_on_either_side():
    """And neither of two activations. Oracle: by hand."""

    class Products(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.float32(np.random.default_rng(1).normal(size=(16, 16))))

        def __call__(self, x):
            return self.kernel @ x.T, x @ x.T, x @ self.kernel

    model, numbers = Products(), (((1,), (0,)), ((), ()))
    for recipe in (qt.recipes.weight_only_e4m3, qt.recipes.w4a16):
        left, neither, right = qt.nnx.wrap(model, recipe)(x)
        by_hand = functools.partial(qt.dot_general, x, dimension_numbers=numbers, recipe=recipe)
        kernel = model.kernel[...]
        np.testing.assert_allclose(left, by_hand(kernel.T).T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(right, by_hand(kernel), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(neither, x @ x.T)
        assert jnp.any(left != model(x)[0])


def test_decorated_methods_are_seen():
    class Jitted(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.eye(16))

        @nnx.jit
        def __call__(self, x):
            return x @ self.kernel[...]

    assert forward_products(qt.nnx.wrap(Jitted()), (x,)) == (1, 0)


def test_paths_are_reported_letter_for_letter():
    """Names may hold what paths and name stacks are written with."""

    class Named(nnx.Module):
        def __init__(self):
            for name in ("a.b", "a%2Eb", "c(d)|e"):
                setattr(self, name, nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
            self.blocks = nnx.Dict({"x.y": nnx.Linear(16, 16, rngs=nnx.Rngs(0))})

        def __call__(self, x):
            for name in ("a.b", "a%2Eb", "c(d)|e"):
                x = getattr(self, name)(x)
            return self.blocks["x.y"](x)

    report = qt.nnx.report(qt.nnx.wrap(Named()), x)
    paths = {product.path for product in report.quantized}
    assert paths == {"a.b", "a%2Eb", "c(d)|e", "blocks/x.y"}
    assert report.unreached == ()


def test_a_model_in_a_folder_named_as_a_library_is_the_users():
    source = "def call(x, kernel):\n    return x @ kernel\n"
    names = {}
    exec(compile(source, "/home/somebody/flax/model.py", "exec"), names)

    class Hiding(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return HIDDEN["call"](self.linear(x), jnp.ones((16, 16)))

    HIDDEN.update(names)
    wrapped = qt.nnx.wrap(Hiding(), qt.Rules({"linear": Recipe()}))
    (forward,) = (p for p in qt.nnx.report(wrapped, x).left if p.part == "forward")
    assert forward.where == "model.py:2"
    assert forward.reason == "excluded by a rule"


HIDDEN = {}  # a function that no code of the module names


def test_constants_that_a_method_sets_are_set():
    """In modules of one's own, whose methods run on copies; as in the plain model."""

    class Counting(nnx.Module):
        def __init__(self, inner=None):
            self.calls = 0
            self.kernel = nnx.Param(jnp.eye(4))
            self.inner = nnx.List([] if inner is None else [inner])

        def __call__(self, x):
            self.calls += 1
            self.last = f"call {self.calls}"
            self.seen = (x.shape, x.dtype, frozenset({self.calls}))
            for layer in self.inner:
                x = layer(x)
            return x @ self.kernel

    x = jnp.ones((2, 4))
    for run in (lambda model, x: model(x), nnx.jit(lambda model, x: model(x))):
        models = [Counting(Counting()), qt.nnx.wrap(Counting(Counting()))]
        for model in models:
            for _ in range(3):
                run(model, x)
        said = [[(m.calls, m.last, m.seen) for m in (model, *model.inner)] for model in models]
        assert said[0] == said[1] == [(3, "call 3", ((2, 4), jnp.float32, frozenset({3})))] * 2


@pytest.mark.quick
def test_a_linen_module_where_one_of_nnx_is_due():
    from flax import linen

    for function in (qt.nnx.report, qt.nnx.numerics, qt.nnx.sensitivity):
        with refused(TypeError, rf"use qtoolkit.linen.{function.__name__}"):
            function(linen.Dense(4), jnp.ones((2, 4)), lambda m, x: m(x))
    with refused(TypeError, r"report: variables has type ArrayImpl"):
        qt.linen.report(linen.Dense(4), jnp.ones((2, 4)))
