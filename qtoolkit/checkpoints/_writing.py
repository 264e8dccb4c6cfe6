"""Writes under a temporary name, next to the target, and renames what is whole. No JAX here.

The name is the same in every run, so that a run finds what a killed run has left. That is a file
that is not complete, or a folder with `checkpoint` (the files that are written), `plan.json` (see
`_shards`) and `old` (the checkpoint that is replaced, between two renames).
"""

import collections
import concurrent.futures
import contextlib
import errno
import hashlib
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._storage import Path, is_url, join
from qtoolkit.checkpoints._tensors import CheckpointError, json_object, shown

CONTENT = "checkpoint"
OLD = "old"
MANIFEST = "plan.json"
PARTIAL = ".qtoolkit-partial"
COMPLETE = "is written and whole"
_MANIFEST_KEYS = {"fingerprint", "shards", "files", "copied", "json", "report"}
_MAX_JSON = 2**30
GGUF = ".gguf"
_OTHER_FILES = (".npz", ".npy", ".msgpack", GGUF, ".bin", ".pt", ".pth", ".ckpt", ".h5")
_LONGEST = 200  # bytes of a name, so that there is room for more
_SMALL = 2**16  # bytes that are written at once: to hand them to the thread takes longer
_AHEAD = 8  # writes that may wait
_FLUSH = 2**25  # bytes after which the system is asked to begin with storing them


class OvertakenError(CheckpointError):
    """Another process has begun to write the same target: what is there is no longer ours."""

    __module__ = "qtoolkit.checkpoints"


def is_gguf(path: Path) -> bool:
    return str(path).lower().endswith(GGUF)


def check_target(path: Path, overwrite: bool, endings: Sequence[str] = ()) -> str:
    """The real path of a file to write; raises where that cannot work or would lose a file.

    `endings` are those of other containers than safetensors that its name may have.
    """
    storage.check_path(path, "path")
    storage.check_writable(path)
    target = str(path) if is_url(path) else os.path.realpath(path)
    kind = storage.kind_at(target)
    stem, ending = os.path.splitext(str(path))
    if kind == "folder":
        raise IsADirectoryError(errno.EISDIR, "is a folder, expected a file name", str(path))
    if kind == "other":
        raise CheckpointError(f"{path}: is not a regular file, expected one or a new name")
    if ending.lower() in {*_OTHER_FILES} - {*endings} or stem.endswith("/"):
        raise CheckpointError(
            f"{path}: the target is a safetensors file, expected a name that ends so; name it "
            f"{stem.rstrip('/')}.safetensors"
        )
    if not is_url(path) and not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; create it", str(path))
    if kind and not overwrite:
        raise exists_already(path)
    return target


def exists_already(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: exists already; pass overwrite=True to replace it, or choose another name"
    )


def partial_name(target: str) -> str:
    """The path at which `target` is written until it is whole."""
    folder, name = os.path.split(target)
    if len(os.fsencode(name)) > _LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(folder, f".{name}{PARTIAL}")


def removal(path: Path) -> str:
    """How to remove the files of a conversion to this target that is not complete."""
    if is_url(path):  # there they are in the target itself
        return f"remove {path}"
    return f"remove them: rm -r {shlex.quote(partial_name(os.path.realpath(path)))}"


def old_name(target: str) -> str:
    """Where the folder that is replaced is, between the two renames."""
    return os.path.join(partial_name(target), OLD)


def restore(target: str) -> None:
    """Undoes the first of two renames after which a run was killed, or failed."""
    content = os.path.join(partial_name(target), CONTENT)
    if not os.path.lexists(target) and os.path.isdir(content) and os.path.isdir(old_name(target)):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(old_name(target), target)


def rename_folder(target: str, path: Path) -> None:
    """Gives the content of the partial folder its name, and removes what had that name."""
    partial = partial_name(target)
    content = os.path.join(partial, CONTENT)
    restore(target)
    shutil.rmtree(old_name(target), ignore_errors=True)
    try:
        if os.path.isdir(target):
            with contextlib.suppress(OSError):
                shutil.copymode(target, content)
            os.rename(target, old_name(target))
        os.rename(content, target)
    except BaseException:
        restore(target)
        raise
    with noting_complete(str(path)):
        shutil.rmtree(partial)


def manifest_in(partial: Path) -> dict[str, Any] | None:
    """The plan.json of a checkpoint that is being written; None if there is none that we know."""
    plan = json_in(join(partial, MANIFEST))
    return plan if plan.keys() >= _MANIFEST_KEYS else None


def json_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file of ours; {} where there is none, or half of one."""
    try:
        return json_object(storage.read_file(path, _MAX_JSON))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}


def clear_partial(target: str, path: Path, overwrite: bool) -> None:
    """Removes what a killed run has left of `target`; raises if it may be the work of shards."""
    restore(target)
    partial = partial_name(target)
    if os.path.isdir(partial) and not os.path.islink(partial):
        has_plan = os.path.lexists(os.path.join(partial, MANIFEST))
        if has_plan and not overwrite and (manifest_in(partial) or {}).get("shards") != 0:
            raise CheckpointError(
                f"{path}: files of a conversion in shards are there; finalize it, or "
                f"{removal(path)}"
            )
        shutil.rmtree(partial)
    storage.remove(partial)


@contextlib.contextmanager
def noting_complete(target: str) -> Iterator[None]:
    """Adds a note to exceptions raised in this context, such as Ctrl-C: `target` is complete."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{target} {COMPLETE}")
        raise


@contextlib.contextmanager
def temporary_file(target: str, path: Path) -> Iterator[int]:
    """A new file, as its descriptor, that is renamed to `target` if the block ends well."""
    name = partial_name(target)
    storage.remove(name)
    # Not tempfile: its files are private, these get the mode that the umask says.
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with contextlib.suppress(OSError):
            shutil.copymode(target, name)  # before anybody could read what is in it
        yield file
        os.fsync(file)
        if not _is_at(file, name):
            raise OvertakenError(
                f"{path}: another conversion is writing it; wait for it, or choose another name"
            )
        os.replace(name, target)
    except BaseException:
        if _is_at(file, name):
            storage.remove(name)
        raise
    finally:
        os.close(file)


def _is_at(file: int, name: str) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(name, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def new_file(path: Path, overwrite: bool, endings: Sequence[str] = ()) -> Iterator[int]:
    """A file to write, as its descriptor; it has its name when the block ends well."""
    target = check_target(path, overwrite, endings)
    with storage.naming(path, PARTIAL):
        clear_partial(target, path, overwrite)
        with temporary_file(target, path) as file:
            yield file
            check_target(path, overwrite, endings)  # somebody may have written it meanwhile


def write_chunks(
    descriptor: int,
    path: Path,
    header: bytes,
    places: Mapping[str, tuple[int, int]],
    chunks: Iterable[tuple[str, Any]],
) -> None:
    """Writes a header, and chunks, (name, bytes or array), as they are produced.

    `places` says by name where the bytes of a tensor begin and end in the file.
    """
    starts = {name: start for name, (start, _) in places.items()}
    with Writer(descriptor) as writer:
        writer.write(0, header)
        for name, chunk in chunks:
            data = _as_bytes(chunk)
            left = places[name][1] - starts[name] if name in places else -1
            if len(data) > left:
                raise CheckpointError(
                    f"{path}: tensor {shown(name)}: {len(data)} more bytes produced, expected "
                    f"{left if name in places else 'no such tensor'}; nothing was written"
                )
            writer.write(starts[name], data)
            starts[name] += len(data)
        for name, (_, stop) in places.items():
            if missing := stop - starts[name]:
                raise CheckpointError(
                    f"{path}: tensor {shown(name)}: {missing} bytes fewer produced than announced; "
                    "nothing was written"
                )


def _as_bytes(chunk: Any) -> memoryview:
    if isinstance(chunk, np.ndarray):  # arrays of ml_dtypes' dtypes have no buffer protocol
        chunk = chunk.reshape(-1).view(np.uint8)
    return memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")


class Writer:
    """Writes at given places of an open file, in a thread of its own. A context manager.

    What is given to `write` must not change afterwards. An error of a write is raised by a later
    one, or at the end.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._pending: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        self._unflushed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for future in self._pending:
                future.result()

    def write(self, position: int, data: bytes | memoryview) -> None:
        while self._pending and (len(self._pending) >= _AHEAD or self._pending[0].done()):
            self._pending.popleft().result()
        if len(data) < _SMALL and not self._pending:
            _write_at(self._descriptor, position, data)
            return
        self._pending.append(self._pool.submit(self._write, position, data))

    def _write(self, position: int, data: bytes | memoryview) -> None:
        _write_at(self._descriptor, position, data)
        self._unflushed += len(data)
        if self._unflushed >= _FLUSH and hasattr(os, "posix_fadvise"):
            # Asked to drop these pages from its cache, Linux starts to write them to the disk
            # without waiting. So little is left to do for the fsync at the end.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._unflushed = 0


def _write_at(descriptor: int, position: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count
