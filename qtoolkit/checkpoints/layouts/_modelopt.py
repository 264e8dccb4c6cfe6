"""NVIDIA's modelopt.

A weight has o outputs and i inputs, and there may be e experts.

* FP8: `weight` is F8_E4M3. `weight_scale`, F32, has one scale for the tensor (then there is an
  `input_scale`) or one for each output. In FP8_PB_WO, which is only read, it has one for each
  block: [o / 128, 1, i / 128, 1].
* NVFP4: `weight` is U8, two codes in a byte; `weight_scale` is F8_E4M3 [o, i / 16];
  `weight_scale_2`, F32, multiplies; and there is an `input_scale`.
* MXFP8, which is only read: `weight_scale` is U8 [o, i / 32].
* NVFP4_AWQ, which is only read: there is a `pre_quant_scale` [i], by which inputs are multiplied
  before they are quantized. So the weight is code * scales * pre_quant_scale of its input.

If all experts of a layer are in one tensor, its first axis is that of experts, and the scales are
named `NAME_weight_scale` and `NAME_weight_scale_2`. In Llama 4 and gpt-oss this tensor is
[e, i, o], and codes are packed along the axis of inputs.
Source: github.com/NVIDIA/Model-Optimizer, modelopt/torch/export; vLLM, quantization/modelopt.py;
compressed-tensors, entrypoints/convert/converters/modelopt_nvfp4.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit._version import __version__
from qtoolkit.checkpoints._tensors import CheckpointError, Entry, shown
from qtoolkit.checkpoints.layouts._encoding import NIBBLES, Encoding, Packing, constant
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import (
    BYTE_ELEMENTS,
    FLOAT_SCALES,
    Layout,
    Scheme,
    SchemeModules,
    by_channel,
    by_tensor,
    decode_bytes,
    decode_groups,
    microscaled,
    times_factors,
)
from qtoolkit.formats import E4M3FN, NVFP4

METHOD = "modelopt"
_TENSOR_SCALE = "weight_scale_2"

CHANNEL = Scheme(
    name="FP8_PER_CHANNEL_PER_TOKEN",
    spec=by_channel(E4M3FN),
    note="activations per token, when it runs",
)
TENSOR = Scheme(
    name="FP8", spec=by_tensor(E4M3FN), note="static activations", needs_input_scale=True
)
NV4 = Scheme(
    name="NVFP4",
    spec=NVFP4,
    note="static tensor scale of activations; one tensor scale for q, k, v and gate, up",
    needs_input_scale=True,
)


def store(entry: Entry, scheme: Scheme, axes: Sequence[int], input_scale: float | None) -> Encoding:
    rows, columns = entry.shape
    name = entry.name
    scale_name = entry_beside(name, "weight_scale")
    constants: tuple[tuple[Entry, bytes], ...] = ()
    if scheme.needs_input_scale:
        assert input_scale is not None
        constants = (constant(entry_beside(name, "input_scale"), "F32", input_scale, ()),)
    nv4 = scheme == NV4
    if nv4:
        codes = Entry(name, "U8", (rows, columns // 2))
        scale = Entry(scale_name, "F8_E4M3", (rows, columns // 16))
    else:
        codes = Entry(name, "F8_E4M3", entry.shape)
        scale = Entry(scale_name, "F32", () if scheme == TENSOR else (rows,))
    return Encoding(
        name=name,
        shape=entry.shape,
        spec=scheme.spec,
        lengths=scheme.spec.block_lengths(entry.shape),
        codes=codes,
        scale=scale,
        tensor_scale=Entry(entry_beside(name, _TENSOR_SCALE), "F32", ()) if nv4 else None,
        packing=NIBBLES if nv4 else None,
        constants=constants,
    )


# The values of `quant_algo` that `decode` reads.
_READ = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "NVFP4_AWQ"),
    *("W4A16_NVFP4", "MIXED_PRECISION"),
)


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    algorithm = config.get("quant_algo")
    if algorithm is not None and algorithm not in _READ:
        raise CheckpointError(
            f"{headers.path}: quant_algo {shown(str(algorithm))} in its config, expected "
            f"{', '.join(_READ)}; dequantize the checkpoint with the program that made it"
        )
    encodings: dict[str, Encoding] = {}
    for name, entry in headers.items():
        scale_name, tensor_scale_name = _beside(name, "weight_scale"), _beside(name, _TENSOR_SCALE)
        scale = headers.get(scale_name)
        if entry.dtype == "U8" and tensor_scale_name in headers:
            scale = headers.check(scale_name, ("F8_E4M3",))
            tensor_scale = headers.check(tensor_scale_name, ("F32",))
            encodings[name] = _nvfp4(headers, entry, scale, tensor_scale)
        elif entry.dtype in BYTE_ELEMENTS and scale is not None and scale.dtype in FLOAT_SCALES:
            entries = {name: entry, scale_name: _as_blocks(headers, entry, scale)}
            pair = headers.only(entries)
            are_floats = str(algorithm).startswith("FP8")
            encodings[name] = decode_bytes(pair, name, scale_name, are_floats=are_floats)
        elif entry.dtype in BYTE_ELEMENTS and scale is not None and config:
            encoding = microscaled(headers, name, scale_name)
            encodings |= {} if encoding is None else {name: encoding}
    for factors in headers.values():
        if factors.name.rpartition(".")[2] == "pre_quant_scale":
            name = entry_beside(factors.name, "weight")
            encodings[name] = _with_factors(headers, encodings.get(name), factors)
    return encodings


def _with_factors(headers: Headers, encoding: Encoding | None, factors: Entry) -> Encoding:
    """The encoding of a weight whose inputs are multiplied by factors (AWQ)."""
    is_floats = factors.dtype in FLOAT_SCALES
    if encoding is None or not is_floats or factors.shape != encoding.shape[1:]:
        what = f"{factors}, by which inputs are multiplied (AWQ), expected one for each input of a"
        raise headers.error(factors.name, f"{what} quantized matrix in the same module")
    return dataclasses.replace(encoding, others=(factors,), finish=times_factors)


def _beside(name: str, suffix: str) -> str:
    """The name of an entry of a weight: for fused experts, experts.down_proj_weight_scale."""
    return entry_beside(name, suffix) if name.endswith("weight") else f"{name}_{suffix}"


def _nvfp4(headers: Headers, codes: Entry, scale: Entry, tensor_scale: Entry) -> Encoding:
    """How NVFP4 is stored: blocks along the last axis, or for experts [e, i, o] the middle one."""
    shape, counts = codes.shape, scale.shape
    by_inputs = len(shape) == 3 and counts[1:] == (-(-shape[1] // 8), shape[2])
    if by_inputs:  # checked as the transposed weight, whose blocks lie along the last axis
        shape, counts = (shape[0], shape[2], shape[1]), (counts[0], counts[2], counts[1])
    encoding = decode_groups(
        headers,
        codes.name,
        (*shape[:-1], *(2 * n for n in shape[-1:])),
        NVFP4,
        codes,
        scale._replace(shape=counts),
        packing=NIBBLES,
        tensor_scale=tensor_scale,
    )
    if not by_inputs:
        return encoding
    experts, outputs, inputs = encoding.shape
    return dataclasses.replace(
        encoding,
        shape=(experts, inputs, outputs),
        lengths=(1, 16, 1),
        scale=scale,
        packing=Packing(8, axis=-2),
    )


def _as_blocks(headers: Headers, weight: Entry, scale: Entry) -> Entry:
    """The entry of the scales, reshaped to as many axes as the weight has.

    In files, scales of FP8_PB_WO are [o / 128, 1, i / 128, 1], those of fused experts [e, n].
    """
    if len(weight.shape) == 2 and len(scale.shape) == 4 and scale.shape[1::2] == (1, 1):
        return scale._replace(shape=scale.shape[::2])
    if len(weight.shape) != 3 or len(scale.shape) != 2:
        return scale
    (experts, count), (rows, columns) = scale.shape, weight.shape[1:]
    if count == 1:
        return scale._replace(shape=(experts, 1, 1))
    if (count == rows) == (count == columns):
        what = f"{list(scale.shape)} of {list(weight.shape)}, expected scales of the rows or of the"
        what += " columns, whose numbers differ"
        raise headers.error(scale.name, what, METHOD)
    return scale._replace(shape=(experts, rows, 1) if count == rows else (experts, 1, columns))


def config(used: SchemeModules, unquantized: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "quant_algo": _algorithm(used),
        "kv_cache_scheme": None,
        "ignore": list(unquantized),
        **({"group_size": 16} if NV4 in used else {}),
        "producer": {"name": "qtoolkit", "version": __version__},
    }


def files(used: SchemeModules, unquantized: Sequence[str]) -> dict[str, Any]:
    quantization = {
        "quant_algo": _algorithm(used),
        "kv_cache_quant_algo": None,
        "exclude_modules": list(unquantized),
        **({"group_size": 16} if NV4 in used else {}),
    }
    producer = {"name": "qtoolkit", "version": __version__}
    return {"hf_quant_config.json": {"producer": producer, "quantization": quantization}}


def _algorithm(used: SchemeModules) -> str:
    (scheme,) = used
    return scheme.name


LAYOUT = Layout(
    name="modelopt",
    title="that of NVIDIA's modelopt: weight, weight_scale, weight_scale_2, input_scale",
    loaders="by their documentation (untested): vLLM, TensorRT-LLM, SGLang",
    schemes=(CHANNEL, TENSOR, NV4),
    decode=decode,
    store=store,
    config=config,
    files=files,
    methods=(METHOD, f"{METHOD}_fp8", f"{METHOD}_fp4"),  # the last ones: as engines call it
)
