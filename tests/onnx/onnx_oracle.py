"""ONNX's rules for Cast, typed in from the published pages, on float64 numbers.

Within the range of a type, `ml_dtypes` and `numpy` round to nearest even; every number here is one
that float32 holds, so that they round once. What lies beyond follows the tables below.
"""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

# Version 28: the dtype that ml_dtypes or numpy have for each type.
DTYPES = {
    "FLOAT": np.float32,
    "UINT8": np.uint8,
    "INT8": np.int8,
    "UINT16": np.uint16,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "FLOAT16": np.float16,
    "DOUBLE": np.float64,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "BFLOAT16": ml_dtypes.bfloat16,
    "FLOAT8E4M3FN": ml_dtypes.float8_e4m3fn,
    "FLOAT8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "FLOAT8E5M2": ml_dtypes.float8_e5m2,
    "FLOAT8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "UINT4": ml_dtypes.uint4,
    "INT4": ml_dtypes.int4,
    "FLOAT4E2M1": ml_dtypes.float4_e2m1fn,
    "FLOAT8E8M0": ml_dtypes.float8_e8m0fnu,
    "UINT2": ml_dtypes.uint2,
    "INT2": ml_dtypes.int2,
    "FLOAT6E2M3": ml_dtypes.float6_e2m3fn,
    "FLOAT6E3M2": ml_dtypes.float6_e3m2fn,
}
DTYPES = {name: np.dtype(dtype) for name, dtype in DTYPES.items()}
# FLT_MAX; the least number whose [x] is larger, and whether that is one itself (the tie goes up).
FLOAT8 = {
    "FLOAT8E4M3FN": (448.0, 464.0, False),
    "FLOAT8E4M3FNUZ": (240.0, 248.0, True),
    "FLOAT8E5M2": (57344.0, 61440.0, True),
    "FLOAT8E5M2FNUZ": (57344.0, 61440.0, True),
}
# Codes of +-FLT_MAX, +-NaN, and, with saturate = 0, of +-Inf and +-[x] > FLT_MAX.
CODES = {
    "FLOAT8E4M3FN": ((0x7E, 0xFE), (0x7F, 0xFF), (0x7F, 0xFF)),
    "FLOAT8E4M3FNUZ": ((0x7F, 0xFF), (0x80, 0x80), (0x80, 0x80)),
    "FLOAT8E5M2": ((0x7B, 0xFB), (0x7E, 0xFE), (0x7C, 0xFC)),
    "FLOAT8E5M2FNUZ": ((0x7F, 0xFF), (0x80, 0x80), (0x80, 0x80)),
}
INTEGERS = {
    f"{sign}INT{bits}": (-(2 ** (bits - 1)) if not sign else 0, bits)
    for sign in ("", "U")
    for bits in (2, 4, 8, 16, 32, 64)
}
MAX_CODES = {"FLOAT4E2M1": 7, "FLOAT6E2M3": 0x1F, "FLOAT6E3M2": 0x1F}
BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {
    "FLOAT4E2M1": 4,
    "FLOAT6E2M3": 6,
    "FLOAT6E3M2": 6,
}


# Significand bits with the leading one, exponent of the least normal number, largest number.
FIELDS = {
    "DOUBLE": (53, -1022, Fraction(2) ** 1024 - Fraction(2) ** 971),
    "FLOAT": (24, -126, Fraction(2) ** 128 - Fraction(2) ** 104),
    "FLOAT16": (11, -14, Fraction(65504)),
    "BFLOAT16": (8, -126, Fraction(2) ** 128 - Fraction(2) ** 120),
    "FLOAT8E4M3FN": (4, -6, Fraction(448)),
    "FLOAT8E4M3FNUZ": (4, -7, Fraction(240)),
    "FLOAT8E5M2": (3, -14, Fraction(57344)),
    "FLOAT8E5M2FNUZ": (3, -15, Fraction(57344)),
}


def nearest(x: Fraction, name: str) -> Fraction | float:
    """`x` rounded once, ties to even; infinite, or with float8 the largest number, beyond."""
    bits, least, largest = FIELDS[name]
    if x == 0:
        return Fraction(0)
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent = max(exponent - (size < Fraction(2) ** exponent), least)
    step = Fraction(2) ** (exponent - bits + 1)
    size = round(size / step) * step  # Fractions round half to even
    if size > largest:
        size = largest if name in FLOAT8 else math.inf
    return size if x > 0 else -size


def wide(x) -> np.ndarray:
    """float64, with the signs of NaNs; those of types with one NaN are positive."""
    with np.errstate(invalid="ignore"):
        result = np.asarray(x).astype(np.float32).astype(np.float64)
    one_nan = x.dtype.name.endswith("fnuz")
    return np.where(np.isnan(result), np.nan, result) if one_nan else result


def codes(x, name) -> np.ndarray:
    """The bits of an array of that type; of integers and bool the numbers, in 64 bits."""
    x = np.asarray(x)
    assert x.dtype == DTYPES[name], (x.dtype, name)
    if name in INTEGERS or name == "BOOL":
        return x.astype(np.uint64 if name == "UINT64" else np.int64)
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    return bits & bits.dtype.type(2 ** BITS[name] - 1)


def expected(
    x: np.ndarray, name: str, *, integers=False, saturate=True, round_mode="up", opset=28
) -> np.ndarray:
    """`codes` of Cast's result; `integers`: the source is an integer type."""
    is_nan, negative = np.isnan(x), np.signbit(x)
    if name == "BOOL":
        return (x != 0).astype(np.int64)
    if name in INTEGERS:
        return _integers(x, *INTEGERS[name], integers)
    if name == "FLOAT8E8M0":
        return _e8m0(x, saturate, round_mode)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = codes(x.astype(np.float32).astype(DTYPES[name]), name)
    if name in MAX_CODES:
        return np.where(is_nan, np.uint8(MAX_CODES[name]), rounded)
    if name not in FLOAT8:
        quiet = codes(np.array([np.nan, -np.nan], np.float64).astype(DTYPES[name]), name)
        return np.where(is_nan, np.where(negative, quiet.max(), quiet.min()), rounded)
    largest, threshold, tie_too = FLOAT8[name]
    inf = np.isinf(x)
    over = (np.abs(x) >= threshold if tie_too else np.abs(x) > threshold) & ~inf
    below = np.abs(x) <= largest
    most, nan, beyond = (np.where(negative, minus, plus) for plus, minus in CODES[name])
    of_inf = nan if opset < 24 and name.endswith("FNUZ") else most
    result = np.where(below, rounded, most)  # between FLT_MAX and the threshold: FLT_MAX
    result = np.where(over, most if saturate else beyond, result)
    result = np.where(inf, of_inf if saturate else beyond, result)
    return np.where(is_nan, nan, result).astype(np.uint8)


def _integers(x: np.ndarray, lowest: int, bits: int, from_integers: bool) -> np.ndarray:
    highest = lowest + 2**bits - 1
    wraps = from_integers or bits <= 4

    def one(value: float) -> int:
        if np.isnan(value):
            return 0
        if np.isinf(value):
            return highest if value > 0 else lowest
        if wraps:
            return (round(value) - lowest) % 2**bits + lowest  # Python's round: half to even
        return min(max(int(value), lowest), highest)

    return np.array([one(v) for v in x.tolist()], np.uint64 if highest >= 2**63 else np.int64)


def _e8m0(x: np.ndarray, saturate: bool, round_mode: str) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(np.where(np.isfinite(x) & (x > 0), x, 1.0))
    goes_up = {"up": mantissa > 0.5, "down": mantissa > 1, "nearest": mantissa >= 0.75}[round_mode]
    code = np.clip(exponent - 1 + goes_up, -127, 127) + 127
    low, high = ~(x >= 2.0**-127) & ~np.isnan(x), x > 2.0**127
    code = np.where(low, 0 if saturate else 255, code)
    code = np.where(high, 254 if saturate else 255, code)
    return np.where(np.isnan(x), 255, code).astype(np.uint8)
