"""How well a format holds an array: error, saturation, underflow, and which codes are used."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from qtoolkit.casts import Projection, Stochastic
from qtoolkit.casts.internal import (
    check_differentiable,
    exact_float32,
    hinting,
    serializable,
    types_of,
)
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.scaling._blocks import blocks_of, explicit_spec
from qtoolkit.scaling._elements import Scales
from qtoolkit.scaling._engine import (
    block_codes,
    dequantized,
    scaled_values,
)
from qtoolkit.scaling._error_sums import error_sums
from qtoolkit.scaling._find_scales import find_scales, in_float32
from qtoolkit.scaling._quantize import check_quantize
from qtoolkit.scaling._scales import unclamped_range


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Metrics:
    """The error of a quantized array. A pytree of arrays, all scalars but `histogram`.

    Attributes:
      sqnr_db: float32, 10 log10(sum x^2 / sum (x - y)^2) over the elements that are finite in x and
        y; infinite where y is exact, NaN where there are no such elements.
      max_error: float32, the largest |x - y| of the same elements.
      cosine: float32, the cosine of the angle between x and y, over the same elements; 1 where both
        are zero, 0 where one is.
      saturated: float32, the fraction of the elements that were clamped: x / scale lies more than
        half a step beyond the finite range of the element format, whatever the rounding. Infinities
        are among them.
      flushed: float32, the fraction of the finite elements other than zero that became zero.
      nonfinite: uint32, how many elements of x are NaN or infinite.
      histogram: uint32 [2**bits], how often each code occurs; None for elements of more than 8
        bits.
    """

    sqnr_db: jax.Array
    max_error: jax.Array
    cosine: jax.Array
    saturated: jax.Array
    flushed: jax.Array
    nonfinite: jax.Array
    histogram: jax.Array | None

    def __repr__(self) -> str:
        is_known = isinstance(self.sqnr_db, jax.Array | np.ndarray | np.generic)
        if not is_known or isinstance(self.sqnr_db, jax.core.Tracer) or np.ndim(self.sqnr_db):
            fields = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self))
            return f"Metrics({', '.join(fields)})"
        parts = [
            f"SQNR {float(self.sqnr_db):.2f} dB",
            f"max error {float(self.max_error):.4g}",
            f"cosine {float(self.cosine):.6f}",
            f"saturated {100 * float(self.saturated):.3g} %",
            f"underflowed {100 * float(self.flushed):.3g} %",
            f"{int(self.nonfinite)} not finite",
        ]
        if self.histogram is not None:
            parts.append(f"{np.count_nonzero(self.histogram)} of {len(self.histogram)} codes used")
        return f"Metrics({', '.join(parts)})"


@overload
def metrics(  # type: ignore[overload-overlap]  # a string is a sequence of strings
    x: ArrayLike,
    spec: SpecLike,
    *,
    scale: ArrayLike | None = ...,
    tensor_scale: ArrayLike | None = ...,
    zero_point: ArrayLike | None = ...,
    rounding: str | Stochastic = ...,
    saturation: str = ...,
    key: jax.Array | None = ...,
    random_bits: ArrayLike | None = ...,
    index_offset: ArrayLike = ...,
) -> Metrics: ...


@overload
def metrics(
    x: ArrayLike,
    spec: Sequence[SpecLike],
    *,
    scale: ArrayLike | None = ...,
    tensor_scale: ArrayLike | None = ...,
    zero_point: ArrayLike | None = ...,
    rounding: str | Stochastic = ...,
    saturation: str = ...,
    key: jax.Array | None = ...,
    random_bits: ArrayLike | None = ...,
    index_offset: ArrayLike = ...,
) -> dict[str, Metrics]: ...


@hinting
def metrics(
    x: ArrayLike,
    spec: SpecLike | Sequence[SpecLike],
    *,
    scale: ArrayLike | None = None,
    tensor_scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> Metrics | dict[str, Metrics]:
    """Quantize `x` and measure the error.

    y is the float32 value of `quantize(x, spec, ...)`, before any rounding to the dtype of `x`.
    Sums are compensated: right to 1e-6 of their value for up to 2**32 elements of any magnitudes,
    SQNR to 1e-4 dB; in arrays that reach 2**60, errors below 2**-126 count as 0. Counts are exact.

    Args:
      x, spec, scale, tensor_scale, zero_point, rounding, saturation, key, random_bits,
        index_offset: As in `quantize`. A list of specs is measured one after the other.

    Returns:
      `Metrics`: SQNR, largest error, cosine, fractions that saturated and became zero, how many
      elements are not finite, and the histogram of codes. Of a list a dictionary of these, by the
      names of the formats.

    Raises:
      TypeError, ValueError: As `quantize`.

    Gradient: zero. Under `vmap`, one set of metrics for each array.

    Examples:
      >>> x = jnp.asarray([0.0005, 0.5, 3.0, 900.0])
      >>> for scale in (1.0, None):  # given, where 900 saturates; from x
      ...     m = qt.metrics(x, "e4m3fn", scale=scale)
      ...     print(f"{m.sqnr_db:.1f} dB, saturated {m.saturated}, to zero {m.flushed}")
      6.0 dB, saturated 0.25, to zero 0.25
      96.4 dB, saturated 0.0, to zero 0.25
    """
    options = scale, tensor_scale, zero_point, rounding, saturation, key, random_bits, index_offset
    if isinstance(spec, list | tuple):
        named = {one.name if isinstance(one, BlockFormat) else str(one): one for one in spec}
        return {name: _metrics_of(x, one, *options) for name, one in named.items()}
    return _metrics_of(x, spec, *options)  # type: ignore[arg-type]


def _metrics_of(x: ArrayLike, spec: SpecLike, *options: Any) -> Metrics:
    array, block_format, fixed, projection = check_quantize("metrics", x, spec, *options)
    array = array if isinstance(array, np.ndarray) else lax.stop_gradient(array)
    with types_of(array):
        return _metrics(array, lax.stop_gradient(fixed), projection, block_format)


def sqnr_db(x: ArrayLike, y: ArrayLike) -> jax.Array:
    """Signal to quantization noise: 10 log10(sum x^2 / sum (x - y)^2), in decibels.

    Args:
      x: float32, float16 or bfloat16, any shape, not empty.
      y: The quantized version of `x`: same shape, one of these dtypes.

    Returns:
      float32 scalar, right to 1e-4 dB: see `metrics`. Over elements that are finite in both;
      infinite where they are equal, NaN where there are none.

    Raises:
      TypeError: Another dtype.
      ValueError: The shapes differ, or are empty.

    Gradient: zero.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (10_000,))
      >>> for fmt in ("int4", "int8", "e4m3fn"):
      ...     y = qt.quantize(x, fmt).dequantize()
      ...     print(f"{fmt}: {qt.scaling.sqnr_db(x, y):.1f} dB")
      int4: 16.0 dB
      int8: 41.1 dB
      e4m3fn: 31.6 dB
    """
    x = check_differentiable("sqnr_db", x, wide=False)
    y = check_differentiable("sqnr_db", y, wide=False)
    if x.shape != y.shape or 0 in x.shape:
        raise ValueError(
            f"sqnr_db: x has shape {x.shape}, y {y.shape}, expected the same, with at least one "
            "element"
        )
    return _sqnr(lax.stop_gradient(x), lax.stop_gradient(y))


@jax.jit
def _sqnr(x: jax.Array, y: jax.Array) -> jax.Array:
    nothing = jnp.zeros_like(x, dtype=bool)
    return error_sums(exact_float32(x), exact_float32(y), nothing).sums.sqnr_db


@functools.partial(jax.jit, static_argnums=3)
def _metrics(
    x: jax.Array | np.ndarray, fixed: Scales, projection: Projection, spec: BlockFormat
) -> Metrics:
    x = jnp.asarray(x)
    scales, nonzero = find_scales(x, spec, fixed)
    codes = block_codes(x, spec, projection, scales, nonzero)
    y = dequantized(codes, scales, blocks_of(x, spec), spec, jnp.float32)
    saturated = saturates(x, scaled_values(x, spec, scales), spec)
    errors, _, max_error = error_sums(in_float32(x), y, saturated)
    return Metrics(
        sqnr_db=errors.sqnr_db,
        max_error=max_error,
        cosine=errors.cosine,
        saturated=errors.saturated_fraction,
        flushed=errors.flushed_fraction,
        nonfinite=errors.nonfinite,
        histogram=occurrences(codes, 2**spec.element.bits) if spec.element.bits <= 8 else None,
    )


def saturates(x: jax.Array, u: jax.Array, spec: BlockFormat) -> jax.Array:
    """Which elements of `x` rounding to nearest clamps; `u` are its `scaled_values`."""
    lowest, highest = map(u.dtype.type, unclamped_range(spec))
    is_beyond = (u < lowest) | (u > highest)
    return is_beyond | jnp.isinf(x)


def occurrences(integers: jax.Array, count: int) -> jax.Array:
    """uint32[count]: how often each of the integers below `count` occurs in an array."""
    # On an Explicit mesh the sharding of the result must be said; elsewhere it must not.
    sharded = any(entry is not None for entry in explicit_spec(integers))
    where: dict[str, Any] = {"out_sharding": PartitionSpec()} if sharded else {}
    return jnp.zeros(count, jnp.uint32).at[integers].add(np.uint32(1), mode="drop", **where)
