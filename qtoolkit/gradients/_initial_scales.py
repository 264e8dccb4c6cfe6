"""Initial values of learned scales and offsets, from a first batch or from initial weights."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qtoolkit.casts.internal import exact_float32, round_values
from qtoolkit.formats import Format, FormatLike
from qtoolkit.formats.internal import plain_number
from qtoolkit.gradients._learned import LEAST, check_data_format
from qtoolkit.scaling.internal import check_axes

_KINDS = ("activations", "weights")


def lsq_scale(x: ArrayLike, fmt: FormatLike, axis: int | Sequence[int] | None = None) -> jax.Array:
    """The scale that LSQ starts from: 2 * mean(|x|) / sqrt(Qp).

    Args:
      x: float32, float16 or bfloat16, any shape: initial weights, or a first batch of activations.
        Infinities and NaNs do not count.
      fmt: As in `lsq`, with the largest value Qp.
      axis: The axes that share a scale; None for all.

    Returns:
      float32: the rank of `x`, axes that share a scale with length 1; a scalar where `axis` is
      None. 1 where all of x is zero, else at least 2**-126.

    Raises:
      TypeError, ValueError: As `lsq`; `axis` is no axis of `x`, or comes twice.

    Gradient: none; the scale is a constant of `x`.

    Source: arXiv:1902.08153, section 2.1.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (1000,))
      >>> f"{qt.gradients.lsq_scale(x, 'int4'):.3f}"
      '0.588'
    """
    x, fmt = check_data_format("lsq_scale", x, fmt)
    return _lsq_scale(x, fmt, check_axes("lsq_scale", axis, x.ndim))


def lsq_plus_scale_offset(
    x: ArrayLike,
    fmt: FormatLike,
    axis: int | Sequence[int] | None = None,
    *,
    kind: str = "activations",
    steps: int = 50,
) -> tuple[jax.Array, jax.Array]:
    """The scale and the offset that LSQ+ starts from.

    For activations it starts with scale = (max(x) - min(x)) / (p - n) and offset = min(x) -
    n * scale, where n and p are the lowest and largest value of `fmt`. The paper then minimizes
    ||y - x||**2, without naming a method. Here two steps alternate: round x, then fit scale and
    offset to the rounded values by least squares. No step makes the error larger; they end in a
    local minimum.

    For weights, which stay symmetric, scale = max(|mean - 3 * std|, |mean + 3 * std|) / Qn, where
    Qn = 2**(bits - 1) for integers, else minus the lowest value of `fmt`; offset = 0.

    Args:
      x, fmt, axis: As in `lsq_scale`.
      kind: "activations" or "weights".
      steps: For activations, how often to fit; 0 leaves the scale and offset of the range.

    Returns:
      Scale and offset, each as from `lsq_scale`. Scales that would be 0 are 1; then, activations
      that have but one value have it as their offset.

    Raises:
      TypeError, ValueError: As `lsq`; `kind` is unknown; weights with a format without a sign;
        `steps` is no integer of at least 0.

    Gradient: none; both are constants of `x`.

    Source: arXiv:2004.09576, section 3.2.

    Examples:
      >>> x = jnp.asarray([-0.25, 0.0, 1.0, 3.5])
      >>> scale, offset = qt.gradients.lsq_plus_scale_offset(x, "uint4", steps=0)
      >>> scale, offset  # the range of x in 15 steps
      (Array(0.25, dtype=float32), Array(-0.25, dtype=float32))
    """
    where = "lsq_plus_scale_offset"
    x, fmt = check_data_format(where, x, fmt)
    if kind not in _KINDS:
        raise ValueError(f"{where}: kind={kind!r}, expected one of {', '.join(_KINDS)}")
    if kind == "weights" and fmt.lowest >= 0:
        raise ValueError(
            f"{where}: kind='weights' with {fmt.name}, which has no negative values; expected a "
            "signed format, or kind='activations'"
        )
    steps = plain_number(steps)
    if type(steps) is not int or steps < 0:
        raise ValueError(f"{where}: steps={steps!r}, expected an integer of at least 0")
    if kind == "weights":
        return _of_weights(x, fmt, check_axes(where, axis, x.ndim))
    return _of_activations(x, fmt, check_axes(where, axis, x.ndim), steps)


class _Finite:
    """The finite elements of an array, and their sums over `axis`."""

    def __init__(self, x: jax.Array, axis: tuple[int, ...] | None):
        x = exact_float32(lax.stop_gradient(x))
        self.axis, self.keepdims = axis, axis is not None
        self.is_finite = jnp.isfinite(x)
        self.values = jnp.where(self.is_finite, x, jnp.zeros_like(x))
        count = jnp.sum(self.is_finite, axis, dtype=jnp.float32, keepdims=self.keepdims)
        self.count = jnp.maximum(count, np.float32(1))

    def mean(self, values: jax.Array) -> jax.Array:
        x = jnp.where(self.is_finite, values, jnp.zeros_like(values))
        return jnp.sum(x, self.axis, keepdims=self.keepdims) / self.count

    def least(self) -> jax.Array:
        x = jnp.where(self.is_finite, self.values, np.float32(np.inf))
        return _or_zero(jnp.min(x, self.axis, keepdims=self.keepdims))

    def largest(self) -> jax.Array:
        x = jnp.where(self.is_finite, self.values, np.float32(-np.inf))
        return _or_zero(jnp.max(x, self.axis, keepdims=self.keepdims))


def _or_zero(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def _positive(scale: jax.Array, is_zero: jax.Array) -> jax.Array:
    return jnp.where(is_zero, jnp.ones_like(scale), jnp.maximum(scale, LEAST))


@functools.partial(jax.jit, static_argnames=("fmt", "axis"))
def _lsq_scale(x: jax.Array, fmt: Format, axis: tuple[int, ...] | None) -> jax.Array:
    finite = _Finite(x, axis)
    mean = finite.mean(jnp.abs(finite.values))
    return _positive(mean * (2 / math.sqrt(fmt.max_finite)), mean == 0)


@functools.partial(jax.jit, static_argnames=("fmt", "axis"))
def _of_weights(
    x: jax.Array, fmt: Format, axis: tuple[int, ...] | None
) -> tuple[jax.Array, jax.Array]:
    finite = _Finite(x, axis)
    mean = finite.mean(finite.values)
    deviation = jnp.sqrt(finite.mean(jnp.square(finite.values - mean)))
    largest = jnp.abs(mean) + 3 * deviation  # max(|a - b|, |a + b|) for b >= 0
    scale = _positive(largest / -float(fmt.lowest), largest == 0)
    return scale, jnp.zeros_like(scale)


@functools.partial(jax.jit, static_argnames=("fmt", "axis", "steps"))
def _of_activations(
    x: jax.Array, fmt: Format, axis: tuple[int, ...] | None, steps: int
) -> tuple[jax.Array, jax.Array]:
    finite = _Finite(x, axis)
    n, p = float(fmt.lowest), float(fmt.max_finite)
    least, largest = finite.least(), finite.largest()
    is_one = largest == least
    scale = _positive((largest - least) / (p - n), is_one)
    offset = jnp.where(is_one, least, least - n * scale)

    def fit(_: int, old: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scale, offset = old
        q = round_values((finite.values - offset) / scale, fmt)
        mean_q, mean_x = finite.mean(q), finite.mean(finite.values)
        variance = finite.mean(jnp.square(q - mean_q))
        covariance = finite.mean((q - mean_q) * (finite.values - mean_x))
        fits = (variance > 0) & (covariance > 0)
        new = jnp.maximum(covariance / jnp.where(fits, variance, jnp.ones_like(variance)), LEAST)
        return jnp.where(fits, new, scale), jnp.where(fits, mean_x - new * mean_q, offset)

    return lax.fori_loop(0, steps, fit, (scale, offset))
