"""Reads and writes safetensors files, 8-bit floats included, piece by piece. No JAX here.

The package of that name cannot read 8-bit floats into numpy and cannot write a file whose tensors
do not all fit in memory. Nothing here maps files: mapped pages would count as memory in use.
"""

import contextlib
import functools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from qtoolkit.checkpoints._header import (
    TensorInfo,
    header_bytes,
    header_length,
    layout,
    parse_header,
)
from qtoolkit.checkpoints._paths import Path, check_path, fill, is_url, naming, storage
from qtoolkit.checkpoints._tensors import (
    DTYPE_OF,
    Checkpoint,
    CheckpointError,
    Entry,
    Tensor,
    read_elements,
    shown,
)
from qtoolkit.checkpoints._writing import (
    PARTIAL,
    Writer,
    check_target,
    clear_partial,
    temporary_file,
)


class SafetensorsFile:
    """An open safetensors file, its header read and checked. A context manager.

    Attributes:
      path: As given.
      tensors: What the file holds, by name, in the order of the data.
      metadata: The strings under `__metadata__`.

    Raises:
      CheckpointError: The header lies or the file is truncated.
      OSError: The file cannot be opened or read; it names the file.

    Examples:
      >>> qt.checkpoints.save("model.safetensors", {"w": jnp.ones((4, 2), jnp.float8_e4m3fn)})
      >>> with qt.checkpoints.SafetensorsFile("model.safetensors") as file:
      ...     print(file.tensors["w"], file.read("w").dtype)
      TensorInfo(name='w', dtype='F8_E4M3', shape=(4, 2), start=0, stop=8) float8_e4m3fn
    """

    def __init__(self, path: Path) -> None:
        check_path(path, "path")
        self.path = path
        self._file = storage(path).open(path)
        try:
            with naming(path):
                size = self._file.size
                prefix = bytearray(min(8, size))
                fill(self._file, 0, memoryview(prefix), f"{path}: header")
                length = header_length(path, bytes(prefix), size)
                text = bytearray(length)
                self._data = 8 + length
                fill(self._file, 8, memoryview(text), f"{path}: header")
            self.tensors, self.metadata = parse_header(path, bytes(text), size - self._data)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def checkpoint(self) -> Checkpoint:
        """The file as a checkpoint, which closes it."""
        opened = contextlib.ExitStack()
        opened.callback(self.close)
        tensors = {
            name: Tensor(name, info.dtype, info.shape, functools.partial(self.read_into, name))
            for name, info in self.tensors.items()
        }
        return Checkpoint(self.path, tensors, self.metadata, opened=opened)

    def close(self) -> None:
        self._file.close()

    def read(self, name: str) -> np.ndarray:
        """The whole tensor `name`, a new array.

        Raises:
          KeyError: The file has no such tensor.
          CheckpointError: numpy has no dtype for its elements, or the file has shrunk.
        """
        info = self.tensors[name]
        return self.read_flat(name, 0, info.size).reshape(info.shape)

    def read_flat(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements `start` to `stop` of tensor `name` in C order: a new array of one dimension.

        Raises:
          IndexError: They are not all in the tensor.
          KeyError, CheckpointError: As `read`.
        """
        info = self.tensors[name]
        if not 0 <= start <= stop <= info.size:
            raise IndexError(f"tensor {shown(name)}: elements {start}:{stop} of {info.size}")
        read_into = functools.partial(self.read_into, name)
        return read_elements(Entry(name, info.dtype, info.shape), read_into, start, stop)

    def read_bytes(self, name: str, start: int, stop: int) -> bytearray:
        """Bytes `start` to `stop` of tensor `name`, whatever its dtype. Raises: as `read_into`."""
        data = bytearray(stop - start)
        self.read_into(name, start, data)
        return data

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Fills `buffer` from byte `start` of tensor `name` on.

        Raises:
          IndexError: The tensor ends before the buffer is full.
          KeyError: The file has no such tensor.
          CheckpointError: The file has shrunk.
          OSError: It cannot be read; it names the file.
        """
        info = self.tensors[name]
        if not 0 <= start <= start + len(buffer) <= info.nbytes:
            raise IndexError(
                f"tensor {shown(name)}: bytes {start}:{start + len(buffer)} of {info.nbytes}"
            )
        with naming(self.path):
            where = f"{self.path}: tensor {shown(name)}"
            fill(self._file, self._data + info.start + start, memoryview(buffer), where)


def write_safetensors(
    path: Path,
    tensors: Sequence[TensorInfo],
    chunks: Iterable[tuple[str, Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Writes a safetensors file from chunks as they are produced.

    The file appears under its name once it is complete and on the disk. Until then its data is in a
    partial file in the same folder. A failure or interrupt removes that file; if the process is
    killed, the next run does. Of two runs with the same target the one that began first fails. For
    a URL the data is first written to a local temporary file.

    Args:
      path: Where to; a file or a URL.
      tensors: What the file will hold, as `layout` places it.
      chunks: (name, bytes or array) pairs: the next bytes of tensor `name`. Tensors may come in any
        order and interleaved. They are written while the next ones are made: a buffer that was
        handed over must not be used again.
      metadata: Strings for `__metadata__`.
      overwrite: Whether a file of that name may be replaced.

    Raises:
      CheckpointError: The target exists, another process has begun to write it, or the chunks are
        not what `tensors` announces.
      OSError: The file cannot be written; it names the file.

    Examples:
      >>> tensors = qt.checkpoints.layout([("kernel", "F32", (4, 2))])
      >>> halves = (("kernel", np.full((2, 2), half, np.float32)) for half in (0, 1))
      >>> qt.checkpoints.write_safetensors("model.safetensors", tensors, halves)
      >>> qt.checkpoints.load("model.safetensors")["kernel"].tolist()
      [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    """
    target = check_target(path, overwrite)
    if is_url(path):
        # A file without a name: nothing is left of it if the process is killed.
        with tempfile.TemporaryFile() as scratch:
            with naming(tempfile.gettempdir()):
                _write_all(scratch.fileno(), path, tensors, chunks, metadata)
            check_target(path, overwrite)
            storage(path).upload(scratch, path)
        return
    with naming(path, PARTIAL):
        clear_partial(target, path, overwrite)
        with temporary_file(target, path) as file:
            _write_all(file, path, tensors, chunks, metadata)
            check_target(path, overwrite)  # somebody else may have written it meanwhile


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], *, overwrite: bool
) -> None:
    """Writes a safetensors file of arrays; the same bytes for the same arguments.

    Raises:
      CheckpointError: An array has a dtype that safetensors has not, or the target exists.
      OSError: The file cannot be written.
    """
    for name, array in arrays.items():
        if array.dtype.name not in DTYPE_OF:
            raise CheckpointError(
                f"{path}: tensor {shown(str(name))}: dtype {array.dtype}, expected one of "
                f"{', '.join(DTYPE_OF)}; convert it first"
            )
    infos = layout((name, DTYPE_OF[a.dtype.name], a.shape) for name, a in arrays.items())
    # order="C": the bytes of a transposed array would otherwise be written in another order.
    chunks = (
        (info.name, np.asarray(arrays[info.name], info.numpy_dtype, order="C")) for info in infos
    )
    write_safetensors(path, infos, chunks, metadata, overwrite=overwrite)


def _write_all(
    descriptor: int,
    path: Path,
    tensors: Sequence[TensorInfo],
    chunks: Iterable[tuple[str, Any]],
    metadata: Mapping[str, str] | None,
) -> None:
    header = header_bytes(tensors, metadata)
    left = {tensor.name: tensor.nbytes for tensor in tensors}
    stop = {tensor.name: len(header) + tensor.stop for tensor in tensors}
    with Writer(descriptor) as writer:
        writer.write(0, header)
        for name, chunk in chunks:
            data = _as_bytes(chunk)
            if len(data) > left.get(name, -1):
                raise CheckpointError(
                    f"{path}: tensor {shown(name)}: {len(data)} more bytes produced, expected "
                    f"{left.get(name, 'no such tensor')}; nothing was written"
                )
            writer.write(stop[name] - left[name], data)
            left[name] -= len(data)
        for name, missing in left.items():
            if missing:
                raise CheckpointError(
                    f"{path}: tensor {shown(name)}: {missing} bytes fewer produced than announced; "
                    "nothing was written"
                )


def _as_bytes(chunk: Any) -> memoryview:
    if isinstance(chunk, np.ndarray):  # arrays of ml_dtypes' dtypes have no buffer protocol
        chunk = chunk.reshape(-1).view(np.uint8)
    return memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
