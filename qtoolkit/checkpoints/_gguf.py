"""GGUF files as sources.

Blocks of llama.cpp are read by the package gguf, one whole array at a time; other arrays of a GGUF
file are read in pieces. No JAX here.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor, array_checkpoint
from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._tensors import (
    DTYPE_OF,
    METADATA_KEY,
    NUMPY_DTYPES,
    CheckpointError,
    shown,
)

LAYOUT = "GGUF"  # of a `Plan`, and of weights that are read from blocks
RECORD = "qtoolkit.conversion"  # the key of what files in safetensors have under METADATA_KEY
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file: llama.cpp's blocks become float32. Names are those of the file.

    llama.cpp multiplies a matmul by the factor "NAME.scale", if there is one for "NAME.weight", as
    for NVFP4 and ternary weights. Such a weight is read as float32, multiplied by its factor.
    """
    reader, dequantize = _gguf_reader(path)
    in_file = {tensor.name: tensor for tensor in reader.tensors}
    factors = _gguf_factors(path, in_file)
    factor_names = {factor_name(name) for name in factors}
    # Of activations, which llama.cpp quantizes by it.
    input_scales = {
        name
        for name in in_file
        if name.endswith(".input_scale") and f"{name.removesuffix('input_scale')}weight" in in_file
    }
    opened = contextlib.ExitStack()
    file = storage.File(path)
    opened.callback(file.close)

    def raw(name: str, start: int, buffer: memoryview) -> None:
        # The package maps the file, and mapped pages count as memory in use.
        with storage.naming(path):
            where = f"{path}: tensor {shown(name)}"
            storage.fill(file, int(in_file[name].data_offset) + start, buffer, where)

    def values(name: str) -> np.ndarray:
        stored = stored_values(name)
        if name not in factors:
            return stored
        factor = factors[name].reshape(-1, *(1,) * (stored.ndim - 1))
        return stored.astype(np.float32, copy=False) * factor

    def stored_values(name: str) -> np.ndarray:
        tensor = in_file[name]
        if (dtype := _plain_dtype(tensor)) is not None:
            return tensor.data.view(dtype)
        blocks = np.empty(tensor.data.shape, np.uint8)
        raw(name, 0, blocks.reshape(-1).data)
        try:
            return dequantize(blocks, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{path}: tensor {shown(name)}: blocks of {tensor.tensor_type.name}, which the "
                "package gguf does not read; requantize it with llama.cpp to Q8_0"
            ) from error

    # GGUF counts axes from the innermost one.
    headers = {
        name: (
            (None if name in factors else _plain_dtype(t)) or np.dtype("float32"),
            tuple(int(n) for n in reversed(t.shape)),
        )
        for name, t in in_file.items()
        if name not in factor_names
    }
    checkpoint = array_checkpoint(path, headers, values, opened)
    for name, tensor in in_file.items():
        dtype = _plain_dtype(tensor)
        shape = tensor.data.shape if dtype is None else tuple(map(int, reversed(tensor.shape)))
        in_bytes = "U8" if dtype is None else DTYPE_OF[dtype.name]
        checkpoint.raw[name] = Tensor(name, in_bytes, shape, functools.partial(raw, name))
        if name in factor_names:
            continue
        if dtype is not None and name not in factors:
            checkpoint.tensors[name] = checkpoint.raw[name]
            continue
        nbytes = int(tensor.n_bytes) + (4 * factors[name].size if name in factors else 0)
        stored: Any = {"stored_dtype": tensor.tensor_type.name, "stored_nbytes": nbytes}
        checkpoint.tensors[name] = dataclasses.replace(checkpoint.tensors[name], **stored)
        checkpoint.layout = LAYOUT
    checkpoint.auxiliary = {name: checkpoint.tensors.pop(name) for name in input_scales}
    if (record := reader.fields.get(RECORD)) is not None:
        checkpoint.metadata[METADATA_KEY] = str(record.contents())
    return checkpoint


def factor_name(weight: str) -> str:
    """The name of the factor of a weight: "blk.0.ffn_up.scale"."""
    return f"{weight.removesuffix('weight')}scale"


def _gguf_factors(path: Path, in_file: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The factors "NAME.scale" of weights "NAME.weight", one or one for each expert, by weight."""
    factors = {}
    for name, weight in in_file.items():
        scale = in_file.get(factor_name(name))
        if not name.endswith(".weight") or scale is None:
            continue
        experts = int(weight.shape[-1]) if len(weight.shape) == 3 else 1
        dtype, size = _plain_dtype(scale), int(np.prod(scale.shape))
        if dtype is None or dtype.kind not in "fV" or size not in (1, experts):
            raise CheckpointError(
                f"{path}: tensor {shown(scale.name)}: {scale.tensor_type.name} of {size} elements, "
                f"expected a factor for the whole of {shown(name)}, or one for each expert; "
                "requantize it with llama.cpp to Q8_0"
            )
        factors[name] = scale.data.view(dtype).astype(np.float32)
    return factors


def _gguf_reader(path: Path) -> tuple[Any, Callable[..., np.ndarray]]:
    """The reader of a GGUF file, and the function that dequantizes its blocks to float32."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise CheckpointError(
            f"{path}: a GGUF file, which the package gguf reads; write pip install gguf"
        ) from error
    try:
        reader = GGUFReader(str(path))
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        foreign = _UNKNOWN_TYPE.search(str(error))
        if foreign is not None:
            raise CheckpointError(
                f"{path}: a tensor of GGML's type {foreign[1]}, which the package gguf does not "
                "know: a type of a fork such as ik_llama.cpp, or of a newer gguf; upgrade gguf, or "
                "make the file again with llama.cpp, in one of its own types"
            ) from error
        raise CheckpointError(
            f"{path}: a damaged GGUF file ({shown(str(error))}); fetch it again"
        ) from error
    if reader.byte_order == "S":  # the package hands out bytes, not numbers, of BF16 and of blocks
        raise CheckpointError(
            f"{path}: a {reader.endianess.name.lower()}-endian file, expected this machine's byte "
            "order; write gguf-convert-endian COPY native, COPY a copy of it: bytes are swapped in "
            "place"
        )
    field = reader.fields.get("split.count")
    count = 1 if field is None else int(field.contents())
    if count > 1:
        raise CheckpointError(
            f"{path}: one of {count} files of a GGUF that was split, expected the whole; join "
            "them first, with llama.cpp's gguf-split --merge FIRST WHOLE, FIRST the file "
            f"00001-of-{count:05}"
        )
    return reader, dequantize


def _plain_dtype(tensor: Any) -> np.dtype | None:
    """The dtype of a tensor that is no blocks."""
    name = tensor.tensor_type.name
    if name == "BF16":  # comes as bytes
        return NUMPY_DTYPES["BF16"]
    is_plain = name in ("F32", "F16", "F64", "I8", "I16", "I32", "I64")
    return tensor.data.dtype if is_plain else None
