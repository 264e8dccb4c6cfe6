"""A folder that is being written: where its files, its plan and the records of whole files lie."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._folder import UNDER_WAY
from qtoolkit.checkpoints._paths import Path, is_url, join, storage
from qtoolkit.checkpoints._report import TensorReport
from qtoolkit.checkpoints._writing import json_in, partial_name, plan_in


@dataclasses.dataclass(frozen=True)
class Growing:
    """The paths of a folder that is being written.

    Attributes:
      path: The target as the user wrote it.
      target: Its real path.
      partial: The folder with the plan and the records.
      content: The folder with the files, until it is complete.
    """

    path: Path
    target: str
    partial: str
    content: str

    @classmethod
    def of(cls, path: Path) -> "Growing":
        if is_url(path):
            target = str(path).rstrip("/")
            return cls(path, target, join(target, UNDER_WAY), target)
        target = os.path.realpath(path)
        partial = partial_name(target)
        return cls(path, target, partial, os.path.join(partial, "checkpoint"))

    def plan(self) -> dict[str, Any] | None:
        return plan_in(self.partial)

    def record(self, name: str) -> dict[str, Any] | None:
        """The record of a file, if the file is there and has the size that the record says."""
        record = json_in(join(self.partial, f"{name}.json"))
        if record is None:
            return None
        file = join(self.content, name)
        try:
            with contextlib.closing(storage(file).open(file)) as opened:
                return record if opened.size == record.get("bytes") else None
        except FileNotFoundError:
            return None

    def reports(self, name: str, made: Mapping[str, Any]) -> list[TensorReport] | None:
        """The reports of the tensors in a finished file of this plan; None without such a file."""
        record = self.record(name)
        if record is None or record.get("made") != made:
            return None
        return [TensorReport(**report) for report in record["tensors"]]

    def write(self, folder: str, name: str, value: Any) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        # A file name that is no UTF-8 has lone surrogates. "backslashreplace" writes them as
        # \udcXX, which is how JSON escapes them, too.
        storage(folder).write(join(folder, name), text.encode(errors="backslashreplace"))

    def has(self, name: str) -> bool:
        """Whether a file of the content is there; `name` has slashes."""
        path = join(self.content, *name.split("/"))
        return storage(path).kind(path) == "file"

    def remove(self, shared: Mapping[str, Any]) -> None:
        """Removes all files of a conversion that is not complete."""
        if is_url(self.path) and self.plan() is not None:
            for name in (*shared["files"], *shared["copied"], *shared["json"]):
                storage(self.path).remove(join(self.content, *name.split("/")))
        storage(self.path).remove_folder(self.partial)

    def clear(self) -> None:
        """Removes on this machine what runs that were killed have left: a file, a folder."""
        if os.path.isdir(self.partial):
            shutil.rmtree(self.partial)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.partial)

    def remove_strays(self, files: Sequence[str]) -> None:
        """Removes half-written files that a killed process has left beside the finished ones."""
        expected = {name.partition("/")[0] for name in files}
        for entry in os.scandir(self.content):
            if entry.name in expected:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
