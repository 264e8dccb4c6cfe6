"""What is known of an operand: whether it is a parameter, and its original."""

import jax
import jax.numpy as jnp
import numpy as np

import qtoolkit as qt
from qtoolkit.products._origins import ACTIVATION, CONSTANT, Origin, Parameter, Step, original_of

X, W = (np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32) for seed in (0, 1))
X, W = jnp.asarray(X), jnp.asarray(W)
STORED = qt.quantize(W, "int8")


def test_of_inputs():
    assert Origin.of(None, X) == ACTIVATION
    assert not ACTIVATION.is_constant
    assert CONSTANT.is_constant
    kernel = Origin.of(Parameter("", "kernel"), W)
    assert (kernel.order, kernel.is_trained, kernel.stored) == ((), True, "")
    stored = Origin.of(Parameter("", "kernel"), qt.quantize(W, "int8"))
    assert not stored.is_trained
    assert "int8" in stored.stored


def test_originals_behind_one_operation():
    """Oracle: NumPy on the original."""

    def after(function, x, original):
        (eqn,) = jax.make_jaxpr(function)(x).eqns
        bind = lambda x: eqn.primitive.bind(x, **eqn.params)  # noqa: E731
        return original_of(Step.of(eqn), bind, x, original)

    half = W.astype(jnp.bfloat16)
    assert after(lambda w: w.astype(jnp.bfloat16), W, None) is W
    np.testing.assert_array_equal(after(lambda w: w.T, half, W), np.asarray(W).T)
    assert after(jnp.negative, half, W) is None
    assert after(lambda w: w.astype(jnp.float8_e4m3fn), W, None) is None  # the user's rounding
    np.testing.assert_array_equal(
        after(lambda w: w.T, W, STORED).dequantize(), np.asarray(STORED.dequantize()).T
    )
