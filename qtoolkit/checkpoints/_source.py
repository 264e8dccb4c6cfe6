"""Folders as Hugging Face has them, and `open_source`, which opens any container. No JAX here."""

import contextlib
import glob
import json
import os
import re
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._base import Source
from qtoolkit.checkpoints._header import MAX_HEADER_BYTES, CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._partial import old_name, plan_in
from qtoolkit.checkpoints._safetensors import SafetensorsFile
from qtoolkit.checkpoints._storage import Kind, Path, check_path, is_url, join, read_file, storage

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# The name that config.json gets beside weights that no loader can read, so that none opens them:
# transformers would take codes for weights without an error.
PARKED_CONFIG = "qtoolkit_config.json"
ADAPTER_CONFIG = "adapter_config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
# A folder in a target behind a URL while it is written: folders cannot be renamed there.
UNDER_WAY = ".qtoolkit-partial"
ORBAX_FILES = {"_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA"}  # in folders of orbax
_MAX_JSON = 256 * 2**20
_SHARD = re.compile(r".*-\d+-of-(\d+)\.safetensors$")
# Never copied: weights in other containers, and files that describe the source's own weights.
_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|gguf|msgpack|h5|onnx|onnx_data|npz|tflite|mlmodel)$"
    r"|\.(safetensors|bin)\.index\.json$|^hf_quant_config\.json$",
    re.IGNORECASE,
)


class Folder(Source):
    """An open folder as Hugging Face has them: safetensors files, an index, `config.json`.

    Attributes:
      path, tensors, metadata: As `Source` says; metadata is that of the first file.
      config: The content of `config.json`, else of `qtoolkit_config.json`; empty without either.
      has_config: Whether there is either.
      modelopt_config: The content of `hf_quant_config.json`, which NVIDIA's modelopt writes; empty
        without it.
      base: The name of its weights without the ending, from the index or the only file: "model" of
        model.safetensors. For several files without an index also "model".
      files: Names of the files with its weights.
      copied: Names of the files that go with the weights, also in folders below ("1_Pooling/
        config.json"): tokenizer, generation config and so on.
      left: Names of what is not copied: hidden files, weights of other kinds.
      is_adapter: Whether the weights are those of an adapter (LoRA), as PEFT loads them.

    Raises:
      CheckpointError: No weights, a file is missing or damaged, the index does not fit the files or
        names one outside of the folder, the weights are of a kind that is not read, or a conversion
        that writes them is not finished.
      OSError: Something cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = storage(path).entries(path)
        if is_under_way(path, found):
            raise CheckpointError(
                f"{path}: a conversion is not finished, expected a whole checkpoint; when all of "
                f"its files are there: qtoolkit finalize {path}"
            )
        names = [name for name, is_folder in found.items() if not is_folder]
        config = next((name for name in (CONFIG, PARKED_CONFIG) if name in names), None)
        self.config = {} if config is None else read_json(join(path, config))
        self.has_config = config is not None
        has_modelopt = MODELOPT_CONFIG in names
        self.modelopt_config = read_json(join(path, MODELOPT_CONFIG)) if has_modelopt else {}
        self.is_adapter = ADAPTER_CONFIG in names
        files, index = weight_files(path, [*found])
        self.files = files
        index_name = _index_in([*found]) or INDEX
        is_one = index is None and len(files) == 1 and not _SHARD.match(files[0])
        named = files[0] if is_one else index_name.removesuffix(".index.json")
        self.base = named.removesuffix(".safetensors")
        made = {*files, INDEX, index_name, CONFIG, PARKED_CONFIG, MODELOPT_CONFIG}
        copied, left = _others(path, found, _modules(path, names))
        self.copied = [name for name in copied if name not in made]
        self.left = [name for name in left if name not in made]
        self._files: dict[str, SafetensorsFile] = {}
        self._home: dict[str, SafetensorsFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            for name in files:
                self._files[name] = SafetensorsFile(join(path, name))
                self._take_tensors(name, index, join(path, index_name))
            _check_index(join(path, index_name), index, self.tensors)
        except BaseException:
            self.close()
            raise
        self.metadata = dict(next(iter(self._files.values())).metadata)

    def _take_tensors(self, name: str, index: Mapping[str, str] | None, index_path: str) -> None:
        """Adds the tensors of an open file: those that the index places there; without it all."""
        file = self._files[name]
        for tensor in file.tensors.values():
            if index is not None and tensor.name not in index:
                raise CheckpointError(
                    f"{index_path}: tensor {shown(tensor.name)} of {shown(name)} is not in it, "
                    "expected every tensor; fetch both again, or delete the index where the "
                    "folder holds all weights"
                )
            if index is not None and index[tensor.name] != name:
                continue  # the index says that another file has it, too, and that one counts
            if tensor.name in self.tensors:
                raise CheckpointError(
                    f"{self.path}: tensor {shown(tensor.name)}: it is in {name} and in another "
                    f"file, expected one, or an index, {INDEX}, that says which"
                )
            self.tensors[tensor.name] = tensor
            self._home[tensor.name] = file

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self._home[name].read_into(name, start, buffer)

    def read(self, name: str) -> np.ndarray:
        return self._home[name].read(name)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      CheckpointError: The file holds no JSON object.
      OSError: It cannot be read.
    """
    data = read_file(path, _MAX_JSON)
    try:
        value = json.loads(data)
    except UnicodeDecodeError as error:  # whose text is about an encoding that JSON may have
        raise CheckpointError(f"{path}: no text, expected a JSON object") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {shown(str(error))}, expected a JSON object") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON {type(value).__name__}, expected an object")
    return value


def is_under_way(path: Path, found: Container[str]) -> bool:
    """Whether a folder with `found` is unfinished. Only URLs: on disk they appear complete."""
    return is_url(path) and UNDER_WAY in found and plan_in(join(path, UNDER_WAY)) is not None


def _others(
    path: Path, found: Mapping[str, bool], modules: set[str], prefix: str = ""
) -> tuple[list[str], list[str]]:
    """Two lists of files in a folder and below: those to copy with the weights, and the others.

    If nothing is copied from a folder below, the second list has the folder instead of its files.

    Args:
      found: The names in the folder `path`/`prefix`, and whether each is a folder.
      modules: Folders below, as seen from `path`, that are copied with their weights.
    """
    copied, left = [], []
    for name, is_folder in found.items():
        relative, where = prefix + name, join(path, *(prefix + name).split("/"))
        # A linked folder may contain itself; reading a pipe could wait for ever.
        is_odd = not is_url(path) and (
            os.path.islink(where) if is_folder else not os.path.isfile(where)
        )
        if is_odd or name.startswith("."):
            left.append(relative)
        elif is_folder:
            more, without = _others(path, storage(path).entries(where), modules, f"{relative}/")
            copied += more
            left += without if more else [relative]
        elif _WEIGHTS.search(name) and prefix.rstrip("/") not in modules:
            left.append(relative)
        else:
            copied.append(relative)
    return copied, left


def _index_in(names: list[str]) -> str | None:
    """The name of the index: that of transformers, else the only other one, as of diffusers."""
    if INDEX in names or "model.safetensors" in names:
        return INDEX if INDEX in names else None
    found = [name for name in names if name.endswith(".safetensors.index.json")]
    return found[0] if len(found) == 1 else None


def _modules(path: Path, names: list[str]) -> set[str]:
    """The folders of a model of sentence-transformers, whose modules have weights of their own."""
    if "modules.json" not in names:
        return set()
    try:
        modules = json.loads(read_file(join(path, "modules.json"), _MAX_JSON))
        return {str(module["path"]) for module in modules if module["path"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{join(path, 'modules.json')}: {shown(str(error))}, expected a list of modules with "
            "their paths; fetch it again"
        ) from error


def weight_files(path: Path, names: list[str]) -> tuple[list[str], dict[str, str] | None]:
    """The safetensors files of a folder in the order of their names, and the map of the index.

    The map is {tensor: file}; None where there is no index. `names` are those in the folder.

    Raises:
      CheckpointError: There are none, one is missing, or nothing says which belong together.
    """
    index_name = _index_in(names)
    if index_name is not None:
        index = _weight_map(path, index_name, names)
        return sorted(set(index.values())), index
    files = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in files:
        return ["model.safetensors"], None
    if not files:
        raise CheckpointError(f"{path}: {_no_weights(path, names)}")
    shards = {name: _SHARD.match(name) for name in files}
    totals = {int(match[1]) for match in shards.values() if match}
    if len(files) > 1 and (None in shards.values() or totals != {len(files)}):
        raise CheckpointError(
            f"{path}: {len(files)} safetensors files and no {INDEX} that says which belong "
            f"together, expected one; fetch it again, or give one file: "
            f"{join(path, files[0])}"
        )
    if len(files) == 1 and totals and totals != {1}:
        raise CheckpointError(
            f"{path}: {shown(files[0])} is one of {totals.pop()} files, and the others and "
            f"{INDEX} are missing; fetch them again"
        )
    return files, None


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
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise CheckpointError(
                f"{where}: file {shown(name)} is not in the folder itself, expected a plain name"
            )
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
    for ending, remedy in (
        (".bin", PICKLE),
        (".pt", PICKLE),
        (".pth", PICKLE),
        (".gguf", "give the GGUF file itself"),
        (".msgpack", "give the msgpack file itself"),
        (".npz", "give the npz file itself"),
    ):
        found = [name for name in names if name.lower().endswith(ending)]
        if found:
            return f"no safetensors in the folder, but {shown(found[0])}; {remedy}"
    # A part of a diffusers model, a snapshot in the cache of Hugging Face's hub.
    for pattern in ("*", os.path.join("snapshots", "*")):
        inside = "" if is_url(path) else os.path.join(glob.escape(os.fspath(path)), pattern)
        if found := sorted(glob.glob(os.path.join(inside, "*.safetensors"))) if inside else []:
            folder = shown(os.path.dirname(found[0]))
            return f"no safetensors files in the folder itself, but in {folder}; give that one"
    return "no safetensors files in the folder, expected at least one"


PICKLE = (
    "a pickle, which may run any code when it is read, is refused; convert it where you trust it: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
)


def _check_index(
    where: Path, index: Mapping[str, str] | None, tensors: Mapping[str, TensorInfo]
) -> None:
    absent = [name for name in index or {} if name not in tensors]
    if absent:
        assert index is not None
        raise CheckpointError(
            f"{where}: tensor {shown(absent[0])} "
            + (f"and {len(absent) - 1} more are" if len(absent) > 1 else "is")
            + f" not in {shown(index[absent[0]])}, where it says; fetch both again"
        )


def is_orbax(path: Path) -> bool:
    """Whether a folder is a checkpoint of orbax, or a step of one."""
    place = storage(path)
    return place.kind(path) == "folder" and not ORBAX_FILES.isdisjoint(place.entries(path))


def open_source(path: Path) -> Source:
    """Opens a checkpoint of any kind that is read. The content tells the kind, not the name.

    Args:
      path: A folder of Hugging Face's or of orbax, a safetensors file, GGUF, npz, or Flax's
        msgpack. Folders of the first kind and safetensors may also be URLs: "s3://bucket/model".

    Returns:
      A context manager with `tensors`, by name: dtype, shape and place of each. No weight has been
      read yet.

    Raises:
      CheckpointError: It is none of them, or damaged; the message says what it is and what to do.
      OSError: It cannot be read.
      ImportError: A package that reads it is missing.

    Examples:
      >>> np.savez("model.npz", kernel=np.ones((4, 2), np.float32))
      >>> with qt.checkpoints.open_source("model.npz") as source:
      ...     print(source.tensors["kernel"].dtype, source.tensors["kernel"].shape)
      F32 (4, 2)
    """
    return opened_as(kind_of(path), path)


def kind_of(path: Path) -> str:
    """The container of a checkpoint: "folder", "orbax", or what `_kind_of_file` says."""
    what = kind_of_source(path, "path")
    if what == "folder":
        return "orbax" if is_orbax(path) else "folder"
    if what == "file":
        return _kind_of_file(path)
    return "safetensors"  # missing, or a pipe: `SafetensorsFile` says so


def opened_as(kind: str, path: Path) -> Source:
    """Opens a checkpoint of the kind that `kind_of` has found."""
    if kind == "folder":
        return Folder(path)
    if kind == "safetensors":
        return SafetensorsFile(path)
    if kind == "orbax":
        from qtoolkit.checkpoints._orbax import OrbaxFolder

        return OrbaxFolder(path)
    if is_url(path):
        raise CheckpointError(
            f"{path}: {kind}, which is not read from a URL; fetch it and give the file"
        )
    if kind == "gguf":
        from qtoolkit.checkpoints._gguf import GgufFile

        return GgufFile(path)
    if kind == "npz":
        from qtoolkit.checkpoints._npz import NpzFile

        return NpzFile(path)
    from qtoolkit.checkpoints._msgpack import MsgpackFile

    return MsgpackFile(path)


def kind_of_source(path: Path, argument: str) -> Kind:
    """What is at the path of a source.

    Raises:
      CheckpointError: Nothing, since a run was killed in the moment in which it replaced it.
      TypeError: It is no path; the message says that `argument` is.
    """
    check_path(path, argument)
    kind = storage(path).kind(path)
    if not kind and not is_url(path):
        old = old_name(os.path.realpath(path))
        if os.path.isdir(old):
            raise CheckpointError(
                f"{path}: a run that was to replace it was killed, and it is {old} now; run that "
                "again, or rename it"
            )
    return kind


def _kind_of_file(path: Path) -> str:
    """Whether a file is "gguf", "npz", "msgpack", or else "safetensors", by its first bytes.

    Raises:
      CheckpointError: It holds weights or text of another kind, such as a pickle.
    """
    with contextlib.suppress(PermissionError):
        return _sniffed(path, read_file(path, 512, whole=False))
    return "safetensors"


def _sniffed(path: Path, start: bytes) -> str:
    """The kind of a file from its first bytes; "safetensors" also if they tell nothing."""
    length = int.from_bytes(start[:8], "little")
    if len(start) > 8 and start[8:9] == b"{" and length <= MAX_HEADER_BYTES:
        return "safetensors"
    if start[:4] == b"GGUF":
        return "gguf"
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):  # the second: an empty archive
        return "npz"
    for magic, message in _OTHERS:
        if start.startswith(magic):
            raise CheckpointError(f"{path}: {message}")
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise CheckpointError(f"{path}: {PICKLE}")
    text = start.lstrip()[:1]
    if text in (b"{", b"["):
        raise CheckpointError(f"{path}: {_json_remedy(path)}")
    if text == b"<":
        remedy = "the download failed: fetch it again"
        if is_url(path):  # an HTTP server shows a folder as a page
            remedy = "give the URL of a safetensors file, or fetch the folder and give that"
        raise CheckpointError(f"{path}: a web page or XML, expected weights; {remedy}")
    if start[:1] and (0x81 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF)):
        return "msgpack"
    return "safetensors"


def _json_remedy(path: Path) -> str:
    folder, _, name = (str(path) if is_url(path) else os.path.abspath(path)).rpartition("/")
    what = "the index of a sharded checkpoint" if name.endswith(".index.json") else "JSON"
    return f"{what}, which holds no weights; give the folder instead: {folder}"


_DOCUMENT = (
    "{}, no checkpoint, expected safetensors, GGUF, npz or Flax's msgpack; give the file or folder "
    "of the weights"
)
_OTHERS = (
    (b"\x89PNG\r\n", _DOCUMENT.format("a PNG image")),
    (b"\xff\xd8\xff", _DOCUMENT.format("a JPEG image")),
    (b"GIF8", _DOCUMENT.format("a GIF image")),
    (b"%PDF", _DOCUMENT.format("a PDF document")),
    (b"\x89HDF\r\n", "HDF5 (Keras), expected safetensors; write the arrays with numpy.savez"),
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the weights themselves; fetch them: git lfs pull",
    ),
    (b"\x1f\x8b", "compressed with gzip; unpack it first: gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; unpack it first: unzstd"),
    (b"\xfd7zXZ", "compressed with xz; unpack it first: unxz"),
    (b"Rar!", "a RAR archive; unpack it first"),
    (b"\x93NUMPY", "one NumPy array, expected npz; write it with numpy.savez(FILE, name=array)"),
)
