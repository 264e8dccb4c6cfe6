"""The formats that ship, and which of them a spelling is."""

import re
from typing import Any, Protocol, TypeAlias

import numpy as np

from qtoolkit.formats._element import BY_SPELLING
from qtoolkit.formats._float import FloatFormat, Overflow, Specials
from qtoolkit.formats._int import IntFormat
from qtoolkit.formats._p3109 import from_name
from qtoolkit.formats._posit import POSIT8, posit_from_name
from qtoolkit.formats._table import HIFLOAT8, NF4, TableFormat


class _HasDtype(Protocol):
    """What NumPy and JAX read as a dtype because it has one: jnp.float32, say."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


Format: TypeAlias = FloatFormat | IntFormat | TableFormat
# What `format` resolves: a format, its name in any spelling, or a dtype such as jnp.float8_e4m3fn.
FormatLike: TypeAlias = Format | str | np.dtype[Any] | type[Any] | _HasDtype

# What overflow becomes in the float formats that ship, by their specials.
_OVERFLOW = {
    Specials.IEEE: Overflow.INF,
    Specials.FN: Overflow.NAN,
    Specials.FNUZ: Overflow.NAN,
    Specials.NONE: Overflow.MAX,
}


def _float(
    name: str, exponent_bits: int, mantissa_bits: int, bias: int, specials: Specials, **fields: Any
) -> FloatFormat:
    return FloatFormat(
        name=name,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        bias=bias,
        specials=specials,
        overflow=_OVERFLOW[specials],
        **fields,
    )


# IEEE 754-2019: binary64, binary32, binary16. bfloat16 and NVIDIA's tf32 are cut from binary32.
FLOAT64 = _float(
    *("float64", 11, 52, 1023, Specials.IEEE),
    dtype_name="float64",
    spellings=("DOUBLE", "F64", "fp64", "binary64", "DT_DOUBLE"),
)
FLOAT32 = _float(
    *("float32", 8, 23, 127, Specials.IEEE),
    dtype_name="float32",
    spellings=("FLOAT", "F32", "fp32", "binary32", "DT_FP32"),
)
TF32 = _float("tf32", 8, 10, 127, Specials.IEEE, spellings=("TensorFloat32",))
FLOAT16 = _float(
    *("float16", 5, 10, 15, Specials.IEEE),
    dtype_name="float16",
    spellings=("F16", "fp16", "half", "binary16", "DT_FP16"),
)
BFLOAT16 = _float(
    *("bfloat16", 8, 7, 127, Specials.IEEE),
    dtype_name="bfloat16",
    spellings=("BF16", "DT_BF16"),
)
# arXiv:2209.05433, section "FP8 Binary Interchange Format"; OCP 8-bit Floating Point Specification
# (OFP8) 1.0.
E5M2 = _float(
    *("e5m2", 5, 2, 15, Specials.IEEE),
    dtype_name="float8_e5m2",
    spellings=("FLOAT8E5M2", "f8e5m2", "F8_E5M2", "DT_FP8E5M2"),
)
E4M3FN = _float(
    *("e4m3fn", 4, 3, 7, Specials.FN),
    dtype_name="float8_e4m3fn",
    spellings=(
        *("FLOAT8E4M3FN", "f8e4m3", "f8e4m3fn", "F8_E4M3"),
        *("DT_FP8E4M3", "DT_FP8E4M3FN"),
    ),
)
# arXiv:2206.02915 (Graphcore, AMD and Qualcomm), named as in LLVM and ONNX.
E5M2FNUZ = _float(
    *("e5m2fnuz", 5, 2, 16, Specials.FNUZ),
    dtype_name="float8_e5m2fnuz",
    spellings=("FLOAT8E5M2FNUZ", "f8e5m2fnuz", "F8_E5M2FNUZ"),
)
E4M3FNUZ = _float(
    *("e4m3fnuz", 4, 3, 8, Specials.FNUZ),
    dtype_name="float8_e4m3fnuz",
    spellings=("FLOAT8E4M3FNUZ", "f8e4m3fnuz", "F8_E4M3FNUZ"),
)
# Google's TPUs, named as in LLVM.
E4M3B11FNUZ = _float(
    *("e4m3b11fnuz", 4, 3, 11, Specials.FNUZ),
    dtype_name="float8_e4m3b11fnuz",
    spellings=("f8e4m3b11fnuz", "float8_e4m3b11"),
)
# IEEE 754's rules at 8 bits. LLVM and ml_dtypes call the first one E4M3, but ONNX, OpenVINO and
# safetensors mean E4M3FN by that: the bare name is ambiguous, see `_format`.
E4M3_IEEE = _float("e4m3_ieee", 4, 3, 7, Specials.IEEE, dtype_name="float8_e4m3")
E3M4 = _float("e3m4", 3, 4, 3, Specials.IEEE, dtype_name="float8_e3m4", spellings=("f8e3m4",))
# Scales: of NVFP4, E4M3FN without its sign; of OCP Microscaling Formats (MX) 1.0, powers of two.
UE4M3 = _float("ue4m3", 4, 3, 7, Specials.FN, signed=False)
E8M0FNU = _float(
    *("e8m0fnu", 8, 0, 127, Specials.FN),
    signed=False,
    has_zero=False,
    dtype_name="float8_e8m0fnu",
    spellings=("FLOAT8E8M0", "e8m0", "ue8m0", "f8e8m0", "F8_E8M0", "DT_FP8E8M0"),
)
# Elements of OCP MX 1.0.
E2M3FN = _float(
    *("e2m3fn", 2, 3, 1, Specials.NONE),
    spellings=("e2m3", "float6_e2m3fn", "F6_E2M3"),
)
E3M2FN = _float(
    *("e3m2fn", 3, 2, 3, Specials.NONE),
    spellings=("e3m2", "float6_e3m2fn", "F6_E3M2"),
)
E2M1FN = _float(
    *("e2m1fn", 2, 1, 1, Specials.NONE),
    dtype_name="float4_e2m1fn",
    spellings=(
        *("e2m1", "FLOAT4E2M1", "f4e2m1", "F4"),
        *("DT_FP4_E2M1", "DT_FP4_E2M1X2", "DT_FP4E2M1"),
    ),
)
# Huawei Ascend's other FP4: quarters from 0 to 1.75.
E1M2FN = _float(
    *("e1m2fn", 1, 2, 1, Specials.NONE),
    spellings=("e1m2", "DT_FP4_E1M2", "DT_FP4_E1M2X2", "DT_FP4E1M2"),
)
BOOL = IntFormat(
    name="bool",
    bits=1,
    signed=False,
    is_bool=True,
    dtype_name="bool",
    spellings=("boolean", "DT_BOOL"),
)


def _integer(bits: int, signed: bool) -> IntFormat:
    """The integer of that width, with the dtype that numpy or ml_dtypes have for it."""
    name, letter = (f"int{bits}", "I") if signed else (f"uint{bits}", "U")
    own = bits in (2, 4, 8, 16, 32, 64)
    return IntFormat(
        name=name,
        bits=bits,
        signed=signed,
        dtype_name=name if own else None,
        spellings=(f"{letter}{bits}", f"DT_{name.upper()}") if own else (f"{letter}{bits}",),
    )


INT2, INT4, INT8, INT16, INT32, INT64 = (_integer(1 << n, True) for n in range(1, 7))
UINT2, UINT4, UINT8, UINT16, UINT32, UINT64 = (_integer(1 << n, False) for n in range(1, 7))

FORMATS: tuple[Format, ...] = (
    *(FLOAT64, FLOAT32, TF32, FLOAT16, BFLOAT16),
    *(E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E4M3B11FNUZ, E4M3_IEEE, E3M4, UE4M3, E8M0FNU),
    *(E2M3FN, E3M2FN, E2M1FN, E1M2FN),
    *(HIFLOAT8, POSIT8, NF4),
    *(INT64, INT32, INT16, INT8, INT4, INT2),
    *(UINT64, UINT32, UINT16, UINT8, UINT4, UINT2, BOOL),
)

BY_SPELLING.update(
    (spelling.lower(), fmt)
    for fmt in FORMATS
    for spelling in (fmt.name, fmt.dtype_name, *fmt.spellings)
    if spelling is not None
)
_INTEGER = re.compile(r"(int|uint|i|u)([1-9]\d?)", re.IGNORECASE)  # of any width
_BY_DTYPE = {fmt.dtype: fmt for fmt in FORMATS if fmt.dtype is not None}


def find(spec: Any) -> Format | None:
    """The format that `spec` names, or None. ValueError as from `p3109` and `posit`."""
    if isinstance(spec, FloatFormat | IntFormat | TableFormat):
        return spec
    if isinstance(spec, np.dtype) and spec in _BY_DTYPE:  # every cast asks this: no name is made
        return _BY_DTYPE[spec]
    name = name_of(spec)
    if name is None:
        return None
    name = name.removeprefix("torch.")  # `str` of a dtype of PyTorch
    if name.lower() in BY_SPELLING:
        return BY_SPELLING[name.lower()]
    integer = _INTEGER.fullmatch(name)
    if integer and int(integer[2]) <= 64:
        return _integer(int(integer[2]), integer[1].lower() in ("int", "i"))
    return posit_from_name(name) or from_name(name)


def name_of(spec: Any) -> str | None:
    """`spec` itself if it is a string, the name of a dtype, None for anything else."""
    if isinstance(spec, str):
        return spec
    # NumPy reads None as float64, lists as fields, and arrays and numbers as their dtype.
    is_value = hasattr(spec, "__array__") and not isinstance(spec, type)
    if spec is None or is_value or isinstance(spec, list | tuple | dict):
        return None
    try:
        return np.dtype(spec).name
    except (TypeError, ValueError):
        return None
