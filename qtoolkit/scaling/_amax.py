"""The largest finite magnitude of an array, and its values with one scale for all of it."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
from jax import lax

from qtoolkit.casts import Rounding, check_differentiable, exact_float32, round_values
from qtoolkit.formats import Format
from qtoolkit.scaling._blocks import magnitude_max
from qtoolkit.scaling._scales import scale_from_amax, scaled

Result = TypeVar("Result")


def amax(x: jax.Array, axis: int | Sequence[int] | None = None) -> jax.Array:
    """The largest finite |x|: infinities and NaNs are left out.

    Args:
      x: float32, float16 or bfloat16, any shape; empty ones have amax 0. Subnormals count.
      axis: The axes to reduce; None for all.

    Returns:
      float32: the rank of `x`, reduced axes with length 1; a scalar where `axis` is None.

    Raises:
      TypeError: `x` has another dtype.
      ValueError: An axis is out of range, or comes twice.
    """
    x = lax.stop_gradient(check_differentiable("amax", x, wide=False))
    axes = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else axis
    if any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) < len(axes):
        raise ValueError(
            f"amax: axis={axis} of an array with {x.ndim} axes, expected different axes from "
            f"{-x.ndim} to {x.ndim - 1}"
        )
    found = magnitude_max(x, tuple(sorted(a % x.ndim for a in axes)), nan_wins=False)
    return exact_float32(found.reshape(()) if axis is None else found)


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

    return _with_amax(x, rounded)


def _with_amax(x: jax.Array, use: Callable[[jax.Array, jax.Array], Result]) -> Result:
    """`use(x, amax)`. On CPU in a branch of its own, which pays twice.

    XLA's CPU reduces a bare |x| in one pass and a masked one in two, the mask being written out;
    and it would otherwise fuse `use` into every transposed copy that a product makes of it.
    """
    largest = ml_dtypes.finfo(x.dtype).max

    def plain(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), initial=0)

    def masked(x: jax.Array) -> Result:
        finite = jnp.where(jnp.abs(x) <= largest, x, jnp.zeros_like(x))
        return use(x, plain(finite).astype(jnp.float32))

    def plain_first(x: jax.Array) -> Result:
        amax = plain(x)
        return lax.cond(
            jnp.all(amax <= largest), lambda x: use(x, amax.astype(jnp.float32)), masked, x
        )

    return lax.platform_dependent(lax.stop_gradient(x), cpu=plain_first, default=masked)
