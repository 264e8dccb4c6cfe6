"""Flax's msgpack checkpoints as sources. The whole file is read, as the format asks for it."""

from typing import Any

import msgpack
import numpy as np

from qtoolkit.checkpoints._header import CheckpointError, shown
from qtoolkit.checkpoints._memory import ArraySource, flattened
from qtoolkit.checkpoints._storage import Path

# Source: flax/serialization.py, _MsgpackExtType, _chunk.
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"


class MsgpackFile(ArraySource):
    """An open file of `flax.serialization.to_bytes`; names are paths, joined by ".".

    Raises:
      CheckpointError: It is damaged, or no tree of arrays.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            data = file.read()
        try:
            tree = _joined(msgpack.unpackb(data, ext_hook=_leaf, raw=False, strict_map_key=False))
        except (
            *(ValueError, TypeError, KeyError, AttributeError, MemoryError),
            *(msgpack.UnpackException, RecursionError),
        ) as error:
            raise CheckpointError(
                f"{path}: neither safetensors nor Flax's msgpack ({shown(str(error))}), expected a "
                "checkpoint; fetch or write it again"
            ) from error
        if not isinstance(tree, dict):
            raise CheckpointError(f"{path}: msgpack without names, expected a tree of arrays")
        leaves = flattened(path, tree)
        # None is what Flax writes of an optional parameter that is not there.
        arrays = {n: _array(path, n, leaf) for n, leaf in leaves.items() if leaf is not None}
        described = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        super().__init__(path, described, arrays.__getitem__)


def _leaf(code: int, data: bytes) -> Any:
    if code == _COMPLEX:  # complex128, which is refused by the name of the tensor
        return np.asarray(complex(*msgpack.unpackb(data)))
    if code not in (_ARRAY, _SCALAR):
        raise ValueError(f"extension type {code}")
    shape, dtype, buffer = msgpack.unpackb(data, raw=True)
    array = np.frombuffer(buffer, np.dtype(dtype.decode())).reshape(shape)
    return array if code == _ARRAY else array.reshape(())


def _joined(tree: Any) -> Any:
    """Joins arrays that Flax has split because msgpack allows at most 2**32 bytes each."""
    if not isinstance(tree, dict):
        return tree
    if _CHUNKED in tree:
        chunks = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
        shape = [tree["shape"][str(i)] for i in range(len(tree["shape"]))]
        return np.concatenate(chunks).reshape(shape)
    return {key: _joined(value) for key, value in tree.items()}


def _array(path: Path, name: str, leaf: Any) -> np.ndarray:
    if isinstance(leaf, np.ndarray):
        return leaf
    if isinstance(leaf, bool | int | float):
        return np.asarray(leaf)
    raise CheckpointError(
        f"{path}: {shown(name)}: a {type(leaf).__name__}, expected an array; it is no checkpoint "
        "of Flax"
    )
