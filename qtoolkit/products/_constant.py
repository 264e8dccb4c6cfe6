"""Models as static arguments of `jax.jit`, also those that do not hash."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A static argument of `jax.jit`: it hashes, whatever it holds.

    A model that keeps a plain dataclass or a list compares, but has no hash; `jax.jit` then looks
    for an equal one among all of its type. One that does not compare, such as two arrays, is equal
    to itself alone.
    """

    value: Any

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except (TypeError, ValueError):
            return False
