"""Which files a folder will hold, as data: names, contents of JSON, a fingerprint. No JAX here."""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qtoolkit._version import __version__
from qtoolkit.checkpoints._folder import CONFIG, INDEX, PARKED_CONFIG
from qtoolkit.checkpoints._paths import is_url, join, read_file
from qtoolkit.checkpoints._report import Plan, Report, TensorPlan
from qtoolkit.checkpoints._target import Shard
from qtoolkit.checkpoints._tensors import Checkpoint, Tensor
from qtoolkit.checkpoints.layouts._layout import WIDE

_SAMPLED = 1024  # tensors of a source
_SAMPLE = 1024  # bytes at the start, in the middle and at the end of each
_MAX_COPIED = 2**26  # bytes of another file that are compared: tokenizers have fewer
_READERS = 16  # threads that wait for a source behind a URL
_CONFIGS = ("quantization_config", "compression_config")


def file_names(count: int, weights_name: str) -> list[str]:
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


def shared_plan(
    source: Checkpoint, plan: Plan, files: Sequence[Sequence[TensorPlan]], report: Report
) -> dict[str, Any]:
    """The plan that all processes share, as JSON. Two plans are the same if "made" is equal."""
    folder = source.folder
    assert folder is not None
    names = file_names(len(files), folder.weights_name)
    contents = dict(plan.files)
    if len(names) > 1:
        # The content of the index is known only when all files are written.
        contents[INDEX.replace("model", folder.weights_name, 1)] = None
    if folder.has_config:
        name = PARKED_CONFIG if plan.loads_nowhere else CONFIG
        contents[name] = _new_config(source.config, plan)
    steps = [
        [(t.name, t.action, t.source.entry, t.entries, str(t.spec), t.group) for t in file]
        for file in files
    ]
    made = {
        "qtoolkit": __version__,
        "format": plan.format_names,
        "scaling": plan.scaling,
        "layout": plan.layout,
        "files": len(names),
        "source": _source_digest(source),
        "options": _digest(
            repr(steps), json.dumps([dict(plan.metadata), contents], sort_keys=True)
        ),
    }
    return {
        "made": made,
        "files": names,
        "copied": folder.copied,
        "json": contents,
        "report": dataclasses.asdict(report),
    }


def difference(there: Any, here: Mapping[str, Any]) -> str:
    """The first thing in which the fingerprint `there` differs: "scaling channel, here tensor"."""
    there = there if isinstance(there, dict) else {}
    key = next(key for key in here if there.get(key) != here[key])
    if key in ("source", "options"):
        return f"other {key}"
    return f"{key} {there.get(key)}, here {here[key]}"


def modified(source: Checkpoint) -> int:
    """When the weights of a source were last written, in nanoseconds; 0 behind a URL."""
    if source.folder is None or is_url(source.path):
        return 0
    return max(os.stat(join(source.path, name)).st_mtime_ns for name in source.folder.weights)


def _new_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """config.json of the target: that of the source, changed to describe the planned weights."""
    new = {key: value for key, value in config.items() if key not in _CONFIGS}
    if isinstance(new.get("text_config"), dict):
        new["text_config"] = {k: v for k, v in new["text_config"].items() if k not in _CONFIGS}
    # Loaders build the model in the dtype that the config names, so it must be that of the
    # unquantized weights. If all weights are dequantized, those that have it already count as well.
    all_plain = plan.dequantizes and all(t.action != "quantize" for t in plan.tensors)
    dtypes = {
        tensor.dtype
        for tensor in plan.tensors
        if tensor.action == "cast" or (all_plain and tensor.dtype in WIDE)
    }
    for part in (new, new.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if len(dtypes) == 1 and isinstance(part, dict) and isinstance(part.get(key), str):
                part[key] = WIDE[next(iter(dtypes))].name
    if plan.quantization_config:
        new["quantization_config"] = dict(plan.quantization_config)
    return new


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def _source_digest(source: Checkpoint) -> str:
    """A hash of the headers, of samples of the weights, and of the other files.

    Modification times are left out: each process may have its own copy of the source.
    """
    assert source.folder is not None
    tensors = [tensor for tensor in source.tensors.values() if tensor.nbytes]
    step = max(len(tensors) / _SAMPLED, 1)
    chosen = [tensors[int(i * step)] for i in range(min(len(tensors), _SAMPLED))]
    with concurrent.futures.ThreadPoolExecutor(_READERS if is_url(source.path) else 1) as pool:
        samples = [*pool.map(_sample, chosen)]
    others = []
    for name in source.folder.copied:
        data = read_file(join(source.path, *name.split("/")), _MAX_COPIED, whole=False)
        others.append(_digest(name, hashlib.sha256(data).hexdigest()))
    return _digest(repr([t.entry for t in source.tensors.values()]), *others, *samples)


def _sample(tensor: Tensor) -> str:
    last = tensor.nbytes - _SAMPLE
    starts = (0, last // 2, last) if tensor.nbytes > 3 * _SAMPLE else (0,)
    text = ""
    for start in starts:
        data = bytearray(_SAMPLE if len(starts) > 1 else tensor.nbytes)
        tensor.read_into(start, memoryview(data))
        text += data.hex()
    return text
