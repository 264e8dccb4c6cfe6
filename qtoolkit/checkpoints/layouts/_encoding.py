"""`Encoding`: how a file holds one quantized weight, as data. Layouts make it, nothing else does.

An encoding says which entries of a file hold the codes, scales and zero points of a weight, and how
codes are packed. What turns these bytes into a `QArray`, or a `QArray` into bytes, is the same for
all layouts: `checkpoints/_reader.py` and `checkpoints/_produce.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import NUMPY_DTYPES, Entry
from qtoolkit.formats import BlockFormat
from qtoolkit.formats.internal import packed_words

ReadEntry = Callable[[Entry], np.ndarray]  # the bytes of an entry, uint8, flat


@dataclasses.dataclass(frozen=True)
class Packing:
    """How codes of less than a byte lie along the last axis of an entry.

    Attributes:
      word: Bits of a word, which is little-endian: 8, 24, 32, 40, 56 or 64. It holds word // bits
        whole codes, from its lowest bits on; a row ends with a whole word, but for zeros or bytes
        of padding that are not read.
      order: The place in its word of each of the codes, in the order of the weight; () for 0, 1, 2
        and so on. AWQ has (0, 4, 1, 5, 2, 6, 3, 7).
      biased: Whether a signed integer is stored as its value + 2**(bits - 1).
      axis: -1, or -2 for words that run along the rows: those of GPTQ. 0 for the words of HQQ: of n
        words, word k has elements k, k + n, k + 2n ... of the whole weight.
    """

    word: int
    order: tuple[int, ...] = ()
    biased: bool = False
    axis: int = -1


BYTES = None  # a code to a byte
NIBBLES = Packing(8)  # two codes of four bits to a byte, the first one low
HIGH_NIBBLES = Packing(8, order=(1, 0))  # the first one high
WORDS = Packing(32, biased=True)  # compressed-tensors


def dense(bits: int, *, biased: bool = False, axis: int = -1) -> Packing:
    """Codes without a gap, so that some cross the bytes: eight codes of 3 bits in three bytes."""
    return Packing(math.lcm(bits, 8), biased=biased, axis=axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """How a file holds one quantized weight.

    Attributes:
      name, shape: The name and shape of the weight.
      spec: Its block format; the blocks are those of `lengths`.
      lengths: The length of a block along each axis of `matrix_shape`.
      codes: The entry with the codes.
      scale: The entry with the scales in C order, ceil(n / length) along each axis; None: none.
      tensor_scale: The entry with the tensor scale (NVFP4), one in all or one for each index of the
        first axes; None: none.
      zero_point: The entry with the zero points, which lie as the scales do; None: none.
      packing: How codes are packed; None: a code to a byte.
      zero_packing: How zero points are packed, along the last axis unless it says otherwise; None:
        they are integers of the entry's dtype.
      zero_offset: What is added to a stored zero point: 1 for GPTQ.
      symmetric_key: The key of the config by which all zero points are 0, or the middle of unsigned
        codes; "" if it says no such thing.
      group_index: The entry that says in which block each input, an index of the last axis of a
        matrix, lies (g_idx of GPTQ); None: in that of its place.
      transposed: Whether entries hold the last two axes of the weight in the other order.
      constants: Further entries, with their bytes.
      others: Further entries, which `scale_of` and `finish` read.
      scale_of: (how it is stored, the reader of entries) -> the scales in the order of blocks, for
        programs that quantize scales or store them in another order; None: as `scale` has them.
      finish: (how it is stored, q * scale as float32, the reader of entries) -> the weight, for
        programs that do more to it than a `QArray` can hold: MLX adds biases. None: nothing is
        done. Of a stack of matrices one after the other is finished, with its part of each entry.
      scales_first: How many scales lie in `codes` before the codes of their blocks, as in GGUF's
        NVFP4; 0: none do.
      quantizer: (float32 elements of whole blocks) -> the bytes of `codes`, and the numbers that
        they stand for, for blocks that another package rounds; None: `qtoolkit.quantize` does.
    """

    name: str
    shape: tuple[int, ...]
    spec: BlockFormat
    lengths: tuple[int, ...]
    codes: Entry
    scale: Entry | None = None
    tensor_scale: Entry | None = None
    zero_point: Entry | None = None
    packing: Packing | None = BYTES
    zero_packing: Packing | None = None
    zero_offset: int = 0
    symmetric_key: str = ""
    group_index: Entry | None = None
    transposed: bool = False
    constants: tuple[tuple[Entry, bytes], ...] = ()
    others: tuple[Entry, ...] = ()
    scale_of: "Callable[[Encoding, ReadEntry], np.ndarray] | None" = None
    finish: "Callable[[Encoding, np.ndarray, ReadEntry], np.ndarray] | None" = None
    scales_first: int = 0
    quantizer: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries of a file that belong to it."""
        numbers = (self.codes, self.scale, self.tensor_scale, self.zero_point, self.group_index)
        constants = (entry for entry, _ in self.constants)
        return tuple(e for e in (*numbers, *self.others, *constants) if e is not None)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def pairs(
        self, codes: Any, scale: Any = None, zero_point: Any = None, tensor_scale: Any = None
    ) -> Iterator[tuple[Entry, Any]]:
        """The entries of these arrays, in the order in which they are made; not of those that are
        None.
        """
        entries = self.tensor_scale, self.codes, self.scale, self.zero_point
        for entry, array in zip(entries, (tensor_scale, codes, scale, zero_point), strict=True):
            if entry is not None and array is not None:
                yield entry, array

    @property
    def constant_pairs(self) -> Iterator[tuple[Entry, np.ndarray]]:
        """The entries whose values are known before the weight is read, with these."""
        for entry, data in self.constants:
            yield entry, np.frombuffer(data, NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)

    @property
    def format_name(self) -> str:
        """The name of its format for people: "nvfp4", whether its tensor scale divides or not."""
        spec = self.array_spec
        divides = spec.tensor_scale_divides
        return (dataclasses.replace(spec, tensor_scale_divides=False) if divides else spec).name

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape in which entries hold the weight: its own, or that of its transpose."""
        if not self.transposed:
            return self.shape
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])

    @property
    def array_spec(self) -> BlockFormat:
        """`spec`, which is that of a matrix, for a `QArray` of `matrix_shape`, of any rank."""
        spec, shape = self.spec, self.matrix_shape
        outputs = [axis for axis, n in enumerate(shape) if self.lengths[axis] != n]
        if len(shape) == 2 or spec.scale is None:
            return spec
        if not outputs:
            return dataclasses.replace(spec, block=(), axes=None, other_axes=None)
        if len(outputs) == 1 and self.lengths[outputs[0]] == 1:
            return dataclasses.replace(spec, block=(1,), axes=(outputs[0],), other_axes=None)
        axes = tuple(range(len(shape)))
        return dataclasses.replace(spec, block=self.lengths, axes=axes, other_axes=1)

    @property
    def is_array(self) -> bool:
        """Whether a `QArray` can hold the weight."""
        return self.group_index is None and self.finish is None

    @property
    def is_sliceable(self) -> bool:
        """Whether some of its rows can be read on their own."""
        return self._has_plain_codes and not (self.transposed or self.zero_point)

    @property
    def is_written(self) -> bool:
        """Whether weights can be quantized to it."""
        return self._has_plain_codes and self.scale_of is None

    @property
    def _has_plain_codes(self) -> bool:
        has_words = self.zero_packing == dataclasses.replace(WORDS, axis=-2)
        if not self.is_array or (self.zero_point and not has_words):
            return False
        packing = self.packing
        return packing is None or (
            packing.axis == -1 and packing.word % self.spec.element.bits == 0
        )


def constant(name: str, dtype: str, values: Any, shape: tuple[int, ...]) -> tuple[Entry, bytes]:
    """An entry whose values are known before the weight is read, with its bytes."""
    array = np.asarray(values, NUMPY_DTYPES[dtype]).reshape(shape)
    return Entry(name, dtype, shape), array.tobytes()


def same_numbers(old: Encoding, new: Encoding) -> bool:
    """Whether `new` can hold the codes and scales of `old` as they are: in one grid of blocks, of
    one element, with scales of a dtype that has those of the other.
    """
    if not (old.is_sliceable and new.is_sliceable and old.scale and new.scale):
        return False
    if old.scale_of is not None:  # `old.scale` is what they are made of
        return False
    grids = [tuple(map(min, one.lengths, one.shape)) for one in (old, new)]
    is_same = old.shape == new.shape and grids[0] == grids[1]
    is_plain = old.tensor_scale is None and new.tensor_scale is None
    powers = [one.spec.has_powers for one in (old, new)]
    fits = powers[0] if powers[1] else new.scale.dtype in ("F32", old.scale.dtype)
    return is_same and is_plain and fits and old.spec.element == new.spec.element


def merged_matrices(
    shape: tuple[int, ...], lengths: tuple[int, ...], unmerged: Collection[int] = ()
) -> tuple[tuple[int, int, int], tuple[int, int]] | None:
    """An array seen as matrices: (how many, rows, columns), and (height, width) of their blocks.

    Neighbouring axes are merged where blocks have length 1 along both, or the full length along
    both; but axes in `unmerged` not with those before them. None if no stack of matrices remains.
    """
    axes: list[tuple[int, int]] = []
    is_unmerged = False
    for axis, (n, length) in enumerate(zip(shape, lengths, strict=True)):
        is_unmerged |= axis in unmerged
        if n == 1:
            continue
        last, block = axes[-1] if axes else (0, 0)
        if axes and not is_unmerged and (block == length == 1 or (block == last and length == n)):
            axes[-1] = (last * n, block * length)
        else:
            axes.append((n, length))
        is_unmerged = False
    axes = [(1, 1)] * (2 - len(axes)) + axes
    if any(length != 1 for _, length in axes[:-2]):
        return None
    (rows, height), (columns, width) = axes[-2:]
    if height == width == 1 and rows > 1:  # each element has a scale
        return None
    return (math.prod(n for n, _ in axes[:-2]), rows, columns), (height, width)


def unpack_rows(data: np.ndarray, packing: Packing, bits: int, columns: int) -> np.ndarray:
    """The codes, uint8 [rows, columns], of bytes [rows, bytes of a row] of whole words."""
    size, count = _word(packing, bits)
    words = _pad_last_axis(data, -data.shape[1] % size)
    if size > 1:  # NumPy shifts no integers of 3, 5 or 7 bytes: words are padded to 8
        words = _pad_last_axis(words.reshape(len(data), -1, size), 8 - size).view("<u8")[..., 0]
    codes = np.empty((*words.shape, count), np.uint8)
    for place, at in enumerate(packing.order or range(count)):
        codes[..., place] = words >> words.dtype.type(at * bits)  # the low byte of the shifted word
    codes = codes.reshape(len(data), -1)[:, :columns] & np.uint8((1 << bits) - 1)
    return codes ^ np.uint8(1 << (bits - 1)) if packing.biased else codes


def unpack_entry(
    entry: Entry, read: ReadEntry, packing: Packing | None, bits: int, shape: tuple[int, ...]
) -> np.ndarray:
    """The codes of an entry in the shape of the array, a code to a byte."""
    data = read(entry)
    if packing is None:
        return data.reshape(shape)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if packing.axis == 0:
        words = unpack_rows(
            data.reshape(-1, packing.word // 8), packing, bits, packing.word // bits
        )
        return np.ascontiguousarray(words.T).reshape(-1)[: math.prod(shape)].reshape(shape)
    if packing.axis == -1:
        return unpack_rows(data.reshape(rows, -1), packing, bits, columns).reshape(shape)
    # Elements of the entry that run along the rows: as rows of the transposed matrix.
    height, size = shape[-2], NUMPY_DTYPES[entry.dtype].itemsize
    words = data.reshape(math.prod(shape[:-2]), -1, columns, size)
    turned = np.ascontiguousarray(words.swapaxes(1, 2)).reshape(-1, words.shape[1] * size)
    codes = unpack_rows(turned, packing, bits, height).reshape(-1, columns, height)
    return np.ascontiguousarray(codes.swapaxes(1, 2)).reshape(shape)


def floats(entry: Entry, read: ReadEntry) -> np.ndarray:
    """The numbers of an entry, float32."""
    values = read(entry).view(NUMPY_DTYPES[entry.dtype]).astype(np.float32)
    return values.reshape(entry.shape)


def zero_points(encoding: Encoding, read: ReadEntry) -> np.ndarray:
    """The zero points of a weight that has them, int32, one for each block of `matrix_shape`."""
    entry = encoding.zero_point
    assert entry is not None
    shape, lengths = encoding.matrix_shape, encoding.lengths
    counts = tuple(-(-n // length) for n, length in zip(shape, lengths, strict=True))
    packing, element = encoding.zero_packing, encoding.spec.element
    if packing is None:
        return read(entry).view(NUMPY_DTYPES[entry.dtype]).astype(np.int32).reshape(counts)
    bits = element.bits
    codes = unpack_entry(entry, read, packing, bits, counts).astype(np.int32)
    codes = (codes + np.int32(encoding.zero_offset)) & np.int32((1 << bits) - 1)
    half = 1 << (bits - 1)  # codes of signed integers are two's complement
    return (codes ^ half) - half if element.signed else codes


def untile(data: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Bytes of scales [rows, columns] that lie as tensor cores read them.

    A tile has 128 rows and 4 columns; its row 32 i + j is at [j, i]. The last tiles are padded.
    Source: cuBLAS, "1D block scaling factors layout".
    """
    across = -(-columns // 4)
    tiles = data.reshape(-1, across, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(-1, 4 * across)[:rows, :columns])


def pack_zero_points(zeros: Any, packing: Packing, bits: int) -> Any:
    """The words of zero points [rows, blocks] of a matrix, which run along its rows."""
    assert packing.axis == -2
    return words_of(zeros.T.astype(np.uint8), packing, bits).T


def pack_rows(codes: np.ndarray, packing: Packing, bits: int) -> np.ndarray:
    """The bytes [rows, bytes of a row] of codes [rows, columns]; the last word has zeros."""
    data = words_of(codes, packing, bits)[..., None].view(np.uint8)[..., : packing.word // 8]
    return np.ascontiguousarray(data).reshape(len(codes), -1)


def words_of(codes: Any, packing: Packing, bits: int) -> Any:
    """The words of codes along the last axis, of NumPy or JAX: uint8, uint32, or wider ones."""
    dtype = np.dtype({8: "u1", 32: "<u4"}.get(packing.word, "<u8"))
    count = packing.word // bits
    return packed_words(codes, bits, count, dtype, order=packing.order, biased=packing.biased)


def _word(packing: Packing, bits: int) -> tuple[int, int]:
    """Bytes and codes of a word. Where codes fill bytes, each byte is read as a word."""
    word = 8 if not packing.order and 8 % bits == 0 else packing.word
    return word // 8, word // bits


def _pad_last_axis(x: np.ndarray, missing: int) -> np.ndarray:
    """Pads the last axis with zeros."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
