"""Matmuls computed otherwise in programs. Oracle: the functions with quantized ones by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rewritten import multiplying, rewritten

import qtoolkit as qt
from qtoolkit.products import Delayed, Hadamard, Operand, Recipe, recipes

MATMUL = (((1,), (0,)), ((), ()))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X, W = draw(4, 8), draw(8, 8, seed=1)


def of_weights(w, x):
    return "w", ""


def test_values_and_gradients_equal_those_written_by_hand():
    """Of a loop; `test_program` has all others, `nnx/test_coverage` all kinds of matmuls."""
    recipe = recipes.te_current

    def function(dot):
        def loss(w, x):
            ws = jnp.stack([w, 2 * w, w.T])
            return lax.scan(lambda h, w: (jnp.tanh(dot(h, w)), dot(h, w).sum()), x, ws)[0].sum()

        return loss

    plain = function(jnp.matmul)
    ours = rewritten(plain, multiplying(recipe), of_weights)
    hand = function(lambda x, w: qt.dot_general(x, w, MATMUL, recipe=recipe))
    got, expected, unlike = (
        jax.tree.leaves(jax.jit(jax.value_and_grad(f, (0, 1)))(W, X)) for f in (ours, hand, plain)
    )
    for a, b, c in zip(got, expected, unlike, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert not np.allclose(a, c, rtol=1e-4)


def test_integers_and_quantized_products_stay():
    def function(w, x):
        counts = jnp.ones((2, 2), jnp.int32) @ jnp.ones((2, 2), jnp.int32)
        return counts, qt.dot_general(x, w, MATMUL)

    counts, y = rewritten(function, multiplying(recipes.mxfp8), of_weights)(W, X)
    np.testing.assert_array_equal(counts, 2)
    np.testing.assert_array_equal(y, qt.dot_general(X, W, MATMUL))


PAIR = Recipe((None, "e4m3fn"), "e5m2", wgrad=("e5m2", None))


def test_a_kernel_that_is_lhs_is_rounded_as_a_kernel():
    """w @ x by hand: the products of (x^T, w^T) with the recipe, transposed."""
    multiply = multiplying(PAIR)
    ct = draw(8, 4, seed=2)
    left = rewritten(lambda w, x: w @ x.T, multiply, of_weights)
    y, back = jax.vjp(left, W, X)
    hand, hand_back = jax.vjp(lambda w, x: qt.dot_general(x, w.T, MATMUL, recipe=PAIR).T, W, X)
    np.testing.assert_allclose(y, hand, rtol=1e-6, atol=1e-6)
    for a, b in zip(back(ct), hand_back(ct), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert not np.allclose(y, W @ X.T, rtol=1e-4)


def test_two_activations_are_both_rounded_as_activations():
    multiply = multiplying(PAIR)
    scores = rewritten(lambda w, x: x @ x.T, multiply, of_weights)(W, X)
    np.testing.assert_allclose(scores, X @ X.T, rtol=1e-6)  # a recipe for kernels alone
    both = rewritten(lambda w, x: x @ x.T, multiplying(Recipe(("e4m3fn", None))), of_weights)
    expected = qt.dot_general(X, X.T, MATMUL, recipe=Recipe())
    np.testing.assert_allclose(both(W, X), expected, rtol=1e-6, atol=1e-6)


SIX = [Operand(name) for name in ("e5m2", "int8", "int4", "e2m1fn", "e4m3fnuz", "mxfp4")]


def test_recipes_for_other_places():
    a, b, c, d, e, f = SIX
    recipe = Recipe((a, b), dgrad=(c, d), wgrad=(e, f))
    swapped = recipe.swapped()
    # The kernel is lhs: dgrad, of the cotangent and the activation, gives the kernel's gradient.
    assert (swapped.forward, swapped.dgrad, swapped.wgrad) == ((b, a), (f, e), (d, c))
    assert swapped.swapped() == recipe
    activations = recipe.of_activations()
    assert activations.forward == (a, a)
    assert activations.dgrad == (c, a)
    assert activations.wgrad == (a, c)
    delayed = Operand("e4m3fn", scaling=Delayed(8))
    kept = Recipe((delayed, None), dgrad=(None, delayed), wgrad=(delayed, delayed))
    assert kept.is_delayed
    assert kept.history == 8
    now = Operand("e4m3fn")
    assert kept.without_state() == Recipe((now, None), dgrad=(None, now), wgrad=(now, now))
    assert not kept.without_state().is_delayed
    for recipe in (recipes.nvfp4, kept, Recipe(Operand("nvfp4", transform=Hadamard()))):
        for other in (recipe.of_activations(), recipe.swapped(), recipe.without_state()):
            assert isinstance(other, Recipe)
            assert hash(other) is not None
