"""Calibration from extremes: the largest magnitude, its moving average, the range."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import from_stored, ordinal, product, quotient
from qtoolkit.formats import SpecLike
from qtoolkit.scaling._observer import (
    MAX,
    STATIC,
    SUM,
    Observer,
    Summary,
    amax_bits,
    check_number,
    from_bits,
    pytree,
    start,
)
from qtoolkit.scaling._scales import asymmetric

Array = jax.Array
_LARGEST = np.finfo(np.float32).max


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AbsMax(Observer):
    """The largest magnitude of each block over all batches. Merging is exact.

    Attributes:
      spec, shape, count, bad: As in all states.
      magnitude: uint32 in the shape of the scales, float32 patterns, so that subnormals count.

    Source: arXiv:2004.09602, section on calibration, "max".

    Examples:
      >>> observer = qt.scaling.AbsMax.of("e4m3fn", (2,))
      >>> for batch in ([1.0, -896.0], [2.0, 3.0]):
      ...     observer = observer.observe(jnp.asarray(batch))
      >>> observer.amax(), observer.scale()  # 896 / 448
      (Array([896.], dtype=float32), Array([2.], dtype=float32))
      >>> qt.quantize(jnp.asarray([5.0, 1e4]), "e4m3fn", scale=observer.scale()).dequantize()
      Array([  5., 896.], dtype=float32)
    """

    magnitude: Array = dataclasses.field(metadata=MAX)

    @classmethod
    def of(cls, spec: SpecLike, shape: tuple[int, ...]) -> Self:
        """The state before the first batch.

        Args:
          spec: A block format that has scales and no zero point, or what `formats.spec` resolves.
          shape: The shape of an array to be observed. Axes of which a block is the whole may have
            another length later on.

        Raises:
          TypeError: `shape` is no tuple, such as an array.
          ValueError: `spec` has no scale, or a zero point; `shape` does not fit it.
        """
        fields = start("AbsMax.of", spec, shape, zero_point=False)
        return cls(**fields, magnitude=jnp.zeros(fields["shape"], jnp.uint32))

    def _block_amax(self) -> Array:
        return from_bits(self.magnitude)

    def _after(self, summary: Summary) -> Self:
        (amax,) = summary
        return dataclasses.replace(self, magnitude=jnp.maximum(self.magnitude, amax))


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MovingAverage(Observer):
    """The exponential moving average of the amax of each block, bias corrected.

    After n good batches amax is the sum of (1 - decay) * decay**(n - i) * amax_i, divided by the
    sum of these weights, 1 - decay**n. Merging adds both sums: it averages over all batches as if
    the states had observed theirs at the same times. (Under `shard_map` it averages the amaxes of
    the devices' parts of a batch; for the amax of whole batches, observe them under `jit`.)

    Attributes:
      spec, shape, count, bad: As in all states.
      decay: What remains of a weight one batch later.
      total: float32 in the shape of the scales, the weighted sum. A subnormal amax may count as 0.
      weight: float32 scalar, the sum of the weights.

    Source: arXiv:1712.05877, section 3.1 (averaged ranges); arXiv:1412.6980, section 3 (the bias).

    Examples:
      >>> observer = qt.scaling.MovingAverage.of("e4m3fn", (2,), decay=0.5)
      >>> for batch in ([1.0, 2.0], [8.0, 4.0]):
      ...     observer = observer.observe(jnp.asarray(batch))
      >>> observer.amax()  # (2 / 4 + 8 / 2) / (1 - 1 / 4)
      Array([6.], dtype=float32)
    """

    decay: float = dataclasses.field(default=0.99, metadata=STATIC)
    total: Array = dataclasses.field(metadata=SUM)
    weight: Array = dataclasses.field(metadata=SUM)

    @classmethod
    def of(cls, spec: SpecLike, shape: tuple[int, ...], *, decay: float = 0.99) -> Self:
        """The state before the first batch.

        Args:
          spec, shape: As in `AbsMax.of`.
          decay: 0 <= decay < 1; 0 is the last batch alone.

        Raises:
          TypeError: As `AbsMax.of`; or `decay` is no number.
          ValueError: As `AbsMax.of`; or `decay` is out of range.
        """
        check_number("MovingAverage.of", "decay", decay)
        if not 0 <= decay < 1:
            raise ValueError(f"MovingAverage.of: decay={decay}, expected 0 <= decay < 1")
        fields = start("MovingAverage.of", spec, shape, zero_point=False)
        total, weight = (jnp.zeros(s, jnp.float32) for s in (fields["shape"], ()))
        return cls(**fields, decay=float(decay), total=total, weight=weight)

    def _block_amax(self) -> Array:
        weight = jnp.where(self.weight > 0, self.weight, jnp.ones_like(self.weight))
        average = quotient(self.total, jnp.broadcast_to(weight, self.total.shape))
        return jnp.minimum(average, _LARGEST)

    def _after(self, summary: Summary) -> Self:
        (amax,) = summary
        old, new = (jnp.float32(share) for share in (self.decay, 1 - self.decay))
        return dataclasses.replace(
            self,
            total=product(self.total, old) + product(from_bits(amax), new),
            weight=product(self.weight, old) + new,
        )


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MinMax(Observer):
    """The least and the largest element of each block over all batches, for integers with a zero
    point. Merging is exact.

    Attributes:
      spec, shape, count, bad: As in all states.
      below, above: uint32 in the shape of the scales, float32 patterns: how far the elements reach
        below and above zero.

    Source: arXiv:1712.05877, section 2.1 (zero point); arXiv:2106.08295, section 3.1 (min-max).

    Examples:
      >>> spec = qt.BlockFormat.tensor("uint8", zero_point=True)
      >>> observer = qt.scaling.MinMax.of(spec, (2,)).observe(jnp.asarray([-1.0, 4.1]))
      >>> observer.scale(), observer.zero_point()  # 5.1 / 255
      (Array([0.02], dtype=float32), Array([50], dtype=int32))
    """

    below: Array = dataclasses.field(metadata=MAX)
    above: Array = dataclasses.field(metadata=MAX)

    @classmethod
    def of(cls, spec: SpecLike, shape: tuple[int, ...]) -> Self:
        """The state before the first batch.

        Args:
          spec: A block format with a zero point.
          shape: As in `AbsMax.of`.

        Raises:
          TypeError: As `AbsMax.of`.
          ValueError: `spec` has no zero point; `shape` does not fit it.
        """
        fields = start("MinMax.of", spec, shape, zero_point=True)
        below, above = (jnp.zeros(fields["shape"], jnp.uint32) for _ in range(2))
        return cls(**fields, below=below, above=above)

    def _block_amax(self) -> Array:
        return from_bits(jnp.maximum(self.below, self.above))

    def range(self) -> tuple[Array, Array]:
        """The least and the largest element, zero included: float32, the shape of the scales."""
        return -from_bits(self.below), from_bits(self.above)

    def scale(self) -> Array:
        """The scales for `quantize(x, spec, scale=..., zero_point=...)`.

        Returns:
          float32 values of the format of the scales, in their shape: (largest - least) / (number
          of codes - 1); positive and finite, 1 where nothing but zeros was observed.
        """
        return _asymmetric(self)[0]

    def zero_point(self) -> Array:
        """The integers that zero becomes: int32, the shape of the scales."""
        return _asymmetric(self)[1]

    def _summary(self, x: Array) -> Summary:
        is_negative, zeros = ordinal(x) < 0, jnp.zeros_like(x)
        sides = (jnp.where(side, x, zeros) for side in (is_negative, ~is_negative))
        return tuple(amax_bits(side, self.spec) for side in sides)

    def _after(self, summary: Summary) -> Self:
        below, above = summary
        return dataclasses.replace(
            self, below=jnp.maximum(self.below, below), above=jnp.maximum(self.above, above)
        )


@jax.jit
def _asymmetric(state: MinMax) -> tuple[Array, Array]:
    assert state.spec.scale is not None
    scale, zero_point = asymmetric(*state.range(), state.spec)
    return from_stored(scale, state.spec.scale), zero_point
