"""Writes a checkpoint folder file by file, in one process or in several at once. Imports no JAX.

1. The files are written into a folder next to the target, `partial`, under their final names. The
   plan is in `plan.json` there. Plan and (index, count) say which files a process writes.
2. When a file is complete, it gets a record, `NAME.json`, with the fingerprint of the plan
   (`_target.manifest_of`): of the version, the options, and samples of the source, and with a
   checksum of each tensor. A rerun keeps each file whose record has the fingerprint of its own
   plan, if the file has these checksums: a disk may lose bytes when a machine fails.
3. When all files are complete, the index and config.json are written, and the folder with the files
   is renamed to the target.

Behind a URL nothing can be renamed. There the files are written into the target itself, and the
index and config.json last, because no loader opens a checkpoint without them.
"""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._folder import UNDER_WAY, is_under_way
from qtoolkit.checkpoints._report import Plan, Report, TensorPlan, TensorReport
from qtoolkit.checkpoints._safetensors import in_data_order, open_safetensors, write_safetensors
from qtoolkit.checkpoints._storage import Path, is_url, join
from qtoolkit.checkpoints._target import (
    Destination,
    check_folder,
    cut_into_files,
    difference,
    file_limit,
    manifest_of,
    modified_at,
)
from qtoolkit.checkpoints._tensors import CheckpointError, listed
from qtoolkit.checkpoints._writing import (
    CONTENT,
    MANIFEST,
    OvertakenError,
    clear_partial,
    json_in,
    manifest_in,
    noting_complete,
    partial_name,
    removal,
    rename_folder,
    restore,
)

if TYPE_CHECKING:  # its file loads JAX
    from qtoolkit.checkpoints._produce import Production

_READ = 2**22  # bytes of a finished file that are read at a time
# Returns the error for tensors that have NaN or Inf although `convert` does not allow it, or None.
NonfiniteError = Callable[[Sequence[TensorReport]], CheckpointError | None]


@dataclasses.dataclass(frozen=True)
class _PartialFolder:
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
    def of(cls, path: Path) -> "_PartialFolder":
        if is_url(path):
            target = str(path).rstrip("/")
            return cls(path, target, join(target, UNDER_WAY), target)
        target = os.path.realpath(path)
        return cls(path, target, partial_name(target), join(partial_name(target), CONTENT))

    def inside(self, name: str) -> str:
        """The path of a file of the checkpoint, whose `name` may be "folder/file"."""
        return join(self.content, *name.split("/"))

    def record(self, name: str) -> dict[str, Any] | None:
        """The record of a file, if the file is there and has the size that the record says."""
        record = json_in(join(self.partial, f"{name}.json"))
        if not record or storage.kind_at(self.inside(name)) != "file":
            return None
        return record if storage.file_size(self.inside(name)) == record["bytes"] else None

    def reports(self, name: str, fingerprint: Mapping[str, Any]) -> list[TensorReport] | None:
        """The reports of the tensors in a complete file with this fingerprint, or None."""
        record = self.record(name)
        if record is None or record.get("fingerprint") != fingerprint:
            return None
        return [TensorReport(**report) for report in record["tensors"]]

    def has_checksums(self, name: str) -> bool:
        """Whether the tensors of a complete file are those that were written."""
        expected = (self.record(name) or {}).get("checksums")
        try:
            with open_safetensors(self.inside(name)) as file:
                return expected == {name: _checksum(one) for name, one in file.tensors.items()}
        except CheckpointError:
            return False

    def write_json(self, folder: str, name: str, value: Any) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        # A file name that is no UTF-8 has lone surrogates. "backslashreplace" writes them as
        # \udcXX, which is how JSON escapes them, too.
        storage.write_file(join(folder, name), text.encode(errors="backslashreplace"))

    def remove(self, manifest: Mapping[str, Any]) -> None:
        """Removes all files that an incomplete conversion has written."""
        if is_url(self.path):  # there the files are in the target itself
            for name in (*manifest["files"], *manifest["copied"], *manifest["json"]):
                storage.remove(self.inside(name))
        storage.remove_folder(self.partial)


def _checksum(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's bytes."""
    checksum = 0
    for start in range(0, tensor.nbytes, _READ):
        buffer = bytearray(min(_READ, tensor.nbytes - start))
        tensor.read_into(start, memoryview(buffer))
        checksum = zlib.crc32(buffer, checksum)
    return checksum


def _summed(
    chunks: Iterable[tuple[str, np.ndarray]], checksums: dict[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
    """The chunks as they are; updates the checksums of their tensors."""
    for name, data in chunks:
        checksums[name] = zlib.crc32(
            np.ascontiguousarray(data).view(np.uint8).data, checksums[name]
        )
        yield name, data


def write_folder(
    destination: Destination,
    source: Checkpoint,
    plan: Plan,
    production: "Production",
    report: Report,
    nonfinite_error: NonfiniteError,
) -> Report:
    """Writes a converted checkpoint, or the files of one shard, for which `finalize` does the rest.

    Args:
      report: The report to return, still without its files and tensors.

    If a run fails, its complete files stay for a rerun, and a note on the exception says so. They
    are removed if this run has begun the folder, has no shard, and raises a CheckpointError: a
    rerun would raise it again.
    """
    path, overwrite, shard = destination.dst, destination.overwrite, destination.shard
    index, count = shard or (0, 1)
    files = cut_into_files(plan.tensors, file_limit(destination.max_shard_size))
    manifest = manifest_of(source, plan, files, report) | {"shards": 0 if shard is None else count}
    own_files = dict([*zip(manifest["files"], files, strict=True)][index::count])
    folder = _PartialFolder.of(path)
    if not is_url(path):
        restore(folder.target)
    check_folder(path, overwrite, _own_names(manifest))
    with storage.naming(path, folder.partial):
        is_new = _begin(folder, manifest, overwrite)
        try:
            resumed = _write(folder, source, plan, manifest, own_files, production, nonfinite_error)
            if shard is None:
                done = _complete(folder, manifest, overwrite)
                return dataclasses.replace(done, resumed=resumed)
        except OvertakenError:
            raise
        except BaseException as error:
            complete = [n for n in manifest["files"] if folder.reports(n, manifest["fingerprint"])]
            if is_new and shard is None and (isinstance(error, CheckpointError) or not complete):
                folder.remove(manifest)
            elif complete and not isinstance(error, CheckpointError):
                error.add_note(
                    f"{len(complete)} of {len(files)} files {'are' if len(complete) > 1 else 'is'}"
                    " whole, and a rerun with the same options uses them; else "
                    f"{removal(path)}"
                )
            raise
    return dataclasses.replace(
        report,
        files=tuple(own_files),
        shard=f"{index}/{count}",
        resumed=resumed,
        tensors=tuple(production.reports),
    )


def _own_names(manifest: Mapping[str, Any]) -> set[str]:
    """The names of the files and folders that the new checkpoint will have."""
    names = (*manifest["files"], *manifest["copied"], *manifest["json"])
    return {name.partition("/")[0] for name in names}


def _begin(folder: _PartialFolder, manifest: Mapping[str, Any], overwrite: bool) -> bool:
    """Writes plan.json and returns True; returns False if there is one with this fingerprint."""
    # Files of another plan are removed. But a shard removes none, and without `overwrite` nobody
    # removes files that shards have written.
    path, there = folder.path, manifest_in(folder.partial)
    if there is not None and there["fingerprint"] == manifest["fingerprint"]:
        return False
    if there is not None and (manifest["shards"] or (there["shards"] and not overwrite)):
        raise CheckpointError(
            f"{path}: files of another conversion are there: {difference(there, manifest)}; "
            f"finalize it, give the same options and source, or {removal(path)}"
        )
    if not is_url(path):
        # A shard does not clear the folder: another shard may have made it a moment ago.
        if not manifest["shards"] or storage.kind_at(folder.partial) == "file":
            clear_partial(folder.target, path, overwrite)
        os.makedirs(folder.content, exist_ok=True)
    elif manifest["shards"]:
        existing = storage.names_in(folder.target)
        if existing and not is_under_way(path, existing):
            raise CheckpointError(
                f"{path}: exists already, and shards cannot replace what lies behind a URL; "
                "remove it, or choose another name"
            )
    elif there is not None:
        folder.remove(there)
    elif overwrite:  # the old checkpoint goes first: no rename can replace it later
        storage.remove_folder(folder.target)
    folder.write_json(folder.partial, MANIFEST, manifest)
    return True


def _write(
    folder: _PartialFolder,
    source: Checkpoint,
    plan: Plan,
    manifest: Mapping[str, Any],
    own_files: Mapping[str, Sequence[TensorPlan]],
    production: "Production",
    nonfinite_error: NonfiniteError,
) -> tuple[str, ...]:
    """Writes `own_files`; returns the names of those that a former run has completed."""
    # A file is written again if the source is newer, but only in a run without shards: the clocks
    # of several machines may differ.
    newest = 0 if manifest["shards"] or is_url(folder.path) else modified_at(source)
    resumed = {}
    for name in own_files:
        reports = folder.reports(name, manifest["fingerprint"])
        if reports is not None and not nonfinite_error(reports):
            where = join(folder.partial, f"{name}.json")
            is_current = not newest or os.stat(where).st_mtime_ns >= newest
            if is_current and folder.has_checksums(name):
                resumed[name] = reports
    production.total = sum(
        t.nbytes for name in own_files if name not in resumed for t in own_files[name]
    )
    assert source.folder is not None
    first = manifest["files"][0]
    # Copied files are written by the process that writes the first file of weights.
    for name in source.folder.copied if first in own_files else ():
        if first not in resumed or storage.kind_at(folder.inside(name)) != "file":
            storage.copy(join(source.path, *name.split("/")), folder.inside(name))
    for name, tensors in own_files.items():
        done = len(production.reports)
        if name in resumed:
            production.reports += resumed[name]
            continue
        # The old record goes first, so that no record describes a file that is half-written.
        storage.remove(join(folder.partial, f"{name}.json"))
        outputs = in_data_order(entry for tensor in tensors for entry in tensor.entries)
        file = folder.inside(name)
        checksums = {output.name: 0 for output in outputs}
        chunks = _summed(production.chunks(tensors), checksums)
        write_safetensors(file, outputs, chunks, plan.metadata, overwrite=True)
        reports = production.reports[done:]
        if (manifest_in(folder.partial) or {}).get("fingerprint") != manifest["fingerprint"]:
            raise OvertakenError(
                f"{folder.path}: finalized, removed or begun anew by another process "
                "meanwhile; nothing more was written"
            )
        if nonfinite_error(reports):  # raised at the end, when it can name all such tensors
            storage.remove(file)
            continue
        record = {
            "fingerprint": manifest["fingerprint"],
            "bytes": storage.file_size(file),
            "checksums": checksums,
            "tensors": [dataclasses.asdict(report) for report in reports],
        }
        folder.write_json(folder.partial, f"{name}.json", record)
    if error := nonfinite_error(production.reports):
        raise error
    return tuple(resumed)


def finalize(dst: Path, *, overwrite: bool = False) -> Report:
    """Complete a checkpoint whose files several calls of `convert(shard=...)` have written.

    The result has the bytes that one process would have written. Neither the source nor JAX is
    needed. Each shard has recorded a hash of the headers of its source. Shards whose hashes differ
    are refused; other numbers under the same headers are found by `verify` alone.

    Args:
      dst: The `dst` that was given to all shards.
      overwrite: Whether `dst` may be replaced.

    Returns:
      The report of the whole conversion.

    Raises:
      CheckpointError: A file is missing, or was written with other options, from another source or
        by another version than the rest; `dst` exists. Nothing is changed then.
      OSError: A file cannot be read or written. The error has the name of the file.

    Examples:
      >>> import pathlib
      >>> pathlib.Path("model").mkdir()
      >>> qt.checkpoints.save("model/model.safetensors", {"w": jnp.ones((64, 32))})
      >>> for index in range(2):  # one process each
      ...     report = qt.checkpoints.convert("model", "fp8", shard=(index, 2), layout="plain")
      >>> qt.checkpoints.finalize("fp8").files
      ('model.safetensors',)
    """
    folder, manifest = _open_partial(dst)
    with storage.naming(dst, folder.partial):
        return _complete(folder, manifest, overwrite)


def _open_partial(dst: Path) -> tuple[_PartialFolder, dict[str, Any]]:
    """A folder that shards have begun, and its plan."""
    storage.check_path(dst, "dst")
    storage.check_writable(dst)
    folder = _PartialFolder.of(dst)
    manifest = manifest_in(folder.partial)
    if manifest is not None and storage.kind_at(folder.content) == "folder":
        return folder, manifest
    there = storage.kind_at(folder.target) == "folder"
    raise CheckpointError(
        f"{dst}: no parts of a conversion"
        + (", but the folder itself: it is finalized already" if there else "")
        + "; expected what `convert` writes with shard=, with this DST"
    )


def _complete(folder: _PartialFolder, manifest: Mapping[str, Any], overwrite: bool) -> Report:
    """Checks that all files are there; writes the index and config.json; renames the folder."""
    path, own = folder.path, _own_names(manifest)
    check_folder(path, overwrite, own)
    reports = _all_reports(folder, manifest)
    weight_map: dict[str, str] = {}
    total = 0
    for name in manifest["files"]:
        with open_safetensors(folder.inside(name)) as file:
            weight_map |= dict.fromkeys(file.tensors, name)
            total += sum(tensor.nbytes for tensor in file.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    # Index and config.json come last: no loader opens a folder without them, so that behind a URL,
    # where nothing is renamed, what can be opened is whole.
    for name, value in manifest["json"].items():
        folder.write_json(folder.content, name, index if value is None else value)
    if is_url(path):
        with noting_complete(str(path)):
            storage.remove_folder(folder.partial)
    else:
        for name, is_folder in storage.names_in(folder.content).items():
            if name not in own:  # a process was killed while it wrote this
                stray = folder.inside(name)
                shutil.rmtree(stray) if is_folder else storage.remove(stray)
        check_folder(path, overwrite, own)  # again: somebody may have written to it meanwhile
        rename_folder(folder.target, path)
    files = sorted((*manifest["files"], *manifest["copied"], *manifest["json"]))
    report: dict[str, Any] = dict(manifest["report"])
    report |= {key: tuple(value) for key, value in report.items() if isinstance(value, list)}
    report |= {"target": str(path), "files": tuple(files), "tensors": tuple(reports)}
    return Report(**report)


def _all_reports(folder: _PartialFolder, manifest: Mapping[str, Any]) -> list[TensorReport]:
    """The reports of all files; raises if one is missing or belongs to another plan."""
    by_name = {name: folder.record(name) for name in manifest["files"]}
    records = {name: record for name, record in by_name.items() if record is not None}
    missing = [name for name in by_name if name not in records]
    if not all(storage.kind_at(folder.inside(name)) == "file" for name in manifest["copied"]):
        # The process that writes the first file copies them, too: see `_write`.
        missing = [*dict.fromkeys((manifest["files"][0], *missing))]
    if missing:
        count = manifest["shards"] or 1
        numbers = sorted({manifest["files"].index(name) % count for name in missing})
        again = listed(f"shard={(number, count)}" for number in numbers)
        raise CheckpointError(
            f"{folder.path}: {len(missing)} of {len(by_name)} files "
            f"{'is' if len(missing) == 1 else 'are'} missing: {listed(missing, 3)}; wait for them, "
            f"or run what writes them again: {again}"
        )
    reports = []
    for name, record in records.items():
        if record["fingerprint"] != manifest["fingerprint"]:
            raise CheckpointError(
                f"{folder.path}: {name} is of another conversion than the others: "
                f"{difference(record, manifest)}; run its shard again with the options and the "
                "source of the others"
            )
        reports += [TensorReport(**report) for report in record["tensors"]]
    return reports
