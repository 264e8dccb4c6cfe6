"""The scale of a matmul's input, where it does not follow from the input."""

from collections.abc import Mapping
from typing import Any

from qtoolkit.products._recipe import Recipe
from qtoolkit.products._states import fixed_scale, state_of


def input_scale(recipe: Recipe, name: str, kept: Mapping[str, Any]) -> float | None:
    """The scale by which a matmul divides its input: static, calibrated or of a history.

    None if each call finds its own, or there is no history yet.
    """
    state = state_of(recipe, name, kept)
    amax = None if state is None or state.amax is None else state.amax[0]
    if amax is not None and not amax > 0:
        return None
    scale = fixed_scale(recipe.forward[0], amax)
    return None if scale is None else float(scale)
