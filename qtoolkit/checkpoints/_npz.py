"""npz files as sources: zip archives of npy members, read one at a time."""

import math
import os
import zipfile
import zlib

import numpy as np

from qtoolkit.checkpoints._header import CheckpointError, shown
from qtoolkit.checkpoints._memory import ArraySource
from qtoolkit.checkpoints._source import PICKLE
from qtoolkit.checkpoints._storage import Path

# What reading a member may raise; NotImplementedError is a RuntimeError.
_DAMAGES = (ValueError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


class NpzFile(ArraySource):
    """An open npz file.

    Raises:
      CheckpointError: It is another archive, damaged, or holds pickled objects.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise CheckpointError(f"{path}: a damaged zip archive ({error})") from error
        try:
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
            described = {name.removesuffix(".npy"): self._header(path, name) for name in members}
            super().__init__(path, described, self._array)
        except BaseException:
            self._archive.close()
            raise

    def close(self) -> None:
        super().close()
        self._archive.close()

    def _header(self, path: Path, member: str) -> tuple[np.dtype, tuple[int, ...]]:
        try:
            with self._archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read(file)
                start = file.tell()
        except _DAMAGES as error:
            raise CheckpointError(f"{path}: member {shown(member)}: {shown(str(error))}") from error
        if dtype.hasobject:
            raise CheckpointError(f"{path}: member {shown(member)} holds Python objects: {PICKLE}")
        size = self._archive.getinfo(member).file_size - start
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
            raise CheckpointError(
                f"{path}: member {shown(member)}: {size:,} bytes of data, expected those of "
                f"{list(shape)} {dtype}; the file is damaged, fetch or write it again"
            )
        return dtype.newbyteorder("="), shape

    def _array(self, name: str) -> np.ndarray:
        try:
            with self._archive.open(f"{name}.npy") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
        except _DAMAGES as error:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)}: {shown(str(error))}; the file is damaged, "
                "fetch or write it again"
            ) from error
        return array.astype(array.dtype.newbyteorder("="), copy=False)


def _archive_of(members: list[str]) -> str:
    if any(os.path.basename(name) == "data.pkl" for name in members):
        return PICKLE
    return f"a zip archive with {shown(members[0])}, expected npz: nothing but .npy members"
