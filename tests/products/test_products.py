"""Quantized products against a numpy oracle: ml_dtypes' rounding, float64 accumulation.

Products of 8-bit values are exact in float32, so results differ from the oracle by float32
accumulation only: at most K * 2**-24 of the sum of magnitudes, for K terms.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from refused import refused

import qtoolkit as qt
from qtoolkit import Recipe, conv_general_dilated, dot_general, einsum

MATMUL = (((1,), (0,)), ((), ()))
WIDE = Recipe(forward=None, gradient=None)


@np.errstate(invalid="ignore")
def quantized(x, target=ml_dtypes.float8_e4m3fn, largest=448.0):
    """The oracle: q in float64 and the float32 scale, IEEE division."""
    x = np.asarray(x, np.float32)
    scale = np.float32(np.abs(x[np.isfinite(x)]).max(initial=0)) / np.float32(largest)
    scale = max(scale, np.float32(2.0**-126)) if scale else np.float32(1)
    q = np.clip(x / scale, -largest, largest).astype(target)
    return q.astype(np.float64), np.float64(scale)


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_close(got, expected, terms, magnitude):
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, atol=terms * 2.0**-23 * magnitude
    )


def test_weights_are_rounded_from_their_own_dtype():
    """float32 weights, bfloat16 activations: a bfloat16 copy would change 3 % of the codes."""
    x, w = draw(64, 64, dtype=ml_dtypes.bfloat16), draw(64, 64, seed=1)
    (qx, sx), (qw, sw) = quantized(x), quantized(w)
    out = dot_general(jnp.asarray(x), jnp.asarray(w), MATMUL, preferred_element_type=jnp.float32)
    assert_close(out, qx @ qw * sx * sw, 64, np.abs(out).max())
    copied, _ = quantized(w.astype(ml_dtypes.bfloat16))
    assert np.mean(copied != qw) > 0.01


@pytest.mark.sample("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_accumulates_in_float32_and_rounds_once(dtype):
    """The largest E4M3 and E5M2 products overflow float16; scaled back they do not."""
    x, w, g = (jnp.asarray(draw(16, 16, seed=seed), dtype) for seed in range(3))
    out, pullback = jax.vjp(lambda x, w: dot_general(x, w, MATMUL), x, w)
    dx, dw = pullback(g)
    (qx, sx), (qw, sw) = quantized(x), quantized(w)
    qg, sg = quantized(g, ml_dtypes.float8_e5m2, 57344.0)
    eps = float(ml_dtypes.finfo(dtype).eps)
    expected = {"out": qx @ qw * sx * sw, "dx": qg @ qw.T * sg * sw, "dw": qx.T @ qg * sx * sg}
    for name, got in {"out": out, "dx": dx, "dw": dw}.items():
        assert got.dtype == dtype
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, expected[name], rtol=eps, atol=1e-4, err_msg=name)


def test_batch_dimensions_and_einsum_agree():
    x, w = draw(3, 5, 8), draw(3, 8, 4, seed=1)
    numbers = (((2,), (1,)), ((0,), (0,)))
    dot = dot_general(x, w, numbers)
    np.testing.assert_array_equal(dot, einsum("bij,bjk->bik", x, w))
    (qx, sx), (qw, sw) = quantized(x), quantized(w)
    assert_close(dot, np.einsum("bij,bjk->bik", qx, qw) * sx * sw, 8, np.abs(dot).max())

    def loss(product):
        return lambda x, w: jnp.sum(jnp.sin(product(x, w)))

    by_dot = jax.grad(loss(lambda x, w: dot_general(x, w, numbers)), (0, 1))(x, w)
    by_einsum = jax.grad(loss(lambda x, w: einsum("bij,bjk->bik", x, w)), (0, 1))(x, w)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), by_dot, by_einsum
    )


def test_a_grouped_convolution_and_its_gradients():
    """Oracle: XLA's own float32 convolution of what numpy and ml_dtypes rounded.

    Strides and dilations: `test_recipes`, by NumPy.
    """
    x, w = draw(2, 11, 4), draw(3, 2, 6, seed=1)
    options = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": 2}
    plain, ours = (
        functools.partial(function, window_strides=(1,), padding="VALID", **options)
        for function in (jax.lax.conv_general_dilated, conv_general_dilated)
    )
    (qx, sx), (qw, sw) = quantized(x), quantized(w)
    qx, qw = jnp.asarray(qx, jnp.float32), jnp.asarray(qw, jnp.float32)
    out, pullback = jax.vjp(ours, x, w)
    expected, plain_pullback = jax.vjp(plain, qx, qw)
    np.testing.assert_allclose(out, expected * np.float32(sx * sw), rtol=1e-5, atol=1e-6)
    g = draw(*out.shape, seed=2)
    qg, sg = quantized(g, ml_dtypes.float8_e5m2, 57344.0)
    dx, dw = plain_pullback(jnp.asarray(qg, jnp.float32))
    got_x, got_w = pullback(jnp.asarray(g))
    np.testing.assert_allclose(got_x, dx * np.float32(sg * sw), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_w, dw * np.float32(sg * sx), rtol=1e-5, atol=1e-5)


@pytest.mark.quick
def test_a_whole_vector_that_a_matmul_sums_over_has_one_scale():
    """Also if it lies along several axes. Oracle: NumPy and ml_dtypes round, XLA multiplies."""
    normal = np.random.default_rng(0).normal

    def rounded(x, axes):
        scale = np.abs(x).max(axes, keepdims=True) / np.float32(448)
        return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale

    spec = qt.BlockFormat(element="e4m3fn", block=(None,))
    recipe = Recipe((None, spec), dgrad=(None, spec), wgrad=(spec, None))
    x, w = (normal(size=size).astype(np.float32) for size in [(2, 3, 4, 5), (4, 5, 6)])
    y, vjp = jax.vjp(lambda x, w: einsum("bthd,hdo->bto", x, w, recipe=recipe), x, w)
    ones = np.ones(y.shape, np.float32)
    dx, dw = vjp(ones)
    np.testing.assert_allclose(
        y, np.einsum("bthd,hdo->bto", x, rounded(w, (0, 1))), rtol=1e-4, atol=1e-5
    )
    # dgrad reuses the kernel of the forward matmul.
    expected = np.einsum("bto,hdo->bthd", ones, rounded(w, (0, 1)))
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)
    expected = np.einsum("bthd,bto->hdo", rounded(x, (0, 1)), ones)
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5)

    images, kernel = (normal(size=n).astype(np.float32) for n in [(2, 6, 6, 3), (3, 3, 3, 4)])
    options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    y = conv_general_dilated(images, kernel, (1, 1), "SAME", recipe=recipe, **options)
    expected = jax.lax.conv_general_dilated(
        images, rounded(kernel, (0, 1, 2)), (1, 1), "SAME", **options
    )
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_forward_mode_sees_no_rounded_cotangent():
    x, w, t = draw(8, 8), draw(8, 8, seed=1), draw(8, 8, seed=2)
    (qx, sx), (qw, sw) = quantized(x), quantized(w)
    _, dot = jax.jvp(lambda x: dot_general(x, w, MATMUL), (x,), (t,))
    np.testing.assert_allclose(dot, t @ qw * sw, rtol=1e-5, atol=1e-5)
    _, dot = jax.jvp(lambda w: dot_general(x, w, MATMUL), (w,), (t,))
    np.testing.assert_allclose(dot, qx @ t * sx, rtol=1e-5, atol=1e-5)


def test_the_gradient_by_a_weakly_typed_kernel_is_not_weak():
    kernel = jax.lax.full((4, 4), 0.5)
    assert kernel.weak_type
    for transform in (lambda f: f, jax.jit):
        gradient = transform(jax.grad(lambda w: dot_general(jnp.ones((2, 4)), w, MATMUL).sum()))
        assert not gradient(kernel).weak_type


def test_a_recipe_without_formats_is_the_plain_product():
    x, w = draw(8, 16), draw(16, 4, seed=1)
    np.testing.assert_array_equal(dot_general(x, w, MATMUL, recipe=WIDE), jnp.matmul(x, w))
    got = jax.grad(lambda w: jnp.sum(jnp.sin(dot_general(x, w, MATMUL, recipe=WIDE))))(w)
    expected = jax.grad(lambda w: jnp.sum(jnp.sin(jnp.matmul(x, w))))(w)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


OTHERS = {
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "e4m3fnuz": (ml_dtypes.float8_e4m3fnuz, 240.0),
    "bfloat16": (ml_dtypes.bfloat16, None),
    "float16": (np.float16, None),
}


@pytest.mark.sample("e5m2", "bfloat16", "e4m3fnuz")
@pytest.mark.parametrize("fmt", OTHERS)
def test_other_formats(fmt):
    x, w = draw(16, 16), draw(16, 16, seed=1)
    out = dot_general(x, w, MATMUL, recipe=Recipe(forward=fmt, gradient=fmt))
    target, largest = OTHERS[fmt]
    if largest is None:  # rounded without a scale
        qx, qw, scale = x.astype(target).astype(np.float64), w.astype(target).astype(np.float64), 1
    else:
        (qx, sx), (qw, sw) = quantized(x, target, largest), quantized(w, target, largest)
        scale = sx * sw
    assert_close(out, qx @ qw * scale, 16, np.abs(out).max())
    assert (np.asarray(out) != x @ w).any()


def test_recipes_are_frozen_data():
    assert Recipe("F8_E4M3", jnp.float8_e5m2) == Recipe() == qt.Recipe()
    assert hash(Recipe()) == hash(Recipe("e4m3fn"))
    assert Recipe("e5m2") != Recipe()
    with pytest.raises(AttributeError):
        Recipe().forward = None
    refused(ValueError, "'fp8' is ambiguous", Recipe, "fp8")


@pytest.mark.sample("te_current", "mxfp8")
@pytest.mark.parametrize("name", ["te_current", "token_scaled", "mxfp8", "nvfp4", "deepseek_v3"])
def test_vectors_and_numbers(name):
    """Cotangents of rank 0, and of an axis that is kept and not summed: one scale, blocks once."""
    recipe, key = getattr(qt.recipes, name), jax.random.key(0)
    x, v = (jnp.asarray(draw(4, 16, seed=seed)) for seed in (0, 1))
    for subscripts, lhs, rhs in (
        ("i,i->", x[0], v[0]),
        ("i,j->ij", x[0], v[0]),
        ("ij,jk->k", x, v.T),
        ("ij,j->i", x, v[0]),
        (",i->i", x[0, 0], v[0]),
    ):

        def out(lhs, rhs, subscripts=subscripts):
            return einsum(subscripts, lhs, rhs, recipe=recipe, key=key).sum()

        got = jax.jit(jax.grad(out, (0, 1)))(lhs, rhs)
        plain = jax.grad(lambda *xs, s=subscripts: jnp.einsum(s, *xs).sum(), (0, 1))(lhs, rhs)
        for one, expected in zip(got, plain, strict=True):  # e2m1 of 16 normal numbers
            np.testing.assert_allclose(one, expected, atol=0.35 * np.abs(expected).max())


def test_a_convolution_without_a_result_has_zero_gradients():
    x, kernel = jnp.ones((2, 3, 5)), jnp.ones((4, 5, 6))  # the window is longer than the input

    def loss(x, kernel, recipe):
        numbers = ("NHC", "HIO", "NHC")
        options = {"dimension_numbers": numbers, "recipe": recipe}
        return conv_general_dilated(x, kernel, (1,), "VALID", **options).sum()

    for recipe in (qt.recipes.te_current, qt.recipes.mxfp8, qt.recipes.token_scaled):
        assert not any(g.any() for g in jax.grad(loss, (0, 1))(x, kernel, recipe))


def test_no_transform_along_an_axis_that_one_operand_broadcasts():
    """Of float32 numbers from -1 to 1 the transform is exact: the product is the plain one."""
    operand = qt.Operand("float32", transform=qt.products.Hadamard(4))
    numbers = np.random.default_rng(0).integers(-1, 2, (7, 4)).astype(np.float32)
    lhs, rhs = jnp.asarray(numbers[:3, :1]), jnp.asarray(numbers[3:])
    got = einsum("ij,jk->ik", lhs, rhs, recipe=Recipe(operand, operand))
    np.testing.assert_array_equal(got, jnp.einsum("ij,jk->ik", lhs, rhs))


def test_errors():
    x = jnp.ones((2, 2), jnp.float32)
    with refused(TypeError, r"dot_general: x has dtype int32"):
        dot_general(x.astype(jnp.int32), x, MATMUL)
    with refused(ValueError, r"einsum: dtype float16 does not hold .* bfloat16"):
        einsum("ij,jk->ik", x.astype(jnp.float16), x, recipe=Recipe("bfloat16"))
    with refused(ValueError, r"dtype float16 does not hold .* bfloat16"):
        dot_general(x, x.astype(jnp.float16), MATMUL, recipe=Recipe("bfloat16"))
    refused(TypeError, r"recipe has type str", dot_general, x, x, MATMUL, recipe="e4m3fn")
    with refused(TypeError, r"preferred_element_type is int32"):
        dot_general(x, x, MATMUL, preferred_element_type=jnp.int32)
    with refused(TypeError, r"preferred_element_type is float8_e5m2"):
        dot_general(x, x, MATMUL, preferred_element_type=jnp.float8_e5m2)
    with refused(ValueError, r"a cotangent has Static\(\) scaling, which nobody"):
        Recipe("e4m3fn", qt.Operand("e4m3fn", scaling=qt.products.Static()))
    with pytest.raises(TypeError, match="contracting dimensions to have the same shape"):
        dot_general(jnp.ones((2, 3)), x, MATMUL)


# What is not finite, and scales beyond float32's range in the middle.

# The ways in which derivatives keep infinities and NaNs in codes: the format has both or a NaN, it
# takes infinities for its largest number, or it has neither and its numbers are kept in E4M3FN.
FORMATS_OF_PRODUCTS = {
    "p3109 finite": qt.p3109(8, 3, extended=False),
    "p3109": qt.p3109(8, 3),
    **{
        name: qt.spec(name)
        for name in (
            *("e4m3fnuz", "e4m3fn", "e5m2", "int8", "e2m1fn", "e2m3fn", "nf4", "bfloat16"),
            *("mxfp4", "mxfp8_e4m3", "mxfp6_e2m3", "nvfp4", "mxfp8_e5m2", "mxint8"),
            "deepseek_1x128",
        )
    },
}


def products_of(recipe):
    """Forward and both gradients, as one function of the operands and the cotangent."""

    def run(x, w, ct):
        y, back = jax.vjp(lambda x, w: dot_general(x, w, MATMUL, recipe=recipe), x, w)
        return y, *back(ct)

    return run


def plain_products(x, w, ct):
    y, back = jax.vjp(lambda x, w: jax.lax.dot_general(x, w, MATMUL), x, w)
    return y, *back(ct)


@pytest.mark.sample("p3109 finite", "mxint8", "int8", "nvfp4", "e4m3fnuz", "mxfp4")
@pytest.mark.parametrize("fmt", FORMATS_OF_PRODUCTS.values(), ids=FORMATS_OF_PRODUCTS)
def test_results_are_finite_where_the_plain_ones_are(fmt):
    """Oracle: the plain product's own NaNs and infinities, of one bad value in each operand."""
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 8), "w": (8, 6), "ct": (4, 6)}
    # Away from zero, where rounding might make an infinity times a small number a NaN.
    good = {name: rng.uniform(1, 2, shape).astype(np.float32) for name, shape in shapes.items()}
    run, plain = jax.jit(products_of(Recipe(fmt, fmt))), jax.jit(plain_products)
    for name in shapes:
        for bad in (np.inf, -np.inf, np.nan):
            operands = {key: value.copy() for key, value in good.items()}
            operands[name][1, 2] = bad
            expected = [np.isfinite(out) for out in plain(**operands)]
            assert sum(finite.all() for finite in expected) == 1  # the other two feel it
            for got, finite in zip(run(**operands), expected, strict=True):
                np.testing.assert_array_equal(np.isfinite(got), finite)


def test_an_infinite_loss_scale_skips_the_same_step():
    """`optax.apply_if_finite` sees what plain training would see."""
    x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
    x = x.at[0, 0].set(jnp.inf)
    tx = optax.apply_if_finite(optax.sgd(0.1), 5)
    grads = jax.grad(lambda w: jnp.sum(dot_general(x, w, MATMUL)))(w)
    _, state = tx.update(grads, tx.init(w), w)
    assert int(state.total_notfinite) == 1


@pytest.mark.sample(
    "e5m2-(36, 0)", "e5m2-(18, 18)", "None-(-35, 35)", "e5m2-(-30, 30)", "None-(0, 36)"
)
@pytest.mark.parametrize(
    "exponents", [(36, 0), (0, 36), (-30, 30), (30, -30), (-35, 35), (18, 18)], ids=str
)
@pytest.mark.parametrize("gradient", ["e5m2", None])
def test_scales_far_apart_neither_overflow_nor_underflow(exponents, gradient):
    """Powers of ten far apart. Oracle: the float64 product; the bound, two roundings to E4M3."""
    first, second = (np.float32(10.0) ** e for e in exponents)
    rng = np.random.default_rng(1)
    x = rng.uniform(1, 2, (3, 5)).astype(np.float32) * first
    w = rng.uniform(1, 2, (5, 2)).astype(np.float32) * second
    recipe = Recipe(gradient=gradient)
    y, dx, dw = products_of(recipe)(x, w, np.ones((3, 2), np.float32))
    wide = (x.astype(np.float64), w.astype(np.float64))
    expected = (wide[0] @ wide[1], np.ones((3, 2)) @ wide[1].T, wide[0].T @ np.ones((3, 2)))
    for got, exact in zip((y, dx, dw), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2 * 2.0**-4)


P1 = qt.p3109(8, 1)


@pytest.mark.sample("extended-emulate", "unsigned-native", "finite-emulate")
@pytest.mark.parametrize("arithmetic", ["emulate", "native"])
@pytest.mark.parametrize(
    "forward",
    [P1, qt.p3109(8, 1, extended=False), (qt.p3109(8, 2, signed=False), P1)],
    ids=["extended", "finite", "unsigned"],
)
def test_no_step_overflows_though_squares_of_elements_would(forward, arithmetic):
    """Elements up to 2**62 and more. Oracle: float64, since every format holds powers of two.

    The bound: 31 sums, and two scales and q * scale that are rounded to float32.
    """
    (x, w), g = 2.0 ** np.random.default_rng(2).integers(-1, 1, (2, 32, 32)), np.ones((32, 32))
    run = jax.jit(products_of(Recipe(forward, P1, arithmetic=arithmetic)))
    for got, exact in zip(run(*np.float32([x, w, g])), (x @ w, g @ w.T, x.T @ g), strict=True):
        np.testing.assert_allclose(got, exact, rtol=(31 + 4) * 2.0**-24)


def test_products_of_the_largest_and_the_smallest_numbers():
    for pair in ((1e36, 1.0), (1.0, 1e36), (3e38, 1e-35), (1e-35, 3e38), (1e-30, 1e-5)):
        x, w = (jnp.full((1, 1), value, jnp.float32) for value in pair)
        np.testing.assert_allclose(dot_general(x, w, MATMUL), [[pair[0] * pair[1]]], rtol=1e-6)
    assert dot_general(jnp.full((1, 1), 1e30), jnp.full((1, 1), 1e30), MATMUL)[0, 0] == jnp.inf


@pytest.mark.parametrize("values", [(1e36, 30.0), (30.0, 1e36)])
def test_an_unquantized_operand_does_not_overflow(values):
    """Oracle: the exact product. 30 is q = 448 times its scale, and 1e36 * 448 is infinite."""
    x, w = (jnp.full((1, 1), value, jnp.float32) for value in values)
    for forward in ((None, "e4m3fn"), ("e4m3fn", None)):
        out = dot_general(x, w, MATMUL, recipe=Recipe(forward, gradient=None))
        np.testing.assert_allclose(out, [[3e37]], rtol=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        "mxfp8_e4m3",
        "mxfp8_e5m2",
        "mxfp6_e3m2",
        "mxfp6_e2m3",
        "mxfp4",
        "deepseek_1x128_e8m0",
        "int8",
    ],
)
def test_elements_rounded_up_to_2_to_the_128_stay_finite(spec):
    """Oracle: the exact product, a quarter of the element; its neighbours are 0.

    MXFP8 rounds 3.3e38 to 256 * 2**120, which float32 does not hold; 0 * inf would be NaN.
    """
    spec = qt.BlockFormat.channel(spec) if spec == "int8" else qt.spec(spec)
    run = jax.jit(products_of(Recipe(spec, spec)))
    largest = np.finfo(np.float32).max
    step = 2.0 ** -getattr(spec.element, "mantissa_bits", 7)
    for value in np.float32([2.9e38, 3.1e38, 3.3e38, largest, -largest]):
        x, quarter = np.zeros((32, 32), np.float32), np.eye(32, dtype=np.float32) / 4
        x[3, 5] = value
        y, dx, dw = run(x, quarter, quarter)
        np.testing.assert_allclose(y, x / 4, rtol=step)
        np.testing.assert_allclose(dx, np.eye(32) / 16)
        np.testing.assert_allclose(dw, x.T / 4, rtol=step)
        _, dx, _ = run(quarter, quarter, x)
        np.testing.assert_allclose(dx, x / 4, rtol=step)


def test_float32_weights_are_rounded_once_with_bfloat16_inputs():
    """bfloat16 activations and cotangents, float32 weights, unquantized cotangents.

    Oracle: float64 with ml_dtypes' E4M3. Rounded to bfloat16 once more, q * scale would be off by
    up to 2**-9.
    """
    x, w, g = draw(16, 24, dtype=ml_dtypes.bfloat16), draw(24, 8, seed=1), draw(16, 8, seed=2)
    g = g.astype(ml_dtypes.bfloat16)
    product = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=Recipe(gradient=None))
    _, back = jax.vjp(product, jnp.asarray(x), jnp.asarray(w))
    _, dw = back(jnp.asarray(g))
    qx, sx = quantized(x)
    assert dw.dtype == jnp.float32
    assert_close(dw, (qx * sx).T @ g.astype(np.float64), 16, np.abs(np.asarray(dw)).max())
    _, tangent = jax.jvp(lambda w: product(jnp.asarray(x), w, preferred_element_type=jnp.float32),
                         (jnp.asarray(w),), (jnp.asarray(w),))  # fmt: skip
    assert_close(tangent, (qx * sx) @ w.astype(np.float64), 24, np.abs(np.asarray(tangent)).max())
