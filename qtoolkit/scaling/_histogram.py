"""Calibration from histograms: percentiles, least squared error.

The bins are fixed beforehand, from bits of the float32 pattern. So histograms of different batches,
devices and hosts can simply be added.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    bucket,
    exact_float32,
    floor_log2,
    is_zero,
    power_of_two,
    quotient,
    round_values,
)
from qtoolkit.formats import SpecLike, TableFormat
from qtoolkit.formats.internal import add_json_kinds
from qtoolkit.scaling._observer import (
    COUNT,
    MAX,
    STATIC,
    Observer,
    Summary,
    check_number,
    from_bits,
    pytree,
    saturating_sum,
    start,
    stored_tensor_scale,
)
from qtoolkit.scaling._scales import effective_scale, scale_from

Array = jax.Array

_POINTS = 3  # magnitudes that stand for the elements of a bin
_STEPS = 16  # candidates to the octave, where scales are no powers of two
_BLOCKS = 16  # that are searched at once
_LARGEST = np.finfo(np.float32).max


@dataclasses.dataclass(frozen=True)
class Bins:
    """The bins of a histogram of magnitudes; each holds (low, high], its upper edge included.

    Each binade is divided into 2**mantissa_bits bins of equal width, so that (high - low) / low <=
    2**-mantissa_bits. Three more bins hold exact zeros, (0, 2**lowest], and all above 2**(lowest +
    binades). The default has the range of float16: 5123 bins, 20 KiB for each scale. Choose fewer
    if there are thousands of scales.

    Attributes:
      lowest: The exponent of the lowest edge above zero, -126 or more.
      binades: The number of binades; lowest + binades <= 127.
      mantissa_bits: 0 to 10.

    Examples:
      >>> bins = qt.scaling.Bins(lowest=-4, binades=8, mantissa_bits=1)
      >>> bins.count  # 2 in each of 8 binades, and three more
      19
      >>> observer = qt.scaling.Percentile.of("int8", (4,), fraction=0.5, bins=bins)
      >>> observer.observe(jnp.asarray([0.1, 1.1, 1.2, 9.0])).amax()  # the edges are 1, 1.5, 2, 3
      Array([1.5], dtype=float32)
    """

    lowest: int = -24
    binades: int = 40
    mantissa_bits: int = 7

    def __post_init__(self) -> None:
        inside = -126 <= self.lowest < self.lowest + self.binades <= 127
        if not inside or not 0 <= self.mantissa_bits <= 10:
            raise ValueError(
                f"{self}: expected -126 <= lowest, 1 <= binades, lowest + binades <= 127, "
                "0 <= mantissa_bits <= 10"
            )

    @property
    def count(self) -> int:
        return (self.binades << self.mantissa_bits) + 3

    @functools.cached_property
    def edges(self) -> np.ndarray:
        """float32, the upper edge of each bin, exact; of the last the largest float32."""
        first = self._place(self.lowest)
        places = np.arange(first, self._place(self.lowest + self.binades) + 1, dtype=np.uint32)
        edges = (places << np.uint32(self._shift)).view(np.float32)
        return np.concatenate([np.zeros(1, np.float32), edges, [np.finfo(np.float32).max]])

    def index(self, x: Array) -> Array:
        """The bins that the magnitudes of `x`, float32, lie in: int32 in its shape.

        0 for zeros; what lies above all edges, infinities and NaNs are in the last bin.
        """
        place = bucket(x, self.mantissa_bits, upper=True).astype(jnp.int32)
        first = np.int32(self._place(self.lowest) - 2)
        return jnp.where(is_zero(x), np.int32(0), jnp.clip(place - first, 1, self.count - 1))

    @property
    def _shift(self) -> int:
        return 23 - self.mantissa_bits

    def _place(self, exponent: int) -> int:
        """The exponent and mantissa bits of 2**exponent."""
        return (exponent + 127) << self.mantissa_bits


add_json_kinds(Bins)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Histogram(Observer):
    """The base class of observers that keep histograms. Merging is exact.

    Attributes:
      spec, shape, count, bad: As in all states.
      bins: Where the bins lie.
      counts: uint32, the shape of the scales and then the bins: the elements of the block in each.
        They stay at 2**32 - 1 once there.
      magnitude: uint32 in the shape of the scales, the float32 patterns of the largest magnitudes.
    """

    bins: Bins = dataclasses.field(default=Bins(), metadata=STATIC)
    counts: Array = dataclasses.field(metadata=COUNT)
    magnitude: Array = dataclasses.field(metadata=MAX)

    def _summary(self, x: Array) -> Summary:
        scales = self.spec.scale_shape(x.shape)
        lengths = self.spec.block_lengths(x.shape)
        block = jnp.zeros(x.shape, jnp.int32)
        for axis, (blocks, length) in enumerate(zip(scales, lengths, strict=True)):
            if blocks != 1:  # of one, the axis may have a symbolic size
                along = lax.broadcasted_iota(jnp.int32, x.shape, axis) // np.int32(length)
                block = block * np.int32(blocks) + along
        index = block * np.int32(self.bins.count) + self.bins.index(exact_float32(x))
        counts = jnp.zeros(int(np.prod(scales)) * self.bins.count, jnp.uint32)
        counts = counts.at[index].add(np.uint32(1)).reshape(*scales, self.bins.count)
        return *super()._summary(x), counts

    def _after(self, summary: Summary) -> Self:
        amax, counts = summary
        return dataclasses.replace(
            self,
            counts=saturating_sum(self.counts, counts),
            magnitude=jnp.maximum(self.magnitude, amax),
        )

    def _range(self) -> Array:
        return from_bits(self.magnitude)


def _start(where: str, spec: SpecLike, shape: tuple[int, ...], bins: Bins) -> dict[str, Any]:
    fields = start(where, spec, shape, zero_point=False)
    scales = fields["shape"]
    if np.prod(scales, dtype=object) * bins.count >= 2**31:
        raise ValueError(
            f"{where}: scales of shape {scales} with {bins.count} bins each are too many counts, "
            "expected fewer than 2**31; use fewer bins"
        )
    counts = jnp.zeros((*scales, bins.count), jnp.uint32)
    return fields | {"bins": bins, "counts": counts, "magnitude": jnp.zeros(scales, jnp.uint32)}


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Percentile(Histogram):
    """The least edge of a bin at or below which a fraction of the magnitudes lies.

    The true percentile lies in the bin below that edge. So, within the range of the bins, amax is
    never too small, and too large by a factor of less than 1 + 2**-mantissa_bits. It never exceeds
    the largest magnitude that was observed. Zeros count. If that made the edge zero, though not all
    elements are, amax is the largest magnitude.

    Attributes:
      spec, shape, count, bad, bins, counts, magnitude: As in all histograms.
      fraction: The fraction of the magnitudes. The number of magnitudes beyond amax is exact to a
        relative 2**-20.

    Source: arXiv:2004.09602, section on calibration, "percentile".

    Examples:
      >>> x = jnp.ones(1000).at[0].set(100.0)  # one outlier
      >>> observer = qt.scaling.Percentile.of("int8", (1000,), fraction=0.99).observe(x)
      >>> observer.amax()
      Array([1.], dtype=float32)
    """

    fraction: float = dataclasses.field(default=0.9999, metadata=STATIC)

    @classmethod
    def of(
        cls,
        spec: SpecLike,
        shape: tuple[int, ...],
        *,
        fraction: float = 0.9999,
        bins: Bins | None = None,
    ) -> Self:
        """The state before the first batch.

        Args:
          spec, shape: As in `AbsMax.of`.
          fraction: 0 < fraction <= 1.
          bins: Where the bins lie; `Bins()` by default.

        Raises:
          TypeError: As `AbsMax.of`; or `fraction` is no number.
          ValueError: As `AbsMax.of`; `fraction` is out of range; there are 2**31 counts or more.
        """
        check_number("Percentile.of", "fraction", fraction)
        if not 0 < fraction <= 1:
            raise ValueError(f"Percentile.of: fraction={fraction}, expected 0 < fraction <= 1")
        return cls(**_start("Percentile.of", spec, shape, bins or Bins()), fraction=float(fraction))

    def _block_amax(self) -> Array:
        counts = self.counts.astype(jnp.float32)  # sums are exact below 2**24
        from_here = lax.cumsum(counts, counts.ndim - 1, reverse=True)
        beyond = jnp.concatenate([from_here[..., 1:], jnp.zeros_like(counts[..., :1])], axis=-1)
        # How many may lie beyond the edge; slightly more, because all three numbers are rounded.
        allowed = from_here[..., :1] * np.float32((1 - self.fraction) * (1 + 2**-21))
        edge = jnp.asarray(self.bins.edges)[jnp.argmax(beyond <= allowed, axis=-1)]
        largest = self._range()
        return jnp.where(edge > 0, jnp.minimum(edge, largest), largest)


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MSE(Histogram):
    """The scale with the least mean squared error of the quantized elements.

    Candidates are scales that the rule of the format gives for amax * 2**(-i / 16), down to amax /
    2**octaves; where scales are powers of two, for amax * 2**-i and 2 * amax. The elements of a bin
    are taken as spread evenly over it: three points, rounded by the format's own rounding to
    nearest even; those above all bins as amax, and -128 as 127. Within the range of the bins no
    magnitude is moved by more than 2**-mantissa_bits of itself, and the error of rounding to
    nearest changes by no more than the magnitude does. So the root mean squared error is at most
    that of amax itself, or of any candidate, plus 2 * 2**-mantissa_bits of the root mean square of
    the data; in practice it is much closer. Sums are float32.

    Attributes:
      spec, shape, count, bad, bins, counts, magnitude: As in all histograms.
      octaves: How far below amax the search goes.

    Source: arXiv:2106.08295, section 3.1, range setting by mean squared error.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (10_000,))
      >>> observer = qt.scaling.MSE.of("int4", x.shape).observe(x)
      >>> for scale in (None, observer.scale()):  # of amax; with the tails clipped
      ...     print(f"{qt.metrics(x, 'int4', scale=scale).sqnr_db:.1f} dB")
      16.0 dB
      19.5 dB
    """

    octaves: int = dataclasses.field(default=8, metadata=STATIC)

    @classmethod
    def of(
        cls, spec: SpecLike, shape: tuple[int, ...], *, octaves: int = 8, bins: Bins | None = None
    ) -> Self:
        """The state before the first batch.

        Args:
          spec, shape: As in `AbsMax.of`.
          octaves: 1 to 32.
          bins: Where the bins lie; `Bins()` by default.

        Raises:
          TypeError: As `AbsMax.of`.
          ValueError: As `AbsMax.of`; the values of the element format are not symmetric, as those
            of NF4; `octaves` is out of range; there are 2**31 counts or more.
        """
        fields = _start("MSE.of", spec, shape, bins or Bins())
        element = fields["spec"].element
        if isinstance(element, TableFormat):
            negative = [-v for v in element.finite if v < 0]
            if element.signed and set(negative) != {v for v in element.finite if v > 0}:
                raise ValueError(
                    f"MSE.of: the negative values of {element.name} are not those of its positive "
                    "ones, and a histogram holds magnitudes; use AbsMax or Percentile"
                )
        if not 1 <= octaves <= 32:
            raise ValueError(f"MSE.of: octaves={octaves}, expected 1 to 32")
        return cls(**fields, octaves=int(octaves))

    def _block_amax(self) -> Array:
        """The amax of the candidate with the least cost; of equal ones the first."""
        spec, second = self.spec, stored_tensor_scale(self)
        if spec.rule == "amax" or spec.tries_scales:
            exponents = -np.arange(self.octaves * _STEPS + 1) / _STEPS
        else:
            exponents = np.array([*range(0, -self.octaves - 1, -1), 1.0])
        factors = np.exp2(exponents).astype(np.float32)  # of amax; 1 comes first

        def search(block: tuple[Array, Array]) -> Array:
            counts, amax = block
            candidates = jnp.minimum(amax * factors, _LARGEST).at[0].set(amax)
            scales = effective_scale(scale_from(candidates, spec, second), second, spec)
            costs = lax.map(lambda scale: self._cost(counts, amax, scale), scales)
            costs = jnp.where(jnp.isnan(costs), np.float32(np.inf), costs)
            return candidates[jnp.argmin(costs)]

        counts = self.counts[..., 1:].astype(jnp.float32).reshape(-1, self.bins.count - 1)
        best = lax.map(search, (counts, self._range().reshape(-1)), batch_size=_BLOCKS)
        return best.reshape(self.shape)  # `_BLOCKS` at a time: memory stays bounded

    def _cost(self, counts: Array, amax: Array, scale: Array) -> Array:
        """The sum of squared errors, in units of a power of two near amax, so that it is finite."""
        edges = self.bins.edges[:-1]
        low, width = edges[:-1, None], np.diff(edges)[:, None]
        points = low + width * ((np.arange(_POINTS) + 0.5) / _POINTS)
        beyond = np.full((1, _POINTS), _LARGEST)  # above all bins: taken as the largest one
        unit = power_of_two(-jnp.clip(floor_log2(amax), -126, 126))
        x = jnp.minimum(np.concatenate([points, beyond]).astype(np.float32), amax) * unit
        step = scale * unit
        u = quotient(x, step)
        q = round_values(u, self.spec.element)
        return jnp.sum(counts[:, None] * ((q - u) * step) ** 2)
