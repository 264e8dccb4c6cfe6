"""How one quantized weight is stored in a file: its entries, and their bytes.

A layout describes it by a `Stored`, which both the writer and the reader follow. No JAX here.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from qtoolkit.checkpoints._header import DTYPE_BITS, NUMPY_DTYPES, CheckpointError, shown
from qtoolkit.formats import BlockFormat

Packing = Literal["bytes", "nibbles", "words", "bits"]
_WORDS = 32  # 32 codes of any number of bits fill whole 32-bit words
ReadBytes = Callable[[str, int, memoryview], None]


class Entry(NamedTuple):
    """A tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """One quantized weight as a file holds it.

    Attributes:
      name, shape: The name and shape of the weight.
      matrices: The weight seen as [count, rows, columns], in C order. Each matrix is quantized on
        its own.
      spec: The block format of a matrix.
      codes: The entry with the codes.
      scale: The entry with the scales, one matrix after the other, each in C order; None: no
        scales.
      second: The entry with the second scale (NVFP4), one in all or one per matrix; None: none.
      second_divides: Whether the second scale is the reciprocal: x = q * scale / second.
      packing: "bytes", a code each; "nibbles", two codes to a byte, the first one low; "words",
        codes of n bits plus 2**(n-1), dense in 32-bit words from the lowest bits on, a row padded
        to whole words; "bits", codes of n bits as `qtoolkit.pack` packs a row: dense, from the
        lowest bits on, padded to a whole byte, for six bits to three.
      constants: Further entries, with their bytes.
    """

    name: str
    shape: tuple[int, ...]
    matrices: tuple[int, int, int]
    spec: BlockFormat
    codes: Entry
    scale: Entry | None = None
    second: Entry | None = None
    second_divides: bool = False
    packing: Packing = "bytes"
    constants: tuple[tuple[Entry, bytes], ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries that are written for it."""
        parts = (self.codes, self.scale, self.second, *(entry for entry, _ in self.constants))
        return tuple(entry for entry in parts if entry is not None)


def constant(name: str, dtype: str, values: Any, shape: tuple[int, ...]) -> tuple[Entry, bytes]:
    """An entry whose values are known before the weight is read, with its bytes."""
    array = np.asarray(values, NUMPY_DTYPES[dtype]).reshape(shape)
    return Entry(name, dtype, shape), array.tobytes()


def pack_codes(codes: np.ndarray, stored: Stored) -> np.ndarray:
    """The bytes of the codes [rows, columns] of whole rows."""
    if stored.packing == "nibbles":
        return codes[:, 0::2] | (codes[:, 1::2] << 4)
    if stored.packing == "bytes":
        return codes
    bits = stored.spec.element.bits
    if stored.packing == "bits":
        return _dense(codes, bits, 24 if bits == 6 else 8)
    offset = codes ^ np.uint8(1 << (bits - 1))  # two's complement to value + 2**(bits - 1)
    return _dense(offset & np.uint8((1 << bits) - 1), bits, 32)


def unpack_codes(packed: np.ndarray, columns: int, stored: Stored) -> np.ndarray:
    """The codes [rows, columns] of the bytes [rows, bytes of a row]."""
    if stored.packing == "nibbles":
        codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
        codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
        return codes[:, :columns]
    if stored.packing == "bytes":
        return packed
    bits = stored.spec.element.bits
    stream = np.unpackbits(packed, axis=1, bitorder="little")[:, : columns * bits]
    codes = np.packbits(stream.reshape(len(packed), columns, bits), axis=2, bitorder="little")
    offset = 0 if stored.packing == "bits" else 1 << (bits - 1)
    return codes.reshape(len(packed), columns) ^ np.uint8(offset)


def _dense(codes: np.ndarray, bits: int, unit: int) -> np.ndarray:
    """Little-endian bytes: the bits of a row one after the other, filled up to units of bits."""
    rows, columns = codes.shape
    stream = np.unpackbits(codes[:, :, None], axis=2, count=bits, bitorder="little")
    stream = stream.reshape(rows, columns * bits)
    padded = np.zeros((rows, -(-columns * bits // unit) * unit), np.uint8)
    padded[:, : stream.shape[1]] = stream
    return np.packbits(padded, axis=1, bitorder="little")


def scale_bytes(scale: np.ndarray, entry: Entry) -> np.ndarray:
    """Scales as the entry has them: E8M0 is written as U8 by some layouts, its byte unchanged."""
    wanted = NUMPY_DTYPES[entry.dtype]
    if scale.dtype == wanted:
        return scale
    if scale.dtype.itemsize == 1 and wanted.itemsize == 1:
        return scale.view(wanted)
    return scale.astype(wanted)


def at_limits(stored: Stored, read_bytes: ReadBytes) -> "Values":
    """Reads 1 where the code of a weight is the largest, its negative or the lowest one, else 0."""
    values = Values(dataclasses.replace(stored, scale=None, second=None), read_bytes)
    element = stored.spec.element
    unit = 2.0**stored.spec.element_exponent
    largest = float(element.max_finite)
    # int8 has -128, but a symmetric scale maps amax to 127: whoever clamps there clamps at -127.
    limits = [float(element.lowest + stored.spec.narrow_range), -largest, largest]
    values.table = np.isin(values.table / unit, limits).astype(np.float32)
    return values


class Values:
    """Reads the float32 values of a stored weight, rows at a time.

    Args:
      stored: What is read.
      read_bytes: (name of an entry, first byte, buffer to fill).
    """

    def __init__(self, stored: Stored, read_bytes: ReadBytes) -> None:
        self.stored = stored
        self._read = read_bytes
        unit = np.float32(2.0**stored.spec.element_exponent)
        self.table = stored.spec.element.values().astype(np.float32) * unit  # of every code
        self._scales: np.ndarray | None = None

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` of the float32 weight on; both multiples of 4."""
        _, rows, columns = self.stored.matrices
        out = np.frombuffer(buffer, np.float32)
        first, last = start // 4, start // 4 + len(out)
        while first < last:
            row = first // columns
            column = first - row * columns
            matrix, within = divmod(row, rows)
            if column == 0 and last - first >= columns:  # whole rows of this matrix
                height = min((last - first) // columns, rows - within)
                count = height * columns
                place = (within, within + height), (0, columns)
            else:
                stop = min(column + last - first, columns)
                count = stop - column
                place = (within, within + 1), (column, stop)
            self._fill(out[:count], matrix, *place)
            out, first = out[count:], first + count

    def _fill(
        self, out: np.ndarray, matrix: int, rows: tuple[int, int], columns: tuple[int, int]
    ) -> None:
        """Writes the values of full rows, or of a piece of one, to `out`, which is flat."""
        stored, (start, stop), (left, right) = self.stored, rows, columns
        out = out.reshape(stop - start, right - left)
        codes = self._codes(matrix, rows, columns)
        if codes.size and len(self.table) <= 128 and codes.max() >= len(self.table):
            raise CheckpointError(
                f"{shown(stored.name)}: code {codes.max()}, expected below {len(self.table)}, as "
                f"{stored.spec.element.name} has; the file is damaged, fetch it again"
            )
        np.take(self.table, codes, out=out, mode="clip")  # "clip": without a copy of the indices
        if stored.scale is None:
            return
        height, width = stored.spec.block_lengths(stored.matrices[1:])
        scales = self.scales()[matrix]
        if scales.shape[0] > 1:
            scales = scales[np.arange(start, stop) // height]
        if scales.shape[1] > 1:
            scales = scales[:, left // width : -(-right // width)]
            if width > 1:
                skipped = left % width
                scales = np.repeat(scales, width, axis=1)[:, skipped : skipped + right - left]
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            np.multiply(out, scales, out=out)

    def _codes(self, matrix: int, rows: tuple[int, int], columns: tuple[int, int]) -> np.ndarray:
        stored, (left, right) = self.stored, columns
        count, height, _ = stored.matrices
        width = stored.codes.nbytes // (count * height)
        skipped = left % _WORDS
        bits = {"bytes": 8, "nibbles": 4}.get(stored.packing, stored.spec.element.bits)
        first = (left - skipped) * bits // 8
        end = min(-(-right // _WORDS) * _WORDS * bits // 8, width)
        packed = np.empty((rows[1] - rows[0], end - first), np.uint8)
        place = (matrix * height + rows[0]) * width + first
        self._read(stored.codes.name, place, packed.reshape(-1).data)
        stop = skipped + right - left
        return unpack_codes(packed, stop, stored)[:, skipped:stop]

    def scales(self) -> np.ndarray:
        """Effective scales, float32 [matrices, blocks along rows, along columns]."""
        if self._scales is None:
            stored = self.stored
            assert stored.scale is not None
            scales = _numbers(self._whole(stored.scale), stored.spec)
            scales = scales.reshape(-1, *stored.spec.scale_shape(stored.matrices[1:]))
            if stored.second is not None:
                second = self._whole(stored.second).astype(np.float32).reshape(-1, 1, 1)
                with np.errstate(divide="ignore", invalid="ignore"):
                    scales = scales / second if stored.second_divides else scales * second
            self._scales = np.ascontiguousarray(scales, np.float32)
        return self._scales

    def _whole(self, entry: Entry) -> np.ndarray:
        data = np.empty(entry.nbytes, np.uint8)
        self._read(entry.name, 0, data.data)
        return data.view(NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)


def _numbers(scale: np.ndarray, spec: BlockFormat) -> np.ndarray:
    """Scales as float32; a byte of an E8M0 scale is its exponent plus 127."""
    if spec.has_powers:
        codes = scale.view(np.uint8)
        numbers = np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)
        return np.where(codes == 255, np.float32(np.nan), numbers)
    return scale.astype(np.float32, copy=False)


def check_entry(
    tensors: Mapping[str, Any], name: str, dtypes: tuple[str, ...], where: str
) -> Entry:
    """The entry `name` of a source, with one of `dtypes`.

    Raises:
      CheckpointError: It is missing or has another dtype.
    """
    info = tensors.get(name)
    if info is None or info.dtype not in dtypes:
        got = "no such tensor" if info is None else f"dtype {info.dtype}"
        raise CheckpointError(
            f"{where}: tensor {shown(name)}: {got}, expected {' or '.join(dtypes)}; the checkpoint "
            "is not what its config says, fetch it again"
        )
    return Entry(name, info.dtype, tuple(info.shape))
