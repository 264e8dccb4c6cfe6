"""What `metrics` measures, as sums that add: over arrays, steps and devices."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    exact_float32,
    floor_log2,
    from_magnitude_ordinal,
    is_zero,
    magnitude_ordinal,
    power_of_two,
)
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling._blocks import magnitude_max
from qtoolkit.scaling._engine import Scales, unscaled_values
from qtoolkit.scaling._metrics import counts, moments
from qtoolkit.scaling._observer import MAX, SUM, AxisNames, Merge
from qtoolkit.scaling._scales import effective

Array = jax.Array

MIN = {"merge": Merge(jnp.minimum, lax.pmin)}
LOWEST_EXPONENT = -149  # of float32's subnormals; the first bin of `exponents` is for zeros
_BINS = 127 - LOWEST_EXPONENT + 2
# A sum of products is stored in a slot by its size, each 2**64 wide, so that float32 holds the sum
# of any arrays and what is small beside the rest of its slot does not matter.
_SLOTS, _SLOT, _FIRST = 10, 64, -384


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Tally:
    """What rounding did to one or more arrays. A pytree of float32 arrays; `a + b` is that of both.

    Counts are exact below 2**24, sums right to 1e-6. The properties are numbers of Python and need
    arrays that are known, so read them outside of `jit`.

    Attributes:
      uses: How many arrays were measured.
      elements: How many elements they have.
      saturated, alive, flushed, nonfinite: As `metrics` counts them; `alive` are finite elements
        other than zero.
      compared: Elements that are finite before and after.
      moments: [4, 10], sums of x x, (x - y)(x - y), y y and x y, in slots by their size.
      exponents: [278], how many elements are zero, and how many lie in each binade from 2**-149 on.
      amax: The largest finite magnitude.
      least_scale, largest_scale: Of the blocks; infinity and 0 where there are no scales.
    """

    uses: Array = dataclasses.field(metadata=SUM)
    elements: Array = dataclasses.field(metadata=SUM)
    saturated: Array = dataclasses.field(metadata=SUM)
    alive: Array = dataclasses.field(metadata=SUM)
    flushed: Array = dataclasses.field(metadata=SUM)
    nonfinite: Array = dataclasses.field(metadata=SUM)
    compared: Array = dataclasses.field(metadata=SUM)
    moments: Array = dataclasses.field(metadata=SUM)
    exponents: Array = dataclasses.field(metadata=SUM)
    amax: Array = dataclasses.field(metadata=MAX)
    least_scale: Array = dataclasses.field(metadata=MIN)
    largest_scale: Array = dataclasses.field(metadata=MAX)

    def __add__(self, other: Self) -> Self:
        return self._merged(lambda merge, n: merge.two(getattr(self, n), getattr(other, n)))

    def merge_across(self, axis_name: AxisNames) -> Self:
        """That of all devices along mesh axes, as `Observer.merge_across`."""
        return self._merged(lambda merge, name: merge.across(getattr(self, name), axis_name))

    def _merged(self, value: Any) -> Self:
        fields = dataclasses.fields(self)
        return dataclasses.replace(
            self, **{f.name: value(f.metadata["merge"], f.name) for f in fields}
        )

    @property
    def sqnr_db(self) -> float:
        """As in `metrics`, over the elements of all arrays."""
        signal, noise, *_ = self._sums()
        if noise == 0:
            return math.inf if float(self.compared) > 0 else math.nan
        return 10 * math.log10(signal / noise) if signal > 0 else -math.inf

    @property
    def cosine(self) -> float:
        """As in `metrics`, over the elements of all arrays."""
        signal, _, image, overlap = self._sums()
        if signal == 0 or image == 0:
            return float(signal == image)
        return min(max(overlap / (math.sqrt(signal) * math.sqrt(image)), -1.0), 1.0)

    @property
    def saturated_fraction(self) -> float:
        """Of all elements."""
        return float(self.saturated) / max(float(self.elements), 1.0)

    @property
    def flushed_fraction(self) -> float:
        """Of the elements that were finite and not zero."""
        return float(self.flushed) / max(float(self.alive), 1.0)

    def _sums(self) -> list[float]:
        sizes = np.exp2(_FIRST + _SLOT * np.arange(_SLOTS))
        return [float(row @ sizes) for row in np.asarray(self.moments, np.float64)]


# A program can give a tally as the gradient of zeros, which adds: then maxima stand as marks in
# buckets, see `extreme`.
_AMAX_BITS, _SCALE_BITS = 3, 0  # of the fraction, in which buckets differ


def marked_size(bits: int) -> int:
    return 3 * (256 << bits)


def _sizes() -> dict[str, int]:
    scalars = ("uses", "elements", "saturated", "alive", "flushed", "nonfinite", "compared")
    extremes = {"amax": _AMAX_BITS, "least_scale": _SCALE_BITS, "largest_scale": _SCALE_BITS}
    return {
        **dict.fromkeys(scalars, 1),
        "moments": 4 * _SLOTS,
        "exponents": _BINS,
        **{name: marked_size(bits) for name, bits in extremes.items()},
    }


TALLY_SIZE = sum(_sizes().values())


def tally_vector(x: Array, q: Array, spec: BlockFormat | None, scales: Scales) -> Array:
    """float32[TALLY_SIZE]: of `x`, rounded to q * scale. Vectors add.

    Args:
      q, scales: As `operand_values` gives them.
      spec: None where `x` stays wide.
    """
    wide = exact_float32(x)
    y = wide if spec is None or spec.scale is None else unscaled_values(q, spec, scales)
    if spec is not None and spec.scale is None:
        y = exact_float32(q)
    found = moments(wide, y)
    counted = counts(x, y, spec, scales)
    amax = magnitude_max(wide, tuple(range(x.ndim)), nan_wins=False).reshape(())
    least = largest = jnp.zeros(marked_size(_SCALE_BITS), jnp.float32)
    if spec is not None and spec.scale is not None and scales.scale is not None:
        values = effective(scales.scale, scales.tensor_scale, spec)
        least, largest = (marked(f(values), _SCALE_BITS) for f in (jnp.min, jnp.max))
    pieces = {
        "uses": np.float32(1),
        "elements": np.float32(x.size),
        **counted._asdict(),
        "compared": found.compared,
        "moments": _slots(found.sums, found.exponents),
        "exponents": _exponents(wide),
        "amax": marked(amax, _AMAX_BITS),
        "least_scale": least,
        "largest_scale": largest,
    }
    return jnp.concatenate(
        [jnp.asarray(pieces[name]).astype(jnp.float32).reshape(-1) for name in _sizes()]
    )


def tally_of(vector: Array) -> Tally:
    """What a sum of such vectors says: float32[TALLY_SIZE]."""
    ends = np.cumsum(list(_sizes().values()))
    pieces = dict(zip(_sizes(), jnp.split(vector, ends[:-1]), strict=True))
    values: dict[str, Any] = {
        name: piece.reshape(()) if piece.size == 1 else piece for name, piece in pieces.items()
    }
    values["moments"] = pieces["moments"].reshape(4, _SLOTS)
    values["amax"] = extreme(pieces["amax"], _AMAX_BITS, lowest=False)
    values["least_scale"] = extreme(pieces["least_scale"], _SCALE_BITS, lowest=True)
    values["largest_scale"] = extreme(pieces["largest_scale"], _SCALE_BITS, lowest=False)
    return Tally(**values)


def _slots(sums: Array, exponents: Array) -> Array:
    """float32[4, _SLOTS]: each sum in its slot, in units of that."""
    place = exponents - np.int32(_FIRST)
    slot, rest = place // np.int32(_SLOT), place % np.int32(_SLOT)
    is_slot = lax.broadcasted_iota(jnp.int32, (4, _SLOTS), 1) == slot[:, None]
    return jnp.where(is_slot, (sums * power_of_two(rest))[:, None], np.float32(0))


def _exponents(x: Array) -> Array:
    """uint32[_BINS]: how many elements are zero, and how many have each exponent."""
    index = jnp.where(is_zero(x), 0, floor_log2(x) - np.int32(LOWEST_EXPONENT - 1))
    index = jnp.where(jnp.isfinite(x), index, np.int32(_BINS))  # out of bounds, hence dropped
    return jnp.zeros(_BINS, jnp.uint32).at[index.reshape(-1)].add(np.uint32(1), mode="drop")


def marked(value: Array, bits: int) -> Array:
    """float32[marked_size(bits)]: a mark in the bucket of a magnitude. Marks add.

    A bucket holds a count, and the sums of the places within it and of their squares.
    """
    shift = 23 - bits
    place = magnitude_ordinal(value)
    bucket = place >> np.uint32(shift)
    within = (place - (bucket << np.uint32(shift))).astype(jnp.float32) * np.float32(2.0**-shift)
    is_here = lax.broadcasted_iota(jnp.uint32, (256 << bits,), 0) == bucket
    nothing = np.float32(0)
    sums = (jnp.where(is_here, x, nothing) for x in (np.float32(1), within, within * within))
    return jnp.concatenate(list(sums))


def extreme(marks: Array, bits: int, *, lowest: bool) -> Array:
    """The largest or least of the values that were marked; infinity or 0 where there are none.

    Exact where one value lies in the outermost bucket. Of n with mean m and standard deviation s
    none is further out than m + s * sqrt(n - 1), which is taken, within the bucket: not too small,
    and too large by the rounding of the float32 sums where all are alike: up to about 1e-4 for a
    few values, 2.3e-3 for 48, never more than the width of the bucket.
    """
    counts, sums, squares = marks.reshape(3, -1)
    places = lax.broadcasted_iota(jnp.int32, counts.shape, 0)
    if lowest:
        at = jnp.min(jnp.where(counts > 0, places, np.int32(counts.size - 1)))
    else:
        at = jnp.max(jnp.where(counts > 0, places, np.int32(0)))
    count = jnp.maximum(counts[at], np.float32(1))
    mean = sums[at] / count
    spread = jnp.sqrt(jnp.maximum(squares[at] / count - mean * mean, 0) * (count - 1))
    shift = 23 - bits
    width = np.float32(2.0**shift)
    within = jnp.clip(mean + (-spread if lowest else spread), 0, 1) * width
    within = jnp.minimum(jnp.round(within), width - 1).astype(jnp.uint32)
    found = from_magnitude_ordinal(
        (at.astype(jnp.uint32) << np.uint32(shift)) + within, jnp.float32
    )
    return jnp.where(jnp.any(counts > 0), found, np.float32(np.inf if lowest else 0))
