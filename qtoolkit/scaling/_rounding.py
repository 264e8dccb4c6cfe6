"""Rounding by blocks: scales found, elements divided by them and rounded, and the way back.

x is float32, float16 or bfloat16; the arithmetic is on float32 views of it (`Blocks`).
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts import (
    Draw,
    Rounding,
    codes_of,
    exact_float32,
    is_zero,
    pack,
    product,
    random_of,
    round_values,
    stored,
    values_of,
)
from qtoolkit.formats import BlockFormat, FloatFormat, IntFormat, format
from qtoolkit.scaling._blocks import Blocks, magnitude_max
from qtoolkit.scaling._scales import (
    are_safe,
    asymmetric,
    at_least_sticky,
    divided,
    effective,
    exponents,
    factors,
    scale_from,
    scaled,
    shifted,
    tensor_scale_from,
)

Array = jax.Array
# What integers are rounded to before their zero point is added: room for both.
_BEFORE_ZERO_POINT = IntFormat(name="int22", bits=22)
_DIRECTED = ("toward_positive", "toward_negative", "to_odd")  # where next to nothing is not zero


class Scales(NamedTuple):
    """What a block format keeps beside its codes; None for what it has not.

    Attributes:
      scale: One for each block, as stored: the dtype of the scale format, or its codes.
      tensor_scale: The second scale, a scalar, as stored.
      zero_point: int32, one for each block.
    """

    scale: Array | None = None
    tensor_scale: Array | None = None
    zero_point: Array | None = None


@dataclasses.dataclass(frozen=True)
class Rounder:
    """How scaled values become elements."""

    spec: BlockFormat
    rounding: Rounding = "nearest_even"
    saturation: str = "finite"

    def codes(self, u: Array, zero_point: Array | None, random: Array | None) -> Array:
        """The codes of the elements, as `element.code_dtype`."""
        element = self.spec.element
        if zero_point is not None:
            integers = self._integers(u, zero_point, random)
            return codes_of(integers, element, "nearest_even", "finite", None)
        codes = codes_of(u, element, self.rounding, self.saturation, random)
        if not self.spec.narrow_range:
            return codes
        lowest = codes.dtype.type(int(element.lowest) % 2**element.bits)
        return jnp.where(codes == lowest, lowest + codes.dtype.type(1), codes)

    def values(self, u: Array, zero_point: Array | None, random: Array | None) -> Array:
        """Their values, float32, less the zero point."""
        if zero_point is not None:
            return self._integers(u, zero_point, random) - zero_point.astype(jnp.float32)
        q = round_values(u, self.spec.element, self.rounding, self.saturation, random)
        if not self.spec.narrow_range:
            return q
        return jnp.maximum(q, np.float32(float(self.spec.element.lowest + 1)))

    def _integers(self, u: Array, zero_point: Array, random: Array | None) -> Array:
        first, last = (float(v) for v in (self.spec.element.lowest, self.spec.element.max_finite))
        rounded = round_values(u, _BEFORE_ZERO_POINT, self.rounding, "finite", random)
        moved = rounded + zero_point.astype(jnp.float32)
        return jnp.clip(moved, np.float32(first), np.float32(last))


def blocks_of(x: Array, spec: BlockFormat) -> Blocks:
    return Blocks(x.shape, spec.block_lengths(x.shape))


def find_scales(x: Array, spec: BlockFormat, given: Scales) -> tuple[Scales, Array | None]:
    """The scales of `x`, those of `given` as they are, and which blocks have an amax above zero.

    The latter, in the view's shape, is None where it was not looked for.
    """
    if spec.scale is None or given.scale is not None:
        return given, None
    blocks = blocks_of(x, spec)
    view = blocks.split(x)
    if spec.zero_point:
        scale, zero_point = asymmetric(*_range(exact_float32(view), blocks.places), spec)
        return Scales(blocks.gather(scale), None, blocks.gather(zero_point)), None
    nan_wins = not spec.element.has_nan
    amax = exact_float32(magnitude_max(view, blocks.places, nan_wins=nan_wins))
    tensor_scale = given.tensor_scale
    if spec.tensor_scale is not None and tensor_scale is None:
        tensor_scale = tensor_scale_from(_tensor_amax(x, amax), spec)
    scale = blocks.gather(scale_from(amax, spec, tensor_scale))
    return Scales(scale, tensor_scale), ~is_zero(amax)


def block_codes(
    x: Array,
    scales: Scales,
    busy: Array | None,
    draw: Draw | None,
    how: Rounder,
    packed: bool = False,
) -> Array:
    """The codes of `x`, in its shape or packed along the last axis."""
    blocks = blocks_of(x, how.spec)

    def use(u: Array, back: Callable[[Array], Array]) -> Array:
        random = _random(x, draw, how.rounding, blocks)
        return blocks.join(how.codes(u, blocks.spread(scales.zero_point), random))

    codes = _scaled(blocks.split(x), scales, blocks, how, busy, use, apart=packed)
    return pack(codes, how.spec.element) if packed else codes


def block_values(
    x: Array, scales: Scales, busy: Array | None, draw: Draw | None, how: Rounder
) -> Array:
    """The values of those codes times their scales: float32, in the shape of `x`."""
    blocks = blocks_of(x, how.spec)
    if busy is not None and how.spec.has_powers:
        # In a block of zeros otherwise, an infinity leaves more than zero.
        busy |= lax.cond(jnp.all(busy), _nowhere, lambda x: jnp.any(jnp.isinf(x)), x)

    def use(u: Array, back: Callable[[Array], Array]) -> Array:
        random = _random(x, draw, how.rounding, blocks)
        return blocks.join(back(how.values(u, blocks.spread(scales.zero_point), random)))

    return _scaled(blocks.split(x), scales, blocks, how, busy, use)


def _nowhere(x: Array) -> Array:
    return jnp.zeros_like(x, dtype=bool, shape=())  # of x: in `shard_map` it varies as x does


def scaled_values(x: Array, scales: Scales, spec: BlockFormat) -> Array:
    """What is rounded: `x` divided by its scales, plus the zero point; float32, shape of `x`."""
    blocks, how = blocks_of(x, spec), Rounder(spec)

    def use(u: Array, back: Callable[[Array], Array]) -> Array:
        zero_point = blocks.spread(scales.zero_point)
        return blocks.join(u if zero_point is None else u + zero_point.astype(jnp.float32))

    return _scaled(blocks.split(x), scales, blocks, how, None, use)


def dequantized(
    codes: Array, scales: Scales, blocks: Blocks, spec: BlockFormat, dtype: DTypeLike
) -> Array:
    """The numbers that codes and scales stand for, in the shape of `codes`."""
    q = blocks.split(values_of(codes, spec.element, jnp.float32))
    zero_point = blocks.spread(scales.zero_point)
    q = q if zero_point is None else q - zero_point.astype(jnp.float32)
    y = _scaled(q, scales, blocks, Rounder(spec), None, lambda _, back: back(q))
    return in_dtype(blocks.join(y), dtype)


def in_dtype(x: Array, dtype: DTypeLike) -> Array:
    """float32 rounded to nearest even to `dtype`; infinite where that overflows."""
    if dtype == jnp.float32:
        return x
    fmt = format(dtype)
    assert isinstance(fmt, FloatFormat)
    return stored(x, fmt, saturation="none")


def _scaled(
    view: Array,
    scales: Scales,
    blocks: Blocks,
    how: Rounder,
    busy: Array | None,
    use: Callable[[Array, Callable[[Array], Array]], Array],
    *,
    apart: bool = False,
) -> Array:
    """`use(u, back)` for the scaled values u and the function that multiplies by the scales.

    Args:
      apart: Whether to keep it apart from what the result is used for: in the strides of packing
        XLA's CPU would not vectorize it. A branch does that.
    """
    spec = how.spec
    kept = at_least_sticky if how.rounding in _DIRECTED else lambda u, x: u
    if scales.scale is None:
        return use(exact_float32(view), lambda q: q)
    if not spec.has_powers:
        scale = blocks.spread(effective(scales.scale, scales.tensor_scale, spec))

        def by(divide: Callable[[Array, Array], Array]) -> Array:
            x = exact_float32(view)
            return use(kept(divide(x, scale), x), lambda q: product(q, scale))

        if not apart:
            return by(scaled if spec.largest >= 4 else divided)
        simple = jnp.all(scale <= np.float32(2.0**126))
        return lax.cond(simple, lambda: by(scaled), lambda: by(divided))
    exponent, is_nan = exponents(blocks.spread(scales.scale), spec)
    down, up = factors(exponent, is_nan)

    def exactly() -> Array:
        x = exact_float32(view)
        return use(kept(shifted(x, -exponent, is_nan), x), lambda q: shifted(q, exponent, is_nan))

    def by_factors() -> Array:
        x = exact_float32(view)
        return use(kept(x * down, x), lambda q: q * up)

    safe = are_safe(exponent, spec) | is_nan
    return lax.cond(jnp.all(safe if busy is None else safe | ~busy), by_factors, exactly)


def _random(x: Array, draw: Draw | None, rounding: Rounding, blocks: Blocks) -> Array | None:
    random = random_of(draw, x, rounding)
    return None if random is None else blocks.split(random)


def _range(view: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The least and the largest finite element of each block and zero; NaN where one is NaN."""
    finite = jnp.where(jnp.isfinite(view), view, np.float32(0))
    poison = jnp.any(jnp.isnan(view), axis=axes, keepdims=True)
    ends = (f(finite, axis=axes, keepdims=True, initial=0) for f in (jnp.min, jnp.max))
    lowest, largest = (jnp.where(poison, np.float32(np.nan), end) for end in ends)
    return lowest, largest


def _tensor_amax(x: Array, amax: Array) -> Array:
    """The largest finite |x| of all, from those of the blocks, some of which may be NaN."""
    poisoned = jnp.isnan(amax)

    def anew() -> Array:
        found = magnitude_max(x, tuple(range(x.ndim)), nan_wins=False)
        return exact_float32(found).reshape(())

    within = lax.cond(jnp.any(poisoned), anew, lambda: jnp.zeros_like(amax, shape=()))
    return jnp.maximum(jnp.max(jnp.where(poisoned, np.float32(0), amax)), within)
