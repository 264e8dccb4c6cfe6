"""compressed-tensors, the layout of llm-compressor and vLLM.

Entries and configs follow the package itself: `compressors/*/base.py` and the presets in
`quantization/quant_scheme.py`. Scales multiply, but NVFP4's `weight_global_scale` divides.

Scales are those of the package for weights in float32, and codes are what it makes of a weight and
its stored scale, byte for byte. Two rules of scales are its own. Amax of integers becomes 127.5 or
7.5, half of their range: 0.5 dB better for int4 than 7. In MXFP8 an amax of 1.75 * 2**k, which a
power of two maps to the largest element, 448, is mapped to 224: OCP MX leaves the choice of the
scale open, and nothing clamps either way.

Scales are float32 here whatever the weights. Of a model in bfloat16, llm-compressor stores them in
bfloat16, and quotients are then rounded to bfloat16 before they become codes, on CPUs; its kernels
for GPUs round once, as qtoolkit always does. Rounding twice costs int8 0.5 dB of SQNR. Blocks of
zeros have other scales than in the package, which takes the machine epsilon.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from qtoolkit.checkpoints._tensors import Entry
from qtoolkit.checkpoints.layouts._encoding import NIBBLES, WORDS, Encoding, Packing, constant
from qtoolkit.checkpoints.layouts._headers import Headers, entry_beside
from qtoolkit.checkpoints.layouts._layout import (
    BYTE_ELEMENTS,
    HIGH_PRECISION,
    Layout,
    Scheme,
    SchemeModules,
    block_counts,
    by_block,
    by_channel,
    by_tensor,
    decode_bytes,
    decode_groups,
    scaling_of,
)
from qtoolkit.checkpoints.layouts._modules import ignored, is_table, patterns_of
from qtoolkit.checkpoints.layouts._packed_integers import (
    SHAPE,
    decode_integers,
    widths_of,
    with_group_index,
    with_zero_point,
)
from qtoolkit.formats import (
    E2M1FN,
    E4M3FN,
    INT4_GROUP32,
    INT4_GROUP128,
    INT8,
    INT8_GROUP128,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    IntFormat,
)

METHOD = "compressed-tensors"

FP8_CHANNEL = Scheme(
    name="FP8_DYNAMIC", spec=by_channel(E4M3FN), note="activations per token, when it runs"
)
FP8_TENSOR = Scheme(
    name="FP8", spec=by_tensor(E4M3FN), note="activations per token, or static with input scales"
)
FP8_STATIC = dataclasses.replace(FP8_TENSOR, note="static activations", needs_input_scale=True)
FP8_BLOCK = Scheme(name="FP8_BLOCK", spec=by_block(E4M3FN), note="activations per 128 of a token")
W8A8 = Scheme(name="W8A8", spec=by_channel(INT8), note="activations per token")
W8A8_ASYM = dataclasses.replace(
    W8A8, name="W8A8_ASYM", note="activations per token, with zero points", is_named=True
)
MX8 = Scheme(name="MXFP8", spec=MXFP8_E4M3, note="activations in blocks of 32")
MX4 = Scheme(name="MXFP4A16", spec=MXFP4, note="weights only")
NV4 = Scheme(
    name="NVFP4A16", spec=NVFP4, note="weights only; one tensor scale for q, k, v and gate, up"
)
W4A16 = Scheme(name="W4A16", spec=INT4_GROUP128, note="weights only, groups of 128")
W4A16_32 = Scheme(name="W4A16", spec=INT4_GROUP32, note="weights only, groups of 32")
W8A16 = Scheme(name="W8A16", spec=INT8_GROUP128, note="weights only, groups of 128")
W4A16_ASYM = Scheme(
    name="W4A16_ASYM",
    spec=INT4_GROUP128.with_(zero_point=True),
    note="weights only, groups of 128 with zero points",
)

PACKED = {W4A16, W4A16_32, W8A16, W4A16_ASYM}
_BYTES = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
# In a group of the config the format of each scheme, and its activations.
_CONFIG: dict[Scheme, tuple[str, dict[str, Any] | None]] = {
    FP8_CHANNEL: ("float-quantized", _TOKEN),
    FP8_TENSOR: ("float-quantized", _TOKEN),
    FP8_STATIC: ("float-quantized", _TOKEN | {"dynamic": False, "strategy": "tensor"}),
    FP8_BLOCK: ("float-quantized", _TOKEN | {"strategy": "group", "group_size": 128}),
    W8A8: ("int-quantized", _TOKEN | {"type": "int"}),
    W8A8_ASYM: ("int-quantized", _TOKEN | {"type": "int", "symmetric": False}),
    MX8: ("mxfp8-quantized", _TOKEN | {"strategy": "group", "group_size": 32} | _BYTES),
    MX4: ("mxfp4-pack-quantized", None),
    NV4: ("nvfp4-pack-quantized", None),
    **dict.fromkeys(PACKED, ("pack-quantized", None)),
}
_DIVIDED = "weight_global_scale"


def store(entry: Entry, scheme: Scheme, axes: Sequence[int], input_scale: float | None) -> Encoding:
    (rows, columns), name, spec = entry.shape, entry.name, with_scale_rules(scheme.spec)
    element, lengths = spec.element, spec.block_lengths(entry.shape)
    packing: Packing | None = None
    codes = Entry(name, "I8" if element == INT8 else "F8_E4M3", entry.shape)
    constants = []
    packed = entry_beside(name, "weight_packed")
    if scheme in PACKED:
        packing = WORDS
        codes = Entry(packed, "I32", (rows, -(-columns * element.bits // 32)))
        constants.append(constant(entry_beside(name, SHAPE), "I64", entry.shape, (2,)))
    elif element == E2M1FN:
        packing = NIBBLES
        codes = Entry(packed, "U8", (rows, columns // 2))
    if scheme == FP8_STATIC:
        assert input_scale is not None
        constants.append(constant(entry_beside(name, "input_scale"), "F32", input_scale, (1,)))
    zero_point = zero_packing = None
    if spec.zero_point:
        zero_packing = dataclasses.replace(WORDS, axis=-2)
        shape = -(-rows * element.bits // 32), -(-columns // lengths[1])
        zero_point = Entry(entry_beside(name, "weight_zero_point"), "I32", shape)
    dtype = "U8" if spec.has_powers else "F8_E4M3" if scheme == NV4 else "F32"
    is_single = scheme in (FP8_TENSOR, FP8_STATIC)
    counts = (1,) if is_single else block_counts(entry.shape, lengths)
    return Encoding(
        name=name,
        shape=entry.shape,
        spec=spec,
        lengths=lengths,
        codes=codes,
        scale=Entry(entry_beside(name, "weight_scale"), dtype, counts),
        tensor_scale=Entry(entry_beside(name, _DIVIDED), "F32", (1,)) if scheme == NV4 else None,
        packing=packing,
        zero_point=zero_point,
        zero_packing=zero_packing,
        constants=tuple(constants),
    )


@functools.cache  # equal formats are one object: see `block_format`
def with_scale_rules(spec: BlockFormat) -> BlockFormat:
    """`spec` with the package's own rules of scales."""
    if isinstance(spec.element, IntFormat):
        return spec if spec.zero_point else dataclasses.replace(spec, rule="range")
    if spec.tensor_scale is not None:
        return dataclasses.replace(spec, tensor_scale_divides=True)
    if spec.has_powers and spec.element == E4M3FN:
        return dataclasses.replace(spec, rule="below")
    return spec


def decode(config: Mapping[str, Any], headers: Headers) -> dict[str, Encoding]:
    _check_transforms(headers, config)
    weights = _weight_groups(headers, config)
    _check_dense(headers, config)
    blocks = _blocks(headers, weights)
    are_floats = bool(weights) and all(group.get("type") == "float" for group in weights)
    widths = widths_of(headers, weights, config.get("version"))
    stated = [group.get("symmetric") for group in weights]
    is_symmetric = stated[0] if stated and stated == stated[:1] * len(stated) else None
    encodings = {}
    for name, entry in headers.items():
        last = name.rpartition(".")[2]
        if last == "weight_packed" and entry.dtype == "U8" and len(entry.shape) == 2:
            encoding = _decode_fp4(headers, entry)
        elif last == "weight_packed" and entry.dtype == "I32" and len(entry.shape) == 2:
            encoding = decode_integers(headers, entry, widths)
        elif last == "weight_packed":
            raise headers.error(name, f"{entry}, expected a matrix of I32 or U8", METHOD)
        elif last == "weight" and entry.dtype in BYTE_ELEMENTS and f"{name}_scale" in headers:
            encoding = _decode_bytes(headers, name, blocks, are_floats)
        elif (
            last == "weight"
            and entry.dtype in HIGH_PRECISION
            and config
            and f"{name}_scale" in headers
        ):
            what = f"{entry} with a scale, expected codes: it is rounded when the model runs"
            raise headers.error(name, what, METHOD)
        else:
            continue
        encoding = with_group_index(headers, encoding)
        encodings[encoding.name] = with_zero_point(headers, encoding, is_symmetric)
    return encodings


def _decode_bytes(
    headers: Headers, name: str, blocks: Sequence[Sequence[int]], are_floats: bool
) -> Encoding:
    scale, shape = headers[f"{name}_scale"], headers[name].shape
    if scale.dtype != "U8":
        fitting = (block for block in blocks if scale.shape[-2:] == block_counts(shape[-2:], block))
        block = next(fitting, None)
        of = decode_bytes(headers, name, f"{name}_scale", block, are_floats=are_floats)
        if len(shape) == 2 and of.lengths == (shape[0], 1) and block is None and shape[1] > 1:
            what = f"{list(scale.shape)} of {list(shape)}, a scale for each input, expected outputs"
            raise headers.error(scale.name, what, METHOD)
        return of
    codes = headers.check(name, ("F8_E4M3",))
    entry = headers.check(f"{name}_scale", ("U8",))
    return decode_groups(headers, name, codes.shape, MXFP8_E4M3, codes, entry)


def _decode_fp4(headers: Headers, entry: Entry) -> Encoding:
    """Reads NVFP4 if there is a tensor scale, else MXFP4."""
    name, scale_name, tensor_scale_name = (
        entry_beside(entry.name, suffix) for suffix in ("weight", "weight_scale", _DIVIDED)
    )
    fmt, dtypes, tensor_scale = MXFP4, "U8 F8_E8M0", None
    if tensor_scale_name in headers:
        fmt, dtypes = with_scale_rules(NVFP4), "F8_E4M3"
        tensor_scale = headers.check(tensor_scale_name, ("F32",))
    return decode_groups(
        headers,
        name,
        (entry.shape[0], 2 * entry.shape[1]),
        fmt,
        entry,
        headers.check(scale_name, tuple(dtypes.split())),
        packing=NIBBLES,
        tensor_scale=tensor_scale,
    )


def _weight_groups(headers: Headers, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The "weights" of each group in the config; {} for a group without them."""
    groups = config.get("config_groups") or {}
    known = isinstance(groups, dict) and all(isinstance(g, dict) for g in groups.values())
    found = [group.get("weights") or {} for group in groups.values()] if known else []
    if not known or not all(isinstance(weights, dict) for weights in found):
        what = 'an object of groups, {"group_0": {"weights": {...}}}'
        raise headers.config_error("config_groups", groups, what, METHOD)
    return found


def _check_transforms(headers: Headers, config: Mapping[str, Any]) -> None:
    """Raises if the model rotates weights and activations when it runs (SpinQuant, QuIP)."""
    transforms = config.get("transform_config")
    if isinstance(transforms, Mapping):
        transforms = transforms.get("config_groups")
    if transforms:
        what = "none: weights and activations are rotated, which is not read"
        raise headers.config_error("transform_config", transforms, what)


def _check_dense(headers: Headers, config: Mapping[str, Any]) -> None:
    """Raises for weights of which only some are stored: entries of other names and meanings."""
    groups = config.get("config_groups") or {}
    for part in (config, config.get("sparsity_config"), *groups.values()):
        name = part.get("format") if isinstance(part, Mapping) else None
        if isinstance(name, str) and (name == "marlin-24" or name.startswith("sparse")):
            raise headers.config_error("format", name, "one of dense weights", METHOD)


def _blocks(headers: Headers, groups: Sequence[Mapping[str, Any]]) -> list[Sequence[int]]:
    """The shapes of blocks that the config names; a group of n elements of a row is (1, n)."""
    found = [headers.check_block(g.get("block_structure"), "block_structure") for g in groups]
    lengths = (g.get("group_size") for g in groups)
    rows = [(1, length) for length in lengths if type(length) is int and length > 0]
    return [*(block for block in found if block is not None), *rows]


def config(used: SchemeModules, unquantized: Sequence[str]) -> dict[str, Any]:
    """One group for each scheme; if there is only one, it targets all Linear layers.

    Tables of embeddings are targeted by their class: vLLM's models do not tell all of them their
    names (llm-compressor PR#2830).
    """
    quantized = [module for modules in used.values() for module in modules]
    of_tables = [scheme for scheme, modules in used.items() if any(map(is_table, modules))]

    def targets(modules: Sequence[str]) -> list[str]:
        linear = [module for module in modules if len(of_tables) != 1 or not is_table(module)]
        classes = ["Embedding"] if len(linear) < len(modules) else []
        if len(used) == 1:
            return (["Linear"] if linear else []) + classes
        return patterns_of(linear, sorted({*quantized, *unquantized} - {*modules})) + classes

    groups = {
        f"group_{number}": {
            "targets": targets(modules),
            "format": _CONFIG[scheme][0],
            "weights": _weights(scheme),
            "input_activations": _CONFIG[scheme][1],
            "output_activations": None,
        }
        for number, (scheme, modules) in enumerate(used.items())
    }
    formats = {_CONFIG[scheme][0] for scheme in used}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored(unquantized, quantized),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(scheme: Scheme) -> dict[str, Any]:
    spec = scheme.spec
    is_int = isinstance(spec.element, IntFormat)
    args: dict[str, Any] = {
        "num_bits": spec.element.bits,
        "type": "int" if is_int else "float",
        "symmetric": not spec.zero_point,
        "dynamic": False,
    }
    word = scaling_of(spec) if scheme not in PACKED else None
    if word is not None:
        args["strategy"] = word
        return args | ({"block_structure": list(spec.block)} if word == "block" else {})
    args["strategy"] = "tensor_group" if scheme == NV4 else "group"
    args["group_size"] = spec.block[0]
    if scheme == NV4:
        args["scale_dtype"] = args["zp_dtype"] = "torch.float8_e4m3fn"
    return args | (_BYTES if spec.has_powers else {})


LAYOUT = Layout(
    name="compressed-tensors",
    title="that of llm-compressor: weight or weight_packed, weight_scale",
    note="Scales are those of compressed-tensors for float32 weights: amax of integers becomes "
    "127.5 or 7.5. Codes are what its own quantize makes of a weight and its scale, byte for byte.",
    loaders="transformers with compressed-tensors; by their documentation (untested): vLLM, SGLang",
    schemes=(
        *(FP8_CHANNEL, FP8_TENSOR, FP8_BLOCK, W8A8, W8A8_ASYM),
        *(MX8, MX4, NV4, W4A16, W4A16_32, W8A16, W4A16_ASYM),
    ),
    decode=decode,
    store=store,
    config=config,
    methods=(METHOD,),
    is_mixed=True,
    tables=frozenset(PACKED - {W4A16_ASYM}),
    static={FP8_TENSOR: FP8_STATIC},
    with_scale_rules=with_scale_rules,
    refused={
        r"feed_forward\.experts\.(gate_up_proj|down_proj)$": "all experts of a Llama 4 layer in "
        "one tensor, expected one by one: loaders of compressed-tensors split the module, and find "
        "no weights for it; give the folder with its config.json, by which they are split"
    },
)
