"""Lists how a config that loaders read differs from what a layout writes. No JAX here."""

import json
from collections.abc import Container, Iterator, Mapping
from typing import Any

from qtoolkit.checkpoints._header import shown

# Lists of modules that are not quantized.
IGNORED = ("ignore", "exclude_modules", "modules_to_not_convert")
# Lists whose order does not matter. Loaders take a module in the list for the first word, one that
# is not in it for the second.
_LISTS = {**dict.fromkeys(IGNORED, ("wide", "quantized")), "targets": ("quantized", "wide")}
GROUPS = "config_groups"
_UNCOMPARED = ("producer",)  # the version of a program
_AGAIN = "convert it again"


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields a line for each difference. It begins with `where`, a file or a place in it."""
    for key in dict.fromkeys((*expected, *found)):
        if key in _UNCOMPARED:
            continue
        place = f"{where}{'.' if ': ' in where else ': '}{shown(key)}"
        there, here = found.get(key), expected.get(key)
        if key in _LISTS and isinstance(there, list) and isinstance(here, list):
            yield from _of_lists(there, here, place, *_LISTS[key])
        elif isinstance(there, dict) and isinstance(here, dict):
            if key == GROUPS:
                there, here = _paired(there, here)
            yield from differences(there, here, place)
        elif key not in found:
            yield f"{place} is missing, expected {_short(here)}; {_AGAIN}"
        elif key not in expected:
            yield f"{place} is {_short(there)}, expected no such key; {_AGAIN}"
        elif there != here:
            yield f"{place} is {_short(there)}, expected {_short(here)}; {_AGAIN}"


def _of_lists(
    found: list[Any], expected: list[Any], place: str, if_in: str, if_not: str
) -> Iterator[str]:
    there, here = ({_text(value): value for value in values} for values in (found, expected))
    for text in (text for text in there if text not in here):
        yield (
            f"{place} has {_short(there[text])}, expected no such entry: loaders take what it "
            f"names for {if_in}; {_AGAIN}"
        )
    for text in (text for text in here if text not in there):
        yield (
            f"{place} has no {_short(here[text])}, expected it: loaders take what it names for "
            f"{if_not}; {_AGAIN}"
        )


def _paired(
    found: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The groups that only one of the two has, named anew: names and order do not matter."""
    there, here = (
        {_text(_sorted(group)): group for group in groups.values()} for groups in (found, expected)
    )
    return _without(there, here), _without(here, there)


def _without(groups: Mapping[str, Any], others: Container[str]) -> dict[str, Any]:
    left = (group for text, group in groups.items() if text not in others)
    return {f"group_{number}": group for number, group in enumerate(left)}


def _sorted(group: Any) -> Any:
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        return group
    return {**group, "targets": sorted(map(_text, group["targets"]))}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return shown(text if len(text) <= 80 else text[:77] + "...")
