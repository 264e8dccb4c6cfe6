"""GGUF files as sources: llama.cpp's blocks become float32. Needs the package `gguf`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from qtoolkit.checkpoints._base import StoredAs
from qtoolkit.checkpoints._header import DTYPE_OF, NUMPY_DTYPES, CheckpointError, shown
from qtoolkit.checkpoints._memory import ArraySource
from qtoolkit.checkpoints._storage import File, Path, fill, naming


class GgufFile(ArraySource):
    """An open GGUF file; names are those of the file, the layout of blocks is called "GGUF".

    Raises:
      CheckpointError: The package is missing, the file is damaged, or it has blocks, or an order
        of bytes, that the package does not read.
    """

    def __init__(self, path: Path) -> None:
        reader, dequantize = _opened(path)
        found = {tensor.name: tensor for tensor in reader.tensors}
        _check_byte_order(path, reader)

        def values(name: str) -> np.ndarray:
            tensor = found[name]
            dtype = _plain_dtype(tensor)
            if dtype is not None:
                return tensor.data.astype(dtype, copy=False)
            blocks = np.empty(tensor.data.shape, np.uint8)
            with naming(path):  # the package maps the file, and mapped pages count as memory in use
                where = f"{path}: tensor {shown(name)}"
                fill(file, int(tensor.data_offset), blocks.reshape(-1).data, where)
            try:
                return dequantize(blocks, tensor.tensor_type)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{path}: tensor {shown(name)}: blocks of {tensor.tensor_type.name}, which the "
                    "package gguf does not read; requantize it with llama.cpp to Q8_0"
                ) from error

        # GGUF counts axes from the innermost one.
        described = {
            name: (
                _plain_dtype(tensor) or np.dtype("float32"),
                tuple(int(n) for n in reversed(tensor.shape)),
            )
            for name, tensor in found.items()
        }
        # Bytes of BF16 are in this machine's order: see `_check_byte_order`.
        spans = {
            name: [(int(tensor.data_offset), tensor.data.nbytes)]
            for name, tensor in found.items()
            if _plain_dtype(tensor) is not None and tensor.data.dtype.isnative
        }
        file = File(path)
        try:
            super().__init__(path, described, values, file, spans)
        except BaseException:
            file.close()
            raise
        self.stored_as = {
            name: StoredAs(tensor.tensor_type.name, int(tensor.n_bytes))
            for name, tensor in found.items()
            if _plain_dtype(tensor) is None
        }
        self.layout = "GGUF" if self.stored_as else ""


def _opened(path: Path) -> tuple[Any, Callable[..., np.ndarray]]:
    """The reader of a whole GGUF file, and what makes float32 numbers of its blocks."""
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
        raise CheckpointError(
            f"{path}: a damaged GGUF file ({shown(str(error))}); fetch it again"
        ) from error
    field = reader.fields.get("split.count")
    count = 1 if field is None else int(field.contents())
    if count > 1:
        raise CheckpointError(
            f"{path}: one of {count} files of a GGUF that was split, expected the whole; join "
            "them first, with llama.cpp's gguf-split --merge FIRST WHOLE, FIRST the file "
            f"00001-of-{count:05}"
        )
    return reader, dequantize


def _check_byte_order(path: Path, reader: Any) -> None:
    """Raises where bytes of BF16 or of blocks are in an order that is not this machine's."""
    for tensor in reader.tensors:
        # The package hands out bytes, not numbers, of BF16 and of blocks.
        if reader.byte_order == "S" and tensor.data.dtype == np.uint8:
            raise CheckpointError(
                f"{path}: tensor {shown(tensor.name)}: {tensor.tensor_type.name} in a "
                f"{reader.endianess.name.lower()}-endian file, expected this machine's byte order; "
                "write gguf-convert-endian COPY native, COPY a copy of it: bytes are swapped in "
                "place"
            )


def _plain_dtype(tensor: Any) -> np.dtype | None:
    """The dtype, in this machine's byte order, of a tensor that is no blocks."""
    name = tensor.tensor_type.name
    if name == "BF16":  # comes as bytes
        return NUMPY_DTYPES["BF16"]
    dtype = tensor.data.dtype.newbyteorder("=")
    plain = name in ("F32", "F16", "F64", "I8", "I16", "I32", "I64") and dtype.name in DTYPE_OF
    return dtype if plain else None
