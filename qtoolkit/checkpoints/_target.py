"""The target of a conversion: which files it gets, and whether it may be written.

`Destination.check` refuses a target if writing it would remove other files. `manifest_of` says what
all files contain; by the fingerprint in it a rerun recognizes files of the same conversion. Imports
no JAX.
"""

import copy
import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from qtoolkit._version import __version__
from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint
from qtoolkit.checkpoints._containers import container_of
from qtoolkit.checkpoints._folder import (
    CONFIG,
    INDEX,
    MODELOPT_CONFIG,
    PARKED_CONFIG,
    is_under_way,
    weight_files,
)
from qtoolkit.checkpoints._report import Plan, Report, TensorPlan
from qtoolkit.checkpoints._storage import Path, is_url, join
from qtoolkit.checkpoints._tensors import CheckpointError, MisuseError, configs_in, listed, shown
from qtoolkit.checkpoints._writing import GGUF, check_target, exists_already, is_gguf
from qtoolkit.checkpoints.layouts import LAYOUTS
from qtoolkit.checkpoints.layouts._layout import HIGH_PRECISION

Shard = tuple[int, int]  # (index, count)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d{1,99}(?:\.\d+)?)\s*([KMGT]?i?)B?", re.IGNORECASE)
# Bytes of a process without workers: Python, JAX, compiled programs. Measured: 260 to 300 MiB,
# depending on the machine.
_BASE_MEMORY = 340 * 2**20
# Bytes of a worker: the chunks that it reads, quantizes and writes. Measured: 8 to 17 MiB.
_WORKER_MEMORY = 20 * 2**20
_MAX_COPIED = 2**26  # bytes of a copied file that are hashed; tokenizers are smaller
_CONFIGS = {"quantization_config", "compression_config"}
_CONFIG_FILES = {CONFIG, PARKED_CONFIG, MODELOPT_CONFIG}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Destination:
    """The arguments of `convert` that say what is written, and where."""

    src: Path
    dst: Path
    max_shard_size: int | str | None
    overwrite: bool
    shard: Shard | None

    def check(self) -> None:
        """Raises if `src` cannot be converted to `dst`; looks at names and kinds of files only."""
        is_folder = container_of(self.src, "src") == "folder"
        if is_gguf(self.dst):
            self._check_unsharded(f"{self.dst}: is a GGUF file")
            if not is_folder or is_url(self.src):
                raise CheckpointError(
                    f"{self.src}: no folder on this machine, expected one with config.json and "
                    "tokenizer, which a GGUF file holds; fetch it and give it"
                )
            if is_url(self.dst):
                raise CheckpointError(
                    f"{self.dst}: GGUF is written to files alone; write it and copy it"
                )
        elif not is_folder:
            self._check_unsharded(f"{self.src}: is a file, which becomes one file")
        storage.check_path(self.dst, "dst")
        storage.check_writable(self.dst)
        source, target = storage.identity(self.src), storage.identity(self.dst)
        if source == target:
            raise CheckpointError(
                f"{self.dst}: is the source itself; choose another name, so that nothing is lost "
                "if the result is not what you want"
            )
        inner, outer = (target, source) if len(target) > len(source) else (source, target)
        is_inside = inner.startswith(outer + "/") and not is_gguf(self.dst)
        if is_inside and storage.kind_at(self.src) == "folder":
            raise CheckpointError(
                f"{self.dst}: the source and the target lie inside one another; choose another"
            )
        if not is_folder or is_gguf(self.dst):
            check_target(self.dst, self.overwrite, (GGUF,) if is_folder else ())
        elif str(self.dst).rstrip("/").endswith(".safetensors"):
            raise CheckpointError(
                f"{self.dst}: ends in .safetensors, but the target of the folder {self.src} is a "
                "folder; remove .safetensors, or give one file of the source, or of an orbax "
                "CheckpointManager one step"
            )
        else:
            visible = {name for name in storage.names_in(self.src) if not name.startswith(".")}
            check_folder(self.dst, self.overwrite, visible)

    def _check_unsharded(self, why: str) -> None:
        for argument in ("shard", "max_shard_size"):
            if getattr(self, argument) is not None:
                raise MisuseError(
                    f"{why}, and {argument}= is for the safetensors files of a folder; omit "
                    f"{argument}="
                )


def check_shard(shard: Shard | None) -> None:
    """Raises ValueError unless this is (index, count) with 0 <= index < count, or None."""
    if shard is None:
        return
    numbers = isinstance(shard, tuple) and len(shard) == 2 and all(type(n) is int for n in shard)
    if not numbers or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard!r}, expected (index, count) with 0 <= index < count")


def check_folder(path: Path, overwrite: bool, own: Container[str] = ()) -> None:
    """Raises if a folder cannot be written, or if it has files that would be lost.

    Those in `own`, the names in the new checkpoint, are not lost: they are replaced.
    """
    if is_url(path):
        target = str(path).rstrip("/")
    else:
        target = os.path.realpath(path)
        _check_nameable(path, target)
    kind = storage.kind_at(target)
    if kind not in ("folder", ""):
        raise CheckpointError(f"{path}: is a file, expected the name of a folder, which is written")
    inside = storage.names_in(target) if kind == "folder" else {}
    if not inside or is_under_way(path, inside):
        return
    if not overwrite:
        raise exists_already(path)
    try:
        weights = weight_files(target, [*inside])[0]
        others = [
            name
            for name, is_folder in inside.items()
            if name not in weights and name not in own and name not in _CONFIG_FILES
            if is_folder or not name.endswith(".safetensors.index.json")
        ]
        reason = f"overwrite=True would delete {listed(map(shown, others))}" if others else ""
    except CheckpointError as error:  # without its path and its advice, which are not for a target
        weights, reason = [], str(error).partition("; ")[0].removeprefix(f"{target}: ")
    if reason or not weights:
        raise CheckpointError(
            f"{path}: {reason or 'no weights'}; overwrite=True replaces weights in safetensors, "
            "their config, and files that SRC has, too; remove the folder yourself, or choose "
            "another name"
        )


def _check_nameable(path: Path, target: str) -> None:
    """Raises if a folder that is written elsewhere cannot be renamed to this name at the end."""
    if os.path.ismount(target) or f"{os.getcwd()}/".startswith(f"{target}/"):
        raise CheckpointError(
            f"{path or repr('')}: is a mount point, or a folder that this process is in, and "
            "cannot be replaced by a rename, as the target is; give a folder in it: "
            f"{join(path, 'NAME')}"
        )
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; create it", str(path))


def byte_count(size: int | str, name: str = "max_shard_size") -> int:
    """The bytes that "5GB", "500MiB" or a number stand for; `name` is what messages call it."""
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match:
        unit = match[2][:1].upper() + match[2][1:].lower()
        count = int(float(match[1]) * _UNITS[unit]) if unit in _UNITS else 0
    else:
        count = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if count <= 0:
        raise ValueError(f"{name}={size!r}, expected such as '5GB', '500MiB' or bytes")
    return count


def file_limit(max_shard_size: int | str | None) -> int:
    """The `byte_count` of a file of a folder; None stands for 5 GB."""
    return 5 * 10**9 if max_shard_size is None else byte_count(max_shard_size)


def worker_count(workers: int | None = None, max_memory: int | str | None = None) -> int:
    """The number of threads: `workers`, or one for each core and at most 4.

    It is lower if `_BASE_MEMORY` and `_WORKER_MEMORY` for each thread exceed `max_memory`.
    """
    if workers is None:
        workers = min(os.cpu_count() or 1, 4)
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 64:
        raise ValueError(f"workers={workers!r}, expected 1 to 64")
    if max_memory is None:
        return workers
    fit = (byte_count(max_memory, "max_memory") - _BASE_MEMORY) // _WORKER_MEMORY
    if fit < 1:
        least = (_BASE_MEMORY + _WORKER_MEMORY) // 2**20
        raise ValueError(f"max_memory={max_memory!r}, expected '{least}MiB' or more")
    return min(workers, fit)


# The files of a folder.


def file_names(count: int, weights_name: str) -> list[str]:
    """["model-00001-of-00002.safetensors", ...]; ["model.safetensors"] if there is one file."""
    if count == 1:
        return [f"{weights_name}.safetensors"]
    return [f"{weights_name}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def cut_into_files(tensors: Iterable[TensorPlan], limit: int) -> list[list[TensorPlan]]:
    """Tensors in files of at most `limit` bytes; a larger tensor has a file of its own."""
    files: list[list[TensorPlan]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def files_of_shard(
    plan: Plan, source: Checkpoint, limit: int, shard: Shard
) -> tuple[list[str], int]:
    """The names of the files that a shard writes, and how many there are in all."""
    assert source.folder is not None
    names = file_names(len(cut_into_files(plan.tensors, limit)), source.folder.weights_name)
    return names[shard[0] :: shard[1]], len(names)


def manifest_of(
    source: Checkpoint, plan: Plan, files: Sequence[Sequence[TensorPlan]], report: Report
) -> dict[str, Any]:
    """What all processes of a conversion must agree on, as JSON: "plan.json".

    Only files with equal fingerprints belong to one checkpoint. "json" maps the names of JSON files
    to their contents.
    """
    folder = source.folder
    assert folder is not None
    names = file_names(len(files), folder.weights_name)
    contents: dict[str, Any] = {}
    if len(names) > 1:
        # The content of the index is known only when all files are written.
        contents[INDEX.replace("model", folder.weights_name, 1)] = None
    contents |= json_files(source, plan)  # config.json last: behind a URL it completes the folder
    tensors_by_file = [
        [(t.name, t.action, t.source.entry, t.entries, str(t.spec), t.group) for t in file]
        for file in files
    ]
    fingerprint = {
        "qtoolkit": __version__,
        "format": plan.format_names,
        "scaling": plan.scaling,
        "layout": plan.layout,
        "files": len(names),
        "source": _source_digest(source),
        "options": _digest(
            repr(tensors_by_file), json.dumps([dict(plan.metadata), contents], sort_keys=True)
        ),
    }
    return {
        "fingerprint": fingerprint,
        "files": names,
        "copied": folder.copied,
        "json": contents,
        "report": dataclasses.asdict(report),
    }


def json_files(source: Checkpoint, plan: Plan) -> dict[str, Any]:
    """The contents of the JSON files of a target folder, without the index, by name."""
    contents = dict(plan.files)
    if source.folder is not None and source.folder.has_config:
        name = PARKED_CONFIG if plan.loads_nowhere else CONFIG
        contents[name] = _new_config(source.config, plan)
    return contents


def difference(record: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """The first difference of the fingerprints of two plans: "scaling channel, here tensor"."""
    there, here = record["fingerprint"], plan["fingerprint"]
    there = there if isinstance(there, dict) else {}
    key = next(key for key in here if there.get(key) != here[key])
    if key in ("source", "options"):
        return f"other {key}"
    return f"{key} {there.get(key)}, here {here[key]}"


def modified_at(source: Checkpoint) -> int:
    """When the weights of a source were last written, in nanoseconds; 0 behind a URL."""
    if source.folder is None or is_url(source.path):
        return 0
    return max(os.stat(join(source.path, name)).st_mtime_ns for name in source.folder.weights)


def _new_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """config.json of the target: that of the source, changed to describe the planned weights."""
    # Loaders build the model in the dtype that the config names, so it must be the dtype of the
    # unquantized weights in the target: those that the plan casts and, if it leaves no codes, those
    # that it copies.
    all_plain = plan.dequantizes and all(t.action != "quantize" for t in plan.tensors)
    dtypes = {
        tensor.dtype
        for tensor in plan.tensors
        if tensor.action == "cast" or (all_plain and tensor.dtype in HIGH_PRECISION)
    }
    new = copy.deepcopy(dict(config))
    part: Any
    for part in configs_in(new):
        keys = _CONFIGS | {one.own_key for one in LAYOUTS.values() if one.own_config(part)}
        for key in keys & part.keys():
            del part[key]
        for key in ("dtype", "torch_dtype"):
            if len(dtypes) == 1 and isinstance(part.get(key), str):
                part[key] = HIGH_PRECISION[next(iter(dtypes))].name
    if plan.quantization_config:
        new["quantization_config"] = dict(plan.quantization_config)
    return new


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def _source_digest(source: Checkpoint) -> str:
    """A hash of the headers of the weights, and of the other files."""
    # It has no modification times, because each process may have its own copy of the source.
    # `modified_at` is for reruns of one process. Other numbers under the same headers are found by
    # `verify`, which reads the weights.
    assert source.folder is not None
    others = []
    for name in source.folder.copied:
        data = storage.read_file(join(source.path, *name.split("/")), _MAX_COPIED, cut=True)
        others.append(_digest(name, hashlib.sha256(data).hexdigest()))
    return _digest(repr([t.entry for t in source.tensors.values()]), *others)
