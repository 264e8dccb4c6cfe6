"""What loaders are known to misread, refused or reported before anything is written. No JAX."""

import re
from collections.abc import Iterable

from qtoolkit.checkpoints._folder import ADAPTER_CONFIG, CONFIG
from qtoolkit.checkpoints._paths import join
from qtoolkit.checkpoints._report import Plan, TensorPlan
from qtoolkit.checkpoints._roles import module_of
from qtoolkit.checkpoints._tensors import Checkpoint, CheckpointError, shown
from qtoolkit.checkpoints.layouts import Scheme

DIFFUSERS = "_class_name"  # in config.json of its models
_OF_GGUF = re.compile(r"^(v\.|a\.|enc\.|dec\.)?blk\.\d+\.")  # llama.cpp's names of layers


def check_loads(source: Checkpoint, plan: Plan) -> None:
    """Raises where loaders would take the codes in a folder for weights, without an error."""
    folder, path = source.folder, source.path
    if folder is None or not any(tensor.encoding is not None for tensor in plan.tensors):
        return
    itself = ""
    if len(folder.weights) == 1:
        itself = f", or give the file itself: {join(path, folder.weights[0])}"
    if folder.is_adapter:
        raise CheckpointError(
            f"{path}: the weights of an adapter ({ADAPTER_CONFIG}), and PEFT would load "
            f"their codes as weights; merge it into its model first (merge_and_unload){itself}"
        )
    if plan.quantization_config and DIFFUSERS in source.config:
        raise CheckpointError(
            f"{path}: a model of diffusers, by {DIFFUSERS} in {CONFIG}, which loads no "
            f"weights in layout {plan.layout}; use --layout plain, which `qtoolkit dequantize` "
            f"undoes{itself}"
        )
    if plan.quantization_config and not folder.has_config:
        raise CheckpointError(
            f"{path}: no {CONFIG}, and loaders of layout {plan.layout} learn from it that "
            f"weights are codes; fetch it, use --layout plain{itself}"
        )


def check_known(source: Checkpoint, plan: Plan) -> None:
    """Raises where weights have llama.cpp's names, which loaders of the layout do not know."""
    if not plan.quantization_config:
        return
    for tensor in plan.tensors:
        if tensor.encoding is not None and _OF_GGUF.search(tensor.name):
            raise CheckpointError(
                f"{source.path}: tensor {shown(tensor.name)}: named as in GGUF, and no loader of "
                f"layout {plan.layout} finds it; convert the folder that the GGUF was made from, "
                "or what transformers makes of it: from_pretrained(FOLDER, gguf_file=NAME) and "
                "save_pretrained(SRC); or use --layout plain"
            )


def used_schemes(tensors: Iterable[TensorPlan]) -> dict[Scheme, list[str]]:
    """The schemes in use and the modules of each."""
    used: dict[Scheme, list[str]] = {}
    for tensor in tensors:
        if tensor.scheme is not None:
            used.setdefault(tensor.scheme, []).append(module_of(tensor.name))
    return used


def kept_modules(tensors: Iterable[TensorPlan]) -> list[str]:
    """Modules with a matrix that is not quantized, and `lm_head`, which may have no tensor."""
    kept = [
        module_of(tensor.name)
        for tensor in tensors
        if tensor.action != "quantize"
        and len(tensor.source.shape) == 2
        and tensor.name.endswith(".weight")
    ]
    quantized = {module_of(t.name) for t in tensors if t.action == "quantize"}
    if "lm_head" not in quantized and "lm_head" not in kept:
        kept.append("lm_head")
    return kept


def check_names(source: Checkpoint, tensors: Iterable[TensorPlan]) -> None:
    """Raises where two entries of the target would have one name."""
    taken: dict[str, str] = {}
    for tensor in tensors:
        for entry in tensor.entries:
            if entry.name in taken or (entry.name != tensor.name and entry.name in source.tensors):
                raise CheckpointError(
                    f"{source.path}: tensor {shown(tensor.name)}: its scale would be named "
                    f"{shown(entry.name)}, which the file has already, expected a free name; leave "
                    "the tensor out with --skip or rename it"
                )
            taken[entry.name] = tensor.name
