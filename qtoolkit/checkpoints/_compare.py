"""Compares the numbers of two checkpoints, dequantized, tensor by tensor."""

import functools
import operator

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor, same_bytes
from qtoolkit.checkpoints._containers import open_source
from qtoolkit.checkpoints._decode import check_explained, decode_weights
from qtoolkit.checkpoints._experts import split_alike
from qtoolkit.checkpoints._report import (
    CheckpointComparison,
    Progress,
    TensorComparison,
    with_progress,
)
from qtoolkit.checkpoints._slabs import SLAB
from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._tensors import FLOATS, CheckpointError, shown
from qtoolkit.formats import FloatFormat, Format, IntFormat
from qtoolkit.scaling.internal import WeightErrors, weight_errors


def compare(a: Path, b: Path, *, progress: Progress | None = None) -> CheckpointComparison:
    """Compare the numbers of two checkpoints; quantized weights are dequantized.

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
      >>> comparison = qt.checkpoints.compare("model.safetensors", "fp8.safetensors")
      >>> for tensor in comparison.tensors:
      ...     print(tensor.name, tensor.format, tensor.equal, f"{tensor.sqnr_db:.1f} dB")
      w e4m3fn by tensor False 31.6 dB
    """
    storage.check_path(a, "a")
    storage.check_path(b, "b")
    with open_source(a) as opened_a, open_source(b) as opened_b:
        first, second = split_alike(*map(_decoded, (opened_a, opened_b)))
        all_a, all_b = first.all_tensors, second.all_tensors
        common = [tensor for name, tensor in all_a.items() if name in all_b]
        if not common:
            raise CheckpointError(
                f"{b}: no tensor has a name that {a} has, expected two versions of one model; "
                "`qtoolkit inspect` lists the names"
            )
        return CheckpointComparison(
            a=str(a),
            b=str(b),
            tensors=tuple(
                _compared(first, second, tensor, all_b[tensor.name])
                for tensor in with_progress(common, progress)
            ),
            only_a=tuple(name for name in first.tensors if name not in all_b),
            only_b=tuple(name for name in second.tensors if name not in all_a),
        )


def _decoded(source: Checkpoint) -> Checkpoint:
    weights = decode_weights(source)
    check_explained(weights)
    return weights


def _compared(first: Checkpoint, second: Checkpoint, a: Tensor, b: Tensor) -> TensorComparison:
    name = a.name
    if a.shape != b.shape:
        raise CheckpointError(
            f"{second.path}: tensor {shown(name)}: shape {list(b.shape)}, and {list(a.shape)} in "
            f"{first.path}; expected the same"
        )
    if a.dtype not in FLOATS or b.dtype not in FLOATS:
        equal = same_bytes(a, b)
        return TensorComparison(name=name, format=b.dtype, size=b.size, equal=equal)
    encoding, weight = b.encoding, None
    if encoding is not None:
        weight = b.weight
        is_limit, excess = _limits(encoding.spec.element, encoding.spec.narrow_range)
    dtype = np.float64 if "F64" in (a.dtype, b.dtype) else np.float32

    def slab_errors(start: int) -> WeightErrors:
        stop = min(start + SLAB, a.size)
        with np.errstate(invalid="ignore"):  # signaling NaNs; |y| * excess of 0 and infinity
            x, y = (t.read(start, stop).astype(dtype, copy=False) for t in (a, b))
            clamped = None
            if weight is not None:
                clamped = is_limit[weight.codes_between(start, stop)]
                at = np.flatnonzero(clamped)
                clamped[at] = np.abs(x[at].astype(np.float64)) > np.abs(y[at]) * excess
        return weight_errors(x, y, clamped)

    starts = range(0, a.size, SLAB)
    errors = functools.reduce(operator.add, map(slab_errors, starts)) if starts else WeightErrors()
    return TensorComparison(
        name=name,
        format=b.stored_dtype if encoding is None else encoding.format_name,
        size=b.size,
        equal=not errors.differing,
        sqnr_db=errors.known_sqnr_db,
        max_error=errors.max_error,
        saturated=None if weight is None else errors.saturated_fraction,
        flushed=None if weight is None else errors.flushed_fraction,
        nonfinite=errors.elements - errors.compared,
    )


# Cached: exact values of 256 codes take longer than comparing a small tensor.
@functools.cache
def _limits(element: Format, narrow_range: bool) -> tuple[np.ndarray, np.float64]:
    """When an element was clamped: its code is at a limit of the format, and |x| is larger than |y|
    by more than rounding excuses. For each byte whether it is such a code; and the factor.
    """
    largest = float(element.max_finite)
    # int8 has -128, but a symmetric scale maps amax to 127: whoever clamps there clamps at -127.
    limits = [float(element.lowest + narrow_range), -largest, largest]
    is_limit = np.zeros(256, bool)
    values = element.values().astype(np.float64)
    is_limit[: len(values)] = np.isin(values, limits)
    if isinstance(element, FloatFormat):
        step = largest - float(element.magnitude(element.max_code - 1))
    elif isinstance(element, IntFormat):
        step = 1.0
    else:
        step = float(np.diff(np.unique(element.values()))[-1])
    return is_limit, np.float64(1 + step / 2 / largest)
