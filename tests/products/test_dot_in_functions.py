"""`qt.dot` in functions that a trace of the layer does not see into, under rules for parameters.

Oracle: NumPy with ml_dtypes, `up` in high precision and `down` in E4M3 by its largest magnitude.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx

import qtoolkit as qt

X, UP, DOWN = (
    jnp.float32(np.random.default_rng(i).normal(size=(n, 16))) for i, n in enumerate((8, 16, 16))
)


def with_vjp(x, w):
    @jax.custom_vjp
    def product(x, w):
        return qt.dot(x, w.T.astype(x.dtype))

    fwd = lambda x, w: (qt.dot(x, w.T), (x, w))  # noqa: E731
    product.defvjp(fwd, lambda kept, ct: (ct @ kept[1], ct.T @ kept[0]))
    return product(x, w.T)


def with_jvp(x, w):
    product = jax.custom_jvp(lambda x, w: qt.dot(x, w))
    product.defjvp(lambda xs, dots: (qt.dot(*xs), dots[0] @ xs[1] + xs[0] @ dots[1]))
    return product(x, w)


def in_jit(x, w):
    return jax.jit(lambda x: qt.dot(x, w))(x)


def in_vmap(x, w):
    return jax.vmap(lambda x: qt.dot(x, w))(x[None])[0]


class Nnx(nnx.Module):
    def __init__(self, product, names=("up", "kernel")):
        self.product, self.names = product, names
        for name, array in zip(names, (UP, DOWN), strict=True):
            setattr(self, name, nnx.Param(array))

    def __call__(self, x):
        for name in self.names:
            x = self.product(x, getattr(self, name)[...])
        return x


class Linen(linen.Module):
    product: object

    @linen.compact
    def __call__(self, x):
        kernels = [self.param(n, lambda _, w=w: w) for n, w in (("up", UP), ("kernel", DOWN))]
        for kernel in kernels:
            x = self.product(x, kernel)
        return x


def rounded(x):
    scale = np.float32(np.abs(x).max() / 448)
    return np.asarray(x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def expected(is_up_rounded):
    x, up, down = map(np.asarray, (X, UP, DOWN))
    y = rounded(x) @ rounded(up) if is_up_rounded else x @ up
    return rounded(y) @ rounded(down)


def trained(run):
    def of(model, x):
        y = run(model, x)
        return y.sum(), y

    return lambda model, x: nnx.grad(of, has_aux=True)(model, x)[1]


NEAR = {"rtol": 1e-4, "atol": 1e-4}
CALLS = {
    "eager": lambda model, x: model(x),
    "jit": nnx.jit(lambda model, x: model(x)),
    "grad": trained(lambda model, x: model(x)),
    "grad of remat": trained(nnx.remat(lambda model, x: model(x))),
    "jit of grad": nnx.jit(trained(lambda model, x: model(x))),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("product", [with_vjp, with_jvp, in_jit, in_vmap])
def test_dot_obeys_rules_for_parameters(product, call):
    for rules, is_up_rounded in (({"up": None}, False), ({}, True)):
        model = qt.nnx.wrap(Nnx(product), qt.Rules(rules, default=qt.Recipe()))
        np.testing.assert_allclose(
            CALLS[call](model, X), expected(is_up_rounded), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("product", [with_vjp, with_jvp, in_jit])
def test_dot_obeys_rules_for_parameters_in_linen(product):
    module = qt.linen.wrap(Linen(product), qt.Rules({"up": None}, default=qt.Recipe()))
    variables = module.init(jax.random.key(0), X)
    np.testing.assert_allclose(module.apply(variables, X), expected(False), **NEAR)


def test_dot_raises_where_it_does_not_know_the_parameter():
    model = Nnx(lambda x, w: jax.jit(qt.dot)(x, w))
    with pytest.raises(ValueError, match=r"dot: \(model\): rules name up, .* lhs @ rhs there"):
        qt.nnx.wrap(model, qt.Rules({"up": None}, default=qt.Recipe()))(X)
    plain = qt.nnx.wrap(model, qt.Recipe())
    np.testing.assert_allclose(plain(X), expected(True), **NEAR)
