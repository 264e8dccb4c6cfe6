"""The bit rules of pypto.cast in integers, as the page writes them; no code of the library.

Every number is an integer N of 2**-UNIT, Python's own and so of any size: the kept part M and
the discarded part D are its quotient and remainder by the step of the result, and the page says for
each mode when M gets a carry.
"""

import dataclasses

import ml_dtypes
import numpy as np

UNIT = 150  # no number that is cast, and no step, is finer
MODES = ("RINT", "ROUND", "FLOOR", "CEIL", "TRUNC", "ODD")
DTYPES = {
    "DT_FP32": np.dtype(np.float32),
    "DT_FP16": np.dtype(np.float16),
    "DT_BF16": np.dtype(ml_dtypes.bfloat16),
    **{f"DT_{u.upper()}INT{n}": np.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)},
}
# Mantissa bits, lowest exponent of a normal number, highest exponent.
FLOATS = {"DT_FP32": (23, -126, 127), "DT_FP16": (10, -14, 15), "DT_BF16": (7, -126, 127)}


@dataclasses.dataclass(frozen=True)
class Source:
    """Magnitudes in units, as Python's integers; signs; and what is no finite number."""

    magnitude: list[int]
    negative: np.ndarray
    is_inf: np.ndarray
    is_nan: np.ndarray


def source(x: np.ndarray) -> Source:
    if x.dtype.kind in "iu":
        numbers = [int(v) for v in x]
        nothing = np.zeros(x.shape, bool)
        return Source([abs(n) << UNIT for n in numbers], x < 0, nothing, nothing)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        wide = x.astype(np.float32).astype(np.float64)
    is_nan, is_inf = np.isnan(wide), np.isinf(wide)
    finite = np.where(is_nan | is_inf, 0, np.abs(wide))
    ratios = (float(v).as_integer_ratio() for v in finite)
    return Source([n * ((1 << UNIT) // d) for n, d in ratios], np.signbit(x), is_inf, is_nan)


def carries(mode: str, negative: bool, odd: bool, first: bool, others: bool) -> bool:
    """The page's rule: `first` is the first discarded bit, `others` whether any after it is set."""
    if mode == "RINT":
        return first and (others or odd)
    if mode == "FLOOR":
        return negative and (first or others)
    if mode == "CEIL":
        return not negative and (first or others)
    if mode == "ROUND":
        return first
    if mode == "TRUNC":
        return False
    assert mode == "ODD"
    return (first or others) and not odd


def step_of(magnitude: int, target: str) -> int:
    """The exponent of the result's step, in units."""
    if target not in FLOATS:
        return UNIT
    mantissa, lowest, _ = FLOATS[target]
    return max(magnitude.bit_length() - 1, lowest + UNIT) - mantissa


def rounded(x: Source, target: str, mode: str) -> list[int]:
    """Magnitudes in units, rounded as if there were no largest one."""
    result = []
    for magnitude, negative in zip(x.magnitude, x.negative.tolist(), strict=True):
        step = step_of(magnitude, target)
        kept, half = magnitude >> step, 1 << (step - 1)
        discarded = magnitude - (kept << step)
        first = discarded >= half
        others = discarded not in (0, half)
        carry = discarded and carries(mode, negative, kept & 1 == 1, first, others)
        result.append((kept + bool(carry)) << step)
    return result


def cast(x: np.ndarray, target: str, mode: str, saturates: bool = True) -> np.ndarray:
    """`x` rounded by `mode`, one of MODES, to the dtype of `target`."""
    numbers = source(x)
    magnitudes = rounded(numbers, target, mode)
    finish = _float if target in FLOATS else _integer
    return finish(numbers, magnitudes, target, mode, saturates)


def _integer(x: Source, magnitudes: list[int], target: str, _: str, saturates: bool) -> np.ndarray:
    info = np.iinfo(DTYPES[target])
    result = []
    columns = (magnitudes, x.negative.tolist(), x.is_inf.tolist(), x.is_nan.tolist())
    for magnitude, negative, is_inf, is_nan in zip(*columns, strict=True):
        value = magnitude >> UNIT
        value = -value if negative else value
        if is_inf:
            value = info.min if negative else info.max
        elif saturates:
            value = min(max(value, info.min), info.max)
        low = value % 2**info.bits
        value = low - 2**info.bits if low > info.max else low
        result.append(0 if is_nan else value)
    return np.array(result, DTYPES[target])


def _float(x: Source, magnitudes: list[int], target: str, mode: str, _: bool) -> np.ndarray:
    """IEEE 754: past the largest number, directed modes that go back do not overflow."""
    mantissa, lowest, highest = FLOATS[target]
    largest = ((2 << mantissa) - 1) << (highest - mantissa + UNIT)
    back = {
        "RINT": x.negative & False,
        "ROUND": x.negative & False,
        "FLOOR": ~x.negative,
        "CEIL": x.negative,
        "TRUNC": x.negative | True,
        "ODD": x.negative | True,  # the largest number is odd
    }[mode]
    values = []
    for magnitude, stays in zip(magnitudes, back.tolist(), strict=True):
        if magnitude > largest:
            values.append(largest / (1 << UNIT) if stays else np.inf)
        else:
            values.append((magnitude >> (lowest - mantissa + UNIT)) * 2.0 ** (lowest - mantissa))
    values = np.where(x.is_inf, np.inf, np.where(x.is_nan, np.nan, np.array(values)))
    values = np.where(x.negative, -values, values)
    with np.errstate(over="raise", under="ignore"):
        narrow = values.astype(np.float32).astype(DTYPES[target])
    exact = narrow.astype(np.float64)
    assert np.array_equal(exact, values, equal_nan=True)
    return narrow
