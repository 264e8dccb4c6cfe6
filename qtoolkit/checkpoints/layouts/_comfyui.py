"""ComfyUI: FP8 with `scale_weight`, and int8 that is rotated (ConvRot).

`weight` F8_E4M3 or F8_E5M2 has `scale_weight`, F32, one in all, and may have `scale_input`. An
empty tensor `scaled_fp8` marks such files. JSON of a weight, in `comfy_quant` or the metadata, that
says "convrot" means int8 codes with a scale for each row, and each `convrot_groupsize` inputs
multiplied by a Hadamard matrix: the Kronecker product of 4x4 ones, which is its own inverse.
Source: github.com/comfyanonymous/ComfyUI, comfy/ops.py; comfy-kitchen, tensor/int8_utils.py,
_build_hadamard, _rotate_weight.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import Entry, json_object
from qtoolkit.checkpoints.layouts._encoding import Encoding, ReadEntry
from qtoolkit.checkpoints.layouts._layout import (
    FLOAT_SCALES,
    Headers,
    Layout,
    Stored,
    check_entry,
    decode_bytes,
    entry_beside,
    unread,
)

MARK, METADATA = ".comfy_quant", "_quantization_metadata"
_SCALE = "scale_weight"
_FOUR = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32)


def marks_of(headers: Headers) -> dict[str, Any]:
    """What ComfyUI says of the modules that it quantized, by their names."""
    if not isinstance(headers, Stored):
        return {}
    of_all = json_object(headers.metadata.get(METADATA, "{}")).get("layers")
    marks = {
        name.removesuffix(MARK): json_object(headers.read(name).tobytes())
        for name in headers
        if name.endswith(MARK)
    }
    return marks | (of_all if isinstance(of_all, dict) else {})


def is_mark(entry: Entry) -> bool:
    """Whether a tensor is such JSON, or marks a file with `scale_weight`."""
    is_empty = entry.dtype[:2] == "F8" and entry.nbytes <= 2
    return entry.name.endswith(MARK) or (is_empty and entry.name.endswith("scaled_fp8"))


def decode(config: Mapping[str, Any], headers: Headers, where: str) -> dict[str, Encoding]:
    encodings = {}
    for name, info in headers.items():
        scale_name = entry_beside(name, _SCALE)
        is_float = info.dtype in ("F8_E4M3", "F8_E5M2")
        if is_float and f".{name}".endswith(".weight") and scale_name in headers:
            scale = check_entry(headers, scale_name, FLOAT_SCALES, where)
            if scale.nbytes not in (2, 4):
                raise unread(where, scale_name, f"{scale}, expected one number", "ComfyUI")
            one = {name: info, scale_name: scale._replace(shape=())}
            encodings[name] = decode_bytes(one, name, scale_name, where)
    for module, mark in marks_of(headers).items():
        name = f"{module}.weight"
        settings = mark if isinstance(mark, Mapping) else {}
        is_rotated = settings.get("convrot") and settings.get("format") == "int8_tensorwise"
        if is_rotated and name in headers:
            encodings[name] = _rotated(headers, name, settings.get("convrot_groupsize", 256), where)
    return encodings


def _rotated(headers: Headers, name: str, size: Any, where: str) -> Encoding:
    codes = check_entry(headers, name, ("I8",), where)
    encoding = decode_bytes(headers, name, f"{name}_scale", where)
    powers = [4**k for k in range(1, 9)]
    if size not in powers or len(codes.shape) != 2 or codes.shape[1] % size:
        what = f"{codes} rotated by {size}, expected a matrix and a power of 4 that divides rows"
        raise unread(where, name, what, "ComfyUI")

    def finish(encoding: Encoding, values: np.ndarray, read: ReadEntry) -> np.ndarray:
        return (values.reshape(-1, size) @ _hadamard(size)).reshape(values.shape)

    return dataclasses.replace(encoding, finish=finish)


@functools.cache
def _hadamard(size: int) -> np.ndarray:
    matrix: np.ndarray = _FOUR
    while len(matrix) < size:
        matrix = np.kron(matrix, _FOUR)
    return matrix / np.float32(size**0.5)


LAYOUT = Layout(
    name="comfyui",
    title="that of ComfyUI: scale_weight beside FP8 weights, comfy_quant of rotated int8",
    loaders="ComfyUI",
    decode=decode,
)
