"""`with_`: formats that differ from another one in some fields."""

import dataclasses
import difflib
from typing import Any, TypeVar

Derived = TypeVar("Derived", bound=Any)
_KEEP_DTYPE = frozenset({"name", "overflow", "spellings"})  # changes that change no value


def derived(fmt: Derived, changes: dict[str, Any]) -> Derived:
    """`fmt` with other values of some fields; its name lists them.

    Raises:
      TypeError: No such field.
      ValueError: The name is taken; or as the class itself.
    """
    check_fields(fmt, changes)
    changes = {name: value for name, value in changes.items() if value != getattr(fmt, name)}
    if not changes:
        return fmt
    text = ", ".join(f"{name}={_value_text(value)}" for name, value in changes.items())
    fields = {"name": f"{fmt.name}({text})", "spellings": ()} | changes
    if hasattr(fmt, "dtype_name") and not changes.keys() <= _KEEP_DTYPE:
        fields.setdefault("dtype_name", None)
    new: Derived = dataclasses.replace(fmt, **fields)
    # Imported late: `_names` holds formats of the classes whose method calls this.
    from qtoolkit.formats._names import BY_SPELLING

    if BY_SPELLING.get(new.name.lower(), new) != new:
        raise ValueError(
            f"{type(new).__name__}: name={new.name!r} is that of another format, expected one of "
            "its own, or leave it out"
        )
    return new


def check_fields(fmt: Any, changes: dict[str, Any]) -> None:
    """TypeError where `fmt` has no field of such a name."""
    names = [field.name for field in dataclasses.fields(fmt)]
    for name in changes:
        if name in names:
            continue
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? It" if close else "it"
        raise TypeError(
            f"{fmt.name}: with_({name}=...), but {type(fmt).__name__} has no field {name!r}; "
            f"{hint} has {', '.join(names)}"
        )


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return str(getattr(value, "name", value))
