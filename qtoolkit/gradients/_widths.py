"""Changes of width by patterns, which XLA cannot leave out, with the derivative of an `astype`."""

import functools
from typing import Any

import jax
from jax.typing import DTypeLike

from qtoolkit.casts.internal import in_dtype, widened


def differentiable_widened(x: jax.Array) -> jax.Array:
    """`x` as float32, float64 as it is."""
    return _widened(x) if x.dtype.itemsize < 4 else x


@jax.custom_jvp
def _widened(x: jax.Array) -> jax.Array:
    return widened(x)


@_widened.defjvp
def _widened_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    wide = _widened(*primals)
    return wide, tangents[0].astype(wide.dtype)


def differentiable_in_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 rounded to nearest even to `dtype`."""
    return x if dtype == x.dtype else _in_dtype(x, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _in_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return in_dtype(x, dtype)


@_in_dtype.defjvp
def _in_dtype_jvp(dtype: DTypeLike, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _in_dtype(*primals, dtype), tangents[0].astype(dtype)
