"""MLX: words of 32 bits with scales and biases for groups of a row.

`weight` is U32 [..., outputs, inputs * bits / 32], without gaps, the first code in the low bits;
`scales` and `biases` are [..., outputs, groups]; x = scale * code + bias. The modes mxfp4, mxfp8
and nvfp4 have no biases, and `scales` U8: bytes of E8M0, of nvfp4 of E4M3. The config says bits and
group_size, in general and for single modules by name.
Source: github.com/ml-explore/mlx, python/src/ops.cpp, dequantize; mlx-lm, utils.py, load_model.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import NUMPY_DTYPES, configs_in
from qtoolkit.checkpoints.layouts._encoding import NIBBLES, Encoding, ReadEntry, dense
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import (
    FLOAT_SCALES,
    HIGH_PRECISION,
    NVFP4_ALONE,
    Layout,
    block_format,
    decode_groups,
)
from qtoolkit.formats import MXFP4, MXFP8_E4M3
from qtoolkit.formats import format as resolve

METHOD, _KEY = "mlx", "quantization"
_BITS = (1, 2, 3, 4, 5, 6, 8)
_MODES = {"mxfp4": MXFP4, "mxfp8": MXFP8_E4M3, "nvfp4": NVFP4_ALONE}
# Modules of language models with as many inputs as hidden_size. Entries of 4 bits in groups of 64
# have the same shapes as those of 8 bits in groups of 32 of half as many inputs.
_INPUTS = re.compile(
    r"^(?!.*(vis|audio|encoder)).*\b(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.weight$"
)


def own_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization config that MLX writes to config.json; {} if there is none."""
    for part in configs_in(config):
        found = part.get(_KEY)
        if isinstance(found, dict) and {"bits", "group_size"} <= found.keys():
            sizes = [one.get("hidden_size") for one in configs_in(config)]
            return {
                "quant_method": METHOD,
                "hidden_size": max(filter(None, sizes), default=0),
                **found,
            }
    return {}


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    """Without a config nothing is read: 16 words may be 128 codes of 4 bits, or 64 of 8."""
    names = [name for name in headers if config and entry_beside(name, "scales") in headers]
    for module, settings in config.items():
        if isinstance(settings, Mapping) and f"{module}.weight" not in names:
            # Loaders rename modules; then another module would be read with wrong bits.
            raise headers.config_error(module, settings, "the name of a quantized module", "MLX")
    return {
        name: _decode_weight(config, headers, name)
        for name in names
        if f".{name}".endswith(".weight")
    }


def _decode_weight(config: Mapping[str, Any], headers: Headers, name: str) -> Encoding:
    codes = headers.check(name, ("U32",))
    own = config.get(name.removesuffix(".weight"))
    settings = {**config, **own} if isinstance(own, Mapping) else config
    bits, length, mode = settings["bits"], settings["group_size"], settings.get("mode", "affine")
    if entry_beside(name, "global_scale") in headers:
        what = "a further scale of the mode nvfp4, expected none"
        raise headers.error(entry_beside(name, "global_scale"), what, "MLX")
    if mode not in ("affine", *_MODES):
        raise headers.config_error("mode", mode, ", ".join(("affine", *_MODES)), "MLX")
    scales = ("U8",) if mode in _MODES else FLOAT_SCALES
    scale = headers.check(entry_beside(name, "scales"), scales)
    spec = _MODES.get(mode)
    if spec is None and bits in _BITS and type(length) is int and length > 0:
        element = resolve(f"uint{bits}")
        spec = block_format(element=element, block=(length,), scale=HIGH_PRECISION[scale.dtype])
    if spec is None or (spec.element.bits, spec.block) != (bits, (length,)):
        what = (
            f"bits of {', '.join(map(str, _BITS))} and a length, or those of mxfp4 (4, 32), mxfp8"
        )
        raise headers.config_error(_KEY, settings, f"{what} (8, 32), nvfp4 (4, 16)", "MLX")
    shape = (*codes.shape[:-1], codes.shape[-1] * 32 // bits) if codes.shape else ()
    if mode == "nvfp4":  # its bytes are those of E4M3
        scale = scale._replace(dtype="F8_E4M3")
    hidden = config.get("hidden_size") or 0
    others = (hidden * 2, hidden * 4, hidden // 2, hidden // 4)
    if shape and hidden and shape[-1] in others and _INPUTS.search(name):
        what = f"{shape[-1]} inputs as {bits} bits in groups of {length}, expected the hidden_size "
        raise headers.error(name, f"{what}{hidden}, as with other bits and groups", "MLX")
    packing = None if mode == "mxfp8" else NIBBLES if bits == 4 else dense(bits)
    encoding = decode_groups(headers, name, shape, spec, codes, scale, packing=packing)
    if mode != "affine":
        return encoding
    bias = headers.check(entry_beside(name, "biases"), (scale.dtype,))
    if bias.shape != scale.shape or shape[-1] % length:
        what = f"{list(bias.shape)}, expected one for each scale {list(scale.shape)}"
        raise headers.error(bias.name, f"{what} of whole groups of {length}", "MLX")
    return dataclasses.replace(encoding, others=(bias,), finish=_biased)


def _biased(encoding: Encoding, values: np.ndarray, read: ReadEntry) -> np.ndarray:
    length = encoding.lengths[-1]
    biases = read(encoding.others[0]).view(NUMPY_DTYPES[encoding.others[0].dtype])
    groups = values.reshape(-1, length) + biases.astype(np.float32)[:, None]
    return groups.reshape(encoding.shape)  # a matrix of a stack has its part of the biases


LAYOUT = Layout(
    name="mlx",
    title="that of MLX: weight in words of 32 bits, scales, biases",
    loaders="mlx-lm, MLX Swift",
    note="Modules keep MLX's names; some models have their convolutions [o, kh, kw, i], and norms "
    "with 1 added.",
    decode=decode,
    methods=(METHOD,),
    own_key=_KEY,
    own_config=own_config,
)
