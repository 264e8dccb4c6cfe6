"""The largest finite magnitude of an array, and the scale that maps it to the largest of a format."""

from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from qtoolkit.casts import check_source, product, quotient, round_values
from qtoolkit.formats import Format

_LEAST_SCALE = np.float32(2.0**-126)  # its reciprocal is finite, and no smaller scale is normal


def amax(x: jax.Array, axis: int | Sequence[int] | None = None) -> jax.Array:
    """The largest finite |x|: infinities and NaNs are left out.

    Args:
      x: float32, float16 or bfloat16, any shape; empty ones have amax 0. Subnormals of float32 and
        bfloat16 may count as zero.
      axis: The axes to reduce; None for all.

    Returns:
      float32, the reduced axes kept with length 1 (all of them kept: rank of `x`), or a scalar where
      `axis` is None.

    Raises:
      TypeError: `x` has another dtype.
    """
    x = check_source("amax", x)
    keepdims = axis is not None
    axes = tuple(range(x.ndim)) if axis is None else axis
    largest = ml_dtypes.finfo(x.dtype).max

    def masked(x: jax.Array) -> jax.Array:
        magnitude = jnp.abs(x)
        finite = jnp.where(magnitude <= largest, magnitude, jnp.zeros_like(magnitude))
        return jnp.max(finite, axis=axes, keepdims=keepdims, initial=0)

    def plain_first(x: jax.Array) -> jax.Array:
        plain = jnp.max(jnp.abs(x), axis=axes, keepdims=keepdims, initial=0)
        return lax.cond(jnp.all(plain <= largest), lambda _: plain, masked, x)

    # XLA's CPU reduces a bare |x| in one pass and a masked one in two, the mask being written out.
    x = lax.stop_gradient(x)
    return lax.platform_dependent(x, cpu=plain_first, default=masked).astype(jnp.float32)


def scale_from_amax(amax: jax.Array, fmt: Format) -> jax.Array:
    """The scale that maps `amax` to the largest finite value of `fmt`: their IEEE quotient.

    Args:
      amax: float32, finite and not negative; not checked.
      fmt: The format that x / scale is to be rounded to.

    Returns:
      Shape of `amax`, float32, at least 2**-126: a zero or tiny `amax` never gives a scale whose
      reciprocal is infinite.
    """
    largest = np.float32(float(Fraction(fmt.max_finite)))
    return jnp.maximum(quotient(amax, jnp.broadcast_to(largest, amax.shape)), _LEAST_SCALE)


def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x / scale in float32, by one reciprocal and a multiplication; `scale` broadcasts."""
    return product(x.astype(jnp.float32), quotient(jnp.ones_like(scale), scale))


def quantized_values(
    x: jax.Array, fmt: Format, saturation: str = "finite"
) -> tuple[jax.Array, jax.Array]:
    """`x` as values of `fmt` and one scale for all of it: x ~ q * scale.

    Args:
      x: float32, float16 or bfloat16, any shape.
      fmt: The format of q; its finite values must fit the dtype of `x`.
      saturation: As in `qtoolkit.round_to_format`.

    Returns:
      q: Shape and dtype of `x`. NaN stays NaN; infinities follow `saturation`.
      scale: float32 scalar, 1 for formats that need none.
    """
    if not fmt.needs_scale:
        return round_values(x, fmt, saturation), jnp.float32(1)
    scale = scale_from_amax(amax(x), fmt)
    return round_values(scaled(x, scale), fmt, saturation).astype(x.dtype), scale
