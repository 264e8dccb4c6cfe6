"""What is written, and where: names of targets that would lose something are refused. No JAX."""

import dataclasses
import errno
import os
import re
from collections.abc import Container, Mapping
from typing import get_args

from qtoolkit.checkpoints._containers import ORBAX_FILES, is_orbax, kind_of_source
from qtoolkit.checkpoints._folder import is_under_way, weight_files
from qtoolkit.checkpoints._paths import (
    Path,
    check_path,
    check_writable,
    identity,
    is_url,
    join,
    storage,
)
from qtoolkit.checkpoints._report import ContainerName, Plan
from qtoolkit.checkpoints._tensors import Checkpoint, CheckpointError, MisuseError, listed, shown
from qtoolkit.checkpoints._writing import check_target, exists_already

Shard = tuple[int, int]  # (index, count)
# Beside the arrays of a tree of orbax, which are in "d" and "ocdbt.process_*".
_ORBAX_OTHERS = re.compile(
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
    """What a conversion writes, and of what.

    Attributes:
      src, dst, to, max_shard_size, overwrite, shard: As given to `convert`.
    """

    src: Path
    dst: Path
    to: ContainerName
    max_shard_size: int | str | None
    overwrite: bool
    shard: tuple[int, int] | None

    @property
    def is_folder(self) -> bool:
        is_folder = storage(self.src).kind(self.src) == "folder"
        return self.to == "orbax" or (is_folder and not is_orbax(self.src))

    def check(self) -> None:
        """Raises where `src` cannot be converted into `dst`, as far as their names and kinds say.

        Raises:
          MisuseError: A shard or a size of files for a target that is not a folder of files.
          CheckpointError, OSError: As `check_paths`, `check_folder`, `check_target` or
            `check_orbax_folder`; or a killed run has left `src` under another name.
          TypeError: One is no path.
          ValueError: There is no such container.
        """
        self._check_container()
        kind_of_source(self.src, "src")
        check_path(self.dst, "dst")
        check_writable(self.dst)
        check_paths(self.src, self.dst)
        if self.to == "orbax":
            check_orbax_folder(self.dst, self.overwrite)
        elif self.is_folder:
            if str(self.dst).rstrip("/").endswith(".safetensors"):
                raise CheckpointError(
                    f"{self.dst}: named as a file, and {self.src} is a folder, which becomes a "
                    "folder, expected the name of one; leave .safetensors out, or give one file of "
                    "the source"
                )
            found = storage(self.src).entries(self.src)
            visible = {name for name in found if not name.startswith(".")}
            check_folder(self.dst, self.overwrite, visible)
        else:
            self._check_one_file()
            check_target(self.dst, self.overwrite)

    def _check_container(self) -> None:
        if self.to not in get_args(ContainerName):
            containers = ", ".join(get_args(ContainerName))
            raise ValueError(f"to={self.to!r}, expected one of {containers}")
        if self.to == "orbax" and self.shard is not None:
            raise MisuseError(
                "--to orbax: one process writes a checkpoint of orbax, and shards are files of a "
                "folder; leave --shard out"
            )
        if self.to == "orbax" and self.max_shard_size is not None:
            raise MisuseError(
                "--to orbax: orbax cuts its files itself, and --max-shard-size is of safetensors "
                "in a folder; leave --max-shard-size out"
            )

    def _check_one_file(self) -> None:
        if self.shard is not None:
            raise MisuseError(
                f"{self.src}: is a file, which becomes one file, and shards are files of a folder; "
                "leave --shard out"
            )
        if self.max_shard_size is not None:
            raise MisuseError(
                f"{self.src}: becomes one file, and --max-shard-size cuts those of a folder; leave "
                "--max-shard-size out"
            )


def check_shard(shard: Shard | None) -> None:
    """Raises ValueError unless this is (index, count) with 0 <= index < count, or None."""
    if shard is None:
        return
    numbers = isinstance(shard, tuple) and len(shard) == 2 and all(type(n) is int for n in shard)
    if not numbers or not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard={shard!r}, expected (index, count) with 0 <= index < count")


def check_orbax_folder(path: Path, overwrite: bool) -> None:
    """Raises where a checkpoint of orbax cannot be written, or files would be lost by it."""
    if is_url(path):
        raise CheckpointError(
            f"{path}: checkpoints of orbax are written to folders of this machine; give one"
        )
    target = os.path.realpath(path)
    check_nameable(path, target)
    kind = storage(path).kind(target)
    if kind not in ("folder", ""):
        raise CheckpointError(f"{path}: is a file, expected the name of a folder: orbax writes one")
    found = storage(path).entries(target) if kind == "folder" else {}
    if not found:
        return
    others = [n for n in found if n not in ORBAX_FILES and not _ORBAX_OTHERS.fullmatch(n)]
    if others or ORBAX_FILES.isdisjoint(found):
        what = f"holds {shown(others[0])}" if others else "holds nothing of orbax"
        raise CheckpointError(
            f"{path}: exists already and {what}, expected nothing but what --to orbax writes, "
            "which --overwrite replaces; choose another name"
        )
    if not overwrite:
        raise exists_already(path)


def check_paths(src: Path, dst: Path) -> None:
    """Raises where the target is the source, or one lies in the other."""
    source, target = identity(src), identity(dst)
    if source == target:
        raise CheckpointError(
            f"{dst}: is the source itself; choose another name, so that nothing is lost if the "
            "result is not what you want"
        )
    inner, outer = (target, source) if len(target) > len(source) else (source, target)
    if inner.startswith(outer + "/") and storage(src).kind(src) == "folder":
        raise CheckpointError(f"{dst}: the source and the target lie in each other; choose another")


def check_folder(path: Path, overwrite: bool, own: Container[str] = ()) -> None:
    """Raises where a folder cannot be written, or files would be lost by it.

    Args:
      path: The folder.
      overwrite: Whether a checkpoint of that name may be replaced.
      own: Names of files and folders in the new checkpoint; the old one may have these, too.
    """
    place = storage(path)
    if is_url(path):
        target = str(path).rstrip("/")
    else:
        target = os.path.realpath(path)
        check_nameable(path, target)
    kind = place.kind(target)
    if kind not in ("folder", ""):
        raise CheckpointError(
            f"{path}: is a file, expected the name of a folder, as the source is one"
        )
    found = place.entries(target) if kind == "folder" else {}
    if not found or is_under_way(path, found):
        return
    if not overwrite:
        raise exists_already(path)
    _check_replaceable(path, target, found, own)


def check_nameable(path: Path, target: str) -> None:
    """Raises if no folder can be renamed to this name."""
    if os.path.ismount(target):
        raise CheckpointError(
            f"{path}: is a mount point, and the folder that is written gets its name by a "
            f"rename; give a folder in it: {join(path, 'NAME')}"
        )
    if _is_around_us(target):
        raise CheckpointError(
            f"{path or repr('')}: is the folder that this process is in, or one around it, and "
            "replacing it would leave the process in a removed one; give another name"
        )
    parent = os.path.dirname(target)
    if not os.path.isdir(parent):
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; create it", str(path))
    if not os.access(parent, os.W_OK):
        raise PermissionError(errno.EACCES, "its folder cannot be written to", str(path))


def _is_around_us(target: str) -> bool:
    try:
        here = os.getcwd()
    except FileNotFoundError:  # removed by somebody
        return False
    return f"{os.path.realpath(here)}/".startswith(f"{target}/")


def _check_replaceable(
    path: Path, target: str, found: Mapping[str, bool], own: Container[str]
) -> None:
    """Raises unless a folder, with the entries `found`, is a checkpoint and holds nothing else."""
    folders = [name for name, is_folder in found.items() if is_folder and name not in own]
    if folders or not any(name.endswith(".safetensors") for name in found):
        what = f"holds the folder {shown(folders[0])}" if folders else "holds no safetensors"
        raise CheckpointError(
            f"{path}: {what}, so it is no checkpoint of safetensors that --overwrite could "
            "replace; choose another name"
        )
    try:
        weights, _ = weight_files(target, [*found])
    except CheckpointError as error:
        reason = str(error).partition("; ")[0].removeprefix(f"{target}: ")  # not its remedies
        raise CheckpointError(
            f"{path}: --overwrite replaces nothing but a checkpoint, and this is none: {reason}; "
            "choose another name"
        ) from error
    known = {*weights, *(name for name in found if _BESIDE_WEIGHTS.fullmatch(name))}
    others = [name for name in found if name not in known and name not in own]
    if others:
        raise CheckpointError(
            f"{path}: --overwrite would delete {listed(map(shown, others))}, expected nothing but "
            f"a checkpoint; move {'them' if len(others) > 1 else 'it'} away, or choose another name"
        )


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
    from qtoolkit.checkpoints._orbax import Tree
    from qtoolkit.checkpoints._orbax_writer import promised_tree

    promised_tree(dst, plan, opened.tree or Tree())
