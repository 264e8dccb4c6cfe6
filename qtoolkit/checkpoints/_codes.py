"""Finds tensors that may be codes of a layout that is not read, and scales whose weight is gone.

Copied as they are, codes look like weights to a loader: of a model whose weights have a mean
magnitude of 0.37 it saw 47.8. No list of layouts is complete, so what counts is the dtype.
"""

import math
import re
from collections.abc import Callable, Container, Mapping

from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._decode import (
    LAYOUT_OF,
    decode_weights,
    own_metadata,
    quantization_config,
)
from qtoolkit.checkpoints._tensors import DTYPE_BITS, FLOATS, CheckpointError, Entry, listed, shown
from qtoolkit.checkpoints.layouts._qarrays import undecoded_parts

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
_CODEBOOK = re.compile(r"(codebooks?|lut|centroids|palettes?|tables?)$")
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
_READ_PROGRAMS = {
    "SCB": "bitsandbytes",
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    ".scale_weight": "ComfyUI",
    ".comfy_quant": "ComfyUI",
    ".biases": "MLX",
    "_weight_qdata": "torchao",
    "W_q": "HQQ",
}


def check_explained(
    source: Checkpoint, is_allowed: Callable[[str], bool] | None = None, remedy: str = ""
) -> bool:
    """Raises where tensors may be codes that no layout explains, or scales have no weight.

    Says whether there are such tensors that are allowed. `is_allowed` tells it by the name of a
    tensor; None: none is in a folder whose config names a layout, all are in others. `remedy` says
    what to write in order to copy them.
    """
    if own_metadata(source).get("keeps_codes"):  # `convert` was told to
        return True
    config = quantization_config(source)
    if is_allowed is None and not config:
        return False
    is_allowed = is_allowed or (lambda name: False)
    method = str(config.get("quant_method", "compressed-tensors"))
    layout = LAYOUT_OF[method].name if config else ""
    described = undecoded_parts(source.metadata, source.tensors, source.encodings)
    names = source.stored or source.tensors
    tables = {name.rpartition(".")[0] for name in names if _CODEBOOK.search(name)}
    scales, unused, codes = [], [], []
    for tensor in source.tensors.values():
        if tensor.encoding is not None or tensor.name in described:
            continue
        may_be_codes = _may_be_codes(tensor.entry, tables)
        of = _weight_of(tensor.name) if may_be_codes or tensor.dtype in FLOATS else []
        weights = [names[name].dtype for name in of if name in names]
        if of and not weights:
            scales.append(tensor.entry)
        elif (weights and all(dtype in FLOATS for dtype in weights)) or (
            tensor.dtype in FLOATS and _is_unused_scale(tensor.entry, source.tensors)
        ):
            unused.append(tensor.entry)
        elif may_be_codes:
            codes.append(tensor.entry)
    if refused := [entry for entry in codes if not is_allowed(entry.name)]:
        refused.sort(key=lambda entry: -entry.nbytes)
        raise _unexplained(source, refused, layout, remedy)
    if refused := [entry for entry in scales if not is_allowed(entry.name)]:
        raise CheckpointError(
            f"{source.path}: tensor {_name_list(refused)}: of a weight that is not there, expected "
            f"both; fetch the checkpoint again, or give the whole folder{remedy}"
        )
    if refused := [entry for entry in unused if not is_allowed(entry.name)]:
        raise CheckpointError(
            f"{source.path}: tensor {_name_list(refused)}: a scale by its name, of a weight in "
            "high precision, expected codes, because nothing that is read multiplies such a "
            f"weight; dequantize the checkpoint with the program that made it{remedy}"
        )
    return bool(codes or scales or unused)


def decode_quantized(source: Checkpoint) -> Checkpoint:
    """`decode_weights`, but raises CheckpointError if nothing is quantized."""
    checkpoint = decode_weights(source)
    if any(tensor.is_dequantized for tensor in checkpoint.tensors.values()):
        return checkpoint
    check_explained(checkpoint, lambda name: False)
    if copied := undecoded_parts(source.metadata, source.tensors, ()):
        raise CheckpointError(
            f"{source.path}: tensor {shown(min(copied))}: of a QArray that the commands "
            "do not read: of more than 8 bits, or packed with zero points, a last axis of one "
            "element or unusual blocks; dequantize it in Python: "
            "qtoolkit.checkpoints.load(FILE)[NAME].dequantize()"
        )
    raise CheckpointError(
        f"{source.path}: nothing in it is quantized in a known layout, expected one; "
        "`qtoolkit layouts` lists them, `qtoolkit inspect` shows what is there"
    )


def _may_be_codes(entry: Entry, names: Container[str]) -> bool:
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
    if _MASK.search(entry.name) or (entry.name.endswith("bias") and _is_causal_mask(shape)):
        return False
    if _KEY.search(entry.name) and entry.dtype == "U32" and shape[-1] in (2, 4):
        return False
    if bits > 8 and _NO_WEIGHT.search(entry.name):
        return bool(_OF_WEIGHT.search(entry.name)) or entry.name.rpartition(".")[0] in names
    return bits < 64 or not (sum(n > 2 for n in shape) < 2 or _TABLE.search(entry.name))


def _is_causal_mask(shape: tuple[int, ...]) -> bool:
    """Whether it is the shape of GPT-2's mask, named attn.bias, of integers in old files."""
    return len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]


def _weight_of(name: str) -> list[str]:
    """The names that the weight may have of which a tensor is the scale, by its name."""
    match = _SCALE.match(name)
    base = "" if match is None else match["weight"]
    stems = (base, f"{base}weight", f"{base}_weight", f"{base}weight_packed")
    return [] if match is None else [*stems]


def _is_unused_scale(entry: Entry, names: Mapping[str, Tensor]) -> bool:
    match = _UNUSED_SCALE.match(entry.name)
    weight = names.get(match["weight"]) if match is not None else None
    return weight is not None and weight.dtype in FLOATS and len(weight.shape) >= 2


def _unexplained(
    source: Checkpoint, codes: list[Entry], layout: str, remedy: str
) -> CheckpointError:
    first = codes[0].name
    module = first.rpartition(".")[0] or None
    others = [
        tensor.entry
        for name, tensor in source.tensors.items()
        if (name.rpartition(".")[0] == module or name.startswith((f"{first}.", f"{first}_")))
        and name != first
        and not name.endswith("bias")
    ]
    known = _PROGRAMS | _READ_PROGRAMS
    endings = ((entry.name, end) for entry in (codes[0], *others) for end in known)
    program = next((known[end] for name, end in endings if name.endswith(end)), "")
    what = "without a scale of a layout that is read, so that these may be codes"
    if layout:
        what = f"without the scales that layout {layout} has, as config.json says"
    if program:
        advice = f"by the names of its entries it is of {program}, which is not read; "
        if program in _READ_PROGRAMS.values():
            advice = advice.replace("; ", " without what says how it was quantized; ")
            advice += "give the whole folder as the program wrote it, or "
        advice += f"dequantize it with {program}"
    elif layout and not others:
        advice = "fetch the checkpoint again"
    else:
        advice = "dequantize the checkpoint with the program that made it"
        if others:
            what += f" (with it: {listed((f'{shown(e.name)} {e}' for e in others), 2)})"
    return CheckpointError(f"{source.path}: tensor {_name_list(codes)}, {what}; {advice}{remedy}")


def _name_list(entries: list[Entry]) -> str:
    """The names of the first ones; of a single one its dtype and shape, too."""
    if len(entries) == 1:
        return f"{shown(entries[0].name)}: {entries[0]}"
    return listed((f"{shown(e.name)} {e}" for e in entries), 3)
