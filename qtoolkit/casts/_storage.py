"""float32 numbers as arrays of narrower types hold them, and back, bit by bit.

XLA may widen a half-precision number before it was ever rounded, and leave out a narrowing that a
widening follows. Reading and writing patterns is immune to both.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from qtoolkit.casts._bits import codes_from_dtype, dtype_from_codes, from_pattern, pattern
from qtoolkit.casts._projection import NEAREST, UNCLAMPED, Projection
from qtoolkit.casts._sources import codes_of, round_values, values_of
from qtoolkit.formats import FLOAT32, FloatFormat, format


def in_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 rounded to nearest even to float16, bfloat16 or float32; infinite on overflow."""
    return from_pattern(pattern(rounded_to(x, dtype)), dtype)


def rounded_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The float32 values of `in_dtype`."""
    return x if dtype == jnp.float32 else round_values(x, format(dtype), UNCLAMPED)


def to_stored(x: jax.Array, fmt: FloatFormat, projection: Projection = NEAREST) -> jax.Array:
    """float32 `x` rounded to `fmt`: in the format's own dtype, or its codes where it has none."""
    if fmt == FLOAT32:
        return x
    codes = codes_of(x, fmt, projection)
    return codes if fmt.dtype is None else dtype_from_codes(codes, fmt)


def from_stored(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The float32 values, subnormals included, of what `to_stored` gave."""
    if fmt == FLOAT32:
        return x
    codes = x if fmt.dtype is None else codes_from_dtype(x, fmt)
    return values_of(codes, fmt, jnp.float32)
