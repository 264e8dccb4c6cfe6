"""What a conversion has done. No JAX here."""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorReport:
    """What was done to one tensor.

    Attributes:
      name: As in the source.
      action: "quantize" or "keep".
      reason: Why it was kept; empty where it was not.
      format: What it was quantized to; empty where it was kept.
      bytes_before, bytes_after: Its data; after, with its scales.
      max_scale: The largest of its scales; None where it has none.
      sqnr_db: 10 log10(sum x^2 / sum (x - value)^2) over its finite elements, value being what
        `dequantize` gives; infinite where exact; None where kept, all zero or empty.
      nonfinite: How many of its elements are NaN or infinite; 0 where kept.
    """

    name: str
    action: Literal["quantize", "keep"]
    reason: str = ""
    format: str = ""
    bytes_before: int
    bytes_after: int
    max_scale: float | None = None
    sqnr_db: float | None = None
    nonfinite: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `convert` has done.

    Attributes:
      source, target: The two files.
      format, scaling: What tensors were quantized to, by rules several names with commas between
        them or "nothing"; scaling is "none" where no scale is needed.
      tensors: One report for each tensor, in the order of the source's data.
    """

    source: str
    target: str
    format: str
    scaling: str
    tensors: tuple[TensorReport, ...]

    @property
    def quantized(self) -> tuple[TensorReport, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.action == "quantize")

    @property
    def kept(self) -> tuple[TensorReport, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.action == "keep")

    @property
    def bytes_before(self) -> int:
        return sum(tensor.bytes_before for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        return sum(tensor.bytes_after for tensor in self.tensors)

    @property
    def nonfinite(self) -> int:
        return sum(tensor.nonfinite for tensor in self.tensors)

    @property
    def mean_sqnr_db(self) -> float | None:
        """Mean of the tensors' SQNR; exact tensors count only where all are; None without any."""
        known = [tensor.sqnr_db for tensor in self.tensors if tensor.sqnr_db is not None]
        lossy = [sqnr for sqnr in known if math.isfinite(sqnr)] or known
        return sum(lossy) / len(lossy) if lossy else None


def decibels(signal: float, noise: float) -> float | None:
    """Ratio of two sums of squares in dB; None where there is no signal to compare."""
    if not (signal > 0 and math.isfinite(signal) and math.isfinite(noise)):
        return None
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf
