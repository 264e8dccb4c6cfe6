"""npz files as sources: zip archives of npy members, read in pieces or one at a time."""

import contextlib
import errno
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qtoolkit.checkpoints._header import CheckpointError, shown
from qtoolkit.checkpoints._memory import ArraySource, Span
from qtoolkit.checkpoints._source import PICKLE
from qtoolkit.checkpoints._storage import File, Path, fill, naming

_PIECE = 2**20  # bytes of a member whose checksum is computed at a time


class _Member(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    span: Span | None  # of the elements, where they lie in the file as they are in memory


class NpzFile(ArraySource):
    """An open npz file.

    A member that is not compressed, in C order and in this machine's byte order is read in pieces.
    Before the first of them it is read once as a whole, in pieces, too, to compare its checksum.

    Raises:
      CheckpointError: It is another archive, damaged, or holds pickled objects.
    """

    def __init__(self, path: Path) -> None:
        file = File(path)
        try:
            with _damages(path, "a zip archive"):
                self._archive = zipfile.ZipFile(file.stream)
            members = self._archive.namelist()
            if not members:
                raise CheckpointError(
                    f"{path}: no tensors: an empty zip archive, expected arrays; write them with "
                    "numpy.savez(FILE, name=array)"
                )
            if len({*members}) < len(members):
                twice = next(name for name in members if members.count(name) > 1)
                raise CheckpointError(
                    f"{path}: member {shown(twice)} is there twice, expected each once; write it "
                    "again"
                )
            others = [name for name in members if not name.endswith(".npy")]
            if others:
                raise CheckpointError(f"{path}: {_archive_of(others)}")
            found = {name.removesuffix(".npy"): self._member(path, file, name) for name in members}
            described = {name: (member.dtype, member.shape) for name, member in found.items()}
            spans = {name: [member.span] for name, member in found.items() if member.span}
            super().__init__(path, described, self._array, file, spans)
            self._unchecked = {*spans}
        except BaseException:
            file.close()
            raise

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        if name in self._unchecked:
            with self._making:
                if name in self._unchecked:  # no other thread has read it meanwhile
                    self._check(name)
                    self._unchecked.remove(name)
        super().read_into(name, start, buffer)

    def _member(self, path: Path, file: File, member: str) -> _Member:
        info = self._archive.getinfo(member)
        with _damages(path, f"member {shown(member)}"), self._archive.open(info) as data:
            version = np.lib.format.read_magic(data)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, is_fortran, dtype = read(data)
            start = data.tell()
        if dtype.hasobject:
            raise CheckpointError(
                f"{path}: member {shown(member)} holds Python objects, pickled, which may run any "
                "code when they are read, expected arrays of numbers; where you trust it, read it "
                "with numpy.load(FILE, allow_pickle=True), and write the numbers in them with "
                "numpy.savez"
            )
        size = info.file_size - start
        is_stored = info.compress_type == zipfile.ZIP_STORED
        is_whole = not is_stored or info.compress_size == info.file_size
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size or not is_whole:
            raise CheckpointError(
                f"{path}: member {shown(member)}: {size:,} bytes of data, expected those of "
                f"{list(shape)} {dtype}; the file is damaged, fetch or write it again"
            )
        span = None
        if is_stored and not is_fortran and dtype.isnative:
            # Source: APPNOTE.TXT of ZIP, 4.3.7: 30 bytes, the name, the extra field, the data.
            local = bytearray(30)
            with naming(path):
                fill(file, info.header_offset, memoryview(local), f"{path}: member {shown(member)}")
            before = 30 + sum(struct.unpack_from("<HH", local, 26))
            span = info.header_offset + before + start, size
        return _Member(dtype.newbyteorder("="), shape, span)

    def _check(self, name: str) -> None:
        """Reads a member through; zipfile compares its checksum at the end."""
        with (
            _damages(self.path, f"tensor {shown(name)}"),
            self._archive.open(f"{name}.npy") as data,
        ):
            while data.read(_PIECE):
                pass

    def _array(self, name: str) -> np.ndarray:
        with (
            _damages(self.path, f"tensor {shown(name)}"),
            self._archive.open(f"{name}.npy") as data,
        ):
            array = np.lib.format.read_array(data, allow_pickle=False)
        return array.astype(array.dtype.newbyteorder("="), copy=False)


@contextlib.contextmanager
def _damages(path: Path, what: str) -> Iterator[None]:
    """Raises CheckpointError for what zipfile, its decompressors and NumPy raise of bad data."""
    try:
        with naming(path):
            yield
    except Exception as error:
        # EINVAL: of a place before the start of the file. bz2 raises OSErrors without a number.
        is_failure = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if is_failure or isinstance(error, MemoryError):
            raise
        raise CheckpointError(
            f"{path}: {what}: {shown(str(error))}; the file is damaged, fetch or write it again"
        ) from error


def _archive_of(members: list[str]) -> str:
    if any(os.path.basename(name) == "data.pkl" for name in members):
        return PICKLE
    return f"a zip archive with {shown(members[0])}, expected npz: nothing but .npy members"
