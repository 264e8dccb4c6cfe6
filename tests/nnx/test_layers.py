"""Layers that are quantized from the start. Oracle: the wrapped layer, and `fake_convert`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refused import refused

import qtoolkit as qt
from qtoolkit.nnx import FakeConvert, Fp8Conv, Fp8Einsum, Fp8Linear

LAYERS = {
    "linear": (Fp8Linear, nnx.Linear, (16, 8)),
    "conv": (Fp8Conv, nnx.Conv, (16, 8, (3,))),
    "einsum": (Fp8Einsum, nnx.Einsum, ("bti,io->bto", (16, 8))),
}


@pytest.fixture
def x():
    return jnp.float32(np.random.default_rng(0).normal(size=(2, 5, 16)))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.sample("linear")
@pytest.mark.parametrize("name", LAYERS)
def test_they_are_the_wrapped_layers(name, x):
    ours, plain, args = LAYERS[name]
    layer = ours(*args, rngs=nnx.Rngs(0))
    original = plain(*args, rngs=nnx.Rngs(0))
    wrapped = qt.nnx.wrap(original)
    np.testing.assert_array_equal(layer(x), wrapped(x))
    assert nnx.state(layer, nnx.Param).keys() == nnx.state(original, nnx.Param).keys()
    assert qt.nnx.report(layer, x).left == ()
    delayed = ours(*args, recipe=qt.recipes.te_delayed_hybrid, rngs=nnx.Rngs(0))
    qt.nnx.value_and_grad(loss)(delayed, x)
    assert max(leaf.max() for leaf in jax.tree.leaves(nnx.state(delayed, qt.nnx.ScalingState))) > 0


def test_fake_convert_trains_its_scale(x):
    layer = FakeConvert("e4m3fn", 1.5, 0.25, rounding="toward_zero")
    np.testing.assert_array_equal(
        layer(x), qt.fake_convert(x, 1.5, 0.25, fmt="e4m3fn", rounding="toward_zero")
    )
    layer = FakeConvert("e4m3fn", scale=jnp.full((16,), 100.0))
    optimizer = nnx.Optimizer(layer, optax.sgd(1.0), wrt=nnx.Param)

    def distance(layer, x):
        return jnp.sum((layer(10 * x) - 10 * x) ** 2)  # 1000 saturates at 448

    before = distance(layer, x)
    for _ in range(5):
        optimizer.update(layer, nnx.grad(distance)(layer, x))
    assert distance(layer, x) < before
    assert layer.shift is None
    assert layer(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    refused(ValueError, "fp9", FakeConvert, "fp9")


def test_fake_convert_draws_other_bits_in_each_call():
    x = jnp.full((512,), 1.0625)  # halfway between 1 and 1.125
    layer = FakeConvert("e4m3fn", rounding="stochastic", rngs=nnx.Rngs(0))
    call = nnx.jit(lambda layer, x: layer(x))
    first, second = call(layer, x), call(layer, x)
    assert set(np.unique(first)) == {1, 1.125}
    assert 0.3 < np.mean(first != second) < 0.7
    grads = nnx.grad(lambda layer: layer(x).sum())(layer)
    assert jax.tree.leaves(grads)[0].shape == ()
    refused(ValueError, r"got no rngs", FakeConvert, "e4m3fn", rounding="stochastic")


@pytest.mark.parametrize("layer", [Fp8Linear, Fp8Conv, Fp8Einsum])
def test_a_name_where_a_recipe_is_due(layer):
    args = ("bi,io->bo", (4, 2)) if layer is Fp8Einsum else (4, 2, 3)[: 2 + (layer is Fp8Conv)]
    with refused(TypeError, rf"{layer.__name__}: recipe .*; write qtoolkit\.recipes\.m"):
        layer(*args, rngs=nnx.Rngs(0), recipe="mxfp8")
