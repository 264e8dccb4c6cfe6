"""Flax's msgpack checkpoints as sources: the arrays are found, and then read in pieces."""

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgpack
import numpy as np

from qtoolkit.checkpoints._header import CheckpointError, shown
from qtoolkit.checkpoints._memory import ArraySource, Span, check_once
from qtoolkit.checkpoints._storage import File, Path, naming

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


class MsgpackFile(ArraySource):
    """An open file of `flax.serialization.to_bytes`; names are paths, joined by ".".

    Raises:
      CheckpointError: It is damaged, or no tree of arrays.
    """

    def __init__(self, path: Path) -> None:
        file = File(path)
        try:
            leaves = list(_flattened(_tree(path, file)))
            check_once(path, (name for name, _ in leaves))
            # None is what Flax writes of an optional parameter that is not there.
            found = {name: leaf for name, leaf in leaves if leaf is not None}
            described = {name: (leaf.dtype, leaf.shape) for name, leaf in found.items()}
            spans = {n: leaf.spans for n, leaf in found.items() if isinstance(leaf, _Placed)}
            super().__init__(path, described, found.__getitem__, file, spans)
        except BaseException:
            file.close()
            raise


class _Placed(NamedTuple):
    """An array in the file: its bytes are those of `spans`, one after the other."""

    dtype: np.dtype
    shape: tuple[int, ...]
    spans: tuple[Span, ...]


def _tree(path: Path, file: File) -> dict[Any, Any]:
    """What is in a file: nested dictionaries of `_Placed`, arrays of one number, and None."""
    try:
        with naming(path):
            tree = _Walk(path, file).tree()
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
    return tree


class _Walk:
    """Reads a file but for the bytes of its arrays, which it steps over.

    Places and sizes are checked against those of the file; nothing is read or made that is large
    because the file says so.
    """

    def __init__(self, path: Path, file: File) -> None:
        self._path = path
        self._stream, self._size = file.stream, file.size

    def tree(self) -> Any:
        tree = self._value("")
        more = self._size - self._stream.tell()
        if more:
            raise ValueError(f"{more:,} bytes behind its end")
        return tree

    def _value(self, name: str) -> Any:
        """The next value; `name` is that of a leaf."""
        first = int.from_bytes(self._stream.peek(1)[:1])
        if first in _MAPS:
            return self._map(name)
        if first in _EXTENSIONS:
            return self._extension()
        for what, codes in _REFUSED.items():
            if first in codes:
                raise CheckpointError(
                    f"{self._path}: {shown(name)}: a {what}, expected an array; it is no "
                    "checkpoint of Flax"
                )
        number = self._unpacked(msgpack.Unpacker.unpack)
        return None if number is None else np.asarray(number)

    def _map(self, name: str) -> Any:
        tree: dict[Any, Any] = {}
        for _ in range(self._unpacked(msgpack.Unpacker.read_map_header)):
            key = self._unpacked(msgpack.Unpacker.unpack)
            if key in tree:
                raise ValueError(f"key {key!r} twice")
            tree[key] = self._value(f"{name}.{key}" if name else f"{key}")
        return _joined(tree) if _CHUNKED in tree else tree

    def _extension(self) -> Any:
        length = self._length(_EXTENSIONS)
        code = self._number(1)
        stop = self._stream.tell() + length
        if stop > self._size:
            raise ValueError(f"{stop - self._size:,} bytes are missing")
        if code == _COMPLEX:  # complex128, which is refused by the name of the tensor
            leaf: Any = np.asarray(complex(*self._unpacked(msgpack.Unpacker.unpack)))
        elif code in (_ARRAY, _SCALAR):
            shape, dtype = self._unpacked(_shape_and_dtype)
            nbytes = self._length(_REFUSED["bytes"] | _REFUSED["str"])
            leaf = _placed(np.dtype(dtype), shape, [(self._stream.tell(), nbytes)])
            if code == _SCALAR:
                leaf = _placed(leaf.dtype, (), leaf.spans)
            self._stream.seek(nbytes, 1)
        else:
            _unknown(code)
        if self._stream.tell() != stop:
            raise ValueError(f"extension of {length:,} bytes that ends elsewhere")
        return leaf

    def _length(self, first_bytes: Container[int]) -> int:
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
        unpacker = msgpack.Unpacker(
            self._stream,
            read_size=256,
            max_buffer_size=_MOST,
            strict_map_key=False,
            ext_hook=_unknown,
        )
        found = unpack(unpacker)
        self._stream.seek(start + unpacker.tell())
        return found


def _unknown(code: int, _: bytes = b"") -> NoReturn:
    raise ValueError(f"extension type {code}")


def _shape_and_dtype(unpacker: msgpack.Unpacker) -> tuple[list[Any], str]:
    count, shape, dtype = unpacker.read_array_header(), unpacker.unpack(), unpacker.unpack()
    if count != 3 or not isinstance(shape, list) or not isinstance(dtype, str):
        raise ValueError("expected shape, dtype and bytes of an array")
    return shape, dtype


def _placed(dtype: np.dtype, shape: Sequence[Any], spans: Iterable[Span]) -> _Placed:
    """Raises ValueError or TypeError if there is no such array, or it has other bytes."""
    spans = tuple(spans)
    nbytes = sum(count for _, count in spans)
    like = np.broadcast_to(np.uint8(0), shape)  # of one byte in memory; NumPy checks the shape
    if like.size * dtype.itemsize != nbytes or not dtype.isnative:
        raise ValueError(f"{nbytes:,} bytes of data, expected those of {list(like.shape)} {dtype}")
    return _Placed(dtype, like.shape, spans)


def _joined(tree: dict[Any, Any]) -> _Placed:
    """An array that Flax has split because msgpack allows at most 2**32 bytes each."""
    chunks = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
    shape = [operator.index(tree["shape"][str(i)]) for i in range(len(tree["shape"]))]
    dtypes = {chunk.dtype for chunk in chunks}
    if len(dtypes) != 1:
        raise ValueError(f"chunks of {len(dtypes)} dtypes, expected one")
    return _placed(dtypes.pop(), shape, [span for chunk in chunks for span in chunk.spans])


def _flattened(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts with their paths, components joined by "."."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
