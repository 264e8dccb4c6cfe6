"""Statistics of a tensor's elements. No JAX here."""

import dataclasses
import math

import numpy as np

from qtoolkit.checkpoints._tensors import Tensor

_CHUNK = 2**20


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the elements of a tensor.

    Attributes:
      lowest, largest, mean, deviation: Computed over the finite elements, the standard deviation
        as that of a population; NaN if no element is finite.
      zeros, nans, infinities: How many elements are zero, NaN, infinite.
    """

    lowest: float
    largest: float
    mean: float
    deviation: float
    zeros: int
    nans: int
    infinities: int


@np.errstate(over="ignore", invalid="ignore")  # the squares of float64 may overflow
def statistics(tensor: Tensor) -> Statistics:
    """Reads a tensor of floats once, in chunks."""
    lowest, largest = math.inf, -math.inf
    count = zeros = nans = infinities = 0
    mean = squares = 0.0
    for start in range(0, tensor.size, _CHUNK):
        x = tensor.read(start, min(start + _CHUNK, tensor.size)).astype(np.float64)
        nans += int(np.isnan(x).sum())
        infinities += int(np.isinf(x).sum())
        x = x[np.isfinite(x)]
        if not len(x):
            continue
        zeros += int((x == 0).sum())
        lowest, largest = min(lowest, float(x.min())), max(largest, float(x.max()))
        # Means and squared deviations of two parts become those of both (Chan et al., 1979).
        shift = float(x.mean()) - mean
        between = shift * shift * count * len(x) / (count + len(x))
        squares += float(((x - x.mean()) ** 2).sum()) + between
        count += len(x)
        mean += shift * len(x) / count
    if not count:
        return Statistics(*(math.nan,) * 4, zeros, nans, infinities)
    return Statistics(lowest, largest, mean, math.sqrt(squares / count), zeros, nans, infinities)
