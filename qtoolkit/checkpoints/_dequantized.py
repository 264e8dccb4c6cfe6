"""Reads a quantized checkpoint of any layout as if its weights were float32. No JAX here."""

import functools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._base import Source, StoredAs
from qtoolkit.checkpoints._header import DTYPE_OF, NUMPY_DTYPES, CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._saved import copied_parts, saved_arrays
from qtoolkit.checkpoints._source import MODELOPT_CONFIG, Folder
from qtoolkit.checkpoints._storage import join
from qtoolkit.checkpoints._stored import Stored, Values
from qtoolkit.checkpoints.layouts import LAYOUTS
from qtoolkit.checkpoints.layouts._layout import BYTE_ELEMENTS

_BY_METHOD = {
    "compressed-tensors": "compressed-tensors",
    "fp8": "finegrained-fp8",
    "modelopt": "modelopt",
}
# The scales of a KV cache may belong to the attention module, above its projections.
_OF_CACHE = ("k_scale", "v_scale", "q_scale")
# Suffixes of entries that loaders keep beside a quantized weight. Without codes they mean nothing.
_BESIDE = (
    *("input_scale", "input_global_scale", "activation_scale", "output_scale", "weight_shape"),
    *_OF_CACHE,
)
# Pairs of entries that give away a weight quantized by programs whose layouts are not read here. A
# folder says so in its config.json; a single file can be told only by these names.
_OTHERS = (
    ("qweight", "scales", "GPTQ or AWQ"),
    ("SCB", "weight", "bitsandbytes"),
    (".absmax", ".quant_map", "bitsandbytes"),
    ("_blocks", "_scales", "gpt-oss (MXFP4)"),
)


class DequantizedSource(Source):
    """A source in which every quantized weight is float32, under its own name.

    Attributes:
      source: The underlying, quantized source.
    """

    def __init__(self, source: Source, layout: str, stored: Mapping[str, Stored]) -> None:
        self.path = source.path
        self.metadata = source.metadata
        self.config = source.config
        self.layout = layout
        self.stored = stored
        self.stored_as = {
            name: StoredAs(weight.codes.dtype, sum(entry.nbytes for entry in weight.entries))
            for name, weight in stored.items()
        }
        self.source = source
        # Scales of a weight are read once and kept while its values are read. Two weights, since
        # one thread may begin with the next weight while another is still at the end of this one.
        self._values = functools.lru_cache(maxsize=2)(
            lambda name: Values(stored[name], source.read_into)
        )
        gone = {entry.name for weight in stored.values() for entry in weight.entries}
        by_codes = {weight.codes.name: weight for weight in stored.values()}
        beside = set() if layout == "plain" else _entries_beside(stored)
        self.tensors = {}
        self.beside = {}
        for name, info in source.tensors.items():
            if name in by_codes:
                weight = by_codes[name]
                nbytes = 4 * math.prod(weight.shape)
                self.tensors[weight.name] = TensorInfo(weight.name, "F32", weight.shape, 0, nbytes)
            elif name not in gone:
                is_beside = name in beside or (layout != "plain" and _is_of_cache(name, source))
                (self.beside if is_beside else self.tensors)[name] = info

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        if name in self.stored:
            self._values(name).read_into(start, memoryview(buffer))
        else:
            self.source.read_into(name, start, buffer)

    def read_stored(self, name: str, start: int, buffer: memoryview) -> None:
        self.source.read_into(name, start, buffer)

    def close(self) -> None:
        self.source.close()


def _entries_beside(weights: Iterable[str]) -> set[str]:
    """The names that further scales of these weights, for loaders, may have."""
    modules = {name.rpartition(".")[0] for name in weights}
    found = {f"{module}.{last}".lstrip(".") for module in modules for last in _BESIDE}
    above = {module.rpartition(".")[0] for module in modules}
    return found | {f"{module}.{last}" for module in above if module for last in _OF_CACHE}


def _is_of_cache(name: str, source: Source) -> bool:
    """Whether this is a scale of an attention cache: its projections may be wide themselves."""
    module, _, last = name.rpartition(".")
    if last not in _OF_CACHE:
        return False
    above = (f"{module}.{last[0]}_proj.weight", f"{module}.qkv_proj.weight")
    return any(other in source.tensors for other in (f"{module}.weight", *above))


def folder_of(source: Source) -> Folder | None:
    """The folder behind a source, dequantized or not; None if the source is a file."""
    inner = source.source if isinstance(source, DequantizedSource) else source
    return inner if isinstance(inner, Folder) else None


def quantization_config(source: Source) -> dict[str, Any]:
    """The quantization config of a folder; empty if there is none.

    It is in config.json, or, in many folders of NVIDIA's modelopt, only in hf_quant_config.json.

    Raises:
      CheckpointError: That file does not say how weights are quantized.
    """
    config = source.config if isinstance(source, Folder) else {}
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part.get(key), dict):
                return part[key]
    return _of_modelopt(source) if isinstance(source, Folder) and source.modelopt_config else {}


def _of_modelopt(folder: Folder) -> dict[str, Any]:
    """hf_quant_config.json as the quantization_config that modelopt writes today.

    Beside wide weights it may name no algorithm for them, but be about the attention cache alone.
    """
    found = folder.modelopt_config.get("quantization")
    if isinstance(found, dict) and "quant_algo" in found:
        return {"quant_method": "modelopt", "ignore": found.get("exclude_modules"), **found}
    if not any(info.dtype in ("F8_E4M3", "U8") for info in folder.tensors.values()):
        return {}
    raise CheckpointError(
        f"{join(folder.path, MODELOPT_CONFIG)}: {shown(str(found)[:80])} under 'quantization', "
        'expected {"quant_algo": "FP8", ...}; fetch it again'
    )


def dequantized(source: Source) -> Source:
    """A `DequantizedSource` of `source`, or `source` itself if nothing in it is quantized.

    Raises:
      CheckpointError: It is quantized in a way that cannot be read here, or otherwise than its
        config says.
    """
    config = quantization_config(source)
    where = str(source.path)
    if config:
        method = str(config.get("quant_method", "compressed-tensors"))
        if method not in _BY_METHOD:
            raise CheckpointError(
                f"{where}: quantized by {shown(method)}, expected "
                f"{', '.join(_BY_METHOD)} or a checkpoint that is not quantized; dequantize it "
                "with the program that made it"
            )
        layout = _BY_METHOD[method]
        stored = LAYOUTS[layout].read(config, source.tensors, where)
        _check_all_read(source, stored, layout)
    else:
        _check_not_others(source)
        stored, own = saved_arrays(source.metadata, source.tensors, where)
        others = {name: info for name, info in source.tensors.items() if name not in own}
        found = ["plain"] if stored else []
        for name in sorted(LAYOUTS, key=lambda name: name != own_layout(source)):
            read = LAYOUTS[name].read({}, others, where)
            found += [name] if any(weight not in stored for weight in read) else []
            stored = read | stored
        layout = found[0] if found else ""
    _check_once(source, stored)
    _check_constants(source, stored)
    return DequantizedSource(source, layout, stored) if stored else source


def check_quantized(opened: Source) -> Source:
    """`dequantized`, but raises CheckpointError if nothing is quantized."""
    source = dequantized(opened)
    if not source.stored_as:
        if copied := copied_parts(opened.metadata, opened.tensors, ()):
            raise CheckpointError(
                f"{opened.path}: tensor {shown(min(copied))}: of a QArray that the commands "
                "do not read: of more than 8 bits, or packed with zero points, a last axis of one "
                "element or unusual blocks; dequantize it in Python: "
                "qtoolkit.checkpoints.load(FILE)[NAME].dequantize()"
            )
        raise CheckpointError(
            f"{opened.path}: nothing in it is quantized in a layout that is read, expected one; "
            "`qtoolkit layouts` lists them, `qtoolkit inspect` shows what is there"
        )
    return source


def _check_once(source: Source, stored: Mapping[str, Stored]) -> None:
    """Raises where a weight is there quantized and, under its own name, once more."""
    for weight in stored.values():
        if weight.codes.name != weight.name and weight.name in source.tensors:
            raise CheckpointError(
                f"{source.path}: tensor {shown(weight.name)}: it is there beside its codes, "
                f"{shown(weight.codes.name)}, expected one of them: loaders differ in which they "
                "take; write the checkpoint again without the other"
            )


def _check_constants(source: Source, stored: Mapping[str, Stored]) -> None:
    """Raises if an entry that states a weight's shape contradicts the shapes of the entries."""
    for weight in stored.values():
        for entry, expected in weight.constants:
            found = bytearray(len(expected))
            source.read_into(entry.name, 0, found)
            if found != expected:
                says = np.frombuffer(found, NUMPY_DTYPES[entry.dtype]).tolist()
                raise CheckpointError(
                    f"{source.path}: tensor {shown(entry.name)}: it says that the weight is "
                    f"{says}, and {weight.spec.name} of that many words is {list(weight.shape)}; "
                    "give the folder with its config.json, which tells bits and groups"
                )


def _check_not_others(source: Source) -> None:
    """Raises if names of tensors belong to a layout that cannot be read here: see `_OTHERS`."""
    for name in source.tensors:
        for end, beside, what in _OTHERS:
            if name.endswith(end) and name.removesuffix(end) + beside in source.tensors:
                raise CheckpointError(
                    f"{source.path}: tensor {shown(name)}: of a weight quantized by {what}, as its "
                    f"name says, expected a layout of {', '.join(LAYOUTS)}, or weights that are "
                    "not quantized; dequantize it with the program that made it"
                )


def own_layout(source: Source) -> str:
    """The layout that `convert` has written under "qtoolkit" in the metadata of a file."""
    try:
        about = json.loads(source.metadata.get("qtoolkit", "{}"))
    except (ValueError, RecursionError):
        return ""
    return str(about.get("layout", "")) if isinstance(about, dict) else ""


def _check_all_read(source: Source, stored: Mapping[str, Stored], layout: str) -> None:
    read = {weight.codes.name for weight in stored.values()}
    for name, info in source.tensors.items():
        last = name.rpartition(".")[2]
        is_scale = last.endswith(("scale", "scale_inv", "scale_2"))
        # modelopt writes "experts.down_proj_weight_scale" beside "experts.down_proj".
        has_scale = any(name + end in source.tensors for end in ("_scale", "_weight_scale"))
        is_weight = has_scale or last in ("weight", "weight_packed")
        is_packed = info.dtype in ("U8", "I32") and is_weight
        if (info.dtype in BYTE_ELEMENTS or is_packed) and name not in read and not is_scale:
            raise CheckpointError(
                f"{source.path}: tensor {shown(name)}: {info.dtype} without the scales that layout "
                f"{layout} has, as config.json says; fetch the checkpoint again"
            )


def is_qarray(x: Any) -> bool:
    return hasattr(x, "codes") and hasattr(x, "spec")  # without JAX


def info_of(name: str, array: np.ndarray) -> TensorInfo:
    """An array of a dtype that safetensors has, as a tensor of a file."""
    return TensorInfo(name, DTYPE_OF[array.dtype.name], array.shape, 0, array.nbytes)


def dequantize(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The float32 values of tensors that `convert` has quantized in the plain layout.

    Args:
      tensors: Arrays by name, as `load` returns them.

    Returns:
      The same, where every 8-bit tensor that comes with `<name>_scale` is replaced by its values,
      code * scale in float32, and the scale left out; and every `QArray` by its own.

    Raises:
      TypeError: `tensors` is no dictionary.

    Examples:
      >>> weights = {"w": jnp.asarray([[896.0, 0.3]]), "bias": jnp.ones(2)}
      >>> qt.checkpoints.save("model.safetensors", weights)
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> tensors = qt.checkpoints.load("fp8.safetensors")
      >>> tensors["w"].dtype, tensors["w_scale"]
      (dtype(float8_e4m3fn), array([2.], dtype=float32))
      >>> qt.checkpoints.dequantize(tensors)["w"]
      array([[8.960e+02, 3.125e-01]], dtype=float32)
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"dequantize: tensors has type {type(tensors).__name__}, expected arrays by name; "
            "write dequantize(load(path))"
        )
    arrays = {
        name: np.asarray(tensor.dequantize("float32") if is_qarray(tensor) else tensor)
        for name, tensor in tensors.items()
    }
    infos = {name: info_of(name, x) for name, x in arrays.items() if x.dtype.name in DTYPE_OF}

    def read(name: str, start: int, buffer: memoryview) -> None:
        data = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
        buffer[:] = data[start : start + len(buffer)].data

    found = LAYOUTS["plain"].read({}, infos, "dequantize")
    gone = {entry.name for stored in found.values() for entry in stored.entries}
    values = {name: array for name, array in arrays.items() if name not in gone or name in found}
    for name, stored in found.items():
        values[name] = np.empty(stored.shape, np.float32)
        Values(stored, read).read_into(0, values[name].reshape(-1).view(np.uint8).data)
    return values
