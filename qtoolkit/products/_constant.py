"""Models as static arguments of `jax.jit`, also those that do not hash."""

import dataclasses
import functools
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A static argument of `jax.jit`: it hashes, whatever it holds.

    A value without a hash, such as a model that keeps a plain dataclass or a list, may have changed
    since it was traced, and nobody could tell. So this argument is equal to itself alone, and each
    one that holds such a value is traced once.
    """

    value: Any

    def __hash__(self) -> int:
        return hash(self.value) if self._hashes else id(self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Constant) or not (self._hashes and other._hashes):
            return False
        return bool(self.value == other.value)

    @functools.cached_property
    def _hashes(self) -> bool:
        try:
            hash(self.value)
        except TypeError:
            return False
        return True
