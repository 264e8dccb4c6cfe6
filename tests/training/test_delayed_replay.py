"""Two hundred steps of delayed scaling, replayed in NumPy, in both shells.

Each step is given its input, its kernel and the cotangent of its result, so that the replay knows
the three operands exactly. Oracles: NumPy for histories and scales, ml_dtypes for the rounding.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import qtoolkit as qt
from qtoolkit.products import Delayed, Operand

HISTORY = 4
# Of lhs, rhs and cotangent, as the rows of a history are.
DTYPES = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
LIMITS = np.float32([448, 448, 57344])


def recipe(margin):
    scaling = Delayed(HISTORY, margin)
    return qt.Recipe(*(Operand(fmt, scaling=scaling) for fmt in ("e4m3fn", "e5m2")))


def nnx_layer(margin):
    """A step, `(state, x, kernel, cotangent)` to `(y, gradient by kernel, state)`, and a state."""
    model = qt.nnx.wrap(nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)), recipe(margin))
    graph, params, start = nnx.split(model, nnx.Param, ...)

    def loss(model, x, cotangent):
        y = model(x)
        return jnp.sum(y * cotangent), y

    def step(state, x, kernel, cotangent):
        layer = nnx.merge(graph, jax.tree.map(lambda _: kernel, params), state, copy=True)
        (_, y), grads = qt.nnx.value_and_grad(loss, has_aux=True)(layer, x, cotangent)
        return y, jax.tree.leaves(grads)[0], nnx.split(layer, nnx.Param, ...)[2]

    return step, start


def linen_layer(margin):
    module = qt.linen.wrap(nn.Dense(8, use_bias=False), recipe(margin))
    start = module.init(jax.random.key(0), jnp.zeros((8, 16)))["qtoolkit"]

    def loss(variables, x, cotangent):
        y = module.apply(variables, x)
        return jnp.sum(y * cotangent), y

    def step(state, x, kernel, cotangent):
        variables = {"params": {"kernel": kernel}, "qtoolkit": state}
        of_loss = qt.linen.value_and_grad(loss, has_aux=True)
        (_, y), grads, state = of_loss(variables, x, cotangent)
        return y, grads["kernel"], state

    return step, start


def edge(amax):
    """The upper edge of the bucket of a magnitude: three bits of its fraction are kept."""
    bits = np.asarray(amax, np.float32).view(np.uint32)
    return (((bits >> 20) + 1) << 20).view(np.float32)


def operands(i):
    """Of step i: each grows and shrinks at a pace of its own."""
    rng = np.random.default_rng(i)
    shapes = {(8, 16): 2.5 ** np.sin(i), (16, 8): 2 ** np.cos(i / 3), (8, 8): 10 ** np.sin(i / 5)}
    return [np.float32(rng.normal(size=shape) * factor) for shape, factor in shapes.items()]


@pytest.mark.quick
@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("layer", [nnx_layer, linen_layer])
def test_two_hundred_steps_replayed_in_numpy(layer, margin):
    step, state = layer(margin)
    step = jax.jit(step)
    history = np.zeros((3, HISTORY), np.float32)
    saturated = np.zeros(3)
    for i in range(200):
        given = operands(i)
        y, gradient, state = step(state, *given)
        amaxes = np.array([np.abs(v).max() for v in given])
        newest = history.max(axis=1) * np.float32(2**margin)
        scales = np.where(newest > 0, newest, amaxes) / LIMITS  # the first step: current ones
        quotients = [v / scale for v, scale in zip(given, scales, strict=True)]
        saturated += [np.abs(q).max() > limit for q, limit in zip(quotients, LIMITS, strict=True)]
        x, kernel, cotangent = (
            np.clip(q, -limit, limit).astype(dtype).astype(np.float64) * scale
            for q, limit, dtype, scale in zip(quotients, LIMITS, DTYPES, scales, strict=True)
        )
        # Sums of 16 and of 8 terms in float32, and two products with scales.
        close = functools.partial(np.testing.assert_allclose, rtol=0, err_msg=f"step {i}")
        close(y, x @ kernel, atol=18 * 2.0**-24 * (np.abs(x) @ np.abs(kernel)).max())
        terms = np.abs(x.T) @ np.abs(cotangent)
        close(gradient, x.T @ cotangent, atol=18 * 2.0**-24 * terms.max())
        history = np.concatenate([edge(amaxes)[:, None], history[:, :-1]], axis=1)
        (kept,) = (leaf for leaf in jax.tree.leaves(state) if leaf.shape == history.shape)
        np.testing.assert_array_equal(kept, history, err_msg=f"step {i}")
    # A margin of 3 is room for all; without it each operand saturates in some steps.
    assert (saturated > 5).all() if margin == 0 else not saturated.any()
