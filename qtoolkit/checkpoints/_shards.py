"""Writes a checkpoint folder file by file, in one process or in many at a time. No JAX here.

Until the checkpoint is whole, its files lie in a folder beside the target, under their final names.
There `plan.json` says what is being written, and each finished file has a record, `NAME.json`.
Which process writes which file follows from the plan and (index, count) alone. A rerun keeps the
files whose record is of the same plan: of the same version, options and source, of which the
headers and samples of 1,024 tensors are compared. At the end the folder is renamed to the target.

Behind a URL nothing can be renamed. There files have their final names from the start; the index
and config.json are written last, and no loader opens a checkpoint without them.
"""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qtoolkit.checkpoints._files import cut_into_files, difference, own_names, shared_plan
from qtoolkit.checkpoints._folder import is_under_way
from qtoolkit.checkpoints._growing import Growing
from qtoolkit.checkpoints._header import layout
from qtoolkit.checkpoints._paths import (
    Path,
    check_path,
    check_writable,
    copy,
    is_url,
    join,
    naming,
    storage,
)
from qtoolkit.checkpoints._report import Plan, Report, TensorPlan, TensorReport
from qtoolkit.checkpoints._safetensors import SafetensorsFile, write_safetensors
from qtoolkit.checkpoints._target import Destination, Shard, check_folder, file_limit
from qtoolkit.checkpoints._tensors import Checkpoint, CheckpointError
from qtoolkit.checkpoints._writing import (
    PLAN,
    OvertakenError,
    check_no_plan,
    replace_folder,
    replaced_name,
    restore,
    whole,
)

if TYPE_CHECKING:  # its file loads JAX
    from qtoolkit.checkpoints._produce import Production


# Writing.


def write_folder(
    destination: Destination,
    source: Checkpoint,
    plan: Plan,
    production: "Production",
    report: Report,
    refused: Callable[[Sequence[TensorReport]], CheckpointError | None],
) -> Report:
    """Writes a converted checkpoint, or one shard of its files.

    The checkpoint appears only once it is complete: if there are shards, by `finalize`.

    Args:
      destination: The folder, and which part of it is written.
      source: Where the config and other files come from.
      production: What makes the bytes of the planned tensors.
      report: The report of the conversion, still without files and tensors.
      refused: The error for tensors that may not be as these reports say; else None.

    Returns:
      The report, with files and tensors.

    Raises:
      CheckpointError, OSError: As `write_safetensors`, or files of another plan are there. After a
        failure, finished files are kept for a rerun, and a note on the exception says so. One case
        is cleaned up instead: a CheckpointError in a run without shards that found no files of
        the same plan, since a rerun would raise it again.
    """
    path, overwrite, shard = destination.dst, destination.overwrite, destination.shard
    files = cut_into_files(plan.tensors, file_limit(destination.max_shard_size))
    shared = shared_plan(source, plan, files, report)
    shared |= {"shards": 0 if shard is None else shard[1]}
    growing = Growing.of(path)
    if not is_url(path):
        restore(growing.target)
    _check_free(growing, shared, overwrite)
    with naming(path, growing.partial):
        there = growing.plan()
        is_new = there is None or there.get("made") != shared["made"]
        if is_new:
            _check_other(growing, there, shared, overwrite)
        # After a failure, remove only files that this run has written: `is_own`.
        with _tidied(growing, shared, is_own=is_new and shard is None):
            if is_new:
                _begin(growing, there, shared, overwrite)
            resumed = _write(growing, source, plan, shared, files, production, shard, refused)
            if shard is None:
                return dataclasses.replace(_finalized(growing, shared, overwrite), resumed=resumed)
    return dataclasses.replace(
        report,
        files=tuple(shared["files"][shard[0] :: shard[1]]),
        shard=f"{shard[0]}/{shard[1]}",
        resumed=resumed,
        tensors=tuple(production.reports),
    )


def _check_free(growing: Growing, shared: Mapping[str, Any], overwrite: bool) -> None:
    """`check_folder`; before it raises, it removes records whose files are gone.

    A run leaves them if it is killed after it renamed the folder.
    """
    try:
        check_folder(growing.path, overwrite, own_names(shared))
    except CheckpointError:
        if not is_url(growing.path) and growing.plan() and not os.path.isdir(growing.content):
            growing.clear()
        raise


@contextlib.contextmanager
def _tidied(growing: Growing, shared: Mapping[str, Any], *, is_own: bool) -> Iterator[None]:
    """Removes after a failure what was written, or notes what is kept for a rerun.

    `is_own` says whether this run has written all files that are there.
    """

    def is_left_alone() -> bool:
        """Whether no other process has begun to write there meanwhile."""
        plan = growing.plan()
        return is_own and (plan is None or plan.get("made") == shared["made"])

    try:
        yield
    except OvertakenError:
        raise
    except CheckpointError:  # a rerun would raise it again, so there is nothing to keep
        if is_left_alone():
            growing.remove(shared)
        raise
    except BaseException as error:  # an interrupt, a full disk
        names, made = shared["files"], shared["made"]
        complete = [name for name in names if growing.reports(name, made) is not None]
        if complete:
            error.add_note(
                f"{len(complete)} of {len(names)} files {'are' if len(complete) > 1 else 'is'}"
                " whole and kept for a rerun with the same options; to remove what is there: "
                f"qtoolkit finalize --discard {shlex.quote(str(growing.path))}"
            )
        elif is_left_alone():
            growing.remove(shared)
        raise


def _check_other(
    growing: Growing,
    there: Mapping[str, Any] | None,
    shared: Mapping[str, Any],
    overwrite: bool,
) -> None:
    """Raises if files of another plan, `there`, would have to be removed that shards have written.

    Without shards, `overwrite` permits it.
    """
    if there is not None and (shared["shards"] or (there.get("shards") and not overwrite)):
        raise CheckpointError(
            f"{growing.path}: files of another conversion are there: "
            f"{difference(there.get('made'), shared['made'])}; finalize it, give the same options "
            "and source, or remove them: qtoolkit finalize --discard "
            f"{shlex.quote(str(growing.path))}"
        )


def _begin(
    growing: Growing,
    there: Mapping[str, Any] | None,
    shared: Mapping[str, Any],
    overwrite: bool,
) -> None:
    """Writes the plan. A run without shards first removes the files of another plan, `there`."""
    path = growing.path
    if not is_url(path):
        # Not a folder of shards: another one may have made it just now.
        if not shared["shards"] or os.path.isfile(growing.partial):
            growing.clear()
        os.makedirs(growing.content, exist_ok=True)
    elif shared["shards"]:
        found = storage(path).entries(growing.target)
        if found and not is_under_way(path, found):
            raise CheckpointError(
                f"{path}: exists already, and shards cannot replace what lies behind a URL; "
                "remove it, or choose another name"
            )
    elif there is not None:
        growing.remove(there)
    elif overwrite:  # a former checkpoint: it cannot stay until the new one is whole
        storage(path).remove_folder(growing.target)
    growing.write(growing.partial, PLAN, shared)


def _write(
    growing: Growing,
    source: Checkpoint,
    plan: Plan,
    shared: Mapping[str, Any],
    files: Sequence[Sequence[TensorPlan]],
    production: "Production",
    shard: Shard | None,
    refused: Callable[[Sequence[TensorReport]], CheckpointError | None],
) -> tuple[str, ...]:
    """Writes the files of a shard that are not there yet.

    Returns:
      The names of the files that were there: complete, of this plan, not older than the source.
    """
    index, count = shard or (0, 1)
    mine = dict([*zip(shared["files"], files, strict=True)][index::count])
    kept = {}
    for name in mine:
        reports = growing.reports(name, shared["made"])
        # Times are compared only if one machine has written all: clocks of several may differ.
        is_older = shard is None and _is_older(growing, name, source)
        if reports is not None and refused(reports) is None and not is_older:
            kept[name] = reports
    production.total = sum(t.nbytes for name in mine if name not in kept for t in mine[name])
    if shared["files"][0] in mine:  # the process that writes the first file copies the other files
        _copy_others(growing, source, shared["files"][0] in kept)
    for name, tensors in mine.items():
        if name in kept:
            production.reports += kept[name]
        else:
            _write_file(growing, shared, name, tensors, plan, production, refused)
    if error := refused(production.reports):
        raise error
    return tuple(kept)


def _write_file(
    growing: Growing,
    shared: Mapping[str, Any],
    name: str,
    tensors: Sequence[TensorPlan],
    plan: Plan,
    production: "Production",
    refused: Callable[[Sequence[TensorReport]], CheckpointError | None],
) -> None:
    """Writes one file and then its record, which says that the file is complete."""
    _check_under_way(growing, shared)
    outputs = layout(entry for tensor in tensors for entry in tensor.entries)
    file, done = join(growing.content, name), len(production.reports)
    # Remove the old record first, so that no record describes a file that is half-written.
    storage(growing.partial).remove(join(growing.partial, f"{name}.json"))
    write_safetensors(file, outputs, production.chunks(tensors), plan.metadata, overwrite=True)
    reports = production.reports[done:]
    _check_under_way(growing, shared)
    if refused(reports):  # raised when all others are written
        storage(file).remove(file)
        return
    with contextlib.closing(storage(file).open(file)) as opened:
        size = opened.size
    record = {
        "made": shared["made"],
        "shards": shared["shards"] or 1,
        "bytes": size,
        "tensors": [dataclasses.asdict(report) for report in reports],
    }
    growing.write(growing.partial, f"{name}.json", record)


def _is_older(growing: Growing, name: str, source: Checkpoint) -> bool:
    """Whether a local file was written before the source's weights were; False behind a URL."""
    if is_url(growing.path) or is_url(source.path) or growing.record(name) is None:
        return False
    assert source.folder is not None
    written = os.stat(join(growing.partial, f"{name}.json")).st_mtime_ns
    files = (join(source.path, file) for file in source.folder.weights)
    return any(os.stat(file).st_mtime_ns > written for file in files)


def _copy_others(growing: Growing, source: Checkpoint, only_missing: bool) -> None:
    assert source.folder is not None
    for name in source.folder.copied:
        names = name.split("/")
        if not (only_missing and growing.has(name)):
            copy(join(source.path, *names), join(growing.content, *names))


def _check_under_way(growing: Growing, shared: Mapping[str, Any]) -> None:
    """Raises if another process has replaced the plan: nobody holds a lock."""
    if (growing.plan() or {}).get("made") != shared["made"]:
        raise OvertakenError(
            f"{growing.path}: finalized, discarded or begun anew by another process meanwhile; "
            "nothing more was written"
        )


# Finishing.


def finalize(dst: Path, *, overwrite: bool = False) -> Report:
    """Completes a checkpoint whose files several calls of `convert(shard=...)` have written.

    The result is byte for byte what one process would have written. Neither the source nor JAX is
    needed: each shard has recorded samples of its source, so shards of different sources are
    noticed.

    Args:
      dst: The `dst` that was given to all shards.
      overwrite: Whether `dst` may be replaced.

    Returns:
      The report of the whole conversion.

    Raises:
      CheckpointError: A file is missing, or was written with other options, from another source or
        by another version than the rest; `dst` exists. Nothing is changed then.
      OSError: A file cannot be read or written; it names the file.

    Examples:
      >>> import pathlib
      >>> pathlib.Path("model").mkdir()
      >>> qt.checkpoints.save("model/model.safetensors", {"w": jnp.ones((64, 32))})
      >>> for index in range(2):  # one process each
      ...     report = qt.checkpoints.convert("model", "fp8", shard=(index, 2), layout="plain")
      >>> qt.checkpoints.finalize("fp8").files
      ('model.safetensors',)
    """
    growing, shared = _unfinished(dst)
    with naming(dst, growing.partial):
        return _finalized(growing, shared, overwrite)


def discard(dst: Path) -> None:
    """Removes the files that shards have written, if they have not been finalized.

    Args:
      dst: The `dst` that was given to the shards, a folder or its URL.

    Raises:
      CheckpointError: There are no such files.

    Examples:
      >>> import pathlib
      >>> pathlib.Path("model").mkdir()
      >>> qt.checkpoints.save("model/model.safetensors", {"w": jnp.ones((64, 32))})
      >>> report = qt.checkpoints.convert("model", "fp8", shard=(0, 2), layout="plain")
      >>> qt.checkpoints.discard("fp8")  # the second shard was never written
      >>> sorted(path.name for path in pathlib.Path().iterdir())
      ['model']
    """
    growing, shared = _unfinished(dst)
    growing.remove(shared)


def _unfinished(dst: Path) -> tuple[Growing, dict[str, Any]]:
    """A folder that shards have begun, and its plan."""
    check_path(dst, "dst")
    check_writable(dst)
    growing = Growing.of(dst)
    shared = growing.plan()
    if shared is not None and storage(dst).kind(growing.content) == "folder":
        return growing, shared
    if not is_url(dst) and os.path.lexists(growing.partial):
        if shared is None:
            check_no_plan(growing.partial, dst)
        growing.clear()  # of another kind, left by a run that was killed
    there = storage(dst).kind(growing.target) == "folder"
    raise CheckpointError(
        f"{dst}: no parts of a conversion"
        + (", but the folder itself: it is finalized already" if there else "")
        + "; expected what `qtoolkit convert SRC DST --shard I/N` writes, with this DST"
    )


def _finalized(growing: Growing, shared: Mapping[str, Any], overwrite: bool) -> Report:
    """Writes index and config, and renames the folder to the target."""
    own = own_names(shared)
    check_folder(growing.path, overwrite, own)
    records = _all_records(growing, shared)
    reports = [TensorReport(**report) for record in records for report in record["tensors"]]
    weight_map: dict[str, str] = {}
    total = 0
    for name in shared["files"]:
        with SafetensorsFile(join(growing.content, name)) as file:
            weight_map |= dict.fromkeys(file.tensors, name)
            total += sum(info.nbytes for info in file.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, value in shared["json"].items():
        growing.write(growing.content, name, index if value is None else value)
    files = sorted((*shared["files"], *shared["copied"], *shared["json"]))
    if not is_url(growing.path):
        growing.remove_strays(files)
        check_folder(growing.path, overwrite, own)  # somebody may have written it meanwhile
        replace_folder(growing.content, growing.target, growing.path)
    with whole(str(growing.path)):
        if not is_url(growing.path):
            storage(growing.target).remove_folder(replaced_name(growing.target))
        storage(growing.path).remove_folder(growing.partial)
    about: dict[str, Any] = dict(shared["report"])
    about |= {key: tuple(value) for key, value in about.items() if isinstance(value, list)}
    about |= {"target": str(growing.path), "files": tuple(files), "tensors": tuple(reports)}
    return Report(**about)


def _all_records(growing: Growing, shared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of all files; raises if one is missing or belongs to another plan."""
    records = {name: growing.record(name) for name in shared["files"]}
    counts = {record["shards"] for record in records.values() if record is not None}
    missing = [name for name, record in records.items() if record is None]
    if not all(growing.has(name) for name in shared["copied"]):
        missing = [*dict.fromkeys((shared["files"][0], *missing))]
    if missing:
        count = counts.pop() if len(counts) == 1 else shared.get("shards", 0)
        numbers = sorted({shared["files"].index(name) % count for name in missing}) if count else []
        again = ", ".join(f"--shard {i}/{count}" for i in numbers[:5])
        one = len(missing) == 1
        raise CheckpointError(
            f"{growing.path}: {len(missing)} of {len(records)} files {'is' if one else 'are'} "
            f"missing: {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}; "
            f"wait for {'its shard' if one else 'their shards'}, or run "
            f"{'it' if one else 'them'} again{again and ': '}{again}"
        )
    found = {name: record for name, record in records.items() if record is not None}
    for name, record in found.items():
        if record.get("made") != shared["made"]:
            raise CheckpointError(
                f"{growing.path}: {name} is of another conversion than the others: "
                f"{difference(record.get('made'), shared['made'])}; run its shard again with the "
                "options and the source of the others"
            )
    return [*found.values()]
