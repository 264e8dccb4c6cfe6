"""Compares the numbers of two checkpoints, dequantized, tensor by tensor."""

import contextlib
from collections.abc import Iterator

import numpy as np

from qtoolkit.checkpoints._codes import check_explained
from qtoolkit.checkpoints._containers import open_source
from qtoolkit.checkpoints._decode import dequantized
from qtoolkit.checkpoints._experts import split_alike
from qtoolkit.checkpoints._paths import Path, check_path
from qtoolkit.checkpoints._report import Comparison, Progress, TensorComparison, followed
from qtoolkit.checkpoints._slabs import SLAB
from qtoolkit.checkpoints._tensors import FLOATS, Checkpoint, CheckpointError, Tensor, shown
from qtoolkit.checkpoints._values import Values
from qtoolkit.checkpoints.layouts import Encoding
from qtoolkit.formats import BlockFormat, FloatFormat, IntFormat
from qtoolkit.scaling.internal import ErrorSums, error_sums


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
        first, second = split_alike(first, second)
        all_a, all_b = first.everything, second.everything
        common = [tensor for name, tensor in all_a.items() if name in all_b]
        if not common:
            raise CheckpointError(
                f"{b}: no tensor has a name that {a} has, expected two versions of one model; "
                "`qtoolkit inspect` lists the names"
            )
        return Comparison(
            a=str(a),
            b=str(b),
            tensors=tuple(
                _compared(first, second, tensor, all_b[tensor.name])
                for tensor in followed(common, progress)
            ),
            only_a=tuple(name for name in first.tensors if name not in all_b),
            only_b=tuple(name for name in second.tensors if name not in all_a),
        )


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Checkpoint]:
    """Opens a checkpoint for the `with` block; quantized weights are read as float32."""
    with open_source(path) as source:
        weights = dequantized(source)
        check_explained(weights)
        yield weights


def _compared(first: Checkpoint, second: Checkpoint, a: Tensor, b: Tensor) -> TensorComparison:
    name = a.name
    if a.shape != b.shape:
        raise CheckpointError(
            f"{second.path}: tensor {shown(name)}: shape {list(b.shape)}, and {list(a.shape)} in "
            f"{first.path}; expected the same"
        )
    if a.dtype not in FLOATS or b.dtype not in FLOATS:
        equal = a.dtype == b.dtype and _same_bytes(a, b)
        return TensorComparison(name=name, format=b.dtype, size=b.size, equal=equal)
    encoding = b.encoding
    limits = None if encoding is None else _Limits(encoding, Values(encoding, second.stored))
    dtype = np.float64 if "F64" in (a.dtype, b.dtype) else np.float32
    sums = ErrorSums()
    for start in range(0, a.size, SLAB):
        stop = min(start + SLAB, a.size)
        with np.errstate(invalid="ignore"):  # signaling NaNs
            x, y = (t.read(start, stop).astype(dtype, copy=False) for t in (a, b))
        sums.add(error_sums(x, y, None if limits is None else limits.exceeded(x, y, start)))
    return TensorComparison(
        name=name,
        format=b.dtype if encoding is None else encoding.spec.name,
        size=b.size,
        equal=not sums.differing,
        sqnr_db=sums.sqnr_db,
        max_error=sums.max_error,
        saturated=None if limits is None else sums.saturated / max(sums.size, 1),
        flushed=None if limits is None else sums.flushed / max(sums.nonzero, 1),
        nonfinite=sums.nonfinite,
    )


class _Limits:
    """Tells which elements of a quantized weight were clamped."""

    def __init__(self, encoding: Encoding, values: Values) -> None:
        self._values = values
        self._at_limit = _codes_at_limits(encoding.spec)
        self._excess = np.float64(_excess(encoding.spec))

    def exceeded(self, x: np.ndarray, y: np.ndarray, start: int) -> np.ndarray:
        """Where the code is at a limit of the format, and |x| is larger than rounding excuses."""
        codes = self._values.codes_between(start, start + len(x))
        at_limit = self._at_limit[codes]
        at = np.flatnonzero(at_limit)
        with np.errstate(invalid="ignore"):  # half a step beyond the limit is none: no rounding
            at_limit[at] = np.abs(x[at].astype(np.float64)) > np.abs(y[at]) * self._excess
        return at_limit


def _codes_at_limits(spec: BlockFormat) -> np.ndarray:
    """For each byte whether it is the code of the largest element, its negative, or the lowest."""
    element, largest = spec.element, float(spec.element.max_finite)
    # int8 has -128, but a symmetric scale maps amax to 127: whoever clamps there clamps at -127.
    limits = [float(element.lowest + spec.narrow_range), -largest, largest]
    at_limits = np.zeros(256, bool)
    values = element.values().astype(np.float64)
    at_limits[: len(values)] = np.isin(values, limits)
    return at_limits


def _excess(spec: BlockFormat) -> float:
    """(max_finite + half the last step) / max_finite: beyond it, rounding alone is no excuse."""
    element = spec.element
    largest = float(element.max_finite)
    if isinstance(element, FloatFormat):
        step = largest - float(element.magnitude(element.max_code - 1))
    elif isinstance(element, IntFormat):
        step = 1.0
    else:
        values = np.unique(element.values())
        step = float(values[-1] - values[-2])
    return 1 + step / 2 / largest


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    for start in range(0, a.nbytes, SLAB):
        one, other = (bytearray(min(SLAB, a.nbytes - start)) for _ in range(2))
        a.read_into(start, memoryview(one))
        b.read_into(start, memoryview(other))
        if one != other:
            return False
    return True
