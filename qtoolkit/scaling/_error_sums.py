"""Sums from which the quantization error of an array is computed, for one part after another."""

import dataclasses
import math

import numpy as np

# How many squares are added in the dtype of the array, before the sum is added in float64.
_CHUNK = 2**11
# If magnitudes are at most 2**55, errors are at most 2**56. A sum of 2**11 squares is then at most
# 2**(2 * 56 + 11) = 2**123, and fits float32.
_SAFE_EXPONENT = 55


@dataclasses.dataclass
class ErrorSums:
    """Sums, counts and maxima over the elements of an array x and its dequantized version y.

    "Finite elements" are those that are finite in x and in y.

    Attributes:
      signal: The sum of x^2 over the finite elements.
      noise: The sum of (x - y)^2 over the finite elements.
      nonfinite: The number of elements that are NaN or infinite in x or in y.
      overflowed: The number of finite elements that a cast without scales clamped.
      max_scale: The largest scale; 0 without scales.
      max_error: The largest |x - y| of the finite elements.
      size: The number of elements.
      nonzero: The number of finite elements that are not 0 in x.
      flushed: The number of finite elements that are 0 in y but not in x.
      saturated: The number of elements that were clamped to the range of the format.
      differing: The number of elements with x != y; two NaNs count as equal.
    """

    signal: float = 0.0
    noise: float = 0.0
    nonfinite: int = 0
    overflowed: int = 0
    max_scale: float = 0.0
    max_error: float = 0.0
    size: int = 0
    nonzero: int = 0
    flushed: int = 0
    saturated: int = 0
    differing: int = 0

    def add(self, other: "ErrorSums") -> None:
        """Add the sums of another part of the array."""
        for field in dataclasses.fields(self):
            a, b = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, max(a, b) if field.name.startswith("max_") else a + b)

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise); infinite if noise is 0, None if signal is 0 or not finite."""
        signal, noise = self.signal, self.noise
        if not (signal > 0 and math.isfinite(signal) and math.isfinite(noise)):
            return None
        return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def error_sums(x: np.ndarray, y: np.ndarray, clamped: np.ndarray | None = None) -> ErrorSums:
    """Sums over two flat arrays of float32, or of float64; `clamped` says which x were clamped."""
    size, saturated = x.size, 0 if clamped is None else int(np.count_nonzero(clamped))
    differing = int(np.count_nonzero(x != y))
    both_finite = np.isfinite(x) & np.isfinite(y)
    if not both_finite.all():
        differing -= int(np.count_nonzero(np.isnan(x) & np.isnan(y)))
        x, y = x[both_finite], y[both_finite]
    largest = max(float(np.max(np.abs(a), initial=0)) for a in (x, y))
    if largest and not 2.0**-_SAFE_EXPONENT < largest < 2.0**_SAFE_EXPONENT:
        x, y = x.astype(np.float64), y.astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        error = x - y
        signal, noise = _squares(x), _squares(error)
    return ErrorSums(
        signal=signal,
        noise=noise,
        nonfinite=size - x.size,
        max_error=float(np.max(np.abs(error), initial=0)),
        size=size,
        nonzero=int(np.count_nonzero(x)),
        flushed=int(np.count_nonzero((y == 0) & (x != 0))),
        saturated=saturated,
        differing=differing,
    )


def _squares(x: np.ndarray) -> float:
    """The sum of squares: chunks in the dtype of `x`, the sum of chunks in float64."""
    chunks = (x[start : start + _CHUNK] for start in range(0, x.size, _CHUNK))
    return sum(float(np.dot(chunk, chunk)) for chunk in chunks)
