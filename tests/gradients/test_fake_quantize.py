"""The end of the dtype's range, and second derivatives, of `fake_quantize`.

Other values and first derivatives are tested in tests/scaling.
"""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qtoolkit import BlockFormat, fake_quantize, formats, quantize

UNSCALED = [BlockFormat.tensor(name, scale=None) for name in ("float16", "e5m2")]
TENSOR = [BlockFormat.tensor(name) for name in ("e4m3fn", "e5m2", "int8", "int4")]
ASYMMETRIC = [
    BlockFormat.channel("uint8", zero_point=True),
    BlockFormat.tensor("int4", rule="range"),
]


@pytest.mark.sample(
    *("mxfp8_e4m3-float16", "mxfp6_e2m3-bfloat16", "mxfp4-bfloat16", "nvfp4-float16"),
    *("deepseek_128x128-float32", "deepseek_1x128_e8m0-bfloat16", "int4_group32-float16"),
    *("nf4_block64-float32", "float16, unscaled-float32", "e4m3fn by tensor-bfloat16"),
    *("uint8 by channel@-1, zero_point=True-float32", "int4 by tensor, rule=range-float32"),
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "spec", [*formats.BLOCK_FORMATS, *UNSCALED, *TENSOR, *ASYMMETRIC], ids=lambda spec: spec.name
)
def test_numbers_near_the_end_of_the_dtype_become_its_largest(spec, dtype):
    """Oracle: exact products of the stored elements and scales, clipped, rounded by ml_dtypes.

    float16's 65,504 is rounded up to 4 * 2**14 in MXFP4, which float16 does not hold.
    """
    most = float(ml_dtypes.finfo(dtype).max)
    x = np.linspace(0.45, 1, 128 * 256).reshape(128, 256) * most
    x[::3] *= -1
    x[:, ::5] /= 1000
    x = x.astype(dtype)
    x[1, 9] = np.inf
    got, q = fake_quantize(x, spec), quantize(x, spec)
    assert got.dtype == q.dequantize().dtype == x.dtype
    np.testing.assert_array_equal(wide(got), wide(q.dequantize()))
    np.testing.assert_array_equal(wide(got), wide(products(q, dtype)))
    assert np.isfinite(wide(got)).all()

    gradient = jax.grad(lambda x: jnp.sum(fake_quantize(x, spec).astype(jnp.float32) / most))(x)
    assert np.isfinite(wide(gradient)).all()


def wide(x):
    return np.asarray(x).astype(np.float64)


def products(q, dtype):
    """Elements times scales in float64, where the products of 24 bits are exact, then rounded."""
    spec = q.spec
    elements = spec.element.values()[np.asarray(q.codes)]
    if q.zero_point is not None:
        elements = elements - spread(q.zero_point, q)
    if q.scale is not None:
        scale = np.asarray(q.scale).astype(np.float64)
        if q.tensor_scale is not None:
            scale = (scale * float(q.tensor_scale)).astype(np.float32).astype(np.float64)
        elements = elements * spread(scale * float(Fraction(2) ** spec.element_exponent), q)
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(elements, -most, most).astype(np.float32).astype(dtype)


def spread(per_block, q):
    for axis, (n, length) in enumerate(zip(q.shape, q.blocks.lengths, strict=True)):
        per_block = np.take(np.asarray(per_block), np.arange(n) // length, axis)
    return per_block


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
