"""What is written, and where: names of targets that would lose something are refused. No JAX."""

import dataclasses
import errno
import os
import re
from collections.abc import Container
from typing import get_args

from qtoolkit.checkpoints._containers import ORBAX_FILES, is_orbax, kind_of_source
from qtoolkit.checkpoints._folder import is_under_way, weight_files
from qtoolkit.checkpoints._paths import (
    Path,
    check_path,
    check_writable,
    entries,
    identity,
    is_url,
    join,
    kind_at,
)
from qtoolkit.checkpoints._report import ContainerName, Plan
from qtoolkit.checkpoints._tensors import Checkpoint, CheckpointError, MisuseError, listed, shown
from qtoolkit.checkpoints._writing import check_target, exists_already

Shard = tuple[int, int]  # (index, count)
# Beside the arrays of a tree of orbax, which are in "d" and "ocdbt.process_*".
_BESIDE_ARRAYS = re.compile(
    r"_sharding|_strings\.json|commit_success\.txt|array_metadatas|d|ocdbt\.process_\w+"
)
# Files that belong to a checkpoint beside its weights. --overwrite may remove these with it, and
# refuses to remove anything else.
_BESIDE_WEIGHTS = re.compile(
    r"\w*config\w*\.json|(tokenizer|special_tokens_map|added_tokens|vocab|modules|params)\.json"
    r"|chat_template\.(json|jinja)|.+\.safetensors\.index\.json|(merges|vocab)\.txt"
    r"|(tokenizer|spiece|sentencepiece(\.bpe)?)\.model|\.gitattributes"
    r"|(configuration|modeling|processing|image_processing|tokenization)_\w+\.py"
    r"|(README|LICENSE|NOTICE|USE_POLICY)(\.(md|txt))?"
)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d{1,99}(?:\.\d+)?)\s*([KMGT]?i?)B?", re.IGNORECASE)
_BASE_MEMORY = 340 * 2**20  # Python, JAX, compiled programs: 260 to 300 measured, by machine
_WORKER_MEMORY = 20 * 2**20  # chunks that are read, quantized and written: 8 to 17 measured


def layout_in(to: ContainerName, layout: str | None) -> str | None:
    """The layout in a container: that of a folder's loaders only where they find their files."""
    if to == "orbax" and layout not in (None, "plain"):
        raise MisuseError(
            f"--to orbax: layout {layout!r}, expected 'plain': loaders of others read safetensors; "
            "leave --to out to write them"
        )
    return "plain" if to == "orbax" else layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Destination:
    """What a conversion writes, and of what; the attributes are as given to `convert`."""

    src: Path
    dst: Path
    to: ContainerName
    max_shard_size: int | str | None
    overwrite: bool
    shard: Shard | None

    def check(self) -> None:
        """Raises where `src` cannot be converted into `dst`, as far as their names and kinds say.

        Raises:
          MisuseError: A shard or a size of files for a target that is not a folder of files.
          CheckpointError, OSError: As `check_folder` and `check_target`; one lies in the other; or
            a killed run has left `src` under another name.
          TypeError: One is no path.
          ValueError: There is no such container.
        """
        if self.to not in get_args(ContainerName):
            containers = ", ".join(get_args(ContainerName))
            raise ValueError(f"to={self.to!r}, expected one of {containers}")
        is_folder = kind_of_source(self.src, "src") == "folder" and not is_orbax(self.src)
        if self.to == "orbax":
            self._check_unsharded("--to orbax: orbax cuts its files itself")
        elif not is_folder:
            self._check_unsharded(f"{self.src}: is a file, which becomes one file")
        check_path(self.dst, "dst")
        check_writable(self.dst)
        _check_apart(self.src, self.dst)
        if self.to == "orbax":
            check_folder(self.dst, self.overwrite, of_orbax=True)
        elif not is_folder:
            check_target(self.dst, self.overwrite)
        elif str(self.dst).rstrip("/").endswith(".safetensors"):
            raise CheckpointError(
                f"{self.dst}: named as a file, and {self.src} is a folder, which becomes a folder, "
                "expected the name of one; leave .safetensors out, or give one file of the source"
            )
        else:
            visible = {name for name in entries(self.src) if not name.startswith(".")}
            check_folder(self.dst, self.overwrite, visible)

    def _check_unsharded(self, why: str) -> None:
        options = {"--shard": self.shard, "--max-shard-size": self.max_shard_size}
        for option, value in options.items():
            if value is not None:
                raise MisuseError(
                    f"{why}, and {option} is for the safetensors files of a folder; leave {option} "
                    "out"
                )


def check_shard(shard: Shard | None) -> None:
    """Raises ValueError unless this is (index, count) with 0 <= index < count, or None."""
    if shard is None:
        return
    numbers = isinstance(shard, tuple) and len(shard) == 2 and all(type(n) is int for n in shard)
    if not numbers or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard!r}, expected (index, count) with 0 <= index < count")


def _check_apart(src: Path, dst: Path) -> None:
    source, target = identity(src), identity(dst)
    if source == target:
        raise CheckpointError(
            f"{dst}: is the source itself; choose another name, so that nothing is lost if the "
            "result is not what you want"
        )
    inner, outer = (target, source) if len(target) > len(source) else (source, target)
    if inner.startswith(outer + "/") and kind_at(src) == "folder":
        raise CheckpointError(f"{dst}: the source and the target lie in each other; choose another")


def check_folder(
    path: Path, overwrite: bool, own: Container[str] = (), *, of_orbax: bool = False
) -> None:
    """Raises where a folder cannot be written, or files would be lost by it.

    Args:
      path: The folder.
      overwrite: Whether a checkpoint of that name may be replaced.
      own: Names of files and folders in the new checkpoint; the old one may have these, too.
      of_orbax: Whether the checkpoint is one of orbax.
    """
    if is_url(path):
        target = str(path).rstrip("/")
        if of_orbax:
            raise CheckpointError(
                f"{path}: checkpoints of orbax are written to folders of this machine; give one"
            )
    else:
        target = os.path.realpath(path)
        _check_nameable(path, target)
    kind = kind_at(target)
    if kind not in ("folder", ""):
        raise CheckpointError(f"{path}: is a file, expected the name of a folder, which is written")
    found = entries(target) if kind == "folder" else {}
    if not found or is_under_way(path, found):
        return
    if not overwrite:
        raise exists_already(path)
    what = "orbax" if of_orbax else "safetensors"
    try:
        weights = ORBAX_FILES & found.keys() if of_orbax else weight_files(target, [*found])[0]
        beside = _BESIDE_ARRAYS if of_orbax else _BESIDE_WEIGHTS
        others = [
            name
            for name, is_folder in found.items()
            if name not in weights and name not in own
            if not beside.fullmatch(name) or (is_folder and not of_orbax)
        ]
        reason = f"--overwrite would delete {listed(map(shown, others))}" if others else ""
    except CheckpointError as error:
        weights, reason = [], str(error).partition("; ")[0].removeprefix(f"{target}: ")
    if reason or not weights:
        raise CheckpointError(
            f"{path}: {reason or 'no weights'}, expected a checkpoint of {what} and nothing else, "
            "which --overwrite replaces; choose another name"
        )


def _check_nameable(path: Path, target: str) -> None:
    """Raises if no folder can be renamed to this name."""
    if os.path.ismount(target) or f"{os.getcwd()}/".startswith(f"{target}/"):
        raise CheckpointError(
            f"{path or repr('')}: is a mount point, or a folder that this process is in, and the "
            f"folder that is written gets its name by a rename; give a folder in it: "
            f"{join(path, 'NAME')}"
        )
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; create it", str(path))


def byte_count(size: int | str, name: str = "max_shard_size") -> int:
    """The bytes that "5GB", "500MiB" or a number stand for; `name` is what messages call it.

    Raises:
      ValueError: It is neither, or not above 0.
    """
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
    """Threads of a conversion, `workers` or one for each core and at most 4.

    Fewer, where 340 MiB and 20 MiB for each of them exceed `max_memory`.

    Raises:
      ValueError: One of the two is out of range.
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


def check_tree(dst: Path, plan: Plan, opened: Checkpoint) -> None:
    """Raises where orbax cannot hold what is planned. JAX loads."""
    from qtoolkit.checkpoints._orbax import Tree, promised_tree

    promised_tree(dst, plan, opened.tree or Tree())
