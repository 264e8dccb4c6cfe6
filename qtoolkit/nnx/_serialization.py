"""Quantized arrays in Flax's state dictionaries: `flax.serialization.to_bytes` and its kin."""

from typing import Any

import jax
from flax import serialization

from qtoolkit.scaling import QArray


def _to_state(array: QArray) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(array)
    return {path[0].name: leaf for path, leaf in leaves}


def _from_state(target: QArray, state: dict[str, Any]) -> QArray:
    """The arrays of `state` in a QArray like `target`, whose formats and blocks it keeps."""
    treedef = jax.tree.structure(target)
    return jax.tree.unflatten(treedef, [state[name] for name in _to_state(target)])


def register() -> None:
    serialization.register_serialization_state(QArray, _to_state, _from_state, override=True)
