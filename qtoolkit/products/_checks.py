"""What is no recipe, and what to write instead."""

import difflib
from typing import Any

from qtoolkit.products import _presets
from qtoolkit.products._recipe import Recipe


def check_recipe(where: str, recipe: Any) -> Recipe:
    """`recipe`; TypeError where it is something else, with the line to write."""
    if isinstance(recipe, Recipe):
        return recipe
    check_not_none(where, recipe, "omit it for E4M3, or write qtoolkit.Recipe(None, None)")
    raise TypeError(
        f"{where}: recipe has type {type(recipe).__name__}, expected a Recipe{_instead(recipe)}"
    )


def check_not_none(where: str, recipe: Any, instead: str) -> None:
    """Refuses None, which excludes a layer in `Rules` and must not mean a default elsewhere."""
    if recipe is None:
        raise TypeError(
            f"{where}: recipe is None, which means not quantized, expected a Recipe; {instead}"
        )


def _instead(value: Any) -> str:
    """What to write in place of something that is no Recipe."""
    if isinstance(value, dict):
        return " or Rules; write qtoolkit.Rules({...}, default=qtoolkit.Recipe())"
    of_dtype = getattr(getattr(value, "dtype", None), "name", None)  # of jnp.float8_e4m3fn
    name = value if isinstance(value, str) else getattr(value, "name", of_dtype)
    if not isinstance(name, str):
        return ", e.g. qtoolkit.recipes.token_scaled"
    presets = [n for n in _presets.__all__ if isinstance(getattr(_presets, n), Recipe)]
    if isinstance(value, str) and value in presets:
        return f"; write qtoolkit.recipes.{value}"
    why = ""
    for argument, text in ((name, repr(name)), (value, "fmt")):
        try:
            Recipe(argument)
        except (TypeError, ValueError) as error:
            why = why or str(error).removeprefix("Recipe: forward: spec: ")
        else:
            return f"; write qtoolkit.Recipe({text})"
    close = difflib.get_close_matches(name, presets, n=1, cutoff=0.8)
    if close:
        return f"; did you mean qtoolkit.recipes.{close[0]}?"
    return f", e.g. qtoolkit.Recipe('e4m3fn'); {why}"
