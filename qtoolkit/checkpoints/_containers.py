"""`open_source`, which opens a checkpoint in any container. No JAX here."""

import contextlib
import os

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint
from qtoolkit.checkpoints._folder import NOT_READ, PICKLE, open_folder
from qtoolkit.checkpoints._gguf import open_gguf
from qtoolkit.checkpoints._safetensors import open_safetensors
from qtoolkit.checkpoints._storage import Path, is_url
from qtoolkit.checkpoints._tensors import CheckpointError
from qtoolkit.checkpoints._writing import old_name

ORBAX_FILES = {"_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA"}  # in folders of orbax


def open_source(path: Path) -> Checkpoint:
    """Opens a checkpoint in any container, which its content tells, not its name."""
    kind = container_of(path)
    if kind == "folder":
        return open_folder(path)
    if kind == "safetensors":
        return open_safetensors(path)
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
        return "folder" if ORBAX_FILES.isdisjoint(storage.names_in(path)) else "orbax"
    if not kind and not is_url(path) and os.path.isdir(old := old_name(os.path.realpath(path))):
        raise CheckpointError(
            f"{path}: a run that was to replace it was killed, and it is {old} now; run that "
            "again, or rename it"
        )
    start = b""
    with contextlib.suppress(PermissionError):
        start = b"" if kind == "other" else storage.read_file(path, 512, cut=True)
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
    is_pointer = start.startswith(b"version https://git-lfs")
    return "a Git LFS pointer, expected the weights themselves; git lfs pull" if is_pointer else ""
