"""Reads and writes safetensors files, 8-bit floats included, piece by piece. No JAX here.

The package of that name cannot read 8-bit floats into numpy and cannot write a file whose tensors
do not all fit in memory. Headers are parsed with suspicion, and built byte for byte as its own.
"""

import contextlib
import functools
import itertools
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
    Entry,
    shown,
)
from qtoolkit.checkpoints._writing import check_target, new_file, write_chunks

MAX_HEADER_BYTES = 100_000_000  # the reference implementation refuses more
_METADATA = "__metadata__"
_SURROGATE = re.compile("[\ud800-\udfff]")
_DAMAGED = "it is damaged or no safetensors file; fetch or write it again"


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
        places, metadata = _parsed(path, text, file.size - 8 - length)

        def read(name: str, start: int, stop: int, first: int, buffer: memoryview) -> None:
            end = first + len(buffer)
            if end > stop - start:
                raise IndexError(f"tensor {shown(name)}: bytes {first}:{end} of {stop - start}")
            with storage.naming(path):
                where = f"{path}: tensor {shown(name)}"
                storage.fill(file, 8 + length + start + first, memoryview(buffer), where)

        tensors = {
            entry.name: Tensor(*entry, functools.partial(read, entry.name, start, stop))
            for start, stop, entry in places
        }
        return Checkpoint(path, tensors, metadata, resources=opening.pop_all())


def _parsed(
    path: Path, text: bytearray, data_bytes: int
) -> tuple[list[tuple[int, int, Entry]], dict[str, str]]:
    """Where the data of each tensor begin and end, in their order, and the metadata."""
    try:
        if text[:1] != b"{":
            raise ValueError(f"starts with {bytes(text[:1])!r}, expected b'{{'")
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        metadata = header.pop(_METADATA, None)
        metadata = {} if metadata is None else metadata  # MLX writes null
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("__metadata__ is not an object of strings, as it has to be")
        places = [_place(name, fields) for name, fields in header.items()]
        places.sort(key=lambda place: place[:2])
        end = 0
        for start, stop, entry in places:
            if start != end:
                what = "overlap" if start < end else "hole"
                raise ValueError(
                    f"tensor {shown(entry.name)}: data starts at {start}, expected {end}, "
                    f"where the one before ends ({what})"
                )
            end = stop
        if end != data_bytes:
            what = "truncated" if end > data_bytes else "bytes left over"
            raise ValueError(f"{data_bytes} bytes of data, expected {end} by the header ({what})")
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError, JSONDecodeError, our own
        raise CheckpointError(f"{path}: header: {shown(str(error))}; {_DAMAGED}") from error
    return places, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique or not _is_text(key):
            raise ValueError(f"key {key!a} is given twice or no valid text")
        unique[key] = value
    return unique


def _place(name: str, described: Any) -> tuple[int, int, Entry]:
    """Where the data of a tensor lie; raises ValueError with what is wrong with its description."""
    fields: dict[str, Any] = described if isinstance(described, dict) else {}
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
        return offsets[0], offsets[1], Entry(name, dtype, tuple(shape))
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


def in_data_order(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[Entry, ...]:
    """Entries, (name, dtype, shape), in the order of the reference: large elements first, then by
    name. So their data are aligned, without holes.
    """
    entries = sorted((Entry(*t) for t in tensors), key=lambda e: (-DTYPE_RANK[e.dtype], e.name))
    for name, dtype, shape in entries:
        if math.prod(shape) * DTYPE_BITS[dtype] % 8:
            raise CheckpointError(
                f"tensor {name!a}: {dtype} of shape {shape} ends within a byte, expected a "
                "multiple of 8 bits; pad the last axis"
            )
    return tuple(entries)


def write_safetensors(
    path: Path,
    entries: Sequence[Entry],
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

    `entries` are in the order of `in_data_order`.

    `chunks` are (name, bytes or array) pairs, the next bytes of a tensor; tensors may come in any
    order and interleaved. They are written while the next ones are made: a buffer that was handed
    over must not be used again.
    """
    if not is_url(path):
        with new_file(path, overwrite) as file:
            _write_all(file, path, entries, chunks, metadata)
        return
    check_target(path, overwrite)
    # A file without a name: nothing is left of it if the process is killed.
    with tempfile.TemporaryFile() as scratch:
        with storage.naming(tempfile.gettempdir()):
            _write_all(scratch.fileno(), path, entries, chunks, metadata)
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
    entries = in_data_order((n, DTYPE_OF[a.dtype.name], a.shape) for n, a in arrays.items())
    # order="C": the bytes of a transposed array would otherwise be written in another order.
    chunks = (
        (name, np.asarray(arrays[name], NUMPY_DTYPES[dtype], order="C"))
        for name, dtype, _ in entries
    )
    write_safetensors(path, entries, chunks, metadata, overwrite=overwrite)


def _write_all(
    descriptor: int,
    path: Path,
    entries: Sequence[Entry],
    chunks: Iterable[tuple[str, Any]],
    metadata: Mapping[str, str] | None,
) -> None:
    ends = [*itertools.accumulate((entry.nbytes for entry in entries), initial=0)]
    header = _header_bytes(entries, ends, metadata)
    places = {
        entry.name: (len(header) + start, len(header) + stop)
        for entry, (start, stop) in zip(entries, itertools.pairwise(ends), strict=True)
    }
    write_chunks(descriptor, path, header, places, chunks)


def _header_bytes(
    entries: Sequence[Entry], ends: Sequence[int], metadata: Mapping[str, str] | None
) -> bytes:
    """The length, the header and its padding: the same bytes for the same arguments."""
    header: dict[str, Any] = {}
    if metadata:
        if not all(_is_text(text) for pair in metadata.items() for text in pair):
            raise CheckpointError(
                f"metadata: got {dict(metadata)!r}, expected strings as keys and values; "
                "convert them first, e.g. with json.dumps"
            )
        header[_METADATA] = dict(sorted(metadata.items()))
    for (name, dtype, shape), offsets in zip(entries, itertools.pairwise(ends), strict=True):
        if name in header or name == _METADATA or not _is_text(name):
            raise CheckpointError(
                f"tensor {name!a}: expected a name that is text, given once and not "
                "'__metadata__'; rename it"
            )
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"header: {len(text)} bytes, expected at most {MAX_HEADER_BYTES}, which is what other "
            "readers accept; split the checkpoint into several files"
        )
    return len(text).to_bytes(8, "little") + text
