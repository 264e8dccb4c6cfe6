"""Orbax checkpoints as sources: arrays are read one at a time, small ones together."""

import collections
import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint, array_checkpoint
from qtoolkit.checkpoints._storage import Path, is_url, join
from qtoolkit.checkpoints._tensors import CheckpointError, shown

_METADATA = "_METADATA"  # the file of a tree that describes its arrays
_TOGETHER = 2**24  # bytes that are read at a time: each reading looks at the metadata of all arrays


def open_orbax(path: Path) -> Checkpoint:
    """Opens a checkpoint of `StandardCheckpointer` or `PyTreeCheckpointer`, or a step of a
    `CheckpointManager` with one item.

    Names are paths in the tree, joined by "."; of a variable of `nnx.state` that of the variable.
    Texts in the checkpoint's custom metadata are its `metadata`.
    """
    folder = os.path.abspath(_of_one_item(path))  # orbax takes no other
    structure: Any
    try:
        with _quiet():  # a step's item has no metadata of its own, which it warns of
            described = ocp.PyTreeCheckpointer().metadata(folder).item_metadata
        if described is None:
            raise ValueError("arrays are missing")
        leaves, structure = jax.tree_util.tree_flatten_with_path(described.tree)
        custom = dict(described.custom_metadata or {})
    except Exception as error:  # whatever orbax, tensorstore and json raise
        raise _damaged(path, error) from error
    names = _names([keys for keys, _ in leaves])
    _check_names(path, names)
    headers = {}
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            what = type(leaf).__name__.removesuffix("Metadata").lower()
            raise CheckpointError(
                f"{path}: {shown(name)}: a {shown(what)}, expected an array; save the arrays alone"
            )
        headers[name] = np.dtype(leaf.dtype), tuple(leaf.shape)
    arrays = _Arrays(path, folder, structure, headers)
    checkpoint = array_checkpoint(path, headers, arrays.read)
    checkpoint.resources.callback(arrays.ready.clear)
    checkpoint.metadata = {k: text for k, text in custom.items() if isinstance(text, str)}
    return checkpoint


class _Arrays:
    """Reads arrays of a checkpoint, small ones together: each time orbax looks at all metadata.

    Attributes:
      ready: Those that were read together with the last one.
    """

    def __init__(
        self,
        path: Path,
        folder: str,
        structure: Any,
        headers: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    ) -> None:
        self._path, self._folder, self._structure = path, folder, structure
        self._names = [*headers]
        self._sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in headers.values()]
        self.ready: dict[str, np.ndarray] = {}

    def read(self, name: str) -> np.ndarray:
        if name not in self.ready:
            self.ready.clear()
            first = stop = self._names.index(name)
            while stop == first or sum(self._sizes[first : stop + 1]) <= _TOGETHER:
                stop += 1
                if stop == len(self._names):
                    break
            self.ready |= self._restored(first, stop)
        return self.ready[name]

    def _restored(self, first: int, stop: int) -> dict[str, np.ndarray]:
        count = self._structure.num_leaves
        wanted = [0 if first <= i < stop else ocp.PLACEHOLDER for i in range(count)]
        how = [ocp.RestoreArgs(restore_type=np.ndarray)] * count
        arguments = ocp.args.PyTreeRestore(
            item=self._structure.unflatten(wanted), restore_args=self._structure.unflatten(how)
        )
        try:
            with _quiet():
                restored = ocp.PyTreeCheckpointer().restore(self._folder, args=arguments)
        except Exception as error:
            where = f"{self._path}: tensor {shown(self._names[first])}"
            raise _damaged(where, error) from error
        leaves = jax.tree.leaves(restored, is_leaf=lambda leaf: leaf is ocp.PLACEHOLDER)
        return {self._names[i]: np.asarray(leaves[i]) for i in range(first, stop)}


def _damaged(where: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{where}: {_line(error)}, expected what orbax reads; write it again")


def _line(error: Exception) -> str:
    return shown(str(error).splitlines()[0][:200] if str(error) else repr(error))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences orbax: it logs errors that it raises, too."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _of_one_item(path: Path) -> Path:
    """The folder with the tree: the path itself, or the only item in a step of a manager."""
    if is_url(path):
        raise CheckpointError(
            f"{path}: an orbax checkpoint, which is not read from a URL; fetch it and give the "
            "folder"
        )
    inside = storage.names_in(path)
    if _METADATA in inside:
        return path
    items = [
        name
        for name, is_folder in inside.items()
        if is_folder and _METADATA in storage.names_in(join(path, name))
    ]
    if len(items) != 1:
        some = ", ".join(map(shown, items)) or "none"
        raise CheckpointError(
            f"{path}: an orbax checkpoint with items {some}, expected one; give the folder of one, "
            f"e.g. {join(path, items[0] if items else 'default')}"
        )
    return join(path, items[0])


def _names(leaves: list[tuple[Any, ...]]) -> list[str]:
    """Names of leaves; a variable of `nnx.state` is a node with nothing but "value" in it.

    The metadata do not say which nodes are variables. In {"query": q, "key": k, "value": v},
    "value" is a name like the others.
    """
    below = collections.Counter(keys[:n] for keys in leaves for n in range(1, len(keys)))

    def is_variable(keys: tuple[Any, ...]) -> bool:
        return below[keys[:-1]] == 1 and jax.tree_util.keystr(keys[-1:], simple=True) == "value"

    return [
        jax.tree_util.keystr(keys[:-1] if is_variable(keys) else keys, simple=True, separator=".")
        for keys in leaves
    ]


def _check_names(path: Path, names: list[str]) -> None:
    if twice := sorted(name for name, count in collections.Counter(names).items() if count > 1):
        raise CheckpointError(
            f"{path}: tensor {shown(twice[0])}: two arrays have this name, keys joined by dots, "
            "expected one; rename one of them"
        )
    known = {*names}
    stored = [name for name in known if name.endswith(".codes") and f"{name[:-5]}scale" in known]
    if stored:
        raise CheckpointError(
            f"{path}: {shown(stored[0])}: codes of a QArray, expected numbers: the model is "
            "quantized already; restore it with orbax and write it with qtoolkit.checkpoints.save"
        )
