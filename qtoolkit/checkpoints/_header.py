"""The header of a safetensors file: parsed with suspicion, built byte for byte. No JAX here."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import (
    DTYPE_BITS,
    DTYPE_RANK,
    NUMPY_DTYPES,
    CheckpointError,
    shown,
)

MAX_HEADER_BYTES = 100_000_000  # the reference implementation refuses more
_METADATA = "__metadata__"
_SURROGATE = re.compile("[\ud800-\udfff]")
_DAMAGED = "it is damaged or no safetensors file; fetch or write it again"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """The entry of one tensor in a header.

    Attributes:
      name: As in the file.
      dtype: As in the file: "F8_E4M3".
      shape: Elements along each axis; () for a scalar.
      start, stop: Where its bytes lie, counted from the end of the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def numpy_dtype(self) -> np.dtype | None:
        """The numpy dtype of the elements; None for those narrower than a byte."""
        return NUMPY_DTYPES.get(self.dtype)


def layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorInfo, ...]:
    """Places (name, dtype, shape) triples as the reference does: aligned, without holes.

    Args:
      tensors: In any order; dtypes as safetensors spells them, "F8_E4M3".

    Returns:
      One `TensorInfo` for each, in the order of the data: wide elements first, then by name.

    Raises:
      CheckpointError: A dtype is none of safetensors', or a tensor ends within a byte.

    Examples:
      >>> placed = qt.checkpoints.layout([("bias", "F32", (3,)), ("kernel", "F8_E4M3", (4, 3))])
      >>> [(info.name, info.start, info.stop) for info in placed]
      [('bias', 0, 12), ('kernel', 12, 24)]
    """
    placed: list[TensorInfo] = []
    start = 0
    tensors = list(tensors)
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_BITS:
            raise CheckpointError(
                f"tensor {name!a}: got dtype {dtype!r}, expected one of {', '.join(DTYPE_BITS)}"
            )
        if math.prod(shape) * DTYPE_BITS[dtype] % 8:
            raise CheckpointError(
                f"tensor {name!a}: {dtype} of shape {shape} ends within a byte, expected a "
                "multiple of 8 bits; pad the last axis"
            )
    for name, dtype, shape in sorted(tensors, key=lambda t: (-DTYPE_RANK[t[1]], t[0])):
        stop = start + math.prod(shape) * DTYPE_BITS[dtype] // 8
        placed.append(TensorInfo(name, dtype, shape, start, stop))
        start = stop
    return tuple(placed)


def header_bytes(tensors: Iterable[TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
    """The length, the header and its padding: the same bytes for the same arguments.

    Raises:
      CheckpointError: A name or the metadata is not text, or the header is too long.
    """
    header: dict[str, Any] = {}
    if metadata:
        if not all(_is_text(text) for pair in metadata.items() for text in pair):
            raise CheckpointError(
                f"metadata: got {dict(metadata)!r}, expected strings as keys and values; "
                "convert them first, e.g. with json.dumps"
            )
        header[_METADATA] = dict(sorted(metadata.items()))
    for tensor in tensors:
        if tensor.name in header or tensor.name == _METADATA or not _is_text(tensor.name):
            raise CheckpointError(
                f"tensor {tensor.name!a}: expected a name that is text, given once and not "
                "'__metadata__'; rename it"
            )
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.stop],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"header: {len(text)} bytes, expected at most {MAX_HEADER_BYTES}, which is what other "
            "readers accept; split the checkpoint into several files"
        )
    return len(text).to_bytes(8, "little") + text


def header_length(path: str | os.PathLike[str], prefix: bytes, file_bytes: int) -> int:
    """The length that the first eight bytes of a file give its header, checked."""
    if len(prefix) < 8:
        raise CheckpointError(
            f"{path}: {file_bytes} bytes, expected at least the 8 of a header length; {_DAMAGED}"
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header length {length}, expected at most {MAX_HEADER_BYTES}; {_DAMAGED}"
        )
    if length > file_bytes - 8:
        raise CheckpointError(
            f"{path}: header length {length}, but only {file_bytes - 8} bytes follow; {_DAMAGED}"
        )
    return length


def parse_header(
    path: str | os.PathLike[str], text: bytes, data_bytes: int
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors, in the order of their data, and the metadata that a header describes.

    `text` is the header without its length; `data_bytes` follow it in the file.

    Raises:
      CheckpointError: The header is no JSON object of the right fields, or the tensors do not cover
        the data exactly.
    """
    header = _json_object(path, text)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            f"{path}: __metadata__ is not an object of strings, as it has to be; {_DAMAGED}"
        )
    tensors = []
    for name, entry in header.items():
        try:
            tensors.append(_tensor(name, entry))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: tensor {shown(name)}: {error}; {_DAMAGED}") from None
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    end = 0
    for tensor in tensors:
        if tensor.start != end:
            what = "overlap" if tensor.start < end else "hole"
            raise CheckpointError(
                f"{path}: tensor {shown(tensor.name)}: data starts at {tensor.start}, expected "
                f"{end}, where the one before ends ({what}); {_DAMAGED}"
            )
        end = tensor.stop
    if end != data_bytes:
        what = "truncated" if end > data_bytes else "bytes left over"
        raise CheckpointError(
            f"{path}: {data_bytes} bytes of data, expected {end} by the header ({what}); {_DAMAGED}"
        )
    return {tensor.name: tensor for tensor in tensors}, metadata


def _json_object(path: str | os.PathLike[str], text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found or not _is_text(key):
                raise ValueError(f"key {key!a} is given twice or no valid text")
            found[key] = value
        return found

    if text[:1] != b"{":
        raise CheckpointError(
            f"{path}: header starts with {text[:1]!r}, expected b'{{'; {_DAMAGED}"
        )
    try:
        return json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError, JSONDecodeError, our own
        raise CheckpointError(f"{path}: header: {shown(str(error))}; {_DAMAGED}") from error


def _tensor(name: str, entry: Any) -> TensorInfo:
    """A tensor of a header; raises CheckpointError with what is wrong with its entry."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{_brief(entry)}, expected an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"dtype {_brief(dtype)}, expected one of {', '.join(DTYPE_BITS)}")
    if not _are_counts(shape):
        raise CheckpointError(f"shape {_brief(shape)}, expected a list of integers >= 0")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"data_offsets {_brief(offsets)}, expected [start, stop] with 0 <= start <= stop"
        )
    if len(shape) > 32 or math.prod(max(length, 1) for length in shape) >= 2**60:
        raise CheckpointError(
            f"shape {_brief(shape)}, expected at most 32 dimensions and 2**60 "
            f"elements, lengths of 0 left out"
        )
    bits = DTYPE_BITS[dtype]
    for length in shape:
        bits *= length
        if bits >= 2**67:  # larger than any file; stop before the product is too long to print
            break
    if bits != 8 * (offsets[1] - offsets[0]):
        raise CheckpointError(
            f"{offsets[1] - offsets[0]} bytes of data, expected {_brief(bits / 8)} for "
            f"shape {_brief(shape)} of {dtype}"
        )
    return TensorInfo(name, dtype, tuple(shape), *offsets)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**64 for v in value)


def _is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can encode; JSON can spell lone surrogates, too."""
    return isinstance(value, str) and _SURROGATE.search(value) is None


def _brief(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
