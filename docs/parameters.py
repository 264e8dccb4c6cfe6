"""Gives each parameter a row of its own in the reference, with its type and default.

Docstrings may describe several at once, "rounding, saturation: As in `cast`."; griffe, which reads
them for mkdocstrings, looks for one name in the signature and finds neither type nor default.
"""

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"^  (\w+(?:, \w+)+): (.*(?:\n    .*)*)", re.MULTILINE)


def with_entries_of_their_own(docstring: str) -> str:
    def split(found: re.Match[str]) -> str:
        return "\n".join(f"  {name}: {found[2]}" for name in found[1].split(", "))

    return _ENTRY.sub(split, docstring)


class OneRowEach(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_entries_of_their_own(obj.docstring.value)
