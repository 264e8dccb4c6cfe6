"""The plan that all processes writing one folder share, as JSON, and how two plans differ."""

import concurrent.futures
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit._version import __version__
from qtoolkit.checkpoints._folder import new_config, shard_names
from qtoolkit.checkpoints._plan import Plan, TensorPlan
from qtoolkit.checkpoints._report import Report
from qtoolkit.checkpoints._source import CONFIG, INDEX, PARKED_CONFIG, Folder
from qtoolkit.checkpoints._storage import is_url, join, read_file

_SAMPLED = 1024  # tensors of a source
_SAMPLE = 1024  # bytes at the start, in the middle and at the end of each
_MAX_COPIED = 2**26  # bytes of another file that are compared: tokenizers have fewer
_READERS = 16  # threads that wait for a source behind a URL
# The fields of a plan, and how a message says that two plans differ in one.
_DIFFERENCES = {
    "qtoolkit": "qtoolkit {0}, here {1}",
    "format": "format {0}, here {1}",
    "scaling": "scaling {0}, here {1}",
    "layout": "layout {0}, here {1}",
    "files": "{0} files, here {1}",
    "source": "another source",
    "options": "other options",
}


def make_job(
    source: Folder, plan: Plan, cut: Sequence[Sequence[TensorPlan]], report: Report
) -> dict[str, Any]:
    """The plan that all processes share, as JSON. Two plans are the same if "made" is equal."""
    names = shard_names(len(cut), source.base)
    files = dict(plan.files)
    if len(names) > 1:
        # The content of the index is known only when all files are written.
        files[INDEX.replace("model", source.base, 1)] = None
    if source.has_config:
        name = PARKED_CONFIG if plan.loads_nowhere else CONFIG
        files[name] = new_config(source.config, plan)
    made = {
        "qtoolkit": __version__,
        "format": plan.format_names,
        "scaling": plan.scaling,
        "layout": plan.layout,
        "files": len(names),
        "source": _source_digest(source),
        "options": _digest(repr(cut), json.dumps([dict(plan.metadata), files], sort_keys=True)),
    }
    return {
        "made": made,
        "files": names,
        "copied": source.copied,
        "json": files,
        "report": dataclasses.asdict(report),
    }


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def _source_digest(source: Folder) -> str:
    """A hash of the headers, of samples of the weights, and of the other files.

    Modification times are left out: each process may have its own copy of the source.
    """
    infos = [info for info in source.tensors.values() if info.nbytes]
    step = max(len(infos) / _SAMPLED, 1)
    chosen = [infos[int(i * step)] for i in range(min(len(infos), _SAMPLED))]

    def sample(info: Any) -> str:
        if info.nbytes <= 3 * _SAMPLE:
            return read(info, 0, info.nbytes)
        last = info.nbytes - _SAMPLE
        return "".join(read(info, start, _SAMPLE) for start in (0, last // 2, last))

    def read(info: Any, start: int, length: int) -> str:
        data = bytearray(length)
        source.read_into(info.name, start, data)
        return data.hex()

    if is_url(source.path):
        with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
            samples = [*pool.map(sample, chosen)]
    else:
        samples = [*map(sample, chosen)]
    others = []
    for name in source.copied:
        data = read_file(join(source.path, *name.split("/")), _MAX_COPIED, whole=False)
        others.append(_digest(name, hashlib.sha256(data).hexdigest()))
    return _digest(repr([*source.tensors.values()]), *others, *samples)


def own_names(job: Mapping[str, Any]) -> set[str]:
    """The names of the files and folders that the new checkpoint will have."""
    return {name.partition("/")[0] for name in (*job["files"], *job["copied"], *job["json"])}


def difference(there: Any, here: Mapping[str, Any]) -> str:
    there = there if isinstance(there, dict) else {}
    for key, text in _DIFFERENCES.items():
        if there.get(key) != here[key]:
            return text.format(there.get(key), here[key])
    return "other options"
