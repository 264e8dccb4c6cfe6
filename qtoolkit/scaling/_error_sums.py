"""Sums of the errors of a quantized array, added up part by part."""

import dataclasses
import math

import numpy as np

_RUN = 2**11  # elements whose squares are added in their own dtype
_SAFE = 55  # magnitudes up to 2**55 have squares that float32 can add


@dataclasses.dataclass
class ErrorSums:
    """Sums over the elements of an array x and its quantized version y, in float64.

    Attributes:
      signal, noise: Sums of x^2 and (x - y)^2 over the elements that are finite in both.
      nonfinite: How many elements are NaN or infinite in one of them.
      overflowed: How many finite elements became the largest number of a format without scales.
      max_scale: The largest number by which a code is multiplied; 0 if there is no scale.
      max_error: The largest |x - y|.
      size: How many elements were compared; nonzero: of these in x; flushed: of these not in y.
      saturated: How many were clamped to the range of the format.
      differing: How many are not the same number; NaN is the same as NaN.
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
        """Adds the sums of another part of the array."""
        for field in dataclasses.fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            is_largest = field.name.startswith("max_")
            setattr(self, field.name, max(mine, its) if is_largest else mine + its)

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise); infinite where exact, None where there is no signal."""
        signal, noise = self.signal, self.noise
        if not (signal > 0 and math.isfinite(signal) and math.isfinite(noise)):
            return None
        return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def error_sums(x: np.ndarray, y: np.ndarray, beyond: np.ndarray | None = None) -> ErrorSums:
    """The sums of two flat arrays, both float32 or both float64; `beyond`: where x was clamped."""
    # NumPy takes a tenth of the time of XLA's reductions here.
    size, saturated = x.size, 0 if beyond is None else int(np.count_nonzero(beyond))
    differing = int(np.count_nonzero(x != y))
    both_finite = np.isfinite(x) & np.isfinite(y)
    if not both_finite.all():
        differing -= int(np.count_nonzero(np.isnan(x) & np.isnan(y)))
        x, y = x[both_finite], y[both_finite]
    top = max(float(np.max(np.abs(a), initial=0)) for a in (x, y))
    if top and not 2.0**-_SAFE < top < 2.0**_SAFE:  # squares of float32 could leave its range
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
    """The sum of squares: runs in the dtype of `x`, their sums in float64."""
    return sum(float(np.dot(x[i : i + _RUN], x[i : i + _RUN])) for i in range(0, x.size, _RUN))
