"""An open checkpoint: `Tensor`s, of which any elements are read, and what goes with them."""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._tensors import (
    DTYPE_BITS,
    DTYPE_OF,
    NUMPY_DTYPES,
    CheckpointError,
    Entry,
    ReadBytes,
    read_elements,
    shown,
)
from qtoolkit.checkpoints.layouts._encoding import Encoding

WeightReader = Any  # that of `_reader`, which loads JAX
_CHUNK = 2**20  # elements that are read at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of an open checkpoint. Its elements are read when they are asked for.

    Attributes:
      name: As in the checkpoint.
      dtype: As safetensors spells it: "F8_E4M3".
      shape: Elements along each axis; () for a scalar.
      read_into: Fills a buffer with its bytes.
      encoding: How the checkpoint holds it, if `read_into` dequantizes it; else None.
      reader: With `encoding`, a function that gives the reader of its codes and scales.
      stored_dtype, stored_nbytes: The dtype of its codes, and the bytes of all its entries; of what
        is not quantized, those of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read_into: ReadBytes
    encoding: Encoding | None = None
    stored_dtype: str = ""
    stored_nbytes: int = -1
    reader: Callable[[], WeightReader] | None = None

    def __post_init__(self) -> None:
        if not self.stored_dtype:
            object.__setattr__(self, "stored_dtype", self.dtype)
            object.__setattr__(self, "stored_nbytes", self.nbytes)

    @functools.cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * DTYPE_BITS[self.dtype] // 8

    @functools.cached_property
    def entry(self) -> Entry:
        return Entry(self.name, self.dtype, self.shape)

    @property
    def is_dequantized(self) -> bool:
        return self.encoding is not None or self.stored_dtype != self.dtype

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Elements `start` to `stop` in C order: a new array of one dimension."""
        return read_elements(self.entry, self.read_into, start, self.size if stop is None else stop)

    def read_all(self) -> np.ndarray:
        return self.read().reshape(self.shape)

    @property
    def weight(self) -> WeightReader:
        """What reads its codes and scales; of a tensor with `encoding` only."""
        assert self.reader is not None
        return self.reader()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes; reads a part after the other."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    for start in range(0, a.nbytes, _CHUNK):
        one, other = (bytearray(min(_CHUNK, a.nbytes - start)) for _ in range(2))
        a.read_into(start, memoryview(one))
        b.read_into(start, memoryview(other))
        if one != other:
            return False
    return True


class Transposer:
    """Reads stacks of matrices as those of their transposes; one matrix at a time is in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._matrix: tuple[Tensor, int] | None = None
        self._data = np.empty(0, np.uint8)

    def transposed(self, tensor: Tensor) -> Tensor:
        """The tensor with its last two axes in the other order."""
        *batch, rows, columns = tensor.shape
        nbytes = tensor.nbytes // max(math.prod(batch), 1)

        def read_into(start: int, buffer: memoryview) -> None:
            done = 0
            while done < len(buffer):
                index, first = divmod(start + done, nbytes)
                with self._lock:
                    self._turn(tensor, index, nbytes)
                    part = self._data[first : first + len(buffer) - done]
                    buffer[done : done + len(part)] = part.data
                done += len(part)

        return Tensor(tensor.name, tensor.dtype, (*batch, columns, rows), read_into)

    def _turn(self, tensor: Tensor, index: int, nbytes: int) -> None:
        if self._matrix == (tensor, index):
            return
        *_, rows, columns = tensor.shape
        self._matrix = None
        if len(self._data) != nbytes:
            self._data = np.empty(nbytes, np.uint8)
        turned = self._data.view(NUMPY_DTYPES[tensor.dtype]).reshape(columns, rows)
        step = max(_CHUNK // columns, 1)
        for row in range(0, rows, step):
            stop = min(row + step, rows)
            part = tensor.read(*((index * rows + at) * columns for at in (row, stop)))
            turned[:, row:stop] = part.reshape(-1, columns).T
        self._matrix = tensor, index


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderFiles:
    """What a folder holds in addition to tensors.

    Attributes:
      has_config: Whether there is a `config.json`, or a `qtoolkit_config.json`.
      modelopt_config: The content of `hf_quant_config.json`, which NVIDIA's modelopt writes; empty
        without it.
      weights_name: The name of its weights without the ending, from the index or the only file:
        "model" of model.safetensors. For several files without an index also "model".
      weights: Names of the files with its weights.
      copied: Names of the files that go with the weights, also in folders below ("1_Pooling/
        config.json"): tokenizer, generation config and so on.
      not_copied: Names of what is not copied: hidden files, weights of other kinds.
      is_adapter: Whether the weights are those of an adapter (LoRA), as PEFT loads them.
    """

    has_config: bool
    modelopt_config: Mapping[str, Any]
    weights_name: str
    weights: list[str]
    copied: list[str]
    not_copied: list[str]
    is_adapter: bool


@dataclasses.dataclass(eq=False)
class Checkpoint:
    """An open checkpoint of any container. A context manager; threads may read it together.

    Attributes:
      path: As given.
      tensors: Its tensors by name, in the order of the data.
      metadata: The strings that it holds in addition to tensors.
      config: The content of its `config.json`; empty without one.
      folder: What else a folder of Hugging Face holds; None of other containers.
      layout: That of the weights that were dequantized: see `decode_weights`; "" if none is.
      auxiliary: What loaders need for quantized weights, such as input scales; no tensors of the
        model.
      raw: The tensors as the container has them, where weights were dequantized; else empty.
      resources: What `close` closes.
    """

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folder: FolderFiles | None = None
    layout: str = ""
    auxiliary: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    raw: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    resources: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @property
    def all_tensors(self) -> dict[str, Tensor]:
        """`tensors` and `auxiliary`."""
        return {**self.tensors, **self.auxiliary}

    @property
    def encodings(self) -> dict[str, Encoding]:
        """How each weight that was dequantized is stored, by name."""
        return {n: t.encoding for n, t in self.tensors.items() if t.encoding is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.resources.close()

    def read(self, name: str) -> np.ndarray:
        """The whole tensor `name`, a new array. Raises KeyError where there is none."""
        return self.tensors[name].read_all()


def all_zeros(tensor: Tensor) -> bool:
    """Reads a tensor in chunks, up to the first element that is not zero."""
    starts = range(0, tensor.size, _CHUNK)
    return not any((tensor.read(i, min(i + _CHUNK, tensor.size)) != 0).any() for i in starts)


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
