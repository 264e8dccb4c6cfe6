"""Operands whose scales are parameters: LSQ and LSQ+ before a matmul.

LSQ rounds the operand; the matmul and its derivatives then use the rounded array as it is. A
kernel that was trained this way is stored as codes and its learned scale. The first value of a
scale comes from the operand in a first batch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import WIDTHS, exact_float32
from qtoolkit.formats import BlockFormat, Format
from qtoolkit.gradients import linear_with_transpose, lsq, lsq_plus, lsq_scale
from qtoolkit.gradients.internal import LEAST
from qtoolkit.products._calibration import BITS, MARKED, total_of
from qtoolkit.products._instruments import Tap, tapped
from qtoolkit.products._operand import Learned, Operand
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rounded import Rounded
from qtoolkit.scaling import QArray, quantize
from qtoolkit.scaling.internal import Scales, extreme, marked, operand_values

Array = jax.Array

# (scale, offset), float32 scalars. NaN until `start_scales` sets them; None if not learned.
LearnedScale = tuple[Array | None, Array | None]
_SIDES = ("lhs", "rhs")


def with_learned_scales(
    where: str,
    sides: tuple[Any, Any],
    recipe: Recipe,
    learned: tuple[LearnedScale, LearnedScale] | None,
    tap: Tap | None,
    zeros: Array | None,
) -> tuple[tuple[Any, Any], Tap | None]:
    """Rounds the operands that have a learned scale.

    Returns:
      Both operands, and `tap` without the roles that it has measured here.
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
        done = tuple(role for role in tap.roles if role > 1 or not recipe.learned[role])
        tap = dataclasses.replace(tap, roles=done)  # type: ignore[type-var]
    return (outs[0], outs[1]), tap


def _rounded(
    where: str,
    x: Array,
    operand: Operand,
    learned: LearnedScale,
    tap: Tap | None,
    zeros: Array | None,
    side: int,
) -> Array:
    """Rounds one operand by LSQ or LSQ+.

    If a tap measures the operand, its measurement becomes the gradient of `zeros[side]`: 0 is added
    to the result by a linear function of these zeros whose transpose returns the measurement.
    """
    (scale, offset), element = learned, operand.spec.element
    assert scale is not None
    if tap is not None:  # an instrument may look at a model before its scales are started
        scale = jnp.where(jnp.isnan(scale), lsq_scale(x, element), scale)
        offset = None if offset is None else jnp.where(jnp.isnan(offset), 0, offset)
    elif not isinstance(scale, jax.core.Tracer) and bool(np.isnan(np.asarray(scale))):
        raise ValueError(
            f"{where}: the learned scale of {_SIDES[side]} has not been started; write "
            "qtoolkit.nnx.start_scales(wrapped, batch) before the optimizer is made, or "
            "variables = qtoolkit.linen.start_scales(wrapped, variables, batch)"
        )
    y = _lsq(x, scale, offset, element)
    if tap is None or side not in tap.roles:
        return y
    assert zeros is not None
    shifted = x if offset is None else x - offset.astype(x.dtype)
    shifted, scale = lax.stop_gradient((shifted, scale))
    q, scales = operand_values(shifted, operand.spec, given=Scales(scale.reshape((1,) * x.ndim)))
    measured = tap(shifted, Rounded(q, scales, operand.spec))
    zero = _Zero(jax.ShapeDtypeStruct(y.shape, y.dtype))
    return y + linear_with_transpose(zero, _Measured(), (measured,), zeros[side])


# Always traced, so that a call outside of `jit` does the same as one inside: `lsq` then takes a
# scale that training has made negative for the least positive one.
@functools.partial(jax.jit, static_argnums=3)
def _lsq(x: Array, scale: Array, offset: Array | None, element: Format) -> Array:
    y = lsq(x, scale, element) if offset is None else lsq_plus(x, scale, offset, element)
    # `lsq` clamps infinities and maps NaN to 0. A loss scaler must see both in the result.
    return jnp.where(jnp.isfinite(exact_float32(x)), y, x)


def check_storable(where: str, operand: Operand, scale: Array | None) -> None:
    """Raises unless a kernel can be stored by its learned scale, or by a stack of them."""
    if isinstance(operand.scaling, Learned) and operand.scaling.offset:
        raise ValueError(
            f"{where} has a learned offset (LSQ+), q * scale + offset, expected a learned scale "
            "alone: the zero point of stored codes is an integer; train kernels by "
            "Learned(offset=False), as LSQ+ does, or serve the model from wrap"
        )
    is_known = not isinstance(scale, jax.core.Tracer | jax.ShapeDtypeStruct)
    if scale is None or (is_known and not np.isfinite(np.asarray(scale)).all()):
        raise ValueError(
            f"{where} has a learned scale that has not been started, or is not finite, expected "
            "a number: write start_scales, train the model, and quantize it then; to store a model "
            "without training write e.g. qtoolkit.recipes.w4a16"
        )


def stored_by_learned_scale(x: Array, operand: Operand, scale: Array) -> QArray:
    """`x` as codes and its learned scale. Dequantized it is `lsq(x, scale)`, bit for bit."""
    element = operand.spec.element
    scale = jnp.where(scale < LEAST, LEAST, scale)
    is_packed = element.bits in WIDTHS and x.ndim > 0
    spec = BlockFormat.tensor(element)  # LSQ knows no narrow range, and its scale is float32
    return quantize(x, spec, scale=scale.reshape((1,) * x.ndim), packed=is_packed)


@dataclasses.dataclass(frozen=True)
class _Zero:
    """Returns zeros that vary over the same mesh axes as its argument."""

    out: jax.ShapeDtypeStruct

    def __call__(self, residuals: tuple[Array, ...], zeros: Any) -> Array:
        return jnp.zeros_like(zeros, shape=self.out.shape, dtype=self.out.dtype)


@dataclasses.dataclass(frozen=True)
class _Measured:
    """Serves as the transpose of `_Zero`: returns the tap's measurement for any cotangent."""

    def __call__(self, residuals: tuple[Array, ...], cotangent: Array) -> Array:
        return residuals[0]


@dataclasses.dataclass(frozen=True)
class _StartTap:
    """Measures [uses, sum of mean(|x|), marked max(-x, 0), marked max(x, 0)] of an operand.

    A use is one run of the matmul in the step. `marked` encodes a number such that those of
    several runs can be added, and the largest read from the sum.
    """

    roles: tuple[int, ...] = (0, 1)
    size: int = 2 + 2 * MARKED

    def __call__(self, x: Array, rounded: Rounded) -> Array:
        wide = exact_float32(x)
        finite = jnp.where(jnp.isfinite(wide), wide, np.float32(0))
        count = jnp.maximum(jnp.sum(jnp.isfinite(wide), dtype=jnp.float32), 1)
        mean = jnp.sum(jnp.abs(finite) / count)
        ends = (marked(jnp.max(jnp.maximum(part, 0)), BITS) for part in (-finite, finite))
        return jnp.concatenate([jnp.stack([jnp.float32(1), mean]), *ends])


def first_scales(
    function: Callable[..., Any], *arguments: Any
) -> dict[tuple[str, str, int], Array]:
    """The first scale and offset of each operand that learns them, from one run of a pure function.

    float32[2] each, by (path of the layer, name of the matmul in it, 0 for lhs or 1 for rhs); NaN
    if the matmul was not measured.
    """
    measured, _ = tapped("start_scales", _StartTap(), total_of(function), *arguments)
    return {
        (*place, side): _first_scale(rows[side], operand)
        for place, recipe, rows in zip(
            measured.places, measured.recipes, measured.rows, strict=True
        )
        for side, operand in enumerate(recipe.forward)
        if operand is not None and operand.is_learned
    }


def _first_scale(row: Array, operand: Operand) -> Array:
    """float32[2]: scale and offset; NaN where the matmul was not used.

    LSQ: the scale is 2 mean(|x|) / sqrt(Qp), without an offset. LSQ+: the scale is the range of x,
    extended to zero, divided by the range of the format; the offset maps the least x to the least
    value of the format.
    """
    element = operand.spec.element
    uses = row[0]
    scale = row[1] / jnp.maximum(uses, 1) * np.float32(2 / math.sqrt(element.max_finite))
    offset = jnp.zeros_like(scale)
    if isinstance(operand.scaling, Learned) and operand.scaling.offset:
        below, above = (
            extreme(row[start : start + MARKED], BITS, lowest=False) for start in (2, 2 + MARKED)
        )
        steps = np.float32(float(element.max_finite - element.lowest))
        scale = above / steps + below / steps
        offset = -below - np.float32(float(element.lowest)) * scale
    scale = jnp.where(scale > 0, jnp.maximum(scale, LEAST), np.float32(1))
    return jnp.where(uses > 0, jnp.stack([scale, offset]), np.float32(np.nan))
