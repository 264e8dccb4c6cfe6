"""The programs that quantize a tile: compiled once for each shape of tiles, dtype and format.

A tile is a matrix whose rows, or whose columns, are units. The elements of a unit share a scale.
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
    """Which elements are finite and larger in magnitude than the element format's max_finite."""
    with np.errstate(invalid="ignore"):  # NumPy warns about comparisons with NaN
        size = np.abs(x.astype(np.float32))
        return np.isfinite(size) & (size > np.float32(float(spec.element.max_finite)))


class Encoded(NamedTuple):
    """What `encoded` returns.

    Attributes:
      codes: The codes, in the shape of the tile.
      scales: The scale of each unit and the tensor scale, as stored; none if the format has none.
      unit: float32, the number by which the codes of each unit are multiplied; None without scale.
      signal, noise: Sums of (factor * x)^2 and (factor * (x - value))^2, float32, value being the
        dequantized x; not finite if an element or its scale is not.
    """

    codes: jax.Array
    scales: Scales
    unit: jax.Array | None
    signal: jax.Array
    noise: jax.Array


@functools.partial(jax.jit, static_argnums=(1, 2))
def unit_amax(x: jax.Array, axis: int, nan_wins: bool) -> jax.Array:
    """The largest finite |x| of each unit along `axis`, float32; a NaN wins if `nan_wins`."""
    return exact_float32(magnitude_max(x, (axis,), nan_wins=nan_wins))


@functools.partial(jax.jit, static_argnums=1)
def second_scale(amax: jax.Array, spec: BlockFormat) -> jax.Array:
    """The tensor scales, float32 as stored, for the amaxes of several tensors."""
    return tensor_scale_from(amax, spec)


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
    """Encodes a tile and measures the rounding error.

    Args:
      x: The tile.
      amax: For each unit the amax of its block; None if there is no scale.
      tensor_scale: One tensor scale, or one for each unit; None if the format has none.
      factor: A power of two that keeps the squares in `signal` and `noise` in range; one, or one
        for each unit.
      spec: The format; its blocks do not matter here.
      axis: The axis of the tile along which the elements of a unit lie.
      by_unit: Whether `signal` and `noise` are summed for each unit instead of over the tile.
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
    """(factor * x, factor * (x - value)) for the elements of a tile, float32."""
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
