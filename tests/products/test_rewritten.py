"""Matmuls computed otherwise in programs. Oracle: the functions with quantized ones by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rewritten import multiplying, rewritten

import qtoolkit as qt
from qtoolkit.products import Delayed, Hadamard, Operand, Recipe, recipes

MATMUL = (((1,), (0,)), ((), ()))
CONV = ("NWC", "WIO", "NWC")


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X, W = draw(4, 8), draw(8, 8, seed=1)
SIZES = jnp.array([1, 3], jnp.int32)


class Products:
    """Either plain ones or quantized ones, as functions write them."""

    def __init__(self, recipe=None):
        self.recipe = recipe

    def dot(self, x, w):
        if self.recipe is None:
            return x @ w
        return qt.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), recipe=self.recipe)

    def einsum(self, subscripts, x, w):
        if self.recipe is None:
            return jnp.einsum(subscripts, x, w)
        return qt.einsum(subscripts, x, w, recipe=self.recipe)

    def conv(self, x, w):
        if self.recipe is None:
            return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=CONV)
        return qt.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=CONV, recipe=self.recipe
        )

    def ragged(self, x, w):
        if self.recipe is None:
            return lax.ragged_dot(x, w, SIZES)
        return qt.ragged_dot(x, w, SIZES, recipe=self.recipe)


def in_jit(p, w, x):
    return jax.jit(lambda x, w: p.dot(jnp.tanh(p.dot(x, w)), w))(x, w)


def in_scan(p, w, x):
    ws = jnp.stack([w, 2 * w, w.T])
    return lax.scan(lambda h, w: (jnp.tanh(p.dot(h, w)), p.dot(h, w).sum()), x, ws)


def in_cond(p, w, x):
    branches = (lambda x: p.dot(x, w), lambda x: jnp.sin(p.dot(p.dot(x, w), w)))
    return [lax.cond(x[0, 0] > bound, *branches, x) for bound in (-100.0, 100.0)]


def in_while(p, w, x):
    def test(carry):
        return (carry[0] < 3) & (jnp.sum(p.dot(carry[1], w)) < 1e9)

    return lax.while_loop(test, lambda carry: (carry[0] + 1, jnp.tanh(p.dot(carry[1], w))), (0, x))


def in_remat(p, w, x):
    return jax.checkpoint(lambda x: jnp.tanh(p.dot(x, w)) * 2)(x)


def with_einsum(p, w, x):
    return p.einsum("ij,jk->ik", x, w) + p.einsum("...j,jk->...k", x[0], w)


def with_conv(p, w, x):
    return p.conv(x[None], w[None])


def with_ragged(p, w, x):
    return p.ragged(x, jnp.stack([w, w + 1]))


# How many times `multiply` is called at least: once for each matmul of a program, more often where
# JAX traces a body anew.
FUNCTIONS = {
    in_jit: 2, in_scan: 2, in_cond: 6, in_while: 2, in_remat: 1, with_einsum: 2, with_conv: 1,
    with_ragged: 1,
}  # fmt: skip


def of_weights(w, x):
    return "w", ""


@pytest.mark.sample("in_jit")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_products_equal_those_written_by_hand(function):
    recipe = recipes.te_current
    found = []
    multiply = multiplying(recipe)

    def counting(matmul, *rest):
        found.append(matmul)
        return multiply(matmul, *rest)

    plain = lambda w, x: function(Products(), w, x)  # noqa: E731
    got = rewritten(plain, counting, of_weights)(W, X)
    hand = function(Products(recipe), W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), got, hand)
    unlike = function(Products(), W, X)
    differ = [not np.allclose(a, b, rtol=1e-4) for a, b in zip(*map(jax.tree.leaves, (got, unlike)),
                                                              strict=True)]  # fmt: skip
    assert any(differ)
    assert len(found) >= FUNCTIONS[function]
    text = str(jax.make_jaxpr(rewritten(plain, multiply, of_weights))(W, X))
    # What is left are the products within quantized ones.
    assert text.count("name=qtoolkit_product") >= 1


@pytest.mark.quick
def test_gradients_equal_those_written_by_hand():
    recipe = recipes.te_current

    def loss(products):
        return lambda w, x: jnp.sum(in_scan(products, w, x)[0] ** 2)

    ours = rewritten(loss(Products()), multiplying(recipe), of_weights)
    got, expected = (jax.jit(jax.grad(f, (0, 1)))(W, X) for f in (ours, loss(Products(recipe))))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


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
