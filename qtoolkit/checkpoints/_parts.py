"""A folder written file by file, by one process or by many at a time, and made whole. No JAX here.

Beside the target lies, until it is whole, a folder of parts: what all processes agree on in
`plan.json`; each finished file with a record of it. A file whose record is of the same plan is not
written again. What makes a plan the same: version, options, and the source, of which headers and
samples of 1,024 tensors are compared. Behind a URL nothing can be renamed: there, files have their
final names from the start, and index and config.json, without which no loader opens them, come
last.
"""

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from qtoolkit.checkpoints._folder import check_folder, shard_names, shards
from qtoolkit.checkpoints._header import CheckpointError
from qtoolkit.checkpoints._header import layout as placed
from qtoolkit.checkpoints._job import difference, make_job, own_names
from qtoolkit.checkpoints._place import Place, whole
from qtoolkit.checkpoints._plan import Plan, TensorPlan
from qtoolkit.checkpoints._report import Report, TensorReport
from qtoolkit.checkpoints._safetensors import SafetensorsFile, write_safetensors
from qtoolkit.checkpoints._source import PLAN, Folder, is_under_way
from qtoolkit.checkpoints._storage import Path, check_path, copy, is_url, join, naming, storage

Shard = tuple[int, int]


class Work(Protocol):
    """What makes the bytes of tensors.

    Attributes:
      reports: Of the tensors done so far.
    """

    reports: list[TensorReport]

    def start(self, tensors: Sequence[TensorPlan]) -> None:
        """Says what will be asked for."""

    def chunks(self, tensors: Sequence[TensorPlan]) -> Iterator[tuple[str, Any]]:
        """What is written for some tensors."""

    def accepts(self, reports: Sequence[TensorReport]) -> bool:
        """Whether tensors with these reports may be written."""

    def finish(self) -> None:
        """Raises where some of `reports` may not be written."""


def check_shard(shard: Shard | None) -> None:
    """Raises ValueError where this is no shard."""
    if shard is None:
        return
    numbers = isinstance(shard, tuple) and len(shard) == 2 and all(type(n) is int for n in shard)
    if not numbers or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard!r}, expected (index, count) with 0 <= index < count")


def part_names(plan: Plan, source: Folder, limit: int, shard: Shard) -> tuple[list[str], int]:
    """The names of the files that a shard writes, and how many there are in all."""
    names = shard_names(len(shards(plan.tensors, limit)), source.base)
    return names[shard[0] :: shard[1]], len(names)


def write_folder(
    path: Path,
    source: Folder,
    plan: Plan,
    work: Work,
    report: Report,
    *,
    limit: int,
    overwrite: bool,
    shard: Shard | None,
) -> Report:
    """Writes a converted checkpoint, which appears when it is whole; or the files of a shard.

    Args:
      path: The folder to write.
      source: Where the config and other files come from.
      plan: What is written.
      work: What makes it.
      report: Of the conversion, still without files and tensors.
      limit: Bytes of a file, about.
      overwrite: Whether a checkpoint of that name may be replaced.
      shard: Which part of the files is written, for `finalize`; None: all, and they are finalized.

    Returns:
      The report, with files and tensors.

    Raises:
      CheckpointError, OSError: As `write_safetensors`; files of another plan are there. Whole files
        are left for a rerun, and a note of the exception says so: those of shards, of an earlier
        run of the same plan, and, but for a CheckpointError, which a rerun meets again, of this
        one.
    """
    cut = shards(plan.tensors, limit)
    job = make_job(source, plan, cut, report) | {"shards": 0 if shard is None else shard[1]}
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
        # What others have written for this plan stays.
        with _tidied(place, job, is_own=is_new and shard is None):
            if is_new:
                _begin(place, there, job, overwrite)
            resumed = _write(place, source, job, cut, plan, work, shard)
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

    Args:
      place, job: Of the conversion.
      is_own: Whether all that is there was written by this run.
    """
    try:
        yield
    except CheckpointError:  # which a rerun meets again
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
    """Makes a checkpoint of the files that shards have written: `convert(shard=...)`.

    It is byte for byte what one process writes. Neither the source nor JAX is needed: that shards
    read the same source is told by what they sampled of it.

    Args:
      dst: What all of them were given.
      overwrite: Whether `dst` may be replaced.

    Returns:
      What all of them have done.

    Raises:
      CheckpointError: A file is missing, or of other options, another source or version than the
        rest; a shard is still at work; `dst` exists. Everything stays as it was.
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
    check_path(dst, "dst")
    place = Place.of(dst)
    with place.sweeping():
        _check_parts(place)
        with naming(dst, place.parts), place.locked(shared=False):
            return _finalized(place, _check_parts(place), overwrite)


def discard(dst: Path) -> None:
    """Removes what shards have written that is not finalized.

    Args:
      dst: What the shards were given as `dst`, a folder or its URL.

    Raises:
      CheckpointError: There is nothing, or a shard is still at work.

    Examples:
      >>> import pathlib
      >>> pathlib.Path("model").mkdir()
      >>> qt.checkpoints.save("model/model.safetensors", {"w": jnp.ones((64, 32))})
      >>> report = qt.checkpoints.convert("model", "fp8", shard=(0, 2), layout="plain")
      >>> qt.checkpoints.discard("fp8")  # what the second shard would have completed
      >>> sorted(path.name for path in pathlib.Path().iterdir())
      ['model']
    """
    check_path(dst, "dst")
    place = Place.of(dst)
    _check_parts(place)
    with place.locked(shared=False):
        place.remove(_check_parts(place))


def _check_parts(place: Place) -> dict[str, Any]:
    job = place.plan()
    if job is not None and storage(place.path).kind(place.content) == "folder":
        return job
    there = storage(place.path).kind(place.target) == "folder"
    raise CheckpointError(
        f"{place.path}: no parts of a conversion"
        + (", but the folder itself: it is finalized already" if there else "")
        + "; expected what `qtoolkit convert SRC DST --shard I/N` writes, with this DST"
    )


def _is_older(place: Place, name: str, source: Folder) -> bool:
    """Whether the record of a file on this machine is older than the source's weights."""
    if is_url(place.path) or is_url(source.path):
        return False
    written = os.stat(join(place.parts, f"{name}.json")).st_mtime_ns
    return any(os.stat(join(source.path, file)).st_mtime_ns > written for file in source.files)


def _begin(
    place: Place, there: Mapping[str, Any] | None, job: Mapping[str, Any], overwrite: bool
) -> None:
    """Writes the plan; one process alone removes the parts of another plan, which is `there`."""
    if not is_url(place.path):
        os.makedirs(place.content, exist_ok=True)
    if not job["shards"]:
        _clear(place, there, overwrite)
    elif is_url(place.path):
        found = storage(place.path).entries(place.target)
        if found and not is_under_way(place.path, found):
            raise CheckpointError(
                f"{place.path}: exists already, and shards cannot replace what lies behind a URL; "
                "remove it, or choose another name"
            )
    place.write(place.parts, PLAN, job)


def _check_other(
    place: Place, there: Mapping[str, Any] | None, job: Mapping[str, Any], overwrite: bool
) -> None:
    """Refuses to remove what shards of another plan have written."""
    if there is not None and (job["shards"] or (there.get("shards") and not overwrite)):
        raise CheckpointError(
            f"{place.path}: files of another conversion are there: "
            f"{difference(there.get('made'), job['made'])}; finalize it, give the same options "
            "and source, or remove them: qtoolkit finalize --discard "
            f"{shlex.quote(str(place.path))}"
        )


def _clear(place: Place, there: Mapping[str, Any] | None, overwrite: bool) -> None:
    """Removes what is left of another conversion."""
    if is_url(place.path):
        if there is not None:
            place.remove(there)
        elif overwrite:  # a former checkpoint: it cannot stay until the new one is whole
            storage(place.path).remove_folder(place.target)
        return
    storage(place.parts).remove_folder(place.content)
    for name in os.listdir(place.parts):
        os.unlink(os.path.join(place.parts, name))
    os.mkdir(place.content)


def _write(
    place: Place,
    source: Folder,
    job: Mapping[str, Any],
    cut: Sequence[Sequence[TensorPlan]],
    plan: Plan,
    work: Work,
    shard: Shard | None,
) -> tuple[str, ...]:
    """Writes the files of a shard that are not there yet.

    Returns:
      The names of those that were: whole, of this plan, and not older than the source.
    """
    index, count = shard or (0, 1)
    mine = dict(zip(job["files"], cut, strict=True))
    mine = {name: mine[name] for name in job["files"][index::count]}
    kept = {name: reports for name in mine if (reports := _reports(place, job, name)) is not None}
    kept = {name: reports for name, reports in kept.items() if work.accepts(reports)}
    if shard is None:  # one process has one clock
        kept = {name: kept[name] for name in kept if not _is_older(place, name, source)}
    work.start([tensor for name in mine if name not in kept for tensor in mine[name]])
    if job["files"][0] in mine:  # its process copies what is no weights
        _copy_others(place, source, job["files"][0] in kept)
    for name, tensors in mine.items():
        if name in kept:
            work.reports += kept[name]
            continue
        _write_file(place, job, name, tensors, plan.metadata, work, count)
    work.finish()
    return tuple(kept)


def _write_file(
    place: Place,
    job: Mapping[str, Any],
    name: str,
    tensors: Sequence[TensorPlan],
    metadata: Mapping[str, str],
    work: Work,
    count: int,
) -> None:
    """Writes one file and its record, which says that the file is whole; `count` is of shards."""
    _check_under_way(place, job)
    outputs = placed(entry for tensor in tensors for entry in tensor.entries)
    file, done = join(place.content, name), len(work.reports)
    # A record never outlives the file that it is of.
    storage(place.parts).remove(join(place.parts, f"{name}.json"))
    write_safetensors(file, outputs, work.chunks(tensors), metadata, overwrite=True)
    reports = work.reports[done:]
    _check_under_way(place, job)
    if not work.accepts(reports):  # `work.finish` raises for it when all others are written
        storage(file).remove(file)
        return
    record = {
        "made": job["made"],
        "shards": count,
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
    """Behind a URL, where there are no locks: whether the plan is still this one."""
    if is_url(place.path) and (place.plan() or {}).get("made") != job["made"]:
        raise CheckpointError(
            f"{place.path}: finalized, discarded or begun anew by another process meanwhile; "
            "nothing more was written"
        )


def _reports(place: Place, job: Mapping[str, Any], name: str) -> list[TensorReport] | None:
    """The reports of a file that is there as the plan has it; else None."""
    record = place.record(name)
    if record is None or record.get("made") != job["made"]:
        return None
    return _tensors(record)


def _tensors(record: Mapping[str, Any]) -> list[TensorReport]:
    return [TensorReport(**report) for report in record["tensors"]]


def _finalized(place: Place, job: Mapping[str, Any], overwrite: bool) -> Report:
    """Writes index and config, and gives the folder its name."""
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
    """The records of all files; raises where one is missing, or is not of the plan."""
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
