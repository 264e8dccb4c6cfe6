"""The programs that quantize tiles: compiled once for each shape of tiles, dtype and format."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import NEAREST, exact_float32, product, projection_of
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling.internal import (
    Scales,
    asymmetric,
    block_codes,
    effective,
    element_values,
    magnitude_max,
    scale_from,
    scaled_values,
    tensor_scale_from,
)

_KEEPING_INF = projection_of("quantized", (), "nearest_even", "propagate")


class Encoded(NamedTuple):
    """The codes of a tile and its sums, one for each unit or one for the tile.

    Attributes:
      codes: Unsigned codes.
      signal, noise: The sums of (factor * x)^2 and of (factor * (x - value))^2, where `value` is
        what the code of x stands for. Not finite if an element is not.
      overflowed: How many finite elements exceed the largest value of the format.
    """

    codes: jax.Array
    signal: jax.Array
    noise: jax.Array
    overflowed: jax.Array


@functools.partial(jax.jit, static_argnums=(1, 2))
def unit_amax(x: jax.Array, axis: int, nan_wins: bool) -> jax.Array:
    """The largest finite |x| of each unit, float32; NaN if `nan_wins` and the unit has a NaN."""
    return exact_float32(magnitude_max(x, (axis,), nan_wins=nan_wins))


@functools.partial(jax.jit, static_argnums=1)
def unit_range(x: jax.Array, axis: int) -> jax.Array:
    """[2, units]: the least and the largest finite element of each unit; NaN if it has a NaN."""
    wide = exact_float32(x)
    finite = jnp.where(jnp.isfinite(wide), wide, np.float32(0))
    nan = jnp.where(jnp.any(jnp.isnan(wide), axis), np.float32(np.nan), np.float32(0))
    return jnp.stack([jnp.min(finite, axis) + nan, jnp.max(finite, axis) + nan])


@functools.partial(jax.jit, static_argnums=2)
def range_scales(
    lowest: jax.Array, largest: jax.Array, spec: BlockFormat
) -> tuple[jax.Array, jax.Array]:
    """The scale and the zero point of each block, as stored."""
    return asymmetric(lowest, largest, spec)


@functools.partial(jax.jit, static_argnums=1)
def tensor_scales_from(amaxes: jax.Array, spec: BlockFormat) -> jax.Array:
    return tensor_scale_from(amaxes, spec)


@functools.partial(jax.jit, static_argnums=2)
def block_scales(
    amaxes: jax.Array, tensor_scale: jax.Array | None, spec: BlockFormat
) -> tuple[jax.Array, jax.Array]:
    """The scale of each block as stored, and its float32 multiplier, see `_scales`."""
    scale = scale_from(amaxes, spec, tensor_scale)
    return scale, effective(scale, tensor_scale, spec)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def encoded(
    x: jax.Array,
    scale: jax.Array | None,
    nonzero: jax.Array | None,
    tensor_scale: jax.Array | None,
    zero_point: jax.Array | None,
    factor: jax.Array,
    spec: BlockFormat,
    axis: int,
    by_unit: bool,
) -> Encoded:
    """Encodes a tile and measures the rounding error.

    Args:
      scale, nonzero, tensor_scale, zero_point: For each unit the scale of its block, whether the
        amax of the block is above 0, the tensor scale and the zero point; None if the format has
        none.
      factor: A power of two that keeps squares in range: one number, or one for each unit.
      by_unit: Whether to sum each unit instead of the whole tile.
    """
    scales = Scales(scale, tensor_scale, zero_point)
    codes = block_codes(x, spec, _projection(spec), scales, nonzero)
    scaled, error = _errors(x, scales, factor, spec)
    overflowed = jnp.zeros(())
    summed = axis if by_unit else None
    if _is_cast(spec):
        magnitude = jnp.abs(exact_float32(x))
        largest = np.float32(float(spec.element.max_finite))
        exceeds = (magnitude > largest) & jnp.isfinite(magnitude)
        overflowed = jnp.sum(exceeds.astype(jnp.float32), axis=summed)
    signal, noise = (jnp.sum(part * part, axis=summed) for part in (scaled, error))
    return Encoded(codes, signal, noise, overflowed)


def _errors(
    x: jax.Array, scales: Scales, factor: jax.Array, spec: BlockFormat
) -> tuple[jax.Array, jax.Array]:
    """(factor * x, factor * (x - value)) for the elements of a tile; see `Encoded`."""
    scale, tensor_scale, zero_point = scales
    multiplier = factor if scale is None else effective(scale, tensor_scale, spec) * factor
    quotients = scaled_values(x, spec, Scales(scale, tensor_scale))
    elements = element_values(quotients, spec, _projection(spec), zero_point)
    scaled = exact_float32(x) * factor
    # `product` is always rounded to float32, as in `dequantize`. With `*` XLA may fuse product and
    # difference into one operation that does not round the product.
    return scaled, scaled - product(elements, multiplier)


@functools.partial(jax.jit, static_argnums=(6, 7))
def finite_sums(
    x: jax.Array,
    scale: jax.Array | None,
    nonzero: jax.Array | None,
    tensor_scale: jax.Array | None,
    zero_point: jax.Array | None,
    factor: jax.Array,
    spec: BlockFormat,
    axis: int,
) -> jax.Array:
    """[3, units]: signal, noise and how many elements are NaN or infinite.

    For the few tiles that have such elements, which signal and noise do not count here.
    """
    scaled, error = _errors(x, Scales(scale, tensor_scale, zero_point), factor, spec)
    is_counted = jnp.isfinite(scaled) & jnp.isfinite(error)
    nonfinite = (~jnp.isfinite(exact_float32(x))).astype(jnp.float32)
    squares = (jnp.where(is_counted, part * part, np.float32(0)) for part in (scaled, error))
    return jnp.stack([jnp.sum(part, axis=axis) for part in (*squares, nonfinite)])


@functools.cache
def unit_spec(spec: BlockFormat, axis: int) -> BlockFormat:
    """The format with one block for each unit, where the elements of a unit lie along `axis`."""
    return dataclasses.replace(spec, block=(None,), axes=(axis,), other_axes=1)


def _is_cast(spec: BlockFormat) -> bool:
    """Whether weights are rounded to float16, bfloat16 or float32, in which Inf stays Inf."""
    return spec.scale is None and spec.element.bits >= 16


def _projection(spec: BlockFormat) -> Projection:
    return _KEEPING_INF if _is_cast(spec) else NEAREST
