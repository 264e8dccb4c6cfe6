"""ONNX's data types: their numbers, names and dtypes, and the versions that have them."""

import contextlib
import enum
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from qtoolkit import casts
from qtoolkit.formats import FloatFormat, Format, IntFormat, TableFormat, format

LATEST_OPSET = 28


class DataType(enum.IntEnum):
    """`TensorProto.DataType`: the numbers by which models name types.

    Source: onnx.proto, IR version 14.
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

_DTYPE_NAMES = {
    _T.FLOAT: "float32",
    _T.DOUBLE: "float64",
    _T.FLOAT8E4M3FN: "float8_e4m3fn",
    _T.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    _T.FLOAT8E5M2: "float8_e5m2",
    _T.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    _T.FLOAT4E2M1: "float4_e2m1fn",
    _T.FLOAT8E8M0: "float8_e8m0fnu",
    _T.FLOAT6E2M3: "float6_e2m3fn",
    _T.FLOAT6E3M2: "float6_e3m2fn",
}
DTYPES: Mapping[DataType, np.dtype] = {
    t: np.dtype(getattr(ml_dtypes, name, name))
    for t in DataType
    if t not in (_T.UNDEFINED, _T.STRING)
    for name in (_DTYPE_NAMES.get(t, t.name.lower()),)
}
_COMPLEX = (_T.COMPLEX64, _T.COMPLEX128)
FORMATS: Mapping[DataType, Format] = {
    t: format(dtype.name) for t, dtype in DTYPES.items() if t not in _COMPLEX
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
WIDE = (_T.DOUBLE, _T.INT64, _T.UINT64, _T.COMPLEX128)


def check_opset(where: str, opset: Any, first: int) -> None:
    """ValueError where `opset` has no such operator."""
    known = isinstance(opset, int | np.integer) and not isinstance(opset, bool)
    if not known or not first <= opset <= LATEST_OPSET:
        raise ValueError(
            f"{where}: opset={opset!r}, expected an integer from {first} to {LATEST_OPSET}"
        )


def check_choice(where: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """ValueError where the attribute has none of the allowed values, as traced ones have not."""
    plain = isinstance(value, str | int | np.integer | np.bool_)
    if not plain or value not in allowed:
        raise ValueError(f"{where}: {name}={value!r}, expected {' or '.join(map(repr, allowed))}")


def check_since(where: str, name: str, value: Any, default: Any, since: int, opset: int) -> None:
    """ValueError where a version without the attribute is given one."""
    if opset < since and value != default:
        raise ValueError(
            f"{where}: {name}={value!r} with opset={opset}, but the attribute came with opset "
            f"{since}; expected {name}={default!r} or a newer opset"
        )


def data_type(where: str, name: str, value: Any) -> DataType:
    """The type that a number, a name, a dtype or a format says.

    Raises:
      TypeError: `value` is none of these.
      ValueError: It says no type of ONNX.
    """
    found: DataType | None
    if isinstance(value, str):
        text = value.removeprefix("TensorProto.").removeprefix("tensor(").removesuffix(")")
        found = _BY_NAME.get(text.upper()) or _by_format(text)
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        found = _BY_NUMBER.get(int(value))
    elif isinstance(value, FloatFormat | IntFormat | TableFormat):
        found, value = _by_format(value), value.name
    else:
        found = of_dtype(_as_dtype(where, name, value))
    if not found:  # none, or UNDEFINED
        raise ValueError(
            f"{where}: {name}={value!r} is no type of ONNX, expected a number from 1 to "
            f"{max(DataType).value}, a name such as 'FLOAT8E4M3FN', or a dtype"
        )
    return found


def _by_format(spec: Any) -> DataType | None:
    try:
        return _BY_FORMAT.get(format(spec))
    except ValueError:
        return None


def _as_dtype(where: str, name: str, value: Any) -> np.dtype:
    dtype = None
    with contextlib.suppress(TypeError):  # of classes that are none of one dtype
        if isinstance(value, type) and issubclass(value, np.dtype):  # np.dtypes has many
            dtype = np.dtype(value.__call__())
        elif isinstance(value, np.dtype | type):
            dtype = np.dtype(value)
    # numpy takes classes that it does not know for object.
    if dtype is None or (dtype.kind == "O" and isinstance(value, type) and value is not object):
        raise TypeError(
            f"{where}: {name} has type {type(value).__name__}, expected a number of "
            "TensorProto.DataType, the name of a type, or a dtype"
        )
    return dtype


def of_dtype(dtype: np.dtype) -> DataType | None:
    """The type of arrays with this dtype of NumPy, ml_dtypes or JAX; strings and objects: text."""
    if dtype.kind in "USTO":
        return DataType.STRING
    return _BY_DTYPE.get(dtype if dtype.isnative else dtype.newbyteorder("="))


def type_of(where: str, name: str, x: Any) -> DataType:
    """The type of an array, a number of Python (64 bits) or a string.

    Raises:
      TypeError: It is none of these, of more bits, or of a dtype that ONNX lacks.
    """
    if hasattr(x, "dtype") and not casts.is_array(x):
        raise TypeError(f"{where}: {name} has type {type(x).__name__}, expected an array")
    return type_like(where, name, x)


def type_like(where: str, name: str, x: Any) -> DataType:
    """As `type_of`, also of what has a dtype and no elements."""
    dtype = getattr(x, "dtype", None)
    found = None
    if isinstance(dtype, np.dtype):
        found = of_dtype(dtype)
    elif isinstance(x, int) and not -(2**63) <= x < 2**63:
        if not 0 < x < 2**64:
            raise TypeError(f"{where}: {name} is an integer of more than 64 bits, expected fewer")
        found = DataType.UINT64
    elif isinstance(x, bool | int | float | str | bytes):
        found = _BY_CLASS[next(kind for kind in _BY_CLASS if isinstance(x, kind))]
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{where}: {name} is a masked array, expected one without a mask")
    if found is None:
        got = f"type {type(x).__name__}" if dtype is None else f"dtype {dtype}"
        raise TypeError(f"{where}: {name} has {got}, expected an array of a type of ONNX")
    return found


def check_type(
    where: str, name: str, found: DataType, types: Mapping[DataType, int], opset: int
) -> None:
    """TypeError where this version of the operator does not take the type."""
    if types.get(found, LATEST_OPSET + 1) > opset:
        since = f", which came with opset {types[found]}" if found in types else ""
        allowed = ", ".join(sorted(t.name for t, first in types.items() if first <= opset))
        raise TypeError(
            f"{where}: {name} is {found.name}{since}, with opset={opset}; expected {allowed}"
        )


def check_64_bits(where: str, found: DataType) -> None:
    """TypeError where JAX's 64-bit types are off and an array of that type needs them."""
    if found in WIDE and not jax.config.read("jax_enable_x64"):
        raise TypeError(
            f"{where}: {found.name} is needed, and 64-bit types are off in JAX; enable them "
            "with jax.config.update('jax_enable_x64', True), or ask for a narrower type"
        )


def is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)
