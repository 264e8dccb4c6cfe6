"""Writes under a temporary name, beside the target, and renames what is whole. No JAX here.

The name is the same in every run, so that a run finds what a killed one has left: a file that is
not whole, or the folder in which a checkpoint grows file by file.
"""

import collections
import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import shlex
import shutil
import stat
from collections.abc import Iterator
from typing import Any, Self

from qtoolkit.checkpoints._paths import (
    Path,
    check_path,
    check_writable,
    is_url,
    join,
    read_file,
    storage,
)
from qtoolkit.checkpoints._tensors import CheckpointError

PLAN = "plan.json"  # in the folder of a checkpoint that grows
_PLAN_KEYS = {"made", "files", "copied", "json", "report"}
_MAX_JSON = 2**30
PARTIAL = ".qtoolkit-partial"
WHOLE = "is written and whole"
_LONGEST = 200  # bytes of a name, so that there is room for more
_SMALL = 2**16  # bytes that are written at once: to hand them to the thread takes longer
_AHEAD = 8  # writes that may wait
_FLUSH = 2**25  # bytes after which the system is asked to begin with storing them


class OvertakenError(CheckpointError):
    """Another process has begun to write the same target: what is there is no longer ours."""

    __module__ = "qtoolkit.checkpoints"


def partial_name(target: str) -> str:
    """The path at which `target` is written until it is whole."""
    folder, name = os.path.split(target)
    if len(os.fsencode(name)) > _LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(folder, f".{name}{PARTIAL}")


def old_name(target: str) -> str:
    """The path to which an old folder is moved before the new one is renamed to `target`."""
    return f"{partial_name(target)}-old"


def replaced_name(target: str) -> str:
    """The path to which the old folder is moved after that, until it is removed."""
    return f"{partial_name(target)}-replaced"


def restore(target: str) -> None:
    """Renames an old folder back to its name if no new one has that name: after a killed run."""
    shutil.rmtree(replaced_name(target), ignore_errors=True)
    if not os.path.lexists(target):
        # There is none, or another process was faster.
        with contextlib.suppress(FileNotFoundError):
            os.rename(old_name(target), target)


def replace_folder(content: str, target: str, path: Path) -> None:
    """Renames the folder `content` to `target`, and an old target to `replaced_name`.

    `path` is what messages call the target.
    """
    old, replaced = old_name(target), replaced_name(target)
    shutil.rmtree(old, ignore_errors=True)
    if os.path.isdir(target):
        os.rename(target, old)
    try:
        os.rename(content, target)
    except BaseException:
        restore(target)
        raise
    with whole(str(path)):
        _keep_mode(old, target)
        # Rename it before removing it, which may take long: a run that is killed meanwhile must not
        # make a later one restore it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(old, replaced)


def plan_in(partial: Path) -> dict[str, Any] | None:
    """The plan in the folder of a checkpoint that grows; None if it is missing or incomplete."""
    plan = json_in(join(partial, PLAN))
    return plan if plan is not None and plan.keys() >= _PLAN_KEYS else None


def json_in(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file of ours; None where there is none, or half of one."""
    try:
        value = json.loads(read_file(path, _MAX_JSON))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def clear_partial(target: str, path: Path, overwrite: bool) -> None:
    """Removes what a killed run has left of `target`, but what shards of a folder have written.

    Raises:
      CheckpointError: Shards have written there, and nothing may be overwritten.
    """
    restore(target)
    partial = partial_name(target)
    if not os.path.isdir(partial) or os.path.islink(partial):
        with contextlib.suppress(FileNotFoundError):
            if not os.path.islink(partial):
                os.unlink(partial)
        return
    plan = plan_in(partial)
    if plan is None and not overwrite:
        check_no_plan(partial, path)
    if plan is not None and plan.get("shards") and not overwrite:
        raise CheckpointError(
            f"{path}: files of a conversion in shards are there; finalize it, or remove them: "
            f"qtoolkit finalize --discard {shlex.quote(str(path))}"
        )
    shutil.rmtree(partial)


def check_no_plan(partial: str, path: object) -> None:
    """Raises if there is a plan that `plan_in` does not understand: it may be that of shards."""
    if os.path.lexists(plan := os.path.join(partial, PLAN)):
        raise CheckpointError(
            f"{path}: {plan} of an unfinished conversion is damaged, or of another version; remove "
            "that folder, or convert with --overwrite"
        )


@contextlib.contextmanager
def whole(what: str) -> Iterator[None]:
    """Adds a note to exceptions raised in this context, such as Ctrl-C: `what` is complete."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{what} {WHOLE}")
        raise


@contextlib.contextmanager
def temporary_file(target: str, path: Path) -> Iterator[int]:
    """A new file, as its descriptor, that is renamed to `target` if the block ends well.

    What a killed run has left under the temporary name is removed. `path` is what messages call the
    target.

    Raises:
      CheckpointError: Another process has begun to write the same target meanwhile.
      OSError: The file cannot be written.
    """
    name = partial_name(target)
    if os.path.islink(name):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    opened: list[int] = []  # Ctrl-C may come after the file is made and before it is here
    try:
        # Not tempfile: its files are private, these get the mode that the umask says.
        opened.append(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        _keep_mode(target, name)  # before anybody could read what is in it
        yield opened[0]
        os.fsync(opened[0])
        if not _is_at(opened[0], name):
            raise OvertakenError(
                f"{path}: another conversion is writing it; wait for it, or choose another name"
            )
        os.replace(name, target)
    except BaseException as error:
        if _is_at(opened[0], name) if opened else not isinstance(error, OSError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        raise
    finally:
        for file in opened:
            os.close(file)
    _sync_folder(os.path.dirname(target))


def _is_at(file: int, name: str) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(name, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _keep_mode(old: str, new: str) -> None:
    """Gives `new` the permissions and group of `old`, which it is to replace, if there is one.

    Where the system or the user may not change them, `new` keeps its own.
    """
    with contextlib.suppress(OSError):
        status = os.stat(old)
        if os.stat(new).st_gid != status.st_gid:
            with contextlib.suppress(OSError):
                os.chown(new, -1, status.st_gid)
        os.chmod(new, stat.S_IMODE(status.st_mode))


def _sync_folder(folder: str) -> None:
    """Makes the new name survive a power failure, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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


_OTHER_FILES = (".npz", ".npy", ".msgpack", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".h5")


def check_target(path: Path, overwrite: bool) -> str:
    """The real path to write `path` to; raises where that cannot work or would lose a file."""
    check_path(path, "path")
    check_writable(path)
    stem, ending = os.path.splitext(str(path))
    if ending.lower() in _OTHER_FILES:
        raise CheckpointError(
            f"{path}: what is written is a safetensors file, which readers of {ending} refuse; "
            f"name it {stem}.safetensors"
        )
    if str(path).endswith("/") and not os.path.isdir(path):
        raise CheckpointError(
            f"{path}: ends with a slash, as names of folders do, and what is written is a file; "
            f"name it {str(path).rstrip('/')}.safetensors"
        )
    if is_url(path):
        kind = storage(path).kind(path)
        if kind == "folder":
            raise IsADirectoryError(errno.EISDIR, "is a folder, expected a file name", str(path))
        _check_new(path, kind != "", overwrite)
        return str(path)
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, "is a folder, expected a file name", str(path))
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; create it", str(path))
    if os.path.exists(target) and not os.path.isfile(target):
        raise CheckpointError(f"{path}: is not a regular file, expected one or a new name")
    _check_new(path, os.path.exists(target), overwrite)
    return target


def _check_new(path: Path, exists: bool, overwrite: bool) -> None:
    if exists and not overwrite:
        raise exists_already(path)


def exists_already(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: exists already; pass --overwrite (in Python overwrite=True) to replace it, "
        "or choose another name"
    )
