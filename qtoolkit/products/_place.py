"""How messages and reports name matmuls and models."""

from collections.abc import Sequence
from typing import NamedTuple

from qtoolkit.formats.internal import add_json_kinds

MODEL = "(model)"  # the path of the model itself


def listed(names: Sequence[str]) -> str:
    """The first eight names, for messages."""
    return ", ".join(names[:8]) + " ..." * (len(names) > 8)


class Place(NamedTuple):
    """Names a matmul: the path of its layer, and the name of the matmul within that layer."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path or MODEL}:{self.name}"


add_json_kinds(Place)
