"""Plans and writes GGUF: a folder becomes a file for llama.cpp, with its names and its tokenizer.

Blocks are rounded as llama.cpp's reference quantizers round them, by the package gguf. Only NVFP4
differs: llama.cpp has no scale of the tensor, so that small scales underflow in E4M3. Here a weight
has codes and scales of `qtoolkit.quantize`, and its tensor scale is NAME.scale, as of files that
llama.cpp makes of modelopt's folders.
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path as LocalPath
from typing import Any

import numpy as np

from qtoolkit._version import __version__
from qtoolkit.checkpoints._arguments import PlanOptions
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor, array_checkpoint
from qtoolkit.checkpoints._checks import skip_patterns
from qtoolkit.checkpoints._decode import check_explained
from qtoolkit.checkpoints._experts import split
from qtoolkit.checkpoints._gguf import LAYOUT, RECORD, factor_name
from qtoolkit.checkpoints._gguf_models import Model, model_of
from qtoolkit.checkpoints._gguf_vocab import write_vocabulary
from qtoolkit.checkpoints._plan import make_plan
from qtoolkit.checkpoints._report import Plan, TensorPlan
from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._tensors import (
    FLOATS,
    METADATA_KEY,
    NUMPY_DTYPES,
    CheckpointError,
    Entry,
    MisuseError,
    shown,
)
from qtoolkit.checkpoints._writing import GGUF, is_gguf, new_file, partial_name, write_chunks
from qtoolkit.checkpoints.layouts import Encoding, Packing, Scheme
from qtoolkit.checkpoints.layouts._layout import HIGH_PRECISION, block_format
from qtoolkit.formats import FLOAT16, INT4, INT8, MXFP4, NVFP4, UINT4
from qtoolkit.formats import format as resolve

# By the value of `format`: the type of blocks, and `general.file_type` of a file of them.
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
_SPECS = {
    "Q8_0": block_format(element=INT8, block=(32,), scale=FLOAT16),
    "Q4_0": block_format(element=INT4, block=(32,), scale=FLOAT16),
    "Q4_1": block_format(element=UINT4, block=(32,), scale=FLOAT16, zero_point=True),
    "MXFP4": MXFP4,
    "NVFP4": NVFP4,
}
_SCHEMES = {t: Scheme(name=t.lower(), spec=s, is_named=True) for t, s in _SPECS.items()}
_HALVES = Packing(64, order=(*range(0, 16, 2), *range(1, 16, 2)))  # codes j and j + 8 in a byte


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


def plan_for(dst: Path, source: Checkpoint, options: PlanOptions) -> Plan:
    """The plan of a conversion to `dst`."""
    return (plan_gguf if is_gguf(dst) else make_plan)(source, options)


def plan_gguf(source: Checkpoint, options: PlanOptions) -> Plan:
    """The plan of a GGUF file of a folder."""
    src = source.path
    name, gguf = _checked(src, options)
    patterns = skip_patterns(options.skip, source.tensors)
    check_explained(source, lambda name: False)
    model = model_of(src, source.config)
    tensors = tuple(_tensors(source, model, TYPES[name][0], patterns, gguf))
    _check_layers(tensors, model)
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[model.architecture.name]])
    _announce(writer, tensors, gguf)
    writer.add_type(gguf.GGUFType.MODEL)
    count, *others = writer.get_total_parameter_count()
    metadata = _metadata(src, count, gguf)
    metadata.name = metadata.name or os.path.basename(os.path.realpath(src))
    metadata.size_label = metadata.size_label or gguf.size_label(count, *others)
    metadata.set_gguf_meta_model(writer)
    model.write_metadata(writer)
    writer.add_file_type(gguf.LlamaFileType[TYPES[name][1]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary = _vocabulary_size(source, model)
    write_vocabulary(writer, str(src), vocabulary, model.architecture.is_gemma)
    arguments = dataclasses.replace(options, format=name, skip=patterns).to_json()
    record = {"arguments": arguments, "layout": LAYOUT, "version": __version__}
    record_text = json.dumps(record, sort_keys=True)
    writer.add_string(RECORD, record_text)  # llama.cpp ignores keys that it does not know
    return Plan(
        layout=LAYOUT,
        format=_SCHEMES.get(TYPES[name][0]) or resolve(name),
        scaling="none",
        tensors=tensors,
        metadata={METADATA_KEY: record_text},
        quantization_config={},
        files={},
        dequantizes=source.layout,
        header=writer,
    )


def _checked(src: Path, options: PlanOptions) -> tuple[str, Any]:
    """The key of `TYPES`, and the package gguf, which knows it."""
    format = options.format
    name = gguf_type(format)
    if name is None:
        raise CheckpointError(
            f"{src}: format {format} for GGUF, expected one of {', '.join(TYPES)}; llama.cpp's "
            "llama-quantize makes its other types of a bfloat16 file"
        )
    for option in dataclasses.fields(options):
        is_used = option.name in ("format", "skip")
        if not is_used and getattr(options, option.name) != option.default:
            raise MisuseError(f"{src}: GGUF, for which {option.name}= has no effect; omit it")
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
) -> Iterator[TensorPlan]:
    """The tensors of the target, in their order."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model.architecture.name], model.layers)
    extra = model.extra_tensors()
    headers = {name: (values.dtype, values.shape) for name, values in extra.items()}
    for tensor in array_checkpoint(source.path, headers, extra.__getitem__).tensors.values():
        tensor = dataclasses.replace(tensor, stored_nbytes=0)  # the folder has none
        yield TensorPlan.unquantized(tensor, tensor.dtype, "of llama.cpp alone")
    for tensor in _as_computed(source, model):
        name = model.target_name(names, tensor.name)
        if not name:
            continue
        type_, reason = kind, ""
        is_small = len(tensor.shape) < 2 or name.endswith("_norm.weight")
        if is_small or not name.endswith(".weight"):
            type_, reason = "F32", "not a matrix"
        elif name.endswith(_ROUTERS):
            type_, reason = "F32", "routers are F32"
        elif any(pattern.search(tensor.name) for pattern in skip):
            type_, reason = tensor.dtype, "skip="
        elif name in _EMBEDDINGS and kind in ("Q4_0", "Q4_1", "MXFP4", "NVFP4"):
            type_ = "Q8_0"
        length, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
        if tensor.shape and tensor.shape[-1] % length:
            type_, reason = "F16", f"rows are no multiple of {length}"
        if type_ in HIGH_PRECISION:
            plan = TensorPlan.unquantized(tensor, type_, reason)
            action = plan.action
            if action == "cast" and type_ == kind and not reason:
                action = "quantize"
            elif tensor.stored_dtype in FLOATS and tensor.stored_dtype != type_:
                action = "cast"  # float64, and norms of Gemma, with their 1
            yield dataclasses.replace(plan, action=action, target=name)
            continue
        *rows, columns = tensor.shape
        codes = Entry(name, "U8", (*rows, columns // length * nbytes))
        encoding = _encoding(tensor, type_, codes)
        plan = TensorPlan.quantized(tensor, encoding, _SCHEMES[type_])
        yield dataclasses.replace(plan, dtype=type_)


def _encoding(tensor: Tensor, type_: str, codes: Entry) -> Encoding:
    """How a file holds a weight in blocks."""
    spec, shape = _SPECS[type_], tensor.shape
    (length,) = spec.block
    assert length is not None
    one = Encoding(
        name=tensor.name,
        shape=shape,
        spec=spec,
        lengths=(*(1 for _ in shape[:-1]), length),
        codes=codes,
        quantizer=functools.partial(_blocks, type_),
    )
    if type_ != "NVFP4":
        return one
    count = shape[0] if len(shape) == 3 else 1  # one for the tensor, or for each expert
    return dataclasses.replace(
        one,
        tensor_scale=Entry(factor_name(codes.name), "F32", (count,)),
        packing=_HALVES,
        scales_first=4,
        quantizer=None,
    )


def _blocks(type_: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of blocks, and the numbers that they stand for."""
    import gguf

    kind = gguf.GGMLQuantizationType[type_]
    # The package takes 16 rows at a time: of 32 elements they cost three times as long.
    rows = x.reshape(-1, math.gcd(x.size, 2**12))
    with np.errstate(all="ignore"):
        data = gguf.quants.quantize(rows, kind)
        return data, gguf.quants.dequantize(data, kind).reshape(-1)


def _as_computed(source: Checkpoint, model: Model) -> Iterator[Tensor]:
    """The tensors of a model with the values with which llama.cpp computes."""
    tensors = {tensor.name: tensor for tensor in _stacked(source)}
    found = {name: model.conversion(tensor) for name, tensor in tensors.items()}
    changes = {name: change for name, change in found.items() if change is not None}
    headers = {n: (NUMPY_DTYPES[dtype], tensors[n].shape) for n, (dtype, _) in changes.items()}

    def read(name: str) -> np.ndarray:
        dtype, convert = changes[name]
        return convert(tensors[name].read_all()).astype(NUMPY_DTYPES[dtype], copy=False)

    arrays = array_checkpoint(source.path, headers, read).tensors
    for name, tensor in tensors.items():
        if new := arrays.get(name):
            tensor = dataclasses.replace(tensor, dtype=new.dtype, read_into=new.read_into)
        yield tensor


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
        encoding=None,
        reader=None,
        stored_nbytes=sum(part.stored_nbytes for part in parts),
    )


def _check_layers(tensors: Iterable[TensorPlan], model: Model) -> None:
    """Raises where layers of config.json are missing, or lack what other layers have."""
    targets = (tensor.entries[0].name for tensor in tensors)
    parts = (name.split(".", 2) for name in targets if name.startswith("blk."))
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


def _announce(writer: Any, tensors: Iterable[TensorPlan], gguf: Any) -> None:
    float32 = np.dtype(np.float32)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.dtype]
        data, *scales = tensor.entries
        writer.add_tensor_info(data.name, tensor.source.shape, float32, data.nbytes, kind)
        for scale in scales:
            writer.add_tensor_info(scale.name, scale.shape, float32, scale.nbytes)


def write_gguf(
    path: Path, writer: Any, chunks: Iterable[tuple[str, Any]], *, overwrite: bool
) -> None:
    """Writes a file from chunks, (name, bytes or array), as they are produced.

    `writer` is the package's, which knows metadata, tokenizer, and the place of each tensor.
    """
    infos = [info for infos in writer.tensors for info in infos.items()]
    with new_file(path, overwrite, (GGUF,)) as file:
        writer.write_header_to_file(partial_name(os.path.realpath(path)))
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        places = {}
        end = os.fstat(file).st_size
        for name, info in infos:
            start = writer.ggml_pad(end, writer.data_alignment)
            end = start + info.nbytes
            places[name] = start, end
        os.ftruncate(file, writer.ggml_pad(end, writer.data_alignment))
        write_chunks(file, path, b"", places, chunks)
