"""Which scales an array gets: from the amax of its blocks, and from its elements where they decide.

`_scales` has the rules, from an amax to a scale. Where a rule gives several candidates, as
`four_over_six` does, the one with the least squared error of the elements is taken.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
    NEAREST,
    Rounding,
    codes_of,
    elementwise,
    exact_float32,
    from_magnitude_ordinal,
    is_sharded,
    is_zero,
    product,
    quotient,
    values_of,
)
from qtoolkit.formats import FLOAT32, BlockFormat
from qtoolkit.scaling._blocks import blocks_of, explicit_spec, largest_magnitude, largest_ordinal
from qtoolkit.scaling._elements import Scales, element_values, is_one
from qtoolkit.scaling._scales import (
    asymmetric,
    candidate_scales,
    effective_scale,
    tensor_scale_from,
)

Array = jax.Array
NO_SCALES = Scales()


def find_scales(
    x: Array, spec: BlockFormat, fixed: Scales = NO_SCALES
) -> tuple[Scales, Array | None]:
    """The scales of `x` as stored, and which blocks have an amax above zero.

    `fixed` scales are used as they are. If the element format has no NaN, a NaN in a block makes
    the scale of the block NaN; otherwise only its own element is NaN. The second result is bool, in
    a shape that broadcasts to the view; None if scales were fixed, or the format has no scales or
    has zero points.
    """
    scales, largest = scales_and_largest(x, spec, fixed, holds_nan=spec.element.has_nan)
    return scales, None if largest is None else _above_zero(largest)


@elementwise
def _above_zero(x: Array) -> Array:
    return x > 0


def scales_and_largest(
    x: Array, spec: BlockFormat, fixed: Scales, *, holds_nan: bool
) -> tuple[Scales, Array | None]:
    """The scales of `x`, and the `largest_ordinal` of each block in place of `nonzero`.

    With `holds_nan` elements can be NaN, so that the scale of their block need not be.
    """
    if spec.scale is None or fixed.scale is not None:
        return fixed, None
    if x.dtype == jnp.float64:
        # To odd for powers of two: an amax just above 448 must stay above it.
        x = in_float32(x, "to_odd" if spec.has_powers else "nearest_even")
    blocks = blocks_of(x, spec)
    view = blocks.split(x)
    if spec.zero_point:
        scale, zero_point = asymmetric(
            *finite_range(exact_float32(view), blocks.element_axes), spec
        )
        return Scales(blocks.gather(scale), None, blocks.gather(zero_point)), None
    largest = largest_ordinal(view, blocks.element_axes, nan_wins=not holds_nan)
    amax = exact_float32(from_magnitude_ordinal(largest, view.dtype))
    tensor_scale = fixed.tensor_scale
    if spec.tensor_scale is not None and tensor_scale is None:
        if holds_nan:  # then no block has the amax NaN
            all_of_x = exact_float32(from_magnitude_ordinal(max_of_all(largest), x.dtype))
        else:
            all_of_x = _tensor_amax(x, amax)
        tensor_scale = tensor_scale_from(all_of_x, spec)
    scale = _best_scale(view, blocks.element_axes, amax, spec, tensor_scale)
    return Scales(blocks.gather(scale), tensor_scale), largest


@elementwise
def in_float32(x: Array, rounding: Rounding = "nearest_even") -> Array:
    """Floats as float32; float64 beyond the range of float32 saturates."""
    if x.dtype != jnp.float64:
        return exact_float32(x)
    return values_of(codes_of(x, FLOAT32, Projection(rounding, "propagate")), FLOAT32, jnp.float32)


def finite_range(view: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """The least and the largest finite element of each block and zero; NaN where one is NaN."""
    finite = jnp.where(jnp.isfinite(view), view, np.float32(0))
    has_nan = jnp.any(jnp.isnan(view), axis=axes, keepdims=True)
    ends = (f(finite, axis=axes, keepdims=True, initial=0) for f in (jnp.min, jnp.max))
    lowest, largest = (jnp.where(has_nan, np.float32(np.nan), end) for end in ends)
    return lowest, largest


def max_of_all(x: Array) -> Array:
    """The maximum, a scalar, without a reduction if there is only one element."""
    return x.reshape(()) if is_one(x) else lax.reduce_max(x, tuple(range(x.ndim)))


def _tensor_amax(x: Array, amax: Array) -> Array:
    """The largest finite |x| of all, from the amaxes of blocks."""
    # The amax of a block with a NaN is NaN, but its finite elements count here. So if there is one,
    # `x` is read once more.
    has_nan = jnp.isnan(amax)
    if is_sharded(x):
        return largest_magnitude(x)
    within = lax.cond(
        jnp.any(has_nan), lambda: largest_magnitude(x), lambda: jnp.zeros_like(amax, shape=())
    )
    return jnp.maximum(jnp.max(jnp.where(has_nan, np.float32(0), amax)), within)


def _best_scale(
    view: Array,
    axes: tuple[int, ...],
    amax: Array,
    spec: BlockFormat,
    tensor_scale: Array | None,
) -> Array:
    """Of several candidates the one with the least sum of squared errors, of equal ones the first.

    The `axes` of `view` run over the elements of a block, which are rounded to nearest.
    """
    best, *others = candidate_scales(amax, spec, tensor_scale)
    if not others:
        return best
    wide = exact_float32(view)

    def spread(x: Array) -> Array:
        return x.reshape(()) if is_one(x) else jnp.broadcast_to(x, wide.shape)

    def cost(scale: Array) -> Array:
        step = spread(effective_scale(scale, tensor_scale, spec))
        return _sum(_squared_errors(wide, step, spread(amax), spec), axes)

    least = cost(best)
    for scale in others:
        error = cost(scale)
        best = jnp.where(error < least, scale, best)
        least = jnp.minimum(error, least)
    return best


@elementwise
def _squared_errors(x: Array, step: Array, amax: Array, spec: BlockFormat) -> Array:
    """Squared errors in units of amax, which neither overflow nor all underflow."""
    u = quotient(x, step)
    q = element_values(u, spec, NEAREST, None)
    unit = quotient(step, jnp.where(is_zero(amax), np.float32(1), amax))
    error = product(q - u, unit)
    return jnp.where(jnp.isfinite(x), product(error, error), np.float32(0))


def _sum(x: Array, axes: tuple[int, ...]) -> Array:
    """The sum over `axes`, which keep length 1, in an order that does not depend on the program."""
    # A reduction of XLA adds in any order, so eager and under `jit` different scales could win.
    for axis in axes:
        if not isinstance(x.shape[axis], int) or explicit_spec(x)[axis] is not None:
            x = jnp.sum(x, axis=axis, keepdims=True)
        while x.shape[axis] > 1:
            half = x.shape[axis] // 2
            first, second, rest = (
                lax.slice_in_dim(x, begin, end, axis=axis)
                for begin, end in ((0, half), (half, 2 * half), (2 * half, x.shape[axis]))
            )
            x = first + second
            x = lax.concatenate([x, rest], axis) if rest.shape[axis] else x
    return x
