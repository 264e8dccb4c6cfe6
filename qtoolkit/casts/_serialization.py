"""Lets others store our pytrees: `jax.export`, whose files name their classes, and Flax's msgpack.

Pickle, copy and orbax need nothing: they look at the fields, or at the leaves with their paths.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.export

from qtoolkit.formats.internal import from_data, to_data

Kind = TypeVar("Kind", bound=type)

_UNKNOWN_TO_FLAX: list[type] = []


def serializable(kind: Kind) -> Kind:
    """Register a pytree class, or a NamedTuple, with `jax.export` and Flax: the first decorator.

    Its static data becomes JSON, so their classes are those of `add_json_kinds`. Nothing is
    unpickled.
    """
    where = f"jax.export of {kind.__name__}"

    def to_bytes(static: Any) -> bytes:
        return json.dumps(to_data(static, where, is_typed=True)).encode()

    def from_bytes(data: bytes) -> Any:
        return from_data(json.loads(data), kind.__name__, where)

    name = f"qtoolkit.{kind.__name__}"
    is_named_tuple = issubclass(kind, tuple)
    with contextlib.suppress(ValueError):  # JAX has it from before a reload of our module
        if is_named_tuple:
            jax.export.register_namedtuple_serialization(kind, serialized_name=name)
        else:
            jax.export.register_pytree_node_serialization(
                kind,
                serialized_name=name,
                serialize_auxdata=to_bytes,
                deserialize_auxdata=from_bytes,
            )
    if not is_named_tuple:  # which Flax knows
        _UNKNOWN_TO_FLAX.append(kind)
        _register_with_flax()
    return kind


def _register_with_flax() -> None:
    flax = sys.modules.get("flax.serialization")
    register: Callable[..., None] | None = getattr(flax, "register_serialization_state", None)
    if flax is None or register is None:  # not imported, or at its first lines
        return

    def to_state(node: Any) -> dict[str, Any]:
        children, _ = _children(node)
        return {name: flax.to_state_dict(x) for name, x in children.items() if x is not None}

    def from_state(target: Any, state: dict[str, Any]) -> Any:
        children, structure = _children(target)
        names = {name for name, x in children.items() if x is not None}
        if names != state.keys():
            raise ValueError(
                f"{type(target).__name__} at {flax.current_path()!r}: the stored one has "
                f"{', '.join(sorted(state))}, expected {', '.join(sorted(names))}, as the target "
                "has; make the target with the formats of what was stored"
            )
        return structure.unflatten(
            flax.from_state_dict(x, state[name], name=name) if name in names else None
            for name, x in children.items()
        )

    while _UNKNOWN_TO_FLAX:
        register(_UNKNOWN_TO_FLAX.pop(), to_state, from_state, override=True)


def _children(node: Any) -> tuple[dict[str, Any], Any]:
    """What a node of the tree holds, by name, also what is None; and its structure."""
    pairs, structure = jax.tree.flatten_with_path(node, is_leaf=lambda part: part is not node)
    return {path[0].name: child for path, child in pairs}, structure


class _FlaxWatcher:
    """A finder of modules that finds none, and registers our classes once Flax is there.

    Flax looks classes up in a table of its own and asks nobody else. Importing it takes a second,
    which a cast without Flax need not wait for; so each later import looks whether it has been
    imported. `flax/__init__.py` imports further modules after `flax.serialization`.
    """

    @staticmethod
    def find_spec(*_: Any) -> None:
        if _UNKNOWN_TO_FLAX:
            _register_with_flax()


sys.meta_path.insert(0, _FlaxWatcher)
