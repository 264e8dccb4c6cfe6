"""What products keep for their derivatives, and second derivatives.

Oracles: shapes and dtypes of the leaves of pullbacks; the gradients without a policy; for second
derivatives the product rule in float64, of operands that NumPy and ml_dtypes rounded.
"""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import qtoolkit as qt
from qtoolkit.products import CODES, Recipe, recipes

MATMUL = (((1,), (0,)), ((), ()))
RECIPES = {name: getattr(recipes, name) for name in ("te_current", "mxfp8", "token_scaled")}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def product(recipe):
    return functools.partial(qt.dot_general, dimension_numbers=MATMUL, recipe=recipe)


@pytest.mark.sample("te_current")
@pytest.mark.quick
@pytest.mark.parametrize("name", RECIPES)
def test_pullbacks_keep_codes(name):
    x, w = jnp.asarray(draw(8, 64)), jnp.asarray(draw(64, 16, seed=1))
    _, back = jax.vjp(jax.jit(product(RECIPES[name])), x, w)
    leaves = jax.tree.leaves(back)
    codes = [leaf.shape for leaf in leaves if leaf.dtype == np.uint8]
    assert sorted(codes) == [(8, 64), (64, 16)]
    for leaf in leaves:
        if leaf.dtype == np.float32 and leaf.shape in codes:
            assert not np.asarray(leaf).any()  # carriers of second derivatives: constants in jit


def test_only_what_the_gradient_needs_is_saved():
    x, w = jnp.asarray(draw(8, 64)), jnp.asarray(draw(64, 16, seed=1))
    _, back = jax.vjp(lambda w: product(recipes.te_current)(x, w), w)
    assert [a.shape for a in jax.tree.leaves(back) if a.dtype == np.uint8] == [(8, 64)]


@pytest.mark.sample("te_current")
@pytest.mark.parametrize("name", ["te_current", "token_scaled"])
def test_compiled_scans_stack_codes_and_no_float32_copy(name):
    """Linear layers, so that nothing but products keeps anything. Oracle: the types of the loop."""
    ws, x = jnp.zeros((5, 64, 64)), jnp.zeros((48, 64))
    layer = product(RECIPES[name])

    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0])

    text = jax.jit(jax.grad(loss)).lower(ws, x).compile().as_text()
    loops = re.findall(r"= (\(.*?\)) while\(", text)
    assert any("u8[5,48,64]" in loop for loop in loops)
    assert not any("f32[5,48,64]" in loop for loop in loops)


@pytest.mark.sample("te_current")
@pytest.mark.parametrize("name", ["te_current", "token_scaled"])
def test_checkpoints_may_save_the_codes_alone(name, capsys):
    x, w, ct = (jnp.asarray(draw(*s, seed=i)) for i, s in enumerate([(8, 64), (64, 16), (8, 16)]))
    ours = product(RECIPES[name])
    policy = jax.checkpoint_policies.save_only_these_names(CODES)
    saving = jax.checkpoint(lambda x, w: jnp.tanh(ours(x, w)), policy=policy)

    def gradients(function):
        return jax.jit(lambda x, w, ct: jax.vjp(function, x, w)[1](ct))(x, w, ct)

    expected = gradients(lambda x, w: jnp.tanh(ours(x, w)))
    for got, exact in zip(gradients(saving), expected, strict=True):
        np.testing.assert_array_equal(got, exact)
    jax.ad_checkpoint.print_saved_residuals(saving, x, w)
    lines = capsys.readouterr().out.splitlines()
    saved = [line.split()[0] for line in lines if "from the argument" not in line]
    codes, others = ([kind for kind in saved if kind.startswith("u8[") == is_code]
                     for is_code in (True, False))  # fmt: skip
    assert sorted(codes) == ["u8[64,16]", "u8[8,64]"]
    for kind in others:  # scales
        sizes = [int(n) for n in re.findall(r"\d+", kind.partition("[")[2])]
        assert np.prod(sizes) <= 64, lines


def tensor_rounded(x):
    scale = np.abs(x).max() / np.float32(448)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.float64(scale)


def mx_rounded(x, axis):
    """Blocks of 32 along `axis`; the least power of two with which amax does not saturate."""
    out = np.zeros(x.shape)
    for start in range(0, x.shape[axis], 32):
        part = np.take(x, range(start, min(start + 32, x.shape[axis])), axis)
        amax = np.abs(part).max(axis, keepdims=True).astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(amax / 448))
        q = (part / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
        at = [slice(None)] * 2
        at[axis] = slice(start, start + 32)
        out[tuple(at)] = q.astype(np.float64) * scale
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["tensor", "mxfp8"])
def test_second_derivatives_take_rounding_for_the_identity(name):
    """The tangent of grad(loss) for loss = sum(s * y**2) / 2, with unquantized cotangents.

    By the product rule, of y = x w with x and w as each product rounds them and scales that do not
    move: d(dx) = (s dy) w^T + (s y) u^T, d(dw) = x^T (s dy) + t^T (s y), dy = t w + x u.
    """
    fmt = "mxfp8" if name == "mxfp8" else "e4m3fn"
    recipe = Recipe(fmt, gradient=None)
    shapes = {"x": (6, 40), "w": (40, 5), "s": (6, 5), "t": (6, 40), "u": (40, 5)}
    x, w, s, t, u = (draw(*shape, seed=i) for i, shape in enumerate(shapes.values()))

    def loss(x, w):
        return jnp.sum(s * product(recipe)(x, w) ** 2) / 2

    run = jax.jit(lambda x, w, t, u: jax.jvp(jax.grad(loss, (0, 1)), (x, w), (t, u)))
    got, dots = run(x, w, t, u)
    if name == "mxfp8":
        forward, x_of_dw, w_of_dx = (mx_rounded(x, 1), mx_rounded(w, 0)), (x, 0), (w, 1)
        x_of_dw, w_of_dx = mx_rounded(*x_of_dw), mx_rounded(*w_of_dx)
    else:
        forward = x_of_dw, w_of_dx = tensor_rounded(x), tensor_rounded(w)
    s, t, u = (a.astype(np.float64) for a in (s, t, u))
    y = forward[0] @ forward[1]
    dy = t @ w_of_dx + x_of_dw @ u
    expected = (s * y) @ w_of_dx.T, x_of_dw.T @ (s * y)
    expected_dots = (s * dy) @ w_of_dx.T + (s * y) @ u.T, x_of_dw.T @ (s * dy) + t.T @ (s * y)
    for ours, exact in zip((*got, *dots), (*expected, *expected_dots), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
