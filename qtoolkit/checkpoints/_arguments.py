"""The arguments of a plan as JSON: `make_plan` records them, `verify` plans again with them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints.layouts import Scheme
from qtoolkit.formats import BLOCK_FORMATS, BlockFormat, Format, Rules

_PUBLISHED = {fmt.name: fmt for fmt in BLOCK_FORMATS}
_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def arguments_to_json(
    format: Format | BlockFormat | Scheme | Rules[Any],
    skip: Sequence[re.Pattern[str]],
    **others: Any,
) -> dict[str, Any]:
    """JSON data of the arguments of `make_plan`; those that are None or False are omitted."""
    if isinstance(format, Rules):
        rules = [[key, _format_data(fmt)] for key, fmt in format.rules]
        others["format"] = {"rules": rules, "default": _format_data(format.default)}
    else:
        others["format"] = _format_data(format)
    if isinstance(scales := others.get("input_scales"), Mapping):
        others["input_scales"] = {name: float(scale) for name, scale in scales.items()}
    elif scales is not None:
        others["input_scales"] = float(scales)
    others["skip"] = [_pattern_text(pattern) for pattern in skip]
    return {name: value for name, value in others.items() if value not in (None, False, [])}


def arguments_from_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `make_plan` that `arguments_to_json` made JSON of.

    Raises:
      ValueError, TypeError, KeyError, AttributeError: It made no such JSON.
    """
    arguments, chosen = dict(record), record["format"]
    if isinstance(chosen, Mapping) and "rules" in chosen:
        pairs = [(key, _format(value)) for key, value in chosen["rules"]]
        arguments["format"] = Rules(pairs, _format(chosen["default"]))
    else:
        arguments["format"] = _format(chosen)
    return arguments


def _format_data(fmt: Format | BlockFormat | Scheme | None) -> Any:
    """The name of a format or scheme; of a block format that is not published, its fields."""
    if fmt is None:
        return None
    if isinstance(fmt, Format | Scheme) or _PUBLISHED.get(fmt.name) == fmt:
        return fmt.name
    from qtoolkit.products.internal import spec_to_json  # loads JAX

    return {"spec": spec_to_json(fmt)}


def _format(data: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    from qtoolkit.products.internal import spec_from_json  # loads JAX

    return spec_from_json(data["spec"])


def _pattern_text(pattern: re.Pattern[str]) -> str:
    """A regular expression with its flags: "(?i:head)"."""
    flags = "".join(letter for letter, flag in _FLAGS.items() if pattern.flags & flag)
    return f"(?{flags}:{pattern.pattern})" if flags else pattern.pattern
