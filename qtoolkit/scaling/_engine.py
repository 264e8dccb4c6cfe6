"""The engine that quantizes: finds scales, divides elements by them, rounds, and dequantizes.

x is float32, float16 or bfloat16, read as exact float32 through a view of its blocks (`Blocks`), or
float64, whose scales follow from its float32. q is x / scale, rounded: one IEEE division by the
scale as it is stored, then one rounding.
`quantize`, `fake_quantize`, `metrics`, quantized products, `round_cotangent` and the converter of
checkpoints all call these functions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts import Projection, pack
from qtoolkit.casts.internal import (
    NEAREST,
    Rounding,
    codes_from_dtype,
    codes_of,
    elementwise,
    exact_float32,
    from_magnitude_ordinal,
    has_unlimited_values,
    in_dtype,
    is_sharded,
    kept_from_zero,
    magnitude_ordinal,
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
    Format,
    IntFormat,
    format,
)
from qtoolkit.scaling._blocks import Blocks, largest_magnitude, largest_ordinal
from qtoolkit.scaling._scales import (
    are_safe,
    asymmetric,
    effective,
    exponents,
    factors,
    has_normal_powers,
    tensor_scale_from,
)
from qtoolkit.scaling._trials import best_scale

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


NOT_GIVEN = Scales()


def blocks_of(x: Array, spec: BlockFormat) -> Blocks:
    return Blocks(x.shape, spec.block_lengths(x.shape))


def scale_shape(where: str, spec: BlockFormat, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`spec.scale_shape(shape)`, with errors that begin with `where`."""
    try:
        return spec.scale_shape(shape)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def find_scales(
    x: Array, spec: BlockFormat, given: Scales = NOT_GIVEN
) -> tuple[Scales, Array | None]:
    """The scales of `x`, and which blocks have an amax above zero.

    Args:
      given: Scales that are used as they are.

    Returns:
      scales: The scales as stored. If the element format has no NaN, a NaN in a block makes the
        scale of the block NaN; otherwise only its own element is NaN.
      nonzero: bool, one for each block, in a shape that broadcasts to the view. None if scales were
        given, or the format has no scales or has zero points.
    """
    scales, largest = _found(x, spec, given, holds_nan=spec.element.has_nan)
    return scales, None if largest is None else _above_zero(largest)


def _found(
    x: Array, spec: BlockFormat, given: Scales, *, holds_nan: bool
) -> tuple[Scales, Array | None]:
    """`find_scales`, with the `largest_ordinal` of each block in place of `nonzero`.

    Args:
      holds_nan: Whether elements can be NaN, so that the scale of their block need not be.
    """
    if spec.scale is None or given.scale is not None:
        return given, None
    if x.dtype == jnp.float64:
        # To odd for powers of two: an amax above 448, by however little, is still above it then.
        x = in_float32(x, "to_odd" if spec.has_powers else "nearest_even")
    blocks = blocks_of(x, spec)
    view = blocks.split(x)
    if spec.zero_point:
        scale, zero_point = asymmetric(*_range(exact_float32(view), blocks.places), spec)
        return Scales(blocks.gather(scale), None, blocks.gather(zero_point)), None
    largest = largest_ordinal(view, blocks.places, nan_wins=not holds_nan)
    amax = exact_float32(from_magnitude_ordinal(largest, view.dtype))
    tensor_scale = given.tensor_scale
    if spec.tensor_scale is not None and tensor_scale is None:
        found = _amax_of_all(largest, x.dtype) if holds_nan else _tensor_amax(x, amax)
        tensor_scale = tensor_scale_from(found, spec)
    scale = best_scale(view, blocks.places, amax, spec, tensor_scale)
    return Scales(blocks.gather(scale), tensor_scale), largest


@elementwise
def in_float32(x: Array, rounding: Rounding = "nearest_even") -> Array:
    """float64, or a narrower float, as float32; what is beyond float32 becomes its largest."""
    if x.dtype != jnp.float64:
        return exact_float32(x)
    return values_of(codes_of(x, FLOAT32, Projection(rounding, "propagate")), FLOAT32, jnp.float32)


def block_codes(
    x: Array,
    spec: BlockFormat,
    projection: Projection,
    scales: Scales,
    nonzero: Array | None = None,
    *,
    packed: bool = False,
) -> Array:
    """The codes of `x`, in its shape or packed along the last axis.

    Args:
      scales, nonzero: As `find_scales` gives them.
    """
    blocks = blocks_of(x, spec)
    elements = _elements(x, blocks, projection, scales)
    codes = blocks.join(_of_elements(_codes, elements, spec, scales, blocks, nonzero))
    if not packed:
        return codes
    # Without a barrier XLA for CPUs fuses the rounding into the strided loop that packs, and does
    # not vectorize it.
    return pack(lax.optimization_barrier(codes), spec.element)


def block_values(
    x: Array,
    spec: BlockFormat,
    projection: Projection,
    scales: Scales,
    nonzero: Array | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Array:
    """The values of those codes times their scales: as `dtype`, in the shape of `x`."""
    blocks = blocks_of(x, spec)
    if spec.has_powers and nonzero is not None:
        # In a block whose finite elements are all 0 the scale is 2**-127, and an infinity there
        # becomes 448 * 2**-127: such a block is not one of zeros.
        if is_sharded(x):
            nonzero |= jnp.any(jnp.isinf(x))
        else:
            # On a GPU always check: waiting for this condition takes longer than the check.
            need_not_look = on_cpu() & jnp.all(nonzero)
            nonzero |= lax.cond(need_not_look, _nowhere, lambda x: jnp.any(jnp.isinf(x)), x)
    elements = _elements(x, blocks, projection, scales, dtype)
    return blocks.join(_of_elements(_values, elements, spec, scales, blocks, nonzero))


def operand_values(
    x: Array, spec: BlockFormat, projection: Projection = NEAREST, given: Scales = NOT_GIVEN
) -> tuple[Array, Scales]:
    """`x` as values q of the element format, and the scales of its blocks: x ~ q * scale.

    Infinities and NaNs stay what they are in q, whatever the format: a product of q is not finite
    wherever that of x is not.

    Args:
      spec: Any without zero points. The dtype of `x` holds its elements.
      given: Scales to use instead of those that `x` itself has.

    Returns:
      q: Shape and dtype of `x`.
      scales: As stored.
    """
    scales, largest = _found(x, spec, given, holds_nan=True)
    blocks = blocks_of(x, spec)
    is_own = given.scale is None and given.tensor_scale is None
    compute = _operands
    if projection == NEAREST and has_unlimited_values(spec.element):
        compute = _unlimited_operands if is_own and _never_overflows(spec) else _limited_operands

    def everything() -> Array:
        elements = _elements(x, blocks, projection, scales)
        return blocks.join(
            _of_elements(compute, elements, spec, scales, blocks, is_short=True, is_own=is_own)
        )

    # Without a scale nothing is divided. Sharded arrays must not enter a branch, see `is_sharded`.
    # Operands by blocks are multiplied by their scales before the product, in the loop that rounds:
    # nothing is read twice, and with a branch MXFP8 compiled in half again the time.
    if scales.scale is None or is_sharded(x) or spec.block:
        return everything(), scales
    if largest is None:
        largest = magnitude_ordinal(effective(scales.scale, scales.tensor_scale, spec))
    # On CPUs the rounding stays inside of a branch, whose result XLA writes to memory once.
    # Otherwise XLA would fuse the rounding into every product and every transposed copy that reads
    # q, and so repeat it; the division, which it does not repeat, would go through memory. (A
    # training step at d = 512 read and wrote 2.27 GB that way, 2.05 GB with a branch, 1.45 GB
    # unrounded.) A barrier does not help, since XLA for CPUs removes it before it fuses. The
    # other branch is taken only if all finite elements are zero, and gives the same result then.
    is_zero_on_cpu = on_cpu() & (_max_of_all(largest) == 0)
    return lax.cond(is_zero_on_cpu, lambda: _zeros_rounded(x, spec.element), everything), scales


@elementwise
def _above_zero(x: Array) -> Array:
    return x > 0


def _max_of_all(x: Array) -> Array:
    """The maximum, a scalar, without a reduction if there is only one element."""
    return x.reshape(()) if _is_one(x) else lax.reduce_max(x, tuple(range(x.ndim)))


def _is_one(x: Array) -> bool:
    return all(n == 1 for n in x.shape)


@elementwise
def _zeros_rounded(x: Array, fmt: Format) -> Array:
    """`x`, whose finite elements are all zeros, as values of `fmt`; infinities and NaNs stay."""
    if isinstance(fmt, FloatFormat) and fmt.has_negative_zero:
        return x
    return jnp.where(x == 0, jnp.zeros_like(x), x)


def unscaled_values(
    q: Array,
    spec: BlockFormat,
    scales: Scales,
    dtype: DTypeLike = jnp.float32,
    *,
    is_own: bool = False,
) -> Array:
    """`q * scale`, finite where q is: the largest number of `dtype` for overflow.

    Args:
      dtype: Of the result, in which every other product is exact.
      is_own: Whether q and scales are results of `operand_values`, which takes fewer operations.
        Subnormal numbers of float32 may be zero then.
    """
    blocks = blocks_of(q, spec)
    elements = _elements(q, blocks, NEAREST, scales, dtype)
    return blocks.join(
        _of_elements(_unscaled, elements, spec, scales, blocks, is_short=True, is_own=is_own)
    )


def scaled_and_unscaled(
    x: Array, q: Array, spec: BlockFormat, scales: Scales
) -> tuple[Array, Array]:
    """`scaled_values` of `x` and `unscaled_values` of `q`, by one spreading of the scales."""
    blocks = blocks_of(x, spec)
    views = blocks.split(x), blocks.split(q)
    u, y = _of_elements(_scaled_and_unscaled, views, spec, scales, blocks, is_short=True)
    return blocks.join(u), blocks.join(y)


def single_scale(scales: Scales, spec: BlockFormat) -> Array:
    """The one scale of a tensor, a float32 scalar."""
    assert scales.scale is not None
    return effective(scales.scale, scales.tensor_scale, spec).reshape(())


def scaled_values(x: Array, spec: BlockFormat, scales: Scales) -> Array:
    """The numbers that are rounded: x / scale + zero point; float32, in the shape of `x`."""
    blocks = blocks_of(x, spec)
    elements = _elements(x, blocks, NEAREST, scales)
    return blocks.join(_of_elements(_unrounded, elements, spec, scales, blocks))


def dequantized(
    codes: Array, scales: Scales, blocks: Blocks, spec: BlockFormat, dtype: DTypeLike
) -> Array:
    """The numbers that codes and scales stand for, in the shape of `codes`."""
    elements = _elements(codes, blocks, NEAREST, scales, dtype)
    return blocks.join(_of_elements(_dequantized, elements, spec, scales, blocks))


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


class _Elements(NamedTuple):
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


def _elements(
    x: Array,
    blocks: Blocks,
    projection: Projection,
    scales: Scales,
    dtype: DTypeLike = jnp.float32,
) -> _Elements:
    view = blocks.split(x)
    projection = projection.drawn(x.shape).reshaped(blocks.split)
    zero_point = jax.tree.map(blocks.spread, scales.zero_point)  # or None
    return _Elements(view, projection, zero_point, np.dtype(dtype))


# What is computed for elements. `divide` and `multiply` apply the scale of their block.


def _codes(x: _Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    return element_codes(_scaled(x, divide), spec, x.projection, x.zero_point)


def _values(x: _Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    q = element_values(_scaled(x, divide), spec, x.projection, x.zero_point)
    return _saturated(multiply(q), q, x.dtype, is_finite=not spec.element.has_inf)


def _operands(x: _Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    q, wide = element_values(_scaled(x, divide), spec, x.projection, None), exact_float32(x.view)
    return jnp.where(jnp.isfinite(wide), q, wide).astype(x.view.dtype)


def _never_overflows(spec: BlockFormat) -> bool:
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


def _unlimited_operands(x: _Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    assert isinstance(spec.element, FloatFormat)
    return unlimited_values(_scaled(x, divide), spec.element).astype(x.view.dtype)


def _limited_operands(x: _Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    assert isinstance(spec.element, FloatFormat)
    wide, largest = exact_float32(x.view), np.float32(float(spec.element.max_finite))
    limited = lax.clamp(-largest, divide(wide), largest)
    limited = jnp.where(lax.is_finite(wide), limited, wide)
    return unlimited_values(limited, spec.element).astype(x.view.dtype)


def _unscaled(x: _Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
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


def _scaled_and_unscaled(
    views: tuple[Array, Array], spec: BlockFormat, divide: Map, multiply: Map
) -> tuple[Array, Array]:
    x, q = views
    return divide(exact_float32(x)), multiply(exact_float32(q))


def _unrounded(x: _Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
    u = divide(widened(x.view))
    return u if x.zero_point is None else u + x.zero_point.astype(u.dtype)


def _dequantized(x: _Elements, spec: BlockFormat, divide: Map, multiply: Map) -> Array:
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


def _scaled(x: _Elements, divide: Map) -> Array:
    """Elements divided by their scales, ready to be rounded.

    XLA may take a subnormal quotient for 0. Directed roundings must not: 1e-45 / 448, rounded
    toward positive, is E4M3FN's least value, 2**-9.
    """
    wide = widened(x.view)
    u = divide(wide)
    may_vanish = x.projection.rounding in _DIRECTED and wide.dtype == jnp.float32
    return kept_from_zero(u, wide) if may_vanish else u


def _of_elements(
    compute: Callable[[Any, BlockFormat, Map, Map], Made],
    elements: Any,
    spec: BlockFormat,
    scales: Scales,
    blocks: Blocks,
    nonzero: Array | None = None,
    *,
    is_short: bool = False,
    is_own: bool = False,
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
    """

    def by(way: Callable[..., Made], *factors: Array) -> Made:
        factors = tuple(factor.reshape(()) if _is_one(factor) else factor for factor in factors)
        return way(compute, elements, spec, *factors)

    if scales.scale is None:
        return by(_unchanged)
    if not spec.has_powers:
        scale = effective(scales.scale, scales.tensor_scale, spec, is_own=is_own)
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


def _nowhere(x: Array) -> Array:
    # Made from x, so that in `shard_map` it varies over the same mesh axes as x.
    return jnp.zeros_like(x, dtype=bool, shape=())


def _range(view: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The least and the largest finite element of each block and zero; NaN where one is NaN."""
    finite = jnp.where(jnp.isfinite(view), view, np.float32(0))
    poison = jnp.any(jnp.isnan(view), axis=axes, keepdims=True)
    ends = (f(finite, axis=axes, keepdims=True, initial=0) for f in (jnp.min, jnp.max))
    lowest, largest = (jnp.where(poison, np.float32(np.nan), end) for end in ends)
    return lowest, largest


def _amax_of_all(largest: Array, dtype: DTypeLike) -> Array:
    """The largest amax, a float32 scalar, from the `largest_ordinal` of blocks, none a NaN."""
    return exact_float32(from_magnitude_ordinal(_max_of_all(largest), dtype))


def _tensor_amax(x: Array, amax: Array) -> Array:
    """The largest finite |x| of all, from the amaxes of blocks.

    The amax of a block with a NaN is NaN, though its finite elements count here: then `x` is read
    once more.
    """
    poisoned = jnp.isnan(amax)

    if is_sharded(x):
        return largest_magnitude(x)
    within = lax.cond(
        jnp.any(poisoned), lambda: largest_magnitude(x), lambda: jnp.zeros_like(amax, shape=())
    )
    return jnp.maximum(jnp.max(jnp.where(poisoned, np.float32(0), amax)), within)
