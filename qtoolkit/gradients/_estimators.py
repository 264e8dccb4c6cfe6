"""Straight-through estimators: slopes that replace the derivative of a rounding."""

import dataclasses
from collections.abc import Hashable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.casts.internal import inside, linear_in_dtype, linear_product, linear_with_transpose
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


@runtime_checkable
class CotangentEstimator(Estimator, Protocol):
    """An estimator whose reverse mode is no slope: it depends on the cotangent.

    Tangents are multiplied by `slope`; cotangents go through `cotangent` instead.

    Examples:
      >>> isinstance(qt.gradients.EWGS(), qt.gradients.CotangentEstimator)
      True
      >>> isinstance(qt.gradients.DSQ(), qt.gradients.CotangentEstimator)
      False
    """

    def cotangent(
        self,
        g: jax.Array,
        x: jax.Array,
        q: jax.Array,
        lower: float,
        upper: float,
        fmt: Format,
    ) -> jax.Array:
        """The cotangent of `x`, for the cotangent `g` of its rounding `q`; all of one dtype.

        Args:
          g, x, q: One shape and dtype, that of the result.
          lower, upper, fmt: As in `slope`.
        """


@dataclasses.dataclass(frozen=True)
class Identity:
    """The straight-through estimator: slope 1 everywhere. Source: arXiv:1308.3432.

    Examples:
      >>> x = jnp.asarray([0.3, 449.0])
      >>> jax.grad(lambda x: qt.fake_cast(x, "e4m3fn", gradient="identity").sum())(x)
      Array([1., 1.], dtype=float32)
    """

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        return jnp.ones_like(x)


@dataclasses.dataclass(frozen=True)
class Clipped:
    """Slope 1 where lower <= x <= upper, else 0; also 0 at the infinities and at NaN.

    A saturated value no longer moves with x; passing its gradient lets x drift further out.
    Source: arXiv:1602.02830 (saturating straight-through estimator), here with the format's range.

    Examples:
      >>> x = jnp.asarray([448.0, 449.0, jnp.inf, jnp.nan])
      >>> jax.grad(lambda x: qt.fake_cast(x, "e4m3fn", gradient="clipped").sum())(x)
      Array([1., 0., 0., 0.], dtype=float32)
    """

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        return inside(x, lower, upper).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Zero:
    """Slope 0 everywhere: the true derivative of a rounding, where it has one.

    Examples:
      >>> jax.grad(lambda x: qt.fake_cast(x, "e4m3fn", gradient=qt.gradients.Zero()))(0.3)
      Array(0., dtype=float32)
    """

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        return jnp.zeros_like(x)


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
        "hashable object with slope(x, lower, upper, fmt), e.g. qtoolkit.gradients.DSQ()"
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
    if isinstance(rule, Identity | Clipped | Zero | CotangentEstimator):
        slope = slope if slope.dtype == x_dot.dtype else slope.astype(x_dot.dtype)
        return times_slope(slope, x_dot)
    return linear_product(slope, x_dot)


def tangent(
    rule: Estimator,
    x: jax.Array,
    q: jax.Array,
    x_dot: jax.Array,
    fmt: Format,
    ends: tuple[float, float] | None = None,
) -> jax.Array:
    """The tangent of `q`, the rounding of `x` to `fmt`, for the tangent `x_dot` of `x`.

    Linear in `x_dot`; the estimator defines its transpose.

    Args:
      x_dot: In the dtype of `x`, or for float32 `x` in a narrower one, which the result has, too.
      ends: The ends of the range; None for those of `fmt`.
    """
    d = slope(rule, x, fmt, ends)
    if not isinstance(rule, CotangentEstimator):
        return slope_times_tangent(rule, d, x_dot)
    residuals = (d, x, lax.stop_gradient(q))
    dot = linear_with_transpose(
        _slope_times_tangent,
        _Cotangent(rule, fmt, _ends(fmt) if ends is None else ends),
        residuals,
        linear_in_dtype(x_dot, x.dtype),
    )
    return linear_in_dtype(dot, x_dot.dtype)


def _slope_times_tangent(residuals: tuple[jax.Array, ...], x_dot: jax.Array) -> jax.Array:
    return times_slope(residuals[0], x_dot)


@dataclasses.dataclass(frozen=True)
class _Cotangent:
    rule: CotangentEstimator
    fmt: Format
    ends: tuple[float, float]

    def __call__(self, residuals: tuple[jax.Array, ...], g: jax.Array) -> jax.Array:
        _, x, q = residuals
        return self.rule.cotangent(g, x, q, *self.ends, self.fmt)
