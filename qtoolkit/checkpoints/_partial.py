"""What is being written: under a temporary name that a later run finds, and locked. No JAX here.

The name is that of a file until it is whole, or of the folder of parts in which a checkpoint folder
grows. So a target has one lock, whatever is written there, and a run of any kind finds what one of
another kind has left when it was killed.
"""

import collections
import concurrent.futures
import contextlib
import contextvars
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import stat
from collections.abc import Iterator
from typing import Any, Self

from qtoolkit.checkpoints._header import CheckpointError
from qtoolkit.checkpoints._storage import Path, join, naming, read_file

PARTIAL = ".qtoolkit-partial"
PLAN = "plan.json"
_PLAN_KEYS = {"made", "files", "copied", "json", "report"}
_MAX_JSON = 2**30
_FLAGS = os.O_RDWR | os.O_NOFOLLOW
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_LONGEST = 200  # bytes of a name, so that there is room for more
_SMALL = 2**16  # bytes that are written at once: to hand them to the thread takes longer
_AHEAD = 8  # writes that may wait
_FLUSH = 2**25  # bytes after which the system is asked to begin with storing them
# What `reserved` holds in this thread, by its temporary name.
_RESERVED: contextvars.ContextVar[dict[str, int] | None]
_RESERVED = contextvars.ContextVar("_RESERVED", default=None)


def partial_name(target: str) -> str:
    """The path at which `target` is written until it is whole: the same in every run."""
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
    """Renames an old folder back to its name if no new one has that name."""
    shutil.rmtree(replaced_name(target), ignore_errors=True)
    if not os.path.lexists(target):
        # There is none, or another process was faster.
        with contextlib.suppress(FileNotFoundError):
            os.rename(old_name(target), target)


def plan_in(parts: Path) -> dict[str, Any] | None:
    """The plan in the folder of parts of a conversion; None if it is missing or incomplete."""
    plan = json_in(join(parts, PLAN))
    return plan if plan is not None and plan.keys() >= _PLAN_KEYS else None


def json_in(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file of ours; None where there is none, or half of one."""
    try:
        value = json.loads(read_file(path, _MAX_JSON))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def check_no_shards(parts: str, path: object, overwrite: bool) -> None:
    """Refuses to remove what shards of a folder have written, unless it may be replaced."""
    there = plan_in(parts)
    if there is None and not overwrite:
        check_no_plan(parts, path)
    if there is not None and there.get("shards") and not overwrite:
        raise CheckpointError(
            f"{path}: files of a conversion in shards are there; finalize it, or remove them: "
            f"qtoolkit finalize --discard {shlex.quote(str(path))}"
        )


def check_no_plan(parts: str, path: object) -> None:
    """Raises if there is a plan that `plan_in` does not understand: it may be that of shards."""
    if os.path.lexists(plan := os.path.join(parts, PLAN)):
        raise CheckpointError(
            f"{path}: {plan} of an unfinished conversion is damaged, or of another version; remove "
            "that folder, or convert with --overwrite"
        )


@contextlib.contextmanager
def locked(
    target: str, path: Path, *, folder: bool, shared: bool = False, overwrite: bool = False
) -> Iterator[int]:
    """Holds the lock of a target: an open file beside it, or an open folder of parts.

    At the end the file is removed, unless it was renamed, and the folder if it is empty. What a run
    that was killed has left there is removed at the start if it is of the other kind.

    Args:
      target: Its real path.
      path: What messages call it.
      folder: Whether a folder is written.
      shared: Whether others may hold it, too, who say the same. Only of folders.
      overwrite: Whether what shards of a folder have written may be removed.

    Raises:
      CheckpointError: Another process is writing `target`, or shards have.
      OSError: The file or folder cannot be made.
    """
    name = partial_name(target)
    reserved = (_RESERVED.get() or {}).pop(name, None)
    if reserved is not None:
        yield reserved
        return
    # A list that `_open_locked` fills: an interrupt could lose a descriptor that it returns.
    opened: list[int] = []
    try:
        with naming(path, PARTIAL):
            _open_locked(name, path, opened, folder=folder, shared=shared, overwrite=overwrite)
            restore(target)  # after a run that was killed between two renames
        yield opened[0]
    finally:
        with contextlib.suppress(OSError, CheckpointError):
            _remove_own(name, path, opened, folder)
        for descriptor in opened:
            os.close(descriptor)


def _remove_own(name: str, path: Path, opened: list[int], folder: bool) -> None:
    """Removes what `_open_locked` made: the file, unless it was renamed; the folder if empty."""
    if folder:
        if opened:
            os.rmdir(name)
        return
    if not opened:  # an interrupt came between the system's opening it and Python's
        opened.append(os.open(name, _FLAGS))
        check_lock(opened[0], path)
    if is_at(opened[0], name):
        os.unlink(name)


@contextlib.contextmanager
def reserved(
    target: str, path: Path, *, folder: bool, shared: bool = False, overwrite: bool = False
) -> Iterator[None]:
    """Holds the lock of a target for the next `locked` of this thread that asks for it.

    So a conversion can have it before what takes long begins, such as importing JAX.
    """
    with locked(target, path, folder=folder, shared=shared, overwrite=overwrite) as descriptor:
        token = _RESERVED.set({partial_name(target): descriptor})
        try:
            yield
        finally:
            _RESERVED.reset(token)


def _open_locked(
    name: str, path: Path, opened: list[int], *, folder: bool, shared: bool, overwrite: bool
) -> None:
    """Makes the file or folder and locks it; its descriptor is in `opened` as soon as there is one.

    The arguments are those of `locked`.
    """
    while True:
        try:
            if folder:
                os.makedirs(name, exist_ok=True)
                opened.append(os.open(name, _FOLDER_FLAGS))
            else:
                # Not tempfile: its files are private, these get the mode that the umask says.
                opened.append(os.open(name, _FLAGS | os.O_CREAT, 0o666))
        except FileNotFoundError:  # whoever had the folder until now has removed it
            if folder:
                continue
            raise
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            _remove_other(name, path, shared, overwrite)
            continue
        try:
            check_lock(opened[0], path, shared=shared)
            # Whoever held the lock until now may have given the file its final name meanwhile.
            if is_at(opened[0], name):
                return
        except BaseException:
            os.close(opened.pop())
            raise
        os.close(opened.pop())


def _remove_other(name: str, path: Path, shared: bool, overwrite: bool) -> None:
    """Removes a file, or folder of parts, that a run which was killed has left.

    Raises:
      CheckpointError: It is locked, so that run goes on; or shards have written it.
    """
    try:
        is_folder = stat.S_ISDIR(os.lstat(name).st_mode)
        # On NFS a file must be open for writing to be locked.
        lock = os.open(name, _FOLDER_FLAGS if is_folder else _FLAGS)
    except FileNotFoundError:
        return
    try:
        # Shared by shards, which begin at the same time and must not take each other for a run.
        check_lock(lock, path, shared=shared)
        if is_folder and is_at(lock, name):
            check_no_shards(name, path, overwrite)
            shutil.rmtree(name)
        elif is_at(lock, name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    finally:
        os.close(lock)


def keep_mode(old: str, new: str) -> None:
    """Gives `new` the permissions and group of `old`, the file that it is to replace, if any.

    Where the system or the user may not change them, `new` keeps its own.
    """
    with contextlib.suppress(OSError):
        status = os.stat(old)
        if os.stat(new).st_gid != status.st_gid:
            with contextlib.suppress(OSError):
                os.chown(new, -1, status.st_gid)
        os.chmod(new, stat.S_IMODE(status.st_mode))


def is_at(descriptor: int, name: str) -> bool:
    """Whether an open file or folder still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(name, follow_symlinks=False))
    except FileNotFoundError:
        return False


def check_lock(descriptor: int, path: object, *, shared: bool = False) -> None:
    """Locks an open file or folder for as long as this process has it open.

    If `shared`, others may have such a lock, too. Where the file system has no locks, nothing
    happens.

    Raises:
      CheckpointError: Another process has it.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"{path}: another conversion is writing it; wait for it, or choose another name"
        ) from None
    except OSError:
        return


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
            write_at(self._descriptor, position, data)
            return
        self._pending.append(self._pool.submit(self._write, position, data))

    def _write(self, position: int, data: bytes | memoryview) -> None:
        write_at(self._descriptor, position, data)
        self._unflushed += len(data)
        if self._unflushed >= _FLUSH and hasattr(os, "posix_fadvise"):
            # Asked to drop these pages from its cache, Linux starts to write them to the disk
            # without waiting. So little is left to do for the fsync at the end.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._unflushed = 0


def write_at(descriptor: int, position: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count
