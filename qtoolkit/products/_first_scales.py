"""The first values of learned scales: what `start_scales` computes from a first batch."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import exact_float32
from qtoolkit.gradients.internal import LEAST
from qtoolkit.products._calibration import BITS, MARKED, total_of
from qtoolkit.products._instruments import tapped
from qtoolkit.products._operand import Learned, Operand
from qtoolkit.products._rounded import Rounded
from qtoolkit.scaling.internal import extreme, marked


@dataclasses.dataclass(frozen=True)
class _StartTap:
    """Measures [uses, sum of mean(|x|), marked max(-x, 0), marked max(x, 0)] of an operand.

    A use is one run of the matmul in the step. `marked` encodes a number such that those of
    several runs can be added, and the largest read from the sum.
    """

    roles: tuple[int, ...] = (0, 1)
    size: int = 2 + 2 * MARKED

    def __call__(self, x: jax.Array, rounded: Rounded) -> jax.Array:
        values = exact_float32(x)
        finite = jnp.where(jnp.isfinite(values), values, np.float32(0))
        count = jnp.maximum(jnp.sum(jnp.isfinite(values), dtype=jnp.float32), 1)
        mean = jnp.sum(jnp.abs(finite) / count)
        ends = (marked(jnp.max(jnp.maximum(part, 0)), BITS) for part in (-finite, finite))
        return jnp.concatenate([jnp.stack([jnp.float32(1), mean]), *ends])


# The path of a layer, the name of a matmul in it, and 0 for lhs or 1 for rhs.
Key = tuple[str, str, int]


def first_scales(function: Callable[..., Any], *arguments: Any) -> dict[Key, jax.Array]:
    """The first scale and offset of each operand that learns them, from one run of a pure function.

    float32[2] each; NaN if the matmul was not measured.
    """
    taps, _ = tapped("start_scales", _StartTap(), total_of(function), *arguments)
    return {
        (*place, side): _first(rows[side], operand)
        for place, recipe, rows in zip(taps.places, taps.recipes, taps.rows, strict=True)
        for side, operand in enumerate(recipe.forward)
        if operand is not None and operand.is_learned
    }


def _first(row: jax.Array, operand: Operand) -> jax.Array:
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
