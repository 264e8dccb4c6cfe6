"""Casts, products and quotients with derivatives; both have the same bits in any fusion by XLA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from qtoolkit.casts._affine import product, quotient
from qtoolkit.casts._checks import broadcast_like
from qtoolkit.casts._linear import linear_in_dtype, linear_with_transpose
from qtoolkit.casts._order import widened
from qtoolkit.casts._storage import in_dtype


def differentiable_widened(x: jax.Array) -> jax.Array:
    """`x` as float32; float64 stays float64."""
    return _widened(x) if x.dtype.itemsize < 4 else x


@jax.custom_jvp
def _widened(x: jax.Array) -> jax.Array:
    return widened(x)


@_widened.defjvp
def _widened_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    wide = _widened(*primals)
    return wide, linear_in_dtype(tangents[0], wide.dtype)


def differentiable_in_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """float32 rounded to nearest even to `dtype`."""
    return x if dtype == x.dtype else _in_dtype(x, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _in_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return in_dtype(x, dtype)


@_in_dtype.defjvp
def _in_dtype_jvp(dtype: DTypeLike, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _in_dtype(*primals, dtype), linear_in_dtype(tangents[0], dtype)


@jax.custom_jvp
def straight_through(x: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, whose derivative is that of `x`; both have one shape and dtype."""
    return value


@straight_through.defjvp
def _straight_through_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return straight_through(*primals), tangents[0]


@jax.custom_jvp
def differentiable_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a * b` rounded once to the dtype of `b`; `a` may be wider. Both have one shape."""
    # b first, which `product` protects: XLA would merge a uniform coefficient with what makes b.
    return in_dtype(product(widened(b), widened(a)), b.dtype)


@differentiable_product.defjvp
def _differentiable_product_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (a, b), (a_dot, b_dot) = primals, tangents
    by_a = linear_in_dtype(linear_product(differentiable_widened(b), a_dot), b.dtype)
    return differentiable_product(a, b), by_a + linear_product(a, b_dot)


def linear_product(coefficient: jax.Array, x: jax.Array, *, zero_absorbs: bool = True) -> jax.Array:
    """`coefficient * x` in the dtype of `x`, rounded whatever XLA fuses, as is its transpose."""
    # Where `x`, a tangent or a cotangent, is 0, the product is 0 whatever the coefficient. So a NaN
    # in an element that the loss does not see does not reach the gradient of a scale. A coefficient
    # of 0 times an infinity or NaN is 0 with `zero_absorbs`, as for slopes: a clamped element has
    # no gradient. Without, it is NaN.
    coefficient = jnp.broadcast_to(coefficient, x.shape)
    multiply = _absorbing_product if zero_absorbs else _product_or_zero
    return linear_with_transpose(multiply, multiply, (coefficient,), x)


def _product_or_zero(residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    product = differentiable_product(*residuals, x)
    return jnp.where(broadcast_like(x == 0, product), jnp.zeros_like(product), product)


def _absorbing_product(residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    (coefficient,) = residuals
    product = _product_or_zero(residuals, x)
    return jnp.where(broadcast_like(coefficient == 0, product), jnp.zeros_like(product), product)


@jax.custom_jvp
def differentiable_quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a / b` of float32 by IEEE division, as is its tangent by `a`; `b` broadcasts to `a`."""
    return quotient(a, b)


@differentiable_quotient.defjvp
def _differentiable_quotient_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (a, b), (a_dot, b_dot) = primals, tangents
    y = differentiable_quotient(a, b)
    by_a = linear_quotient(a_dot, b)
    return y, by_a - linear_product(differentiable_quotient(y, b), broadcast_like(b_dot, y))


def linear_quotient(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """`x / divisor` of float32, linear in `x`: IEEE divisions there and back."""
    return linear_with_transpose(_divided, _divided, (jnp.broadcast_to(divisor, x.shape),), x)


def _divided(residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    return differentiable_quotient(x, *residuals)
