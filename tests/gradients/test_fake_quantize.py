"""Second derivatives of `fake_quantize`; its values and first ones are tested in tests/scaling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qtoolkit import BlockFormat, fake_quantize, quantize


@pytest.mark.parametrize("spec", ["int4", "tensor with zero point", "mxfp4"])
def test_second_derivatives_take_the_slope_for_a_function_of_x(spec):
    """Oracle: differences of the first derivative, which the slope gives at x / scale."""

    @dataclasses.dataclass(frozen=True)
    class Bell:
        def slope(self, x, lower, upper, fmt):
            return jnp.exp(-x * x / 16)

    x = jnp.float32(np.random.default_rng(0).normal(size=32))
    spec = BlockFormat.tensor("uint4", zero_point=True) if "zero" in spec else spec
    scales = scaling_of(x, spec)

    def rounded(x):
        return jnp.sum(fake_quantize(x, spec, gradient=Bell(), **scales))

    first, step = jax.grad(rounded), np.float32(2**-8)
    expected = (first(x + step) - first(x - step)) / (2 * step)
    got = jnp.diagonal(jax.hessian(rounded)(x))
    np.testing.assert_allclose(got, expected, rtol=0.01, atol=0.01 * np.abs(expected).max())


def scaling_of(x, spec):
    """The scales of `x` as arguments: what is differenced must not move them."""
    found = quantize(x, spec)
    names = ("scale", "tensor_scale", "zero_point")
    return {name: getattr(found, name) for name in names if getattr(found, name) is not None}
