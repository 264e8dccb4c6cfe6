"""A source for files that can only be read an array, or the whole file, at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._header import DTYPE_OF, CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._safetensors import Closing
from qtoolkit.checkpoints._storage import Path


class ArraySource(Closing):
    """A source that makes each array when it is read, and keeps the last one.

    Args:
      path: The path as the user gave it.
      described: dtype and shape of each array, by name.
      make: Returns the array with a given name.
    """

    def __init__(
        self,
        path: Path,
        described: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
        make: Callable[[str], np.ndarray],
    ) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.tensors = {
            name: _info(path, name, dtype, shape) for name, (dtype, shape) in described.items()
        }
        self._make = make
        self._last: tuple[str, np.ndarray] | None = None

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        if self._last is None or self._last[0] != name:
            info = self.tensors[name]
            array = np.ascontiguousarray(self._make(name)).reshape(-1).view(np.uint8)
            if len(array) != info.nbytes:
                raise CheckpointError(
                    f"{self.path}: tensor {shown(name)}: {len(array)} bytes, expected "
                    f"{info.nbytes}; the file is damaged, fetch or write it again"
                )
            self._last = name, array
        memoryview(buffer)[:] = self._last[1][start : start + len(buffer)].data

    def read(self, name: str) -> np.ndarray:
        """The whole tensor `name`. Raises KeyError where there is none."""
        info = self.tensors[name]
        array = np.empty(info.shape, info.numpy_dtype)
        self.read_into(name, 0, array.reshape(-1).view(np.uint8).data)
        return array

    def close(self) -> None:
        self._last = None


def _info(path: Path, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> TensorInfo:
    if dtype.name not in DTYPE_OF:
        raise CheckpointError(
            f"{path}: tensor {shown(name)}: dtype {dtype}, expected one of {', '.join(DTYPE_OF)}; "
            "leave it out of the file, or convert it first"
        )
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return TensorInfo(name, DTYPE_OF[dtype.name], tuple(map(int, shape)), 0, size)


def flattened(path: Path, tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by their paths, components joined by ".".

    Raises:
      CheckpointError: Two of them have one name.
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found = flattened(path, value, f"{name}.") if isinstance(value, dict) else {name: value}
        twice = sorted(found.keys() & leaves.keys())
        if twice:
            raise CheckpointError(
                f"{path}: tensor {shown(twice[0])}: two arrays have this name, keys joined by "
                "dots, expected one; rename one of them"
            )
        leaves |= found
    return leaves
