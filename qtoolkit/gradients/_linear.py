"""Products with parameters that broadcast, whose transposes sum in float32 or float64."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from qtoolkit.casts.internal import (
    differentiable_product,
    in_dtype,
    linear_with_transpose,
    widened,
)


def broadcast_product(coefficient: jax.Array, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`coefficient * x`, rounded to `dtype`; linear in `x`, which broadcasts.

    Its transpose sums in the dtype of the coefficient. Where the cotangent is 0, it adds 0 even if
    the coefficient is a NaN or an infinity, for which 0 * coefficient would be NaN.

    Args:
      coefficient: float32 or float64.
      x: The same or a narrower float dtype, of the rank of `coefficient`.
    """
    sharding = jax.typeof(x).sharding
    explicit = sharding if sharding.mesh.explicit_axes else None
    transpose = _ProductTransposed(x.shape, x.dtype, explicit)
    return linear_with_transpose(_Product(jnp.dtype(dtype)), transpose, (coefficient,), x)


@dataclasses.dataclass(frozen=True)
class _Product:
    dtype: DTypeLike

    def __call__(self, residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        factor = jnp.broadcast_to(widened(x), residuals[0].shape)
        return in_dtype(differentiable_product(residuals[0], factor), self.dtype)


@dataclasses.dataclass(frozen=True)
class _ProductTransposed:
    shape: tuple[int, ...]
    dtype: DTypeLike
    sharding: jax.sharding.Sharding | None

    def __call__(self, residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> jax.Array:
        wide = widened(cotangent)
        zero = jnp.zeros_like(wide)
        terms = jnp.where(wide == 0, zero, differentiable_product(residuals[0], wide))
        summed = [
            i
            for i, (n, wide_n) in enumerate(zip(self.shape, terms.shape, strict=True))
            if n != wide_n
        ]
        total = in_dtype(jnp.sum(terms, axis=summed, keepdims=True), self.dtype)
        return total if self.sharding is None else jax.sharding.reshard(total, self.sharding)
