"""Sums that say how far an array is from what became of it, added up part by part."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import is_zero, ordinal

_ROW = 128  # elements whose squares are added in float32
_ROWS = (2**5, 2**9, 2**13)  # rows of an array that is compared at once: programs for few shapes
_SAFE = 60  # magnitudes up to 2**60, and arrays whose largest is above 2**-60, need no factor


@dataclasses.dataclass
class ErrorSums:
    """Sums over the elements of an array x and of y, what became of it, in float64.

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
    """The sums of two arrays of one shape, both float32 or both float64.

    Args:
      beyond: Where x counts as clamped; None: nowhere.
    """
    if x.dtype == np.float64:
        return _float64_sums(x, y, beyond)
    total = ErrorSums()
    step = _ROWS[-1] * _ROW
    for start in range(0, x.size, step):
        some = slice(start, start + step)
        total.add(_part_sums(x[some], y[some], None if beyond is None else beyond[some]))
    return total


def _part_sums(x: np.ndarray, y: np.ndarray, beyond: np.ndarray | None) -> ErrorSums:
    rows = next(n for n in _ROWS if n * _ROW >= x.size)
    size = x.size
    padded = [_padded(a, rows) for a in (x, y, np.zeros(size, bool) if beyond is None else beyond)]
    squares, counts, largest = map(np.asarray, _sums(*padded))
    factor = _factor(float(largest[0]) or max(_largest(x), _largest(y)))
    if factor != 1:  # sums of subnormal numbers would be 0, and squares may overflow
        padded[:2] = [a * np.float32(factor) for a in padded[:2]]
        squares, _, largest = map(np.asarray, _sums(*padded))
    signal, noise = (squares.astype(np.float64).sum(axis=1) / factor**2).tolist()
    nonfinite, nonzero, flushed, saturated, differing = counts.tolist()
    return ErrorSums(
        signal=signal,
        noise=noise,
        nonfinite=nonfinite,
        max_error=float(largest[1]) / factor,
        size=size,
        nonzero=nonzero,
        flushed=flushed,
        saturated=saturated,
        differing=differing,
    )


def _largest(a: np.ndarray) -> float:
    """The largest finite magnitude, which may be subnormal."""
    return float(np.max(np.abs(a), initial=0, where=np.isfinite(a)))


def _padded(a: np.ndarray, rows: int) -> np.ndarray:
    if a.size == rows * _ROW:
        return a.reshape(rows, _ROW)
    padded = np.zeros(rows * _ROW, a.dtype)
    padded[: a.size] = a
    return padded.reshape(rows, _ROW)


def _factor(largest: float) -> float:
    """A power of two that moves the largest magnitude between 2**-60 and 2**60."""
    if largest == 0 or 2.0**-_SAFE < largest <= 2.0**_SAFE:
        return 1.0
    return 2.0 ** -min(max(math.frexp(largest)[1], -126), 126)


@jax.jit
def _sums(x: jax.Array, y: jax.Array, beyond: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    known = jnp.isfinite(x) & jnp.isfinite(y)
    zero = np.float32(0)
    a, b = jnp.where(known, x, zero), jnp.where(known, y, zero)
    error = a - b
    squares = jnp.stack([jnp.sum(a * a, axis=1), jnp.sum(error * error, axis=1)])
    # As integers: XLA's CPU takes subnormal numbers for 0 where it compares them.
    same = (ordinal(x) == ordinal(y)) | (jnp.isnan(x) & jnp.isnan(y))
    alive = ~is_zero(a)
    counted = (~known, alive, alive & is_zero(b), beyond, ~same)
    counts = jnp.stack([jnp.sum(mask.astype(jnp.int32)) for mask in counted])
    largest = jnp.stack(
        [jnp.maximum(jnp.max(jnp.abs(a)), jnp.max(jnp.abs(b))), jnp.max(jnp.abs(error))]
    )
    return squares, counts, largest


def _float64_sums(x: np.ndarray, y: np.ndarray, beyond: np.ndarray | None) -> ErrorSums:
    known = np.isfinite(x) & np.isfinite(y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    a, b = x[known], y[known]
    with np.errstate(over="ignore", invalid="ignore"):
        error = a - b
        signal, noise = float(a @ a), float(error @ error)
    return ErrorSums(
        signal=signal,
        noise=noise,
        nonfinite=x.size - a.size,
        max_error=float(np.max(np.abs(error), initial=0)),
        size=x.size,
        nonzero=int(np.count_nonzero(a)),
        flushed=int(np.count_nonzero((a != 0) & (b == 0))),
        saturated=0 if beyond is None else int(np.count_nonzero(beyond)),
        differing=int(np.count_nonzero(~same)),
    )
