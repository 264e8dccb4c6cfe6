"""Products of operands that are stored as codes and scales.

Oracles: the product by a recipe that rounds the same operand in the call (bit for bit), and NumPy
in float64 on ml_dtypes' casts, which share no code with either.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refused import refused

import qtoolkit as qt
from qtoolkit.post_training.internal import stored_kernel
from qtoolkit.products import Operand, Recipe
from qtoolkit.products.internal import Axes

MATMUL = (((1,), (0,)), ((), ()))
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(5, 32)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(32, 24)), jnp.float32)


def stored(operand, w=W, stacked=0):
    return stored_kernel("test", w, operand, Axes((0,), (1,)), stacked)


@pytest.mark.sample("te_current")
@pytest.mark.quick
@pytest.mark.parametrize(
    "name", ["te_current", "token_scaled", "weight_only_e4m3", "w4a16", "int8_qat", "deepseek_v3"]
)
def test_a_stored_kernel_gives_the_bits_of_a_rounded_one(name):
    recipe = getattr(qt.recipes, name)
    w = stored(recipe.forward[1])
    got = qt.dot_general(X, w, MATMUL, recipe=recipe)
    np.testing.assert_array_equal(got, qt.dot_general(X, W, MATMUL, recipe=recipe))
    turned = qt.dot_general(w.unpack(), X, (((0,), (1,)), ((), ())), recipe=recipe.swapped())
    np.testing.assert_array_equal(
        turned, qt.dot_general(W, X, (((0,), (1,)), ((), ())), recipe=recipe.swapped())
    )


def test_one_product_in_numpy():
    w = stored(qt.recipes.weight_only_e4m3.forward[1])
    got = qt.dot_general(X, w, MATMUL, recipe=qt.recipes.weight_only_e4m3)
    scale = (np.abs(W).max(0) / np.float32(448)).astype(np.float32)
    q = (np.asarray(W) / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    expected = np.asarray(X, np.float64) @ (q * scale)
    # 32 products and sums in float32: at most 33 roundings of 2**-24 of the sum of magnitudes.
    bound = 33 * 2.0**-24 * (np.abs(np.asarray(X, np.float64)) @ np.abs(q * scale))
    assert np.all(np.abs(got - expected) <= bound)


@pytest.mark.quick
def test_native_products_have_operands_of_eight_bits():
    recipe = Recipe("e4m3fn", arithmetic="native")
    w = stored(recipe.forward[1])
    function = jax.jit(lambda x, w: qt.dot_general(x, w, MATMUL, recipe=recipe))
    (line,) = (t for t in function.lower(X, w).as_text().splitlines() if "dot_general" in t)
    assert "(tensor<5x32xf8E4M3FN>, tensor<32x24xf8E4M3FN>) -> tensor<5x24xf32>" in line
    np.testing.assert_array_equal(function(X, w), function(X, W))


def test_gradients_use_the_codes_of_a_stored_kernel():
    recipe = qt.recipes.weight_only_e4m3
    w = stored(recipe.forward[1])
    weights = jnp.asarray(RNG.normal(size=(5, 24)), jnp.float32)
    got = jax.grad(lambda x: jnp.sum(weights * qt.dot_general(x, w, MATMUL, recipe=recipe)))(X)
    expected = np.asarray(weights, np.float64) @ np.asarray(w.dequantize(), np.float64).T
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_no_gradient_by_a_stored_kernel():
    w = stored(Operand("e4m3fn"))

    def loss(w):
        return jnp.sum(qt.dot_general(X, w, MATMUL))

    with refused(TypeError, "differentiated by a stored operand, QArray"):
        jax.grad(loss, allow_int=True)(w)
    with pytest.raises(TypeError, match="uint8"):  # JAX's own message
        jax.grad(loss)(w)


@pytest.mark.sample("zero points")
@pytest.mark.parametrize(
    "spec",
    [qt.BlockFormat.channel("uint8", axis=1, zero_point=True), "bfloat16", "mxfp4"],
    ids=["zero points", "bfloat16", "mxfp4"],
)
def test_any_quantized_array_is_an_operand(spec):
    """Oracle: the plain product of the numbers that it stands for."""
    w = qt.quantize(W, qt.spec(spec).along(0) if spec == "mxfp4" else spec)
    got = qt.dot_general(X, w, MATMUL, recipe=Recipe((None, None)))
    expected = np.asarray(X, np.float64) @ np.asarray(w.dequantize(), np.float64)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.exhaustive
def test_a_stack_of_kernels():
    stack = jnp.stack([W, 8 * W])
    recipe = qt.recipes.te_current
    w = stored(recipe.forward[1], stack, stacked=1)
    scale = float(stored(recipe.forward[1]).scale[0, 0])
    np.testing.assert_array_equal(w.scale.reshape(-1), [scale, 8 * scale])

    def product(w):
        return qt.dot_general(X, w, MATMUL, recipe=recipe)

    np.testing.assert_array_equal(jax.vmap(product)(w), jax.vmap(product)(stack))
    numbers = (((1,), (1,)), ((), ()))  # of the stack as a whole: its blocks stay where they are
    whole = qt.dot_general(X, w, numbers, recipe=Recipe((None, "e4m3fn"), gradient=None))
    expected = np.einsum("bi,sio->bso", X, w.dequantize())
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(0, 32), (5, 0)])
def test_empty_operands(shape):
    """Oracle: the plain product, which is empty, or zeros."""
    x, w = jnp.zeros(shape), jnp.zeros((shape[1], 24))
    for recipe in (qt.recipes.te_current, qt.recipes.mxfp8, qt.recipes.te_delayed_hybrid):
        recipe = recipe.without_state()
        got = qt.dot_general(x, w, MATMUL, recipe=recipe)
        assert (got.shape, got.dtype) == ((shape[0], 24), jnp.float32)
        assert not np.any(got)
        grad = jax.grad(lambda w: jnp.sum(qt.dot_general(x, w, MATMUL, recipe=recipe)))(w)  # noqa: B023
        assert grad.shape == w.shape


def test_native_einsum_where_one_operand_alone_sums_a_label():
    """Oracle: the emulated one, whose sums are float32 as well."""
    x, w = jnp.asarray(RNG.normal(size=(3, 4, 32)), jnp.float32), W
    native, emulated = (
        qt.einsum("bij,jk->bk", x, w, recipe=Recipe("e4m3fn", arithmetic=arithmetic))
        for arithmetic in ("native", "emulate")
    )
    np.testing.assert_allclose(native, emulated, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(
    *("int8 by tensor, current", "int4 by tensor, learned", "binary8p3sf by tensor, current"),
    "e5m2 by tensor, current",
)
@pytest.mark.parametrize(
    "operand",
    [
        Operand("int8"),
        Operand("mxfp4"),
        Operand(qt.p3109(8, 3, extended=False)),
        Operand("nvfp4"),
        Operand("e2m1fn"),
        Operand("int4", scaling=qt.products.Learned()),
        Operand("mxint8"),
        Operand("e5m2"),
    ],
    ids=str,
)
def test_stored_inside_a_trace_infinities_and_nans_stay(operand):
    """Nobody can refuse them there. Oracle: which results of the plain product are finite."""
    x, scale = jnp.ones((3, 80)), jnp.full((), 0.25)

    @jax.jit
    def product(w):
        kernel = stored_kernel("test", w, operand, Axes((0,), (1,)), 0, scale=scale)
        return qt.dot_general(x, kernel, MATMUL, recipe=Recipe((None, None)))

    good = RNG.uniform(1, 2, (80, 6)).astype(np.float32)
    assert np.isfinite(product(good)).all()
    for bad in (np.inf, -np.inf, np.nan):
        w = good.copy()
        w[70, 2] = bad
        finite = np.isfinite(product(w))
        if operand.has_one_scale and not operand.spec.element.has_nan:
            assert not finite.any()  # the scale of the tensor is NaN
        else:
            np.testing.assert_array_equal(finite, np.isfinite(np.ones((3, 80)) @ w))


def test_what_cannot_be_stored():
    transformed = Operand("e4m3fn", transform=qt.products.Hadamard(16))
    refused(ValueError, "transforms the operand by Hadamard", stored, transformed)
    with refused(ValueError, "holds 2 infinities and NaNs"):
        stored(Operand("e4m3fn"), W.at[0, :2].set(np.inf))
    with refused(ValueError, r"does not|holds|hold"):
        stored(Operand(qt.BlockFormat.tensor("int16")), W.astype(jnp.bfloat16))


def test_a_matmul_of_several_stored_kernels_with_tensor_scales():
    """Oracle: NumPy, with the dequantized kernels."""
    w = jax.vmap(lambda w: qt.quantize(w, "nvfp4"))(jnp.stack([W.T, 300 * W.T]))
    got = qt.dot_general(X, w, (((1,), (2,)), ((), ())), recipe=qt.Recipe(None, None))
    expected = np.einsum("bi,koi->bko", np.float64(X), np.float64(w.dequantize()))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4 * np.abs(expected).max())
