"""`round_cotangent`: the identity, whose transpose rounds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from qtoolkit.casts import (
    Draw,
    Rounding,
    Stochastic,
    check_arguments,
    check_differentiable,
    check_holds,
    random_of,
    round_values,
)
from qtoolkit.formats import Format
from qtoolkit.gradients._linear import linear_with_transpose
from qtoolkit.scaling import quantized_values

SCALINGS = ("none", "tensor")


def round_cotangent(
    x: ArrayLike,
    fmt: Any,
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
    scaling: str = "none",
) -> jax.Array:
    """Returns `x`; the cotangent that flows back through it is rounded to `fmt`.

    Args:
      x: float32, float16 or bfloat16, any shape.
      fmt: A format or any spelling of one, see `qtoolkit.format`.
      rounding, saturation, key, random_bits, index_offset: As in `round_to_format`.
      scaling: "none", or "tensor": the cotangent is divided by a scale before it is rounded and
        multiplied by it after, so that its largest finite magnitude meets that of `fmt`. Under
        `vmap` each example has its own.

    Returns:
      `x`, unchanged.

    Raises:
      TypeError, ValueError: As `fake_cast`; or `scaling` is unknown.

    Gradient: a linear identity. Tangents pass unchanged; cotangents are rounded.
    """
    x = check_differentiable("round_cotangent", x, wide=False)
    fmt, rounding, draw = check_arguments(
        "round_cotangent", x, fmt, rounding, saturation, key, random_bits, index_offset
    )
    check_holds("round_cotangent", fmt, x.dtype)
    if scaling not in SCALINGS:
        raise ValueError(
            f"round_cotangent: scaling={scaling!r}, expected one of {', '.join(SCALINGS)}"
        )
    leaves, structure = jax.tree.flatten(draw)
    transpose = _Rounding(fmt, rounding, saturation, scaling, structure)
    return linear_with_transpose(_identity, transpose, tuple(leaves), x)


def _identity(residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    return x


@dataclasses.dataclass(frozen=True)
class _Rounding:
    fmt: Format
    rounding: Rounding
    saturation: str
    scaling: str
    draw: Any  # the structure of the residuals

    def __call__(self, residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> jax.Array:
        draw: Draw | None = jax.tree.unflatten(self.draw, residuals)
        random = random_of(draw, cotangent, self.rounding)
        if self.scaling == "none":
            return round_values(cotangent, self.fmt, self.rounding, self.saturation, random)
        q, scale = quantized_values(cotangent, self.fmt, self.rounding, self.saturation, random)
        return (q.astype(jnp.float32) * scale).astype(q.dtype)  # half types cannot hold the scale
