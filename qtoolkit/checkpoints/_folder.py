"""Writing a folder in the way of Hugging Face: shards, index, config, the other files. No JAX."""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from qtoolkit.checkpoints._header import CheckpointError, shown
from qtoolkit.checkpoints._header import layout as placed
from qtoolkit.checkpoints._partial import check_lock, partial_name
from qtoolkit.checkpoints._plan import Plan, TensorPlan
from qtoolkit.checkpoints._safetensors import Path, check_target, write_safetensors
from qtoolkit.checkpoints._source import CONFIG, INDEX, PARKED_CONFIG, Folder

Chunks = Callable[[Sequence[TensorPlan]], Iterator[tuple[str, Any]]]
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?)B?", re.IGNORECASE)
_CONFIGS = ("quantization_config", "compression_config")
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def byte_count(size: int | str) -> int:
    """The bytes that "5GB", "500MiB" or a number stand for.

    Raises:
      ValueError: It is neither, or not above 0.
    """
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match:
        unit = match[2][:1].upper() + match[2][1:].lower()
        count = int(float(match[1]) * _UNITS[unit]) if unit in _UNITS else 0
    else:
        count = size if isinstance(size, int) else 0
    if count <= 0:
        raise ValueError(f"max_shard_size={size!r}, expected such as '5GB', '500MiB' or bytes")
    return count


def shards(tensors: Iterable[TensorPlan], limit: int) -> list[list[TensorPlan]]:
    """Tensors in files of at most `limit` bytes; a larger tensor has a file of its own."""
    cut: list[list[TensorPlan]] = [[]]
    size = 0
    for tensor in tensors:
        if cut[-1] and size + tensor.nbytes > limit:
            cut.append([])
            size = 0
        cut[-1].append(tensor)
        size += tensor.nbytes
    return cut


def shard_names(count: int, base: str = "model") -> list[str]:
    if count == 1:
        return [f"{base}.safetensors"]
    return [f"{base}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def check_paths(src: Path, dst: Path) -> None:
    """Raises where the target is the source, or one lies in the other."""
    source, target = os.path.realpath(src), os.path.realpath(dst)
    if source == target:
        raise CheckpointError(
            f"{dst}: is the source itself; choose another name, so that nothing is lost if the "
            "result is not what you want"
        )
    inner, outer = (target, source) if len(target) > len(source) else (source, target)
    if os.path.isdir(outer) and inner.startswith(outer + os.sep) and os.path.isdir(src):
        raise CheckpointError(f"{dst}: the source and the target lie in each other; choose another")


def check_destination(src: Path, dst: Path, overwrite: bool) -> None:
    """Raises where `src` cannot be converted into `dst`, as far as their names and kinds say.

    Raises:
      CheckpointError, OSError: As `check_paths`, `check_folder` or `check_target`.
    """
    check_paths(src, dst)
    if os.path.isdir(src):
        check_folder(dst, overwrite)
    else:
        check_target(dst, overwrite)


def check_folder(path: Path, overwrite: bool) -> str:
    """The real path of a folder to write; raises where that cannot work or would lose files."""
    target = os.path.realpath(path)
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; create it", str(path))
    if not os.access(parent, os.W_OK):
        raise PermissionError(errno.EACCES, "its folder cannot be written to", str(path))
    if os.path.isdir(target):
        names = os.listdir(target)
        folders = [name for name in names if os.path.isdir(os.path.join(target, name))]
        weights = any(name.endswith(".safetensors") for name in names)
        if names and not overwrite:
            raise CheckpointError(
                f"{path}: exists already; pass --overwrite (in Python overwrite=True) to replace "
                "it, or choose another name"
            )
        if names and (folders or not weights):
            what = f"holds the folder {shown(folders[0])}" if folders else "holds no safetensors"
            raise CheckpointError(
                f"{path}: {what}, so it is no checkpoint that --overwrite could replace; choose "
                "another name"
            )
    elif os.path.lexists(target):
        raise CheckpointError(
            f"{path}: is a file, expected the name of a folder, as the source is one"
        )
    return target


def write_folder(
    path: Path,
    source: Folder,
    plan: Plan,
    chunks: Chunks,
    finish: Callable[[], None],
    *,
    limit: int,
    overwrite: bool,
) -> tuple[str, ...]:
    """Writes a converted checkpoint; it appears under its name when it is whole.

    Args:
      path: The folder to write.
      source: Where the config and other files come from.
      plan: What is written.
      chunks: What is written for some tensors.
      finish: Called when all weights are written, before the folder appears; may raise.
      limit: Bytes of a file, about.
      overwrite: Whether a checkpoint of that name may be replaced.

    Returns:
      The names of the files.

    Raises:
      CheckpointError, OSError: As `write_safetensors`; nothing is left.
    """
    target = check_folder(path, overwrite)
    with _partial_folder(target, path) as folder:
        check_folder(path, overwrite)
        cut = shards(plan.tensors, limit)
        names = shard_names(len(cut), source.base)
        weight_map: dict[str, str] = {}
        total = 0
        for name, tensors in zip(names, cut, strict=True):
            outputs = placed(entry for tensor in tensors for entry in tensor.entries)
            write_safetensors(os.path.join(folder, name), outputs, chunks(tensors), plan.metadata)
            weight_map |= {output.name: name for output in outputs}
            total += sum(output.nbytes for output in outputs)
        finish()
        for name in source.copied:
            shutil.copyfile(os.path.join(source.path, name), os.path.join(folder, name))
        if len(names) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(os.path.join(folder, INDEX.replace("model", source.base, 1)), index)
        if source.config:
            name = PARKED_CONFIG if plan.loads_nowhere else CONFIG
            _write_json(os.path.join(folder, name), new_config(source.config, plan))
        for name, value in plan.files.items():
            _write_json(os.path.join(folder, name), value)
        written = tuple(sorted(os.listdir(folder)))
        check_folder(path, overwrite)  # somebody else may have written it meanwhile
        _replace(folder, target)
    return written


def new_config(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """config.json of the target: the source's, with what `plan` makes of the weights."""
    new = {key: value for key, value in config.items() if key not in _CONFIGS}
    if isinstance(new.get("text_config"), dict):
        new["text_config"] = {k: v for k, v in new["text_config"].items() if k not in _CONFIGS}
    # A model is built in the dtype of its config: the one that its wide weights have.
    cast = {tensor.dtype for tensor in plan.tensors if tensor.action == "cast"}
    for part in (new, new.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if len(cast) == 1 and isinstance(part, dict) and isinstance(part.get(key), str):
                part[key] = _DTYPE_NAMES[next(iter(cast))]
    if plan.quantization_config:
        new["quantization_config"] = dict(plan.quantization_config)
    return new


@contextlib.contextmanager
def _partial_folder(target: str, path: Path) -> Iterator[str]:
    """A folder beside the target to write to, empty and locked; nothing of it is left."""
    folder = partial_name(target)
    os.makedirs(folder, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        check_lock(lock, path)
        _restore(folder, target)  # after a run that was killed between two renames
        for left in os.listdir(folder):  # by a run that was killed
            os.unlink(os.path.join(folder, left))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _restore(folder: str, target: str) -> None:
    """Gives the former content of `target` its name again where nothing has it."""
    old = f"{folder}-old"
    if os.path.isdir(old) and not os.path.lexists(target):
        os.rename(old, target)


def _replace(folder: str, target: str) -> None:
    """Gives `folder` the name `target`, whose former content, if any, is removed."""
    old = f"{folder}-old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.isdir(target):
        os.rename(target, old)
    try:
        os.rename(folder, target)
    except BaseException:
        _restore(folder, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: str, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
