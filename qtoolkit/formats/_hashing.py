"""Dataclasses that compute their hash only once."""

from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def hashed_once(cls: Class) -> Class:
    """A frozen dataclass whose objects keep their hash.

    Formats and recipes are static arguments of `jax.jit`, which hashes them at every call, and a
    recipe holds six operands with formats of their own.
    """
    computed: Any = cls.__hash__

    def hash_once(self: Any) -> int:
        cached: int | None = self.__dict__.get("_hash")
        if cached is None:
            cached = self.__dict__["_hash"] = computed(self)
        return cached

    # For pickles: hashes of strings differ by process.
    def without_hash(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    for name, method in (("__hash__", hash_once), ("__getstate__", without_hash)):
        setattr(cls, name, method)
    return cls
