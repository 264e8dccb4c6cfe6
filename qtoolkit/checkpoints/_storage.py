"""Opens, lists and writes files and folders, on this machine or, by fsspec, behind URLs. No JAX.

A file that is written to a URL is not seen before it is complete, as in object stores.
"""

import contextlib
import errno
import os
import posixpath
import re
import reprlib
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from io import BufferedReader
from typing import Any, BinaryIO, Literal

from qtoolkit.checkpoints._tensors import CheckpointError, shown

Path = str | os.PathLike[str]
Kind = Literal["file", "folder", "other", ""]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# Protocols of fsspec that write nothing, or, as HTTP, nothing that most servers take.
_READ_ONLY = ("http", "https", "data", "git", "github", "gist", "reference", "zip", "tar")
_PART = 2**23  # bytes of one part of an upload; S3 takes at most 10,000 parts of 5 MiB or more


def check_path(path: Any, argument: str) -> None:
    """Raises TypeError if an argument is no path: `open` would take a number for an open file."""
    if isinstance(path, str | os.PathLike):
        return
    remedy = "os.fsdecode(path)" if isinstance(path, bytes) else "'model.safetensors'"
    raise TypeError(
        f"{argument}: got {reprlib.repr(path)} of type {type(path).__name__}, expected a path as "
        f"str or os.PathLike, e.g. {remedy}"
    )


def check_writable(path: Path) -> None:
    """Raises CheckpointError for a URL whose protocol only reads. No server is asked."""
    protocol = str(path).partition("://")[0].lower()
    if is_url(path) and protocol in _READ_ONLY:
        raise CheckpointError(
            f"{path}: {protocol}:// is only read, expected a path of this machine or the URL of an "
            "object store, such as s3://, gs:// or az://; give one of these"
        )


def is_url(path: Path) -> bool:
    return isinstance(path, str) and _URL.match(path) is not None


def join(path: Path, *names: str) -> str:
    if is_url(path):
        return "/".join((str(path).rstrip("/"), *names))
    return os.path.join(path, *names)


def identity(path: Path) -> str:
    """A string that is the same for all paths of a file or folder."""
    if not is_url(path):
        return os.path.realpath(path)
    files = _files(path)
    protocol, name = files.protocol, files._strip_protocol(str(path))
    first = protocol if isinstance(protocol, str) else protocol[0]  # "s3" and "s3a" are one
    # Stricter than an object store, for which a//b and a/b are two names.
    host = files.storage_options.get("host", "")
    return f"{first}://{host}{posixpath.normpath('/' + name.lstrip('/'))}".rstrip("/")


def kind_at(path: Path) -> Kind:
    """What is at a path; "" for nothing."""
    if not is_url(path):
        if os.path.isdir(path):
            return "folder"
        return "file" if os.path.isfile(path) else "other" if os.path.lexists(path) else ""
    with _naming_url(path):
        try:
            info = _files(path).info(str(path))
        except FileNotFoundError:
            return ""
    return "folder" if info["type"] == "directory" else "file"


def names_in(path: Path) -> dict[str, bool]:
    """The names in a folder, in order, and whether each is a folder."""
    if not is_url(path):
        with os.scandir(path) as inside:
            return dict(sorted((entry.name, entry.is_dir()) for entry in inside))
    with _naming_url(path):
        files = _files(path)
        try:
            listed = files.ls(str(path), detail=True)
        except FileNotFoundError:  # a folder exists only if there is an object in it
            return {}
    own = files._strip_protocol(str(path)).strip("/")
    named = {
        item["name"].rstrip("/").rpartition("/")[2]: item["type"] == "directory"
        for item in listed
        if item["name"].strip("/") != own
    }
    return dict(sorted(named.items()))


def open_file(path: Path) -> "File | _Object":
    """A file that is read at any place: `fill`, `size` and `close`."""
    return _Object(str(path)) if is_url(path) else File(path)


def file_size(path: Path) -> int:
    with contextlib.closing(open_file(path)) as file:
        return file.size


def read_file(path: Path, limit: int, *, cut: bool = False) -> bytes:
    """The content of a file of at most `limit` bytes; with `cut` the start of any file."""
    with contextlib.closing(open_file(path)) as file:
        if not cut and file.size > limit:
            raise CheckpointError(f"{path}: {file.size:,} bytes, expected at most {limit:,}")
        data = bytearray(min(file.size, limit))
        fill(file, 0, memoryview(data), str(path))
        return bytes(data)


def write_file(path: Path, data: bytes) -> None:
    """Writes a small file, which appears whole."""
    if is_url(path):
        with _naming_url(path):
            _files(path).pipe_file(str(path), data)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # Not the process id: containers that share a folder may have the same ids.
    temporary = f"{path}.{uuid.uuid4().hex}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    finally:
        remove(temporary)


def upload(file: BinaryIO, url: Path) -> None:
    """Copies all of an open file to a URL."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    with _naming_url(url):
        part = max(_PART, -(-size // 9_000))
        if size <= part:
            _files(url).pipe_file(str(url), file.read())
            return
        # Otherwise `close` would publish the file, even after an error; now `commit` does.
        target = _files(url).open(str(url), "wb", block_size=part, autocommit=False)
        try:
            shutil.copyfileobj(file, target, part)
            target.close()
        except BaseException:
            with contextlib.suppress(Exception):
                target.close()  # else the garbage collector closes it, after `discard`
            target.discard()
            raise
        target.commit()


def copy(source: Path, target: Path) -> None:
    """Copies a file; both may be URLs."""
    if not is_url(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
    new = tempfile.TemporaryFile() if is_url(target) else open(target, "wb")  # noqa: SIM115
    with contextlib.closing(open_file(source)) as opened, new as file:
        buffer = memoryview(bytearray(min(_PART, opened.size)))
        done = 0
        while count := opened.read_at(done, buffer):
            file.write(buffer[:count])
            done += count
        if is_url(target):
            upload(file, target)


def remove(path: Path) -> None:
    """Removes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if is_url(path):
            with _naming_url(path):
                _files(path).rm_file(str(path))
        else:
            os.unlink(path)


def remove_folder(path: Path) -> None:
    """Removes a folder, if it is there, and all that is in it."""
    if not is_url(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with _naming_url(path), contextlib.suppress(FileNotFoundError):
        # Not rm: it takes [, ] and ? in a name for a pattern, and may delete a bucket.
        files = _files(path)
        root = files._strip_protocol(str(path)).strip("/") + "/"
        inside = files.find(str(path), withdirs=True, detail=True)
        for name, item in sorted(inside.items(), reverse=True):  # a folder after what is in it
            if name.strip("/").startswith(root):
                with contextlib.suppress(OSError, NotImplementedError):
                    files.rmdir(name) if item["type"] == "directory" else files.rm_file(name)


@contextlib.contextmanager
def naming(path: Path, temporary: str = "") -> Iterator[None]:
    """Gives an OSError the path that the user knows, if it has none or one of our own.

    Paths that contain `temporary`, such as those of temporary files, are our own.
    """
    try:
        yield
    except OSError as error:
        is_ours = bool(temporary) and temporary in str(error.filename)
        # Any other path stays: a source that is read in this context may have failed.
        if error.errno is not None and (error.filename is None or is_ours):
            error.filename = str(path)
            error.filename2 = None
        raise


def fill(file: "File | _Object", position: int, view: memoryview, where: str) -> None:
    """Fills `view` with what an open file has from `position` on.

    `where` names the file and the part of it that is read. Threads may share the file.
    """
    while view:
        count = file.read_at(position, view)
        if not count:
            raise CheckpointError(
                f"{where}: the file ended {len(view)} bytes early; something shortened it while "
                "it was read: try again"
            )
        view, position = view[count:], position + count


class File:
    """A file of this machine. Not mapped: mapped pages would count as memory in use.

    Attributes:
      size: Its bytes.
      stream: The same file, for what seeks and reads it bit by bit.
    """

    def __init__(self, path: Path) -> None:
        with naming(path):
            if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
                # Opening a pipe or a device could wait for ever.
                raise CheckpointError(f"{path}: is not a regular file; copy it to one first")
            self.stream: BufferedReader = open(path, "rb")  # noqa: SIM115
            self.size = os.fstat(self.stream.fileno()).st_size

    def read_at(self, position: int, view: memoryview) -> int:
        return os.preadv(self.stream.fileno(), [view], position)

    def close(self) -> None:
        self.stream.close()


class _Object:
    """An object behind a URL, read by ranges."""

    def __init__(self, url: str) -> None:
        self._url = url
        with _naming_url(url):
            self._files = _files(url)
            size = self._files.info(url)["size"]
            if size is None:
                raise OSError("its size is not known, expected one; fetch the file and give it")
            self.size = int(size)

    def read_at(self, position: int, view: memoryview) -> int:
        stop = min(position + len(view), self.size)
        if position >= stop:
            return 0
        with _naming_url(self._url):
            data = self._files.cat_file(self._url, start=position, end=stop)
            if len(data) > stop - position:
                raise OSError("the server knows no ranges: fetch the file and give it")
        view[: len(data)] = data
        return len(data)

    def close(self) -> None: ...


def _files(url: Path) -> Any:
    """The file system of fsspec that a URL belongs to."""
    protocol, _, rest = str(url).partition("://")
    if protocol.lower() in ("file", "local"):  # with two names a target could be the source
        raise CheckpointError(f"{url}: expected a plain path; give the path itself: {shown(rest)}")
    try:
        import fsspec

        # Without a cache of listings, which would hide what others write meanwhile.
        with _naming_url(url):  # some file systems connect here
            return fsspec.core.url_to_fs(str(url), use_listings_cache=False)[0]
    except ImportError as error:
        raise CheckpointError(
            f"{url}: {error}; install what reads it, for s3:// pip install s3fs"
        ) from error
    except (ValueError, TypeError) as error:  # TypeError: the URL lacks what it needs
        raise CheckpointError(
            f"{url}: {_line(error)}, expected such as s3://BUCKET/NAME"
        ) from error


# Packages for object stores raise these without an errno, with the path as their text.
_CODES: dict[type, int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
}


@contextlib.contextmanager
def _naming_url(url: Path) -> Iterator[None]:
    """Turns errors of fsspec's packages into OSErrors of one line that name the URL."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        cause = error.__cause__
        is_absent = getattr(cause, "status", None) in (404, 410)
        if not is_absent and type(cause).__module__.startswith("aiohttp"):
            # fsspec reports every failure of an HTTP server as FileNotFoundError.
            raise OSError(errno.EIO, _line(cause), str(url)) from error
        code = error.errno or _CODES.get(type(error), errno.EIO)
        known = error.strerror or (os.strerror(code) if type(error) in _CODES else error)
        raise OSError(code, _line(known), str(url)) from error
    except Exception as error:
        if type(error).__module__ == "builtins":
            raise
        raise OSError(errno.EIO, f"{_line(error)} ({type(error).__name__})", str(url)) from error


def _line(text: object) -> str:
    return shown(" ".join(str(text).split()))
