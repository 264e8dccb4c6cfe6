"""Folders as Hugging Face has them: safetensors files, an index, config.json, files to copy."""

import contextlib
import glob
import json
import os
import re
from collections.abc import Container, Mapping
from typing import Any

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint, FolderFiles, Tensor, same_bytes
from qtoolkit.checkpoints._safetensors import open_safetensors
from qtoolkit.checkpoints._storage import Path, is_url, join
from qtoolkit.checkpoints._tensors import CheckpointError, listed, shown
from qtoolkit.checkpoints._writing import manifest_in

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# The name that config.json gets in a folder of weights that no loader can read, so that none does:
# transformers would take codes for weights without an error.
PARKED_CONFIG = "qtoolkit_config.json"
ADAPTER_CONFIG = "adapter_config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
# A folder in a target behind a URL while it is written: folders cannot be renamed there.
UNDER_WAY = ".qtoolkit-partial"
_MAX_JSON = 256 * 2**20
_SHARD = re.compile(r"(.*)-\d+-of-(\d+)\.safetensors$")
# Never copied: weights in other containers, and files that describe the source's own weights.
_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|gguf|msgpack|h5|onnx|onnx_data|npz|tflite|mlmodel)$"
    r"|\.(safetensors|bin)\.index\.json$|^hf_quant_config\.json$",
    re.IGNORECASE,
)


def open_folder(path: Path) -> Checkpoint:
    """Opens a folder of Hugging Face's. `metadata` is that of the first file."""
    inside = storage.names_in(path)
    if is_under_way(path, inside):
        raise CheckpointError(
            f"{path}: a conversion is not finished, expected a whole checkpoint; when all of "
            f"its files are there: qtoolkit finalize {path}"
        )
    names = [name for name, is_folder in inside.items() if not is_folder]
    config = next((name for name in (CONFIG, PARKED_CONFIG) if name in names), None)
    content = {} if config is None else read_json(join(path, config))
    modelopt = read_json(join(path, MODELOPT_CONFIG)) if MODELOPT_CONFIG in names else {}
    weights, index = weight_files(path, [*inside])
    index_name = _index_in([*inside]) or INDEX
    is_one = index is None and len(weights) == 1 and not _SHARD.match(weights[0])
    named = weights[0] if is_one else index_name.removesuffix(".index.json")
    generated = {*weights, INDEX, index_name, CONFIG, PARKED_CONFIG, MODELOPT_CONFIG}
    copied, not_copied = _others(path, inside, _modules(path, names))
    with contextlib.ExitStack() as opening:
        files = {
            name: opening.enter_context(open_safetensors(join(path, name))) for name in weights
        }
        tensors = _tensors(path, files, index, join(path, index_name))
        opened = opening.pop_all()
    return Checkpoint(
        path=path,
        tensors=tensors,
        metadata=dict(next(iter(files.values())).metadata),
        config=content,
        folder=FolderFiles(
            has_config=config is not None,
            modelopt_config=modelopt,
            weights_name=named.removesuffix(".safetensors"),
            weights=weights,
            copied=[name for name in copied if name not in generated],
            not_copied=[name for name in not_copied if name not in generated],
            is_adapter=ADAPTER_CONFIG in names,
        ),
        resources=opened,
    )


def _tensors(
    path: Path, files: Mapping[str, Checkpoint], index: Mapping[str, str] | None, index_path: str
) -> dict[str, Tensor]:
    """The tensors of open files. One that is in two files must be the same in both."""
    tensors: dict[str, Tensor] = {}
    place_of: dict[str, str] = {}
    for file_name, file in files.items():
        for name, tensor in file.tensors.items():
            if index is not None and name not in index:
                raise CheckpointError(
                    f"{index_path}: tensor {shown(name)} of {shown(file_name)} is not in it, "
                    "expected every tensor; fetch both again, or delete the index where the "
                    "folder holds all weights"
                )
            if name in tensors and not same_bytes(tensors[name], tensor):
                raise CheckpointError(
                    f"{path}: tensor {shown(name)}: other values in {shown(place_of[name])} than "
                    f"in {shown(file_name)}, expected it in one file, because loaders differ in "
                    "which of the two they take; remove one of them"
                )
            if name not in tensors or (index is not None and index[name] == file_name):
                tensors[name], place_of[name] = tensor, file_name
    index = index or {}
    if absent := [name for name, file_name in index.items() if place_of.get(name) != file_name]:
        raise CheckpointError(
            f"{index_path}: not in {shown(index[absent[0]])}, where it says: tensor "
            f"{listed(map(shown, absent), 1)}; fetch both again"
        )
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    data = storage.read_file(path, _MAX_JSON)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {shown(str(error))}, expected a JSON object") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON {type(value).__name__}, expected an object")
    return value


def is_under_way(path: Path, names: Container[str]) -> bool:
    """Whether a folder with these names is unfinished. Only URLs: on disk they appear complete."""
    return is_url(path) and UNDER_WAY in names and manifest_in(join(path, UNDER_WAY)) is not None


def _others(
    path: Path, inside: Mapping[str, bool], modules: set[str], prefix: str = ""
) -> tuple[list[str], list[str]]:
    """Two lists of files in a folder and below: those to copy with the weights, and the others.

    If nothing is copied from a folder below, the second list has the folder instead of its files.
    Of folders in `modules`, as seen from `path`, weights are copied, too.
    """
    copied, not_copied = [], []
    for name, is_folder in inside.items():
        relative, where = prefix + name, join(path, *(prefix + name).split("/"))
        # A linked folder may contain itself; reading a pipe could wait for ever.
        is_odd = not is_url(path) and (
            os.path.islink(where) if is_folder else not os.path.isfile(where)
        )
        if is_odd or name.startswith("."):
            not_copied.append(relative)
        elif is_folder:
            more, without = _others(path, storage.names_in(where), modules, f"{relative}/")
            copied += more
            not_copied += without if more else [relative]
        elif _WEIGHTS.search(name) and prefix.rstrip("/") not in modules:
            not_copied.append(relative)
        else:
            copied.append(relative)
    return copied, not_copied


def _index_in(names: list[str]) -> str | None:
    """The name of the index: that of transformers, else the only other one, as of diffusers."""
    if INDEX in names or "model.safetensors" in names:
        return INDEX if INDEX in names else None
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    return indexes[0] if len(indexes) == 1 else None


def _modules(path: Path, names: list[str]) -> set[str]:
    """The folders of a model of sentence-transformers, whose modules have weights of their own."""
    if "modules.json" in names:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            modules = json.loads(storage.read_file(join(path, "modules.json"), _MAX_JSON))
            return {str(module["path"]) for module in modules if module["path"]}
    return set()


def weight_files(path: Path, names: list[str]) -> tuple[list[str], dict[str, str] | None]:
    """The safetensors files of a folder in the order of their names, and {tensor: file} of the
    index; None where there is no index. `names` are those in the folder.
    """
    index_name = _index_in(names)
    if index_name is not None:
        index = _weight_map(path, index_name, names)
        _check_one_set(path, names, sorted(set(index.values())), index_name)
        return sorted(set(index.values())), index
    files = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in files:
        _check_one_set(path, names, ["model.safetensors"], "model.safetensors")
        return ["model.safetensors"], None
    if not files:
        raise CheckpointError(f"{path}: {_no_weights(path, names)}")
    shards = [_SHARD.match(name) for name in files]
    totals = {int(match[2]) for match in shards if match}
    if len(files) == 1 and totals and totals != {1}:
        raise CheckpointError(
            f"{path}: {shown(files[0])} is one of {totals.pop()} files, and the others and "
            f"{INDEX} are missing; fetch them again"
        )
    stems = {match[1] for match in shards if match}
    if len(files) > 1 and (None in shards or totals != {len(files)} or len(stems) > 1):
        raise CheckpointError(
            f"{path}: {len(files)} safetensors files and no {INDEX} that says which belong "
            f"together, expected one; fetch it again, or give one file: {join(path, files[0])}"
        )
    return files, None


def _check_one_set(path: Path, names: list[str], files: list[str], chosen: str) -> None:
    """Raises if the folder has a second set of weights of the same name.

    `chosen` is the index or the only file by which `files` are the weights. If there are both
    model.safetensors and an index of other files, transformers loads the first, vLLM the others.
    """
    stem = chosen.partition(".safetensors")[0]

    def is_of_stem(name: str) -> bool:
        match = _SHARD.match(name)
        return name == f"{stem}.safetensors" or (match is not None and match[1] == stem)

    if others := sorted(name for name in names if is_of_stem(name) and name not in files):
        by = "" if chosen in files else f" by {shown(chosen)}"
        raise CheckpointError(
            f"{path}: two sets of weights, {shown(files[0])}{by} and "
            f"{listed(map(shown, others), 1)}, expected one, because loaders differ in which they "
            "take; move the files of one set to another folder"
        )


def _weight_map(path: Path, index_name: str, names: list[str]) -> dict[str, str]:
    """{tensor: file} of an index; raises if a file is not in the folder."""
    where = join(path, index_name)
    index = read_json(where).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(v, str) for v in index.values()):
        raise CheckpointError(
            f"{where}: no weight_map of names and files; fetch it again, or delete it where "
            "the folder holds all weights"
        )
    for name in sorted(set(index.values())):
        if name not in names:
            raise CheckpointError(
                f"{where}: file {shown(name)} is missing in {path}; fetch it again"
            )
    return index


def _no_weights(path: Path, names: list[str]) -> str:
    """The message for a folder without safetensors: what it holds instead, and what to do."""
    steps = [name for name in names if name.isdigit()]
    if steps:
        return (
            f"no weights in the folder, but {shown(steps[-1])}, as orbax names steps; give one of "
            f"them: {join(path, steps[-1])}"
        )
    remedies = {".gguf": "give the file itself", ".msgpack": NOT_READ, ".npz": NOT_READ}
    for ending in (".bin", ".pt", ".pth", *remedies):
        file = next((name for name in names if name.lower().endswith(ending)), "")
        if file:
            remedy = remedies.get(ending, PICKLE)
            return f"no safetensors in the folder, but {shown(file)}; {remedy}"
    # A part of a diffusers model, a snapshot in the cache of Hugging Face's hub.
    for pattern in ("*", os.path.join("snapshots", "*")):
        inside = "" if is_url(path) else os.path.join(glob.escape(os.fspath(path)), pattern)
        if inner := sorted(glob.glob(os.path.join(inside, "*.safetensors"))) if inside else []:
            folder = shown(os.path.dirname(inner[0]))
            return f"no safetensors files in the folder itself, but in {folder}; give that one"
    return "no safetensors files in the folder, expected at least one"


NOT_READ = (
    "which is not read; write its arrays first: qtoolkit.checkpoints.save('model.safetensors', "
    "ARRAYS_BY_NAME)"
)
PICKLE = (
    "a pickle, which may run any code when it is read, is refused; convert it where you trust it: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
)
