"""Each layer of Flax that computes matmuls is quantized by linen.wrap.

Oracle: the layer's formula in NumPy, its operands rounded by ml_dtypes.
"""

import jax
import layer_formulas
import numpy as np
import pytest
from flax import linen as nn
from layer_formulas import q

import qtoolkit as qt

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
CARRY = tuple(np.random.default_rng(1).normal(size=(2, 2, 5, 6)).astype(np.float32))


def dense(params, x):
    return q(x) @ q(params["kernel"])


def taps(params, x):
    return layer_formulas.taps(params["kernel"], x)


def attention(params, x):
    kernels = (params[name]["kernel"] for name in ("query", "key", "value", "out"))
    return layer_formulas.attention(*kernels, x)


def lstm(params, x):
    """Its cell has two products: of the inputs, and of the state, with the kernels of all gates."""

    def sums(kind, x):
        kernels = np.concatenate([params[kind + gate]["kernel"] for gate in "ifgo"], axis=-1)
        return q(x) @ q(kernels)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    cell, hidden = CARRY
    biases = np.concatenate([params["h" + gate]["bias"] for gate in "ifgo"])
    gates = sums("i", x) + sums("h", hidden) + biases
    i, f, g, o = np.split(gates, 4, axis=-1)
    cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(cell)


BARE = {"use_bias": False}
LAYERS = {  # the layer, the method and its arguments, its formula
    nn.Dense: (nn.Dense(6, **BARE), "__call__", (X,), dense),
    nn.DenseGeneral: (nn.DenseGeneral(6, **BARE), "__call__", (X,), dense),
    nn.Einsum: (nn.Einsum((8, 6), "btd,df->btf", **BARE), "__call__", (X,), dense),
    nn.Conv: (nn.Conv(6, (3,), padding="VALID", **BARE), "__call__", (X,), taps),
    nn.ConvTranspose: (nn.ConvTranspose(6, (1,), **BARE), "__call__", (X,), taps),
    nn.Embed: (nn.Embed(7, 8), "attend", (X,), lambda p, x: q(x) @ q(p["embedding"]).T),
    nn.MultiHeadDotProductAttention: (
        nn.MultiHeadDotProductAttention(2, **BARE),
        "__call__",
        (X,),
        attention,
    ),
    nn.OptimizedLSTMCell: (nn.OptimizedLSTMCell(6), "__call__", (CARRY, X), lstm),
}


def is_green(kind):
    layer, method, arguments, formula = LAYERS[kind]
    variables = layer.init(jax.random.key(0), *arguments, method=method)
    rules = qt.Rules({"query|key|value|out": None}, qt.recipes.te_current)
    recipe = rules if kind is nn.MultiHeadDotProductAttention else qt.recipes.te_current
    wrapped = qt.linen.wrap(layer, recipe)
    got = wrapped.apply(variables, *arguments, method=method)
    got = got[1] if kind is nn.OptimizedLSTMCell else got
    params = jax.tree.map(np.asarray, variables["params"])
    expected = formula(params, X)
    return np.abs(np.asarray(got, np.float64) - expected).max() < 1e-5 * np.abs(expected).max() * 8


@pytest.mark.quick
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_layer_is_quantized(kind):
    assert is_green(kind)
