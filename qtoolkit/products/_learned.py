"""Operands whose scales are parameters: LSQ and LSQ+ in front of a product.

The product then takes what they give as it is, and so do its derivatives.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.formats import Format
from qtoolkit.gradients import linear_with_transpose, lsq, lsq_plus, lsq_scale
from qtoolkit.products._operand import Cut, Rounded
from qtoolkit.products._recipe import Operand, Recipe
from qtoolkit.products._taps import Tap
from qtoolkit.scaling.internal import Scales, operand_values

Array = jax.Array

# Scale and offset, float32 scalars; NaN before they are started, None for what is not learned.
LearnedScale = tuple[Array | None, Array | None]


def with_learned_scales(
    where: str,
    sides: tuple[Any, Any],
    recipe: Recipe,
    learned: tuple[LearnedScale, LearnedScale] | None,
    tap: Tap | None,
    zeros: Array | None,
) -> tuple[tuple[Any, Any], Tap | None]:
    """Both operands as learned scales round them, and a tap for what remains."""
    if learned is None:
        raise ValueError(
            f"{where}: the recipe has Learned scaling, whose scales are parameters; expected a "
            "layer of Flax in a model from qtoolkit.nnx.wrap"
        )
    outs = list(sides)
    for side, operand in enumerate(recipe.forward):
        if operand is None or not operand.is_learned:
            continue
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
    (scale, offset), element = learned, operand.spec.element
    assert scale is not None
    if tap is not None:  # an instrument may look at a model before its scales are started
        scale = jnp.where(jnp.isnan(scale), lsq_scale(x, element), scale)
        offset = None if offset is None else jnp.where(jnp.isnan(offset), 0, offset)
    elif not isinstance(scale, jax.core.Tracer) and bool(jnp.isnan(scale)):
        raise ValueError(
            f"{where}: the learned scale of {('lhs', 'rhs')[side]} has not been started; write "
            "qtoolkit.nnx.start_scales(wrapped, batch) before the optimizer is made"
        )
    y = _lsq(x, scale, offset, element)
    if tap is None or side not in tap.roles:
        return y
    assert zeros is not None
    held = x if offset is None else x - offset.astype(x.dtype)
    held, scale = lax.stop_gradient((held, scale))
    q, scales = operand_values(held, operand.spec, given=Scales(scale.reshape((1,) * x.ndim)))
    seen = tap(held, Rounded(q, scales, operand.spec), Cut(operand, None, ()))
    out = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return y + linear_with_transpose(_Nothing(out), _Seen(), (seen,), zeros[side])


# Traced, so that a scale which training has made negative counts as the least one, as under jit.
@functools.partial(jax.jit, static_argnums=3)
def _lsq(x: Array, scale: Array, offset: Array | None, element: Format) -> Array:
    return lsq(x, scale, element) if offset is None else lsq_plus(x, scale, offset, element)


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """Zeros, which vary over mesh axes as their operand does."""

    out: jax.ShapeDtypeStruct

    def __call__(self, residuals: tuple[Array, ...], zeros: Any) -> Array:
        return jnp.zeros_like(zeros, shape=self.out.shape, dtype=self.out.dtype)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Its transpose: what was seen, whatever the cotangent."""

    def __call__(self, residuals: tuple[Array, ...], cotangent: Array) -> Array:
        return residuals[0]
