"""PyPTO's own words: its data types, rounding modes and saturation modes."""

import enum

from qtoolkit.formats import (
    BFLOAT16,
    BOOL,
    E1M2FN,
    E2M1FN,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    HIFLOAT8,
    INT4,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    UINT64,
    Format,
)

DT_FP32, DT_FP16, DT_BF16, DT_DOUBLE = FLOAT32, FLOAT16, BFLOAT16, FLOAT64
DT_INT4, DT_INT8, DT_INT16, DT_INT32, DT_INT64 = INT4, INT8, INT16, INT32, INT64
DT_UINT8, DT_UINT16, DT_UINT32, DT_UINT64, DT_BOOL = UINT8, UINT16, UINT32, UINT64, BOOL
DT_FP8E4M3, DT_FP8E5M2, DT_FP8E8M0, DT_HF8 = E4M3FN, E5M2, E8M0FNU, HIFLOAT8
DT_FP4_E2M1X2, DT_FP4_E1M2X2 = E2M1FN, E1M2FN

NAMES: dict[Format, str] = {
    DT_FP32: "DT_FP32",
    DT_FP16: "DT_FP16",
    DT_BF16: "DT_BF16",
    DT_DOUBLE: "DT_DOUBLE",
    DT_INT4: "DT_INT4",
    DT_INT8: "DT_INT8",
    DT_INT16: "DT_INT16",
    DT_INT32: "DT_INT32",
    DT_INT64: "DT_INT64",
    DT_UINT8: "DT_UINT8",
    DT_UINT16: "DT_UINT16",
    DT_UINT32: "DT_UINT32",
    DT_UINT64: "DT_UINT64",
    DT_BOOL: "DT_BOOL",
    DT_FP8E4M3: "DT_FP8E4M3",
    DT_FP8E5M2: "DT_FP8E5M2",
    DT_FP8E8M0: "DT_FP8E8M0",
    DT_HF8: "DT_HF8",
    DT_FP4_E2M1X2: "DT_FP4_E2M1X2",
    DT_FP4_E1M2X2: "DT_FP4_E1M2X2",
}


class CastMode(enum.Enum):
    """How `cast` rounds. The numbers are PyPTO's; Ascend C has others for three of the modes."""

    CAST_NONE = 0  # the default of the pair: float to integer CAST_TRUNC, all others CAST_RINT
    CAST_RINT = 1  # to nearest, ties to even
    CAST_ROUND = 2  # to nearest, ties away from zero
    CAST_FLOOR = 3  # toward -inf
    CAST_CEIL = 4  # toward +inf
    CAST_TRUNC = 5  # toward zero
    CAST_ODD = 6  # Von Neumann: what is inexact gets an odd last bit


class SaturationMode(enum.Enum):
    """What `cast` does beyond the range of an integer type. ON is 0 in PyPTO."""

    ON = 0  # clamps
    OFF = 1  # keeps the low bits
