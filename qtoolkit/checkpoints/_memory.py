"""A source of arrays that lie in a file as they are, and of others that are made one at a time."""

import collections
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from qtoolkit.checkpoints._base import Source
from qtoolkit.checkpoints._header import DTYPE_OF, CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._storage import Input, Path, fill, naming

Span = tuple[int, int]  # a part of a file: its first byte, and how many there are


class ArraySource(Source):
    """A source that reads pieces of the arrays whose place in a file is known.

    Any other array is made when it is read. The last of them is kept.

    Args:
      path: The path as the user gave it.
      described: dtype and shape of each array, by name.
      make: Returns the array with a given name.
      file: The open file; it is closed with this source.
      spans: Where an array lies in it, by name: in parts that follow each other in the array.
    """

    def __init__(
        self,
        path: Path,
        described: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
        make: Callable[[str], np.ndarray],
        file: Input | None = None,
        spans: Mapping[str, Sequence[Span]] | None = None,
    ) -> None:
        self.path = path
        self.metadata = {}
        self.tensors = {
            name: _info(path, name, dtype, shape) for name, (dtype, shape) in described.items()
        }
        self._make = make
        self._last: tuple[str, np.ndarray] | None = None
        self._making = threading.Lock()
        self._file = file
        self._spans = spans or {}

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        info, view = self.tensors[name], memoryview(buffer)
        if not 0 <= start <= start + len(view) <= info.nbytes:
            raise IndexError(
                f"tensor {shown(name)}: bytes {start}:{start + len(view)} of {info.nbytes}"
            )
        if name in self._spans:
            self._read_spans(name, start, view)
            return
        with self._making:
            view[:] = self._made(name)[start : start + len(view)].data

    def _read_spans(self, name: str, start: int, view: memoryview) -> None:
        assert self._file is not None
        with naming(self.path):
            for position, nbytes in self._spans[name]:
                count = min(max(nbytes - start, 0), len(view))
                where = f"{self.path}: tensor {shown(name)}"
                fill(self._file, position + start, view[:count], where)
                view, start = view[count:], max(start - nbytes, 0)

    def _made(self, name: str) -> np.ndarray:
        """The bytes of an array."""
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made: two would be in memory
            info = self.tensors[name]
            array = np.ascontiguousarray(self._make(name)).reshape(-1).view(np.uint8)
            if len(array) != info.nbytes:
                raise CheckpointError(
                    f"{self.path}: tensor {shown(name)}: {len(array)} bytes, expected "
                    f"{info.nbytes}; the file is damaged, fetch or write it again"
                )
            self._last = name, array
        return self._last[1]

    def close(self) -> None:
        self._last = None
        if self._file is not None:
            self._file.close()


def check_once(path: Path, names: Iterable[str]) -> None:
    """Raises where two arrays of a tree have one name."""
    twice = sorted(name for name, count in collections.Counter(names).items() if count > 1)
    if twice:
        raise CheckpointError(
            f"{path}: tensor {shown(twice[0])}: two arrays have this name, keys joined by dots, "
            "expected one; rename one of them"
        )


def _info(path: Path, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> TensorInfo:
    if dtype.name not in DTYPE_OF:
        raise CheckpointError(
            f"{path}: tensor {shown(name)}: dtype {dtype}, expected one of {', '.join(DTYPE_OF)}; "
            "leave it out of the file, or convert it first"
        )
    size = math.prod(map(int, shape)) * dtype.itemsize
    return TensorInfo(name, DTYPE_OF[dtype.name], tuple(map(int, shape)), 0, size)
