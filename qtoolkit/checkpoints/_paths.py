"""Opens, lists and writes files and folders, on this machine or behind URLs.

URLs are read and written by fsspec. A file that is written to a URL is not seen before it is
complete, as in object stores: s3://, gs://, az://. No JAX here.
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
    """Raises where nothing can be written, whatever is there: no server is asked.

    Raises:
      CheckpointError: A URL whose protocol only reads.
      OSError: Symbolic links that lead in a circle; `os.path.realpath` returns one of them.
    """
    if is_url(path):
        protocol = str(path).partition("://")[0].lower()
        if protocol in _READ_ONLY:
            raise CheckpointError(
                f"{path}: {protocol}:// is only read, expected a path of this machine or the URL "
                "of an object store, such as s3://, gs:// or az://; give one of these"
            )
        return
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise


def is_url(path: Path) -> bool:
    return isinstance(path, str) and _URL.match(path) is not None


def join(path: Path, *names: str) -> str:
    if is_url(path):
        return "/".join((str(path).rstrip("/"), *names))
    return os.path.join(path, *names)


def identity(path: Path) -> str:
    """A string that is the same for all paths of a file or folder."""
    return _Remote(str(path)).identity(path) if is_url(path) else os.path.realpath(path)


def storage(path: Path) -> "_Disk | _Remote":
    """What reads and writes `path`; operations take full paths.

    Raises:
      CheckpointError: No installed package reads the URL.
    """
    return _Remote(str(path)) if is_url(path) else _Disk()


def read_file(path: Path, limit: int, *, whole: bool = True) -> bytes:
    """The content of a file of at most `limit` bytes; unless `whole`, the start of any file.

    Raises:
      CheckpointError: The file is longer, and `whole` is asked for.
    """
    with contextlib.closing(storage(path).open(path)) as file:
        if whole and file.size > limit:
            raise CheckpointError(f"{path}: {file.size:,} bytes, expected at most {limit:,}")
        data = memoryview(bytearray(min(file.size, limit)))
        done = 0
        while done < len(data) and (count := file.read_at(done, data[done:])):
            done += count
        return bytes(data[:done])


def copy(source: Path, target: Path) -> None:
    """Copies a file from anywhere to anywhere."""
    if not is_url(source) and not is_url(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(source, target)
        return
    with tempfile.TemporaryFile() if is_url(source) else open(source, "rb") as file:
        if is_url(source):
            with naming(tempfile.gettempdir()):
                _copy_into(source, file)
        storage(target).upload(file, target)


def _copy_into(source: Path, file: BinaryIO) -> None:
    with contextlib.closing(storage(source).open(source)) as opened:
        buffer = memoryview(bytearray(min(_PART, opened.size)))
        done = 0
        while count := opened.read_at(done, buffer):
            file.write(buffer[:count])
            done += count


@contextlib.contextmanager
def naming(path: Path, ours: str = "") -> Iterator[None]:
    """Gives an OSError the path that the user knows, if it has none or one of our own.

    Paths that contain `ours`, such as those of temporary files, are our own.
    """
    try:
        yield
    except OSError as error:
        is_ours = bool(ours) and ours in str(error.filename)
        # Any other path stays: a source that is read in this context may have failed.
        if error.errno is not None and (error.filename is None or is_ours):
            error.filename = str(path)
            error.filename2 = None
        raise


def fill(file: "File | _Object", position: int, view: memoryview, where: str) -> None:
    """Fills `view` with what an open file has from `position` on.

    `where` names the file and the part of it that is read. Threads may share the file.

    Raises:
      CheckpointError: It ends before.
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


class _Disk:
    """Files and folders of this machine."""

    def kind(self, path: Path) -> Kind:
        """What is there; "" for nothing."""
        if os.path.isdir(path):
            return "folder"
        if os.path.isfile(path):
            return "file"
        return "other" if os.path.lexists(path) else ""

    def entries(self, path: Path) -> dict[str, bool]:
        """The names in a folder, in order, and whether each is a folder."""
        with os.scandir(path) as found:
            return dict(sorted((entry.name, entry.is_dir()) for entry in found))

    def open(self, path: Path) -> File:
        return File(path)

    def write(self, path: Path, data: bytes) -> None:
        """Writes a small file: it appears complete or not at all."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # Not the process id: containers that share a folder may have the same ids.
        temporary = f"{path}.{uuid.uuid4().hex}"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            self.remove(temporary)

    def upload(self, file: BinaryIO, path: Path) -> None:
        """Copies all of an open file; behind a URL it appears complete or not at all."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file.seek(0)
        with open(path, "wb") as target:
            shutil.copyfileobj(file, target)

    def remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


class _Object:
    """An object behind a URL, read by ranges."""

    def __init__(self, files: Any, url: str) -> None:
        self._files, self._url = files, url
        with _one_line(url):
            size = files.info(url)["size"]
            if size is None:
                raise OSError("its size is not known, expected one; fetch the file and give it")
            self.size = int(size)

    def read_at(self, position: int, view: memoryview) -> int:
        stop = min(position + len(view), self.size)
        if position >= stop:
            return 0
        with _one_line(self._url):
            data = self._files.cat_file(self._url, start=position, end=stop)
            if len(data) > stop - position:
                raise OSError(
                    f"{len(data):,} bytes, expected the {stop - position:,} asked for; the server "
                    "knows no ranges: fetch the file and give it"
                )
        view[: len(data)] = data
        return len(data)

    def close(self) -> None: ...


class _Remote:
    """Objects behind URLs, as fsspec reads and writes them."""

    def __init__(self, url: str) -> None:
        protocol, _, rest = url.partition("://")
        if protocol != protocol.lower():
            raise CheckpointError(
                f"{url}: protocol {protocol}, expected it in small letters; write "
                f"{protocol.lower()}://{rest}"
            )
        try:
            import fsspec

            # Without a cache of listings, which would hide what others write meanwhile.
            with _one_line(url):  # some file systems connect here
                self._files, _ = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise CheckpointError(
                f"{url}: {error}; install what reads it, for s3:// pip install s3fs"
            ) from error
        except (ValueError, TypeError) as error:  # TypeError: the URL lacks what it needs
            raise CheckpointError(
                f"{url}: {_line(error)}, expected such as s3://BUCKET/NAME"
            ) from error
        # With two spellings for a file of this machine, a target could be the source unnoticed.
        if "file" in self._protocols():
            plain = self._files._strip_protocol(url)
            raise CheckpointError(
                f"{url}: leads to this machine, expected a plain path; give the path itself: "
                f"{shown(plain)}"
            )

    def _protocols(self) -> tuple[str, ...]:
        protocol = self._files.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def identity(self, path: Path) -> str:
        # Stricter than an object store, for which a//b and a/b are two names.
        name = posixpath.normpath("/" + self._files._strip_protocol(str(path)).lstrip("/"))
        host = self._files.storage_options.get("host", "")
        return f"{self._protocols()[0]}://{host}{name.rstrip('/')}"

    def kind(self, path: Path) -> Kind:
        with _one_line(path):
            try:
                found = self._files.info(str(path))
            except FileNotFoundError:
                return ""
        return "folder" if found["type"] == "directory" else "file"

    def entries(self, path: Path) -> dict[str, bool]:
        with _one_line(path):
            try:
                found = self._files.ls(str(path), detail=True)
            except FileNotFoundError:  # a folder exists only if there is an object in it
                return {}
        named = {
            item["name"].rstrip("/").rpartition("/")[2]: item["type"] == "directory"
            for item in found
            if item["name"].strip("/") != self._files._strip_protocol(str(path)).strip("/")
        }
        return dict(sorted(named.items()))

    def open(self, path: Path) -> _Object:
        return _Object(self._files, str(path))

    def write(self, path: Path, data: bytes) -> None:
        with _one_line(path), _in_bucket():
            self._files.pipe_file(str(path), data)

    def upload(self, file: BinaryIO, path: Path) -> None:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        with _one_line(path), _in_bucket():
            if size <= _PART:
                self._files.pipe_file(str(path), file.read())
                return
            part = max(_PART, -(-size // 9_000))
            # Otherwise `close` would publish the file, even after an error; now `commit` does.
            target = self._files.open(str(path), "wb", block_size=part, autocommit=False)
            try:
                shutil.copyfileobj(file, target, part)
                target.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    target.close()  # else the garbage collector closes it, after `discard`
                target.discard()
                raise
            target.commit()

    def remove(self, path: Path) -> None:
        with _one_line(path), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(str(path))

    def remove_folder(self, path: Path) -> None:
        with _one_line(path), contextlib.suppress(FileNotFoundError):
            # Not rm: it takes [, ] and ? in a name for a pattern, and may delete a bucket.
            root = self._files._strip_protocol(str(path)).strip("/") + "/"
            found = self._files.find(str(path), withdirs=True, detail=True)
            for name, item in sorted(found.items(), reverse=True):  # a folder after what is in it
                if not name.strip("/").startswith(root):
                    continue
                if item["type"] != "directory":
                    self._files.rm_file(name)
                    continue
                with contextlib.suppress(OSError, NotImplementedError):  # object stores have none
                    self._files.rmdir(name)


# Packages for object stores raise these without an errno, with the path as their text.
_CODES: dict[type, int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
}


@contextlib.contextmanager
def _one_line(url: Path) -> Iterator[None]:
    """Turns errors of packages for object stores into OSErrors of one line that name the URL."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except OSError as found:
        error = _cause(found)
        code = error.errno or _CODES.get(type(error), errno.EIO)
        known = error.strerror or (os.strerror(code) if type(error) in _CODES else str(error))
        raise OSError(code, _line(known or type(error).__name__), str(url)) from found
    except Exception as error:
        if type(error).__module__ == "builtins":
            raise
        raise OSError(errno.EIO, f"{_line(error)} ({type(error).__name__})", str(url)) from error


def _cause(error: OSError) -> OSError:
    """The real error: fsspec reports every failure of an HTTP server as FileNotFoundError."""
    cause = error.__cause__
    is_absent = getattr(cause, "status", None) in (404, 410)
    if is_absent or not type(cause).__module__.startswith("aiohttp"):
        return error
    return OSError(errno.EIO, f"{cause}; is the URL right, and the server there?")


@contextlib.contextmanager
def _in_bucket() -> Iterator[None]:
    """While writing, turns FileNotFoundError into one that says that the bucket is missing."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "its bucket does not exist; create it") from error


def _line(text: object) -> str:
    return shown(" ".join(str(text).split()))
