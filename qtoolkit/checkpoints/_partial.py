"""A file that is being written: under a temporary name that a later run finds, and locked."""

import collections
import concurrent.futures
import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from qtoolkit.checkpoints._header import CheckpointError

PARTIAL = ".qtoolkit-partial"
_FLAGS = os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
_LONGEST = 200  # bytes of a name, so that there is room for more
_SMALL = 2**16  # bytes that are written at once: to hand them to the thread takes longer
_AHEAD = 8  # writes that may wait
_FLUSH = 2**25  # bytes after which the system is asked to begin with storing them


def partial_name(target: str) -> str:
    """The path at which `target` is written until it is whole: the same in every run."""
    folder, name = os.path.split(target)
    if len(os.fsencode(name)) > _LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(folder, f".{name}{PARTIAL}")


def old_name(target: str) -> str:
    """The path to which an old folder is moved before the new one is renamed to `target`."""
    return f"{partial_name(target)}-old"


@contextlib.contextmanager
def partial_file(target: str, path: object) -> Iterator[tuple[int, str]]:
    """A new file beside `target`, open and locked, and its name. It is removed at the end.

    What a run that was killed has left under this name is overwritten: its lock went with it.

    Raises:
      CheckpointError: Another process is writing `target`; the message calls it `path`.
      OSError: It cannot be made.
    """
    name = partial_name(target)
    # A list that `_open_locked` fills: an interrupt could lose a descriptor that it returns.
    opened: list[int] = []
    try:
        _open_locked(name, path, opened)
        os.ftruncate(opened[0], 0)
        yield opened[0], name
    finally:
        with contextlib.suppress(OSError, CheckpointError):
            if not opened:  # an interrupt came between the system's opening it and Python's
                opened.append(os.open(name, _FLAGS))
                check_lock(opened[0], path)
            if is_at(opened[0], name):  # not after it was renamed
                os.unlink(name)
        for descriptor in opened:
            os.close(descriptor)


def _open_locked(name: str, path: object, opened: list[int]) -> None:
    """Makes the file and locks it; its descriptor is in `opened` as soon as there is one."""
    while True:
        # Not tempfile: its files are private, these get the mode that the umask says.
        opened.append(os.open(name, _FLAGS | os.O_CREAT, 0o666))
        try:
            check_lock(opened[0], path)
            # Whoever held the lock until now may have given the file its final name meanwhile.
            if is_at(opened[0], name):
                return
        except BaseException:
            os.close(opened.pop())
            raise
        os.close(opened.pop())


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

    Where the file system has no locks, nothing happens.

    Args:
      descriptor: Of the file or folder.
      path: What a message calls it.
      shared: Whether others may have such a lock, too.

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
