"""What a container yields: tensors that are read in parts. Dtypes, errors and their words."""

import contextlib
import dataclasses
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import ml_dtypes  # registers the 8-bit float names with numpy, too
import numpy as np

if TYPE_CHECKING:
    from qtoolkit.checkpoints._folder import FolderFiles
    from qtoolkit.checkpoints._storage import Path
    from qtoolkit.checkpoints.layouts import Encoding

# Bits of an element, and NumPy's name for it, in the order in which the reference implementation
# lays tensors out (the last first), so that every tensor starts at a multiple of its element size.
# Source: github.com/huggingface/safetensors, safetensors/src/tensor.rs, enum Dtype.
_DTYPES = {
    "BOOL": (8, "bool"),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}
DTYPE_BITS = {dtype: bits for dtype, (bits, _) in _DTYPES.items()}
DTYPE_RANK = {dtype: rank for rank, dtype in enumerate(DTYPE_BITS)}
NUMPY_DTYPES = {dtype: np.dtype(name) for dtype, (_, name) in _DTYPES.items() if name}
DTYPE_OF = {dtype.name: name for name, dtype in NUMPY_DTYPES.items()}
FLOATS = ("F64", "F32", "F16", "BF16")

_CHUNK = 2**20  # elements that are read at a time
# Fills a buffer with the bytes of a tensor from a byte on. Threads may call it at the same time.
ReadBytes = Callable[[int, memoryview], None]


class CheckpointError(ValueError):
    """A checkpoint cannot be read, converted or written. One line says where and what to do.

    Examples:
      >>> qt.checkpoints.save("model.safetensors", {"w": jnp.ones(2)})
      >>> try:
      ...     qt.checkpoints.save("model.safetensors", {"w": jnp.ones(2)})
      ... except qt.checkpoints.CheckpointError as error:
      ...     print(str(error).partition(";")[0])
      model.safetensors: exists already
    """

    __module__ = "qtoolkit.checkpoints"  # the name by which it is imported, shown in tracebacks


class MisuseError(CheckpointError):
    """Options that exclude each other, or one that could have no effect: exit code 2."""

    __module__ = "qtoolkit.checkpoints.internal"


def shown(name: str) -> str:
    """`name` fit for a one-line message or a terminal."""
    return name if name.isprintable() else ascii(name)


def listed(texts: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """The first of some texts, with commas between them, and how many more there are."""
    texts = [*texts]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def over_layers(name: str) -> str:
    """A name with "*" for the number of its layer, by which alike tensors are named together."""
    return re.sub(r"(?<![^./])\d+(?=[./])", "*", name)


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text; {} if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def configs_in(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The content of config.json, and what it says of the language model in a larger model."""
    text = config.get("text_config")
    return [config, *([text] if isinstance(text, dict) else [])]


class Entry(NamedTuple):
    """A tensor as a header announces it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_elements(entry: Entry, read_into: ReadBytes, start: int, stop: int) -> np.ndarray:
    """Elements `start` to `stop` in C order; those of F4, two to a byte, the first one low."""
    dtype = NUMPY_DTYPES.get(entry.dtype)
    if dtype is not None:
        array = np.empty(stop - start, dtype)
        read_into(start * dtype.itemsize, array.view(np.uint8).data)
        return array
    if entry.dtype != "F4":
        raise CheckpointError(
            f"tensor {shown(entry.name)}: dtype {entry.dtype} is narrower than a byte, expected "
            "one that numpy has; read its bytes"
        )
    data = np.empty(-(-stop // 2) - start // 2, np.uint8)
    read_into(start // 2, data.data)
    codes = np.stack([data & 15, data >> 4], -1).reshape(-1)[start % 2 :][: stop - start]
    return codes.view(ml_dtypes.float4_e2m1fn)


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of an open checkpoint. Its elements are read when they are asked for.

    Attributes:
      name: As in the checkpoint.
      dtype: As safetensors spells it: "F8_E4M3".
      shape: Elements along each axis; () for a scalar.
      read_into: Fills a buffer with its bytes.
      encoding: How the checkpoint holds it, if `read_into` dequantizes it; else None.
      stored_dtype, stored_nbytes: The dtype of its codes, and the bytes of all its entries; of what
        is not quantized, those of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read_into: ReadBytes
    encoding: "Encoding | None" = None
    stored_dtype: str = ""
    stored_nbytes: int = -1

    def __post_init__(self) -> None:
        if not self.stored_dtype:
            object.__setattr__(self, "stored_dtype", self.dtype)
            object.__setattr__(self, "stored_nbytes", self.nbytes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * DTYPE_BITS[self.dtype] // 8

    @property
    def entry(self) -> Entry:
        return Entry(self.name, self.dtype, self.shape)

    @property
    def is_dequantized(self) -> bool:
        return self.stored_dtype != self.dtype

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Elements `start` to `stop` in C order: a new array of one dimension."""
        return read_elements(self.entry, self.read_into, start, self.size if stop is None else stop)

    def read_all(self) -> np.ndarray:
        return self.read().reshape(self.shape)


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


class Turning:
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


@dataclasses.dataclass(eq=False)
class Checkpoint:
    """An open checkpoint of any container. A context manager; threads may read it together.

    Attributes:
      path: As given.
      tensors: Its tensors by name, in the order of the data.
      metadata: The strings that it holds in addition to tensors.
      config: The content of its `config.json`; empty without one.
      folder: What else a folder of Hugging Face holds; None of other containers.
      layout: That of the weights that were dequantized: see `dequantized`; "" if none is.
      auxiliary: What loaders need for quantized weights, such as input scales; no tensors of the
        model.
      stored: The tensors as the container has them, where weights were dequantized; else empty.
      opened: What `close` closes.
    """

    path: "Path"
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    folder: "FolderFiles | None" = None
    layout: str = ""
    auxiliary: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    stored: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    opened: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @property
    def everything(self) -> dict[str, Tensor]:
        """`tensors` and `auxiliary`."""
        return {**self.tensors, **self.auxiliary}

    @property
    def encodings(self) -> "dict[str, Encoding]":
        """How each weight that was dequantized is stored, by name."""
        return {n: t.encoding for n, t in self.tensors.items() if t.encoding is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.opened.close()

    def read(self, name: str) -> np.ndarray:
        """The whole tensor `name`, a new array. Raises KeyError where there is none."""
        return self.tensors[name].read_all()

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Fills `buffer` from byte `start` of tensor `name` on."""
        tensor, view = self.tensors[name], memoryview(buffer)
        if not 0 <= start <= start + len(view) <= tensor.nbytes:
            raise IndexError(
                f"tensor {shown(name)}: bytes {start}:{start + len(view)} of {tensor.nbytes}"
            )
        tensor.read_into(start, view)


def all_zeros(tensor: Tensor) -> bool:
    """Reads a tensor in chunks, up to the first element that is not zero."""
    starts = range(0, tensor.size, _CHUNK)
    return not any((tensor.read(i, min(i + _CHUNK, tensor.size)) != 0).any() for i in starts)
