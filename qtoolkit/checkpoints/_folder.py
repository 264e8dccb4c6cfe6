"""The files of a checkpoint folder, as Hugging Face has them, and checks of paths. No JAX."""

import errno
import os
import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

from qtoolkit.checkpoints._header import CheckpointError, listed, shown
from qtoolkit.checkpoints._plan import Plan, TensorPlan
from qtoolkit.checkpoints._safetensors import exists_already
from qtoolkit.checkpoints._source import is_under_way, weight_files
from qtoolkit.checkpoints._storage import Path, identity, is_url, join, storage
from qtoolkit.checkpoints.layouts._layout import WIDE

# Files that belong to a checkpoint beside its weights. --overwrite may remove these with it, and
# refuses to remove anything else.
_BESIDE_WEIGHTS = re.compile(
    r"\w*config\w*\.json|(tokenizer|special_tokens_map|added_tokens|vocab|modules|params)\.json"
    r"|chat_template\.(json|jinja)|.+\.safetensors\.index\.json|(merges|vocab)\.txt"
    r"|(tokenizer|spiece|sentencepiece(\.bpe)?)\.model|\.gitattributes"
    r"|(configuration|modeling|processing|image_processing|tokenization)_\w+\.py"
    r"|(README|LICENSE|NOTICE|USE_POLICY)(\.(md|txt))?"
)
_CONFIGS = ("quantization_config", "compression_config")


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


def new_config(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """config.json of the target: that of the source, changed to describe the planned weights."""
    new = {key: value for key, value in config.items() if key not in _CONFIGS}
    if isinstance(new.get("text_config"), dict):
        new["text_config"] = {k: v for k, v in new["text_config"].items() if k not in _CONFIGS}
    # Loaders build the model in the dtype that the config names, so it must be that of the wide
    # weights. If all weights are dequantized, those that have the dtype already count as well.
    only_wide = plan.dequantizes and all(t.action != "quantize" for t in plan.tensors)
    wide = {
        tensor.dtype
        for tensor in plan.tensors
        if tensor.action == "cast" or (only_wide and tensor.dtype in WIDE)
    }
    for part in (new, new.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if len(wide) == 1 and isinstance(part, dict) and isinstance(part.get(key), str):
                part[key] = WIDE[next(iter(wide))].name
    if plan.quantization_config:
        new["quantization_config"] = dict(plan.quantization_config)
    return new
