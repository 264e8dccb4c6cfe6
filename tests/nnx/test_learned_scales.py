"""LSQ and LSQ+ in wrapped models: against `qt.gradients.lsq` around a product written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refused import refused
from state_of import state_of

import qtoolkit as qt
from qtoolkit.gradients import lsq, lsq_plus, lsq_scale
from qtoolkit.products import Learned, Operand, Recipe

X = jnp.float32(np.random.default_rng(0).normal(size=(16, 8)))
INT4 = qt.BlockFormat.tensor("int4")
LSQ = qt.recipes.int4_lsq
PLUS = Recipe(
    (Operand("uint4", scaling=Learned(offset=True)), Operand(INT4, scaling=Learned())),
    gradient=None,
)


def layer_of(recipe):
    return qt.nnx.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), recipe)


def loss(layer, x):
    return jnp.sum(jnp.sin(layer(x)))


def kept(tree):
    """The learned scales, of a layer or of its gradients."""
    return state_of(tree)["kernel"]


def scales_of(tree):
    return [kept(tree).get(f"{side}_scale") for side in ("lhs", "rhs")]


@pytest.mark.quick
def test_gradients_are_those_of_lsq():
    layer = layer_of(LSQ)
    qt.nnx.start_scales(layer, X)
    kernel, bias = layer.kernel[...], layer.bias[...]
    scales = tuple(scale[...] for scale in scales_of(layer))
    np.testing.assert_allclose(scales[0], lsq_scale(X, "int4"), rtol=1e-6)
    np.testing.assert_allclose(scales[1], lsq_scale(kernel, "int4"), rtol=1e-6)

    def by_hand(kernel, scales, x):
        y = lsq(x, scales[0], "int4") @ lsq(kernel, scales[1], "int4") + bias
        return jnp.sum(jnp.sin(y))

    expected = jax.jit(jax.grad(by_hand, argnums=(0, 1, 2)))(kernel, scales, X)
    grads = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, X)
    got = scales_of(grads[0])
    np.testing.assert_allclose(grads[0]["kernel"][...], expected[0], rtol=1e-4, atol=1e-6)
    for side in (0, 1):
        np.testing.assert_allclose(got[side][...], expected[1][side], rtol=1e-4, atol=1e-6)
        assert float(got[side][...]) != 0
    np.testing.assert_allclose(grads[1], expected[2], rtol=1e-4, atol=1e-6)


def test_gradients_are_those_of_lsq_plus():
    layer, x = layer_of(PLUS), X + 0.7
    qt.nnx.start_scales(layer, x)
    assert set(kept(layer)) == {"lhs_scale", "lhs_offset", "rhs_scale"}
    (scale, of_kernel), offset = scales_of(layer), kept(layer)["lhs_offset"]
    np.testing.assert_allclose(scale[...], (x.max() - x.min()) / 15, rtol=1e-6)
    np.testing.assert_allclose(offset[...], x.min(), rtol=1e-6)

    def by_hand(scale, offset):
        y = lsq_plus(x, scale, offset, "uint4") @ lsq(layer.kernel[...], of_kernel[...], "int4")
        return jnp.sum(jnp.sin(y + layer.bias[...]))

    arguments = scale[...] * 0.5, offset[...] + 0.3  # so that some elements saturate
    expected = jax.grad(by_hand, argnums=(0, 1))(*arguments)
    scale[...], offset[...] = arguments
    found = kept(nnx.grad(loss)(layer, x))
    np.testing.assert_allclose(found["lhs_scale"][...], expected[0], rtol=1e-4)
    np.testing.assert_allclose(found["lhs_offset"][...], expected[1], rtol=1e-4)
    assert float(expected[1]) != 0


def test_scales_train_with_the_model():
    layer = layer_of(LSQ)
    qt.nnx.start_scales(layer, X)
    before = [float(x[...]) for x in scales_of(layer)]
    assert len(jax.tree.leaves(nnx.state(layer, qt.nnx.LsqScale))) == 2
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    first = loss(layer, X)

    @nnx.jit
    def step(layer, optimizer):
        optimizer.update(layer, nnx.grad(loss)(layer, X))

    for _ in range(20):
        step(layer, optimizer)
    assert loss(layer, X) < first
    assert all(a != float(b[...]) for a, b in zip(before, scales_of(layer), strict=True))
    trained = [x[...] for x in scales_of(layer)]
    qt.nnx.start_scales(layer, 100 * X)  # started already
    assert [x[...] for x in scales_of(layer)] == trained


@pytest.mark.exhaustive
def test_numerics_of_learned_scales():
    layer = layer_of(LSQ)
    qt.nnx.start_scales(layer, X)
    found = qt.nnx.numerics(layer, X, loss)
    row = found.rows[0]
    scale = scales_of(layer)[0][...]
    assert float(row.tally.largest_scale) == float(row.tally.least_scale) == float(scale)
    expected = qt.metrics(X, INT4, scale=scale.reshape(1, 1))
    np.testing.assert_allclose(row.tally.sqnr_db, expected.sqnr_db, atol=1e-4)
    np.testing.assert_allclose(row.tally.saturated_fraction, expected.saturated, rtol=1e-6)
    assert float(row.tally.uses) == 1


def test_the_example_runs(run_example):
    run_example(qt.nnx.start_scales, model=nnx.Linear(8, 4, rngs=nnx.Rngs(0)), batch=X)


@pytest.mark.quick
def test_what_cannot_be():
    layer = layer_of(LSQ)
    refused(ValueError, r"lhs has not been started; write .*start_scales", layer, X)
    assert np.isnan(nnx.jit(lambda layer, x: layer(x))(layer, X)).all()
    refused(ValueError, "no learned scale was used", qt.nnx.start_scales, layer_of(Recipe()), X)
    numbers = (((1,), (0,)), ((), ()))
    with refused(ValueError, "Learned scaling, whose scales are parameters"):
        qt.dot_general(X, jnp.ones((8, 2)), numbers, recipe=LSQ)
    learned = Operand(INT4, scaling=Learned())
    with refused(ValueError, "expected the same where a scale is learned"):
        Recipe((learned, learned), dgrad=(None, "int4"), wgrad=None)
    refused(ValueError, "a cotangent has Learned scaling", Recipe, None, learned)
    with refused(ValueError, "Learned scaling rounds to nearest"):
        Operand(INT4, qt.casts.Projection("toward_zero"), Learned())
    assert qt.recipes.from_json(qt.recipes.to_json(LSQ)) == LSQ


@pytest.mark.quick
def test_learned_scales_stay_when_frozen_or_wrapped_again():
    recipe = Recipe((Operand(INT4, scaling=Learned()), qt.BlockFormat.tensor("int8")), None)
    layer = layer_of(recipe)
    qt.nnx.start_scales(layer, X)
    scale = scales_of(layer)[0]
    frozen = qt.nnx.freeze(layer, qt.nnx.calibrate(layer, [X]))
    assert scales_of(frozen)[0] is scale
    assert scales_of(qt.nnx.wrap(layer, recipe))[0] is scale
    other = qt.nnx.wrap(layer, LSQ)  # another range: its kernel's has to be started
    assert np.isnan(scales_of(other)[1][...])


@pytest.mark.exhaustive
def test_a_learned_input_beside_another_kernel_in_attention():
    recipe = Recipe((Operand(INT4, scaling=Learned()), "int8"), None)
    made = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    model, x = (
        qt.nnx.wrap(made, recipe),
        jnp.float32(np.random.default_rng(0).normal(size=(2, 3, 8))),
    )
    qt.nnx.start_scales(model, x)
    assert np.isfinite(model(x)).all()


class Stacked(nnx.Module):
    def __init__(self):
        self.kernels = nnx.Param(jnp.stack([jnp.eye(8) * (i + 1) for i in range(3)]))

    def __call__(self, x):
        return jax.lax.scan(lambda x, kernel: (x @ kernel, None), x, self.kernels[...])[0]


def test_layers_of_a_stack_start_with_scales_of_their_own():
    """Oracle: LSQ's formula, 2 mean(|w|) / sqrt(7), for each kernel alone."""
    model = qt.nnx.wrap(Stacked(), qt.recipes.int4_lsq)
    qt.nnx.start_scales(model, jnp.ones((2, 8)))
    expected = [2 * (i + 1) / 8 / np.sqrt(7) for i in range(3)]
    scale = state_of(model)["kernels"]["rhs_scale"]
    np.testing.assert_allclose(scale.get_value(), expected, rtol=1e-6)
    assert np.isfinite(model(jnp.ones((2, 8)))).all()
