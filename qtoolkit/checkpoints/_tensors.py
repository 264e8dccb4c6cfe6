"""Tensors as headers announce them: dtypes, `Entry`. Errors and their words."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes  # registers the 8-bit float names with numpy, too
import numpy as np

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
METADATA_KEY = "qtoolkit"  # under which `convert` records what it did, in the metadata
FLOATS = ("F64", "F32", "F16", "BF16")

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
