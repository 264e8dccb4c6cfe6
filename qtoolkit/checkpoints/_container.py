"""What holds a target: a folder as Hugging Face's, a safetensors file, or orbax. No JAX here."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any, get_args

from qtoolkit.checkpoints._base import Source
from qtoolkit.checkpoints._folder import check_folder, check_nameable, check_paths
from qtoolkit.checkpoints._header import CheckpointError, MisuseError, shown
from qtoolkit.checkpoints._partial import reserved
from qtoolkit.checkpoints._plan import ContainerName, Plan
from qtoolkit.checkpoints._safetensors import check_target, exists_already
from qtoolkit.checkpoints._source import ORBAX_FILES, is_orbax, kind_of_source
from qtoolkit.checkpoints._storage import Path, check_path, check_writable, is_url, storage

# Beside the arrays of a tree of orbax, which are in "d" and "ocdbt.process_*".
_BESIDE_ARRAYS = re.compile(
    r"_sharding|_strings\.json|commit_success\.txt|array_metadatas|d|ocdbt\.process_\w+"
)


def layout_in(to: ContainerName, layout: str | None) -> str | None:
    """The layout in a container: that of a folder's loaders only where they find their files."""
    if to == "orbax" and layout not in (None, "plain"):
        raise MisuseError(
            f"--to orbax: layout {layout!r}, expected 'plain': loaders of others read safetensors; "
            "leave --to out to write them"
        )
    return "plain" if to == "orbax" else layout


def check_holds(to: ContainerName, dst: Path, plan: Plan, opened: Source) -> None:
    """Raises where a container cannot hold what is planned. JAX loads for orbax."""
    if to == "orbax":
        from qtoolkit.checkpoints._orbax_writer import promised_tree

        promised_tree(dst, plan, tree_of(opened))


def tree_of(opened: Source) -> Any:
    """The tree of a checkpoint of orbax; of another source, one without anything in it."""
    from qtoolkit.checkpoints._orbax import Tree

    return getattr(opened, "tree", Tree())


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
    def _is_folder(self) -> bool:
        place = storage(self.src)
        return self.to == "orbax" or (place.kind(self.src) == "folder" and not is_orbax(self.src))

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
        elif self._is_folder:
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

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Checks, and holds the lock of `dst` for the conversion.

        `convert` enters it before it loads JAX: of two conversions with one `dst` the second fails
        at once. Behind a URL there is no lock.
        """
        self.check()
        if is_url(self.dst):
            yield
            return
        with reserved(
            os.path.realpath(self.dst),
            self.dst,
            folder=self._is_folder,
            shared=self.shard is not None,
            overwrite=self.overwrite,
        ):
            self.check()  # it may have been written meanwhile
            yield


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
    others = [n for n in found if n not in ORBAX_FILES and not _BESIDE_ARRAYS.fullmatch(n)]
    if others or ORBAX_FILES.isdisjoint(found):
        what = f"holds {shown(others[0])}" if others else "holds nothing of orbax"
        raise CheckpointError(
            f"{path}: exists already and {what}, expected nothing but what --to orbax writes, "
            "which --overwrite replaces; choose another name"
        )
    if not overwrite:
        raise exists_already(path)
