"""Reads and writes safetensors files, 8-bit floats included, piece by piece. No JAX here.

The package of that name cannot read 8-bit floats into numpy and cannot write a file whose tensors
do not all fit in memory. Headers are parsed with suspicion, and built byte for byte as its own.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._storage import Path, is_url
from qtoolkit.checkpoints._tensors import (
    DTYPE_BITS,
    DTYPE_OF,
    DTYPE_RANK,
    NUMPY_DTYPES,
    CheckpointError,
    shown,
)
from qtoolkit.checkpoints._writing import check_target, new_file, write_chunks

MAX_HEADER_BYTES = 100_000_000  # the reference implementation refuses more
_METADATA = "__metadata__"
_SURROGATE = re.compile("[\ud800-\udfff]")
_DAMAGED = "it is damaged or no safetensors file; fetch or write it again"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in a file.

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
    def nbytes(self) -> int:
        return self.stop - self.start


# Reading.


def open_safetensors(path: Path) -> Checkpoint:
    """Opens a file, whose header is read and checked; its tensors are in the order of the data."""
    storage.check_path(path, "path")
    with contextlib.ExitStack() as opening:
        file = storage.open_file(path)
        opening.callback(file.close)
        start = bytearray(min(8, file.size))
        with storage.naming(path):
            storage.fill(file, 0, memoryview(start), f"{path}: header")
            length = int.from_bytes(start, "little")
            if file.size < 8 or length > min(MAX_HEADER_BYTES, file.size - 8):
                raise CheckpointError(
                    f"{path}: header length {length} of {file.size} bytes, expected at most "
                    f"{MAX_HEADER_BYTES} and 8 less than the file; {_DAMAGED}"
                )
            text = bytearray(length)
            storage.fill(file, 8, memoryview(text), f"{path}: header")
        infos, metadata = _parsed(path, text, file.size - 8 - length)

        def read(info: TensorInfo, first: int, buffer: memoryview) -> None:
            if first + len(buffer) > info.nbytes:
                raise IndexError(
                    f"tensor {shown(info.name)}: bytes {first}:{first + len(buffer)} of "
                    f"{info.nbytes}"
                )
            with storage.naming(path):
                where = f"{path}: tensor {shown(info.name)}"
                storage.fill(file, 8 + length + info.start + first, memoryview(buffer), where)

        tensors = {
            info.name: Tensor(info.name, info.dtype, info.shape, functools.partial(read, info))
            for info in infos
        }
        return Checkpoint(path, tensors, metadata, resources=opening.pop_all())


def _parsed(
    path: Path, text: bytearray, data_bytes: int
) -> tuple[list[TensorInfo], dict[str, str]]:
    """The tensors that a header describes, in the order of their data, and the metadata."""
    try:
        if text[:1] != b"{":
            raise ValueError(f"starts with {bytes(text[:1])!r}, expected b'{{'")
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        metadata = header.pop(_METADATA, None)
        metadata = {} if metadata is None else metadata  # MLX writes null
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("__metadata__ is not an object of strings, as it has to be")
        tensors = [_info(name, entry) for name, entry in header.items()]
        tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
        end = 0
        for tensor in tensors:
            if tensor.start != end:
                what = "overlap" if tensor.start < end else "hole"
                raise ValueError(
                    f"tensor {shown(tensor.name)}: data starts at {tensor.start}, expected {end}, "
                    f"where the one before ends ({what})"
                )
            end = tensor.stop
        if end != data_bytes:
            what = "truncated" if end > data_bytes else "bytes left over"
            raise ValueError(f"{data_bytes} bytes of data, expected {end} by the header ({what})")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError, JSONDecodeError, our own
        raise CheckpointError(f"{path}: header: {shown(str(error))}; {_DAMAGED}") from error
    return tensors, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique or not _is_text(key):
            raise ValueError(f"key {key!a} is given twice or no valid text")
        unique[key] = value
    return unique


def _info(name: str, entry: Any) -> TensorInfo:
    """A tensor of a header; raises ValueError with what is wrong with its entry."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        wrong = f"dtype {_brief(dtype)}, expected one of {', '.join(DTYPE_BITS)}"
    elif not _are_counts(shape) or len(shape) > 32 or math.prod(n or 1 for n in shape) >= 2**60:
        wrong = (
            f"shape {_brief(shape)}, expected a list of at most 32 integers >= 0 whose product is "
            "below 2**60, without lengths of 0"
        )
    elif not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        wrong = f"data_offsets {_brief(offsets)}, expected [start, stop] with 0 <= start <= stop"
    elif math.prod(shape) * DTYPE_BITS[dtype] != 8 * (offsets[1] - offsets[0]):
        wrong = (
            f"{offsets[1] - offsets[0]} bytes of data, expected "
            f"{math.prod(shape) * DTYPE_BITS[dtype] / 8} for shape {_brief(shape)} of {dtype}"
        )
    else:
        return TensorInfo(name, dtype, tuple(shape), *offsets)
    raise ValueError(f"tensor {shown(name)}: {wrong}")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**64 for v in value)


def _is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can encode; JSON can spell lone surrogates, too."""
    return isinstance(value, str) and _SURROGATE.search(value) is None


def _brief(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


# Writing.


def layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorInfo, ...]:
    """Place (name, dtype, shape) triples in a file as the reference does: aligned, without holes.

    The result is in the order of the data: large elements first, then by name.
    """
    placed: list[TensorInfo] = []
    start = 0
    tensors = list(tensors)
    for name, dtype, shape in tensors:
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


def write_safetensors(
    path: Path,
    tensors: Sequence[TensorInfo],
    chunks: Iterable[tuple[str, Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a safetensors file from chunks as they are produced.

    The file appears under its name when it is complete and on the disk. Until then its data is in a
    partial file in the same folder. A failure or interrupt removes that file; if the process is
    killed, the next run does. Of two runs with the same target the one that began first fails. For
    a URL the data is first written to a local temporary file.

    `chunks` are (name, bytes or array) pairs, the next bytes of a tensor; tensors may come in any
    order and interleaved. They are written while the next ones are made: a buffer that was handed
    over must not be used again.
    """
    if not is_url(path):
        with new_file(path, overwrite) as file:
            _write_all(file, path, tensors, chunks, metadata)
        return
    check_target(path, overwrite)
    # A file without a name: nothing is left of it if the process is killed.
    with tempfile.TemporaryFile() as scratch:
        with storage.naming(tempfile.gettempdir()):
            _write_all(scratch.fileno(), path, tensors, chunks, metadata)
        check_target(path, overwrite)
        storage.upload(scratch, path)


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], *, overwrite: bool
) -> None:
    """Writes a safetensors file of arrays; the same bytes for the same arguments."""
    for name, array in arrays.items():
        if array.dtype.name not in DTYPE_OF:
            raise CheckpointError(
                f"{path}: tensor {shown(str(name))}: dtype {array.dtype}, expected one of "
                f"{', '.join(DTYPE_OF)}; convert it first"
            )
    infos = layout((name, DTYPE_OF[a.dtype.name], a.shape) for name, a in arrays.items())
    # order="C": the bytes of a transposed array would otherwise be written in another order.
    chunks = (
        (info.name, np.asarray(arrays[info.name], NUMPY_DTYPES[info.dtype], order="C"))
        for info in infos
    )
    write_safetensors(path, infos, chunks, metadata, overwrite=overwrite)


def _write_all(
    descriptor: int,
    path: Path,
    tensors: Sequence[TensorInfo],
    chunks: Iterable[tuple[str, Any]],
    metadata: Mapping[str, str] | None,
) -> None:
    header = _header_bytes(tensors, metadata)
    start = len(header)
    places = {tensor.name: (start + tensor.start, start + tensor.stop) for tensor in tensors}
    write_chunks(descriptor, path, header, places, chunks)


def _header_bytes(tensors: Iterable[TensorInfo], metadata: Mapping[str, str] | None) -> bytes:
    """The length, the header and its padding: the same bytes for the same arguments."""
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
