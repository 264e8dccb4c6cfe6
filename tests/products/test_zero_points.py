"""Zero points in matmuls that are trained and served: int64 of NumPy, the terms written out."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from refused import refused

import qtoolkit as qt

A8 = qt.BlockFormat.token("uint8", zero_point=True)
A8_SIGNED = qt.BlockFormat.tensor("int8", zero_point=True)
W4 = qt.spec("int4_group32").with_(zero_point=True)
W8 = qt.BlockFormat(element="int8", block=(None,), zero_point=True)
RECIPES = {
    "W4A16": qt.Recipe((None, W4), gradient=None),
    "W8A8": qt.Recipe((A8, W8), gradient=None),
    "W4A8, one scale": qt.Recipe((A8_SIGNED, W4), gradient=None),
}
X = np.random.default_rng(0).normal(1.5, 1, (6, 64)).astype(np.float32)


def integers(x, axis, lowest, largest):
    """(q, zero point, scale) of asymmetric integers along an axis, as in ONNX's formula."""
    low, high = (f(x, axis=axis, keepdims=True, initial=0) for f in (np.min, np.max))
    scale = (high - low).astype(np.float32) / np.float32(largest - lowest)
    zero = np.clip(np.rint(lowest - low / scale), lowest, largest)
    return np.clip(np.rint(x / scale) + zero, lowest, largest), zero, scale


def expanded(x, w):
    """The matmul of (q, zero point, scale) of x [n, k] and w [k, m] by its four sums, exactly."""
    qx, zx, qw, zw = (np.asarray(part, np.int64) for part in (*x[:2], *w[:2]))
    sums = qx @ qw - zx * qw.sum(0) - qx.sum(1)[:, None] * zw + len(qw) * zx * zw
    scales = [[Fraction(float(a)) * Fraction(float(b)) for b in w[2][0]] for a in x[2][:, 0]]
    return sums.astype(object) * np.array(scales, object)


@pytest.mark.devices(8)
def test_shards_share_a_zero_point():
    """Each device has one row, some all negative: values and gradients are those of one device."""
    x = np.random.default_rng(2).normal(0, 1, (8, 64)).astype(np.float32)
    x += np.linspace(-9, 4, 8, dtype=np.float32)[:, None]
    w = np.random.default_rng(3).normal(size=(64, 5)).astype(np.float32)
    q, zero, scale = integers(x, None, -128, 127)
    numbers = ((q - zero) * scale).astype(np.float32)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P("d"), jax.P()), "out_specs": jax.P("d")}

    def multiplied(axis_names):
        recipe = qt.Recipe((A8_SIGNED, None), gradient=None, axis_names=axis_names)
        numbers = (((1,), (0,)), ((), ()))
        matmul = jax.shard_map(
            lambda x, w: qt.dot_general(x, w, numbers, recipe=recipe), mesh=mesh, **specs
        )
        return jax.jit(jax.value_and_grad(lambda w: matmul(x, w).sum()))(w)

    (loss, of_w), (other, _) = multiplied(("d",)), multiplied(())
    np.testing.assert_allclose(loss, (numbers @ w).sum(), rtol=1e-4)
    np.testing.assert_allclose(of_w, np.tile(numbers.sum(0)[:, None], 5), rtol=1e-5)
    assert abs(other - loss) > 1e-3  # eight scales of their own


def test_a_matmul_is_the_sum_of_its_four_terms():
    """Two groups of inputs, a scale for each token: exact in fractions, but for float32 sums."""
    w = np.random.default_rng(1).normal(0.3, 1, (64, 5)).astype(np.float32)
    q, zero, scale = integers(X, 1, 0, 255)
    groups = [integers(part, 0, -8, 7) for part in np.split(w, 2)]
    parts = [(part, zero, scale) for part in np.split(q, 2, 1)]
    expected = sum(map(expanded, parts, groups)).astype(np.float64)
    y = qt.dot_general(X, w, (((1,), (0,)), ((), ())), recipe=qt.Recipe((A8, W4), gradient=None))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_stored_is_wrapped_bit_for_bit(name, dtype):
    model = nnx.Linear(64, 8, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    x = jnp.asarray(X).astype(dtype)
    wrapped, served = qt.nnx.wrap(model, RECIPES[name]), qt.nnx.quantize(model, RECIPES[name])
    kernel = served.kernel.get_value()
    assert kernel.spec.zero_point
    np.testing.assert_array_equal(wrapped(x), served(x))
    error = np.abs(np.asarray(served(x), np.float32) - np.asarray(model(x), np.float32)).max()
    assert 1e-4 < error < 0.6


@pytest.mark.parametrize("name", RECIPES)
def test_linen_computes_the_same(name):
    module = nn.Dense(8)
    variables = module.init(jax.random.key(0), X)
    served, weights = qt.linen.quantize(module, variables, RECIPES[name], X)
    wrapped = qt.linen.wrap(module, RECIPES[name])
    np.testing.assert_array_equal(served.apply(weights, X), wrapped.apply(variables, X))


@pytest.mark.parametrize("name", ["W8A8", "W4A8, one scale"])
def test_zero_points_beat_symmetric_integers_on_one_sided_inputs(name):
    recipe = RECIPES[name]
    without = recipe.mapped(lambda o: qt.Operand(o.spec.with_(element="int8", zero_point=False)))
    x = np.random.default_rng(1).uniform(0, 1, (256, 64)).astype(np.float32)
    w = np.ones((64, 1), np.float32)
    x_alone = [qt.Recipe((one.forward[0], None), gradient=None) for one in (recipe, without)]
    errors = [np.abs(qt.einsum("nk,km->nm", x, w, recipe=one) - x @ w).mean() for one in x_alone]
    assert errors[0] < 0.6 * errors[1]  # half a step


def test_the_derivative_multiplies_the_rounded_numbers():
    w = np.random.default_rng(1).normal(0.3, 1, (64, 5)).astype(np.float32)
    q, zero, scale = integers(w.reshape(2, 32, 5), 1, -8, 7)
    rounded = ((q - zero) * scale).reshape(64, 5)
    recipe, ct = RECIPES["W4A16"], np.random.default_rng(2).normal(size=(6, 5)).astype(np.float32)
    _, pull = jax.vjp(lambda x, w: qt.einsum("nk,km->nm", x, w, recipe=recipe), X, w)
    dx, dw = pull(ct)
    np.testing.assert_allclose(dx, ct @ rounded.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, X.T @ ct, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_infinity_or_a_nan_is_seen_in_the_result(bad):
    x = X.copy()
    x[2, 3] = bad
    w = np.ones((64, 5), np.float32)
    y = np.asarray(qt.einsum("nk,km->nm", x, w, recipe=RECIPES["W8A8"]))
    np.testing.assert_array_equal(np.isfinite(y).all(1), np.arange(6) != 2)


LSQ_PLUS = qt.Operand(
    qt.BlockFormat.tensor("uint4", zero_point=True), scaling=qt.products.Learned(offset=True)
)


def test_lsq_plus_with_a_whole_offset_trains_and_is_stored():
    """Oracle: integers of NumPy by the learned scale and offset; gradients of `lsq_plus`."""
    model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    model.kernel[...] = model.kernel[...] + 0.05
    wrapped = qt.nnx.wrap(model, qt.Recipe((None, LSQ_PLUS), gradient=None))
    qt.nnx.start_scales(wrapped, X)
    scale, offset = (
        float(jax.tree.leaves(nnx.state(wrapped, kind))[0])
        for kind in (qt.nnx.LsqScale, qt.nnx.LsqOffset)
    )
    zero = np.clip(-np.rint(np.float32(offset) / np.float32(scale)), 0, 15)
    kernel = np.asarray(model.kernel[...])
    q = np.clip(np.rint(kernel / np.float32(scale)) + zero, 0, 15)
    rounded = ((q - zero) * np.float32(scale)).astype(np.float32)
    np.testing.assert_allclose(wrapped(X), X @ rounded, rtol=2e-5, atol=2e-5)

    grads = nnx.grad(lambda model: (model(X) ** 2).sum())(wrapped)
    whole = -np.float32(zero) * np.float32(scale)
    cotangent = X.T @ (2 * X @ rounded)
    _, pull = jax.vjp(lambda *xs: qt.gradients.lsq_plus(*xs, "uint4"), kernel, scale, whole)
    dw, ds, do = pull(jnp.asarray(cotangent))
    np.testing.assert_allclose(grads["kernel"].get_value(), dw, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(
        jax.tree.leaves(nnx.filter_state(grads, qt.nnx.LsqScale))[0], ds, rtol=1e-2
    )
    np.testing.assert_allclose(
        jax.tree.leaves(nnx.filter_state(grads, qt.nnx.LsqOffset))[0], do, rtol=1e-2, atol=1e-3
    )
    served = qt.nnx.quantize(wrapped, "wrapped")
    stored = served.kernel.get_value()
    assert int(stored.zero_point[0, 0]) == zero
    np.testing.assert_array_equal(stored.dequantize(), rounded)
    np.testing.assert_allclose(served(X), wrapped(X), rtol=2e-5, atol=2e-5)


def test_what_does_not_find_zero_points_is_refused():
    for scaling in (qt.products.Delayed(), qt.products.Static(), qt.products.Static(1.0)):
        refused(ValueError, "does not find", qt.Operand, A8_SIGNED, scaling=scaling)
    with refused(ValueError, "Learned scaling does not find"):
        qt.Operand(W4, scaling=qt.products.Learned(offset=True))
    no_zero_point = qt.Operand("uint4", scaling=qt.products.Learned(offset=True))
    wrapped = qt.nnx.wrap(
        nnx.Linear(8, 4, rngs=nnx.Rngs(0)), qt.Recipe((None, no_zero_point), gradient=None)
    )
    qt.nnx.start_scales(wrapped, jnp.ones((2, 8)))
    refused(ValueError, "zero_point=True", qt.nnx.quantize, wrapped, "wrapped")


def test_gptq_stores_zero_points():
    model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(3).normal(0.5, 1, (128, 64)).astype(np.float32))
    served = {"gptq": qt.nnx.quantize(model, W4, [x], method="gptq")}
    served["nearest"] = qt.nnx.quantize(model, W4)
    errors = {name: float(jnp.abs(one(x) - model(x)).mean()) for name, one in served.items()}
    assert served["gptq"].kernel.get_value().spec.zero_point
    assert errors["gptq"] < errors["nearest"]
