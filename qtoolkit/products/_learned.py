"""Learned scales (LSQ, learned step size quantization; LSQ+ also learns an offset).

The scale of such an operand is a parameter. The operand is rounded before the matmul, which then
takes the rounded array as an unquantized operand. `start_scales` computes the first value of a
scale from the operand in one batch. `quantize` stores a kernel as codes and its learned scale.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import WIDTHS, exact_float32, straight_through
from qtoolkit.formats import BlockFormat, Format
from qtoolkit.gradients import linear_with_transpose, lsq, lsq_plus, lsq_scale
from qtoolkit.gradients.internal import LEAST
from qtoolkit.products._operand import Learned, Operand
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rounded import Rounded
from qtoolkit.products._taps import Seen, Tap
from qtoolkit.scaling import QArray, quantize
from qtoolkit.scaling.internal import Scales, operand_values

Array = jax.Array

# (scale, offset), float32 scalars. NaN until `start_scales` sets them; None if not learned.
LearnedScale = tuple[Array | None, Array | None]
_SIDES = ("lhs", "rhs")  # also the roles 0 and 1 of `_taps.ROLES`


def with_learned_scales(
    where: str,
    sides: tuple[Any, Any],
    recipe: Recipe,
    learned: tuple[LearnedScale, LearnedScale] | None,
    tap: Tap | None,
    zeros: Array | None,
) -> tuple[tuple[Any, Any], Tap | None]:
    """Rounds the operands that have a learned scale.

    Args:
      where: Starts error messages.
      sides: lhs and rhs, arrays or stored kernels.
      zeros: `State.zeros`, through whose gradient the measurements of `tap` leave.

    Returns:
      lhs and rhs; and the tap for the matmul, which must not measure again what `_rounded` has
      measured: the operand before rounding is known only here.
    """
    outs = list(sides)
    for side, operand in enumerate(recipe.forward):
        if operand is None or not operand.is_learned:
            continue
        if learned is None or learned[side][0] is None:
            raise ValueError(
                f"{where}: the recipe has Learned scaling, whose scales are parameters, and there "
                f"is none for {_SIDES[side]}; expected a layer of Flax in a model from "
                'qtoolkit.nnx.wrap, or of linen and variables with its "qtoolkit_scales", which '
                "qtoolkit.linen.start_scales(wrapped, variables, batch) makes"
            )
        outs[side] = _rounded(where, sides[side], operand, learned[side], tap, zeros, side)
    if tap is not None:
        measured = [side for side, is_learned in enumerate(recipe.learned) if is_learned]
        roles = tuple(role for role in tap.roles if role not in measured)
        tap = dataclasses.replace(tap, roles=roles)  # type: ignore[type-var]
    return (outs[0], outs[1]), tap


def unstarted_error(where: str, side: str) -> ValueError:
    return ValueError(
        f"{where}: the learned scale of {side} has not been started; write "
        "qtoolkit.nnx.start_scales(wrapped, batch) before the optimizer is made, or "
        "variables = qtoolkit.linen.start_scales(wrapped, variables, batch)"
    )


def _rounded(
    where: str,
    x: Array,
    operand: Operand,
    learned: LearnedScale,
    tap: Tap | None,
    zeros: Array | None,
    side: int,
) -> Array:
    """Rounds one operand by LSQ or LSQ+, and measures it if `tap` has its role."""
    scale, offset = learned
    assert scale is not None
    # Under `jit` the number is not known: a NaN then makes the result NaN.
    if not isinstance(scale, jax.core.Tracer) and bool(np.isnan(np.asarray(scale))):
        raise unstarted_error(where, _SIDES[side])
    y = _lsq(x, scale, offset, operand.spec)
    if tap is None or side not in tap.roles:
        return y
    assert zeros is not None
    shifted = x if offset is None else x - offset.astype(x.dtype)
    shifted, scale = lax.stop_gradient((shifted, scale))
    spec = dataclasses.replace(operand.spec, zero_point=False)
    q, scales = operand_values(shifted, spec, fixed=Scales(scale.reshape((1,) * x.ndim)))
    measurement = tap(shifted, Rounded(q, scales, spec))
    # Adds zeros to y. Their derivative makes the measurement the gradient of `zeros[side]`: see
    # `_taps` for why measurements are gradients.
    zero = _Zero(jax.ShapeDtypeStruct(y.shape, y.dtype))
    return y + linear_with_transpose(zero, _ReturnMeasurement(), (measurement,), zeros[side])


# Training may make a scale negative. Outside of `jit`, `lsq` raises an error for it; under `jit` it
# takes the least positive number in its place. The `jit` here makes it always do the latter.
@functools.partial(jax.jit, static_argnums=3)
def _lsq(x: Array, scale: Array, offset: Array | None, spec: BlockFormat) -> Array:
    element = spec.element
    if offset is None:
        y = lsq(x, scale, element)
    elif not spec.zero_point:
        y = lsq_plus(x, scale, offset, element)
    else:
        # The offset is a whole number of scales. It learns as if it were not rounded to one, and
        # the numbers are those of the codes that `quantize` stores.
        positive, zero_point = _integers(scale, offset, element)
        whole = straight_through(offset, -zero_point.astype(jnp.float32) * positive)
        y = lsq_plus(x, scale, whole, element)
        stored = _stored(lax.stop_gradient(x), positive, zero_point, element)
        y = straight_through(y, stored.dequantize())
    # `lsq` clamps infinities, and integers have no NaN. A loss scaler must see both in the result.
    return jnp.where(jnp.isfinite(exact_float32(x)), y, x)


def _integers(scale: Array, offset: Array, element: Format) -> tuple[Array, Array]:
    """The scale as it is used, and the zero point, int32, for which 0 is one of the numbers."""
    positive = lax.stop_gradient(jnp.where(scale < LEAST, LEAST, scale))
    lowest, largest = float(element.lowest), float(element.max_finite)
    whole = jnp.clip(-jnp.round(lax.stop_gradient(offset) / positive), lowest, largest)
    return positive, jnp.where(jnp.isnan(whole), 0, whole).astype(jnp.int32)


def _stored(x: Array, scale: Array, zero_point: Array | None, element: Format) -> QArray:
    is_packed = element.bits in WIDTHS and x.ndim > 0
    # Not the operand's format: `lsq` uses the lowest integer even if `narrow_range` excludes it,
    # and its scale is float32.
    spec = BlockFormat.tensor(element, zero_point=zero_point is not None)
    whole = None if zero_point is None else zero_point.reshape((1,) * x.ndim)
    scale = scale.reshape((1,) * x.ndim)
    return quantize(x, spec, scale=scale, zero_point=whole, packed=is_packed)


def check_storable(where: str, operand: Operand, scale: Array | None) -> None:
    """Raises unless a kernel can be stored by its learned scale, or by a stack of them."""
    has_offset = isinstance(operand.scaling, Learned) and operand.scaling.offset
    if has_offset and not operand.spec.zero_point:
        name = operand.spec.element.name
        raise ValueError(
            f"{where} has a learned offset (LSQ+), q * scale + offset, expected a whole number of "
            "scales, as zero points of stored codes are; train it in "
            f"BlockFormat.tensor({name!r}, zero_point=True), or serve the model from wrap"
        )
    is_known = not isinstance(scale, jax.core.Tracer | jax.ShapeDtypeStruct)
    if scale is None or (is_known and not np.isfinite(np.asarray(scale)).all()):
        raise ValueError(
            f"{where} has a learned scale that has not been started, or is not finite, expected "
            "a number: write start_scales, train the model, and quantize it then; to store a model "
            "without training write e.g. qtoolkit.recipes.w4a16"
        )


def stored_by_learned_scale(
    x: Array, operand: Operand, scale: Array, offset: Array | None
) -> QArray:
    """A finite `x` as codes and its learned scale; the codes stand for the bits of `_lsq`."""
    element = operand.spec.element
    if offset is None:
        return _stored(x, jnp.where(scale < LEAST, LEAST, scale), None, element)  # as `lsq` does
    return _stored(x, *_integers(scale, offset, element), element)


@dataclasses.dataclass(frozen=True)
class _Zero:
    """A linear function whose result is zeros, which vary over the mesh axes of its argument."""

    out: jax.ShapeDtypeStruct

    def __call__(self, residuals: tuple[Array, ...], zeros: Any) -> Array:
        return jnp.zeros_like(zeros, shape=self.out.shape, dtype=self.out.dtype)


@dataclasses.dataclass(frozen=True)
class _ReturnMeasurement:
    """The transpose that `_rounded` gives to `_Zero`: the measurement, for any cotangent."""

    def __call__(self, residuals: tuple[Array, ...], cotangent: Array) -> Array:
        return residuals[0]


def with_first_scales(
    kept: Mapping[str, Array], operands: tuple[Any, Any], recipe: Recipe
) -> dict[str, Array]:
    """The state of a matmul with first values for learned scales that were not started.

    Args:
      operands: Those at hand, in the order (input, kernel).
    """
    new = dict(kept)
    for side, operand in enumerate(recipe.forward):
        scale, offset = (f"{_SIDES[side]}_{part}" for part in ("scale", "offset"))
        if operand is not None and operand.is_learned and scale in kept:
            first = lsq_scale(operands[side], operand.spec.element)
            new[scale] = jnp.where(jnp.isnan(kept[scale]), first, kept[scale])
            if offset in kept:
                new[offset] = jnp.where(jnp.isnan(kept[offset]), 0, kept[offset])
    return new


@dataclasses.dataclass(frozen=True, eq=False)
class Starting:
    """A `multiply` that also sees, by side, what the first value of a learned scale follows from.

    Largest: float32[2], the largest of max(-x, 0) and of max(x, 0). Total: float32[2], the number
    of runs, and the sum of mean(|x|).
    """

    quantizing: Any  # `Quantizing`, which imports this file

    def __call__(self, matmul: Any, call: Any, planted: Any) -> tuple[Any, Seen | None]:
        out, _ = self.quantizing(matmul, call, planted)
        recipe: Recipe | None = self.quantizing.recipe_of(matmul)
        operands = (call.lhs, call.rhs) if matmul.kernel != 0 else (call.rhs, call.lhs)
        largest, total = {}, {}
        for side in [] if recipe is None else [i for i in (0, 1) if recipe.learned[i]]:
            values = exact_float32(operands[side])
            finite = jnp.where(jnp.isfinite(values), values, np.float32(0))
            count = jnp.maximum(jnp.sum(jnp.isfinite(values), dtype=jnp.float32), 1)
            mean = jnp.sum(jnp.abs(finite) / count)
            ends = [jnp.max(jnp.maximum(part, 0)) for part in (-finite, finite)]
            largest[side] = jnp.stack(ends)
            total[side] = jnp.stack([jnp.ones_like(mean), mean])
        return out, Seen(largest, total)


def first_scale(ends: Array, runs_and_mean: Array, operand: Operand) -> Array:
    """float32[2, ...]: scale and offset, from what `Starting` saw; NaN if there was no run.

    The axes behind are those of layers whose kernels a scan slices: `ends` is float32[..., 2].

    LSQ: the scale is 2 mean(|x|) / sqrt(Qp), where Qp is the largest value of the format. LSQ+: the
    scale is (max(x, 0) - min(x, 0)) / (Qp - Qn), where Qn is the lowest one; with the offset,
    min(x, 0) becomes Qn.
    """
    element = operand.spec.element
    runs, mean = jnp.moveaxis(runs_and_mean, -1, 0)
    scale = mean / jnp.maximum(runs, 1) * np.float32(2 / math.sqrt(element.max_finite))
    offset = jnp.zeros_like(scale)
    if isinstance(operand.scaling, Learned) and operand.scaling.offset:
        below, above = jnp.moveaxis(ends, -1, 0)
        width = np.float32(float(element.max_finite - element.lowest))
        scale = above / width + below / width  # not their sum first: it may overflow
        offset = -below - np.float32(float(element.lowest)) * scale
    scale = jnp.where(scale > 0, jnp.maximum(scale, LEAST), np.float32(1))
    return jnp.where(runs > 0, jnp.stack([scale, offset]), np.float32(np.nan))
