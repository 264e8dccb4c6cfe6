"""Writes GGUF: a folder of Hugging Face becomes a file for llama.cpp, with names and tokenizer.

Blocks are rounded as llama.cpp's reference quantizers round them, by the package gguf. Only NVFP4
differs: llama.cpp has no scale of the tensor, so that small scales underflow in E4M3. Here a weight
has codes and scales of `qtoolkit.quantize`, and its tensor scale is NAME.scale, as of files that
llama.cpp makes of modelopt's folders.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as LocalPath
from typing import Any

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._checks import skip_patterns
from qtoolkit.checkpoints._codes import check_explained
from qtoolkit.checkpoints._experts import split
from qtoolkit.checkpoints._gguf_models import Model, model_of
from qtoolkit.checkpoints._gguf_vocab import write_vocabulary
from qtoolkit.checkpoints._plan import make_plan
from qtoolkit.checkpoints._report import Plan, Progress, Report, TensorPlan, TensorReport
from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._tensors import CheckpointError, Entry, MisuseError, shown
from qtoolkit.checkpoints._writing import GGUF, is_gguf, partial_name
from qtoolkit.checkpoints.layouts._layout import HIGH_PRECISION

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
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)")
_ROUTERS = (".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")
_EMBEDDINGS = ("token_embd.weight", "output.weight")
_LARGEST = np.float32(np.finfo(np.float16).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor(TensorPlan):
    """A tensor of a GGUF file; its `dtype` is a type of GGUF, such as "Q8_0".

    Attributes:
      target: Its name there.
      block: The elements of a block, and the bytes of one.
    """

    target: str
    block: tuple[int, int]

    @property
    def format_name(self) -> str:
        return self.dtype.lower() if self.action == "quantize" else ""

    @functools.cached_property
    def entries(self) -> tuple[Entry, ...]:
        one = Entry(self.target, self.dtype, self.source.shape)
        if self.dtype != "NVFP4":
            return (one,)
        return one, Entry(self.scale_name, "F32", self.scale_shape)

    @property
    def scale_shape(self) -> tuple[int]:
        """One for the tensor, or for each expert."""
        return (self.source.shape[0] if len(self.source.shape) == 3 else 1,)

    @property
    def data_nbytes(self) -> int:
        return self.source.size // self.block[0] * self.block[1]

    @functools.cached_property
    def nbytes(self) -> int:
        return self.data_nbytes + sum(entry.nbytes for entry in self.entries[1:])

    @property
    def scale_name(self) -> str:
        return f"{self.target.removesuffix('weight')}scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufPlan(Plan):
    """What is written to a GGUF file.

    Attributes:
      type_name: The key of `TYPES`.
      model: The model as llama.cpp sees it.
      extra: Tensors that llama.cpp alone has.
      writer: The package's writer, which knows all of the file but the numbers of its tensors.
    """

    type_name: str
    model: Model
    extra: Mapping[str, np.ndarray]
    writer: Any

    @property
    def format_names(self) -> str:
        return self.type_name


def gguf_type(format: Any) -> str | None:
    """The key of `TYPES` that a value of `format` names; None if it names none."""
    name = format.lower() if isinstance(format, str) else getattr(format, "name", "")
    name = _SPELLINGS.get(name, name)
    return name if name in TYPES else None


def check_container(format: Any, dst: Path) -> None:
    """Raises for a type of GGUF in another container."""
    if isinstance(format, str) and gguf_type(format) in OWN_TYPES and not is_gguf(dst):
        raise CheckpointError(
            f"{dst}: format {format} is a type of GGUF, expected a target that ends with {GGUF}"
        )


def plan_for(dst: Path, source: Checkpoint, **arguments: Any) -> Plan:
    """The plan of a conversion to `dst`, with the arguments of `make_plan`."""
    return (plan_gguf if is_gguf(dst) else make_plan)(source, **arguments)


def plan_gguf(
    source: Checkpoint,
    *,
    format: Any,
    skip: Sequence[str] = (),
    channel_axis: str = "auto",
    **options: Any,
) -> GgufPlan:
    """The plan of a GGUF file of a folder; `options` are those that have no effect."""
    src = source.path
    name, gguf = _checked(src, format, options)
    patterns = skip_patterns(skip, source.tensors)
    check_explained(source, lambda name: False)
    model = model_of(src, source.config)
    tensors = tuple(_tensors(source, model, TYPES[name][0], patterns, gguf))
    _check_layers(tensors, model)
    extra = model.extra_tensors()
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[model.architecture.name]])
    _announce(writer, extra, tensors, gguf)
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
    return GgufPlan(
        layout="GGUF",
        format=None,
        scaling="none",
        tensors=tensors,
        metadata={},
        quantization_config={},
        files={},
        dequantizes=source.layout,
        type_name=name,
        model=model,
        extra=extra,
        writer=writer,
    )


def _checked(src: Path, format: Any, options: Mapping[str, Any]) -> tuple[str, Any]:
    """The key of `TYPES`, and the package gguf, which knows it."""
    name = gguf_type(format)
    if name is None:
        raise CheckpointError(
            f"{src}: format {format} for GGUF, expected one of {', '.join(TYPES)}; llama.cpp's "
            "llama-quantize makes its other types of a bfloat16 file"
        )
    if given := next((option for option, value in options.items() if value), None):
        option = given.replace("_", "-")
        raise MisuseError(f"{src}: GGUF, for which --{option} has no effect; omit it")
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{src}: the package gguf writes GGUF files; write pip install gguf"
        ) from error
    if TYPES[name][0] not in gguf.GGMLQuantizationType.__members__:
        raise CheckpointError(f"{src}: {name} is newer than the package gguf; upgrade it")
    return name, gguf


def _vocabulary_size(source: Checkpoint, model: Model) -> int:
    embedding = source.tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(
            f"{model.path}: no tensor model.embed_tokens.weight, expected one; fetch it again"
        )
    return embedding.shape[0]


def _tensors(
    source: Checkpoint, model: Model, kind: str, skip: Sequence[re.Pattern[str]], gguf: Any
) -> Iterator[GgufTensor]:
    """The tensors of the target, in their order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model.architecture.name], model.layers)
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
        elif any(pattern.search(tensor.name) for pattern in skip):
            type_, reason = tensor.dtype if tensor.dtype in HIGH_PRECISION else "F32", "--skip"
        elif name in _EMBEDDINGS and kind in ("Q4_0", "Q4_1", "MXFP4", "NVFP4"):
            type_, reason = "Q8_0", "embeddings are Q8_0"
        length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]][0]
        if tensor.shape and tensor.shape[-1] % length:
            type_, reason = "F16", f"rows are no multiple of {length}"
        is_quantized = type_ not in ("F32", "F16", "BF16") and not reason
        yield GgufTensor(
            source=tensor,
            action="quantize" if is_quantized else "cast",
            reason=reason,
            dtype=type_,
            target=name,
            block=gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]],
        )


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


def _check_layers(tensors: Iterable[GgufTensor], model: Model) -> None:
    """Raises where layers of config.json are missing, or lack what other layers have."""
    parts = (one.target.split(".", 2) for one in tensors if one.target.startswith("blk."))
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


def _announce(
    writer: Any, extra: Mapping[str, np.ndarray], tensors: Iterable[GgufTensor], gguf: Any
) -> None:
    float32 = np.dtype(np.float32)
    for name, values in extra.items():
        writer.add_tensor_info(name, values.shape, float32, values.nbytes)
    for one in tensors:
        kind = gguf.GGMLQuantizationType[one.dtype]
        writer.add_tensor_info(one.target, one.source.shape, float32, one.data_nbytes, kind)
        if one.dtype == "NVFP4":
            count = one.scale_shape[0]
            writer.add_tensor_info(one.scale_name, (count,), float32, 4 * count)


def write_gguf(
    dst: Path, plan: GgufPlan, report: Report, allow_nonfinite: bool, progress: Progress | None
) -> Report:
    """Writes the file, under a temporary name until it is whole."""
    target = os.path.realpath(dst)
    partial = partial_name(target)
    try:
        with storage.naming(dst):
            reports = _write(plan, partial, allow_nonfinite, progress)
            os.replace(partial, target)
    finally:
        if os.path.exists(partial):
            os.remove(partial)
    return dataclasses.replace(report, tensors=tuple(reports))


def _write(
    plan: GgufPlan, partial: str, allow_nonfinite: bool, progress: Progress | None
) -> list[TensorReport]:
    writer = plan.writer
    total = sum(info.nbytes for infos in writer.tensors for info in infos.values())
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    reports, written = [], 0
    try:
        for values in plan.extra.values():
            writer.write_tensor_data(np.ascontiguousarray(values))
            written += values.nbytes
        for tensor in plan.tensors:
            arrays, report = _made(tensor, plan.model, allow_nonfinite)
            for array in arrays:
                writer.write_tensor_data(array)
            reports.append(report)
            written += tensor.nbytes
            if progress is not None:
                progress(shown(tensor.name), written, total)
    finally:
        writer.close()
    return reports


def _made(
    tensor: TensorPlan, model: Model, allow_nonfinite: bool
) -> tuple[list[np.ndarray], TensorReport]:
    """The arrays of a tensor, and what was done to it."""
    from qtoolkit.scaling.internal import weight_errors  # loads JAX

    x = np.ascontiguousarray(model.changed(tensor.name, tensor.source.read_all()), np.float32)
    nonfinite = int(x.size - np.isfinite(x).sum())
    if nonfinite and not allow_nonfinite:
        raise CheckpointError(
            f"{model.path}: NaN or Inf in weights: {shown(tensor.name)} ({nonfinite:,}); "
            "expected finite numbers; pass --allow-nonfinite"
        )
    overflowed = 0
    if tensor.dtype == "F16":
        overflowed = int((np.isfinite(x) & (np.abs(x) > _LARGEST)).sum())
        x = np.where(np.isfinite(x), np.clip(x, -_LARGEST, _LARGEST), x)
    arrays, values = _encoded(x, tensor.dtype)
    errors = weight_errors(x.reshape(-1), values.reshape(-1))
    return arrays, tensor.report(
        sqnr_db=errors.known_sqnr_db, nonfinite=nonfinite, overflowed=overflowed
    )


def _encoded(x: np.ndarray, kind: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The arrays that a file holds of a tensor, and the numbers that they stand for."""
    import gguf

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
