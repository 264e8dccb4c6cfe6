"""Compares the numbers of two checkpoints, dequantized, tensor by tensor. No JAX here."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from qtoolkit.checkpoints._base import Source
from qtoolkit.checkpoints._dequantized import dequantized
from qtoolkit.checkpoints._header import CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._report import Progress, decibels, followed
from qtoolkit.checkpoints._source import open_source
from qtoolkit.checkpoints._statistics import floats
from qtoolkit.checkpoints._storage import Path, check_path
from qtoolkit.checkpoints._stored import Stored, Values, at_limits
from qtoolkit.formats import FloatFormat, IntFormat

_CHUNK = 2**20  # elements
_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """How a tensor b differs from a.

    Attributes:
      name: The name of the tensor.
      format: The format to which b is quantized, else its dtype.
      size: The number of elements.
      equal: Whether all values are the same; for tensors that are no floats, all bytes.
      sqnr_db: 10 log10(sum a^2 / sum (a - b)^2) over the elements that are finite in both; infinite
        if these are equal, None if a is zero in all of them, a sum overflows float64, or the
        tensors are no floats.
      max_error: The largest |a - b| of the same elements; None if the tensors are no floats.
      saturated: The share of elements that were clamped: the code in b is the largest, its
        negative or the lowest, and |a| exceeds |b| by more than half of the last step. None where b
        is not quantized.
      flushed: The share of the elements of a other than zero that are zero in b; None likewise.
      nonfinite: How many elements are NaN or infinite in a or b.
    """

    name: str
    format: str
    size: int
    equal: bool
    sqnr_db: float | None = None
    max_error: float | None = None
    saturated: float | None = None
    flushed: float | None = None
    nonfinite: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a checkpoint b differs from a.

    Attributes:
      a, b: The paths of the two.
      tensors: The comparison of each tensor that both have, in the order of a.
      only_a, only_b: Names of tensors that only one of them has.
    """

    a: str
    b: str
    tensors: tuple[TensorComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors with the same values."""
        same = all(tensor.equal for tensor in self.tensors)
        return same and not self.only_a and not self.only_b


def compare(a: Path, b: Path, *, progress: Progress | None = None) -> Comparison:
    """Compares the numbers of two checkpoints, quantized weights with their scales.

    Args:
      a, b: Folders or files of any kind that `convert` reads.
      progress: Called with (name, bytes compared, bytes in all) of `a`.

    Returns:
      The difference of each tensor that both have, input scales as well, and the names that only
      one of them has.

    Raises:
      CheckpointError: One is no checkpoint or damaged; a tensor has two shapes; or they have no
        tensor in common.
      OSError: A file cannot be read; it names the file.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (64, 32))
      >>> qt.checkpoints.save("model.safetensors", {"w": x})
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> found = qt.checkpoints.compare("model.safetensors", "fp8.safetensors")
      >>> for tensor in found.tensors:
      ...     print(tensor.name, tensor.format, tensor.equal, f"{tensor.sqnr_db:.1f} dB")
      w e4m3fn by tensor False 31.6 dB
    """
    check_path(a, "a")
    check_path(b, "b")
    with opened(a) as first, opened(b) as second:
        all_a, all_b = first.everything, second.everything
        common = [info for name, info in all_a.items() if name in all_b]
        if not common:
            raise CheckpointError(
                f"{b}: no tensor has a name that {a} has, expected two versions of one model; "
                "`qtoolkit inspect` lists the names"
            )
        return Comparison(
            a=str(a),
            b=str(b),
            tensors=tuple(
                _compared(first, second, info, all_b[info.name])
                for info in followed(common, progress)
            ),
            only_a=tuple(name for name in first.tensors if name not in all_b),
            only_b=tuple(name for name in second.tensors if name not in all_a),
        )


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Opens a checkpoint for the `with` block; quantized weights are read as float32."""
    with open_source(path) as source:
        yield dequantized(source)


def _compared(first: Source, second: Source, a: TensorInfo, b: TensorInfo) -> TensorComparison:
    name = a.name
    if a.shape != b.shape:
        raise CheckpointError(
            f"{second.path}: tensor {shown(name)}: shape {list(b.shape)}, and {list(a.shape)} in "
            f"{first.path}; expected the same"
        )
    if a.dtype not in _FLOATS or b.dtype not in _FLOATS:
        equal = a.dtype == b.dtype and _same_bytes(first, second, a)
        return TensorComparison(name=name, format=b.dtype, size=b.size, equal=equal)
    stored = second.stored.get(name)
    limits = None if stored is None else at_limits(stored, second.read_stored)
    errors = _Errors(None if stored is None else _excess(stored))
    for start in range(0, a.size, _CHUNK):
        stop = min(start + _CHUNK, a.size)
        errors.add(
            floats(first, a, start, stop),
            floats(second, b, start, stop),
            None if limits is None else _limits(limits, start, stop),
        )
    return TensorComparison(
        name=name,
        format=b.dtype if stored is None else stored.spec.name,
        size=b.size,
        **errors.result(),
    )


class _Errors:
    """Sums over the elements of a tensor.

    Args:
      excess: x counts as clamped if its code is at a limit of the format, and |x| is more than
        `excess` times the value of that code; None: nothing counts as clamped.
    """

    def __init__(self, excess: float | None) -> None:
        self._excess = excess
        self._signal = self._noise = self._largest = 0.0
        self._clamped = self._size = self._alive = self._flushed = self._nonfinite = 0
        self._equal = True

    def add(self, a: np.ndarray, b: np.ndarray, limits: np.ndarray | None) -> None:
        """Adds float64 elements and, where they are quantized, whether codes are at a limit."""
        known = np.isfinite(a) & np.isfinite(b)
        self._equal &= np.array_equal(a, b, equal_nan=True)
        self._nonfinite += a.size - int(np.count_nonzero(known))
        self._size += a.size
        if limits is not None and self._excess is not None:
            clamped = limits & (np.abs(a) > np.abs(b) * self._excess)
            self._clamped += int(np.count_nonzero(clamped))
        a, b = a[known], b[known]
        alive = a != 0
        self._alive += int(np.count_nonzero(alive))
        self._flushed += int(np.count_nonzero(alive & (b == 0)))
        with np.errstate(over="ignore"):  # of float64
            error = a - b
            self._signal += float(a @ a)
            self._noise += float(error @ error)
        self._largest = max(self._largest, float(np.max(np.abs(error), initial=0)))

    def result(self) -> dict[str, Any]:
        scaled = self._excess is not None
        return {
            "equal": self._equal,
            "sqnr_db": decibels(self._signal, self._noise),
            "max_error": self._largest,
            "saturated": self._clamped / max(self._size, 1) if scaled else None,
            "flushed": self._flushed / max(self._alive, 1) if scaled else None,
            "nonfinite": self._nonfinite,
        }


def _excess(stored: Stored) -> float:
    """(max_finite + half the last step) / max_finite: beyond it, rounding alone is no excuse."""
    element = stored.spec.element
    largest = float(element.max_finite)
    if isinstance(element, FloatFormat):
        step = largest - float(element.magnitude(element.max_code - 1))
    elif isinstance(element, IntFormat):
        step = 1.0
    else:
        values = np.unique(element.values())
        step = float(values[-1] - values[-2])
    return 1 + step / 2 / largest


def _limits(limits: Values, start: int, stop: int) -> np.ndarray:
    data = np.empty(stop - start, np.float32)
    limits.read_into(4 * start, data.view(np.uint8).data)
    return data != 0


def _same_bytes(first: Source, second: Source, info: TensorInfo) -> bool:
    for start in range(0, info.nbytes, _CHUNK):
        a, b = (bytearray(min(_CHUNK, info.nbytes - start)) for _ in range(2))
        first.read_into(info.name, start, a)
        second.read_into(info.name, start, b)
        if a != b:
            return False
    return True
