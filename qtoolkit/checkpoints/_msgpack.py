"""Finds the arrays in a file of `flax.serialization.to_bytes`, each of which Flax then reads."""

import math
import operator
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Any, NamedTuple, NoReturn, TypeVar

import flax.serialization
import msgpack
import numpy as np

from qtoolkit.checkpoints._paths import Path, naming
from qtoolkit.checkpoints._tensors import CheckpointError, shown

_T = TypeVar("_T")
# Source: flax/serialization.py, _MsgpackExtType, _chunk.
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
# The first bytes of values by what they are.
# Source: github.com/msgpack/msgpack/blob/master/spec.md, "Overview".
_MAPS = {*range(0x80, 0x90), 0xDE, 0xDF}
_EXTENSIONS = {*range(0xC7, 0xCA), *range(0xD4, 0xD9)}
_REFUSED = {
    "list": {*range(0x90, 0xA0), 0xDC, 0xDD},
    "str": {*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB},
    "bytes": {0xC4, 0xC5, 0xC6},
}
# Bytes of the length behind the first byte of bin, ext and str, which old files have for bin.
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_MOST = 2**20  # bytes of a key, or of the shape and dtype of an array


class Leaf(NamedTuple):
    """An array, or a number, in a file: bytes `start` to `stop` are its msgpack."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self, stream: BufferedReader) -> np.ndarray:
        stream.seek(self.start)
        data = stream.read(self.stop - self.start)
        return np.asarray(flax.serialization.msgpack_restore(data))


def leaves_of(path: Path, stream: BufferedReader, size: int) -> list[tuple[str, Leaf]]:
    """The arrays of a file by their names, keys joined by ".".

    Raises:
      CheckpointError: It is damaged, or no tree of arrays.
    """
    try:
        with naming(path):
            walk = _Walk(path, stream, size)
            tree = walk.value("")
            if more := size - stream.tell():
                raise ValueError(f"{more:,} bytes behind its end")
    except CheckpointError:
        raise
    except (
        *(ValueError, TypeError, KeyError, AttributeError, SyntaxError),  # the last: np.dtype(",")
        *(msgpack.UnpackException, RecursionError),
    ) as error:
        what = shown(str(error) or type(error).__name__)
        raise CheckpointError(
            f"{path}: neither safetensors nor Flax's msgpack ({what}), expected a checkpoint; "
            "fetch or write it again"
        ) from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: msgpack without names, expected a tree of arrays")
    return [*_flattened(tree)]


class _Walk:
    """Reads a file but for the bytes of its arrays, which it steps over.

    Sizes are checked against that of the file; nothing is read or made that is large because the
    file says so.
    """

    def __init__(self, path: Path, stream: BufferedReader, size: int) -> None:
        self._path, self._stream, self._size = path, stream, size

    def value(self, name: str) -> Any:
        """The next value: a dictionary, a `Leaf`, or None; `name` is that of a leaf."""
        start = self._stream.tell()
        first = int.from_bytes(self._stream.peek(1)[:1])
        if first in _MAPS:
            return self._map(name, start)
        if first in _EXTENSIONS:
            return self._extension(start)
        for what, codes in _REFUSED.items():
            if first in codes:
                raise CheckpointError(
                    f"{self._path}: {shown(name)}: a {what}, expected an array; it is no "
                    "checkpoint of Flax"
                )
        number = self._unpacked(msgpack.Unpacker.unpack)
        if number is None:  # what Flax writes of an optional parameter that is not there
            return None
        return Leaf(np.asarray(number).dtype, (), start, self._stream.tell())

    def _map(self, name: str, start: int) -> Any:
        tree: dict[Any, Any] = {}
        for _ in range(self._unpacked(msgpack.Unpacker.read_map_header)):
            key = self._unpacked(msgpack.Unpacker.unpack)
            if key in tree:
                raise ValueError(f"key {key!r} twice")
            is_shape = key == "shape" and _CHUNKED in tree
            tree[key] = self._numbers() if is_shape else self.value(f"{name}.{key}".lstrip("."))
        if _CHUNKED not in tree:
            return tree
        # An array that Flax has split because msgpack allows at most 2**32 bytes each.
        chunks = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
        shape = tuple(tree["shape"][str(i)] for i in range(len(tree["shape"])))
        dtypes = {chunk.dtype for chunk in chunks if chunk.shape}
        if len(dtypes) != 1:
            raise ValueError(f"chunks of {len(dtypes)} dtypes, expected one")
        count = sum(math.prod(chunk.shape) for chunk in chunks)
        return _checked(Leaf(dtypes.pop(), shape, start, self._stream.tell()), count)

    def _numbers(self) -> dict[str, int]:
        found = self._unpacked(msgpack.Unpacker.unpack)
        return {key: operator.index(value) for key, value in found.items()}

    def _extension(self, start: int) -> Leaf:
        length = self._length(_EXTENSIONS)
        code = self._number(1)
        stop = self._stream.tell() + length
        if stop > self._size:
            raise ValueError(f"{stop - self._size:,} bytes are missing")
        if code == _COMPLEX:  # complex128, which is refused by the name of the tensor
            leaf = Leaf(np.dtype(complex), (), start, stop)
            complex(*self._unpacked(msgpack.Unpacker.unpack))
        elif code in (_ARRAY, _SCALAR):
            shape, dtype = self._unpacked(_shape_and_dtype)
            nbytes = self._length(_REFUSED["bytes"] | _REFUSED["str"])
            leaf = Leaf(np.dtype(dtype), () if code == _SCALAR else tuple(shape), start, stop)
            _checked(leaf, nbytes / max(leaf.dtype.itemsize, 1))
            self._stream.seek(nbytes, 1)
        else:
            _unknown(code)
        if self._stream.tell() != stop:
            raise ValueError(f"extension of {length:,} bytes that ends elsewhere")
        return leaf

    def _length(self, first_bytes: set[int]) -> int:
        """How many bytes the next value has, which begins with one of these; they come next."""
        first = self._number(1)
        if first not in first_bytes:
            raise ValueError(f"0x{first:x}, expected the bytes of an array")
        if first in _LENGTHS:
            return self._number(_LENGTHS[first])
        return first & 0x1F if first in _REFUSED["str"] else 1 << (first - 0xD4)

    def _number(self, nbytes: int) -> int:
        data = self._stream.read(nbytes)
        if len(data) < nbytes:
            raise ValueError("it ends early")
        return int.from_bytes(data)

    def _unpacked(self, unpack: Callable[[msgpack.Unpacker], _T]) -> _T:
        """What `unpack` takes from here on; the stream is then behind it."""
        start = self._stream.tell()
        options = {"max_buffer_size": _MOST, "strict_map_key": False, "ext_hook": _unknown}
        unpacker = msgpack.Unpacker(self._stream, read_size=256, **options)
        found = unpack(unpacker)
        self._stream.seek(start + unpacker.tell())
        return found


def _checked(leaf: Leaf, count: float) -> Leaf:
    """Raises if there is no such array, or not one of so many elements."""
    like = np.broadcast_to(np.uint8(0), leaf.shape)  # one byte in memory; NumPy checks the shape
    if like.size != count or not leaf.dtype.isnative or not leaf.dtype.itemsize:
        raise ValueError(
            f"{int(count * leaf.dtype.itemsize):,} bytes of data, expected those of "
            f"{list(like.shape)} {leaf.dtype}"
        )
    return leaf


def _unknown(code: int, _: bytes = b"") -> NoReturn:
    raise ValueError(f"extension type {code}")


def _shape_and_dtype(unpacker: msgpack.Unpacker) -> tuple[list[Any], str]:
    count, shape, dtype = unpacker.read_array_header(), unpacker.unpack(), unpacker.unpack()
    if count != 3 or not isinstance(shape, list) or not isinstance(dtype, str):
        raise ValueError("expected shape, dtype and bytes of an array")
    return shape, dtype


def _flattened(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
