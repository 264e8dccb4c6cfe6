"""Open a quantized checkpoint so that its quantized weights can be read as float32 tensors.

First a layout finds out how each weight is stored, and describes this by an `Encoding`. This needs
no JAX. Then `_reader.py` reads the bytes of a weight and dequantizes them, one part after another.
What no layout explains is refused by `check_explained`.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Container, Mapping, Set
from typing import Any

import numpy as np

from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor, WeightReader, all_zeros
from qtoolkit.checkpoints._entry_names import (
    CHANGES,
    CODEBOOK,
    LOW_RANK,
    READ_PROGRAMS,
    SCALES,
    auxiliary_names,
    beside_weights,
    is_cache_scale,
    is_unused_scale,
    may_be_codes,
    program_of,
    suffix_of,
    weight_names_of,
)
from qtoolkit.checkpoints._folder import MODELOPT_CONFIG
from qtoolkit.checkpoints._storage import join
from qtoolkit.checkpoints._tensors import (
    FLOATS,
    METADATA_KEY,
    CheckpointError,
    Entry,
    configs_in,
    json_object,
    listed,
    shown,
)
from qtoolkit.checkpoints.layouts import LAYOUTS, Encoding
from qtoolkit.checkpoints.layouts._encoding import zero_points
from qtoolkit.checkpoints.layouts._headers import Headers
from qtoolkit.checkpoints.layouts._qarrays import saved_arrays, undecoded_parts

_LAYOUT_OF = {method: layout for layout in LAYOUTS.values() for method in layout.methods}
# A config without `quant_method` that has one of these keys was written by compressed-tensors. MLX
# also writes a config without `quant_method`, but with none of these keys.
_COMPRESSED_TENSORS_KEYS = ("config_groups", "sparsity_config", "format")


def decode_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a float32 tensor for each quantized weight, read when it is needed.

    Returns `checkpoint` itself if nothing is quantized. Raises if the way of quantization is
    unknown, or if the tensors contradict the config.
    """
    config = quantization_config(checkpoint)
    headers, where = _headers_of(checkpoint), str(checkpoint.path)
    if config:
        method = str(config.get("quant_method", "compressed-tensors"))
        if method not in _LAYOUT_OF:
            raise CheckpointError(
                f"{where}: quant_method {shown(method)} in its config, expected one of "
                f"{', '.join(_LAYOUT_OF)}; dequantize the checkpoint with the program that made it"
            )
        layout = _LAYOUT_OF[method].name
        encodings = LAYOUTS[layout].decode(config, headers)
    else:
        layout, encodings = _decoded_without_config(checkpoint, headers)
    if not encodings:
        return checkpoint
    for encoding in encodings.values():
        if encoding.codes.name != encoding.name and encoding.name in headers:
            raise CheckpointError(
                f"{where}: tensor {shown(encoding.name)}: the weight is also stored as codes, in "
                f"{shown(encoding.codes.name)}, expected only one of these tensors, because some "
                "loaders read the first and some the second; write the checkpoint without one"
            )
    _check_stated_shapes(checkpoint, encodings)
    _check_symmetry(checkpoint, encodings)
    unread_names = check_marks(checkpoint, encodings)
    unread_names |= _zero_offsets(checkpoint, encodings, unread_names)
    return _opened_as_float32(checkpoint, layout, encodings, unread_names)


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


def _decoded_without_config(
    checkpoint: Checkpoint, headers: Headers
) -> tuple[str, dict[str, Encoding]]:
    """The layout and the encodings of a checkpoint without a quantization config.

    They follow from the metadata that `save` writes, and from the names of the tensors.
    """
    encodings, stored_in = saved_arrays(headers)
    layouts = ["plain"] if encodings else []
    # Several layouts may accept the same names. The one that `convert` recorded comes first, then
    # those that mark their weights, which may have other values than their names say to others.
    own = own_metadata(checkpoint).get("layout", "")
    for layout in sorted(LAYOUTS.values(), key=lambda one: (one.name != own, not one.has_marks)):
        if stored_in:
            headers = headers.only({n: e for n, e in headers.items() if n not in stored_in})
        decoded = layout.decode({}, headers)
        stored_in = {entry.name for encoding in decoded.values() for entry in encoding.entries}
        layouts += [layout.name] if decoded.keys() - encodings.keys() else []
        encodings = decoded | encodings
    return layouts[0] if layouts else "", encodings


def _opened_as_float32(
    checkpoint: Checkpoint, layout: str, encodings: Mapping[str, Encoding], unread_names: set[str]
) -> Checkpoint:
    """The checkpoint with a float32 tensor for each encoding; `unread_names` become auxiliary."""
    open_reader = _readers(encodings, checkpoint.tensors)
    stored_in = {entry.name for encoding in encodings.values() for entry in encoding.entries}
    encoding_of_codes = {encoding.codes.name: encoding for encoding in encodings.values()}
    for_loaders = unread_names | (set() if layout == "plain" else auxiliary_names(encodings))
    described = {
        key
        for one in LAYOUTS.values()
        if one.has_marks or one.name == layout
        for key in one.metadata_keys({*encodings, *checkpoint.tensors})
    }
    metadata = {k: v for k, v in checkpoint.metadata.items() if k not in described}
    tensors: dict[str, Tensor] = {}
    auxiliary: dict[str, Tensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name in encoding_of_codes:
            encoding = encoding_of_codes[name]
            reader = functools.partial(open_reader, encoding.name)
            tensors[encoding.name] = Tensor(
                *(encoding.name, "F32", encoding.shape, functools.partial(_read_into, reader)),
                encoding=encoding,
                reader=reader,
                stored_dtype=encoding.codes.dtype,
                stored_nbytes=encoding.nbytes,
            )
        elif name not in stored_in:
            is_cache = layout != "plain" and is_cache_scale(name, checkpoint.tensors)
            (auxiliary if name in for_loaders or is_cache else tensors)[name] = tensor
    changes: Any = {"tensors": tensors, "auxiliary": auxiliary, "raw": checkpoint.tensors}
    return dataclasses.replace(checkpoint, layout=layout, metadata=metadata, **changes)


def _readers(
    encodings: Mapping[str, Encoding], stored: Mapping[str, Tensor]
) -> Callable[[str], WeightReader]:
    """A function that gives the reader of the weight with a name. The first call loads JAX."""

    # Two are cached, because one thread may start with the next weight while another still reads
    # the last values of this one.
    @functools.lru_cache(maxsize=2)
    def reader(name: str) -> WeightReader:
        from qtoolkit.checkpoints import _reader

        return _reader.WeightReader(encodings[name], stored)

    lock = threading.Lock()

    def open_reader(name: str) -> WeightReader:
        with lock:  # or two threads could prepare the same weight at the same time
            return reader(name)

    return open_reader


def _read_into(reader: Callable[[], WeightReader], start: int, buffer: memoryview) -> None:
    reader().read_into(start, buffer)


def quantization_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The quantization config of a folder; empty if there is none.

    Usually config.json contains it. In many folders of NVIDIA's modelopt, only hf_quant_config.json
    contains it. MLX reads its own key first.
    """
    folder = checkpoint.folder
    if folder is None:
        return {}
    if own := [*filter(None, (one.own_config(checkpoint.config) for one in LAYOUTS.values()))]:
        return own[0]
    keys = {"quant_method", *_COMPRESSED_TENSORS_KEYS}
    for part in configs_in(checkpoint.config):
        for key in ("quantization_config", "compression_config"):
            config = part.get(key)
            if isinstance(config, dict) and keys & config.keys():
                return config
    if not folder.modelopt_config:
        return {}
    config = folder.modelopt_config.get("quantization")
    if isinstance(config, dict) and "quant_algo" in config:
        return {"quant_method": "modelopt", "ignore": config.get("exclude_modules"), **config}
    # If the weights are not quantized, the config may describe only the KV cache. Then it has no
    # "quant_algo".
    if not any(tensor.dtype in ("F8_E4M3", "U8") for tensor in checkpoint.tensors.values()):
        return {}
    where = join(checkpoint.path, MODELOPT_CONFIG)
    raise CheckpointError(
        f"{where}: {shown(str(config)[:80])} under 'quantization', expected "
        '{"quant_algo": "FP8", ...}; dequantize the checkpoint with modelopt'
    )


def _check_stated_shapes(checkpoint: Checkpoint, encodings: Mapping[str, Encoding]) -> None:
    """Raise if a tensor that states a weight's shape contradicts the shape of the codes."""
    remedy = "give the folder with its config.json, which tells bits and groups"
    if quantization_config(checkpoint):
        remedy = "dequantize the checkpoint with the program that made it"
    for encoding in encodings.values():
        for entry, expected in encoding.constants:
            stated = checkpoint.read(entry.name)
            if stated.tobytes() != expected:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {shown(entry.name)}: it says that the weight is "
                    f"{stated.tolist()}, but its codes, read as {encoding.spec.name}, are "
                    f"{list(encoding.shape)}; {remedy}"
                )


def _check_symmetry(checkpoint: Checkpoint, encodings: Mapping[str, Encoding]) -> None:
    """Raise if zero points differ from those of symmetric codes, which the config says there are.

    Engines that believe the config do not read zero points, others do. The message names both
    readings, and what to write in the config for each.
    """

    def read(entry: Entry) -> np.ndarray:
        return checkpoint.tensors[entry.name].read().view(np.uint8).reshape(-1)

    for encoding in encodings.values():
        if not encoding.symmetric_key or encoding.zero_point is None:
            continue
        element, zeros = encoding.spec.element, zero_points(encoding, read)
        middle = 0 if element.signed else 1 << (element.bits - 1)
        if (zeros == middle).all():
            continue
        key, found = encoding.symmetric_key, int(zeros[zeros != middle][0])
        as_stored = f'"{key}": {"true" if key == "zero_point" else "false"}'
        readings = f"(q - {found}) * scale, and so on as stored, with {as_stored} in config.json"
        if (zeros == middle + 2 * encoding.zero_offset - 1).all() and key == "sym":
            other = "gptq_v2" if encoding.zero_offset else "gptq"
            readings += f'; or (q - {middle}) * scale with "checkpoint_format": "{other}"'
        raise CheckpointError(
            f"{checkpoint.path}: tensor {shown(encoding.zero_point.name)}: a zero point of "
            f"{found}, expected {middle} alone, as {key} in its config says; read it as {readings}"
        )


def _zero_offsets(
    checkpoint: Checkpoint, encodings: Mapping[str, Encoding], marks: Set[str]
) -> set[str]:
    """The names of the entries of quantized weights that no layout reads and that are all 0.

    Such an entry may be an offset of a quantized weight, and an offset of 0 changes nothing. Raises
    if an element is not 0, because then the weight would be read with wrong values.
    """
    known = {entry.name for encoding in encodings.values() for entry in encoding.entries}
    known |= encodings.keys() | auxiliary_names(encodings) | marks
    zeros = set()
    for name, tensor in checkpoint.tensors.items():
        suffix = "" if name in known else suffix_of(name, encodings)
        if not suffix.startswith("weight_") and not CHANGES.search(suffix):
            continue
        if not all_zeros(tensor):
            what = f"{tensor.entry} of a quantized weight, expected no such entry, because it "
            what += "changes the weight"
            raise _headers_of(checkpoint).error(name, what)
        zeros.add(name)
    return zeros


def unused_entries(checkpoint: Checkpoint) -> list[str]:
    """The names of the tensors in modules of quantized weights that nothing is known of, of those
    in modules of other matrices that are scales by their names, and of LoRA's matrices.
    """
    tensors = checkpoint.tensors.values()
    weights = {tensor.name for tensor in tensors if tensor.is_dequantized}
    others = {t.name for t in tensors if t.dtype in FLOATS and len(t.shape) > 1} - weights
    names = checkpoint.tensors.keys() - weights
    scales = (name for name in beside_weights(names, others) if SCALES.search(name))
    parts = ((name, LOW_RANK.match(name)) for name in names)
    modules = {name.removesuffix(".weight") for name in weights | others}
    added = (name for name, match in parts if match is not None and match["module"] in modules)
    return sorted({*beside_weights(names, weights), *scales, *added})


def check_marks(checkpoint: Checkpoint, weights: Container[str]) -> set[str]:
    """The names of the tensors in which programs describe how they quantized `weights`.

    Raises if one of these is stored in a way that is not read, or not as the config says.
    """
    headers, by_config = _headers_of(checkpoint), bool(quantization_config(checkpoint))
    checks = [layout.check_marks for layout in LAYOUTS.values()]
    return {name for check in checks for name in check(headers, weights, by_config)}


def _headers_of(checkpoint: Checkpoint) -> Headers:
    entries = {name: tensor.entry for name, tensor in checkpoint.tensors.items()}
    return Headers(entries, checkpoint.path, checkpoint.metadata, checkpoint.read)


def own_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """The record of `convert` in the metadata of a file; empty if there is none."""
    return json_object(checkpoint.metadata.get(METADATA_KEY, "{}"))


# Tensors that may be codes of a layout that is not read, and scales whose weight is gone. Copied as
# they are, codes look like weights to a loader: of a model whose weights have a mean magnitude of
# 0.37 it saw 47.8. No list of layouts is complete, so what counts is the dtype.


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
    layout = _LAYOUT_OF[method].name if config else ""
    described = undecoded_parts(source.metadata, source.tensors, source.encodings)
    names = source.raw or source.tensors
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
