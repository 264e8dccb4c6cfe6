"""A linear function with a transpose of its own. The oracles are those functions, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refused import refused

from qtoolkit.gradients import linear_with_transpose

X = jnp.asarray([1.0, 2.0, 3.0], jnp.bfloat16)


def doubled(residuals, x):
    return x + x


def tripled(residuals, cotangent):
    return 3 * cotangent


@pytest.mark.quick
@pytest.mark.parametrize("is_known", [False, True])
def test_forward_mode_doubles_and_reverse_mode_triples(is_known):
    out_type = jax.typeof(X) if is_known else None

    def function(x):
        return linear_with_transpose(doubled, tripled, (), x, out_type)

    for transformed in (function, jax.jit(function)):
        out, dot = jax.jvp(transformed, (X,), (X,))
        (gradient,) = jax.vjp(transformed, X)[1](X)
        for found, factor in ((out, 2), (dot, 2), (gradient, 3)):
            assert found.dtype == X.dtype
            np.testing.assert_array_equal(found, factor * X)
    mapped = jax.vmap(jax.grad(lambda x: function(x).sum()))(jnp.stack([X, X]))
    np.testing.assert_array_equal(mapped, jnp.full((2, 3), 3, jnp.bfloat16))


def test_what_is_known_is_not_traced_in_reverse_mode():
    calls = []

    def counted(residuals, x):
        calls.append(x)
        return doubled(residuals, x)

    def function(x, out_type=None):
        return linear_with_transpose(counted, tripled, (), x, out_type).sum()

    jax.make_jaxpr(jax.linear_transpose(lambda x: function(x, jax.typeof(X)), X))(X[0])
    assert calls == []
    jax.make_jaxpr(jax.linear_transpose(function, X))(X[0])
    assert len(calls) == 1


def test_a_transpose_of_another_shape_is_named_by_jax():
    def function(x):
        return linear_with_transpose(doubled, lambda residuals, cotangent: cotangent[0], (), x)

    gradient = jax.grad(lambda x: function(x).sum())
    for call in (gradient, jax.jit(gradient), lambda x: jax.eval_shape(gradient, x)):
        refused(ValueError, r"Expected cotangent type bfloat16\[3\]", call, X)
