"""The engine that quantizes: divides elements by the scales of their blocks, rounds, dequantizes.

x is float32, float16 or bfloat16, read as exact float32 through a view of its blocks (`Blocks`), or
float64, whose scales follow from its float32. q is x / scale, rounded: one IEEE division by the
scale as it is stored, then one rounding.
`quantize`, `fake_quantize`, `metrics`, quantized matmuls, `round_cotangent` and the converter of
checkpoints all call these functions.

Each is a pair: a public function of whole arrays, and above it a private one of elements.

    block_codes          _codes                      x -> codes of x / scale
    block_values         _values                     x -> those codes times scale
    dequantized          _numbers                    codes -> numbers
    operand_values       _operands, or a short form  x -> q for a matmul, without scale
    operand_codes        _native_codes               the same as codes of 8-bit floats
    unscaled_values      _products                   q -> q * scale
    scaled_values        _scaled                     x -> x / scale + zero point
    scaled_and_unscaled  _quotients_and_products     both, with scales that are broadcast once

A value goes this way: `block_codes(x, spec, ..., scales)` calls `by_elements(_codes, x, ...)`. That
splits x into its view of blocks, spreads the scales over it, and calls `_codes(elements, spec,
scaling)` for all elements at once; the result is joined to the shape of x. So `_codes` says what is
computed, `by_elements` of which elements, `scaling` how one divides and multiplies by a scale.

They are apart for two reasons. There are six kinds of `scaling`, such as a division by float32
scales, or exponents of E8M0: `by_elements` chooses by the format, and no computation asks which.
And where scales are powers of two, one multiplication is faster than shifting exponents, but exact
only if no number is subnormal: then both branches of a condition have the same computation. It
becomes one primitive of JAX, too, which is traced once for all shapes (`casts.elementwise`).
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts import Projection, pack
from qtoolkit.casts.internal import (
    MODES,
    NEAREST,
    elementwise,
    exact_float32,
    has_unlimited_values,
    in_dtype,
    is_sharded,
    magnitude_ordinal,
    native_codes,
    on_cpu,
    unlimited_values,
    values_of,
    widened,
    without_underflow,
)
from qtoolkit.formats import FLOAT32, BlockFormat, FloatFormat, Format, format
from qtoolkit.scaling._blocks import Blocks
from qtoolkit.scaling._elements import (
    Elements,
    Scales,
    Scaling,
    by_elements,
    element_codes,
    element_values,
)
from qtoolkit.scaling._find_scales import NO_SCALES, max_of_all, scales_and_largest
from qtoolkit.scaling._scales import effective_scale, has_normal_powers

Array = jax.Array
# Roundings that do not make every tiny number 0: toward_positive rounds 2**-140 up to 2**-9, the
# least value of E4M3FN.
_DIRECTED = tuple(name for name, mode in MODES.items() if mode.below_middle != "never")


def _quotients(x: Elements, scaling: Scaling) -> Array:
    """Elements divided by their scales, to be rounded."""
    # XLA may read a subnormal quotient as 0. For directed roundings that would be wrong: 1e-45 /
    # 448, rounded toward positive, is the least value of E4M3FN, 2**-9.
    wide = widened(x.view)
    u = scaling.divide(wide)
    is_directed = x.projection.rounding in _DIRECTED and wide.dtype == jnp.float32
    return without_underflow(u, wide) if is_directed else u


def _without_overflow(y: Array, q: Array, dtype: DTypeLike, spec: BlockFormat) -> Array:
    """The results `y` = q * scale, rounded to `dtype`; only an infinite element is infinite."""
    # They may overflow: 65,504, the largest float16 number, becomes 4 * 2**14 in MXFP4. Overflow
    # becomes the largest number of `dtype`.
    rounded = in_dtype(y, dtype)
    overflows = jnp.isinf(rounded)  # a selection: minimum and maximum would make subnormals 0
    if spec.element.has_inf:
        overflows &= jnp.isfinite(q)
    largest = np.asarray(ml_dtypes.finfo(dtype).max, dtype)
    return jnp.where(overflows, jnp.where(y > 0, largest, -largest), rounded)


def _codes(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    return element_codes(_quotients(x, scaling), spec, x.projection, x.zero_point)


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

    Scales and `nonzero` are as from `find_scales`.
    """
    codes = by_elements(_codes, x, spec, scales, projection, nonzero=nonzero)
    if not packed:
        return codes
    # Without a barrier XLA for CPUs fuses the rounding into the strided loop that packs, and does
    # not vectorize it.
    return pack(lax.optimization_barrier(codes), spec.element)


def _values(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    q = element_values(_quotients(x, scaling), spec, x.projection, x.zero_point)
    return _without_overflow(scaling.multiply(q), q, x.dtype, spec)


def block_values(
    x: Array,
    spec: BlockFormat,
    projection: Projection,
    scales: Scales,
    nonzero: Array | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Array:
    """The codes of `block_codes`, dequantized to `dtype`."""
    if spec.has_powers and nonzero is not None:
        # In a block whose finite elements are all 0 the scale is 2**-127, and an infinity becomes
        # 448 * 2**-127. So a block with an infinity does not count as zeros.
        if is_sharded(x):
            nonzero |= jnp.any(jnp.isinf(x))
        else:
            # On a GPU always check: waiting for this condition takes longer than the check. `False`
            # is made from x, so that in `shard_map` it varies over the same mesh axes.
            need_not_look = on_cpu() & jnp.all(nonzero)
            nonzero |= lax.cond(
                need_not_look,
                lambda x: jnp.zeros_like(x, dtype=bool, shape=()),
                lambda x: jnp.any(jnp.isinf(x)),
                x,
            )
    return by_elements(_values, x, spec, scales, projection, dtype, nonzero=nonzero)


def _numbers(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    q = values_of(x.view, spec.element, jnp.float32)
    q = q if x.zero_point is None else q - x.zero_point.astype(jnp.float32)
    return _without_overflow(scaling.multiply(q), q, x.dtype, spec)


def dequantized(
    codes: Array, scales: Scales, blocks: Blocks, spec: BlockFormat, dtype: DTypeLike
) -> Array:
    """The numbers that codes and scales stand for, in the shape of `codes`."""
    return by_elements(_numbers, codes, spec, scales, dtype=dtype, blocks=blocks)


def _operands(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    q = element_values(_quotients(x, scaling), spec, x.projection, x.zero_point)
    numbers = exact_float32(x.view)
    return jnp.where(jnp.isfinite(numbers), q, numbers).astype(x.view.dtype)


def _limited_operands(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    """The same in few operations, to nearest, by `unlimited_values`."""
    assert isinstance(spec.element, FloatFormat)
    wide, largest = exact_float32(x.view), np.float32(float(spec.element.max_finite))
    limited = lax.clamp(-largest, scaling.divide(wide), largest)
    limited = jnp.where(lax.is_finite(wide), limited, wide)
    return unlimited_values(limited, spec.element).astype(x.view.dtype)


def _unlimited_operands(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    """The same without a clamp, for elements that `_never_overflow`."""
    assert isinstance(spec.element, FloatFormat)
    return unlimited_values(_quotients(x, scaling), spec.element).astype(x.view.dtype)


def _never_overflow(spec: BlockFormat) -> bool:
    """Whether elements that are divided by the scale of their own block never overflow `spec`."""
    # A power of two that is `amax / 448` rounded up leaves at most 448. Otherwise amax / (amax /
    # 448), with both quotients rounded, exceeds 448 by at most two units in float32's last place,
    # which are rounded away.
    if spec.rule in ("rceil", "ceil") and has_normal_powers(spec):
        return True
    is_exact = spec.scale == FLOAT32 and spec.tensor_scale is None and not spec.element_exponent
    is_finite = spec.largest >= 1  # the scale
    return is_exact and is_finite and spec.rule == "amax" and has_unlimited_values(spec.element)


def operand_values(
    x: Array,
    spec: BlockFormat,
    projection: Projection = NEAREST,
    fixed: Scales = NO_SCALES,
    *,
    is_power: bool = False,
) -> tuple[Array, Scales]:
    """`x` as values q of the element format in its own dtype, and the scales: x ~ q * scale.

    Infinities and NaNs stay what they are in q, whatever the format: a product of q is not finite
    wherever that of x is not. With zero points q is the integer less its zero point, which the
    dtype of `x` holds; `is_power` says that fixed float32 scales are powers of two.
    """
    scales, largest = scales_and_largest(x, spec, fixed, holds_nan=True)
    is_own = fixed.scale is None and fixed.tensor_scale is None
    compute = _operands
    if projection == NEAREST and has_unlimited_values(spec.element):
        compute = _unlimited_operands if is_own and _never_overflow(spec) else _limited_operands

    def rounded() -> Array:
        return by_elements(
            compute, x, spec, scales, projection, is_short=True, is_own=is_own, is_power=is_power
        )

    # A branch, see below, is of no use without a scale, because nothing is divided. Sharded arrays
    # must not enter a branch, see `is_sharded`. Operands by blocks are multiplied by their scales
    # before the matmul, in the loop that rounds, so nothing is read twice; with a branch MXFP8
    # took 1.5 times as long to compile.
    if scales.scale is None or is_sharded(x) or spec.block:
        return rounded(), scales
    if largest is None:
        largest = magnitude_ordinal(effective_scale(scales.scale, scales.tensor_scale, spec))
    # On CPUs the rounding stays inside a branch, because XLA writes the result of a branch to
    # memory once. Otherwise XLA repeats the rounding in every matmul and every transposed copy
    # that reads q, and writes the quotient, which it does not repeat, to memory. (A training step
    # at d = 512 reads and writes 2.27 GB that way, 2.05 GB with a branch, 1.45 GB unquantized.) A
    # barrier does not help, because XLA for CPUs removes it before it fuses. The other branch runs
    # only if all finite elements are zero, and gives the same result then.
    is_zero_on_cpu = on_cpu() & (max_of_all(largest) == 0)
    return lax.cond(is_zero_on_cpu, lambda: _zeros_rounded(x, spec.element), rounded), scales


@elementwise
def _zeros_rounded(x: Array, fmt: Format) -> Array:
    """`x`, whose finite elements are all zeros, as values of `fmt`; infinities and NaNs stay."""
    if isinstance(fmt, FloatFormat) and fmt.has_negative_zero:
        return x
    return jnp.where(x == 0, jnp.zeros_like(x), x)


def _native_codes(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    fmt = spec.element
    assert isinstance(fmt, FloatFormat)
    wide, largest = exact_float32(x.view), np.float32(float(fmt.max_finite))
    codes = native_codes(lax.clamp(-largest, scaling.divide(wide), largest), fmt)
    return jnp.where(lax.is_finite(wide), codes, np.uint8(fmt.nan_codes[0]))


def operand_codes(x: Array, spec: BlockFormat, scale: Array, *, is_power: bool = False) -> Array:
    """The codes of `operand_values`, uint8, for float32 scales; infinities are NaNs.

    Elements are floats of 8 bits of which `has_native_codes`.
    """
    return by_elements(_native_codes, x, spec, Scales(scale), is_power=is_power)


def _products(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    q = exact_float32(x.view)
    y = scaling.multiply(q)
    if may_overflow(spec, x.dtype):
        largest = np.float32(ml_dtypes.finfo(x.dtype).max)
        y = jnp.where(lax.is_finite(q), lax.clamp(-largest, y, largest), y)
    return y.astype(x.dtype)  # exact, so XLA may skip it


def may_overflow(spec: BlockFormat, dtype: DTypeLike) -> bool:
    """Whether an element times its scale may be more than the largest number of `dtype`."""
    # MXFP8 rounds 3.3e38 to 256 * 2**120, int8 rounds float32's largest number to 127 scales: both
    # are infinite in float32, and sums of a matmul would be NaN, through `0 * inf`.
    assert spec.scale is not None
    largest = max(spec.element.max_finite, -spec.element.lowest) * spec.scale.max_finite
    return spec.tensor_scale is not None or largest > format(dtype).max_finite


def unscaled_values(
    q: Array,
    spec: BlockFormat,
    scales: Scales,
    dtype: DTypeLike = jnp.float32,
    *,
    is_own: bool = False,
) -> Array:
    """`q * scale`, finite where q is: overflow becomes the largest number of `dtype`.

    `dtype` must hold every product that does not overflow. With `is_own` q and scales are results
    of `operand_values`, which takes fewer operations; float32 subnormals may be zero then.
    """
    return by_elements(_products, q, spec, scales, dtype=dtype, is_short=True, is_own=is_own)


def _scaled(x: Elements, spec: BlockFormat, scaling: Scaling) -> Array:
    u = scaling.divide(widened(x.view))
    return u if x.zero_point is None else u + x.zero_point.astype(u.dtype)


def scaled_values(x: Array, spec: BlockFormat, scales: Scales) -> Array:
    """The numbers that are rounded: x / scale + zero point; float32, in the shape of `x`."""
    return by_elements(_scaled, x, spec, scales)


def _quotients_and_products(
    x: Elements, spec: BlockFormat, scaling: Scaling
) -> tuple[Array, Array]:
    numbers, q = x.view
    return scaling.divide(exact_float32(numbers)), scaling.multiply(exact_float32(q))


def scaled_and_unscaled(
    x: Array, q: Array, spec: BlockFormat, scales: Scales
) -> tuple[Array, Array]:
    """`scaled_values` of `x` and `unscaled_values` of `q`; the scales are broadcast once."""
    return by_elements(_quotients_and_products, (x, q), spec, scales, is_short=True)


def single_scale(scales: Scales, spec: BlockFormat) -> Array:
    """The one scale of a tensor, a float32 scalar."""
    assert scales.scale is not None
    return effective_scale(scales.scale, scales.tensor_scale, spec).reshape(())
