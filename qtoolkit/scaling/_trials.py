"""Choice among several candidate scales of a block, by the squared errors of its elements."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    elementwise,
    exact_float32,
    is_zero,
    product,
    quotient,
    round_values,
)
from qtoolkit.formats import BlockFormat
from qtoolkit.scaling._blocks import explicit_spec
from qtoolkit.scaling._scales import candidate_scales, effective


def best_scale(
    view: jax.Array,
    places: tuple[int, ...],
    amax: jax.Array,
    spec: BlockFormat,
    tensor_scale: jax.Array | None,
) -> jax.Array:
    """The scale with the least sum of squared errors, rounding to nearest; the first of equal ones.

    Args:
      view: The elements; the axes `places` run over those of a block.
      amax: Of each block, as float32, in a shape that broadcasts to `view`.

    Returns:
      Shape of `amax`, as stored.
    """
    best, *others = candidate_scales(amax, spec, tensor_scale)
    if not others:
        return best
    wide = exact_float32(view)

    def cost(scale: jax.Array) -> jax.Array:
        step = _spread(effective(scale, tensor_scale, spec), wide)
        return _sum(_squared_errors(wide, step, _spread(amax, wide), spec), places)

    least = cost(best)
    for scale in others:
        error = cost(scale)
        best = jnp.where(error < least, scale, best)
        least = jnp.minimum(error, least)
    return best


def _spread(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape(()) if all(n == 1 for n in x.shape) else jnp.broadcast_to(x, like.shape)


@elementwise
def _squared_errors(x: jax.Array, step: jax.Array, amax: jax.Array, spec: BlockFormat) -> jax.Array:
    """Squared errors in units of amax, which neither overflow nor all underflow."""
    u = quotient(x, step)
    q = round_values(u, spec.element)
    if spec.narrow_range:
        q = jnp.maximum(q, np.float32(float(spec.element.lowest + 1)))
    unit = quotient(step, jnp.where(is_zero(amax), np.float32(1), amax))
    error = product(q - u, unit)
    return jnp.where(jnp.isfinite(x), product(error, error), np.float32(0))


def _sum(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum over `axes`, which keep length 1, in an order that does not depend on the program."""
    # A reduction of XLA adds in any order, so eager and under `jit` different scales could win.
    for axis in axes:
        if not isinstance(x.shape[axis], int) or explicit_spec(x)[axis] is not None:
            x = jnp.sum(x, axis=axis, keepdims=True)
        while x.shape[axis] > 1:
            half = x.shape[axis] // 2
            first, second, rest = (
                lax.slice_in_dim(x, begin, end, axis=axis)
                for begin, end in ((0, half), (half, 2 * half), (2 * half, x.shape[axis]))
            )
            x = first + second
            x = lax.concatenate([x, rest], axis) if rest.shape[axis] else x
    return x
