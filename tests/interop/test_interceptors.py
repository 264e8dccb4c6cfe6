"""Models in which others intercept JAX's products: adapters and quantizers of qwix, a user's own.

Oracles: the same model before `wrap`, and the adapter's formula written out.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import linen as nn
from flax import nnx
from state_of import history_of

import qtoolkit as qt

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix", "ignore:The 'm.iter_")

CONTRACT = (((2,), (0,)), ((), ()))
WIDE = qt.Recipe(None, gradient=None)
# bfloat16 rounds by 2**-9; layers and a softmax multiply that.
RECIPES = [(WIDE, 1e-4), (qt.Recipe("bfloat16", gradient="bfloat16"), 0.05)]
ADAPTERS = nnx.DiffState(0, nnx.LoRAParam)


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.einsum = nnx.Einsum("btd,df->btf", (16, 16), rngs=rngs)
        self.own = nnx.Param(0.2 * jax.random.normal(rngs.params(), (16, 16)))
        self.conv = nnx.Conv(16, 16, (3,), rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)  # as wide as the rank: kernel and A look alike

    def __call__(self, x):
        h = self.einsum(nnx.relu(self.first(x)))
        h = jax.lax.dot_general(h + self.attention(h), self.own[...], CONTRACT)
        return self.last(self.conv(h))


class Module(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(16)(x))
        h = h + nn.MultiHeadDotProductAttention(2)(h)
        own = self.param("own", nn.initializers.normal(0.2), (16, 16))
        return nn.Dense(4)(jax.lax.dot_general(h, own, CONTRACT))


def data():
    return jax.random.normal(jax.random.key(1), (2, 8, 16))


def adapted(model, **options):
    provider = qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0, **options)
    model = qwix.apply_lora_to_model(model, provider, data(), rngs=nnx.Rngs(3, dropout=4))
    for path, value in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if str(path[-1]).endswith("lora_b"):  # they start as zeros
            value[...] = 0.1 * jax.random.normal(jax.random.key(5), value.shape)
    return model


def loss(model, x):
    return jnp.mean(model(x) ** 2)


def error(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("recipe", "bound"), RECIPES)
def test_qwix_adapters_train_as_before_wrap(recipe, bound):
    model, x = adapted(Model()), data()
    wrapped = qt.nnx.wrap(model, recipe)
    differentiate = nnx.jit(nnx.value_and_grad(lambda model, x: loss(model, x), argnums=ADAPTERS))
    expected, got = (leaves(differentiate(one, x)) for one in (model, wrapped))
    assert len(expected) == 19  # the loss, and A and B of nine kernels
    for one, plain in zip(got, expected, strict=True):
        assert error(one, plain) < bound
    assert error(wrapped(x), model(x)) < bound  # eager


def test_an_adapter_is_the_formula_written_out():
    layer, x = adapted(nnx.Linear(16, 8, rngs=nnx.Rngs(0))), data()
    a, b, kernel = layer.kernel_lora_a[...], layer.kernel_lora_b[...], layer.kernel[...]

    def product(x, w):
        return qt.dot_general(x, w, CONTRACT, recipe=qt.recipes.te_current)

    expected = product(x, kernel) + product(product(x, a), b) * 2 + layer.bias[...]
    wrapped = qt.nnx.wrap(layer, qt.recipes.te_current)
    np.testing.assert_allclose(wrapped(x), expected, rtol=1e-6, atol=1e-6)


def test_delayed_scales_of_adapters_have_histories():
    wrapped, x = qt.nnx.wrap(adapted(Model()), qt.recipes.te_delayed_hybrid), data()
    _, grads = nnx.jit(qt.nnx.value_and_grad(loss, wrt=nnx.LoRAParam))(wrapped, x)
    assert all(np.any(grad) for grad in leaves(grads))
    for layer in (wrapped.first, wrapped.einsum):
        assert np.all(history_of(layer)[:, 0] > 0)
    history = history_of(wrapped.first)[0, 0]
    assert abs(history / jnp.max(jnp.abs(x)) - 1) < 0.125  # histories know that much
    found = qt.nnx.report(wrapped, x)
    # Nine kernels with two matmuls of an adapter each, and two products of attention.
    assert sum(p.count for p in found.quantized) == 3 * (3 * 9 + 2) - 2  # no dgrad by x
    assert not found.left
    assert not found.unreached


def test_dropout_of_an_adapter_works():
    plain, model, x = adapted(Model(), dropout=0.5), adapted(Model(), dropout=0.5), data()
    wrapped = qt.nnx.wrap(model, WIDE)
    for one in (plain, wrapped):
        one.set_attributes(qwix_rngs=nnx.Rngs(dropout=1))
    for _ in range(2):  # the stream of keys goes on
        np.testing.assert_allclose(wrapped(x), plain(x), rtol=1e-4, atol=1e-4)


def test_an_adapter_after_wrap():
    """Oracle: the adapter before wrap.."""
    after, before, x = (
        adapted(qt.nnx.wrap(Model(), WIDE)),
        qt.nnx.wrap(adapted(Model()), WIDE),
        data(),
    )
    np.testing.assert_allclose(after(x), before(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("recipe", "bound"), RECIPES)
def test_qwix_adapters_of_linen_train_as_before_wrap(recipe, bound):
    x = data()
    module = qwix.apply_lora_to_model(
        Module(), qwix.LoraProvider(module_path=".*", rank=4, alpha=8.0)
    )
    variables = module.init(jax.random.key(0), x)
    params = jax.tree_util.tree_map_with_path(
        lambda path, w: (
            0.1 * jax.random.normal(jax.random.key(5), w.shape) if "lora_b" in str(path) else w
        ),
        variables["params"],
    )

    def differentiated(module):
        def loss(params):
            return jnp.mean(module.apply({"params": params}, x) ** 2)

        return jax.jit(jax.grad(loss))(params)

    wrapped = qt.linen.wrap(module, recipe)
    pairs = jax.tree.map(error, differentiated(wrapped), differentiated(module))
    of_adapters = [
        value for path, value in jax.tree_util.tree_leaves_with_path(pairs) if "lora" in str(path)
    ]
    assert len(of_adapters) == 14
    assert max(of_adapters) < bound

    delayed = qt.linen.wrap(module, qt.recipes.te_delayed_hybrid)
    found = qt.linen.report(delayed, delayed.init(jax.random.key(0), x), x)
    assert sum(p.count for p in found.quantized) == 3 * (3 * 7 + 2) - 2  # no dgrad by x
    assert not found.left


def test_what_qwix_quantizes_stays_so_and_leaves_no_trace():
    x, model = data(), Model()
    rule = qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)
    quantized = qwix.quantize_model(model, qwix.QtProvider([rule]), x)
    wrapped = qt.nnx.wrap(quantized, qt.recipes.te_current)
    np.testing.assert_array_equal(wrapped(x), quantized(x))
    found = qt.nnx.report(wrapped, x)
    assert not found.quantized
    assert any(p.operands.startswith("int8") for p in found.left)
    # The attention function of Flax is jitted, once for all models: not with what qwix made of it.
    np.testing.assert_allclose(qt.nnx.wrap(model, WIDE)(x), model(x), rtol=1e-5, atol=1e-6)


def test_weights_that_qwix_stores_are_refused_by_name():
    rule = qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8)
    model = nnx.Sequential(nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
    stored = qwix.quantize_model(model, qwix.PtqProvider([rule]), data())
    with pytest.raises(TypeError, match=r"layers/0: Linear.kernel has type WithAux, expected an"):
        qt.nnx.wrap(stored)


def test_a_function_put_in_place_of_jaxs_is_called(monkeypatch):
    layer, x = nnx.LinearGeneral(16, 8, rngs=nnx.Rngs(0)), data()
    original = jax.lax.dot_general
    delta = 0.1 * jax.random.normal(jax.random.key(7), (16, 8))

    def adapting(lhs, rhs, *args, **kwargs):
        return original(lhs, rhs, *args, **kwargs) + original(lhs, delta, *args, **kwargs)

    wrapped = qt.nnx.wrap(layer, WIDE)
    plain = layer(x)
    # Before the first call: an eager call is compiled and cached, as under `nnx.jit`.
    monkeypatch.setattr(jax.lax, "dot_general", adapting)
    assert np.any(layer(x) != plain)
    np.testing.assert_allclose(wrapped(x), layer(x), rtol=1e-6, atol=1e-6)
    assert len(qt.nnx.report(wrapped, x).left) == 2  # unquantized: forward, wgrad


PRODUCTS = {
    "dot_general": lambda x: qt.dot_general(x[0], x[1].T, (((1,), (0,)), ((), ()))),
    "einsum": lambda x: qt.einsum("bij,bkj->bik", x, x),
    "conv_general_dilated": lambda x: qt.products.conv_general_dilated(x, x, (1,), "SAME"),
    "ragged_dot": lambda x: qt.products.ragged_dot(x[0], x.transpose(0, 2, 1), jnp.asarray([3, 5])),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_not_intercepted_inside(monkeypatch, name):
    """Code is replaced, as qwix does: the product inside ours must not run it.

    Nor must its derivatives, which a model takes that returns forces. (JAX calls
    `conv_general_dilated` for those of a convolution, and `dot_general` for `ragged_dot` on CPUs.)
    """

    def refusing(*args, **kwargs):
        raise AssertionError("intercepted")

    def call(x):
        if name == "conv_general_dilated":
            return PRODUCTS[name](x)
        return jax.value_and_grad(lambda x: jnp.sum(PRODUCTS[name](x) ** 2))(x)

    x = data()
    replaced = [jax.lax.ragged_dot, jax.lax.ragged_dot_general]
    if name != "ragged_dot":
        replaced += [jnp.einsum, jax.lax.dot_general, jax.lax.conv_general_dilated]
    jax.clear_caches()
    for function in replaced:
        monkeypatch.setattr(function, "__code__", refusing.__code__)
        with pytest.raises(AssertionError, match="intercepted"):
            function(x, x)
    got = call(x)
    monkeypatch.undo()
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, got, call(x))


def test_an_import_while_code_is_replaced_says_so():
    program = """
import jax
def other(*args, **kwargs): pass
jax.lax.dot_general.__code__ = other.__code__
import qtoolkit.products
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: qtoolkit.products: imported while dot_general of JAX runs" in result.stderr
