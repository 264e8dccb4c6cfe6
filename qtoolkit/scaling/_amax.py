"""The largest finite magnitude of an array, and the scale that maps it to that of a format."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from qtoolkit.casts import Rounding, check_differentiable, product, quotient, round_values
from qtoolkit.formats import Format

Result = TypeVar("Result")

_LEAST_SCALE = np.float32(2.0**-126)  # its reciprocal is finite, and no smaller scale is normal


def amax(x: jax.Array, axis: int | Sequence[int] | None = None) -> jax.Array:
    """The largest finite |x|: infinities and NaNs are left out.

    Args:
      x: float32, float16 or bfloat16, any shape; empty ones have amax 0. Subnormals of float32 and
        bfloat16 may count as zero.
      axis: The axes to reduce; None for all.

    Returns:
      float32: the rank of `x`, reduced axes with length 1; a scalar where `axis` is None.

    Raises:
      TypeError: `x` has another dtype.
    """
    return _with_amax(check_differentiable("amax", x, wide=False), axis, lambda x, amax: amax)


def scale_from_amax(amax: jax.Array, fmt: Format) -> jax.Array:
    """The scale that maps `amax` to the largest finite value of `fmt`: their IEEE quotient.

    Args:
      amax: float32, finite and not negative; not checked.
      fmt: The format that x / scale is to be rounded to.

    Returns:
      Shape of `amax`, float32. 1 where `amax` is zero: zeros stay exact zeros, and infinities
      beside them saturate to the largest finite value. Else at least 2**-126: a tiny `amax` never
      gives a scale whose reciprocal is infinite.
    """
    largest = np.float32(float(fmt.max_finite))
    scale = jnp.maximum(quotient(amax, jnp.broadcast_to(largest, amax.shape)), _LEAST_SCALE)
    return jnp.where(amax == 0, jnp.ones_like(scale), scale)


def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """X / scale in float32, by one reciprocal and a multiplication; `scale` broadcasts."""
    return product(x.astype(jnp.float32), quotient(jnp.ones_like(scale), scale))


def quantized_values(
    x: jax.Array,
    fmt: Format,
    rounding: Rounding = "nearest_even",
    saturation: str = "finite",
    random: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`x` as values of `fmt` and one scale for all of it: x ~ q * scale.

    Args:
      x: float32, float16 or bfloat16, any shape.
      fmt: The format of q; its finite values must fit the dtype of `x`.
      rounding, saturation: As in `qtoolkit.round_to_format`.
      random: uint32 random bits in the shape of `x`, for stochastic rounding.

    Returns:
      q: Shape and dtype of `x`. NaN stays NaN; infinities follow `saturation`.
      scale: float32 scalar, 1 for formats that need none.
    """
    x = lax.stop_gradient(x)
    if not fmt.needs_scale:
        return round_values(x, fmt, rounding, saturation, random), jnp.float32(1)

    def rounded(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = scale_from_amax(amax, fmt)
        q = round_values(scaled(x, scale), fmt, rounding, saturation, random)
        return q.astype(x.dtype), scale

    return _with_amax(x, None, rounded)


def _with_amax(
    x: jax.Array,
    axis: int | Sequence[int] | None,
    use: Callable[[jax.Array, jax.Array], Result],
) -> Result:
    """`use(x, amax)`. On CPU in a branch of its own, which pays twice.

    XLA's CPU reduces a bare |x| in one pass and a masked one in two, the mask being written out;
    and it would otherwise fuse `use` into every transposed copy that a product makes of it.
    """
    axes = tuple(range(x.ndim)) if axis is None else axis
    largest = ml_dtypes.finfo(x.dtype).max

    def plain(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), axis=axes, keepdims=axis is not None, initial=0)

    def masked(x: jax.Array) -> Result:
        finite = jnp.where(jnp.abs(x) <= largest, x, jnp.zeros_like(x))
        return use(x, plain(finite).astype(jnp.float32))

    def plain_first(x: jax.Array) -> Result:
        amax = plain(x)
        return lax.cond(
            jnp.all(amax <= largest), lambda x: use(x, amax.astype(jnp.float32)), masked, x
        )

    return lax.platform_dependent(lax.stop_gradient(x), cpu=plain_first, default=masked)
