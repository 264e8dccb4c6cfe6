"""What the rounding of one training step lost, measured in that step: small enough to log."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import exact_float32
from qtoolkit.products._matmul import Key
from qtoolkit.products._measuring import Measured, labels
from qtoolkit.products._rounded import Rounded
from qtoolkit.products._taps import ROLES
from qtoolkit.scaling.internal import (
    FAR,
    effective_scale,
    extreme,
    largest_magnitude,
    magnitude_marks,
    marks_size,
    scaled_values,
    unclamped_range,
)

Array = jax.Array
_COUNTS = ("uses", "elements", "saturated", "underflowed", "bad")
_MARKS = marks_size(0)
_SAMPLE = 2**16


@dataclasses.dataclass(frozen=True)
class WatchTap:
    """Measures the counts of `_COUNTS`, the marked amax and the marked largest scale."""

    # Not those of dgrad and wgrad that the forward product rounds, too: they are as these are.
    roles: tuple[int, ...] = (0, 1, 2, 5)
    size: int = len(_COUNTS) + 2 * _MARKS

    def __call__(self, x: Array, rounded: Rounded) -> Array:
        spec, amax = rounded.spec, largest_magnitude(x)  # the reduction that finds the scale
        values, q = _sample(exact_float32(x)), _sample(rounded.q)
        counts, scale = [jnp.float32(0)] * 3, jnp.ones((1,), jnp.float32)
        if spec is not None:
            largest = np.float32(max(map(abs, unclamped_range(spec))))
            if spec.scale is not None:
                assert rounded.scales.scale is not None
                scale = effective_scale(rounded.scales.scale, rounded.scales.tensor_scale, spec)
            u, limit, most = jnp.abs(values), largest * jnp.max(scale), amax
            if scale.size > 1:  # else the elements need not be divided
                u = jnp.abs(_sample(scaled_values(x, spec, rounded.scales)))
                limit, most = jnp.asarray(largest), jnp.zeros_like(amax)
            far = FAR * limit
            # The largest of all elements counts, too: no sample misses that something saturates.
            counts = [
                _at_least(most > limit, u > limit),
                jnp.sum((q == 0) & (values != 0), dtype=jnp.float32),
                _at_least(most > far, ~(u <= far)),
            ]
        first = jnp.stack([jnp.float32(1), jnp.float32(values.size), *counts])
        return jnp.concatenate([first, magnitude_marks(jnp.stack([amax, jnp.max(scale)]), 0)])


def _sample(x: Array) -> Array:
    """At most some `_SAMPLE` elements of an array, evenly spaced along its first axes.

    All elements would take further passes over each operand: 20 % of a step of d = 512 on a CPU.
    """
    for axis in range(x.ndim):
        step = min(x.shape[axis], -(-x.size // _SAMPLE))
        x = lax.slice_in_dim(x, 0, None, step, axis)
    return x


def _at_least(is_any: Array, flags: Array) -> Array:
    """How many flags of a sample are set, at least 1 where any flag is."""
    return jnp.maximum(jnp.sum(flags, dtype=jnp.float32), is_any.astype(jnp.float32))


Matmuls = Mapping[Key, Measured]


def measurement_zeros(matmuls: Matmuls) -> dict[str, Array]:
    """Zeros by which to differentiate: their gradients are what `metrics_of` takes."""
    return {str(key): jnp.zeros((len(ROLES), WatchTap().size)) for key in matmuls}


def metrics_of(matmuls: Matmuls, rows: Mapping[str, Array]) -> dict[str, Array]:
    """By "matmul/operand/number": shares of elements, the amax and the scale of this step.

    saturated, underflowed, bad: shares of the elements, float32: those that the format's largest
    value clamps; those that became zero and were not; those that are not finite or beyond the
    largest value by more than a factor of 2 (`FAR`). Shares are of some 65,536 elements, evenly
    spaced, and of the largest finite one. amax, scale: the largest of the step. A matmul on which
    the loss does not depend was not measured: its numbers are NaN.
    """
    metrics: dict[str, Array] = {}
    for place, (recipe, stored) in matmuls.items():
        operands = set()
        for role, twin, label in labels(place, recipe, stored):
            if recipe.operands[role] is None or role not in WatchTap().roles:
                continue
            row = rows[str(place)][role]
            row = row if role == twin else row + rows[str(place)][twin]
            name = label["operand"]
            name = f"{name} of {label['parts']}" if name in operands else name
            operands.add(name)
            for number, value in _numbers(row).items():
                metrics[f"{place}/{name}/{number}"] = value
    return metrics


def _numbers(row: Array) -> dict[str, Array]:
    uses, elements, *counts = row[: len(_COUNTS)]
    amax, scale = row[len(_COUNTS) :].reshape(2, _MARKS)
    with jax.debug_nans(False):  # no error: NaN says that nothing was measured
        shares = {
            name: jnp.where(uses > 0, count / elements, np.float32(np.nan))
            for name, count in zip(_COUNTS[2:], counts, strict=True)
        }
        largest = {"amax": amax, "scale": scale}
        return shares | {
            name: jnp.where(uses > 0, extreme(marks, 0, lowest=False), np.float32(np.nan))
            for name, marks in largest.items()
        }
