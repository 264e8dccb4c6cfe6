"""Straight-through estimators: what stands for the derivative of a rounding."""

import dataclasses
from collections.abc import Hashable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from qtoolkit.formats import Format


@runtime_checkable
class Estimator(Protocol):
    """A frozen, hashable rule for the slope of a rounding."""

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        """The slope at `x`, in its shape and dtype.

        Args:
          x: What is rounded: in `fake_convert`, after scale and shift.
          lower, upper: The finite range of `fmt`.
          fmt: The format that `x` is rounded to.
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
        return ((x >= lower) & (x <= upper)).astype(x.dtype)


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
        "hashable object with slope(x, lower, upper, fmt), e.g. a frozen dataclass"
    )


def slope(rule: Estimator, x: jax.Array, fmt: Format) -> jax.Array:
    return rule.slope(x, float(fmt.lowest), float(fmt.max_finite), fmt)


def times_slope(slope: jax.Array, factor: jax.Array) -> jax.Array:
    """Slope * factor, and 0 where the slope is: no NaN from an infinite factor."""
    return jnp.where(slope == 0, jnp.zeros_like(factor), slope * factor)
