"""Orbax checkpoints as sources: arrays are read one at a time, small ones together."""

import collections
import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from qtoolkit.checkpoints._arrays import array_checkpoint, check_unique
from qtoolkit.checkpoints._paths import Path, is_url, join, storage
from qtoolkit.checkpoints._tensors import Checkpoint, CheckpointError, shown

_METADATA = "_METADATA"  # beside the arrays of a tree
# In the custom metadata of what `convert` writes: the names of lists that became dictionaries.
LISTS_KEY = "qtoolkit_lists"
_TOGETHER = 2**24  # bytes that are read at a time: each reading looks at the metadata of all arrays


class TreePath(NamedTuple):
    """Where an array is in a tree.

    Attributes:
      keys: As `jax.tree_util` has them, without the last one of a variable.
      is_variable: Whether "value" follows them: `nnx.state` has its arrays under that key.
    """

    keys: tuple[Any, ...]
    is_variable: bool = False

    @property
    def name(self) -> str:
        return jax.tree_util.keystr(self.keys, simple=True, separator=".")


class Tree(NamedTuple):
    """The tree of a checkpoint, without its arrays.

    Attributes:
      paths: Where each array is, by name.
      empty: The keys of what has no arrays, and what is there: None, or an empty container.
      lists: The names of dictionaries with keys "0", "1" and so on that stand for lists.
      custom_metadata: The JSON that the checkpoint was saved with.
    """

    paths: Mapping[str, TreePath] = {}
    empty: Sequence[tuple[tuple[Any, ...], Any]] = ()
    lists: frozenset[str] = frozenset()
    custom_metadata: Mapping[str, Any] = {}


def open_orbax(path: Path) -> Checkpoint:
    """Opens a checkpoint of `StandardCheckpointer`, `PyTreeCheckpointer` or `CheckpointManager`.

    Names are paths in the tree, joined by "."; of a variable of `nnx.state` that of the variable.
    Texts in the checkpoint's custom metadata are its `metadata`.

    Args:
      path: Of the checkpoint, or of a step of a manager, with one item in it.

    Raises:
      CheckpointError: It is damaged, holds several items or what is no array, or QArrays.
      ImportError: orbax is missing.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            f"{path}: an orbax checkpoint, which orbax reads; pip install orbax-checkpoint"
        ) from error
    folder = os.path.abspath(_of_one_item(path))  # orbax takes no other
    structure: Any
    try:
        with quiet():  # a step's item has no metadata of its own, which it warns of
            described = ocp.PyTreeCheckpointer().metadata(folder).item_metadata
        if described is None:
            raise ValueError("arrays are missing")
        leaves, structure = jax.tree_util.tree_flatten_with_path(described.tree)
        nodes, _ = jax.tree_util.tree_flatten_with_path(described.tree, is_leaf=_is_empty)
        custom = dict(described.custom_metadata or {})
    except Exception as error:  # whatever orbax, tensorstore and json raise
        raise _damaged(path, error) from error
    paths = tree_paths([keys for keys, _ in leaves])
    names = [tree_path.name for tree_path in paths]
    _check_names(path, names)
    _check_arrays(path, names, [leaf for _, leaf in leaves])
    headers = {
        name: (np.dtype(leaf.dtype), tuple(leaf.shape))
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }
    arrays = _Arrays(path, folder, structure, headers)
    checkpoint = array_checkpoint(path, headers, arrays.read)
    checkpoint.opened.callback(arrays.ready.clear)
    checkpoint.metadata = {k: text for k, text in custom.items() if isinstance(text, str)}
    checkpoint.tree = Tree(
        paths=dict(zip(names, paths, strict=True)),
        empty=[(keys, node) for keys, node in nodes if _is_empty(node)],
        lists=frozenset(_lists(custom)),
        custom_metadata=custom,
    )
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
        self._index = {name: i for i, name in enumerate(headers)}
        self._sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in headers.values()]
        self.ready: dict[str, np.ndarray] = {}

    def read(self, name: str) -> np.ndarray:
        if name not in self.ready:
            self.ready.clear()
            names = [*self._index][self._index[name] :]
            sizes = itertools.accumulate(self._sizes[self._index[name] :])
            some = [
                n for n, size in zip(names, sizes, strict=True) if n == name or size <= _TOGETHER
            ]
            self.ready |= self._restored(some)
        return self.ready[name]

    def _restored(self, names: list[str]) -> dict[str, np.ndarray]:
        import orbax.checkpoint as ocp

        count = self._structure.num_leaves
        wanted = [ocp.PLACEHOLDER] * count
        for name in names:
            wanted[self._index[name]] = 0
        how = [ocp.RestoreArgs(restore_type=np.ndarray)] * count
        arguments = ocp.args.PyTreeRestore(
            item=self._structure.unflatten(wanted), restore_args=self._structure.unflatten(how)
        )
        try:
            with quiet():
                restored = ocp.PyTreeCheckpointer().restore(self._folder, args=arguments)
        except Exception as error:
            raise _damaged(f"{self._path}: tensor {shown(names[0])}", error) from error
        leaves = jax.tree.leaves(restored, is_leaf=lambda leaf: leaf is ocp.PLACEHOLDER)
        return {name: np.asarray(leaves[self._index[name]]) for name in names}


def _damaged(where: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{where}: {shown(str(error).splitlines()[0][:200] if str(error) else repr(error))}, "
        "expected what orbax reads; write it again"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what orbax logs: what goes wrong is raised."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _of_one_item(path: Path) -> Path:
    """The folder with the tree: itself, or that of the only item of a manager's step."""
    if is_url(path):
        raise CheckpointError(
            f"{path}: an orbax checkpoint, which is not read from a URL; fetch it and give the "
            "folder"
        )
    found = storage(path).entries(path)
    if _METADATA in found:
        return path
    items = [
        name
        for name, is_folder in found.items()
        if is_folder and _METADATA in storage(path).entries(join(path, name))
    ]
    if len(items) != 1:
        some = ", ".join(map(shown, items)) or "none"
        raise CheckpointError(
            f"{path}: an orbax checkpoint with items {some}, expected one; give the folder of one, "
            f"e.g. {join(path, items[0] if items else 'default')}"
        )
    return join(path, items[0])


def tree_paths(leaves: list[tuple[Any, ...]]) -> list[TreePath]:
    """Paths of leaves; a variable of `nnx.state` is a node with nothing but "value" in it.

    The metadata do not say which nodes are variables. In {"query": q, "key": k, "value": v},
    "value" is a name like the others.
    """
    below = collections.Counter(keys[:n] for keys in leaves for n in range(1, len(keys)))

    def is_variable(keys: tuple[Any, ...]) -> bool:
        return below[keys[:-1]] == 1 and jax.tree_util.keystr(keys[-1:], simple=True) == "value"

    return [
        TreePath(keys[:-1], is_variable=True) if is_variable(keys) else TreePath(keys)
        for keys in leaves
    ]


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def _lists(custom: Mapping[str, Any]) -> list[str]:
    try:
        found = json.loads(custom.get(LISTS_KEY, "[]"))
    except (TypeError, ValueError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _check_arrays(path: Path, names: list[str], leaves: list[Any]) -> None:
    for name, leaf in zip(names, leaves, strict=True):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            what = type(leaf).__name__.removesuffix("Metadata").lower()
            raise CheckpointError(
                f"{path}: {shown(name)}: a {shown(what)}, expected an array; save the arrays alone"
            )


def _check_names(path: Path, names: list[str]) -> None:
    check_unique(path, names)
    known = {*names}
    stored = [name for name in known if name.endswith(".codes") and f"{name[:-5]}scale" in known]
    if stored:
        raise CheckpointError(
            f"{path}: {shown(stored[0])}: codes of a QArray, expected numbers: the model is "
            "quantized already; restore it with orbax and write it with qtoolkit.checkpoints.save"
        )
