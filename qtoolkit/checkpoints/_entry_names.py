"""What the names of entries say: which are scales, codes, parts of a quantized weight, of whom.

No list of layouts is complete, so that what no layout reads is judged by its name and dtype.
"""

import math
import re
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

from qtoolkit.checkpoints._checkpoint import Tensor
from qtoolkit.checkpoints._tensors import DTYPE_BITS, FLOATS, Entry

# Scales of a KV cache. Some programs store them in the attention module, others in its projections.
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point")
# Entries that loaders need for a quantized weight. A dequantized checkpoint does not need them.
_AUXILIARY_SUFFIXES = (
    *("input_scale", "input_global_scale", "activation_scale", "output_scale", "weight_shape"),
    *("input_zero_point", "output_zero_point", "input_scale_ub", "scale_input"),
    *_CACHE_SCALES,
)
# Parts of names of entries that change a quantized weight: further scales, offsets, look-up tables,
# and matrices of low rank that are added to it, as in SVDQuant.
CHANGES = re.compile(
    r"(^|_)(scales?|scaling|zeros?|zp|offsets?|shifts?|absmax|factors?|codebooks?|lut|quant|smooth"
    r"|lora|svd\w*|low_?rank|proj_(up|down)|residual|outliers?|correction|rotation|signs?|g_idx)"
    r"(_|$|\d)|^(mins?|biases|perm\w*|had\w*)"
)
# "a.lora_A.weight", "a.weight.lora_a": of matrices that a program adds to the weight of "a".
LOW_RANK = re.compile(r"(?P<module>.+?)(\.weight)?\.lora_\w+(\..+)?$")
SCALES = re.compile(r"\.(q?scales|qscale|zeros|zero_points?|absmax)$")
_NARROW = {dtype for dtype, bits in DTYPE_BITS.items() if bits <= 8 and dtype[0] == "F"}
_FEW = 4  # elements of what holds a shape, a version or a key
_INTEGERS = {dtype for dtype in DTYPE_BITS if dtype[0] in "IU"}
# What models hold as integers that are no weights, by their names: masks, positions, tables from
# tokens to experts, counters. Not in 8 bits, but for masks: those may be indices in a codebook.
_MASK = re.compile(r"(^|[._/])(\w*_)?masks?(/value)?$")
_NO_WEIGHT = re.compile(
    r"(^|[._/])(\w*_)?(ids?|idxs?|index|positions?|lengths?|shapes?|tid2eid|counts?|steps?)([./]value)?$"
)
_KEY = re.compile(r"(^|[._/])(\w*_)?(keys?|key_data|rngs?)([./]value)?$")  # of JAX's generators
_OF_WEIGHT = re.compile(r"(weight|kernel)s?[._/][^./]*$")  # "a.weight.index", whatever the name
_IS_WEIGHT = re.compile(r"(^|[._/])(\w*_)?(weight|kernel)$")  # of BOOL: codes of one bit
CODEBOOK = re.compile(r"(codebooks?|lut|centroids|palettes?|tables?)$")
_TABLE = re.compile(r"(indices|tables?|buckets)$")  # of 64 bits; narrower ones may be codes
# Of which weight an entry is the scale, or the zero point.
_SCALE = re.compile(
    r"(?P<weight>.*?)(_?weight_(scale(_inv|_2)?|global_scale|zero_point)|_scale_inv|qzeros"
    r"|(?<![a-z])scale_weight)$"
)
# The same of a weight in high precision, which is there and whose values may be codes all the same.
_UNUSED_SCALE = re.compile(
    r"(?P<weight>.*(weight|kernel))[._](scales?|zeros?|zero_points?|absmax)$"
)
# Endings of names of codes and what belongs to them, and the program that writes such.
_PROGRAMS = {
    "weight_scales": "EETQ",
    ".wscales": "Nunchaku",
    "weights_scaling_factor": "TensorRT-LLM",
    "codebooks": "AQLM",
    "Qidxs": "QuIP#",
    "trellis": "ExLlamaV3",
    "q_weight": "ExLlamaV2",
    "_data": "optimum-quanto",
}
# The same of programs that are read, but not without the config, the metadata or entries that say
# what codes mean.
READ_PROGRAMS = {
    "SCB": "bitsandbytes",
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    ".scale_weight": "ComfyUI",
    ".comfy_quant": "ComfyUI",
    ".biases": "MLX",
    "_weight_qdata": "torchao",
    "W_q": "HQQ",
}


def auxiliary_names(weights: Collection[str]) -> set[str]:
    suffixes = _AUXILIARY_SUFFIXES
    modules = {name.rpartition(".")[0] for name in weights}
    names = {f"{module}.{suffix}".lstrip(".") for module in modules for suffix in suffixes}
    names |= {f"{weight}_{suffix}" for weight in weights for suffix in suffixes}  # fused experts
    parents = {module.rpartition(".")[0] for module in modules}
    return names | {f"{parent}.{scale}" for parent in parents if parent for scale in _CACHE_SCALES}


def is_cache_scale(name: str, tensors: Mapping[str, Any]) -> bool:
    """Whether a tensor is a scale of a KV cache, even if the projections are not quantized."""
    module, _, suffix = name.rpartition(".")
    if suffix not in _CACHE_SCALES:
        return False
    projections = (f"{module}.{suffix[0]}_proj.weight", f"{module}.qkv_proj.weight")
    return any(weight in tensors for weight in (f"{module}.weight", *projections))


def suffix_of(name: str, weights: Container[str]) -> str:
    """What the name of an entry says of its weight: "zeros" of "a.zeros" for "a.weight", and of
    "a.down_proj_zeros" for "a.down_proj"; "" if it is an entry of none of `weights`, or a bias.
    """
    if beside_weights([name], weights):
        return name.rpartition(".")[2]
    ends = (match.start() for match in re.finditer(r"[._]", name))
    return next((name[end + 1 :] for end in ends if name[:end] in weights), "")


def beside_weights(names: Collection[str], weights: Container[str]) -> list[str]:
    """Those of `names`, biases excepted, that lie in a module of which `weights` has NAME.weight.

    Such a module is a linear layer, and has nothing but a weight and a bias.
    """
    return [
        name
        for name in names
        if not name.endswith("bias") or name.endswith("quant_bias")  # not of "biases" of groups
        if f"{name.rpartition('.')[0]}.weight".lstrip(".") in weights
    ]


def may_be_codes(entry: Entry, names: Container[str]) -> bool:
    """Whether it is a narrow float, or an integer that is no mask, position or other table.

    `names` are those of codebooks: an index of one of them is a code.
    """
    shape, bits = entry.shape, DTYPE_BITS[entry.dtype]
    if 0 in shape:
        return False
    if entry.dtype in _NARROW:
        return True
    if entry.dtype == "BOOL":
        return len(shape) > 1 and _IS_WEIGHT.search(entry.name) is not None
    if entry.dtype not in _INTEGERS or (len(shape) < 2 and math.prod(shape) <= _FEW):
        return False
    # GPT-2's mask, named attn.bias, is of integers in old files.
    is_causal = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    if _MASK.search(entry.name) or (entry.name.endswith("bias") and is_causal):
        return False
    if _KEY.search(entry.name) and entry.dtype == "U32" and shape[-1] in (2, 4):
        return False
    if bits > 8 and _NO_WEIGHT.search(entry.name):
        return bool(_OF_WEIGHT.search(entry.name)) or entry.name.rpartition(".")[0] in names
    return bits < 64 or not (sum(n > 2 for n in shape) < 2 or _TABLE.search(entry.name))


def weight_names_of(name: str) -> list[str]:
    """The names that the weight may have of which a tensor is the scale, by its name."""
    match = _SCALE.match(name)
    base = "" if match is None else match["weight"]
    stems = (base, f"{base}weight", f"{base}_weight", f"{base}weight_packed")
    return [] if match is None else [*stems]


def is_unused_scale(entry: Entry, names: Mapping[str, Tensor]) -> bool:
    match = _UNUSED_SCALE.match(entry.name)
    weight = names.get(match["weight"]) if match is not None else None
    return weight is not None and weight.dtype in FLOATS and len(weight.shape) >= 2


def program_of(names: Iterable[str]) -> str:
    """The program that writes entries of such names; "" if none is known."""
    known = _PROGRAMS | READ_PROGRAMS
    return next((known[end] for name in names for end in known if name.endswith(end)), "")
