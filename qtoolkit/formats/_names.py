"""The formats that ship, and how any of their spellings is resolved."""

import difflib
from typing import Any

import numpy as np

from qtoolkit.formats._float import FloatFormat, Overflow, Specials
from qtoolkit.formats._int import IntFormat

Format = FloatFormat | IntFormat

# Parameters: arXiv:2209.05433, section "FP8 Binary Interchange Format"; OCP 8-bit Floating Point
# Specification (OFP8) 1.0.
E4M3FN = FloatFormat(
    name="e4m3fn",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    specials=Specials.FN,
    overflow=Overflow.NAN,
    dtype_name="float8_e4m3fn",
    spellings=("FLOAT8E4M3FN", "f8e4m3", "f8e4m3fn", "F8_E4M3"),
)
E5M2 = FloatFormat(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    specials=Specials.IEEE,
    overflow=Overflow.INF,
    dtype_name="float8_e5m2",
    spellings=("FLOAT8E5M2", "f8e5m2", "F8_E5M2"),
)
# Parameters: arXiv:2206.02915 (Graphcore, AMD and Qualcomm), named as in LLVM and ONNX.
E4M3FNUZ = FloatFormat(
    name="e4m3fnuz",
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    specials=Specials.FNUZ,
    overflow=Overflow.NAN,
    dtype_name="float8_e4m3fnuz",
    spellings=("FLOAT8E4M3FNUZ", "f8e4m3fnuz", "F8_E4M3FNUZ"),
)
E5M2FNUZ = FloatFormat(
    name="e5m2fnuz",
    exponent_bits=5,
    mantissa_bits=2,
    bias=16,
    specials=Specials.FNUZ,
    overflow=Overflow.NAN,
    dtype_name="float8_e5m2fnuz",
    spellings=("FLOAT8E5M2FNUZ", "f8e5m2fnuz", "F8_E5M2FNUZ"),
)
BFLOAT16 = FloatFormat(
    name="bfloat16",
    exponent_bits=8,
    mantissa_bits=7,
    bias=127,
    specials=Specials.IEEE,
    overflow=Overflow.INF,
    dtype_name="bfloat16",
    spellings=("BF16",),
)
# IEEE 754-2019 binary16.
FLOAT16 = FloatFormat(
    name="float16",
    exponent_bits=5,
    mantissa_bits=10,
    bias=15,
    specials=Specials.IEEE,
    overflow=Overflow.INF,
    dtype_name="float16",
    spellings=("F16", "binary16"),
)
INT8 = IntFormat(name="int8", bits=8, dtype_name="int8", spellings=("I8",))

FORMATS: tuple[Format, ...] = (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, BFLOAT16, FLOAT16, INT8)

_BY_SPELLING = {
    spelling.lower(): fmt
    for fmt in FORMATS
    for spelling in (fmt.name, fmt.dtype_name, *fmt.spellings)
    if spelling is not None
}


def format(spec: Any) -> Format:
    """The format that `spec` names.

    Args:
      spec: A format (returned as it is); a string in any of the spellings of qtoolkit ("e4m3fn"),
        numpy and JAX ("float8_e4m3fn"), ONNX ("FLOAT8E4M3FN"), OpenVINO ("f8e4m3") or safetensors
        ("F8_E4M3"), upper or lower case; or a numpy, ml_dtypes or JAX dtype.

    Raises:
      ValueError: No shipped format has that name; the message lists the closest ones.
      TypeError: `spec` is neither a format nor a string nor a dtype.
    """
    if isinstance(spec, FloatFormat | IntFormat):
        return spec
    name = spec if isinstance(spec, str) else _dtype_name(spec)
    found = _BY_SPELLING.get(name.lower())
    if found is None:
        close = difflib.get_close_matches(name.lower(), _BY_SPELLING, n=8, cutoff=0.5)
        nearest = list(dict.fromkeys(_BY_SPELLING[spelling].name for spelling in close))[:3]
        hint = f"did you mean {' or '.join(map(repr, nearest))}? " if nearest else ""
        raise ValueError(
            f"format: unknown format {name!r}; {hint}known: {', '.join(f.name for f in FORMATS)}"
        )
    return found


def _dtype_name(spec: Any) -> str:
    try:
        if spec is None:  # numpy reads None as float64
            raise TypeError
        return np.dtype(spec).name
    except (TypeError, ValueError):
        raise TypeError(
            f"format: got {spec!r} of type {type(spec).__name__}, expected a format, its name as a "
            "string, or a dtype, e.g. 'e4m3fn' or jnp.float8_e4m3fn"
        ) from None
