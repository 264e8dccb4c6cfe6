"""Checkpoints of arrays that other packages read whole: GGUF's blocks, orbax."""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._tensors import DTYPE_OF, CheckpointError, shown


def array_checkpoint(
    path: Path,
    headers: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    resources: contextlib.ExitStack | None = None,
) -> Checkpoint:
    """A checkpoint of arrays that are read whole, by name; only the last one stays in memory."""
    last: dict[str, np.ndarray] = {}
    lock = threading.Lock()
    resources = resources or contextlib.ExitStack()
    resources.callback(last.clear)

    def read_into(name: str, start: int, buffer: memoryview) -> None:
        with lock:
            if name not in last:
                last.clear()  # before the next one is read: two would be in memory
                last[name] = np.ascontiguousarray(read(name)).reshape(-1).view(np.uint8)
            data = last[name]
        if len(data) != tensors[name].nbytes:
            raise CheckpointError(
                f"{path}: tensor {shown(name)}: {len(data)} bytes, expected "
                f"{tensors[name].nbytes}; the file is damaged, fetch or write it again"
            )
        buffer[:] = data[start : start + len(buffer)].data

    tensors = {}
    for name, (dtype, shape) in headers.items():
        if dtype.name not in DTYPE_OF:
            resources.close()
            raise CheckpointError(
                f"{path}: tensor {shown(name)}: dtype {dtype}, expected one of "
                f"{', '.join(DTYPE_OF)}; remove it from the file, or convert it first"
            )
        sizes = tuple(map(int, shape))
        read_this = functools.partial(read_into, name)
        tensors[name] = Tensor(name, DTYPE_OF[dtype.name], sizes, read_this)
    return Checkpoint(path, tensors, resources=resources)


def check_unique(path: Path, names: Iterable[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise CheckpointError(
            f"{path}: tensor {shown(twice[0])}: two arrays have this name, keys joined by dots, "
            "expected one; rename one of them"
        )
