"""`round_cotangent`: the identity with a transpose that rounds."""

import dataclasses
from typing import Any

import jax
from jax.typing import ArrayLike

from qtoolkit.casts import Projection, Stochastic
from qtoolkit.casts.internal import (
    check_arguments,
    check_differentiable,
    check_holds,
    linear_with_transpose,
    round_values,
)
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.formats.internal import scaled_by
from qtoolkit.scaling.internal import block_values, check_quantize, find_scales


def round_cotangent(
    x: ArrayLike,
    fmt: SpecLike,
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
    scaling: str | None = None,
) -> jax.Array:
    """Returns `x`, and rounds the cotangent that flows back through it to `fmt`.

    Args:
      x: float32, float16 or bfloat16, any shape, not empty.
      fmt: A format or any spelling of one, see `qtoolkit.format`; or a block format or the name of
        one: "mxfp8_e5m2". The cotangent is then rounded as by `fake_quantize`.
      rounding, saturation, key, random_bits, index_offset: As in `round_to_format`.
      scaling: Which scales divide the cotangent before it is rounded: "none", "tensor", "channel"
        (one for each index of the last axis) or "token" (one for each vector along it), short for
        `BlockFormat.tensor(fmt)` and so on. None: those of a block format, else "none". Under
        `vmap` each example has scales of its own.

    Returns:
      `x`, unchanged.

    Raises:
      TypeError, ValueError: As `fake_quantize`; or `scaling` is unknown, or given together with a
        block format.

    Gradient: a linear identity. Tangents pass unchanged; cotangents are rounded.

    Examples:
      >>> def loss(x):
      ...     return (jnp.asarray([1.1, 100.0]) * qt.round_cotangent(x, "e5m2")).sum()
      >>> jax.value_and_grad(loss)(jnp.ones(2))  # the gradient is rounded, the loss is not
      (Array(101.1, dtype=float32), Array([ 1., 96.], dtype=float32))
    """
    where = "round_cotangent"
    x = check_differentiable(where, x, wide=False)
    spec = scaled_by(where, fmt, scaling)
    keywords = (rounding, saturation, key, random_bits, index_offset)
    if spec.scale is None:
        _, projection = check_arguments(where, x, spec.element, *keywords)
        check_holds(where, spec.element, x.dtype)
    else:
        x, _, _, projection = check_quantize(where, x, spec, None, None, None, *keywords)
    leaves, structure = jax.tree.flatten(projection)
    return linear_with_transpose(_identity, _Rounding(spec, structure), tuple(leaves), x)


def _identity(residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    return x


@dataclasses.dataclass(frozen=True)
class _Rounding:
    spec: BlockFormat
    projection: Any  # the tree structure of a `Projection`, whose leaves are the residuals

    def __call__(self, residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> jax.Array:
        projection: Projection = jax.tree.unflatten(self.projection, residuals)
        if self.spec.scale is None:
            return round_values(cotangent, self.spec.element, projection.drawn(cotangent.shape))
        scales, nonzero = find_scales(cotangent, self.spec)
        return block_values(cotangent, self.spec, projection, scales, nonzero, cotangent.dtype)
