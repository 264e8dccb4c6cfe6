"""How elements are rounded, and how the scale of its block is applied to each of them.

`by_elements` turns a computation, such as `_engine._codes`, into one elementwise operation. The
computation gets the elements, the block format, and an object that divides and multiplies by the
scales.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
    NEAREST,
    codes_from_dtype,
    codes_of,
    elementwise,
    is_sharded,
    on_cpu,
    over_e8m0,
    power_from_stored,
    power_of_two,
    product,
    quotient,
    round_values,
    times_e8m0,
    times_from_subnormal,
    times_to_subnormal,
)
from qtoolkit.formats import E8M0FNU, BlockFormat, IntFormat
from qtoolkit.formats.internal import binade
from qtoolkit.scaling._blocks import Blocks, blocks_of
from qtoolkit.scaling._scales import effective_scale, has_normal_powers

Array = jax.Array
# Integers are rounded to this format before the zero point is added: the sum fits as well.
_BEFORE_ZERO_POINT = IntFormat(name="int22", bits=22)
# Multiplications by 2**e are used for -100 <= e <= 100 at most.
_SAFE = 100


class Scales(NamedTuple):
    """The arrays that a block format stores with its codes; None for those that it does not have.

    Attributes:
      scale: One for each block, as stored: the dtype of the scale format, or its codes.
      tensor_scale: The second scale, a scalar, as stored.
      zero_point: int32, one for each block.
    """

    scale: Array | None = None
    tensor_scale: Array | None = None
    zero_point: Array | None = None


def element_codes(
    u: Array, spec: BlockFormat, projection: Projection, zero_point: Array | None
) -> Array:
    """The codes of elements `u` that have been divided by their scales, as `element.code_dtype`."""
    element = spec.element
    if zero_point is not None:
        return codes_of(_with_zero_point(u, spec, projection, zero_point), element)
    codes = codes_of(u, element, projection)
    if not spec.narrow_range:
        return codes
    lowest = codes.dtype.type(int(element.lowest) % 2**element.bits)
    return jnp.where(codes == lowest, lowest + codes.dtype.type(1), codes)


def element_values(
    u: Array, spec: BlockFormat, projection: Projection, zero_point: Array | None
) -> Array:
    """The values of those codes, float32, less the zero point."""
    if zero_point is not None:
        integers = _with_zero_point(u, spec, projection, zero_point)
        return integers - zero_point.astype(jnp.float32)
    q = round_values(u, spec.element, projection)
    if not spec.narrow_range:
        return q
    return jnp.maximum(q, np.float32(float(spec.element.lowest + 1)))


def _with_zero_point(
    u: Array, spec: BlockFormat, projection: Projection, zero_point: Array
) -> Array:
    """`u` rounded to integers, moved by the zero point, clamped to the element format."""
    first, last = (float(v) for v in (spec.element.lowest, spec.element.max_finite))
    clamping = Projection(projection.rounding, "finite", projection.draw)
    integers = round_values(u, _BEFORE_ZERO_POINT, clamping) + zero_point.astype(u.dtype)
    return jnp.clip(integers, u.dtype.type(first), u.dtype.type(last))


class Elements(NamedTuple):
    """The elements of blocks, and what is computed from them.

    Attributes:
      view: Numbers or codes in the shape of the view of blocks (see `Blocks`); or a pair of such.
      projection: If it is stochastic, it has random bits for each element.
      zero_point: int32, in a shape that broadcasts to the view; or None.
      dtype: The dtype of the results.
    """

    view: Any
    projection: Projection
    zero_point: Array | None
    dtype: np.dtype


class Scaling(Protocol):
    """Divides and multiplies elements by the scales of their blocks."""

    def divide(self, x: Array) -> Array: ...

    def multiply(self, q: Array) -> Array: ...


def by_elements(
    compute: Callable[[Elements, BlockFormat, Scaling], Any],
    x: Any,
    spec: BlockFormat,
    scales: Scales,
    projection: Projection = NEAREST,
    dtype: DTypeLike = jnp.float32,
    *,
    blocks: Blocks | None = None,
    nonzero: Array | None = None,
    is_short: bool = False,
    is_own: bool = False,
    is_power: bool = False,
) -> Any:
    """`compute(elements, spec, scaling)` for arrays `x`, as one operation; results shaped like `x`.

    Args:
      x: An array of numbers or codes, or several of one shape.
      dtype: The dtype of the results, if `compute` asks for it.
      blocks: The blocks of `x`, if they are not those that `spec` says.
      nonzero: As from `find_scales`: scales of blocks of zeros need not be exact.
      is_short: Whether a short program matters more than a fast one.
      is_own: Whether the scales were made from these elements. Then subnormal elements are so far
        below the scale that they may count as zeros.
      is_power: Whether float32 scales, from 2**-126 to 2**126, are powers of two.
    """
    first = jax.tree.leaves(x)[0]
    blocks = blocks_of(first, spec) if blocks is None else blocks
    view = jax.tree.map(blocks.split, x)
    projection = projection.drawn(first.shape).reshaped(blocks.split)
    zero_point = jax.tree.map(blocks.spread, scales.zero_point)  # None stays None
    elements = Elements(view, projection, zero_point, np.dtype(dtype))
    exact, fast = _scalings(
        spec,
        scales,
        blocks,
        nonzero,
        may_branch=not (is_short or is_sharded(first)),
        is_own=is_own,
        is_power=is_power,
    )
    if fast is None:
        out = _computed(compute, elements, spec, exact)
    else:
        # XLA writes to memory what enters and leaves a branch. So `compute` takes elements in their
        # own dtype and returns the dtype of the result: with float32 on both sides MXFP8 of
        # bfloat16 took 4.7 times as long.
        scaling, is_exact = fast
        out = lax.cond(
            on_cpu() & is_exact,
            lambda: _computed(compute, elements, spec, scaling),
            lambda: _computed(compute, elements, spec, exact),
        )
    return jax.tree.map(blocks.join, out)


def _scalings(
    spec: BlockFormat,
    scales: Scales,
    blocks: Blocks,
    nonzero: Array | None,
    *,
    may_branch: bool,
    is_own: bool,
    is_power: bool,
) -> tuple[Scaling, tuple[Scaling, Array] | None]:
    """An exact way to apply scales; and perhaps a faster one, and whether that is exact here."""
    if scales.scale is None:
        return _Unscaled(), None
    if not spec.has_powers:
        scale = effective_scale(scales.scale, scales.tensor_scale, spec, is_own=is_own)
        if is_power:
            return _ByFactors(blocks.spread(1 / scale), blocks.spread(scale)), None
        digits = spec.element.mantissa_bits + spec.scale.mantissa_bits + 2  # type: ignore[union-attr]
        is_exact = not spec.tensor_scale and digits <= 24
        return (_ByExactScale if is_exact else _ByScale)(blocks.spread(scale)), None
    if is_own and has_normal_powers(spec):
        return _ByE8M0(codes_from_dtype(blocks.spread(scales.scale), E8M0FNU)), None
    # Powers of two are applied by several operations, which are exact for subnormal numbers, too;
    # or, if none occurs, by one multiplication with 2**e. A short program has only the first way:
    # with both, an MXFP8 matmul with its derivatives compiled in 2.5 s instead of 1.2 s (d = 64,
    # two cores) and ran no faster.
    assert spec.scale is not None
    exponent, is_nan = power_from_stored(blocks.spread(scales.scale), spec.scale)
    exponent = exponent + np.int32(spec.element_exponent)
    by_exponent = _ByExponent(exponent, is_nan)
    if not may_branch:
        return by_exponent, None
    # Divisions of 1, exact here: XLA's CPU divides once for each block, but repeats shifts and
    # selections for each element.
    one = jnp.where(is_nan, np.float32(np.nan), np.float32(1))
    normal = jnp.clip(exponent, -126, 126)
    by_factors = _ByFactors(one / power_of_two(normal), one / power_of_two(-normal))
    # XLA's products read subnormal numbers as zero. Multiplying is exact nevertheless if every
    # positive element times 2**e is at least 2**-125: for E4M3FN, whose least value is 2**-9, from
    # e = -116 on. Subnormal data are then less than half of that and rounded to zero anyway.
    lowest = -min(_SAFE, 125 + binade(spec.element.min_positive))
    safe = (exponent >= lowest) & (exponent <= _SAFE) | is_nan
    return by_exponent, (by_factors, jnp.all(safe if nonzero is None else safe | ~nonzero))


def _computed(compute: Any, elements: Elements, spec: BlockFormat, scaling: Scaling) -> Any:
    scaling = jax.tree.map(lambda x: x.reshape(()) if is_one(x) else x, scaling)
    return _compute(compute, elements, spec, scaling)


@elementwise
def _compute(compute: Any, elements: Elements, spec: BlockFormat, scaling: Scaling) -> Any:
    return compute(elements, spec, scaling)


class _Unscaled(NamedTuple):
    def divide(self, x: Array) -> Array:
        return x

    def multiply(self, q: Array) -> Array:
        return q


class _ByScale(NamedTuple):
    scale: Array

    def divide(self, x: Array) -> Array:
        return quotient(x, self.scale.astype(x.dtype))

    def multiply(self, q: Array) -> Array:
        return product(q, self.scale)


class _ByExactScale(_ByScale):
    """Float32 holds q * scale exactly, so it does not matter if XLA contracts it to an FMA."""

    def multiply(self, q: Array) -> Array:
        return q * self.scale


class _ByE8M0(NamedTuple):
    codes: Array

    def divide(self, x: Array) -> Array:
        return over_e8m0(x, self.codes)

    def multiply(self, q: Array) -> Array:
        return times_e8m0(q, self.codes)


class _ByFactors(NamedTuple):
    down: Array
    up: Array

    def divide(self, x: Array) -> Array:
        return x * self.down.astype(x.dtype)

    def multiply(self, q: Array) -> Array:
        return q * self.up


class _ByExponent(NamedTuple):
    exponent: Array
    is_nan: Array

    def divide(self, x: Array) -> Array:
        return times_from_subnormal(x, -self.exponent, self.is_nan)

    def multiply(self, q: Array) -> Array:
        return times_to_subnormal(q, self.exponent, self.is_nan)


def is_one(x: Array) -> bool:
    """Whether an array has one element; sizes may be symbolic."""
    return all(n == 1 for n in x.shape)
