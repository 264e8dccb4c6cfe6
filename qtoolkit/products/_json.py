"""Recipes to JSON and back."""

import json
from typing import Any

from qtoolkit.formats import BlockFormat, Rules, spec
from qtoolkit.formats.internal import add_json_kinds, from_data, to_data
from qtoolkit.products._operand import Current, Delayed, Hadamard, Learned, Operand, Static
from qtoolkit.products._recipe import Recipe

add_json_kinds(Recipe, Operand, Current, Delayed, Static, Learned, Hadamard)


def to_json(recipe: Recipe | Rules[Recipe]) -> str:
    """A recipe, or rules of recipes over paths, as text: `from_json(to_json(r)) == r`.

    A format that `qtoolkit.spec` finds by its name is written as that name, any other one with its
    fields. Fields that have their default value are not written.

    Raises:
      TypeError: `recipe` is something else, has a rule whose key is a class, or a scale rule that
        is a function.
    """
    if not isinstance(recipe, Recipe | Rules):
        raise TypeError(f"to_json: got {type(recipe).__name__}, expected a Recipe or Rules of them")
    return json.dumps(to_data(recipe, "to_json"), indent=2)


def from_json(text: str | bytes) -> Any:
    """The `Recipe`, or `Rules` of recipes, that `to_json` wrote.

    Raises:
      ValueError: The text is no JSON, or has an unknown field, an unknown type or an invalid value;
        the message says where.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"from_json: invalid JSON ({error}), expected text of to_json") from error
    recipe = from_data(data, "recipe", "from_json")
    if not isinstance(recipe, Recipe | Rules):
        raise ValueError(
            f"from_json: got {type(recipe).__name__}, expected "
            '{"type": "Recipe", ...} or {"type": "Rules", ...}'
        )
    rules = recipe if isinstance(recipe, Rules) else Rules([])
    for key, value in [*rules.rules, ("default", rules.default)]:
        if not isinstance(value, Recipe | None):
            raise ValueError(
                f"from_json: recipe {key!r} is {value!r}, expected a Recipe or null; write "
                '{"type": "Recipe", "forward": ...}'
            )
    return recipe


def spec_to_json(fmt: BlockFormat) -> Any:
    """A block format as JSON data. Raises TypeError if its scale rule is a function."""
    return to_data(fmt, "to_json")


def spec_from_json(data: Any) -> BlockFormat:
    """The inverse of `spec_to_json`. Raises ValueError for anything else."""
    fmt = from_data(data, "spec", "from_json") if isinstance(data, dict) else spec(data)
    if not isinstance(fmt, BlockFormat):
        raise ValueError(f"spec: got {type(fmt).__name__}, expected a BlockFormat")
    return fmt
