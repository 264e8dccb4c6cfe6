"""Floats as integers in the same order, so that subnormals count and steps can be counted."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts._bits import exact_float32
from qtoolkit.casts._elementwise import elementwise


@elementwise
def ordinal(x: jax.Array) -> jax.Array:
    """The places of floats in their order, as signed integers of their width."""
    # 0 for both zeros, 1 for the least subnormal, -1 for its negative. Infinities come after all
    # numbers, NaNs after infinities.
    integer = np.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, np.array(np.iinfo(integer).min, integer) - bits, bits)


def ordinal_of(value: float, dtype: DTypeLike) -> np.ndarray:
    """`ordinal` of a constant, which `dtype` must hold."""
    number = np.array(value, dtype)
    integer = np.dtype(f"int{8 * number.dtype.itemsize}")
    bits = int(number.view(integer))
    return np.array(bits if bits >= 0 else np.iinfo(integer).min - bits, integer)


def is_within(x: jax.Array, lower: float, upper: float) -> jax.Array:
    """Whether lower <= x <= upper, also between subnormals, which XLA may compare as zeros."""
    # False at NaN. The dtype of `widened(x)` must hold the bounds.
    wide = widened(x)
    place = ordinal(wide)
    return (place >= ordinal_of(lower, wide.dtype)) & (place <= ordinal_of(upper, wide.dtype))


def widened(x: jax.Array) -> jax.Array:
    """`x` as float32, subnormals included; float64 stays float64."""
    return x if x.dtype == jnp.float64 else exact_float32(x)


@elementwise
def magnitude_ordinal(x: jax.Array) -> jax.Array:
    """`ordinal` of |x|, as unsigned integers; `infinity_ordinal` or more if x is not finite."""
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, unsigned)
    return bits & unsigned.type(2 ** (8 * unsigned.itemsize - 1) - 1)


@elementwise
def from_magnitude_ordinal(place: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The number of `dtype`, not negative, whose `magnitude_ordinal` is `place`."""
    return lax.bitcast_convert_type(place, dtype)


def infinity_ordinal(dtype: DTypeLike) -> np.unsignedinteger:
    """`magnitude_ordinal` of the infinities of `dtype`."""
    unsigned = np.dtype(f"uint{ml_dtypes.finfo(dtype).bits}")
    return unsigned.type(np.asarray(np.inf, dtype).view(unsigned))


def bucket(x: jax.Array, bits: int | np.ndarray, *, upper: bool = False) -> jax.Array:
    """The buckets of float32 magnitudes, uint32: each binade has 2**bits of equal width."""
    # With `upper` a bucket holds its upper edge instead of its lower one; zero must not occur.
    return (magnitude_ordinal(x) - np.uint32(upper)) >> (np.uint32(23) - np.uint32(bits))


def bucket_edge(buckets: jax.Array, bits: int | np.ndarray) -> jax.Array:
    """The `magnitude_ordinal` of the lower edge of a bucket."""
    return buckets << np.uint32(23 - bits)
