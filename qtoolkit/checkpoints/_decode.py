"""Opens a quantized checkpoint as the float32 weights that it stands for, whatever the layout.

A layout says how each weight is stored, as an `Encoding`; here its bytes become a `QArray`, or,
slab by slab, float32 numbers (`_values.py`). Finding out how needs no JAX.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

from qtoolkit.checkpoints._folder import MODELOPT_CONFIG
from qtoolkit.checkpoints._storage import join
from qtoolkit.checkpoints._tensors import (
    Checkpoint,
    CheckpointError,
    Entry,
    Tensor,
    configs_in,
    json_object,
    shown,
    statistics,
)
from qtoolkit.checkpoints.layouts import LAYOUTS, Encoding
from qtoolkit.checkpoints.layouts._layout import unread
from qtoolkit.checkpoints.layouts._qarrays import saved_arrays

LAYOUT_OF = {method: layout for layout in LAYOUTS.values() for method in layout.methods}
# The scales of a KV cache may belong to the attention module, above its projections.
_OF_CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point")
# Suffixes of entries that loaders have for a quantized weight. Without codes they mean nothing.
_AUXILIARY = (
    *("input_scale", "input_global_scale", "activation_scale", "output_scale", "weight_shape"),
    *("input_zero_point", "output_zero_point", "input_scale_ub"),
    *_OF_CACHE,
)
# A config without a method is of compressed-tensors where it has one of these. MLX's has none.
_WITHOUT_METHOD = ("config_groups", "sparsity_config", "format")
# What ComfyUI says of each layer, in JSON: in a tensor of its own, or in the metadata.
_COMFY_MARK, _COMFY_METADATA = ".comfy_quant", "_quantization_metadata"
_COMFY_READ = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")  # a code times its scale
_COMFY_ASIDE = {"format", "per_row", "full_precision_matrix_mult"}


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with float32 weights for quantized ones; itself if nothing is quantized.

    Raises where it is quantized in a way that is not read, or not as its config says.
    """
    config = quantization_config(checkpoint)
    headers = {name: tensor.entry for name, tensor in checkpoint.tensors.items()}
    where = str(checkpoint.path)
    if config:
        method = str(config.get("quant_method", "compressed-tensors"))
        if method not in LAYOUT_OF:
            raise CheckpointError(
                f"{where}: quantized by {shown(method)}, expected "
                f"{', '.join(LAYOUT_OF)} or a checkpoint that is not quantized; dequantize it "
                "with the program that made it"
            )
        layout = LAYOUT_OF[method].name
        encodings = LAYOUTS[layout].decode(config, headers, where)
    else:
        layout, encodings = _decoded_by_names(checkpoint, headers)
    if not encodings:
        return checkpoint
    for encoding in encodings.values():
        if encoding.codes.name != encoding.name and encoding.name in headers:
            raise CheckpointError(
                f"{where}: tensor {shown(encoding.name)}: it is there in addition to its codes, "
                f"{shown(encoding.codes.name)}, expected one of them: loaders differ in which they "
                "take; write the checkpoint again without the other"
            )
    _check_constants(checkpoint, encodings)
    dropped = comfy_marks(checkpoint, encodings) | _zero_parts(checkpoint, encodings)
    return _opened_as_float32(checkpoint, layout, encodings, dropped)


def _decoded_by_names(
    checkpoint: Checkpoint, headers: Mapping[str, Entry]
) -> tuple[str, dict[str, Encoding]]:
    """What is quantized without a config that says so: by metadata of `save`, or by names."""
    where = str(checkpoint.path)
    encodings, own = saved_arrays(checkpoint.metadata, headers, where)
    others = {name: entry for name, entry in headers.items() if name not in own}
    layouts = ["plain"] if encodings else []
    for name in sorted(LAYOUTS, key=lambda name: name != own_layout(checkpoint)):
        decoded = LAYOUTS[name].decode({}, others, where)
        layouts += [name] if any(weight not in encodings for weight in decoded) else []
        encodings = decoded | encodings
    return layouts[0] if layouts else "", encodings


def _opened_as_float32(
    checkpoint: Checkpoint, layout: str, encodings: Mapping[str, Encoding], dropped: set[str]
) -> Checkpoint:
    """The checkpoint with a tensor for each encoding; the tensors in `dropped` are auxiliary."""
    read = _reader_of(encodings, checkpoint.tensors)
    stored_in = {entry.name for encoding in encodings.values() for entry in encoding.entries}
    by_codes = {encoding.codes.name: encoding for encoding in encodings.values()}
    names = dropped | (set() if layout == "plain" else _auxiliary_names(encodings))
    metadata = {k: v for k, v in checkpoint.metadata.items() if k != _COMFY_METADATA}
    tensors: dict[str, Tensor] = {}
    auxiliary: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name in by_codes:
            encoding = by_codes[name]
            read_into = functools.partial(read, encoding.name)
            stored = (encoding, encoding.codes.dtype, encoding.nbytes)
            tensors[encoding.name] = Tensor(
                encoding.name, "F32", encoding.shape, read_into, *stored
            )
        elif name not in stored_in:
            is_cache = layout != "plain" and _is_of_cache(name, checkpoint.tensors)
            (auxiliary if name in names or is_cache else tensors)[name] = tensor
    changes: Any = {"tensors": tensors, "auxiliary": auxiliary, "stored": checkpoint.tensors}
    return dataclasses.replace(checkpoint, layout=layout, metadata=metadata, **changes)


def _reader_of(
    encodings: Mapping[str, Encoding], stored: Mapping[str, Tensor]
) -> Callable[[str, int, memoryview], None]:
    """Reads the float32 values of a weight by its name. JAX loads when the first one is read."""

    # Two weights, with their scales: a thread may begin with the next one while another is still at
    # the end of this one.
    @functools.lru_cache(maxsize=2)
    def values(name: str) -> Any:
        from qtoolkit.checkpoints._values import Values

        return Values(encodings[name], stored)

    lock = threading.Lock()

    def read(name: str, start: int, buffer: memoryview) -> None:
        with lock:
            weight = values(name)
        weight.read_into(start, buffer)

    return read


def _auxiliary_names(weights: Collection[str]) -> set[str]:
    modules = {name.rpartition(".")[0] for name in weights}
    names = {f"{module}.{last}".lstrip(".") for module in modules for last in _AUXILIARY}
    names |= {f"{weight}_{last}" for weight in weights for last in _AUXILIARY}  # fused experts
    above = {module.rpartition(".")[0] for module in modules}
    return names | {f"{module}.{last}" for module in above if module for last in _OF_CACHE}


def _is_of_cache(name: str, tensors: Mapping[str, Any]) -> bool:
    """Whether this is a scale of an attention cache: its projections may be unquantized."""
    module, _, last = name.rpartition(".")
    if last not in _OF_CACHE:
        return False
    above = (f"{module}.{last[0]}_proj.weight", f"{module}.qkv_proj.weight")
    return any(other in tensors for other in (f"{module}.weight", *above))


def quantization_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The quantization config of a folder; empty if there is none.

    It is in config.json, or, in many folders of NVIDIA's modelopt, only in hf_quant_config.json.
    """
    folder = checkpoint.folder
    if folder is None:
        return {}
    for part in configs_in(checkpoint.config):
        for key in ("quantization_config", "compression_config"):
            about = part.get(key)
            if isinstance(about, dict) and {"quant_method", *_WITHOUT_METHOD} & about.keys():
                return about
    if not folder.modelopt_config:
        return {}
    about = folder.modelopt_config.get("quantization")
    if isinstance(about, dict) and "quant_algo" in about:
        return {"quant_method": "modelopt", "ignore": about.get("exclude_modules"), **about}
    # Of unquantized weights it may name no algorithm, but be about the attention cache alone.
    if not any(tensor.dtype in ("F8_E4M3", "U8") for tensor in checkpoint.tensors.values()):
        return {}
    raise CheckpointError(
        f"{join(checkpoint.path, MODELOPT_CONFIG)}: {shown(str(about)[:80])} under 'quantization', "
        'expected {"quant_algo": "FP8", ...}; dequantize the checkpoint with modelopt'
    )


def _check_constants(checkpoint: Checkpoint, encodings: Mapping[str, Encoding]) -> None:
    """Raises if an entry that states a weight's shape contradicts the shapes of the entries."""
    remedy = "give the folder with its config.json, which tells bits and groups"
    if quantization_config(checkpoint):
        remedy = "dequantize the checkpoint with the program that made it"
    for encoding in encodings.values():
        for entry, expected in encoding.constants:
            stated = checkpoint.read(entry.name)
            if stated.tobytes() != expected:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {shown(entry.name)}: it says that the weight is "
                    f"{stated.tolist()}, and {encoding.spec.name} of that many words is "
                    f"{list(encoding.shape)}; {remedy}"
                )


def _zero_parts(checkpoint: Checkpoint, encodings: Mapping[str, Encoding]) -> set[str]:
    """The entries NAME.weight_* of quantized weights that the layout lacks, if all are 0: offsets.

    Raises where one is not 0, so that the numbers are others than those that are read.
    """
    known = {entry.name for encoding in encodings.values() for entry in encoding.entries}
    known |= encodings.keys() | _auxiliary_names(encodings)
    zeros = set()
    for name, tensor in checkpoint.tensors.items():
        module, dot, last = name.rpartition(".")
        if name in known or f"{module}{dot}weight" not in encodings:
            continue
        if last.startswith("weight_") and statistics(tensor).zeros == tensor.size:
            zeros.add(name)
        elif last.startswith("weight_") or last == "quant_bias":
            what = f"{tensor.entry} of a quantized weight, expected no such entry: it changes what "
            what += "is read"
            raise unread(str(checkpoint.path), name, what)
    return zeros


def comfy_marks(checkpoint: Checkpoint, weights: Container[str]) -> set[str]:
    """The tensors in which ComfyUI says how layers are quantized, those of `weights` among them.

    Raises for the ways that have the entries of other programs and not the numbers: weights are
    rotated, or, in NVFP4, scales lie in tiles and the first code is the high one.
    """
    marks = {name for name in checkpoint.tensors if name.endswith(_COMFY_MARK)}
    texts = {n.removesuffix(_COMFY_MARK): checkpoint.read(n).tobytes() for n in marks}
    layers: Any = {module: json_object(text) for module, text in texts.items()}
    of_all = json_object(checkpoint.metadata.get(_COMFY_METADATA, "{}")).get("layers")
    layers |= of_all if isinstance(of_all, dict) else {}
    for module, about in layers.items():
        weight, about = f"{module}.weight", about if isinstance(about, dict) else {}
        others = {key for key, value in about.items() if value} - _COMFY_ASIDE
        if weight in weights and (others or about.get("format") not in _COMFY_READ):
            what = f"{shown(str(about)[:80])} by ComfyUI, expected {', '.join(_COMFY_READ)} alone"
            raise unread(str(checkpoint.path), weight, what, "ComfyUI")
    return marks


def own_layout(checkpoint: Checkpoint) -> str:
    """The layout that `convert` has written under "qtoolkit" in the metadata of a file."""
    return str(own_metadata(checkpoint).get("layout", ""))


def own_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `convert` has written under "qtoolkit" in the metadata of a file."""
    return json_object(checkpoint.metadata.get("qtoolkit", "{}"))
