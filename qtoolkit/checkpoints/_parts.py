"""Writes a checkpoint folder file by file, in one process or in many at a time. No JAX here.

Until the checkpoint is complete, its files lie in a folder of parts beside the target. There
`plan.json` says what is being written, and each finished file has a record, `NAME.json`. A rerun
does not write a file again if its record belongs to the same plan. Two plans are the same if they
agree in version, options and source; of the source the headers and samples of 1,024 tensors are
compared. At the end ("finalize") the folder of files is renamed to the target.

Behind a URL nothing can be renamed. There files have their final names from the start; the index
and config.json are written last, and no loader opens a checkpoint without them.
"""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qtoolkit.checkpoints._container import Destination
from qtoolkit.checkpoints._folder import check_folder, shard_names, shards
from qtoolkit.checkpoints._header import CheckpointError
from qtoolkit.checkpoints._header import layout as placed
from qtoolkit.checkpoints._job import difference, make_job, own_names
from qtoolkit.checkpoints._limits import file_limit
from qtoolkit.checkpoints._partial import PLAN, check_no_plan
from qtoolkit.checkpoints._place import Place, whole
from qtoolkit.checkpoints._plan import Plan, TensorPlan
from qtoolkit.checkpoints._report import Report, TensorReport
from qtoolkit.checkpoints._safetensors import SafetensorsFile, write_safetensors
from qtoolkit.checkpoints._source import Folder, is_under_way
from qtoolkit.checkpoints._storage import (
    Path,
    check_path,
    check_writable,
    copy,
    is_url,
    join,
    naming,
    storage,
)

if TYPE_CHECKING:  # its file loads JAX
    from qtoolkit.checkpoints._work import Work

Shard = tuple[int, int]


def check_shard(shard: Shard | None) -> None:
    """Raises ValueError unless this is (index, count) with 0 <= index < count, or None."""
    if shard is None:
        return
    numbers = isinstance(shard, tuple) and len(shard) == 2 and all(type(n) is int for n in shard)
    if not numbers or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard!r}, expected (index, count) with 0 <= index < count")


def part_names(plan: Plan, source: Folder, limit: int, shard: Shard) -> tuple[list[str], int]:
    """The names of the files that a shard writes, and how many there are in all."""
    names = shard_names(len(shards(plan.tensors, limit)), source.base)
    return names[shard[0] :: shard[1]], len(names)


def write_folder(destination: Destination, source: Folder, work: "Work", report: Report) -> Report:
    """Writes a converted checkpoint, or one shard of its files.

    The checkpoint appears only once it is complete: if there are shards, by `finalize`.

    Args:
      destination: The folder, and which part of it is written.
      source: Where the config and other files come from.
      work: The plan of the tensors to write, and what makes their bytes.
      report: The report of the conversion, still without files and tensors.

    Returns:
      The report, with files and tensors.

    Raises:
      CheckpointError, OSError: As `write_safetensors`, or files of another plan are there. After a
        failure, finished files are kept for a rerun, and a note on the exception says so. One case
        is cleaned up instead: a CheckpointError in a run without shards that found no files of
        the same plan, since a rerun would raise it again.
    """
    path, overwrite, shard = destination.dst, destination.overwrite, destination.shard
    cut = shards(work.plan.tensors, file_limit(destination.max_shard_size))
    job = make_job(source, work.plan, cut, report) | {"shards": 0 if shard is None else shard[1]}
    place = Place.of(path)
    own = own_names(job)
    with place.sweeping():
        check_folder(path, overwrite, own)
    with naming(path, place.parts), place.locked(shared=shard is not None):
        check_folder(path, overwrite, own)  # somebody else may have written it meanwhile
        there = place.plan()
        is_new = there is None or there.get("made") != job["made"]
        if is_new:
            _check_other(place, there, job, overwrite)
        # After a failure, remove only files that this run has written: `is_own`.
        with _tidied(place, job, is_own=is_new and shard is None):
            if is_new:
                _begin(place, there, job, overwrite)
            resumed = _write(place, source, job, cut, work, shard)
            if shard is None:
                return dataclasses.replace(_finalized(place, job, overwrite), resumed=resumed)
    return dataclasses.replace(
        report,
        files=tuple(job["files"][shard[0] :: shard[1]]),
        shard=f"{shard[0]}/{shard[1]}",
        resumed=resumed,
        tensors=tuple(work.reports),
    )


@contextlib.contextmanager
def _tidied(place: Place, job: Mapping[str, Any], *, is_own: bool) -> Iterator[None]:
    """Removes after a failure what was written, or notes what is kept for a rerun.

    `is_own` says whether this run has written all files that are there.
    """
    try:
        yield
    except CheckpointError:  # a rerun would raise it again, so there is nothing to keep
        if is_own:
            place.remove(job)
        raise
    except BaseException as error:  # an interrupt, a full disk
        whole = [name for name in job["files"] if _reports(place, job, name) is not None]
        if whole:
            error.add_note(
                f"{len(whole)} of {len(job['files'])} files {'are' if len(whole) > 1 else 'is'}"
                " whole and kept for a rerun with the same options; to remove what is there: "
                f"qtoolkit finalize --discard {shlex.quote(str(place.path))}"
            )
        elif is_own:
            place.remove(job)
        raise


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
        by another version than the rest; a shard is still running; `dst` exists. Nothing is
        changed then.
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
    place = _place_of_parts(dst)
    with naming(dst, place.parts), place.locked(shared=False):
        return _finalized(place, _check_parts(place), overwrite)


def discard(dst: Path) -> None:
    """Removes the files that shards have written, if they have not been finalized.

    Args:
      dst: The `dst` that was given to the shards, a folder or its URL.

    Raises:
      CheckpointError: There are no such files, or a shard is still running.

    Examples:
      >>> import pathlib
      >>> pathlib.Path("model").mkdir()
      >>> qt.checkpoints.save("model/model.safetensors", {"w": jnp.ones((64, 32))})
      >>> report = qt.checkpoints.convert("model", "fp8", shard=(0, 2), layout="plain")
      >>> qt.checkpoints.discard("fp8")  # the second shard was never written
      >>> sorted(path.name for path in pathlib.Path().iterdir())
      ['model']
    """
    place = _place_of_parts(dst)
    with place.locked(shared=False):
        place.remove(_check_parts(place))


def _place_of_parts(dst: Path) -> Place:
    check_path(dst, "dst")
    check_writable(dst)
    place = Place.of(dst)
    _check_parts(place)
    return place


def _check_parts(place: Place) -> dict[str, Any]:
    job = place.plan()
    if job is not None and storage(place.path).kind(place.content) == "folder":
        return job
    if not is_url(place.path) and os.path.lexists(place.parts):
        if job is None:
            check_no_plan(place.parts, place.path)
        with naming(place.path, place.parts), place.locked(shared=False):
            place.clear()  # of another kind, left by a run that was killed
    there = storage(place.path).kind(place.target) == "folder"
    raise CheckpointError(
        f"{place.path}: no parts of a conversion"
        + (", but the folder itself: it is finalized already" if there else "")
        + "; expected what `qtoolkit convert SRC DST --shard I/N` writes, with this DST"
    )


def _is_older(place: Place, name: str, source: Folder) -> bool:
    """Whether a local file was written before the source's weights were; False behind a URL."""
    if is_url(place.path) or is_url(source.path):
        return False
    written = os.stat(join(place.parts, f"{name}.json")).st_mtime_ns
    return any(os.stat(join(source.path, file)).st_mtime_ns > written for file in source.files)


def _begin(
    place: Place, there: Mapping[str, Any] | None, job: Mapping[str, Any], overwrite: bool
) -> None:
    """Writes the plan. A run without shards first removes the parts of another plan, `there`."""
    if not is_url(place.path):
        if not job["shards"]:
            place.clear()
        os.makedirs(place.content, exist_ok=True)
    elif job["shards"]:
        found = storage(place.path).entries(place.target)
        if found and not is_under_way(place.path, found):
            raise CheckpointError(
                f"{place.path}: exists already, and shards cannot replace what lies behind a URL; "
                "remove it, or choose another name"
            )
    elif there is not None:
        place.remove(there)
    elif overwrite:  # a former checkpoint: it cannot stay until the new one is whole
        storage(place.path).remove_folder(place.target)
    place.write(place.parts, PLAN, job)


def _check_other(
    place: Place, there: Mapping[str, Any] | None, job: Mapping[str, Any], overwrite: bool
) -> None:
    """Raises if files of another plan, `there`, would have to be removed that shards have written.

    Without shards, `overwrite` permits it.
    """
    if there is not None and (job["shards"] or (there.get("shards") and not overwrite)):
        raise CheckpointError(
            f"{place.path}: files of another conversion are there: "
            f"{difference(there.get('made'), job['made'])}; finalize it, give the same options "
            "and source, or remove them: qtoolkit finalize --discard "
            f"{shlex.quote(str(place.path))}"
        )


def _write(
    place: Place,
    source: Folder,
    job: Mapping[str, Any],
    cut: Sequence[Sequence[TensorPlan]],
    work: "Work",
    shard: Shard | None,
) -> tuple[str, ...]:
    """Writes the files of a shard that are not there yet.

    Returns:
      The names of the files that were there: complete, of this plan, not older than the source.
    """
    index, count = shard or (0, 1)
    mine = dict(zip(job["files"], cut, strict=True))
    mine = {name: mine[name] for name in job["files"][index::count]}
    kept = {name: reports for name in mine if (reports := _reports(place, job, name)) is not None}
    kept = {name: reports for name, reports in kept.items() if work.accepts(reports)}
    # Times are compared only if one machine has written all: clocks of several may differ.
    if shard is None:
        kept = {name: kept[name] for name in kept if not _is_older(place, name, source)}
    work.start([tensor for name in mine if name not in kept for tensor in mine[name]])
    if job["files"][0] in mine:  # the process that writes the first file copies the other files
        _copy_others(place, source, job["files"][0] in kept)
    for name, tensors in mine.items():
        if name in kept:
            work.reports += kept[name]
            continue
        _write_file(place, job, name, tensors, work)
    work.finish()
    return tuple(kept)


def _write_file(
    place: Place, job: Mapping[str, Any], name: str, tensors: Sequence[TensorPlan], work: "Work"
) -> None:
    """Writes one file and then its record, which says that the file is complete."""
    _check_under_way(place, job)
    outputs = placed(entry for tensor in tensors for entry in tensor.entries)
    file, done = join(place.content, name), len(work.reports)
    # Remove the old record first, so that no record describes a file that is half-written.
    storage(place.parts).remove(join(place.parts, f"{name}.json"))
    write_safetensors(file, outputs, work.chunks(tensors), work.plan.metadata, overwrite=True)
    reports = work.reports[done:]
    _check_under_way(place, job)
    if not work.accepts(reports):  # `work.finish` raises for it when all others are written
        storage(file).remove(file)
        return
    record = {
        "made": job["made"],
        "shards": job["shards"] or 1,
        "bytes": place.size(name),
        "tensors": [dataclasses.asdict(report) for report in reports],
    }
    place.write(place.parts, f"{name}.json", record)


def _copy_others(place: Place, source: Folder, only_missing: bool) -> None:
    for name in source.copied:
        names = name.split("/")
        if not (only_missing and place.is_file(name)):
            copy(join(source.path, *names), join(place.content, *names))


def _check_under_way(place: Place, job: Mapping[str, Any]) -> None:
    """Raises if another process has replaced the plan. For URLs, behind which nothing is locked."""
    if is_url(place.path) and (place.plan() or {}).get("made") != job["made"]:
        raise CheckpointError(
            f"{place.path}: finalized, discarded or begun anew by another process meanwhile; "
            "nothing more was written"
        )


def _reports(place: Place, job: Mapping[str, Any], name: str) -> list[TensorReport] | None:
    """The reports of the tensors in a finished file of this plan; None if there is no such file."""
    record = place.record(name)
    if record is None or record.get("made") != job["made"]:
        return None
    return _tensors(record)


def _tensors(record: Mapping[str, Any]) -> list[TensorReport]:
    return [TensorReport(**report) for report in record["tensors"]]


def _finalized(place: Place, job: Mapping[str, Any], overwrite: bool) -> Report:
    """Writes index and config, and renames the folder to the target."""
    own = own_names(job)
    check_folder(place.path, overwrite, own)
    reports = [report for record in _whole(place, job) for report in _tensors(record)]
    weight_map: dict[str, str] = {}
    total = 0
    for name in job["files"]:
        with SafetensorsFile(join(place.content, name)) as file:
            weight_map |= dict.fromkeys(file.tensors, name)
            total += sum(info.nbytes for info in file.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, value in job["json"].items():
        place.write(place.content, name, index if value is None else value)
    files = sorted((*job["files"], *job["copied"], *job["json"]))
    if not is_url(place.path):
        place.remove_strays(files)
        check_folder(place.path, overwrite, own)  # somebody else may have written it meanwhile
        place.replace()
    with whole(str(place.path)):
        storage(place.path).remove_folder(place.parts)
    about: dict[str, Any] = dict(job["report"])
    about |= {key: tuple(value) for key, value in about.items() if isinstance(value, list)}
    about |= {"target": str(place.path), "files": tuple(files), "tensors": tuple(reports)}
    return Report(**about)


def _whole(place: Place, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of all files; raises if one is missing or belongs to another plan."""
    records = {name: place.record(name) for name in job["files"]}
    counts = {record["shards"] for record in records.values() if record is not None}
    missing = [name for name, record in records.items() if record is None]
    if not all(place.is_file(name) for name in job["copied"]):
        missing = [*dict.fromkeys((job["files"][0], *missing))]
    if missing:
        count = counts.pop() if len(counts) == 1 else job.get("shards", 0)
        numbers = sorted({job["files"].index(name) % count for name in missing}) if count else []
        again = ", ".join(f"--shard {i}/{count}" for i in numbers[:5])
        one = len(missing) == 1
        raise CheckpointError(
            f"{place.path}: {len(missing)} of {len(records)} files {'is' if one else 'are'} "
            f"missing: {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}; "
            f"wait for {'its shard' if one else 'their shards'}, or run "
            f"{'it' if one else 'them'} again{again and ': '}{again}"
        )
    found = {name: record for name, record in records.items() if record is not None}
    for name, record in found.items():
        if record.get("made") != job["made"]:
            raise CheckpointError(
                f"{place.path}: {name} is of another conversion than the others: "
                f"{difference(record.get('made'), job['made'])}; run its shard again with the "
                "options and the source of the others"
            )
    return [*found.values()]
