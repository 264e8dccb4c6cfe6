"""Orbax checkpoints as targets: the plain layout in a tree, written one array at a time."""

import concurrent.futures
import json
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.tree_util import DictKey, SequenceKey

from qtoolkit.checkpoints._orbax import LISTS_KEY, Tree, TreePath, quiet, tree_paths
from qtoolkit.checkpoints._paths import Path, naming
from qtoolkit.checkpoints._report import Plan
from qtoolkit.checkpoints._safetensors import SafetensorsFile, write_safetensors
from qtoolkit.checkpoints._target import check_orbax_folder
from qtoolkit.checkpoints._tensors import NUMPY_DTYPES, CheckpointError, Entry, shown
from qtoolkit.checkpoints._writing import (
    PARTIAL,
    clear_partial,
    partial_name,
    replace_folder,
    replaced_name,
    whole,
)

_SCRATCH = "weights.safetensors"
_Leaves = Sequence[tuple[tuple[Any, ...], Any]]


def write_orbax(
    path: Path,
    plan: Plan,
    chunks: Iterable[tuple[str, Any]],
    tree: Tree,
    *,
    overwrite: bool,
) -> None:
    """Writes a checkpoint of orbax, which appears when it is whole.

    Codes and scales are produced in pieces and interleaved, but orbax asks for whole arrays, in an
    order of its own. So a safetensors file is written beside the target first, from which orbax
    then gets one array at a time. `tree` is the source's; names of tensors that are not in it are
    split at their dots.

    Raises:
      CheckpointError: `path` exists; an array is empty, which orbax does not store, or two paths
        exclude each other. Nothing is left.
      OSError: It cannot be written.
    """
    arrays, lists = promised_tree(path, plan, tree)
    # Texts are the source's `metadata`, which the plan has as they are to be.
    others = {k: v for k, v in tree.custom_metadata.items() if not isinstance(v, str)}
    metadata = {**others, **plan.metadata}
    metadata.pop(LISTS_KEY, None)
    if lists:
        metadata[LISTS_KEY] = json.dumps(lists)
    target = os.path.realpath(path)
    partial = partial_name(target)
    with naming(path, PARTIAL):
        clear_partial(target, path, overwrite)
        os.mkdir(partial)
        try:
            scratch = os.path.join(partial, _SCRATCH)
            write_safetensors(scratch, plan.outputs, chunks, overwrite=True)
            content = os.path.join(partial, "checkpoint")
            with SafetensorsFile(scratch) as file:
                _save(path, content, arrays, file, metadata)
            check_orbax_folder(path, overwrite)  # somebody else may have written it meanwhile
            replace_folder(content, target, path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        with whole(str(path)):
            shutil.rmtree(replaced_name(target), ignore_errors=True)
            shutil.rmtree(partial)


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
    with quiet(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(save).result()
        except (OSError, CheckpointError):
            raise
        except Exception as error:  # whatever orbax and tensorstore raise
            raise _failed(path, error) from error
        finally:
            stopped.set()


def _failed(path: Path, error: Exception) -> Exception:
    """The system's own error where tensorstore names its number, such as that of a full disk."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if found:
        return OSError(int(found[1]), os.strerror(int(found[1])), str(path))
    line = shown(str(error).splitlines()[0][:200] if str(error) else repr(error))
    return CheckpointError(f"{path}: orbax did not write it: {line}; write safetensors instead")


def promised_tree(path: Path, plan: Plan, tree: Tree) -> tuple[Any, list[str]]:
    """Promised arrays for everything that is written, where they are in the tree.

    Also the names of lists of the source that became dictionaries, because scales are in them.

    Raises:
      CheckpointError: The tree of a plan is none, or orbax cannot store it.
    """
    leaves: list[tuple[tuple[Any, ...], Any]] = []
    for tensor in plan.tensors:
        place = tree.paths.get(tensor.name, _split(tensor.name))
        for entry in tensor.entries:
            if 0 in entry.shape:
                raise CheckpointError(
                    f"{path}: tensor {shown(entry.name)} has shape {list(entry.shape)}, expected "
                    "elements: orbax stores no empty arrays; write safetensors, without --to orbax"
                )
            keys = _with_suffix(place.keys, entry.name.removeprefix(tensor.name))
            tail = (DictKey("value"),) if place.is_variable else ()
            leaves.append(((*keys, *tail), _Promised.of(entry)))
    for read, (_, leaf) in zip(tree_paths([keys for keys, _ in leaves]), leaves, strict=True):
        if read.name != leaf.name:
            raise CheckpointError(
                f"{path}: tensor {shown(leaf.name)}: it would be read as {shown(read.name)}, for "
                "the tree has other keys beside it; write safetensors, without --to orbax"
            )
    lists: list[str] = []
    return _nested(path, [*leaves, *tree.empty], tree.lists, lists), lists


def _split(name: str) -> TreePath:
    """The keys in a name; what it cannot be told from when it is read again stays one key."""
    parts = name.split(".")
    if "" in parts:
        return TreePath((DictKey(name),))
    if parts[-1] == "value":  # alone in its node it would be read as a variable
        parts[-2:] = [".".join(parts[-2:])]
    return TreePath(tuple(map(DictKey, parts)))


def _with_suffix(keys: tuple[Any, ...], suffix: str) -> tuple[Any, ...]:
    last = jax.tree_util.keystr(keys[-1:], simple=True)
    return (*keys[:-1], DictKey(last + suffix)) if suffix else keys


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
