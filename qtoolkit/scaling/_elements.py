"""What is computed for the elements of blocks, and how the scale of its block is applied to each.

A computation takes elements, a format and two functions, `divide` and `multiply`, that apply the
scales. `of_elements` makes it one elementwise operation, by the way that suits the scales.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
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
Map = Callable[[Array], Array]
Made = TypeVar("Made")  # an array or several
# Integers are rounded to this format before the zero point is added: the sum fits as well.
_BEFORE_ZERO_POINT = IntFormat(name="int22", bits=22)
# Roundings that do not make every tiny number 0: toward_positive rounds 2**-140 up to 2**-9, the
# least value of E4M3FN.
_DIRECTED = ("toward_positive", "toward_negative", "to_odd")


class Scales(NamedTuple):
    """What a block format stores beside codes; None for what the format does not have.

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
    """The codes of scaled values, as `element.code_dtype`; the projection is drawn for them."""
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
        moved = _with_zero_point(u, spec, projection, zero_point)
        return moved - zero_point.astype(jnp.float32)
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
    moved = round_values(u, _BEFORE_ZERO_POINT, clamping) + zero_point.astype(u.dtype)
    return jnp.clip(moved, u.dtype.type(first), u.dtype.type(last))


class Elements(NamedTuple):
    """Arrays in the shape of the view of blocks, or, the zero point, in one that broadcasts to it.

    Attributes:
      view: The numbers, or their codes.
      projection: The projection; a stochastic one with random bits for each element.
      zero_point: int32, or None.
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


# What is computed for elements. `divide` and `multiply` apply the scale of their block.


def to_codes(x: Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    return element_codes(_scaled(x, divide), spec, x.projection, x.zero_point)


def to_values(x: Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    q = element_values(_scaled(x, divide), spec, x.projection, x.zero_point)
    return _saturated(multiply(q), q, x.dtype, is_finite=not spec.element.has_inf)


def to_operands(x: Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    q, wide = element_values(_scaled(x, divide), spec, x.projection, None), exact_float32(x.view)
    return jnp.where(jnp.isfinite(wide), q, wide).astype(x.view.dtype)


def never_overflows(spec: BlockFormat) -> bool:
    """Whether no element that is divided by the scale of its own block is rounded to more than the
    largest value of the format: to nearest, and by `unlimited_values`.

    amax / (amax / 448), both quotients rounded, is at most 448 and two units of float32's last
    place, which round to 448. So does what a power of two leaves that is `amax / 448` rounded up.
    """
    if spec.rule in ("rceil", "ceil") and has_normal_powers(spec):
        return True
    is_exact = spec.scale == FLOAT32 and spec.tensor_scale is None and not spec.element_exponent
    is_finite = spec.largest >= 1  # the scale
    return is_exact and is_finite and spec.rule == "amax" and has_unlimited_values(spec.element)


def to_unlimited_operands(x: Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    assert isinstance(spec.element, FloatFormat)
    return unlimited_values(_scaled(x, divide), spec.element).astype(x.view.dtype)


def to_limited_operands(x: Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    assert isinstance(spec.element, FloatFormat)
    wide, largest = exact_float32(x.view), np.float32(float(spec.element.max_finite))
    limited = lax.clamp(-largest, divide(wide), largest)
    limited = jnp.where(lax.is_finite(wide), limited, wide)
    return unlimited_values(limited, spec.element).astype(x.view.dtype)


def to_native_codes(x: Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    fmt = spec.element
    assert isinstance(fmt, FloatFormat)
    wide, largest = exact_float32(x.view), np.float32(float(fmt.max_finite))
    codes = native_codes(lax.clamp(-largest, divide(wide), largest), fmt)
    return jnp.where(lax.is_finite(wide), codes, np.uint8(fmt.nan_codes[0]))


def to_unscaled(x: Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    q = exact_float32(x.view)
    y = multiply(q)
    if may_overflow(spec, x.dtype):
        largest = np.float32(ml_dtypes.finfo(x.dtype).max)
        y = jnp.where(lax.is_finite(q), lax.clamp(-largest, y, largest), y)
    return y.astype(x.dtype)  # exact: it does not matter whether XLA leaves the narrowing out


def may_overflow(spec: BlockFormat, dtype: DTypeLike) -> bool:
    """Whether an element times its scale may be more than the largest number of `dtype`.

    MXFP8 rounds 3.3e38 to 256 * 2**120, int8 rounds float32's largest number to 127 scales: both
    are infinite in float32, and sums of a product would be NaN, through `0 * inf`.
    """
    assert spec.scale is not None
    largest = max(spec.element.max_finite, -spec.element.lowest) * spec.scale.max_finite
    return spec.tensor_scale is not None or largest > format(dtype).max_finite


def to_scaled_and_unscaled(
    views: tuple[Array, Array], spec: BlockFormat, divide: Map, multiply: Map
) -> tuple[Array, Array]:
    x, q = views
    return divide(exact_float32(x)), multiply(exact_float32(q))


def to_unrounded(x: Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    u = divide(widened(x.view))
    return u if x.zero_point is None else u + x.zero_point.astype(u.dtype)


def to_dequantized(x: Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    q = values_of(x.view, spec.element, jnp.float32)
    q = q if x.zero_point is None else q - x.zero_point.astype(jnp.float32)
    return _saturated(multiply(q), q, x.dtype, is_finite=not spec.element.has_inf)


def _saturated(y: Array, q: Array, dtype: DTypeLike, *, is_finite: bool = False) -> Array:
    """The products `y` of the elements `q` and their scales, rounded to `dtype`.

    The last values of a block may lie beyond the largest number of its dtype: float16's 65,504 is
    rounded to 4 * 2**14 in MXFP4. They become that number; only an infinite element is infinite.
    """
    rounded = in_dtype(y, dtype)
    overflows = jnp.isinf(rounded)  # a selection: minimum and maximum would flush subnormals
    if not is_finite:
        overflows &= jnp.isfinite(q)
    largest = np.asarray(ml_dtypes.finfo(dtype).max, dtype)
    return jnp.where(overflows, jnp.where(y > 0, largest, -largest), rounded)


def _scaled(x: Elements, divide: Map) -> Array:
    """Elements divided by their scales, ready to be rounded.

    XLA may take a subnormal quotient for 0. Directed roundings must not: 1e-45 / 448, rounded
    toward positive, is E4M3FN's least value, 2**-9.
    """
    wide = widened(x.view)
    u = divide(wide)
    may_vanish = x.projection.rounding in _DIRECTED and wide.dtype == jnp.float32
    return kept_from_zero(u, wide) if may_vanish else u


def of_elements(
    compute: Callable[[Any, BlockFormat, Map, Map], Made],
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
    """`compute(elements, spec, divide, multiply)`, with functions that apply the blocks' scales.

    It is one elementwise operation. If scales are powers of two, there are two ways to apply them:
    one multiplication by 2**e, exact if no subnormal number occurs; or several operations that are
    exact for subnormals, too. On CPUs a branch chooses. XLA writes to memory what enters and leaves
    a branch, so `compute` takes the elements in their own dtype and returns the result's: with
    float32 on both sides MXFP8 of bfloat16 took 4.7 times as long. Products use only the second way
    (`is_short`): with both, an MXFP8 product with its derivatives compiled in 2.5 s instead of
    1.2 s (d = 64, two cores) and ran no faster.

    Args:
      elements: A pytree of arrays in the shape of the view.
      nonzero: As from `find_scales`: scales of blocks of zeros need not be exact.
      is_short: Whether a short program matters more than a fast one.
      is_own: Whether the scales were made from these elements, whose subnormal numbers do not
        matter.
      is_power: Whether float32 scales, from 2**-126 to 2**126, are powers of two.
    """

    def by(way: Callable[..., Made], *factors: Array) -> Made:
        factors = tuple(factor.reshape(()) if is_one(factor) else factor for factor in factors)
        return way(compute, elements, spec, *factors)

    if scales.scale is None:
        return by(_unchanged)
    if not spec.has_powers:
        scale = effective(scales.scale, scales.tensor_scale, spec, is_own=is_own)
        if is_power:
            return by(_by_factors, blocks.spread(1 / scale), blocks.spread(scale))
        return by(_by_scale, blocks.spread(scale))
    if is_own and has_normal_powers(spec):
        return by(_by_e8m0, codes_from_dtype(blocks.spread(scales.scale), E8M0FNU))
    exponent, is_nan = exponents(blocks.spread(scales.scale), spec)
    if is_short or is_sharded(jax.tree.leaves(elements)[0]):
        return by(_by_exponent, exponent, is_nan)
    down, up = factors(exponent, is_nan)
    safe = are_safe(exponent, spec) | is_nan
    all_safe = jnp.all(safe if nonzero is None else safe | ~nonzero)
    return lax.cond(
        on_cpu() & all_safe,
        lambda: by(_by_factors, down, up),
        lambda: by(_by_exponent, exponent, is_nan),
    )


@elementwise
def _unchanged(compute: Any, elements: Any, spec: BlockFormat) -> Any:
    return compute(elements, spec, lambda x: x, lambda q: q)


@elementwise
def _by_scale(compute: Any, elements: Any, spec: BlockFormat, scale: Array) -> Any:
    assert spec.scale is not None
    digits = spec.element.mantissa_bits + spec.scale.mantissa_bits + 2
    multiply = product if spec.tensor_scale or digits > 24 else lax.mul  # which is exact
    return compute(
        elements,
        spec,
        lambda x: quotient(x, scale.astype(x.dtype)),
        lambda q: multiply(q, scale),
    )


@elementwise
def _by_e8m0(compute: Any, elements: Any, spec: BlockFormat, codes: Array) -> Any:
    return compute(elements, spec, lambda x: over_e8m0(x, codes), lambda q: times_e8m0(q, codes))


@elementwise
def _by_factors(compute: Any, elements: Any, spec: BlockFormat, down: Array, up: Array) -> Any:
    return compute(elements, spec, lambda x: x * down.astype(x.dtype), lambda q: q * up)


@elementwise
def _by_exponent(
    compute: Any, elements: Any, spec: BlockFormat, exponent: Array, is_nan: Array
) -> Any:
    return compute(
        elements,
        spec,
        lambda x: times_from_subnormal(x, -exponent, is_nan),
        lambda q: times_to_subnormal(q, exponent, is_nan),
    )


def is_one(x: Array) -> bool:
    return all(n == 1 for n in x.shape)
