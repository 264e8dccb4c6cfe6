"""`open_source`, which opens a checkpoint in any container; npz, Flax's msgpack and GGUF are here.

Each is read by its own library, one whole array at a time. There are two exceptions: arrays of a
GGUF file that are not in llama.cpp's blocks are read in pieces, and a msgpack file is read whole.
No JAX here.
"""

import contextlib
import dataclasses
import functools
import os
import re
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._folder import PICKLE, open_folder
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
      path: A folder of Hugging Face's or of orbax, a safetensors file, GGUF, npz, or Flax's
        msgpack. Folders of the first kind and safetensors may also be URLs: "s3://bucket/model".

    Returns:
      A context manager with `tensors`, by name: dtype, shape and place of each. No weight has been
      read yet.

    Raises:
      CheckpointError: It is none of them, or damaged; the message says what it is and what to do.
      OSError: It cannot be read.
      ImportError: A package that reads it is missing.

    Examples:
      >>> np.savez("model.npz", kernel=np.ones((4, 2), np.float32))
      >>> with qt.checkpoints.open_source("model.npz") as source:
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
    return {"gguf": open_gguf, "npz": open_npz, "msgpack": open_msgpack}[kind](path)


def container_of(path: Path, argument: str = "path") -> str:
    """The container at a path: "folder", "orbax", "gguf", "npz", "msgpack", or else "safetensors".

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
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):  # the second: an empty archive
        return "npz"
    if problem := _problem(path, start):
        raise CheckpointError(f"{path}: {problem}")
    is_map = start[:1] and (0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF))
    return "msgpack" if is_map else "safetensors"


def _problem(path: Path, start: bytes) -> str:
    """What a file with these first bytes is, and what to do; "" if it may be a checkpoint."""
    text = start.lstrip()[:1]
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return PICKLE
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
    return what and f"{what}; give a safetensors, GGUF, npz or msgpack file, or a folder of weights"


_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
_MAGIC = {
    b"version https://git-lfs": "a Git LFS pointer, not the weights themselves: git lfs pull",
    b"\x89HDF\r\n": "HDF5 (Keras), which is not read: write its arrays with numpy.savez",
    b"\x93NUMPY": "one NumPy array, expected npz: write it with numpy.savez(FILE, name=array)",
    b"\x89PNG\r\n": "a PNG image, expected a checkpoint",
    b"\xff\xd8\xff": "a JPEG image, expected a checkpoint",
    b"%PDF": "a PDF document, expected a checkpoint",
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


@contextlib.contextmanager
def _damages(path: Path, what: str) -> Iterator[None]:
    """Raise CheckpointError for the errors of zipfile, its decompressors and NumPy on bad data."""
    try:
        with storage.naming(path):
            yield
    except Exception as error:
        # Bad data, too, raise OSErrors: bz2 without an errno; a seek before the start of the file
        # with 22 (EINVAL).
        is_failure = isinstance(error, OSError) and error.errno not in (None, 22)
        if is_failure or isinstance(error, MemoryError | CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: {what}: {shown(str(error))}; the file is damaged, fetch or write it again"
        ) from error


def open_npz(path: Path) -> Checkpoint:
    """Opens a file of `numpy.savez`; raises for other archives and for pickled objects."""
    opened = contextlib.ExitStack()
    with contextlib.ExitStack() as failing:
        failing.callback(opened.close)
        with _damages(path, "a zip archive"):
            archive = opened.enter_context(zipfile.ZipFile(path))
        members = archive.namelist()
        others = [name for name in members if not name.endswith(".npy")]
        twice = [name for name, count in Counter(members).items() if count > 1]
        problem = ""
        if not members:
            problem = (
                "no tensors: an empty zip archive, expected arrays; write them with "
                "numpy.savez(FILE, name=array)"
            )
        elif twice:
            problem = f"member {shown(twice[0])} is there twice, expected each once; write it again"
        elif any(os.path.basename(name) == "data.pkl" for name in others):
            problem = PICKLE
        elif others:
            problem = f"a zip archive with {shown(others[0])}, expected npz: only .npy members"
        if problem:
            raise CheckpointError(f"{path}: {problem}")
        headers = {
            member.removesuffix(".npy"): _npy_header(path, archive, member) for member in members
        }
        failing.pop_all()

    def read(name: str) -> np.ndarray:
        with _damages(path, f"tensor {shown(name)}"), archive.open(f"{name}.npy") as data:
            array = np.lib.format.read_array(data, allow_pickle=False)
            if data.read(1):
                raise ValueError("there is more data than its header says")
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    return array_checkpoint(path, headers, read, opened)


def _npy_header(
    path: Path, archive: zipfile.ZipFile, member: str
) -> tuple[np.dtype, tuple[int, ...]]:
    info = archive.getinfo(member)
    with _damages(path, f"member {shown(member)}"), archive.open(info) as data:
        version = np.lib.format.read_magic(data)
        is_first = version == (1, 0)
        parse = (
            np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = parse(data)
        size = info.file_size - data.tell()
    if dtype.hasobject:
        raise CheckpointError(
            f"{path}: member {shown(member)} holds Python objects, pickled, which may run any "
            "code when they are read, expected arrays of numbers; where you trust it, read it "
            "with numpy.load(FILE, allow_pickle=True), and write the numbers in them with "
            "numpy.savez"
        )
    if min(shape, default=0) < 0 or int(np.prod(shape, dtype=object)) * dtype.itemsize != size:
        raise CheckpointError(
            f"{path}: member {shown(member)}: {size:,} bytes of data, expected those of "
            f"{list(shape)} {dtype}; the file is damaged, fetch or write it again"
        )
    return dtype.newbyteorder("="), shape


def open_msgpack(path: Path) -> Checkpoint:
    """Opens a file of `flax.serialization.to_bytes`, which Flax reads whole; names are paths."""
    from flax.serialization import msgpack_restore

    with storage.naming(path), open(path, "rb") as file:
        data = file.read()
    try:
        tree = msgpack_restore(data)
    except Exception as error:  # whatever Flax, msgpack and NumPy raise
        what = shown(str(error) or type(error).__name__)
        raise CheckpointError(
            f"{path}: neither safetensors nor Flax's msgpack ({what}), expected a checkpoint; "
            "fetch or write it again"
        ) from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: msgpack without names, expected a tree of arrays")
    # Flax writes None for an optional parameter that is absent.
    leaves = [(name, leaf) for name, leaf in _leaves(tree) if leaf is not None]
    for name, leaf in leaves:
        if isinstance(leaf, list | tuple | str | bytes):
            raise CheckpointError(
                f"{path}: {shown(name)}: a {type(leaf).__name__}, expected an array; it is no "
                "checkpoint of Flax"
            )
    check_unique(path, (name for name, _ in leaves))
    arrays = {name: np.asarray(leaf) for name, leaf in leaves}
    headers = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    return array_checkpoint(path, headers, arrays.__getitem__)


def _leaves(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
