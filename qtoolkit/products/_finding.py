"""The products of a model, found by a trace in which nothing is rounded."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from qtoolkit.products._place import Place
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._taps import Stored, instrument, instrumented

HIGH_PRECISION = Recipe((None, None), None)


@dataclasses.dataclass
class Finding:
    """The instrument that lists products.

    Attributes:
      kernels: For each product, in the order in which they run, the shape of its kernel; None for a
        product of two activations.
    """

    kernels: dict[Place, tuple[int, ...] | None] = dataclasses.field(default_factory=dict)

    def product(
        self, place: Place, recipe: Recipe, state: Any, compute: Any, stored: Stored
    ) -> jax.Array:
        out: jax.Array = compute(HIGH_PRECISION, None)
        return out


class Quantized:
    """The instrument that computes all products as their recipe says, also during a warm-up."""

    def product(
        self, place: Place, recipe: Recipe, state: Any, compute: Any, stored: Stored
    ) -> jax.Array:
        out: jax.Array = compute(recipe, state)
        return out


def note_kernel(place: Place, operands: tuple[Any, Any], kernel: int | None) -> None:
    by = instrument()
    if isinstance(by, Finding):
        by.kernels.setdefault(place, None if kernel is None else operands[kernel].shape)


def layers_in(kernels: Mapping[Place, Any]) -> list[str]:
    """The paths of the layers that multiply a kernel, in the order in which they run."""
    return list(dict.fromkeys(place.path for place, shape in kernels.items() if shape is not None))


def kernels_in(
    function: Callable[..., Any], *arguments: Any
) -> dict[Place, tuple[int, ...] | None]:
    """The products that run in a function, with the shapes of their kernels."""
    finding = Finding()
    with instrumented(finding):
        jax.eval_shape(function, *arguments)
    return finding.kernels
