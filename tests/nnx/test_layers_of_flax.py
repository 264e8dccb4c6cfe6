"""Each layer of Flax that computes matmuls is quantized.

Oracle: the layer's formula in NumPy, its operands rounded by ml_dtypes.
"""

import re

import jax
import jax.numpy as jnp
import layer_formulas
import numpy as np
import pytest
from flax import nnx
from layer_formulas import q

import qtoolkit as qt

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)


def taps(layer, x):
    return layer_formulas.taps(layer.kernel[...], x)


def attention(layer, x):
    parts = (layer.query, layer.key, layer.value, layer.out)
    return layer_formulas.attention(*(part.kernel[...] for part in parts), x)


RNGS = {"use_bias": False, "rngs": nnx.Rngs(0)}
LAYERS = {  # what makes the layer, what calls it, its formula
    nnx.Linear: (
        lambda: nnx.Linear(8, 6, **RNGS),
        lambda layer, x: layer(x),
        lambda layer, x: q(x) @ q(layer.kernel[...]),
    ),
    nnx.LinearGeneral: (
        lambda: nnx.LinearGeneral(8, (3, 2), **RNGS),
        lambda layer, x: layer(x),
        lambda layer, x: np.einsum("btd,dij->btij", q(x), q(layer.kernel[...])),
    ),
    nnx.Einsum: (
        lambda: nnx.Einsum("btd,df->btf", (8, 6), rngs=nnx.Rngs(0)),
        lambda layer, x: layer(x),
        lambda layer, x: q(x) @ q(layer.kernel[...]),
    ),
    nnx.Conv: (
        lambda: nnx.Conv(8, 6, (3,), padding="VALID", **RNGS),
        lambda layer, x: layer(x),
        taps,
    ),
    nnx.MultiHeadAttention: (
        lambda: nnx.MultiHeadAttention(2, 8, decode=False, **RNGS),
        lambda layer, x: layer(x),
        attention,
    ),
    nnx.Embed: (
        lambda: nnx.Embed(7, 8, rngs=nnx.Rngs(0)),
        lambda layer, x: layer.attend(x),
        lambda layer, x: q(x) @ q(layer.embedding[...]).T,
    ),
    nnx.ConvTranspose: (
        lambda: nnx.ConvTranspose(8, 6, (1,), **RNGS),
        lambda layer, x: layer(x),
        lambda layer, x: q(x) @ q(layer.kernel[...])[0],
    ),
    nnx.LoRA: (
        lambda: nnx.LoRA(8, 3, 6, rngs=nnx.Rngs(0)),
        lambda layer, x: layer(x),
        lambda layer, x: q(q(x) @ q(layer.lora_a[...])) @ q(layer.lora_b[...]),
    ),
}


def test_every_layer_that_wrap_knows_is_here():
    with pytest.raises(ValueError, match="no layer to quantize") as error:
        qt.nnx.wrap(nnx.LayerNorm(4, rngs=nnx.Rngs(0)), qt.recipes.mxfp8)
    assert {kind.__name__ for kind in LAYERS} == {*re.findall(r"nnx\.(\w+)", str(error.value))}


@pytest.mark.quick
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_layer_is_quantized(kind):
    make, call, formula = LAYERS[kind]
    layer = make()
    if kind is nnx.LoRA:  # starts as zeros
        layer.lora_b[...] = jnp.float32(np.random.default_rng(1).normal(size=(3, 6)))
    rules = qt.Rules({"query|key|value|out": None}, qt.recipes.te_current)
    recipe = rules if kind is nnx.MultiHeadAttention else qt.recipes.te_current
    expected = formula(layer, X)
    tolerance = 1e-5 * np.abs(expected).max() * len(X[0, 0])
    got, plain = (
        np.asarray(call(one, jnp.asarray(X)), np.float64)
        for one in (qt.nnx.wrap(layer, recipe), layer)
    )
    assert np.abs(got - expected).max() < tolerance < np.abs(plain - expected).max()


def test_a_subclass_may_pass_all_arguments_of_the_function_of_jax():
    """A dtype by position was taken for a sharding."""

    class Positional(nnx.Conv):
        def __call__(self, x):
            numbers = jax.lax.conv_dimension_numbers(
                x.shape, self.kernel.shape, ("NHC", "HIO", "NHC")
            )
            options = ((1,), "SAME", None, None, numbers, 1, 1, None, jnp.float32)
            return self.conv_general_dilated(x, self.kernel[...], *options)

    layer, x = Positional(4, 4, (3,), use_bias=False, rngs=nnx.Rngs(0)), jnp.ones((1, 8, 4))
    wrapped = qt.nnx.wrap(layer, qt.recipes.mxfp8)
    plain = nnx.Conv(4, 4, (3,), use_bias=False, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(wrapped(x), qt.nnx.wrap(plain, qt.recipes.mxfp8)(x))
