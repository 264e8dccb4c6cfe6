"""ComfyUI: FP8 with `scale_weight`, and what JSON beside a weight says of its format.

`weight` F8_E4M3 or F8_E5M2 has `scale_weight`, F32, one in all, and may have `scale_input`. An
empty tensor `scaled_fp8` marks such files. The JSON is in `comfy_quant` or in the metadata:

* "int8_tensorwise" with "convrot", and "convrot_w4a4", two codes to a byte: a scale for each row,
  and each `convrot_groupsize` inputs are multiplied by a Hadamard matrix: the Kronecker product of
  4x4 ones, which is its own inverse.
* "nvfp4": the first of two codes is in the high bits; "mxfp8". Scales lie in tiles.

Source: github.com/comfyanonymous/ComfyUI, comfy/ops.py and quant_ops.py; comfy-kitchen,
tensor/int8_utils.py, _build_hadamard, _rotate_weight; backends/eager/quantization.py.
"""

import dataclasses
import functools
from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import Entry, json_object, shown
from qtoolkit.checkpoints.layouts._encoding import HIGH_NIBBLES, NIBBLES, Encoding, ReadEntry
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import FLOAT_SCALES, Layout, decode_bytes, decode_groups
from qtoolkit.formats import INT4, MXFP8_E4M3, NVFP4

_FOUR_BITS = ("convrot_w4a4", "int4_tensorwise")
# The kinds in which a value is a code multiplied by its scale, as in other programs' layouts, and
# keys of the JSON that do not change this; then all that are read.
_PLAIN_KINDS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
_PLAIN_KEYS = {"format", "per_row", "full_precision_matrix_mult", "linear_dtype"}
_KINDS = (*_PLAIN_KINDS, "nvfp4", "mxfp8", *_FOUR_BITS)
_KEYS = _PLAIN_KEYS | {"convrot", "convrot_groupsize"}
_MARK, _METADATA = ".comfy_quant", "_quantization_metadata"
_SCALE = "scale_weight"
_FOUR = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32)


def _marks(headers: Headers) -> dict[str, Any]:
    """What ComfyUI says of the modules that it quantized, by their names."""
    of_all = json_object(headers.metadata.get(_METADATA, "{}")).get("layers")
    marks = {
        name.removesuffix(_MARK): json_object(headers.read(name).tobytes())
        for name in headers
        if name.endswith(_MARK)
    }
    return marks | (of_all if isinstance(of_all, dict) else {})


def _is_mark(entry: Entry) -> bool:
    """Whether a tensor is such JSON, or marks a file with `scale_weight`."""
    is_empty = entry.dtype[:2] == "F8" and entry.nbytes <= 2
    return entry.name.endswith(_MARK) or (is_empty and entry.name.endswith("scaled_fp8"))


def check_marks(headers: Headers, weights: Container[str], by_config: bool) -> set[str]:
    """The names of such tensors; raises where a weight is stored in a way that is not read, or that
    looks like that of the layout in the config, but has other values: rotated ones, or scales in
    tiles and the first code of each byte in the high bits.
    """
    # Without a config the marks have been read here.
    kinds, keys = (_PLAIN_KINDS, _PLAIN_KEYS) if by_config else (_KINDS, _KEYS)
    for module, mark in _marks(headers).items():
        weight, settings = f"{module}.weight", mark if isinstance(mark, dict) else {}
        others = {key for key, value in settings.items() if value} - keys
        if weight in weights and (others or settings.get("format") not in kinds):
            what = f"ComfyUI describes it by {shown(str(settings)[:80])}, expected only "
            raise headers.error(weight, what + ", ".join(kinds), "ComfyUI")
    return {name for name, entry in headers.items() if _is_mark(entry)}


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    encodings = {}
    for name, entry in headers.items():
        scale_name = entry_beside(name, _SCALE)
        is_float = entry.dtype in ("F8_E4M3", "F8_E5M2")
        if is_float and f".{name}".endswith(".weight") and scale_name in headers:
            scale = headers.check(scale_name, FLOAT_SCALES)
            if scale.nbytes not in (2, 4):
                raise headers.error(scale_name, f"{scale}, expected one number", "ComfyUI")
            one = headers.only({name: entry, scale_name: scale._replace(shape=())})
            encodings[name] = decode_bytes(one, name, scale_name)
    for module, mark in _marks(headers).items():
        name, settings = f"{module}.weight", mark if isinstance(mark, Mapping) else {}
        if name not in headers:
            continue
        if settings.get("format") in ("nvfp4", "mxfp8"):
            encodings[name] = _tiled(headers, name, settings["format"])
        elif settings.get("format") in _FOUR_BITS or settings.get("convrot"):
            encodings[name] = _rotated(headers, name, settings)
    return encodings


def _tiled(headers: Headers, name: str, kind: str) -> Encoding:
    is_fp4 = kind == "nvfp4"
    codes = headers.check(name, ("U8",) if is_fp4 else ("F8_E4M3",))
    scales = ("F8_E4M3",) if is_fp4 else ("U8", "F8_E8M0")
    scale = headers.check(f"{name}_scale", scales)
    second = headers.check(f"{name}_scale_2", ("F32",)) if is_fp4 else None
    spec = NVFP4 if is_fp4 else MXFP8_E4M3
    shape = (*codes.shape[:-1], *(n * (1 + is_fp4) for n in codes.shape[-1:]))
    return decode_groups(
        *(headers, name, shape, spec, codes, scale),
        tiled_by="ComfyUI",
        packing=HIGH_NIBBLES if is_fp4 else None,
        tensor_scale=second,
    )


def _rotated(headers: Headers, name: str, settings: Mapping[str, Any]) -> Encoding:
    size, scale_name = settings.get("convrot_groupsize", 256), f"{name}_scale"
    codes = headers.check(name, ("I8",))
    encoding = decode_bytes(headers, name, scale_name)
    if settings.get("format") in _FOUR_BITS and len(codes.shape) == 2:
        shape = (codes.shape[0], 2 * codes.shape[1])
        encoding = dataclasses.replace(
            encoding,
            shape=shape,
            spec=dataclasses.replace(encoding.spec, element=INT4),
            lengths=(encoding.lengths[0], shape[1]),
            packing=NIBBLES,
        )
    is_by_rows = len(codes.shape) == 2 and encoding.lengths[-1] == encoding.shape[-1]
    powers = [4**k for k in range(1, 9)]
    if size not in powers or not is_by_rows or encoding.shape[1] % size:
        what = f"{codes} rotated by {size}, expected a power of 4 that divides rows, and a scale"
        raise headers.error(name, f"{what} for each row", "ComfyUI")

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
    check_marks=check_marks,
    metadata_keys=lambda names: {_METADATA},
    has_marks=True,
)
