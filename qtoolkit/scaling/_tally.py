"""`Tally`: the sums behind `metrics`, which can be added over arrays, steps and devices."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    bucket,
    bucket_edge,
    exact_float32,
    floor_log2,
    from_magnitude_ordinal,
    is_zero,
    magnitude_ordinal,
    serializable,
)
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling._blocks import blocks_of
from qtoolkit.scaling._elements import Scales
from qtoolkit.scaling._engine import scaled_and_unscaled
from qtoolkit.scaling._error_sums import SLOTS, ErrorSums, error_sums
from qtoolkit.scaling._metrics import occurrences, saturates
from qtoolkit.scaling._observer import MAX, SUM, Merge
from qtoolkit.scaling._scales import effective_scale

Array = jax.Array

MIN = {"merge": Merge(jnp.minimum, lax.pmin)}
LOWEST_EXPONENT = -149  # of float32's subnormals; the first bin of `exponents` is for zeros
_BINS = 127 - LOWEST_EXPONENT + 2
_COUNTS = ("elements", "compared", "nonfinite", "nonzero", "flushed", "saturated")


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tally(ErrorSums):
    """What rounding did to one or more arrays; `a + b` is the tally of both. A pytree, all float32.

    Counts are exact below 2**24, sums right to 1e-6. The properties are numbers of Python and need
    arrays that are known, so read them outside of `jit`. `merge_across(axis_name)` adds the tallies
    of all devices along mesh axes.

    Attributes:
      uses: How many arrays were measured.
      exponents: [278], how many elements are zero, and how many lie in each binade from 2**-149 on.
      amax: The largest finite magnitude.
      least_scale, largest_scale: The extreme scales of blocks that are not all zeros; infinity and
        0 if there are none.
    """

    uses: Array = dataclasses.field(metadata=SUM)
    exponents: Array = dataclasses.field(metadata=SUM)
    amax: Array = dataclasses.field(metadata=MAX)
    least_scale: Array = dataclasses.field(metadata=MIN)
    largest_scale: Array = dataclasses.field(metadata=MAX)


# A program can return a tally as the gradient by an argument of zeros. JAX adds gradients up, so
# maxima are stored in a form that can be added: as marks in buckets, see `extreme`. The numbers are
# bits of the fraction: with 3, there are 8 buckets to a binade.
_EXTREMES = {"amax": 3, "least_scale": 0, "largest_scale": 0}


def marks_size(bits: int) -> int:
    return 3 * (256 << bits)


_SIZES = {
    **dict.fromkeys(("uses", *_COUNTS), 1),
    "moments": 4 * SLOTS,
    **{name: marks_size(bits) for name, bits in _EXTREMES.items()},
    "exponents": _BINS,  # last: what is not finite has bin _BINS, which is outside of the vector
}
_STOPS = dict(zip(_SIZES, np.cumsum(list(_SIZES.values())).tolist(), strict=True))
_STARTS = {name: end - _SIZES[name] for name, end in _STOPS.items()}
TALLY_SIZE = sum(_SIZES.values())
TALLY_SHAPES: dict[str, tuple[int, ...]] = {
    field.name: {"moments": (4, SLOTS), "exponents": (_BINS,)}.get(field.name, ())
    for field in dataclasses.fields(Tally)
}


def tally_vector(x: Array, q: Array, spec: BlockFormat | None, scales: Scales) -> Array:
    """float32[TALLY_SIZE]: the tally of `x`, which was rounded to q * scale. Vectors add.

    q and scales are as from `operand_values`; `spec` is None where `x` is not quantized.
    """
    before = exact_float32(x)
    saturated, after = jnp.zeros_like(before, bool), before
    if spec is not None:
        u, after = scaled_and_unscaled(x, q, spec, scales)
        saturated = saturates(x, u, spec)
    errors, amax, _ = error_sums(before, after, saturated)
    extremes = [amax]
    if spec is not None and scales.scale is not None:
        extremes += _extreme_scales(x, spec, scales, amax)
    counts = [np.float32(1), *(getattr(errors, name) for name in _COUNTS)]
    first = jnp.stack([jnp.asarray(n, jnp.float32) for n in counts])
    bits = np.array(list(_EXTREMES.values())[: len(extremes)], np.uint32)
    starts = np.array([_STARTS[name] for name in _EXTREMES], np.int32)[None, : len(extremes)]
    places, marks = _mark(jnp.stack(extremes), bits)
    # One scatter: of a concatenation XLA would compile a loop for every piece.
    at = jnp.concatenate([jnp.arange(_STOPS["moments"]), (places + starts).reshape(-1)])
    numbers = jnp.concatenate([first, errors.moments.reshape(-1), marks.reshape(-1)])
    bins = jnp.where(is_zero(before), 0, floor_log2(before) - np.int32(LOWEST_EXPONENT - 1))
    bins = jnp.where(jnp.isfinite(before), bins, _BINS)
    occurring = occurrences(_STARTS["exponents"] + bins, TALLY_SIZE)
    return occurring.astype(jnp.float32).at[at].add(numbers)


def tally_of(vector: Array) -> Tally:
    """The tally of a sum of vectors from `tally_vector`."""
    values: dict[str, Any] = {
        name: vector[_STARTS[name] : _STOPS[name]] if size > 1 else vector[_STARTS[name]]
        for name, size in _SIZES.items()
    }
    values["moments"] = values["moments"].reshape(4, SLOTS)
    for name, bits in _EXTREMES.items():
        values[name] = extreme(values[name], bits, lowest=name == "least_scale")
    return Tally(**values)


def _extreme_scales(x: Array, spec: BlockFormat, scales: Scales, amax: Array) -> list[Array]:
    """The least and the largest finite scale of blocks that are not all zeros; infinity and 0."""
    assert scales.scale is not None
    values = effective_scale(scales.scale, scales.tensor_scale, spec)
    blocks = blocks_of(x, spec)
    is_zero = amax == 0
    if math.prod(values.shape) > 1:
        is_zero = blocks.gather(
            jnp.all(blocks.split(x) == 0, axis=blocks.element_axes, keepdims=True)
        )
    values = jnp.where(is_zero, np.float32(np.inf), values)  # such a scale says nothing of the data
    ends = np.float32(np.inf), np.float32(0)
    finite = [jnp.where(jnp.isfinite(values), values, end) for end in ends]

    def further(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])

    return lax.reduce(tuple(finite), ends, further, tuple(range(values.ndim)))


def _mark(values: Array, bits: np.ndarray) -> tuple[Array, Array]:
    """int32 [3, n] and float32 [3, n]: the places of n marks, and the marks."""
    at, step = bucket(values, bits), np.exp2(bits.astype(np.float32) - 23)
    within = (magnitude_ordinal(values) - bucket_edge(at, bits)).astype(jnp.float32) * step
    rows = jnp.asarray(np.arange(3, dtype=np.int32)[:, None] * (256 << bits).astype(np.int32))
    return rows + at.astype(jnp.int32)[None], jnp.stack([jnp.ones_like(within), within, within**2])


def magnitude_marks(values: Array, bits: int) -> Array:
    """float32[n * marks_size(bits)]: for each magnitude a mark in its bucket. Marks add."""
    # A value's place within a bucket runs from 0 to 1. A bucket holds the number of its values, the
    # sum of their places, and the sum of the squares of these.
    places, marks = _mark(values, np.full(values.shape, bits, np.uint32))
    starts = marks_size(bits) * np.arange(values.size, dtype=np.int32)[None]
    zeros = jnp.zeros(values.size * marks_size(bits), jnp.float32)
    return zeros.at[places + starts].set(marks)


def extreme(marks: Array, bits: int, *, lowest: bool) -> Array:
    """The largest or least of the values that were marked; infinity or 0 where there are none."""
    # Exact if the outermost bucket holds a single value. Of n values with mean m and standard
    # deviation s, none is beyond m + s * sqrt(n - 1) (m - s * sqrt(n - 1) for the least). This
    # bound is returned, limited to the bucket, so the largest value is not returned too small, nor
    # the least too large. In the other direction, even if all n are equal, the rounding of the
    # float32 sums adds up to about 1e-4 for a few values, 2.3e-3 for 48. The error never exceeds
    # the width of the bucket.
    counts, sums, squares = marks.reshape(3, -1)
    places = lax.broadcasted_iota(jnp.int32, counts.shape, 0)
    if lowest:
        at = jnp.min(jnp.where(counts > 0, places, np.int32(counts.size - 1)))
    else:
        at = jnp.max(jnp.where(counts > 0, places, np.int32(0)))
    count = jnp.maximum(counts[at], np.float32(1))
    mean = sums[at] / count
    spread = jnp.sqrt(jnp.maximum(squares[at] / count - mean * mean, 0) * (count - 1))
    width = np.float32(2.0 ** (23 - bits))
    within = jnp.clip(mean + (-spread if lowest else spread), 0, 1) * width
    within = jnp.minimum(jnp.round(within), width - 1).astype(jnp.uint32)
    value = from_magnitude_ordinal(bucket_edge(at.astype(jnp.uint32), bits) + within, jnp.float32)
    return jnp.where(jnp.any(counts > 0), value, np.float32(np.inf if lowest else 0))
