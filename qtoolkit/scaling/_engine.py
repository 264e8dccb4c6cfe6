"""The engine that quantizes: finds scales, divides elements by them, rounds, and dequantizes.

x is float32, float16 or bfloat16, read as exact float32 through a view of its blocks (`Blocks`), or
float64, whose scales follow from its float32. q is x / scale, rounded: one IEEE division by the
scale as it is stored, then one rounding.
`quantize`, `fake_quantize`, `metrics`, quantized products, `round_cotangent` and the converter of
checkpoints all call these functions.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts import Projection, pack
from qtoolkit.casts.internal import (
    NEAREST,
    Rounding,
    codes_of,
    elementwise,
    exact_float32,
    from_magnitude_ordinal,
    has_unlimited_values,
    is_sharded,
    magnitude_ordinal,
    on_cpu,
    values_of,
)
from qtoolkit.formats import (
    FLOAT32,
    BlockFormat,
    FloatFormat,
    Format,
)
from qtoolkit.scaling._blocks import Blocks, largest_magnitude, largest_ordinal
from qtoolkit.scaling._elements import (
    Scales,
    elements_of,
    is_one,
    never_overflows,
    of_elements,
    to_codes,
    to_dequantized,
    to_limited_operands,
    to_native_codes,
    to_operands,
    to_scaled_and_unscaled,
    to_unlimited_operands,
    to_unrounded,
    to_unscaled,
    to_values,
)
from qtoolkit.scaling._scales import (
    asymmetric,
    effective,
    tensor_scale_from,
)
from qtoolkit.scaling._trials import best_scale

Array = jax.Array
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
    elements = elements_of(x, blocks, projection, scales)
    codes = blocks.join(of_elements(to_codes, elements, spec, scales, blocks, nonzero))
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
    elements = elements_of(x, blocks, projection, scales, dtype)
    return blocks.join(of_elements(to_values, elements, spec, scales, blocks, nonzero))


def operand_values(
    x: Array,
    spec: BlockFormat,
    projection: Projection = NEAREST,
    given: Scales = NOT_GIVEN,
    *,
    is_power: bool = False,
) -> tuple[Array, Scales]:
    """`x` as values q of the element format, and the scales of its blocks: x ~ q * scale.

    Infinities and NaNs stay what they are in q, whatever the format: a product of q is not finite
    wherever that of x is not.

    Args:
      spec: Any without zero points. The dtype of `x` holds its elements.
      given: Scales to use instead of those that `x` itself has.
      is_power: Whether given float32 scales are powers of two.

    Returns:
      q: Shape and dtype of `x`.
      scales: As stored.
    """
    scales, largest = _found(x, spec, given, holds_nan=True)
    blocks = blocks_of(x, spec)
    is_own = given.scale is None and given.tensor_scale is None
    compute = to_operands
    if projection == NEAREST and has_unlimited_values(spec.element):
        compute = to_unlimited_operands if is_own and never_overflows(spec) else to_limited_operands

    def everything() -> Array:
        elements = elements_of(x, blocks, projection, scales)
        return blocks.join(
            of_elements(
                compute,
                elements,
                spec,
                scales,
                blocks,
                is_short=True,
                is_own=is_own,
                is_power=is_power,
            )
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


def operand_codes(x: Array, spec: BlockFormat, scale: Array, *, is_power: bool = False) -> Array:
    """The codes of `operand_values`, uint8, for float32 scales; infinities are NaNs.

    Args:
      spec: Elements are floats of 8 bits of which `has_native_codes`.
      is_power: Whether scales are powers of two.
    """
    blocks, scales = blocks_of(x, spec), Scales(scale)
    elements = elements_of(x, blocks, NEAREST, scales)
    return blocks.join(
        of_elements(to_native_codes, elements, spec, scales, blocks, is_power=is_power)
    )


@elementwise
def _above_zero(x: Array) -> Array:
    return x > 0


def _max_of_all(x: Array) -> Array:
    """The maximum, a scalar, without a reduction if there is only one element."""
    return x.reshape(()) if is_one(x) else lax.reduce_max(x, tuple(range(x.ndim)))


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
    elements = elements_of(q, blocks, NEAREST, scales, dtype)
    return blocks.join(
        of_elements(to_unscaled, elements, spec, scales, blocks, is_short=True, is_own=is_own)
    )


def scaled_and_unscaled(
    x: Array, q: Array, spec: BlockFormat, scales: Scales
) -> tuple[Array, Array]:
    """`scaled_values` of `x` and `unscaled_values` of `q`, by one spreading of the scales."""
    blocks = blocks_of(x, spec)
    views = blocks.split(x), blocks.split(q)
    u, y = of_elements(to_scaled_and_unscaled, views, spec, scales, blocks, is_short=True)
    return blocks.join(u), blocks.join(y)


def single_scale(scales: Scales, spec: BlockFormat) -> Array:
    """The one scale of a tensor, a float32 scalar."""
    assert scales.scale is not None
    return effective(scales.scale, scales.tensor_scale, spec).reshape(())


def scaled_values(x: Array, spec: BlockFormat, scales: Scales) -> Array:
    """The numbers that are rounded: x / scale + zero point; float32, in the shape of `x`."""
    blocks = blocks_of(x, spec)
    elements = elements_of(x, blocks, NEAREST, scales)
    return blocks.join(of_elements(to_unrounded, elements, spec, scales, blocks))


def dequantized(
    codes: Array, scales: Scales, blocks: Blocks, spec: BlockFormat, dtype: DTypeLike
) -> Array:
    """The numbers that codes and scales stand for, in the shape of `codes`."""
    elements = elements_of(codes, blocks, NEAREST, scales, dtype)
    return blocks.join(of_elements(to_dequantized, elements, spec, scales, blocks))


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
