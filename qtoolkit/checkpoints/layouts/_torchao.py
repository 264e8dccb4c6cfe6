"""torchao's tensor subclasses in safetensors: `_weight_qdata`, `_weight_scale` and so on.

The metadata of a file says by the name of each tensor its class, the length of blocks and whether
scales lie in tiles. Float8Tensor, Int8Tensor and IntxUnpackedToInt8Tensor have a code a byte, and
zero points I8. Int4Tensor has two a byte, scales and zero points [groups, outputs], and
x = code * scale + zero point. NVFP4Tensor and MXTensor have the scales of 16 and of 32 neighbours.
Source: github.com/pytorch/ao, prototype/safetensors/safetensors_utils.py, and each class's
dequantize; of Int4Tensor, FBGEMM's quantize_utils.py, int4_row_quantize_zp.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import NUMPY_DTYPES, Entry, json_object, shown
from qtoolkit.checkpoints.layouts._encoding import NIBBLES, Encoding, ReadEntry, floats
from qtoolkit.checkpoints.layouts._headers import Headers
from qtoolkit.checkpoints.layouts._layout import (
    BYTE_ELEMENTS,
    FLOAT_SCALES,
    NVFP4_ALONE,
    Layout,
    block_format,
    decode_bytes,
    decode_groups,
    times_factors,
)
from qtoolkit.formats import E2M1FN, INT4, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat

METHOD, _CODES, _NAMES = "torchao", "qdata", "tensor_names"
_BYTES = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_READ = (*_BYTES, "Int4Tensor", "NVFP4Tensor", "MXTensor")
_MX = {"float8_e4m3fn": MXFP8_E4M3, "float8_e5m2": MXFP8_E5M2, "float4_e2m1fn_x2": MXFP4}
# Parts that say how activations are quantized.
_OF_ACTIVATIONS = ("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale")


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    encodings: dict[str, Encoding] = {}
    for entry in headers.values():
        name, description = _description_of(headers, entry.name)
        if description:
            encodings[name] = _decode_weight(headers, name, description)
        elif config and name:
            what = f"no class in the metadata of the file under {shown(name)}, expected one"
            raise headers.error(entry.name, what, METHOD)
    return encodings


def _description_of(headers: Headers, codes: str) -> tuple[str, dict[str, Any]]:
    """The name of the weight of which an entry has the codes, and what the metadata says of it."""
    module, _, last = codes.rpartition(".")
    if not last.startswith("_") or not last.endswith(f"_{_CODES}"):
        return "", {}
    name = f"{module}.{last[1 : -len(_CODES) - 1]}".lstrip(".")
    return name, json_object(headers.metadata.get(name, ""))


def _decode_weight(headers: Headers, name: str, description: Mapping[str, Any]) -> Encoding:
    module, _, last = name.rpartition(".")
    prefix = f"{module}._{last}_".lstrip(".")
    kind, settings = str(description.get("_type")), description.get("_data") or {}
    codes, scale = headers[prefix + _CODES], headers.get(f"{prefix}scale")
    if kind not in _READ or scale is None:
        what = f"of class {shown(kind)}, expected {', '.join(_READ)} with a scale"
        raise headers.error(codes.name, what, METHOD)
    lengths = settings.get("block_size")
    if kind in _BYTES:
        encoding = _of_bytes(headers, name, codes, scale, lengths)
    elif kind == "Int4Tensor":
        encoding = _of_int4(headers, name, codes, scale, prefix)
    else:
        encoding = _of_groups(headers, name, codes, scale, prefix, settings)
    zero = headers.get(f"{prefix}zero_point")
    if kind in _BYTES and zero is not None:
        encoding = _with_zero_point(headers, encoding, zero)
    factors = headers.get(f"{prefix}act_pre_scale")
    if factors is not None:
        if not encoding.is_array or factors.shape != encoding.shape[-1:]:
            what = f"{factors}, expected a factor for each input of {list(encoding.shape)} alone"
            raise headers.error(factors.name, what, METHOD)
        encoding = dataclasses.replace(
            encoding, others=(*encoding.others, factors), finish=times_factors
        )
    extra = [headers[prefix + part] for part in _OF_ACTIVATIONS if prefix + part in headers]
    return dataclasses.replace(encoding, others=(*extra, *encoding.others))


def _of_bytes(headers: Headers, name: str, codes: Entry, scale: Entry, lengths: Any) -> Encoding:
    if codes.dtype not in BYTE_ELEMENTS or not isinstance(lengths, list):
        raise headers.error(codes.name, f"{codes} in blocks of {lengths}, expected bytes", METHOD)
    if len(codes.shape) == 2 and lengths[0] == 1 < lengths[-1] < codes.shape[-1]:
        headers.check(scale.name, FLOAT_SCALES)
        element = BYTE_ELEMENTS[codes.dtype]
        spec = block_format(
            element=element, block=(lengths[-1],), scale=NUMPY_DTYPES[scale.dtype].name
        )
        return decode_groups(headers, name, codes.shape, spec, codes, scale)
    pair = headers.only({name: codes, f"{name}_scale": scale})
    return decode_bytes(pair, name, f"{name}_scale", lengths[-2:])


def _with_zero_point(headers: Headers, encoding: Encoding, zero: Entry) -> Encoding:
    assert encoding.scale is not None
    if zero.dtype not in ("I8", "I16", "I32", "I64") or zero.shape != encoding.scale.shape:
        what = f"{zero}, expected an integer for each scale {encoding.scale}"
        raise headers.error(zero.name, what, METHOD)
    if not headers.read(zero.name).any():
        return dataclasses.replace(encoding, others=(zero,))
    spec = dataclasses.replace(encoding.spec, zero_point=True)
    return dataclasses.replace(encoding, spec=spec, zero_point=zero)


def _of_groups(
    headers: Headers,
    name: str,
    codes: Entry,
    scale: Entry,
    prefix: str,
    settings: Mapping[str, Any],
) -> Encoding:
    """NVFP4 and MX; scales that lie in tiles are put in the order of the blocks."""
    kind = settings.get("elem_dtype")
    tensor_scale = headers.get(f"{prefix}per_tensor_scale")
    spec = _MX.get(str(kind.get("_data"))) if isinstance(kind, Mapping) else None
    if kind is None:
        spec = NVFP4 if tensor_scale is not None else NVFP4_ALONE
    length = None if spec is None else spec.block[0]
    if spec is None or length is None or settings.get("block_size") != length:
        raise headers.error(codes.name, f"{settings}, expected NVFP4, MXFP4 or MXFP8", METHOD)
    is_packed = spec.element == E2M1FN
    shape = (*codes.shape[:-1], codes.shape[-1] * (1 + is_packed))
    is_tiled = settings.get("is_swizzled_scales") is True
    return decode_groups(
        *(headers, name, shape, spec, codes, scale),
        tiled_by=METHOD if is_tiled else "",
        packing=NIBBLES if is_packed else None,
        tensor_scale=tensor_scale,
    )


def _of_int4(headers: Headers, name: str, codes: Entry, scale: Entry, prefix: str) -> Encoding:
    zero = headers.check(f"{prefix}zero_point", FLOAT_SCALES)
    *batch, rows, half = codes.shape if len(codes.shape) > 1 else (0, 0)
    groups = scale.shape[-2] if len(scale.shape) > 1 else 0
    is_whole = groups and 2 * half % groups == 0 and scale.shape == (*batch, groups, rows)
    if not is_whole or zero.shape != scale.shape or scale.dtype not in FLOAT_SCALES or batch:
        what = f"{codes}, scale {scale}, zero_point {zero}, expected [outputs, inputs / 2] and "
        raise headers.error(codes.name, what + "[groups, outputs]", METHOD)
    return Encoding(
        name=name,
        shape=(rows, 2 * half),
        spec=BlockFormat.tensor(INT4, scale=None),
        lengths=(rows, 2 * half),
        codes=codes,
        packing=NIBBLES,
        others=(scale, zero),
        finish=_scaled_and_shifted,
    )


def _scaled_and_shifted(encoding: Encoding, values: np.ndarray, read: ReadEntry) -> np.ndarray:
    *_, scale, zero = encoding.others
    length = encoding.shape[1] // scale.shape[0]
    scales, zeros = (np.repeat(floats(e, read).T, length, 1) for e in (scale, zero))
    return values * scales + zeros


LAYOUT = Layout(
    name="torchao",
    title="torchao's tensor subclasses: _weight_qdata, _weight_scale, classes in the metadata",
    loaders="transformers with torchao; by their documentation (untested): vLLM",
    decode=decode,
    methods=(METHOD,),
    metadata_keys=lambda names: {_NAMES, *names},
)
