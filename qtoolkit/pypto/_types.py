"""PyPTO's data types: which format each of its names is."""

from qtoolkit import formats as _formats

DT_FP32 = _formats.FLOAT32
DT_FP16 = _formats.FLOAT16
DT_BF16 = _formats.BFLOAT16
DT_DOUBLE = _formats.FLOAT64
DT_INT4 = _formats.INT4
DT_INT8 = _formats.INT8
DT_INT16 = _formats.INT16
DT_INT32 = _formats.INT32
DT_INT64 = _formats.INT64
DT_UINT8 = _formats.UINT8
DT_UINT16 = _formats.UINT16
DT_UINT32 = _formats.UINT32
DT_UINT64 = _formats.UINT64
DT_BOOL = _formats.BOOL
DT_FP8E4M3 = _formats.E4M3FN
DT_FP8E5M2 = _formats.E5M2
DT_FP8E8M0 = _formats.E8M0FNU
DT_HF8 = _formats.HIFLOAT8
DT_FP4_E2M1X2 = _formats.E2M1FN
DT_FP4_E1M2X2 = _formats.E1M2FN
