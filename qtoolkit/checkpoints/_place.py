"""The paths of a folder that is being written, and how they are locked, renamed and removed."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._header import CheckpointError
from qtoolkit.checkpoints._partial import (
    PLAN,
    json_in,
    keep_mode,
    locked,
    old_name,
    partial_name,
    plan_in,
    replaced_name,
    restore,
)
from qtoolkit.checkpoints._source import UNDER_WAY
from qtoolkit.checkpoints._storage import Path, is_url, join, storage

WHOLE = "is written and whole"


@contextlib.contextmanager
def whole(what: str) -> Iterator[None]:
    """Adds a note to exceptions raised in this context, e.g. by a signal: `what` is complete."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"{what} {WHOLE}")
        raise


@dataclasses.dataclass(frozen=True)
class Place:
    """The paths that writing a folder uses.

    Attributes:
      path: The target as the user wrote it.
      target: Its real path.
      parts: The folder with the plan and the records.
      content: The folder with the files, until it is complete.
    """

    path: Path
    target: str
    parts: str
    content: str

    @classmethod
    def of(cls, path: Path) -> "Place":
        if is_url(path):
            target = str(path).rstrip("/")
            return cls(path, target, join(target, UNDER_WAY), target)
        target = os.path.realpath(path)
        parts = partial_name(target)
        return cls(path, target, parts, os.path.join(parts, "checkpoint"))

    def plan(self) -> dict[str, Any] | None:
        return plan_in(self.parts)

    def record(self, name: str) -> dict[str, Any] | None:
        """The record of a file, if the file is there and has the size that the record says."""
        record = json_in(join(self.parts, f"{name}.json"))
        try:
            whole = record is not None and self.size(name) == record.get("bytes")
        except FileNotFoundError:
            return None
        return record if whole else None

    def write(self, folder: str, name: str, value: Any) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        # A file name that is no UTF-8 has lone surrogates. "backslashreplace" writes them as
        # \udcXX, which is how JSON escapes them, too.
        storage(folder).write(join(folder, name), text.encode(errors="backslashreplace"))

    def size(self, name: str) -> int:
        """Bytes of a file of the content."""
        file = join(self.content, name)
        with contextlib.closing(storage(file).open(file)) as opened:
            return opened.size

    def is_file(self, name: str) -> bool:
        """Whether a file of the content is there; `name` has slashes."""
        path = join(self.content, *name.split("/"))
        return storage(path).kind(path) == "file"

    @contextlib.contextmanager
    def sweeping(self) -> Iterator[None]:
        """Removes leftover records if the folder's files are gone and this context raises.

        A run leaves them if it is killed after it renamed the folder.
        """
        try:
            yield
        except CheckpointError:
            content, plan = self.content, os.path.join(self.parts, PLAN)
            if not is_url(self.path) and os.path.isfile(plan) and not os.path.isdir(content):
                storage(plan).remove_folder(self.parts)
            raise

    @contextlib.contextmanager
    def locked(self, *, shared: bool) -> Iterator[None]:
        """Holds a lock on the folder of parts, exclusive or shared; behind a URL there is none."""
        if is_url(self.path):
            yield
            return
        with locked(self.target, self.path, folder=True, shared=shared):
            yield

    def remove(self, job: Mapping[str, Any]) -> None:
        """Removes all files of a conversion that is not complete."""
        if is_url(self.path) and self.plan() is not None:
            for name in (*job["files"], *job["copied"], *job["json"]):
                storage(self.path).remove(join(self.content, *name.split("/")))
        storage(self.path).remove_folder(self.parts)

    def clear(self) -> None:
        """Empties the folder of parts on this machine: what runs that were killed have left."""
        for entry in os.scandir(self.parts):
            _remove(entry)

    def remove_strays(self, files: Sequence[str]) -> None:
        """Removes half-written files that a killed process has left beside the finished ones."""
        expected = {name.partition("/")[0] for name in files}
        for entry in os.scandir(self.content):
            if entry.name not in expected:
                _remove(entry)

    def replace(self) -> None:
        """Renames the content to the target, and removes an old target."""
        old, replaced = old_name(self.target), replaced_name(self.target)
        storage(old).remove_folder(old)
        if os.path.isdir(self.target):
            os.rename(self.target, old)
        try:
            os.rename(self.content, self.target)
        except BaseException:
            restore(self.target)
            raise
        with whole(str(self.path)):
            keep_mode(old, self.target)
            # Rename it before removing it, which may take long: a run that is killed meanwhile
            # must not make a later one restore it.
            with contextlib.suppress(FileNotFoundError):
                os.rename(old, replaced)
            storage(replaced).remove_folder(replaced)


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        storage(entry.path).remove_folder(entry.path)
    else:
        os.unlink(entry.path)
