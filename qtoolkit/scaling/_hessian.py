"""Sums over the inputs of a matmul: the Hessian of its squared error, and channel magnitudes."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts.internal import check_differentiable, exact_float32
from qtoolkit.scaling._observer import COUNT, MAX, SUM, Mergeable, pytree, saturating_sum

Array = jax.Array


@pytree
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Hessian(Mergeable):
    """Sums over the inputs of a matmul, for `gptq`, `awq_factors` and `smoothing_factors`.

    The squared error of `x @ w` is the sum over columns d of `w - rounded` of d' H d, where H is
    the sum of x x' over all rows x: half of GPTQ's Hessian. Memory: channels**2 numbers of `dtype`,
    67 MB for 4,096 channels in float32. Merging adds; sums do not depend on the batches' order but
    for rounding.

    Attributes:
      total: [..., channels, channels], H. Leading axes: a matmul for each expert or group.
      magnitude: [..., channels], the sum of |x|.
      largest: [..., channels], the largest |x|, float32.
      rows: uint32, the number of rows x; with leading axes, of each matmul.
      bad: uint32 scalar, the batches that held a NaN or an infinity. They changed nothing else.

    Source: arXiv:2210.17323 (GPTQ), section 3; arXiv:2306.00978 (AWQ); arXiv:2211.10438.

    Examples:
      >>> hessian = qt.scaling.Hessian.of(2).observe(jnp.asarray([[1.0, 2.0], [0.0, -3.0]]))
      >>> hessian.total
      Array([[ 1.,  2.],
             [ 2., 13.]], dtype=float32)
      >>> hessian.merge(qt.scaling.Hessian.of(2)), hessian.largest
      (Hessian(2 channels, float32: 2 rows, 0 bad batches), Array([1., 3.], dtype=float32))
    """

    total: Array = dataclasses.field(metadata=SUM)
    magnitude: Array = dataclasses.field(metadata=SUM)
    largest: Array = dataclasses.field(metadata=MAX)
    rows: Array = dataclasses.field(metadata=COUNT)
    bad: Array = dataclasses.field(metadata=COUNT)

    @classmethod
    def of(cls, *shape: int, dtype: DTypeLike = jnp.float32) -> Self:
        """The state before the first batch.

        Args:
          shape: The number of channels; before it, of matmuls with inputs of their own.
          dtype: float32, or float64 where JAX's 64-bit types are on.

        Raises:
          ValueError: Another dtype, float64 without 64-bit types, or no channels.
        """
        wanted = jnp.dtype(dtype)
        if wanted not in (np.float32, np.float64):
            raise ValueError(f"Hessian.of: dtype is {wanted}, expected float32 or float64")
        if wanted != jax.dtypes.canonicalize_dtype(wanted):
            raise ValueError(
                "Hessian.of: dtype is float64, and JAX's 64-bit types are off; write "
                "jax.config.update('jax_enable_x64', True) first"
            )
        if not shape or min(shape) < 1:
            raise ValueError(f"Hessian.of: shape {shape}, expected the number of channels")
        return cls(
            total=jnp.zeros((*shape, shape[-1]), wanted),
            magnitude=jnp.zeros(shape, wanted),
            largest=jnp.zeros(shape, jnp.float32),
            rows=jnp.zeros(shape[:-1], jnp.uint32),
            bad=jnp.zeros((), jnp.uint32),
        )

    @property
    def channels(self) -> int:
        """The number of channels."""
        return int(self.magnitude.shape[-1])

    def observe(self, x: ArrayLike, group_sizes: ArrayLike | None = None) -> Self:
        """The state after one more batch.

        Args:
          x: [..., channels], or [matmuls, ..., channels]; float32, float16 or bfloat16.
          group_sizes: As for `jax.lax.ragged_dot`: x is [rows, channels], and the first rows, as
            many as the first integer says, are those of the first matmul, and so on.

        Returns:
          A state of the same shapes. A batch that holds a NaN or an infinity is skipped.

        Raises:
          TypeError: `x` has another dtype.
          ValueError: It has another number of channels or of matmuls.
        """
        x = lax.stop_gradient(check_differentiable("Hessian.observe", x, wide=False))
        lead = self.magnitude.shape[:-1]
        if group_sizes is not None:
            sizes = jnp.asarray(group_sizes)
            if x.ndim != 2 or (*sizes.shape, x.shape[1]) != self.magnitude.shape:
                raise ValueError(
                    f"Hessian.observe: x has shape {x.shape} and group_sizes {sizes.shape}, "
                    f"expected (rows, {self.channels}) and {lead}"
                )
            return _observed(self, x, sizes)
        if x.ndim <= len(lead) or (*x.shape[: len(lead)], x.shape[-1]) != self.magnitude.shape:
            raise ValueError(
                f"Hessian.observe: x has shape {x.shape}, expected "
                f"({''.join(f'{n}, ' for n in lead)}..., {self.channels})"
            )
        return _observed(self, x, None)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.magnitude.shape))
        rows = self.rows if not self.rows.ndim else f"{self.rows.min()} to {self.rows.max()}"
        return f"Hessian({shape} channels, {self.total.dtype}: {rows} rows, {self.bad} bad batches)"


# The product x' x of each group's rows.
_BY_GROUP = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


@jax.jit
def _observed(state: Hessian, x: Array, group_sizes: Array | None) -> Hessian:
    lead, dtype = state.rows.shape, state.total.dtype
    is_good = jnp.all(jnp.isfinite(x))
    x = jnp.where(is_good, exact_float32(x), np.float32(0))
    if group_sizes is None:
        rows = x.reshape(*lead, -1, x.shape[-1])
        wide, magnitudes = rows.astype(dtype), jnp.abs(rows)
        total: Any = jnp.einsum("...rk,...rl->...kl", wide, wide, precision=lax.Precision.HIGHEST)
        magnitude = jnp.sum(magnitudes, -2, dtype=dtype)
        largest = jnp.max(magnitudes, -2, initial=0)
        # The number of rows may be symbolic.
        count = jnp.full(lead, jnp.asarray(rows.shape[-2]).astype(jnp.uint32))
    else:
        wide, magnitudes, count = x.astype(dtype), jnp.abs(x), group_sizes.astype(jnp.uint32)
        total = lax.ragged_dot_general(
            wide, wide, group_sizes.astype(jnp.int32), _BY_GROUP, precision=lax.Precision.HIGHEST
        )
        # Rows behind the last group have a segment beyond all others, which JAX drops.
        ends = jnp.cumsum(group_sizes)
        segments = jnp.searchsorted(ends, jnp.arange(len(x)), side="right")
        magnitude = jax.ops.segment_sum(magnitudes.astype(dtype), segments, lead[0])
        largest = jnp.maximum(jax.ops.segment_max(magnitudes, segments, lead[0]), 0)
    return Hessian(
        total=state.total + total,
        magnitude=state.magnitude + magnitude,
        largest=jnp.maximum(state.largest, largest),
        rows=saturating_sum(state.rows, jnp.where(is_good, count, np.uint32(0))),
        bad=saturating_sum(state.bad, jnp.where(is_good, np.uint32(0), np.uint32(1))),
    )
