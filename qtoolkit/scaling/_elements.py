"""What is computed for the elements of blocks, and how the scale of its block is applied to each.

A computation takes elements, a block format, and an object that divides and multiplies by the
scales. `of_elements` makes it one elementwise operation, with the object that suits the scales.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
    MODES,
    codes_from_dtype,
    codes_of,
    elementwise,
    exact_float32,
    has_unlimited_values,
    in_dtype,
    is_sharded,
    kept_from_zero,
    native_codes,
    on_cpu,
    over_e8m0,
    product,
    quotient,
    round_values,
    times_e8m0,
    times_from_subnormal,
    times_to_subnormal,
    unlimited_values,
    values_of,
    widened,
)
from qtoolkit.formats import (
    E8M0FNU,
    FLOAT32,
    BlockFormat,
    FloatFormat,
    IntFormat,
    format,
)
from qtoolkit.scaling._blocks import Blocks
from qtoolkit.scaling._scales import (
    are_safe,
    effective,
    exponents,
    factors,
    has_normal_powers,
)

Array = jax.Array
Made = TypeVar("Made")  # an array or several
# Integers are rounded to this format before the zero point is added: the sum fits as well.
_BEFORE_ZERO_POINT = IntFormat(name="int22", bits=22)
# Roundings that do not make every tiny number 0: toward_positive rounds 2**-140 up to 2**-9, the
# least value of E4M3FN.
_DIRECTED = tuple(name for name, mode in MODES.items() if mode.below_middle != "never")


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
    """The codes of scaled values, as `element.code_dtype`."""
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
    """Rounded to integers, moved by the zero point, clamped to the element format."""
    first, last = (float(v) for v in (spec.element.lowest, spec.element.max_finite))
    clamping = Projection(projection.rounding, "finite", projection.draw)
    integers = round_values(u, _BEFORE_ZERO_POINT, clamping) + zero_point.astype(u.dtype)
    return jnp.clip(integers, u.dtype.type(first), u.dtype.type(last))


class Elements(NamedTuple):
    """The elements of blocks, and what is computed from them.

    Attributes:
      view: Numbers or codes, in the shape of the view of blocks.
      projection: If it is stochastic, it has random bits for each element.
      zero_point: int32, in a shape that broadcasts to the view; or None.
      dtype: The dtype of the results.
    """

    view: Array
    projection: Projection
    zero_point: Array | None
    dtype: np.dtype


def elements_of(
    x: Array,
    blocks: Blocks,
    projection: Projection,
    scales: Scales,
    dtype: DTypeLike = jnp.float32,
) -> Elements:
    view = blocks.split(x)
    projection = projection.drawn(x.shape).reshaped(blocks.split)
    zero_point = jax.tree.map(blocks.spread, scales.zero_point)  # or None
    return Elements(view, projection, zero_point, np.dtype(dtype))


class Scaling(Protocol):
    """Applies to elements the scales of their blocks."""

    def divide(self, x: Array) -> Array: ...

    def multiply(self, q: Array) -> Array: ...


# What is computed for elements.


def to_codes(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    return element_codes(_scaled(x, scaling), spec, x.projection, x.zero_point)


def to_values(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    q = element_values(_scaled(x, scaling), spec, x.projection, x.zero_point)
    return _saturated(scaling.multiply(q), q, x.dtype, is_finite=not spec.element.has_inf)


def to_operands(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    q, wide = element_values(_scaled(x, scaling), spec, x.projection, None), exact_float32(x.view)
    return jnp.where(jnp.isfinite(wide), q, wide).astype(x.view.dtype)


def never_overflows(spec: BlockFormat) -> bool:
    """Whether elements divided by the scale of their own block never overflow the format.

    They are rounded to nearest, by `unlimited_values`.
    """
    # A power of two that is `amax / 448` rounded up leaves at most 448. Otherwise amax / (amax /
    # 448), with both quotients rounded, exceeds 448 by at most two units in float32's last place,
    # which are rounded away.
    if spec.rule in ("rceil", "ceil") and has_normal_powers(spec):
        return True
    is_exact = spec.scale == FLOAT32 and spec.tensor_scale is None and not spec.element_exponent
    is_finite = spec.largest >= 1  # the scale
    return is_exact and is_finite and spec.rule == "amax" and has_unlimited_values(spec.element)


def to_unlimited_operands(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    assert isinstance(spec.element, FloatFormat)
    return unlimited_values(_scaled(x, scaling), spec.element).astype(x.view.dtype)


def to_limited_operands(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    assert isinstance(spec.element, FloatFormat)
    wide, largest = exact_float32(x.view), np.float32(float(spec.element.max_finite))
    limited = lax.clamp(-largest, scaling.divide(wide), largest)
    limited = jnp.where(lax.is_finite(wide), limited, wide)
    return unlimited_values(limited, spec.element).astype(x.view.dtype)


def to_native_codes(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    fmt = spec.element
    assert isinstance(fmt, FloatFormat)
    wide, largest = exact_float32(x.view), np.float32(float(fmt.max_finite))
    codes = native_codes(lax.clamp(-largest, scaling.divide(wide), largest), fmt)
    return jnp.where(lax.is_finite(wide), codes, np.uint8(fmt.nan_codes[0]))


def to_unscaled(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    q = exact_float32(x.view)
    y = scaling.multiply(q)
    if may_overflow(spec, x.dtype):
        largest = np.float32(ml_dtypes.finfo(x.dtype).max)
        y = jnp.where(lax.is_finite(q), lax.clamp(-largest, y, largest), y)
    return y.astype(x.dtype)  # exact, so XLA may skip it


def may_overflow(spec: BlockFormat, dtype: DTypeLike) -> bool:
    """Whether an element times its scale may be more than the largest number of `dtype`.

    MXFP8 rounds 3.3e38 to 256 * 2**120, int8 rounds float32's largest number to 127 scales: both
    are infinite in float32, and sums of a product would be NaN, through `0 * inf`.
    """
    assert spec.scale is not None
    largest = max(spec.element.max_finite, -spec.element.lowest) * spec.scale.max_finite
    return spec.tensor_scale is not None or largest > format(dtype).max_finite


def to_scaled_and_unscaled(
    views: tuple[Array, Array], spec: BlockFormat, scaling: Scaling
) -> tuple[Array, Array]:
    x, q = views
    return scaling.divide(exact_float32(x)), scaling.multiply(exact_float32(q))


def to_unrounded(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    u = scaling.divide(widened(x.view))
    return u if x.zero_point is None else u + x.zero_point.astype(u.dtype)


def to_dequantized(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    q = values_of(x.view, spec.element, jnp.float32)
    q = q if x.zero_point is None else q - x.zero_point.astype(jnp.float32)
    return _saturated(scaling.multiply(q), q, x.dtype, is_finite=not spec.element.has_inf)


def _saturated(y: Array, q: Array, dtype: DTypeLike, *, is_finite: bool = False) -> Array:
    """The products `y` of the elements `q` and their scales, rounded to `dtype`.

    They may overflow: 65,504, the largest float16 number, becomes 4 * 2**14 in MXFP4. Overflow
    becomes the largest number of `dtype`, and only an infinite element is infinite.
    """
    rounded = in_dtype(y, dtype)
    overflows = jnp.isinf(rounded)  # a selection: minimum and maximum would flush subnormals
    if not is_finite:
        overflows &= jnp.isfinite(q)
    largest = np.asarray(ml_dtypes.finfo(dtype).max, dtype)
    return jnp.where(overflows, jnp.where(y > 0, largest, -largest), rounded)


def _scaled(x: Elements, scaling: Scaling) -> Array:
    """Elements divided by their scales, ready to be rounded."""
    # XLA may read a subnormal quotient as 0. For directed roundings that would be wrong: 1e-45 /
    # 448, rounded toward positive, is the least value of E4M3FN, 2**-9.
    wide = widened(x.view)
    u = scaling.divide(wide)
    is_directed = x.projection.rounding in _DIRECTED and wide.dtype == jnp.float32
    return kept_from_zero(u, wide) if is_directed else u


def of_elements(
    compute: Callable[[Any, BlockFormat, Scaling], Made],
    elements: Any,
    spec: BlockFormat,
    scales: Scales,
    blocks: Blocks,
    nonzero: Array | None = None,
    *,
    is_short: bool = False,
    is_own: bool = False,
    is_power: bool = False,
) -> Made:
    """`compute(elements, spec, scaling)` as one elementwise operation.

    There are two ways to apply scales that are powers of two: one multiplication by 2**e, exact if
    no subnormal number occurs; or several operations that are exact for subnormals, too. On CPUs a
    branch chooses.

    Args:
      elements: A pytree of arrays in the shape of the view.
      nonzero: As from `find_scales`: scales of blocks of zeros need not be exact.
      is_short: Whether a short program matters more than a fast one; it uses the second way. With
        both, an MXFP8 product with its derivatives compiled in 2.5 s instead of 1.2 s (d = 64, two
        cores) and ran no faster.
      is_own: Whether the scales were made from these elements, whose subnormal numbers then do not
        matter.
      is_power: Whether float32 scales, from 2**-126 to 2**126, are powers of two.
    """
    # XLA writes to memory what enters and leaves a branch. So `compute` takes the elements in their
    # own dtype and returns the dtype of the result: with float32 on both sides MXFP8 of bfloat16
    # took 4.7 times as long.

    def by(scaling: Scaling) -> Made:
        scaling = jax.tree.map(lambda x: x.reshape(()) if is_one(x) else x, scaling)
        return _computed(compute, elements, spec, scaling)

    if scales.scale is None:
        return by(_Unscaled())
    if not spec.has_powers:
        scale = effective(scales.scale, scales.tensor_scale, spec, is_own=is_own)
        if is_power:
            return by(_ByFactors(blocks.spread(1 / scale), blocks.spread(scale)))
        digits = spec.element.mantissa_bits + spec.scale.mantissa_bits + 2  # type: ignore[union-attr]
        is_exact = not spec.tensor_scale and digits <= 24
        return by((_ByExactScale if is_exact else _ByScale)(blocks.spread(scale)))
    if is_own and has_normal_powers(spec):
        return by(_ByE8M0(codes_from_dtype(blocks.spread(scales.scale), E8M0FNU)))
    exponent, is_nan = exponents(blocks.spread(scales.scale), spec)
    if is_short or is_sharded(jax.tree.leaves(elements)[0]):
        return by(_ByExponent(exponent, is_nan))
    down, up = factors(exponent, is_nan)
    safe = are_safe(exponent, spec) | is_nan
    all_safe = jnp.all(safe if nonzero is None else safe | ~nonzero)
    return lax.cond(
        on_cpu() & all_safe,
        lambda: by(_ByFactors(down, up)),
        lambda: by(_ByExponent(exponent, is_nan)),
    )


@elementwise
def _computed(compute: Any, elements: Any, spec: BlockFormat, scaling: Scaling) -> Any:
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
    """Float32 holds the products: to contract them to an FMA changes nothing."""

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
    return all(n == 1 for n in x.shape)
