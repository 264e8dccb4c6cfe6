"""Orbax checkpoints as sources and targets: arrays are read and written one at a time.

A target is the plain layout in a tree.
"""

import collections
import concurrent.futures
import contextlib
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import DictKey, SequenceKey

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._containers import array_checkpoint, check_unique
from qtoolkit.checkpoints._report import Plan
from qtoolkit.checkpoints._safetensors import SafetensorsFile, write_safetensors
from qtoolkit.checkpoints._storage import Path, is_url, join
from qtoolkit.checkpoints._target import check_folder
from qtoolkit.checkpoints._tensors import NUMPY_DTYPES, Checkpoint, CheckpointError, Entry, shown
from qtoolkit.checkpoints._writing import (
    CONTENT,
    PARTIAL,
    clear_partial,
    partial_name,
    rename_folder,
)

_METADATA = "_METADATA"  # the file of a tree that describes its arrays
# In the custom metadata of what `convert` writes: the names of lists that became dictionaries.
_LISTS = "qtoolkit_lists"
_TOGETHER = 2**24  # bytes that are read at a time: each reading looks at the metadata of all arrays
_SCRATCH = "weights.safetensors"
_Leaves = Sequence[tuple[tuple[Any, ...], Any]]


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
        nodes, _ = jax.tree_util.tree_flatten_with_path(described.tree, is_leaf=_is_empty)
        custom = dict(described.custom_metadata or {})
    except Exception as error:  # whatever orbax, tensorstore and json raise
        raise _damaged(path, error) from error
    paths = _tree_paths([keys for keys, _ in leaves])
    names = [tree_path.name for tree_path in paths]
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
    inside = storage.entries(path)
    if _METADATA in inside:
        return path
    items = [
        name
        for name, is_folder in inside.items()
        if is_folder and _METADATA in storage.entries(join(path, name))
    ]
    if len(items) != 1:
        some = ", ".join(map(shown, items)) or "none"
        raise CheckpointError(
            f"{path}: an orbax checkpoint with items {some}, expected one; give the folder of one, "
            f"e.g. {join(path, items[0] if items else 'default')}"
        )
    return join(path, items[0])


def _tree_paths(leaves: list[tuple[Any, ...]]) -> list[TreePath]:
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
        names = json.loads(custom.get(_LISTS, "[]"))
    except (TypeError, ValueError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _check_names(path: Path, names: list[str]) -> None:
    check_unique(path, names)
    known = {*names}
    stored = [name for name in known if name.endswith(".codes") and f"{name[:-5]}scale" in known]
    if stored:
        raise CheckpointError(
            f"{path}: {shown(stored[0])}: codes of a QArray, expected numbers: the model is "
            "quantized already; restore it with orbax and write it with qtoolkit.checkpoints.save"
        )


# Writing.


def write_orbax(
    path: Path,
    plan: Plan,
    chunks: Iterable[tuple[str, Any]],
    tree: Tree | None,
    *,
    overwrite: bool,
) -> None:
    """Writes a checkpoint of orbax, which appears when it is whole.

    Codes and scales are produced in pieces and interleaved, but orbax asks for whole arrays, in an
    order of its own. So a safetensors file is written next to the target first, from which orbax
    then gets one array at a time. `tree` is the source's; names of tensors that are not in it are
    split at their dots.
    """
    tree = tree or Tree()
    arrays, lists = promised_tree(path, plan, tree)
    # Texts are the source's `metadata`, which the plan has as they are to be.
    others = {k: v for k, v in tree.custom_metadata.items() if not isinstance(v, str)}
    metadata = {**others, **plan.metadata}
    metadata.pop(_LISTS, None)
    if lists:
        metadata[_LISTS] = json.dumps(lists)
    target = os.path.realpath(path)
    partial = partial_name(target)
    with storage.naming(path, PARTIAL):
        clear_partial(target, path, overwrite)
        os.mkdir(partial)
        try:
            scratch = os.path.join(partial, _SCRATCH)
            write_safetensors(scratch, plan.outputs, chunks, overwrite=True)
            with SafetensorsFile(scratch) as file:
                _save(path, os.path.join(partial, CONTENT), arrays, file, metadata)
            check_folder(path, overwrite, of_orbax=True)  # somebody may have written it meanwhile
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        rename_folder(target, path)


class _Promised(np.ndarray):
    """Shape and dtype of an array that is still in a file, under `name`: it has no elements."""

    name: str

    @classmethod
    def of(cls, entry: Entry) -> "_Promised":
        zero = np.zeros((), NUMPY_DTYPES[entry.dtype])
        promised = np.broadcast_to(zero, entry.shape).view(cls)
        promised.name = entry.name
        return promised


class _FromFile(ocp.type_handlers.NumpyHandler):
    """Stores what a file holds of promised arrays, one after the other, until it is stopped."""

    def __init__(self, file: SafetensorsFile, stopped: threading.Event) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._file, self._stopped = file, stopped

    async def serialize(
        self, values: Sequence[_Promised], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        store = super().serialize

        async def one_by_one() -> None:
            for value, info, arg in zip(values, infos, args, strict=True):
                if self._stopped.is_set():
                    return
                for future in await store([self._file.read(value.name)], [info], [arg]):
                    future.result()

        return [ocp.future.CommitFutureAwaitingContractedSignals(one_by_one(), name="qtoolkit")]


def _save(
    path: Path, folder: str, tree: Any, file: SafetensorsFile, metadata: Mapping[str, Any]
) -> None:
    """Writes the checkpoint. When it raises, also an interrupt, no thread is writing any more."""
    stopped = threading.Event()

    def save() -> None:
        arrays = (np.ndarray, _FromFile(file, stopped))
        registry = ocp.type_handlers.create_type_handler_registry(arrays)
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            arguments = ocp.args.PyTreeSave(tree, custom_metadata=dict(metadata))
            checkpointer.save(os.path.abspath(folder), args=arguments)

    # Interrupted in its own `save`, orbax would leave threads that go on writing.
    with _quiet(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(save).result()
        except (OSError, CheckpointError):
            raise
        except Exception as error:  # whatever orbax and tensorstore raise
            # The number of the system's own error, such as that of a full disk.
            if number := re.search(r"os_error_code='(\d+)'", str(error)):
                code = int(number[1])
                raise OSError(code, os.strerror(code), str(path)) from error
            raise CheckpointError(
                f"{path}: orbax did not write it: {_line(error)}; write safetensors instead"
            ) from error
        finally:
            stopped.set()


def promised_tree(path: Path, plan: Plan, tree: Tree) -> tuple[Any, list[str]]:
    """Promised arrays for everything that is written, where they are in the tree.

    Also the names of lists of the source that became dictionaries, because scales are in them.
    """
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    for tensor in plan.tensors:
        where = tree.paths.get(tensor.name, _split(tensor.name))
        for entry in tensor.entries:
            if 0 in entry.shape:
                raise CheckpointError(
                    f"{path}: tensor {shown(entry.name)} has shape {list(entry.shape)}, expected "
                    "elements: orbax stores no empty arrays; write safetensors, without --to orbax"
                )
            keys, suffix = where.keys, entry.name.removeprefix(tensor.name)
            if suffix:
                last = jax.tree_util.keystr(keys[-1:], simple=True)
                keys = (*keys[:-1], DictKey(last + suffix))
            tail = (DictKey("value"),) if where.is_variable else ()
            leaves.append(((*keys, *tail), _Promised.of(entry)))
    for read, (_, leaf) in zip(_tree_paths([keys for keys, _ in leaves]), leaves, strict=True):
        if read.name != leaf.name:
            raise CheckpointError(
                f"{path}: tensor {shown(leaf.name)}: it would be read as {shown(read.name)}, for "
                "the tree has other keys next to it; write safetensors, without --to orbax"
            )
    lists: list[str] = []
    return _nested(path, [*leaves, *tree.empty], tree.lists, lists), lists


def _split(name: str) -> TreePath:
    """The keys of a name, split at its dots unless reading the tree would give another name."""
    parts = name.split(".")
    if "" in parts:
        return TreePath((DictKey(name),))
    if parts[-1] == "value":  # alone in its node it would be read as a variable
        parts[-2:] = [".".join(parts[-2:])]
    return TreePath(tuple(map(DictKey, parts)))


def _nested(
    path: Path, leaves: _Leaves, lists: Collection[str], lost: list[str], above: str = ""
) -> Any:
    """The tree of (keys, leaf): dictionaries, and lists where the source has all of a list.

    Args:
      lists: Names of dictionaries that stand for lists, and become them if they can.
      lost: Takes the names of lists that become dictionaries.
      above: The name of the tree.
    """
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    children: dict[Any, list[tuple[tuple[Any, ...], Any]]] = {}
    for keys, leaf in leaves:
        if not keys:
            raise CheckpointError(
                f"{path}: {shown(above)} is an array and has others below it, which no tree has; "
                "write safetensors, without --to orbax"
            )
        children.setdefault(keys[0], []).append((keys[1:], leaf))
    made = {}
    for key, child in children.items():
        name = jax.tree_util.keystr((key,), simple=True)
        made[name] = _nested(path, child, lists, lost, f"{above}.{name}".lstrip("."))
    if above in lists or any(isinstance(key, SequenceKey) for key in children):
        if made.keys() == {str(i) for i in range(len(made))}:
            return [made[str(i)] for i in range(len(made))]
        lost.append(above)
    return made
