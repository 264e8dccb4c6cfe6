"""The largest finite magnitude of an array."""

from collections.abc import Sequence

import jax
from jax import lax

from qtoolkit.casts.internal import check_differentiable, exact_float32
from qtoolkit.scaling._blocks import magnitude_max


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

    Examples:
      >>> x = jnp.asarray([[1.0, -3.0], [jnp.inf, 2.0], [jnp.nan, 0.5]])
      >>> qt.scaling.amax(x)
      Array(3., dtype=float32)
      >>> qt.scaling.amax(x, axis=-1)
      Array([[3. ],
             [2. ],
             [0.5]], dtype=float32)
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
