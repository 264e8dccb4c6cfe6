"""Straight-through estimators: what stands for the derivative of a rounding."""

import dataclasses
from collections.abc import Hashable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.formats import Format
from qtoolkit.gradients._linear import linear_with_transpose


@runtime_checkable
class Estimator(Protocol):
    """A frozen, hashable rule for the slope of a rounding."""

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
    """1 everywhere. Source: arXiv:1308.3432 (the straight-through estimator)."""

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        return jnp.ones_like(x)


@dataclasses.dataclass(frozen=True)
class Clipped:
    """1 where lower <= x <= upper, else 0; also 0 at the infinities and at NaN.

    A saturated value no longer moves with x; passing its gradient lets x drift further out.
    Source: arXiv:1602.02830 (saturating straight-through estimator), here with the format's range.
    """

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        return inside(x, lower, upper).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Zero:
    """0 everywhere: the true derivative of a rounding, where it has one."""

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


def slope(rule: Estimator, x: jax.Array, fmt: Format) -> jax.Array:
    return rule.slope(x, float(fmt.lowest), float(fmt.max_finite), fmt)


def times_slope(slope: jax.Array, factor: jax.Array) -> jax.Array:
    """Slope * factor, and 0 where the slope is: no NaN from an infinite factor."""
    return jnp.where(slope == 0, jnp.zeros_like(factor), slope * factor)


def tangent(
    rule: Estimator, x: jax.Array, q: jax.Array, x_dot: jax.Array, fmt: Format
) -> jax.Array:
    """The tangent of `q`, the rounding of `x` to `fmt`, for the tangent `x_dot` of `x`.

    Linear in `x_dot`; what its transpose does is up to the estimator.
    """
    d = slope(rule, x, fmt)
    if not isinstance(rule, CotangentEstimator):
        return times_slope(d, x_dot)
    residuals = (d, x, lax.stop_gradient(q))
    return linear_with_transpose(_slope_times_tangent, _Cotangent(rule, fmt), residuals, x_dot)


def _slope_times_tangent(residuals: tuple[jax.Array, ...], x_dot: jax.Array) -> jax.Array:
    return times_slope(residuals[0], x_dot)


@dataclasses.dataclass(frozen=True)
class _Cotangent:
    rule: CotangentEstimator
    fmt: Format

    def __call__(self, residuals: tuple[jax.Array, ...], g: jax.Array) -> jax.Array:
        _, x, q = residuals
        lower, upper = float(self.fmt.lowest), float(self.fmt.max_finite)
        return self.rule.cotangent(g, x, q, lower, upper, self.fmt)


def inside(x: jax.Array, lower: float, upper: float) -> jax.Array:
    """Whether lower <= x <= upper, also between subnormals, which XLA may compare as zeros."""
    place = rank(widened(x))
    return (place >= rank_of(lower, place.dtype)) & (place <= rank_of(upper, place.dtype))


def widened(x: jax.Array) -> jax.Array:
    """`x` in float32, float64 as it is; exactly, with bfloat16's subnormals."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
        return lax.bitcast_convert_type(bits, jnp.float32)
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    """What slopes of that dtype are computed in: float32, float64 for float64."""
    return np.dtype("float64" if dtype == jnp.float64 else "float32")


def rank(x: jax.Array) -> jax.Array:
    """The place of float32 or float64 in their order, as integers: 0 for both zeros, NaN beyond."""
    integer = jnp.int32 if x.dtype == jnp.float32 else jnp.int64
    bits = lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, np.array(np.iinfo(integer).min, integer) - bits, bits)


def rank_of(value: float, dtype: np.dtype) -> np.ndarray:
    """`rank` of a constant, which the float as wide as the integer `dtype` must hold."""
    bits = int(np.array(value, f"float{8 * dtype.itemsize}").view(dtype))
    return np.array(bits if bits >= 0 else np.iinfo(dtype).min - bits, dtype)


def from_rank(place: jax.Array) -> jax.Array:
    """The number whose `rank` is `place`."""
    bits = jnp.where(place < 0, np.array(np.iinfo(place.dtype).min, place.dtype) - place, place)
    return lax.bitcast_convert_type(bits, f"float{8 * place.dtype.itemsize}")
