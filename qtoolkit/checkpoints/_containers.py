"""`open_source`, which opens any container, and those that are one file: npz, msgpack, GGUF.

Each is read by its own library: NumPy, Flax and msgpack, gguf. Their arrays are read whole, one at
a time, but for those that lie in a GGUF file as they are.
"""

import contextlib
import dataclasses
import functools
import os
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._folder import PICKLE, open_folder
from qtoolkit.checkpoints._paths import (
    File,
    Kind,
    Path,
    check_path,
    fill,
    is_url,
    naming,
    read_file,
    storage,
)
from qtoolkit.checkpoints._safetensors import MAX_HEADER_BYTES, SafetensorsFile
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


def is_orbax(path: Path) -> bool:
    """Whether a folder is a checkpoint of orbax, or a step of one."""
    place = storage(path)
    return place.kind(path) == "folder" and not ORBAX_FILES.isdisjoint(place.entries(path))


def open_source(path: Path) -> Checkpoint:
    """Opens a checkpoint of any kind that is read. The content tells the kind, not the name.

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
    return opened_as(kind_of(path), path)


def kind_of(path: Path) -> str:
    """The container of a checkpoint: "folder", "orbax", or what `_kind_of_file` says."""
    what = kind_of_source(path, "path")
    if what == "folder":
        return "orbax" if is_orbax(path) else "folder"
    if what == "file":
        return _kind_of_file(path)
    return "safetensors"  # missing, or a pipe: `SafetensorsFile` says so


def opened_as(kind: str, path: Path) -> Checkpoint:
    """Opens a checkpoint of the kind that `kind_of` says."""
    if kind == "folder":
        return open_folder(path)
    if kind == "safetensors":
        return SafetensorsFile(path).checkpoint()
    if kind == "orbax":
        from qtoolkit.checkpoints._orbax import open_orbax  # loads JAX

        return open_orbax(path)
    if is_url(path):
        raise CheckpointError(
            f"{path}: {kind}, which is not read from a URL; fetch it and give the file"
        )
    return {"gguf": open_gguf, "npz": open_npz, "msgpack": open_msgpack}[kind](path)


def kind_of_source(path: Path, argument: str) -> Kind:
    """What is at the path of a source.

    Raises:
      CheckpointError: Nothing, since a run was killed in the moment in which it replaced it.
      TypeError: It is no path; the message says that `argument` is.
    """
    check_path(path, argument)
    kind = storage(path).kind(path)
    if not kind and not is_url(path):
        old = old_name(os.path.realpath(path))
        if os.path.isdir(old):
            raise CheckpointError(
                f"{path}: a run that was to replace it was killed, and it is {old} now; run that "
                "again, or rename it"
            )
    return kind


def _kind_of_file(path: Path) -> str:
    """Whether a file is "gguf", "npz", "msgpack", or else "safetensors", by its first bytes.

    Raises:
      CheckpointError: It holds weights or text of another kind, such as a pickle.
    """
    with contextlib.suppress(PermissionError):
        return _sniffed(path, read_file(path, 512, whole=False))
    return "safetensors"


def _sniffed(path: Path, start: bytes) -> str:
    """The kind of a file from its first bytes; "safetensors" also if they tell nothing."""
    length = int.from_bytes(start[:8], "little")
    if len(start) > 8 and start[8:9] == b"{" and length <= MAX_HEADER_BYTES:
        return "safetensors"
    if start[:4] == b"GGUF":
        return "gguf"
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):  # the second: an empty archive
        return "npz"
    for magic, message in _OTHERS:
        if start.startswith(magic):
            raise CheckpointError(f"{path}: {message}")
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise CheckpointError(f"{path}: {PICKLE}")
    text = start.lstrip()[:1]
    if text in (b"{", b"["):
        raise CheckpointError(f"{path}: {_json_remedy(path)}")
    if text == b"<":
        remedy = "the download failed: fetch it again"
        if is_url(path):  # an HTTP server shows a folder as a page
            remedy = "give the URL of a safetensors file, or fetch the folder and give that"
        raise CheckpointError(f"{path}: a web page or XML, expected weights; {remedy}")
    if start[:1] and (0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF)):
        return "msgpack"
    return "safetensors"


def _json_remedy(path: Path) -> str:
    folder, _, name = (str(path) if is_url(path) else os.path.abspath(path)).rpartition("/")
    what = "the index of a sharded checkpoint" if name.endswith(".index.json") else "JSON"
    return f"{what}, which holds no weights; give the folder instead: {folder}"


_DOCUMENT = (
    "{}, no checkpoint, expected safetensors, GGUF, npz or Flax's msgpack; give the file or folder "
    "of the weights"
)
_OTHERS = (
    (b"\x89PNG\r\n", _DOCUMENT.format("a PNG image")),
    (b"\xff\xd8\xff", _DOCUMENT.format("a JPEG image")),
    (b"GIF8", _DOCUMENT.format("a GIF image")),
    (b"%PDF", _DOCUMENT.format("a PDF document")),
    (b"\x89HDF\r\n", "HDF5 (Keras), expected safetensors; write the arrays with numpy.savez"),
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the weights themselves; fetch them: git lfs pull",
    ),
    (b"\x1f\x8b", "compressed with gzip; unpack it first: gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; unpack it first: unzstd"),
    (b"\xfd7zXZ", "compressed with xz; unpack it first: unxz"),
    (b"Rar!", "a RAR archive; unpack it first"),
    (b"\x93NUMPY", "one NumPy array, expected npz; write it with numpy.savez(FILE, name=array)"),
)


def array_checkpoint(
    path: Path,
    headers: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    opened: contextlib.ExitStack | None = None,
) -> Checkpoint:
    """A checkpoint of arrays that are read whole; the last of them is kept.

    Args:
      headers: dtype and shape of each, by name.
      read: Returns the array with a given name.
    """
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
                f"{', '.join(DTYPE_OF)}; leave it out of the file, or convert it first"
            )
        sizes = tuple(map(int, shape))
        read_this = functools.partial(read_into, name)
        tensors[name] = Tensor(name, DTYPE_OF[dtype.name], sizes, read_this)
    return Checkpoint(path, tensors, opened=opened)


def check_unique(path: Path, names: Iterable[str]) -> None:
    """Raises where two arrays of a tree have one name."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise CheckpointError(
            f"{path}: tensor {shown(twice[0])}: two arrays have this name, keys joined by dots, "
            "expected one; rename one of them"
        )


@contextlib.contextmanager
def _damages(path: Path, what: str) -> Iterator[None]:
    """Raises CheckpointError for what zipfile, its decompressors and NumPy raise of bad data."""
    try:
        with naming(path):
            yield
    except Exception as error:
        # bz2 raises OSErrors without a number; 22 (EINVAL): of a place before the file's start.
        is_failure = isinstance(error, OSError) and error.errno not in (None, 22)
        if is_failure or isinstance(error, MemoryError | CheckpointError):
            raise
        raise CheckpointError(
            f"{path}: {what}: {shown(str(error))}; the file is damaged, fetch or write it again"
        ) from error


def open_npz(path: Path) -> Checkpoint:
    """Opens a file of `numpy.savez`.

    Raises:
      CheckpointError: It is another archive, damaged, or holds pickled objects.
    """
    opened = contextlib.ExitStack()
    with contextlib.ExitStack() as failing:
        failing.callback(opened.close)
        with _damages(path, "a zip archive"):
            archive = opened.enter_context(zipfile.ZipFile(path))
        members = archive.namelist()
        _check_members(path, members)
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


def _check_members(path: Path, members: list[str]) -> None:
    if not members:
        raise CheckpointError(
            f"{path}: no tensors: an empty zip archive, expected arrays; write them with "
            "numpy.savez(FILE, name=array)"
        )
    twice = [name for name, count in Counter(members).items() if count > 1]
    if twice:
        raise CheckpointError(
            f"{path}: member {shown(twice[0])} is there twice, expected each once; write it again"
        )
    others = [name for name in members if not name.endswith(".npy")]
    if any(os.path.basename(name) == "data.pkl" for name in others):
        raise CheckpointError(f"{path}: {PICKLE}")
    if others:
        raise CheckpointError(
            f"{path}: a zip archive with {shown(others[0])}, expected npz: nothing but .npy members"
        )


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
    """Opens a file of `flax.serialization.to_bytes`; names are paths, joined by ".".

    Flax reads it whole: all of the file is in memory.

    Raises:
      CheckpointError: It is damaged, or no tree of arrays.
    """
    from flax.serialization import msgpack_restore

    with naming(path), open(path, "rb") as file:
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
    # None is what Flax writes of an optional parameter that is not there.
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

    Raises:
      CheckpointError: The package is missing, the file is damaged, or it has blocks, or an order
        of bytes, that the package does not read.
    """
    reader, dequantize = _gguf_reader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    opened = contextlib.ExitStack()
    file = File(path)
    opened.callback(file.close)

    def raw(name: str, start: int, buffer: memoryview) -> None:
        # The package maps the file, and mapped pages count as memory in use.
        with naming(path):
            where = f"{path}: tensor {shown(name)}"
            fill(file, int(found[name].data_offset) + start, buffer, where)

    def values(name: str) -> np.ndarray:
        tensor = found[name]
        if (dtype := _plain_dtype(tensor)) is not None:
            return tensor.data.astype(dtype, copy=False)
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
        name: (_plain_dtype(t) or np.dtype("float32"), tuple(int(n) for n in reversed(t.shape)))
        for name, t in found.items()
    }
    checkpoint = array_checkpoint(path, headers, values, opened)
    for name, tensor in checkpoint.tensors.items():
        gguf = found[name]
        if _plain_dtype(gguf) is None:
            stored = {"stored_dtype": gguf.tensor_type.name, "stored_nbytes": int(gguf.n_bytes)}
            checkpoint.tensors[name] = dataclasses.replace(tensor, **stored)
            checkpoint.layout = "GGUF"
        elif gguf.data.dtype.isnative:  # bytes of BF16 are in this machine's order: see below
            read = functools.partial(raw, name)
            checkpoint.tensors[name] = dataclasses.replace(tensor, read_into=read)
    return checkpoint


def _gguf_reader(path: Path) -> tuple[Any, Callable[..., np.ndarray]]:
    """The reader of a whole GGUF file, and what makes float32 numbers of its blocks."""
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
        raise CheckpointError(
            f"{path}: a damaged GGUF file ({shown(str(error))}); fetch it again"
        ) from error
    _check_byte_order(path, reader)
    field = reader.fields.get("split.count")
    count = 1 if field is None else int(field.contents())
    if count > 1:
        raise CheckpointError(
            f"{path}: one of {count} files of a GGUF that was split, expected the whole; join "
            "them first, with llama.cpp's gguf-split --merge FIRST WHOLE, FIRST the file "
            f"00001-of-{count:05}"
        )
    return reader, dequantize


def _check_byte_order(path: Path, reader: Any) -> None:
    """Raises where bytes of BF16 or of blocks are in an order that is not this machine's."""
    for tensor in reader.tensors:
        # The package hands out bytes, not numbers, of BF16 and of blocks.
        if reader.byte_order == "S" and tensor.data.dtype == np.uint8:
            raise CheckpointError(
                f"{path}: tensor {shown(tensor.name)}: {tensor.tensor_type.name} in a "
                f"{reader.endianess.name.lower()}-endian file, expected this machine's byte order; "
                "write gguf-convert-endian COPY native, COPY a copy of it: bytes are swapped in "
                "place"
            )


def _plain_dtype(tensor: Any) -> np.dtype | None:
    """The dtype, in this machine's byte order, of a tensor that is no blocks."""
    name = tensor.tensor_type.name
    if name == "BF16":  # comes as bytes
        return NUMPY_DTYPES["BF16"]
    dtype = tensor.data.dtype.newbyteorder("=")
    plain = name in ("F32", "F16", "F64", "I8", "I16", "I32", "I64") and dtype.name in DTYPE_OF
    return dtype if plain else None
