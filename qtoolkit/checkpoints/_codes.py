"""Finds tensors that may be codes of a layout that is not read, and scales whose weight is gone.

Copied as they are, codes look like weights to a loader: of a model whose weights have a mean
magnitude of 0.37 it saw 47.8. No list of layouts is complete, so what counts is the dtype.
"""

from collections.abc import Callable

from qtoolkit.checkpoints._checkpoint import Checkpoint
from qtoolkit.checkpoints._decode import (
    LAYOUT_OF,
    decode_weights,
    own_metadata,
    quantization_config,
)
from qtoolkit.checkpoints._entry_names import (
    CODEBOOK,
    READ_PROGRAMS,
    is_unused_scale,
    may_be_codes,
    program_of,
    weight_names_of,
)
from qtoolkit.checkpoints._tensors import FLOATS, CheckpointError, Entry, listed, shown
from qtoolkit.checkpoints.layouts._qarrays import undecoded_parts


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
    tables = {name.rpartition(".")[0] for name in names if CODEBOOK.search(name)}
    scales, unused, codes = [], [], []
    for tensor in source.tensors.values():
        if tensor.encoding is not None or tensor.name in described:
            continue
        is_suspect = may_be_codes(tensor.entry, tables)
        of = weight_names_of(tensor.name) if is_suspect or tensor.dtype in FLOATS else []
        weights = [names[name].dtype for name in of if name in names]
        if of and not weights:
            scales.append(tensor.entry)
        elif (weights and all(dtype in FLOATS for dtype in weights)) or (
            tensor.dtype in FLOATS and is_unused_scale(tensor.entry, source.tensors)
        ):
            unused.append(tensor.entry)
        elif is_suspect:
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
    program = program_of(entry.name for entry in (codes[0], *others))
    what = "without a scale of a layout that is read, so that these may be codes"
    if layout:
        what = f"without the scales that layout {layout} has, as config.json says"
    if program:
        advice = f"by the names of its entries it is of {program}, which is not read; "
        if program in READ_PROGRAMS.values():
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
