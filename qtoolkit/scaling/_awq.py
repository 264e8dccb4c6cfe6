"""AWQ (activation-aware weight quantization): factors for the input channels of a kernel."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit import formats
from qtoolkit.casts.internal import (
    NEAREST,
    check_differentiable,
    exact_float32,
    nearest_power_of_two,
)
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.scaling._blocks import scale_shape
from qtoolkit.scaling._contraction import Contraction, check_inputs, squared_error
from qtoolkit.scaling._engine import block_values
from qtoolkit.scaling._find_scales import find_scales
from qtoolkit.scaling._hessian import Hessian
from qtoolkit.scaling._input_transform import InputTransform, Rotation

Array = jax.Array
_LIMIT = np.float32(2.0**20)
_POWERS = 20  # that are tried, from 0 to 1
Axis = int | tuple[int, ...] | Contraction
# How a kernel is rounded, its axes in the matmul, and the rotation that follows its factors.
Layout = tuple[BlockFormat, Contraction, Rotation | None]


def awq_factors(
    kernels: Sequence[tuple[Array, SpecLike, Axis] | tuple[Array, SpecLike, Axis, Rotation | None]],
    hessian: Hessian,
    *,
    power_of_two: bool = False,
    where: str = "awq_factors",
) -> Array:
    """Search AWQ's factors, by which the input channels of a kernel are multiplied before rounding.

    The rounding error of a channel counts more if its inputs x are large. So these channels get
    large factors, and x is divided by them: `(x / factors) @ rounded(factors * w)`. The factor of a
    channel is its mean |x| to a power between 0 and 1; then all are scaled, so that the largest
    times the smallest is 1. Of several powers, take the one with the least squared error of the
    result. `hessian` suffices to compute this error, so inputs need not be stored.

    Args:
      kernels: One or more that share their inputs, such as those of queries, keys and values, for
        which the errors are added: each as a tuple (w, spec, axis), which are as in `gptq`. A
        fourth item is a rotation of the channels after the factors.
      hessian: The sums over the inputs x, as `Hessian.observe` collects them.
      power_of_two: Whether to round factors to powers of two. Then multiplying by them is exact.
      where: What messages of errors begin with, which are those of `gptq`.

    Returns:
      [channels], float32, positive. 1 for channels whose inputs were all zeros.

    Source: arXiv:2306.00978 (AWQ), section 3.2, equations 4 and 5.
    """
    arrays, layouts = [], []
    for kernel, spec, axis, *rotation in kernels:
        w = lax.stop_gradient(check_differentiable(where, kernel, wide=False))
        contraction = Contraction.of(where, w.shape, axis)
        resolved = contraction.along(formats.spec(spec), w.shape)
        scale_shape(where, resolved, w.shape)
        check_inputs(where, w, hessian, contraction)
        arrays.append(w)
        layouts.append((resolved, contraction, rotation[0] if rotation else None))
    return _search(tuple(arrays), hessian, tuple(layouts), bool(power_of_two))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _search(
    kernels: tuple[Array, ...],
    hessian: Hessian,
    layouts: tuple[Layout, ...],
    power_of_two: bool,
) -> Array:
    # All kernels read the same inputs, so any of them says which channels share a factor.
    contraction, shape = layouts[0][1], kernels[0].shape
    magnitudes = contraction.pooled(exact_float32(hessian.magnitude), shape)
    mean = magnitudes / jnp.maximum(jnp.sum(hessian.rows), 1).astype(jnp.float32)
    hessians = hessian.total.reshape(-1, *hessian.total.shape[-2:])  # one for each expert or group

    def factors_of(power: Array) -> Array:
        # Compute with logarithms, because the largest times the smallest mean may overflow.
        has_inputs = mean > 0
        logs = jnp.where(has_inputs, power * jnp.log2(jnp.where(has_inputs, mean, 1)), 0)
        largest = jnp.max(logs, -1, keepdims=True, where=has_inputs, initial=-np.inf)
        smallest = jnp.min(logs, -1, keepdims=True, where=has_inputs, initial=np.inf)
        centre = jnp.where(largest >= smallest, (largest + smallest) / 2, 0)
        factors = jnp.clip(jnp.exp2(logs - centre), 1 / _LIMIT, _LIMIT)
        factors = jnp.where(has_inputs & (power > 0), factors, 1)
        return nearest_power_of_two(factors) if power_of_two else factors

    def loss_of(power: Array) -> Array:
        factors = factors_of(power)
        return sum(
            (_loss(w, factors, hessians, *of_w) for w, of_w in zip(kernels, layouts, strict=True)),
            jnp.zeros((), hessians.dtype),
        )

    powers = jnp.linspace(0, 1, _POWERS, dtype=jnp.float32)  # with 0, all factors are 1
    losses = lax.map(loss_of, powers)
    return factors_of(powers[jnp.argmin(losses)])


def _loss(
    w: Array,
    factors: Array,
    hessians: Array,
    spec: BlockFormat,
    contraction: Contraction,
    rotation: Rotation | None,
) -> Array:
    """The squared error of the result of a matmul whose kernel is rounded with these factors."""
    w, factors = exact_float32(w), contraction.factors(factors, w.shape)
    rotated = InputTransform(None, rotation)
    multiplied = rotated.of_kernel(w * factors)
    scales, nonzero = find_scales(multiplied, spec)
    rounded = rotated.undone(block_values(multiplied, spec, NEAREST, scales, nonzero))
    return squared_error(contraction.matrices(rounded / factors - w), hessians)
