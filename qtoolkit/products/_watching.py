"""What the rounding of one training step lost, measured in that step: small enough to log."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import exact_float32
from qtoolkit.products._numerics import labels
from qtoolkit.products._rounded import Rounded
from qtoolkit.products._taps import ROLES, Place, Stored, Tapping, instrumented
from qtoolkit.scaling.internal import (
    effective,
    extreme,
    kept_range,
    marked,
    marked_size,
    scaled_values,
)

Array = jax.Array
FAR = 2.0  # an element counts as bad if it is beyond the format's largest value by this factor
_COUNTS = ("uses", "elements", "saturated", "underflowed", "bad")
_MARKS = marked_size(0)


@dataclasses.dataclass(frozen=True)
class _WatchTap:
    """Measures the counts of `_COUNTS`, the marked amax and the marked largest scale."""

    # Not those of dgrad and wgrad that the forward product rounds, too: they are as these are.
    roles: tuple[int, ...] = (0, 1, 2, 5)
    size: int = len(_COUNTS) + 2 * _MARKS

    def __call__(self, x: Array, rounded: Rounded) -> Array:
        spec, wide = rounded.spec, exact_float32(x)
        magnitude = jnp.abs(wide)
        is_finite = jnp.isfinite(wide)
        amax = jnp.max(jnp.where(is_finite, magnitude, 0))
        counts, scale = [jnp.float32(0)] * 3, jnp.ones((1,), jnp.float32)
        if spec is not None:
            largest = np.float32(max(map(abs, kept_range(spec))))
            limit: Any = largest
            if spec.scale is not None:
                assert rounded.scales.scale is not None
                scale = effective(rounded.scales.scale, rounded.scales.tensor_scale, spec)
            if scale.size == 1:  # the elements need not be divided
                limit = largest * scale.reshape(())
            else:
                magnitude = jnp.abs(scaled_values(x, spec, rounded.scales))
            lost = (rounded.q == 0) & (wide != 0)
            parts = (magnitude > limit, lost, ~(magnitude <= np.float32(FAR) * limit))
            counts = [jnp.sum(part, dtype=jnp.float32) for part in parts]
        first = jnp.stack([jnp.float32(1), jnp.float32(x.size), *counts])
        return jnp.concatenate([first, marked(amax, 0), marked(jnp.max(scale), 0)])


Products = Mapping[Place, tuple[Any, Stored]]


def products_in(function: Callable[..., Any], *arguments: Any) -> dict[Place, tuple[Any, Stored]]:
    """The products that run in a function, found by tracing it."""
    finding = Tapping(_WatchTap())
    with instrumented(finding):
        jax.eval_shape(function, *arguments)
    return finding.found


def zeros_for(products: Products) -> dict[str, Array]:
    """Zeros by which to differentiate: their gradients are what `metrics_of` takes."""
    return {str(place): jnp.zeros((len(ROLES), _WatchTap().size)) for place in products}


@contextlib.contextmanager
def watching(products: Products, zeros: Mapping[str, Array]) -> Iterator[None]:
    """In this context products measure their operands."""
    with instrumented(Tapping(_WatchTap(), {place: zeros[str(place)] for place in products})):
        yield


def metrics_of(
    products: Products, rows: Mapping[str, Array]
) -> dict[str, dict[str, dict[str, Array]]]:
    """By product and operand: shares of elements, the amax and the scale of this step.

    saturated, underflowed, bad: shares of the elements, float32: those that the format's largest
    value clamps; those that became zero and were not; those that are not finite or beyond the
    largest value by more than a factor of 2 (`FAR`). amax, scale: the largest of the step. A
    product on which the loss does not depend was not measured: its numbers are NaN.
    """
    found: dict[str, dict[str, dict[str, Array]]] = {}
    for place, (recipe, stored) in products.items():
        of_place = found.setdefault(str(place), {})
        for role, twin, label in labels(place, recipe, stored):
            if recipe.operands[role] is None or role not in _WatchTap().roles:
                continue
            row = rows[str(place)][role]
            row = row if role == twin else row + rows[str(place)][twin]
            name = label["operand"]
            of_place[f"{name} of {label['parts']}" if name in of_place else name] = _numbers(row)
    return found


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
