"""`open_source`, which opens a checkpoint in any container; GGUF is here.

Blocks of llama.cpp are read by the package gguf, one whole array at a time; other arrays of a GGUF
file are read in pieces. No JAX here.
"""

import contextlib
import dataclasses
import functools
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._folder import NOT_READ, PICKLE, open_folder
from qtoolkit.checkpoints._safetensors import SafetensorsFile
from qtoolkit.checkpoints._storage import Path, is_url
from qtoolkit.checkpoints._tensors import (
    DTYPE_OF,
    NUMPY_DTYPES,
    Checkpoint,
    CheckpointError,
    Tensor,
    shown,
)
from qtoolkit.checkpoints._writing import old_name

ORBAX_FILES = {"_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA"}  # in folders of orbax


def open_source(path: Path) -> Checkpoint:
    """Open a checkpoint in any container. The content tells the container, not the name.

    Args:
      path: A folder of Hugging Face's or of orbax, a safetensors file, or GGUF. Folders of the
        first kind and safetensors may also be URLs: "s3://bucket/model".

    Returns:
      A context manager with `tensors`, by name: dtype, shape and place of each. No weight has been
      read yet.

    Raises:
      CheckpointError: It is none of them, or damaged; the message says what it is and what to do.
      OSError: It cannot be read.
      ImportError: A package that reads it is missing.

    Examples:
      >>> qt.checkpoints.save("model.safetensors", {"kernel": np.ones((4, 2), np.float32)})
      >>> with qt.checkpoints.open_source("model.safetensors") as source:
      ...     print(source.tensors["kernel"].dtype, source.tensors["kernel"].shape)
      F32 (4, 2)
    """
    kind = container_of(path)
    if kind == "folder":
        return open_folder(path)
    if kind == "safetensors":
        return SafetensorsFile(path).checkpoint()
    if kind == "orbax":
        try:
            from qtoolkit.checkpoints._orbax import open_orbax  # loads JAX
        except ImportError as error:
            raise ImportError(
                f"{path}: an orbax checkpoint, which orbax reads; pip install orbax-checkpoint"
            ) from error
        return open_orbax(path)
    if is_url(path):
        raise CheckpointError(
            f"{path}: {kind}, which is not read from a URL; fetch it and give the file"
        )
    return open_gguf(path)


def container_of(path: Path, argument: str = "path") -> str:
    """The container at a path: "folder", "orbax", "gguf", or else "safetensors".

    Raises where there is something else, or nothing, and says what it is and what to do.
    """
    storage.check_path(path, argument)
    kind = storage.kind_at(path)
    if kind == "folder":
        return "folder" if ORBAX_FILES.isdisjoint(storage.entries(path)) else "orbax"
    if not kind and not is_url(path) and os.path.isdir(old := old_name(os.path.realpath(path))):
        raise CheckpointError(
            f"{path}: a run that was to replace it was killed, and it is {old} now; run that "
            "again, or rename it"
        )
    start = b""
    with contextlib.suppress(PermissionError):
        start = storage.read_file(path, 512, cut=True) if kind == "file" else b""
    if len(start) > 8 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**32:
        return "safetensors"
    if start[:4] == b"GGUF":
        return "gguf"
    if problem := _problem(path, start):
        raise CheckpointError(f"{path}: {problem}")
    return "safetensors"


def _problem(path: Path, start: bytes) -> str:
    """What a file with these first bytes is, and what to do; "" if it may be a checkpoint."""
    text = start.lstrip()[:1]
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return PICKLE
    if start[:4] == b"PK\x03\x04":
        # PyTorch's zip has its pickle first.
        return PICKLE if b"data.pkl" in start else f"a zip archive, such as npz, {NOT_READ}"
    if len(start) > 1 and 0x81 <= start[0] <= 0x8F and 0xA0 <= start[1] <= 0xBF:  # {text: ...
        return f"no safetensors; Flax's msgpack starts so, {NOT_READ}"
    if text in (b"{", b"["):
        where = str(path) if is_url(path) else os.path.abspath(path)
        folder, _, name = where.rpartition("/")
        what = "the index of a sharded checkpoint" if name.endswith(".index.json") else "JSON"
        return f"{what}, which holds no weights; give the folder instead: {folder}"
    if text == b"<":
        return (
            "a web page or XML, expected weights; the download failed: fetch it again, or the URL "
            "is that of a folder: give that of a file"
        )
    what = next((what for magic, what in _MAGIC.items() if start.startswith(magic)), "")
    return what and f"{what}; give a safetensors or GGUF file, or a folder of weights"


_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
_MAGIC = {
    b"version https://git-lfs": "a Git LFS pointer, not the weights themselves: git lfs pull",
    b"\x89HDF\r\n": f"HDF5 (Keras), {NOT_READ}",
    b"\x93NUMPY": f"one NumPy array, {NOT_READ}",
    b"\x1f\x8b": "compressed with gzip: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
}


# Files of arrays.


def array_checkpoint(
    path: Path,
    headers: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    opened: contextlib.ExitStack | None = None,
) -> Checkpoint:
    """A checkpoint of arrays that are read whole, by name; only the last one stays in memory."""
    last: dict[str, np.ndarray] = {}
    lock = threading.Lock()
    opened = opened or contextlib.ExitStack()
    opened.callback(last.clear)

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
            opened.close()
            raise CheckpointError(
                f"{path}: tensor {shown(name)}: dtype {dtype}, expected one of "
                f"{', '.join(DTYPE_OF)}; remove it from the file, or convert it first"
            )
        sizes = tuple(map(int, shape))
        read_this = functools.partial(read_into, name)
        tensors[name] = Tensor(name, DTYPE_OF[dtype.name], sizes, read_this)
    return Checkpoint(path, tensors, opened=opened)


def check_unique(path: Path, names: Iterable[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise CheckpointError(
            f"{path}: tensor {shown(twice[0])}: two arrays have this name, keys joined by dots, "
            "expected one; rename one of them"
        )


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file: llama.cpp's blocks become float32. Names are those of the file.

    llama.cpp multiplies a matmul by the factor "NAME.scale", if there is one for "NAME.weight", as
    for NVFP4 and ternary weights. Such a weight is read as float32, multiplied by its factor.
    """
    reader, dequantize = _gguf_reader(path)
    in_file = {tensor.name: tensor for tensor in reader.tensors}
    factors = _gguf_factors(path, in_file)
    factor_names = {f"{name.removesuffix('weight')}scale" for name in factors}
    # Of activations, which llama.cpp quantizes by it.
    input_scales = {
        name
        for name in in_file
        if name.endswith(".input_scale") and f"{name.removesuffix('input_scale')}weight" in in_file
    }
    opened = contextlib.ExitStack()
    file = storage.File(path)
    opened.callback(file.close)

    def raw(name: str, start: int, buffer: memoryview) -> None:
        # The package maps the file, and mapped pages count as memory in use.
        with storage.naming(path):
            where = f"{path}: tensor {shown(name)}"
            storage.fill(file, int(in_file[name].data_offset) + start, buffer, where)

    def values(name: str) -> np.ndarray:
        stored = stored_values(name)
        if name not in factors:
            return stored
        factor = factors[name].reshape(-1, *(1,) * (stored.ndim - 1))
        return stored.astype(np.float32, copy=False) * factor

    def stored_values(name: str) -> np.ndarray:
        tensor = in_file[name]
        if (dtype := _plain_dtype(tensor)) is not None:
            return tensor.data.view(dtype)
        blocks = np.empty(tensor.data.shape, np.uint8)
        raw(name, 0, blocks.reshape(-1).data)
        try:
            return dequantize(blocks, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{path}: tensor {shown(name)}: blocks of {tensor.tensor_type.name}, which the "
                "package gguf does not read; requantize it with llama.cpp to Q8_0"
            ) from error

    # GGUF counts axes from the innermost one.
    headers = {
        name: (
            (None if name in factors else _plain_dtype(t)) or np.dtype("float32"),
            tuple(int(n) for n in reversed(t.shape)),
        )
        for name, t in in_file.items()
        if name not in factor_names
    }
    checkpoint = array_checkpoint(path, headers, values, opened)
    for name, tensor in checkpoint.tensors.items():
        gguf = in_file[name]
        if _plain_dtype(gguf) is None or name in factors:
            nbytes = int(gguf.n_bytes) + (4 * factors[name].size if name in factors else 0)
            stored: Any = {"stored_dtype": gguf.tensor_type.name, "stored_nbytes": nbytes}
            checkpoint.tensors[name] = dataclasses.replace(tensor, **stored)
            checkpoint.layout = "GGUF"
        else:
            read = functools.partial(raw, name)
            checkpoint.tensors[name] = dataclasses.replace(tensor, read_into=read)
    checkpoint.auxiliary = {name: checkpoint.tensors.pop(name) for name in input_scales}
    return checkpoint


def _gguf_factors(path: Path, in_file: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The factors "NAME.scale" of weights "NAME.weight", one or one for each expert, by weight."""
    factors = {}
    for name, weight in in_file.items():
        scale = in_file.get(f"{name.removesuffix('weight')}scale")
        if not name.endswith(".weight") or scale is None:
            continue
        experts = int(weight.shape[-1]) if len(weight.shape) == 3 else 1
        dtype, size = _plain_dtype(scale), int(np.prod(scale.shape))
        if dtype is None or dtype.kind not in "fV" or size not in (1, experts):
            raise CheckpointError(
                f"{path}: tensor {shown(scale.name)}: {scale.tensor_type.name} of {size} elements, "
                f"expected a factor for the whole of {shown(name)}, or one for each expert; "
                "requantize it with llama.cpp to Q8_0"
            )
        factors[name] = scale.data.view(dtype).astype(np.float32)
    return factors


def _gguf_reader(path: Path) -> tuple[Any, Callable[..., np.ndarray]]:
    """The reader of a GGUF file, and the function that dequantizes its blocks to float32."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise CheckpointError(
            f"{path}: a GGUF file, which the package gguf reads; write pip install gguf"
        ) from error
    try:
        reader = GGUFReader(str(path))
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        foreign = _UNKNOWN_TYPE.search(str(error))
        if foreign is not None:
            raise CheckpointError(
                f"{path}: a tensor of GGML's type {foreign[1]}, which the package gguf does not "
                "know: a type of a fork such as ik_llama.cpp, or of a newer gguf; upgrade gguf, or "
                "make the file again with llama.cpp, in one of its own types"
            ) from error
        raise CheckpointError(
            f"{path}: a damaged GGUF file ({shown(str(error))}); fetch it again"
        ) from error
    if reader.byte_order == "S":  # the package hands out bytes, not numbers, of BF16 and of blocks
        raise CheckpointError(
            f"{path}: a {reader.endianess.name.lower()}-endian file, expected this machine's byte "
            "order; write gguf-convert-endian COPY native, COPY a copy of it: bytes are swapped in "
            "place"
        )
    field = reader.fields.get("split.count")
    count = 1 if field is None else int(field.contents())
    if count > 1:
        raise CheckpointError(
            f"{path}: one of {count} files of a GGUF that was split, expected the whole; join "
            "them first, with llama.cpp's gguf-split --merge FIRST WHOLE, FIRST the file "
            f"00001-of-{count:05}"
        )
    return reader, dequantize


def _plain_dtype(tensor: Any) -> np.dtype | None:
    """The dtype of a tensor that is no blocks."""
    name = tensor.tensor_type.name
    if name == "BF16":  # comes as bytes
        return NUMPY_DTYPES["BF16"]
    is_plain = name in ("F32", "F16", "F64", "I8", "I16", "I32", "I64")
    return tensor.data.dtype if is_plain else None
