"""`fake_quantize`: the rounding by blocks of `scaling` with a derivative."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qtoolkit.casts import Projection, Stochastic
from qtoolkit.casts.internal import hinting, result_dtype, types_of
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.gradients._estimators import Estimator, estimator, tangent
from qtoolkit.scaling.internal import (
    Scales,
    block_codes,
    block_values,
    blocks_of,
    check_quantize,
    dequantized,
    find_scales,
    scaled_values,
    unclamped_range,
)


@hinting
def fake_quantize(
    x: ArrayLike,
    spec: SpecLike,
    *,
    scale: ArrayLike | None = None,
    tensor_scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
    gradient: str | Estimator = "clipped",
) -> jax.Array:
    """Rounds `x` to the values of block format `spec`, keeps its dtype, and is differentiable.

    Bit for bit `quantize(x, spec, ...).dequantize()`, without the codes.

    Args:
      x, spec, scale, tensor_scale, zero_point, rounding, saturation, key, random_bits,
        index_offset: As in `quantize`.
      gradient: The slope that replaces the derivative of the rounding, see `fake_cast`, at
        x / scale + zero point. Numbers up to half a step beyond the range of the elements count as
        inside: if the scale was rounded down, the largest element of a block lies there, and
        clamping it is only rounding.

    Returns:
      Shape and dtype of `x`. A rounded number that overflows the dtype becomes its largest number:
      MXFP4 rounds 65,504 to 65,536, which float16 does not have.

    Raises:
      TypeError, ValueError: As `quantize`; unknown `gradient`.

    Gradient: the tangent times the estimator's slope, by `custom_jvp`. Scales count as constants,
    also those that are computed from `x`; `qtoolkit.gradients.lsq` learns them.

    Examples:
      >>> x = jnp.asarray([0.1, -0.7, 0.3, 2.5])
      >>> qt.fake_quantize(x, "int4", scale=0.25)  # 2.5 lies beyond 7 * 0.25
      Array([ 0.  , -0.75,  0.25,  1.75], dtype=float32)
      >>> jax.grad(lambda x: qt.fake_quantize(x, "int4", scale=0.25).sum())(x)
      Array([1., 1., 1., 0.], dtype=float32)
    """
    x, spec, fixed, projection = check_quantize(
        "fake_quantize", x, spec, scale, tensor_scale, zero_point, rounding, saturation, key,
        random_bits, index_offset,
    )  # fmt: skip
    rule = estimator("fake_quantize", gradient)
    if isinstance(x, jax.Array):
        return _fake_quantize_jitted(x, fixed, projection, spec, rule)
    with types_of(x):  # a constant of 64 bits, which are off in JAX
        return _through_codes(x, fixed, projection, spec, result_dtype(x))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _through_codes(
    x: np.ndarray, fixed: Scales, projection: Projection, spec: BlockFormat, dtype: np.dtype
) -> jax.Array:
    array = jnp.asarray(x)
    scales, nonzero = find_scales(array, spec, fixed)
    codes = block_codes(array, spec, projection, scales, nonzero)
    return dequantized(codes, scales, blocks_of(array, spec), spec, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _fake_quantize(
    x: jax.Array, fixed: Scales, projection: Projection, spec: BlockFormat, rule: Estimator
) -> jax.Array:
    scales, nonzero = find_scales(x, spec, fixed)
    return block_values(x, spec, projection, scales, nonzero, x.dtype)


@_fake_quantize.defjvp
def _fake_quantize_jvp(
    spec: BlockFormat, rule: Estimator, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (x, fixed, projection), (x_dot, _, _) = primals, tangents
    y = _fake_quantize(x, fixed, projection, spec, rule)
    scales, _ = find_scales(x, spec, fixed)
    u = _scaled(x, scales, spec)
    # Values that are rounded to an end of the range lie up to half a step beyond it. They count as
    # that end: clamping them is only rounding, and the slope of "clipped" there is 1.
    lowest, largest = float(spec.element.lowest + spec.narrow_range), float(spec.element.max_finite)
    first, last = map(np.float32, unclamped_range(spec))
    u = jnp.where((u < np.float32(lowest)) & (u >= first), np.float32(lowest), u)
    u = jnp.where((u > np.float32(largest)) & (u <= last), np.float32(largest), u)
    return y, tangent(rule, u, x_dot, spec.element, (lowest, largest))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _scaled(x: jax.Array, scales: Scales, spec: BlockFormat) -> jax.Array:
    return scaled_values(x, spec, scales)


@_scaled.defjvp
def _scaled_jvp(spec: BlockFormat, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # For second derivatives, through slopes that depend on `x`. Scales are constants.
    x, scales = primals
    one, zero = (scaled_values(jnp.full_like(x, number), spec, scales) for number in (1, 0))
    factor = lax.stop_gradient(one - zero)  # 1 / scale, whether there are zero points or not
    factor = jnp.where(jnp.isfinite(factor), factor, jnp.zeros_like(factor))
    return _scaled(x, scales, spec), tangents[0].astype(factor.dtype) * factor


_fake_quantize_jitted = jax.jit(_fake_quantize, static_argnums=(3, 4))
