"""Changes of width by patterns, which XLA cannot leave out, with the derivative of an `astype`."""

import functools
from typing import Any

import jax
from jax.typing import DTypeLike

from qtoolkit.casts.internal import in_dtype, product, widened


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


@jax.custom_jvp
def differentiable_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a * b` rounded once to the dtype of `b`; `a` may be wider. Both of one shape."""
    return in_dtype(product(widened(a), widened(b)), b.dtype)


@differentiable_product.defjvp
def _differentiable_product_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (a, b), (a_dot, b_dot) = primals, tangents
    by_a = (a_dot * b.astype(a.dtype)).astype(b.dtype)
    return differentiable_product(a, b), by_a + a.astype(b.dtype) * b_dot
