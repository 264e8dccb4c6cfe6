"""Recipes to JSON and back."""

import dataclasses
import enum
import json
from typing import Any

from qtoolkit.casts import Projection, Stochastic
from qtoolkit.formats import (
    BlockFormat,
    FloatFormat,
    IntFormat,
    Overflow,
    Rules,
    Specials,
    TableFormat,
    format,
    spec,
)
from qtoolkit.formats.internal import RULES
from qtoolkit.products._operand import Current, Delayed, Hadamard, Learned, Operand, Static
from qtoolkit.products._recipe import Recipe

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Recipe, Operand, Current, Delayed, Static, Learned, Hadamard),
        *(Projection, Stochastic),
        *(BlockFormat, FloatFormat, IntFormat, Specials, Overflow),
    )
}


def to_json(recipe: Recipe | Rules[Recipe]) -> str:
    """A recipe, or rules of recipes over paths, as text: `from_json(to_json(r)) == r`.

    A format that `qtoolkit.spec` finds by its name is written as that name, any other one with its
    fields. Fields that have their default value are not written.

    Raises:
      TypeError: `recipe` is something else, has a rule whose key is a class, a custom table
        format, or a scale rule that is a function.
    """
    if not isinstance(recipe, Recipe | Rules):
        raise TypeError(f"to_json: got {type(recipe).__name__}, expected a Recipe or Rules of them")
    return json.dumps(_encoded(recipe), indent=2)


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
    recipe = _decoded(data, "recipe")
    if not isinstance(recipe, Recipe | Rules):
        raise ValueError(
            f"from_json: got {type(recipe).__name__}, expected "
            '{"type": "Recipe", ...} or {"type": "Rules", ...}'
        )
    return recipe


def spec_to_json(fmt: BlockFormat) -> Any:
    """A block format as JSON data. Raises TypeError for a custom table format."""
    return _encoded(fmt)


def spec_from_json(data: Any) -> BlockFormat:
    """The inverse of `spec_to_json`. Raises ValueError for anything else."""
    fmt = _decoded(data, "spec") if isinstance(data, dict) else spec(data)
    if not isinstance(fmt, BlockFormat):
        raise ValueError(f"spec: got {type(fmt).__name__}, expected a BlockFormat")
    return fmt


def _encoded(value: Any) -> Any:
    if isinstance(value, Rules):
        return {
            "type": "Rules",
            "rules": [[_pattern(key), _encoded(recipe)] for key, recipe in value.rules],
            "default": _encoded(value.default),
        }
    if isinstance(value, BlockFormat | FloatFormat | IntFormat | TableFormat):
        name = _name(value)
        if name is not None:
            return name
        if isinstance(value, TableFormat):
            raise TypeError(f"to_json: {value.name} is a table of your own, which has no text form")
    if isinstance(value, BlockFormat) and callable(value.rule):
        raise TypeError(
            f"to_json: {value.name} has a function as its rule, which has no text form; expected a "
            f"rule with a name, e.g. fmt.with_(rule='four_over_six'): {', '.join(RULES)}"
        )
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: _encoded(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.compare and getattr(value, field.name) != field.default
        }
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [_encoded(item) for item in value]
    if isinstance(value, enum.Enum):
        return {"type": type(value).__name__, "name": value.name}
    return value


def _pattern(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise TypeError(
        f"to_json: rule {key.__name__} is a class, which JSON cannot hold; expected a regular "
        "expression"
    )


def _name(fmt: Any) -> str | None:
    """The name by which `qtoolkit.format` or `qtoolkit.spec` finds this format, or None."""
    find = spec if isinstance(fmt, BlockFormat) else format
    try:
        return fmt.name if find(fmt.name) == fmt else None
    except (TypeError, ValueError):
        return None


def _decoded(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(item, f"{where}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("type", None)
    if name == "Rules":
        return _rules(fields, where)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"from_json: {where} has type {name!r}, expected one of {', '.join(_KINDS)}"
        )
    if issubclass(kind, enum.Enum):
        member = fields.get("name")
        if not isinstance(member, str) or len(fields) > 1 or member not in kind.__members__:
            raise ValueError(
                f"from_json: {where} names no {kind.__name__}, expected one of "
                f"{', '.join(kind.__members__)}"
            )
        return kind[member]
    known = [field.name for field in dataclasses.fields(kind) if field.compare]
    _check_fields(where, kind.__name__, fields, known)
    arguments = {field: _decoded(item, f"{where}.{field}") for field, item in fields.items()}
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"from_json: {where}: {error}") from error


def _check_fields(where: str, name: str, fields: dict[str, Any], known: list[str]) -> None:
    unknown = sorted(fields.keys() - set(known))
    if unknown:
        raise ValueError(
            f"from_json: {where} ({name}) has the unknown field {unknown[0]!r}, expected "
            f"{', '.join(known) or 'none'}"
        )


def _rules(fields: dict[str, Any], where: str) -> Rules[Recipe]:
    _check_fields(where, "Rules", fields, ["rules", "default"])
    try:
        pairs = [(key, _decoded(value, f"{where} {key!r}")) for key, value in fields["rules"]]
    except (KeyError, TypeError, ValueError) as error:
        if str(error).startswith("from_json"):
            raise
        raise ValueError(
            f'from_json: {where} (Rules) expected {{"rules": [[REGEX, RECIPE or null], ...]}}'
        ) from error
    default = _decoded(fields.get("default"), f"{where}.default")
    for key, value in [*pairs, ("default", default)]:
        if not isinstance(value, Recipe | None):
            raise ValueError(
                f"from_json: {where} {key!r} is {value!r}, expected a Recipe or null; write "
                '{"type": "Recipe", "forward": ...}'
            )
    try:
        return Rules(pairs, default)
    except (TypeError, ValueError) as error:
        raise ValueError(f"from_json: {where}: {error}") from error
