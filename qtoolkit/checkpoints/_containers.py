"""`open_source`, which opens a checkpoint in any container. The content tells the kind."""

import contextlib
import os

from qtoolkit.checkpoints._arrays import open_gguf, open_msgpack, open_npz
from qtoolkit.checkpoints._folder import PICKLE, open_folder
from qtoolkit.checkpoints._paths import Kind, Path, check_path, entries, is_url, kind_at, read_file
from qtoolkit.checkpoints._safetensors import MAX_HEADER_BYTES, SafetensorsFile
from qtoolkit.checkpoints._tensors import Checkpoint, CheckpointError
from qtoolkit.checkpoints._writing import old_name

ORBAX_FILES = {"_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA"}  # in folders of orbax


def is_orbax(path: Path) -> bool:
    """Whether a folder is a checkpoint of orbax, or a step of one."""
    return kind_at(path) == "folder" and not ORBAX_FILES.isdisjoint(entries(path))


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


def kind_of_source(path: Path, argument: str) -> Kind:
    """What is at the path of a source, which messages call `argument`.

    Raises:
      CheckpointError: Nothing, since a run was killed in the moment in which it replaced it.
      TypeError: It is no path.
    """
    check_path(path, argument)
    kind = kind_at(path)
    if not kind and not is_url(path) and os.path.isdir(old := old_name(os.path.realpath(path))):
        raise CheckpointError(
            f"{path}: a run that was to replace it was killed, and it is {old} now; run that "
            "again, or rename it"
        )
    return kind


def _kind_of_file(path: Path) -> str:
    """The kind of a file from its first bytes; "safetensors" also if they tell nothing.

    Raises:
      CheckpointError: It holds weights or text of another kind, such as a pickle.
    """
    start = b""
    with contextlib.suppress(PermissionError):
        start = read_file(path, 512, whole=False)
    length = int.from_bytes(start[:8], "little")
    if len(start) > 8 and start[8:9] == b"{" and length <= MAX_HEADER_BYTES:
        return "safetensors"
    if start[:4] == b"GGUF":
        return "gguf"
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):  # the second: an empty archive
        return "npz"
    problem = next((message for magic, message in _OTHERS if start.startswith(magic)), "")
    text = start.lstrip()[:1]
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        problem = PICKLE
    elif text in (b"{", b"["):
        where = str(path) if is_url(path) else os.path.abspath(path)
        folder, _, name = where.rpartition("/")
        what = "the index of a sharded checkpoint" if name.endswith(".index.json") else "JSON"
        problem = f"{what}, which holds no weights; give the folder instead: {folder}"
    elif text == b"<":
        remedy = "the download failed: fetch it again"
        if is_url(path):  # an HTTP server shows a folder as a page
            remedy = "give the URL of a safetensors file, or fetch the folder and give that"
        problem = f"a web page or XML, expected weights; {remedy}"
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    is_map = start[:1] and (0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF))
    return "msgpack" if is_map else "safetensors"


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
