"""Straight-through estimators: slopes that replace the derivative of a rounding."""

import dataclasses
import math
import numbers
from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import differentiable_widened, is_within, linear_product
from qtoolkit.formats import Format


@runtime_checkable
class Estimator(Protocol):
    """A frozen, hashable rule for the slope of a rounding.

    Examples:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Half:
      ...     def slope(self, x, lower, upper, fmt):
      ...         return jnp.full_like(x, 0.5)
      >>> isinstance(Half(), qt.gradients.Estimator)
      True
      >>> jax.grad(lambda x: qt.fake_cast(x, "e4m3fn", gradient=Half()))(0.3)
      Array(0.5, dtype=float32)
    """

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        """The slope at `x`, in its shape and dtype.

        Second derivatives differentiate it as the function of `x` that it is.

        Args:
          x: What is rounded: in `fake_convert`, after scale and shift.
          lower, upper: The finite range of `fmt`.
          fmt: The format that `x` is rounded to.
        """


@dataclasses.dataclass(frozen=True)
class Identity:
    """The straight-through estimator: slope 1 everywhere. Source: arXiv:1308.3432."""

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        return jnp.ones_like(x)


@dataclasses.dataclass(frozen=True)
class Clipped:
    """Slope 1 where lower <= x <= upper, else 0; also 0 at the infinities and at NaN.

    A saturated value no longer moves with x; passing its gradient lets x drift further out.
    Source: arXiv:1602.02830 (saturating straight-through estimator), here with the format's range.
    """

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        return is_within(x, lower, upper).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Zero:
    """Slope 0 everywhere: the true derivative of a rounding, where it has one."""

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        return jnp.zeros_like(x)


@dataclasses.dataclass(frozen=True)
class Ramp:
    """Slope 1 within the format's range, falling linearly to 0 over a flank on either side.

    Values just beyond the range can still come back; far ones no longer drift. 0 at NaN and at the
    infinities.

    Attributes:
      width: The width of each flank, as a part of `upper - lower`; positive. As it goes to 0 the
        ramp becomes "clipped", as it grows "identity".

    Source: no published one; the saturating estimator of arXiv:1602.02830 with a flank in place of
    its jump.

    Examples:
      >>> ramp = qt.gradients.Ramp(width=0.5)
      >>> x = jnp.asarray([448.0, 560.0, 672.0, 896.0])  # a flank is 0.5 * 896 wide
      >>> jax.grad(lambda x: qt.fake_cast(x, "e4m3fn", gradient=ramp).sum())(x)
      Array([1.  , 0.75, 0.5 , 0.  ], dtype=float32)
    """

    width: float

    def __post_init__(self) -> None:
        width: Any = self.width
        is_number = isinstance(width, numbers.Real) and not isinstance(width, bool)
        if not is_number or not 0 < width < math.inf:
            raise ValueError(f"Ramp: width={width!r}, expected a finite number above 0")
        object.__setattr__(self, "width", float(width))

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        wide = differentiable_widened(x)
        # Halves, since the length of a range may overflow.
        half = jnp.where(wide > upper, wide / 2 - upper / 2, lower / 2 - wide / 2)
        length = self.width * (upper / 2 - lower / 2)
        way = _over(half, min(max(length, 2.0**-126), 2.0**250))  # factors within float32
        flank = 1 - lax.clamp(np.array(0, way.dtype), way, np.array(1, way.dtype))
        flank = jnp.where(x == x, flank, jnp.zeros_like(flank))
        return jnp.where(is_within(x, lower, upper), jnp.ones_like(flank), flank).astype(x.dtype)


def _over(x: jax.Array, length: float) -> jax.Array:
    """`x / length` by two products, because the reciprocal of a format's range may be subnormal."""
    # The clamp changes only infinities, and keeps a compiler from merging the two products.
    significand, exponent = math.frexp(length)
    first = exponent // 2
    largest = np.array(jnp.finfo(x.dtype).max, x.dtype)
    part = lax.clamp(-largest, x * 2.0**-first, largest)
    return part * (2.0 ** (first - exponent) / significand)


ESTIMATORS: dict[str, Estimator] = {"identity": Identity(), "clipped": Clipped(), "zero": Zero()}


def estimator(where: str, gradient: str | Estimator) -> Estimator:
    """The estimator that `gradient` names or is."""
    if isinstance(gradient, str) and gradient in ESTIMATORS:
        return ESTIMATORS[gradient]
    if (
        not isinstance(gradient, str | type)
        and isinstance(gradient, Estimator)
        and isinstance(gradient, Hashable)
    ):
        return gradient
    raise ValueError(
        f"{where}: gradient={gradient!r}, expected one of {', '.join(ESTIMATORS)} or a "
        "hashable object with slope(x, lower, upper, fmt), e.g. qtoolkit.gradients.Ramp(0.5)"
    )


def slope(
    rule: Estimator, x: jax.Array, fmt: Format, ends: tuple[float, float] | None = None
) -> jax.Array:
    """The slope at `x`, with these ends of the range; None for those of `fmt`."""
    ends = _ends(fmt) if ends is None else ends
    return jnp.asarray(rule.slope(x, *ends, fmt))  # a user's rule may return a number


def _ends(fmt: Format) -> tuple[float, float]:
    return float(fmt.lowest), float(fmt.max_finite)


def times_slope(slope: jax.Array, factor: jax.Array) -> jax.Array:
    """`slope * factor`, and 0 where the slope is: no NaN from an infinite factor."""
    return jnp.where(slope == 0, jnp.zeros_like(factor), slope * factor)


def slope_times_tangent(rule: Estimator, slope: jax.Array, x_dot: jax.Array) -> jax.Array:
    """`times_slope` of a tangent, in its dtype; linear in it."""
    # Slopes of 0 and 1 need no rounding. With others `linear_product` rounds the product and its
    # transpose: XLA would skip the rounding of a bfloat16 product that is widened in the same
    # `jit`, and contract a float32 one with an addition.
    if isinstance(rule, Identity | Clipped | Zero):
        slope = slope if slope.dtype == x_dot.dtype else slope.astype(x_dot.dtype)
        return times_slope(slope, x_dot)
    return linear_product(slope, x_dot)


def tangent(
    rule: Estimator,
    x: jax.Array,
    x_dot: jax.Array,
    fmt: Format,
    ends: tuple[float, float] | None = None,
) -> jax.Array:
    """The tangent of the rounding of `x` to `fmt`, for the tangent `x_dot` of `x`.

    Args:
      x_dot: In the dtype of `x`, or for float32 `x` in a narrower one, which the result has, too.
      ends: The ends of the range; None for those of `fmt`.
    """
    return slope_times_tangent(rule, slope(rule, x, fmt, ends), x_dot)
