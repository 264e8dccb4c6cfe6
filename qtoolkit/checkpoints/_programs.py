"""The programs that quantize a tile: compiled once for each of its few shapes, dtype and format.

A tile is a matrix of units, along one of its axes, whose elements share a scale.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import NEAREST, exact_float32, is_zero, projection_of
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling.internal import (
    Scales,
    block_codes,
    effective,
    element_values,
    magnitude_max,
    scale_from,
    scaled_values,
    tensor_scale_from,
)

_KEEPING_INF = projection_of("quantized", (), "nearest_even", "propagate")


def is_cast(spec: BlockFormat) -> bool:
    """Whether elements are rounded to float16, bfloat16 or float32, in which Inf stays Inf."""
    return spec.scale is None and spec.element.bits >= 16


def exceeds(x: np.ndarray, spec: BlockFormat) -> np.ndarray:
    """Which elements are finite and larger than the largest number of the element format."""
    with np.errstate(invalid="ignore"):  # of NaN
        size = np.abs(x.astype(np.float32))
        return np.isfinite(size) & (size > np.float32(float(spec.element.max_finite)))


class Encoded(NamedTuple):
    """What `encoded` returns.

    Attributes:
      codes: In the shape of the tile.
      scales: Of each unit, and of the tensor, as stored; none where codes are numbers.
      unit: float32, what codes of each unit are multiplied with; None where there is no scale.
      signal, noise: The sums of the squares of the elements and of the errors, x - value, each
        times the factor, float32; not finite where an element or its scale is not.
    """

    codes: jax.Array
    scales: Scales
    unit: jax.Array | None
    signal: jax.Array
    noise: jax.Array


@functools.partial(jax.jit, static_argnums=(1, 2))
def unit_amax(x: jax.Array, axis: int, nan_wins: bool) -> jax.Array:
    """The largest finite |x| of each unit, along `axis`, float32; or NaN where one is and wins."""
    return exact_float32(magnitude_max(x, (axis,), nan_wins=nan_wins))


@functools.partial(jax.jit, static_argnums=1)
def second_scale(amax: jax.Array, spec: BlockFormat) -> jax.Array:
    """The tensor scale, float32 as stored, of each of these amaxes of tensors."""
    return tensor_scale_from(amax, spec)


@functools.partial(jax.jit, static_argnums=2)
def scales_from(amax: jax.Array, tensor_scale: jax.Array | None, spec: BlockFormat) -> jax.Array:
    """The scales, as stored, of blocks with these amaxes."""
    return scale_from(amax, spec, tensor_scale)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def encoded(
    x: jax.Array,
    amax: jax.Array | None,
    tensor_scale: jax.Array | None,
    factor: jax.Array,
    spec: BlockFormat,
    axis: int,
    by_unit: bool = False,
) -> Encoded:
    """The codes of a tile, and what rounding to them did.

    Args:
      x: The tile.
      amax: Of the block of each unit; None where there is no scale.
      tensor_scale: Of the tensor, or of the tensor of each unit; None where the format has none.
      factor: A power of two, for `signal` and `noise`; likewise.
      spec: How elements are rounded; its blocks do not matter.
      axis: Of the tile, along which units lie.
      by_unit: Whether `signal` and `noise` are summed for each unit, not for all.
    """
    scale = nonzero = unit = None
    if amax is not None:
        scale, nonzero = scale_from(amax, spec, tensor_scale), ~is_zero(amax)
        unit = effective(scale, tensor_scale, spec)
    scales, units = Scales(scale, tensor_scale), of_units(spec, axis)
    codes = block_codes(x, units, _projection(spec), scales, nonzero)
    wide, error = errors(x, scales, factor, spec, axis)
    summed = axis if by_unit else None
    signal, noise = (jnp.sum(part * part, axis=summed) for part in (wide, error))
    return Encoded(codes, scales, unit, signal, noise)


@functools.partial(jax.jit, static_argnums=(3, 4))
def errors(
    x: jax.Array, scales: Scales, factor: jax.Array, spec: BlockFormat, axis: int
) -> tuple[jax.Array, jax.Array]:
    """The elements of a tile, and x - value, both times the factor, float32."""
    rate = factor
    if scales.scale is not None:
        rate = effective(scales.scale, scales.tensor_scale, spec) * factor
    u = scaled_values(x, of_units(spec, axis), scales)
    wide = exact_float32(x) * factor
    return wide, wide - element_values(u, spec, _projection(spec), None) * rate


@functools.cache
def of_units(spec: BlockFormat, axis: int) -> BlockFormat:
    """`spec` for tiles whose units lie along `axis`, each with a scale of its own."""
    return dataclasses.replace(spec, block=(None,), axes=(axis,), other_axes=1)


def _projection(spec: BlockFormat) -> Projection:
    return _KEEPING_INF if is_cast(spec) else NEAREST
