"""`open_source`, which opens a checkpoint in any container. The content tells the kind."""

import contextlib
import os

from qtoolkit.checkpoints._arrays import open_gguf, open_msgpack, open_npz
from qtoolkit.checkpoints._folder import PICKLE, open_folder
from qtoolkit.checkpoints._paths import Path, check_path, entries, is_url, kind_at, read_file
from qtoolkit.checkpoints._safetensors import SafetensorsFile
from qtoolkit.checkpoints._tensors import Checkpoint, CheckpointError
from qtoolkit.checkpoints._writing import old_name

ORBAX_FILES = {"_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA"}  # in folders of orbax


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
    kind = kind_of(path)
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


def kind_of(path: Path, argument: str = "path") -> str:
    """The container at a path: "folder", "orbax", "gguf", "npz", "msgpack", or else "safetensors".

    Raises:
      CheckpointError: It holds weights or text of another kind, such as a pickle; or nothing is
        there, since a run was killed in the moment in which it replaced it.
      TypeError: It is no path; the message says that `argument` is.
    """
    check_path(path, argument)
    kind = kind_at(path)
    if kind == "folder":
        return "folder" if ORBAX_FILES.isdisjoint(entries(path)) else "orbax"
    if not kind and not is_url(path) and os.path.isdir(old := old_name(os.path.realpath(path))):
        raise CheckpointError(
            f"{path}: a run that was to replace it was killed, and it is {old} now; run that "
            "again, or rename it"
        )
    start = b""
    with contextlib.suppress(PermissionError):
        start = read_file(path, 512, whole=False) if kind == "file" else b""
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
    """What a file is that starts like this, and what to do; "" if it may be a checkpoint."""
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


_MAGIC = {
    b"version https://git-lfs": "a Git LFS pointer, not the weights themselves: git lfs pull",
    b"\x89HDF\r\n": "HDF5 (Keras), which is not read: write its arrays with numpy.savez",
    b"\x93NUMPY": "one NumPy array, expected npz: write it with numpy.savez(FILE, name=array)",
    b"\x89PNG\r\n": "a PNG image, no checkpoint",
    b"\xff\xd8\xff": "a JPEG image, no checkpoint",
    b"%PDF": "a PDF document, no checkpoint",
    b"\x1f\x8b": "compressed with gzip: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
}
