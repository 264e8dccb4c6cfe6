"""The largest finite magnitude of an array."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from qtoolkit.casts.internal import check_differentiable, exact_float32
from qtoolkit.scaling._blocks import magnitude_max


def amax(x: jax.Array, axis: int | Sequence[int] | None = None) -> jax.Array:
    """The largest finite |x|. Infinities and NaNs do not count.

    Args:
      x: float32, float16 or bfloat16, any shape; empty ones have amax 0. Subnormals count.
      axis: The axes to reduce; None for all.

    Returns:
      float32: the rank of `x`, reduced axes with length 1; a scalar where `axis` is None.

    Raises:
      TypeError: `x` has another dtype; `axis` is something else.
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
    axes = check_axes("amax", axis, x.ndim)
    magnitude = magnitude_max(x, tuple(range(x.ndim)) if axes is None else axes, nan_wins=False)
    return exact_float32(magnitude.reshape(()) if axes is None else magnitude)


def check_axes(where: str, axis: Any, ndim: int) -> tuple[int, ...] | None:
    """The axes that `axis` names, from 0 up and rising; None for all."""
    if axis is None:
        return None
    try:
        axes = tuple(map(operator.index, axis if isinstance(axis, Sequence) else (axis,)))
    except TypeError:
        raise TypeError(
            f"{where}: axis={axis!r}, expected None, an integer or several of them"
        ) from None
    if any(not -ndim <= a < ndim for a in axes) or len({a % ndim for a in axes}) < len(axes):
        raise ValueError(
            f"{where}: axis={axis} of an array with {ndim} axes, expected different axes from "
            f"{-ndim} to {ndim - 1}"
        )
    return tuple(sorted(a % ndim for a in axes))


def checked_axis(where: str, name: str, array: jax.Array, axis: int) -> int:
    """`axis` counted from the front; ValueError where `array` has none such."""
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{where}: axis {axis} of {name}, an array of shape {array.shape}, expected "
            + (f"{-array.ndim} to {array.ndim - 1}" if array.ndim else "an array with an axis")
        )
    return axis % array.ndim
