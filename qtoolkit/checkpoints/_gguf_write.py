"""Writes GGUF: a folder of Hugging Face becomes a file for llama.cpp, with names and tokenizer.

Blocks are rounded as llama.cpp's reference quantizers round them, by the package gguf. Only NVFP4
differs: llama.cpp has no scale of the tensor, so that small scales underflow in E4M3. Here a weight
has codes and scales of `qtoolkit.quantize`, and its tensor scale is NAME.scale, as of files that
llama.cpp makes of modelopt's folders.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path as LocalPath
from typing import Any

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._codes import check_explained
from qtoolkit.checkpoints._containers import open_source
from qtoolkit.checkpoints._decode import dequantized
from qtoolkit.checkpoints._experts import split
from qtoolkit.checkpoints._gguf_models import Model, model_of
from qtoolkit.checkpoints._gguf_vocab import write_vocabulary
from qtoolkit.checkpoints._report import Progress, Report, TensorReport
from qtoolkit.checkpoints._storage import Path, is_url
from qtoolkit.checkpoints._tensors import CheckpointError, MisuseError, shown
from qtoolkit.checkpoints._writing import exists_already, partial_name

# By the value of --format: the type of blocks, and `general.file_type` of a file of them.
TYPES = {
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
    "q4_1": ("Q4_1", "MOSTLY_Q4_1"),
    "float16": ("F16", "MOSTLY_F16"),
    "bfloat16": ("BF16", "MOSTLY_BF16"),
    "mxfp4": ("MXFP4", "MOSTLY_MXFP4_MOE"),
    "nvfp4": ("NVFP4", "MOSTLY_NVFP4"),
}
OWN_TYPES = ("q8_0", "q4_0", "q4_1")  # which no other container has
_SPELLINGS = {"f16": "float16", "bf16": "bfloat16"}
ENDING = ".gguf"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)")
_ROUTERS = (".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")
_EMBEDDINGS = ("token_embd.weight", "output.weight")
_LARGEST = np.float32(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True)
class _Item:
    """A tensor of the target.

    `source` is None of one that llama.cpp alone has, whose values are `values`.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    source: Tensor | None = None
    values: np.ndarray | None = None
    reason: str = ""


def is_gguf(path: Path) -> bool:
    return str(path).lower().endswith(ENDING)


def gguf_type(format: Any) -> str | None:
    """The key of `TYPES` that a value of `format` names; None if it names none."""
    name = format.lower() if isinstance(format, str) else getattr(format, "name", "")
    name = _SPELLINGS.get(name, name)
    return name if name in TYPES else None


def check_container(format: Any, dst: Path) -> None:
    """Raises for a type of GGUF in another container."""
    if isinstance(format, str) and gguf_type(format) in OWN_TYPES and not is_gguf(dst):
        raise CheckpointError(
            f"{dst}: format {format} is a type of GGUF, expected a target that ends with {ENDING}"
        )


def write_gguf(
    src: Path,
    dst: Path,
    format: Any,
    options: dict[str, Any],
    *,
    overwrite: bool,
    allow_nonfinite: bool,
    progress: Progress | None,
) -> Report:
    """Writes the model of a folder to a GGUF file; `options` are those that must not be given."""
    name, gguf = _checked(dst, format, options)
    target = _target(dst, overwrite)
    with open_source(src) as opened:
        if opened.folder is None or is_url(src):
            raise CheckpointError(
                f"{src}: no folder on this machine, expected one with config.json and tokenizer, "
                "which a GGUF file holds; fetch it and give it"
            )
        source = dequantized(opened)
        check_explained(source, lambda name: False)
        model = model_of(src, source.config)
        items = list(_items(source, model, TYPES[name][0], gguf))
        _check_layers(items, model)
        writer = _announced(src, source, model, items, name, gguf)
        partial = partial_name(target)
        try:
            with storage.naming(dst):
                reports = _write(writer, items, model, partial, allow_nonfinite, progress, gguf)
                os.replace(partial, target)
        finally:
            if os.path.exists(partial):
                os.remove(partial)
        return Report(
            source=str(src),
            target=str(dst),
            layout="GGUF",
            format=name,
            scaling="none",
            dequantized=source.layout,
            left=tuple(source.auxiliary),
            tensors=tuple(reports),
        )


def _checked(dst: Path, format: Any, options: dict[str, Any]) -> tuple[str, Any]:
    """The key of `TYPES`, and the package gguf, which knows it."""
    name = gguf_type(format)
    if name is None:
        raise CheckpointError(
            f"{dst}: format {format} for GGUF, expected one of {', '.join(TYPES)}; llama.cpp's "
            "llama-quantize makes its other types of a bfloat16 file"
        )
    if given := next((option for option, value in options.items() if value), None):
        raise MisuseError(f"{dst}: GGUF, for which --{given} has no effect; omit it")
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{dst}: a GGUF file, which the package gguf writes; write pip install gguf"
        ) from error
    if TYPES[name][0] not in gguf.GGMLQuantizationType.__members__:
        raise CheckpointError(f"{dst}: {name} is newer than the package gguf; upgrade it")
    return name, gguf


def _announced(
    src: Path, source: Checkpoint, model: Model, items: list[_Item], name: str, gguf: Any
) -> Any:
    """A writer that knows all of the file but the numbers of its tensors."""
    arch = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[model.architecture.name]]
    writer = gguf.GGUFWriter(None, arch)
    _announce(writer, items, gguf)
    writer.add_type(gguf.GGUFType.MODEL)
    count, *others = writer.get_total_parameter_count()
    about = _metadata(src, count, gguf)
    about.name = about.name or os.path.basename(os.path.realpath(src))
    about.size_label = about.size_label or gguf.size_label(count, *others)
    about.set_gguf_meta_model(writer)
    model.write_metadata(writer)
    writer.add_file_type(gguf.LlamaFileType[TYPES[name][1]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary = _vocabulary_size(source, model)
    write_vocabulary(writer, str(src), vocabulary, model.architecture.is_gemma)
    return writer


def _target(dst: Path, overwrite: bool) -> str:
    if is_url(dst):
        raise CheckpointError(f"{dst}: GGUF is written to files alone; write it and copy it")
    target = os.path.realpath(dst)
    if os.path.isdir(target) or not os.path.isdir(os.path.dirname(target)):
        raise CheckpointError(f"{dst}: expected the name of a file in a folder that exists")
    if os.path.exists(target) and not overwrite:
        raise exists_already(dst)
    return target


def _vocabulary_size(source: Checkpoint, model: Model) -> int:
    embedding = source.tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(
            f"{model.path}: no tensor model.embed_tokens.weight, expected one; fetch it again"
        )
    return embedding.shape[0]


def _items(source: Checkpoint, model: Model, kind: str, gguf: Any) -> Iterator[_Item]:
    """The tensors of the target, in their order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model.architecture.name], model.layers)
    for name, values in model.extra_tensors().items():
        yield _Item(name, "F32", values.shape, values=values)
    for tensor in _stacked(source):
        name = model.renamed(names, tensor.name)
        if not name:
            continue
        type_, reason = kind, ""
        is_small = len(tensor.shape) < 2 or name.endswith("_norm.weight")
        if is_small or not name.endswith(".weight"):
            type_, reason = "F32", "not a matrix"
        elif name.endswith(_ROUTERS):
            type_, reason = "F32", "routers are F32"
        elif name in _EMBEDDINGS and kind in ("Q4_0", "Q4_1", "MXFP4", "NVFP4"):
            type_, reason = "Q8_0", "embeddings are Q8_0"
        length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]][0]
        if tensor.shape and tensor.shape[-1] % length:
            type_, reason = "F16", f"rows are no multiple of {length}"
        yield _Item(name, type_, tensor.shape, tensor, reason=reason)


def _stacked(source: Checkpoint) -> Iterator[Tensor]:
    """The tensors of a model; the experts of a layer are one tensor, as llama.cpp has them."""
    experts: dict[str, dict[int, Tensor]] = {}
    for tensor in split(source).tensors.values():
        if match := _EXPERT.fullmatch(tensor.name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            yield tensor
    for name, numbered in experts.items():
        parts = [numbered[number] for number in sorted(numbered)]
        kinds = {(part.dtype, part.shape) for part in parts}
        if sorted(numbered) != [*range(len(parts))] or len(kinds) > 1:
            raise CheckpointError(
                f"{source.path}: tensors {shown(name)} of {len(parts)} experts, expected experts "
                "0, 1 and so on, of one shape and dtype; fetch the folder again"
            )
        yield _stack(name, parts)


def _stack(name: str, parts: list[Tensor]) -> Tensor:
    def read_into(start: int, buffer: memoryview) -> None:
        while len(buffer):
            number, place = divmod(start, parts[0].nbytes)
            count = min(len(buffer), parts[0].nbytes - place)
            parts[number].read_into(place, buffer[:count])
            start, buffer = start + count, buffer[count:]

    return dataclasses.replace(
        parts[0],
        name=name,
        shape=(len(parts), *parts[0].shape),
        read_into=read_into,
        stored_nbytes=sum(part.stored_nbytes for part in parts),
    )


def _check_layers(items: list[_Item], model: Model) -> None:
    """Raises where layers of config.json are missing, or lack what other layers have."""
    parts = (item.name.split(".", 2) for item in items if item.name.startswith("blk."))
    found: dict[int, set[str]] = {layer: set() for layer in range(model.layers)}
    for _, number, name in parts:
        found.setdefault(int(number), set()).add(name)
    names = set().union(*found.values())
    for layer, own in found.items():
        if missing := sorted(names - own):
            raise CheckpointError(
                f"{model.path}: layer {layer} of {model.layers} has no {missing[0]}, as llama.cpp "
                "calls it, expected what other layers have; fetch the folder again"
            )


def _metadata(src: Path, count: int, gguf: Any) -> Any:
    """What README.md says of the model: name, license and so on."""
    try:
        return gguf.Metadata.load(None, LocalPath(src), None, count)
    except Exception as error:  # PyYAML's, which gguf imports
        what = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{src}: its README.md or config.json: {type(error).__name__}: {shown(what)}; mend the "
            "head of README.md, or remove it"
        ) from error


def _announce(writer: Any, items: list[_Item], gguf: Any) -> None:
    for item in items:
        kind = gguf.GGMLQuantizationType[item.type]
        length, size = gguf.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(item.shape) // length * size
        writer.add_tensor_info(item.name, item.shape, np.dtype(np.float32), nbytes, kind)
        if item.type == "NVFP4":
            count = item.shape[0] if len(item.shape) == 3 else 1  # each expert has its own
            scale = _scale_name(item.name)
            writer.add_tensor_info(scale, (count,), np.dtype(np.float32), 4 * count)


def _write(
    writer: Any,
    items: list[_Item],
    model: Model,
    partial: str,
    allow_nonfinite: bool,
    progress: Progress | None,
    gguf: Any,
) -> list[TensorReport]:
    total = sum(info.nbytes for infos in writer.tensors for info in infos.values())
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    reports, written = [], 0
    try:
        for item in items:
            arrays, report = _made(item, model, allow_nonfinite, gguf)
            for array in arrays:
                writer.write_tensor_data(array)
                written += array.nbytes
            reports += [] if report is None else [report]
            if progress is not None:
                progress(item.name, written, total)
    finally:
        writer.close()
    return reports


def _scale_name(name: str) -> str:
    return f"{name.removesuffix('weight')}scale"


def _made(
    item: _Item, model: Model, allow_nonfinite: bool, gguf: Any
) -> tuple[list[np.ndarray], TensorReport | None]:
    """The arrays of a tensor, and what was done to it."""
    if item.source is None:
        return [np.ascontiguousarray(item.values)], None
    stored = item.source.read_all()
    x = np.ascontiguousarray(model.changed(item.source.name, stored), np.float32)
    nonfinite = int(x.size - np.isfinite(x).sum())
    if nonfinite and not allow_nonfinite:
        raise CheckpointError(
            f"{model.path}: NaN or Inf in weights: {shown(item.source.name)} ({nonfinite:,}); "
            "expected finite numbers; pass --allow-nonfinite"
        )
    overflowed = 0
    if item.type == "F16":
        overflowed = int((np.isfinite(x) & (np.abs(x) > _LARGEST)).sum())
        x = np.where(np.isfinite(x), np.clip(x, -_LARGEST, _LARGEST), x)
    arrays, values = _encoded(x, item.type, gguf)
    is_quantized = item.type not in ("F32", "F16", "BF16")
    action: Any = "quantize" if is_quantized and not item.reason else "cast"
    report = TensorReport(
        name=item.source.name,
        action=action,
        reason=item.reason,
        dtype=item.type,
        format=item.type.lower() if action == "quantize" else "",
        bytes_before=item.source.stored_nbytes,
        bytes_after=sum(array.nbytes for array in arrays),
        sqnr_db=_sqnr(x, values),
        nonfinite=nonfinite,
        overflowed=overflowed,
    )
    return arrays, report


def _encoded(x: np.ndarray, kind: str, gguf: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """The arrays that a file holds of a tensor, and the numbers that they stand for."""
    type_ = gguf.GGMLQuantizationType[kind]
    factor: list[np.ndarray] = []
    with np.errstate(all="ignore"):
        if kind == "NVFP4":
            pairs = [_nvfp4(part) for part in x.reshape(-1, *x.shape[-2:])]
            data = np.stack([data for data, _ in pairs]).reshape(*x.shape[:-1], -1)
            factor = [np.array([scale for _, scale in pairs], np.float32)]
        else:
            data = gguf.quants.quantize(x, type_)
        values = gguf.quants.dequantize(data, type_)
    return [np.ascontiguousarray(data), *factor], values * (
        factor[0].reshape(-1, *(1,) * (x.ndim - 1)) if factor else 1
    )


def _nvfp4(x: np.ndarray) -> tuple[np.ndarray, float]:
    """Blocks of 64: four bytes of scales, then for each 16 elements 8 bytes, j and j + 8 in one."""
    from qtoolkit.scaling import quantize  # loads JAX

    array = quantize(x, "nvfp4")
    rows = x.shape[0]
    scales = np.asarray(array.scale).view(np.uint8).reshape(rows, -1, 4)
    codes = np.asarray(array.codes).reshape(rows, -1, 4, 2, 8)
    packed = codes[..., 0, :] | codes[..., 1, :] << 4
    blocks = np.concatenate([scales, packed.reshape(rows, -1, 32)], -1)
    return blocks.reshape(rows, -1), float(np.asarray(array.tensor_scale))


def _sqnr(x: np.ndarray, values: np.ndarray) -> float | None:
    with np.errstate(all="ignore"):
        finite = np.isfinite(x)
        signal = np.square(x[finite], dtype=np.float64).sum()
        noise = np.square(x[finite] - values[finite], dtype=np.float64).sum()
        if not signal:
            return None
        return float(10 * np.log10(signal / noise)) if noise else float("inf")
