"""Formats, and frozen data that holds them, as JSON: text in checkpoints, recipes and exports."""

import dataclasses
import enum
from typing import Any

import numpy as np

from qtoolkit.formats._block import RULES, BlockFormat
from qtoolkit.formats._float import FloatFormat, Overflow, Specials
from qtoolkit.formats._format import format
from qtoolkit.formats._int import IntFormat
from qtoolkit.formats._rules import Rules
from qtoolkit.formats._spec import spec
from qtoolkit.formats._table import TableFormat

_FORMATS = (BlockFormat, FloatFormat, IntFormat, TableFormat)
_BY_NAME: dict[str, Any] = {"dtype": np.dtype, "spec": spec, "format": format}
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*_FORMATS, Specials, Overflow)}


def add_json_kinds(*kinds: type) -> None:
    """Let frozen dataclasses, enums and NamedTuples of another package be written and read."""
    _KINDS.update((kind.__name__, kind) for kind in kinds)


def to_data(value: Any, where: str, *, is_typed: bool = False) -> Any:
    """Static data as what `json.dumps` takes: `from_data(to_data(x, ...), ...) == x`.

    A format that `qtoolkit.spec` finds by its name is written as that name, any other one with its
    fields. Fields that have their default value are not written. Lists become tuples.

    Args:
      is_typed: Write {"type": "spec", "name": "mxfp4"} instead of "mxfp4", for data whose formats
        are not arguments of a class that looks them up by their names.

    Raises:
      TypeError: Something in `value` has no text form: a rule whose key is a class, a scale rule
        that is a function, an object of another class.
    """

    def written(part: Any) -> Any:
        return to_data(part, where, is_typed=is_typed)

    if isinstance(value, Rules):
        return {
            "type": "Rules",
            "rules": [[_pattern(key, where), written(v)] for key, v in value.rules],
            "default": written(value.default),
        }
    if isinstance(value, _FORMATS):
        name = _name(value)
        if name is not None:
            kind = "spec" if isinstance(value, BlockFormat) else "format"
            return {"type": kind, "name": name} if is_typed else name
    if isinstance(value, BlockFormat) and callable(value.rule):
        raise TypeError(
            f"{where}: {value.name} has a function as its rule, which has no text form; expected a "
            f"rule with a name, e.g. fmt.with_(rule='four_over_six'): {', '.join(RULES)}"
        )
    if isinstance(value, np.dtype):
        return {"type": "dtype", "name": value.name}
    if isinstance(value, enum.Enum):
        return {"type": type(value).__name__, "name": value.name}
    fields = _fields(value)
    if fields is not None:
        return {"type": type(value).__name__, **{n: written(v) for n, v in fields.items()}}
    if isinstance(value, tuple | list):
        return [written(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"{where}: {value!r} of type {type(value).__name__} has no text form, expected numbers, "
        f"strings, None, tuples, dtypes and {', '.join(_KINDS)}"
    )


def from_data(data: Any, part: str, where: str) -> Any:
    """The inverse of `to_data`.

    Args:
      part: What `data` is, "recipe" say; messages say the part of it that is wrong.
      where: The calling function, for the same messages.

    Raises:
      ValueError: An unknown type or field, or an invalid value.
    """
    if isinstance(data, list):
        return tuple(from_data(item, f"{part}[{i}]", where) for i, item in enumerate(data))
    if not isinstance(data, dict):
        return data
    fields = dict(data)
    name = fields.pop("type", None)
    if name == "Rules":
        return _rules(fields, part, where)
    find: Any = _BY_NAME.get(name) if isinstance(name, str) else None
    if find is not None:
        try:
            return find(fields["name"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: {part} names no {name}: {error}") from error
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"{where}: {part} has type {name!r}, expected one of {', '.join(_KINDS)}")
    if issubclass(kind, enum.Enum):
        member = fields.get("name")
        if not isinstance(member, str) or len(fields) > 1 or member not in kind.__members__:
            raise ValueError(
                f"{where}: {part} names no {kind.__name__}, expected one of "
                f"{', '.join(kind.__members__)}"
            )
        return kind[member]
    _check_fields(f"{where}: {part} ({kind.__name__})", fields, _names(kind))
    arguments = {field: from_data(item, f"{part}.{field}", where) for field, item in fields.items()}
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {part}: {error}") from error


def _names(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.compare]
    return list(kind._fields)  # of a NamedTuple


def _fields(value: Any) -> dict[str, Any] | None:
    """What is written of an object of `_KINDS`; None for anything else."""
    if _KINDS.get(type(value).__name__) is not type(value):
        return None
    fields = {name: getattr(value, name) for name in _names(value)}
    if not dataclasses.is_dataclass(value):
        return fields
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: item for name, item in fields.items() if item != defaults[name]}


def _pattern(key: Any, where: str) -> str:
    if isinstance(key, str):
        return key
    raise TypeError(
        f"{where}: rule {key.__name__} is a class, which JSON cannot hold; expected a regular "
        "expression"
    )


def _name(fmt: Any) -> str | None:
    """The name by which `qtoolkit.format` or `qtoolkit.spec` finds this format, or None."""
    find: Any = spec if isinstance(fmt, BlockFormat) else format
    try:
        return fmt.name if find(fmt.name) == fmt else None
    except (TypeError, ValueError):
        return None


def _check_fields(where: str, fields: dict[str, Any], names: list[str]) -> None:
    unknown = sorted(fields.keys() - set(names))
    if unknown:
        raise ValueError(
            f"{where} has the unknown field {unknown[0]!r}, expected {', '.join(names) or 'none'}"
        )


def _rules(fields: dict[str, Any], part: str, where: str) -> Rules[Any]:
    _check_fields(f"{where}: {part} (Rules)", fields, ["rules", "default"])
    try:
        pairs = [(key, value) for key, value in fields["rules"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f'{where}: {part} (Rules) expected {{"rules": [[REGEX, RECIPE or null], ...]}}'
        ) from error
    pairs = [(key, from_data(value, f"{part} {key!r}", where)) for key, value in pairs]
    default = from_data(fields.get("default"), f"{part}.default", where)
    try:
        return Rules(pairs, default)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {part}: {error}") from error
