"""ONNX's data types: their numbers, names and dtypes, and the versions that have them."""

import contextlib
import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import ml_dtypes
import numpy as np

from qtoolkit.formats import Format, FormatLike, format

LATEST_OPSET = 28


class DataType(enum.IntEnum):
    """`TensorProto.DataType`: the numbers by which models name types.

    Source: onnx.proto, IR version 14.

    Examples:
      >>> qt.onnx.DataType.FLOAT8E4M3FN.value
      17
      >>> qt.onnx.cast(jnp.float32(449.0), qt.onnx.DataType.FLOAT8E4M3FN)
      Array(448, dtype=float8_e4m3fn)
    """

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26
    FLOAT6E2M3 = 27
    FLOAT6E3M2 = 28


# What names a type: its number, its name in ONNX, a dtype, or whatever `qtoolkit.format` takes.
TypeLike: TypeAlias = int | FormatLike

_T = DataType
# The float types of 8 bits that Cast's tables of saturation are about.
FLOAT8 = (_T.FLOAT8E4M3FN, _T.FLOAT8E4M3FNUZ, _T.FLOAT8E5M2, _T.FLOAT8E5M2FNUZ)
FLOAT6 = (_T.FLOAT6E2M3, _T.FLOAT6E3M2)
# The opset that brought each type to Cast.
CAST_TYPES: Mapping[DataType, int] = {
    **dict.fromkeys((_T.FLOAT, _T.FLOAT16, _T.DOUBLE, _T.BOOL, _T.UINT8, _T.INT8, _T.UINT16), 1),
    **dict.fromkeys((_T.INT16, _T.UINT32, _T.INT32, _T.UINT64, _T.INT64), 1),
    _T.STRING: 9,
    _T.BFLOAT16: 13,
    **dict.fromkeys(FLOAT8, 19),
    **dict.fromkeys((_T.INT4, _T.UINT4), 21),
    _T.FLOAT4E2M1: 23,
    _T.FLOAT8E8M0: 24,
    **dict.fromkeys((_T.INT2, _T.UINT2), 25),
    **dict.fromkeys(FLOAT6, 28),
}

# Types without a format that has their dtype. NumPy has arrays of float6, JAX does not.
_OTHER_DTYPES: dict[DataType, np.dtype] = {
    _T.FLOAT6E2M3: np.dtype(ml_dtypes.float6_e2m3fn),
    _T.FLOAT6E3M2: np.dtype(ml_dtypes.float6_e3m2fn),
    _T.COMPLEX64: np.dtype(np.complex64),
    _T.COMPLEX128: np.dtype(np.complex128),
}
FORMATS: Mapping[DataType, Format] = {
    **{t: format(t.name) for t in CAST_TYPES if t not in (_T.STRING, *FLOAT6)},
    **{t: format(_OTHER_DTYPES[t]) for t in FLOAT6},
}
DTYPES: Mapping[DataType, np.dtype] = {
    **{t: fmt.dtype for t, fmt in FORMATS.items() if fmt.dtype is not None},
    **_OTHER_DTYPES,
}
_BY_DTYPE = {dtype: t for t, dtype in DTYPES.items()}
_BY_FORMAT = {fmt: t for t, fmt in FORMATS.items()}
_BY_NAME = {t.name: t for t in DataType}
_BY_NUMBER = {t.value: t for t in DataType}
_BY_CLASS = {  # Python's numbers are 64-bit ones, as in NumPy; a bool is an int, too
    str: _T.STRING,
    bytes: _T.STRING,
    bool: _T.BOOL,
    int: _T.INT64,
    float: _T.DOUBLE,
}
TYPES_OF_64_BITS = (_T.DOUBLE, _T.INT64, _T.UINT64, _T.COMPLEX128)


def of_spec(spec: Any) -> DataType | None:
    """The type that a number, a name, a dtype or a format says; None where ONNX has no such type.

    Raises:
      TypeError: `spec` is none of these.
    """
    if isinstance(spec, str):
        text = spec.removeprefix("TensorProto.").removeprefix("tensor(").removesuffix(")")
        return _BY_NAME.get(text.upper()) or _of_format(text)
    if isinstance(spec, int | np.integer) and not isinstance(spec, bool):
        return _BY_NUMBER.get(int(spec))
    if isinstance(spec, Format):
        return _of_format(spec)
    dtype = None
    with contextlib.suppress(TypeError):  # NumPy raises it for classes of several dtypes
        if isinstance(spec, type) and issubclass(spec, np.dtype):  # such as np.dtypes.Int8DType
            dtype = np.dtype(spec.__call__())
        elif isinstance(spec, np.dtype | type):
            dtype = np.dtype(spec)
    # NumPy converts unknown classes to the dtype object.
    if dtype is None or (dtype.kind == "O" and isinstance(spec, type) and spec is not object):
        raise TypeError
    return of_dtype(dtype)


def _of_format(spec: Any) -> DataType | None:
    try:
        return _BY_FORMAT.get(format(spec))
    except ValueError:
        return None


def of_dtype(dtype: np.dtype) -> DataType | None:
    """The type of arrays with this dtype of NumPy, ml_dtypes or JAX; strings and objects: text."""
    if dtype.kind in "USTO":
        return DataType.STRING
    return _BY_DTYPE.get(dtype if dtype.isnative else dtype.newbyteorder("="))


def of_value(x: Any) -> DataType | None:
    """The type of what has a dtype, of a Python number (64 bits) or a string; None for others."""
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype):
        return of_dtype(dtype)
    if isinstance(x, int) and 2**63 <= x < 2**64:
        return DataType.UINT64
    return next((t for kind, t in _BY_CLASS.items() if isinstance(x, kind)), None)


def is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)
