"""What is known of the values of a program, each analysis alone, over a jaxpr.

Oracles: which of two inputs a value depends on, by derivatives; the axis that a number written into
an input along its features comes out at; NumPy on the original of a parameter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qtoolkit as qt
from qtoolkit.products._analyses import (
    ACTIVATION,
    CONSTANT,
    Source,
    Step,
    along,
    features_of,
    original_of,
    sources_of,
)

W, X = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
FUNCTIONS = {
    "cast": (lambda w, x: w.astype(jnp.bfloat16), "w", ()),
    "transpose": (lambda w, x: w.T, "w", (1, 0)),
    "twice": (lambda w, x: w.T.T, "w", (0, 1)),
    "scaled": (lambda w, x: 2 * w + jnp.arange(3.0), "w", None),
    "mixed": (lambda w, x: w * x, None, None),
    "input": (lambda w, x: jnp.tanh(x), None, None),
    "in_jit": (lambda w, x: jax.jit(lambda w: w * 2)(w), "w", None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_which_values_are_parameters(name):
    function, parameter, order = FUNCTIONS[name]
    jaxpr = jax.make_jaxpr(function)(W, X).jaxpr
    (source,) = along(jaxpr, sources_of, [Source("w", order=()), ACTIVATION], CONSTANT)
    assert source == Source(parameter, order=order)
    by_x = jax.jacfwd(lambda x: function(W, x).astype(jnp.float32))(X)
    by_w = jax.jacfwd(lambda w: function(w, X).astype(jnp.float32))(W)
    assert (parameter is not None) == (bool(jnp.any(by_w)) and not jnp.any(by_x))


def test_a_value_of_numbers_alone_is_a_constant():
    jaxpr = jax.make_jaxpr(lambda w: jnp.arange(3) + 1)(W).jaxpr
    assert along(jaxpr, sources_of, [Source("w", order=())], CONSTANT) == [CONSTANT]


MOVES = {
    "swapaxes": lambda x: x.swapaxes(-1, -2),
    "heads": lambda x: x.reshape(2, 3, 2, 2),
    "transposed": lambda x: x.transpose(2, 0, 1),
    "elementwise": lambda x: jnp.tanh(x) * 2,
    "squeezed": lambda x: x[:, None].swapaxes(2, 3)[:, 0],
}


@pytest.mark.parametrize("name", MOVES)
def test_where_features_lie(name):
    """A number in one feature of all tokens: the results differ along no other axis alone."""
    function = MOVES[name]
    x = np.zeros((2, 3, 4), np.float32)
    x[..., 3] = 1
    out = np.asarray(function(jnp.asarray(x)))
    jaxpr = jax.make_jaxpr(function)(x).jaxpr
    (place,) = along(jaxpr, features_of, [-1], -1)
    others = tuple(axis for axis in range(out.ndim) if axis - out.ndim != place)
    if name != "heads":  # where the features are cut in two axes, the last one has them
        assert np.ptp(out, axis=place).max() > 0
        assert np.ptp(out, axis=others).max() == 0


def test_what_a_product_rounds():
    """A bfloat16 copy is rounded from its float32 original, also behind a transpose."""

    def after(function, x, original):
        (eqn,) = jax.make_jaxpr(function)(x).eqns
        bind = lambda x: eqn.primitive.bind(x, **eqn.params)  # noqa: E731
        return original_of(Step.of(eqn), bind, x, original)

    half = W.astype(jnp.bfloat16)
    assert after(lambda w: w.astype(jnp.bfloat16), W, None) is W
    np.testing.assert_array_equal(after(lambda w: w.T, half, W), np.asarray(W).T)
    assert after(jnp.negative, half, W) is None
    assert after(lambda w: w.astype(jnp.float8_e4m3fn), W, None) is None  # the user's rounding
    stored = qt.quantize(W, "int8")
    np.testing.assert_array_equal(
        after(lambda w: w.T, W, stored).dequantize(), np.asarray(stored.dequantize()).T
    )
