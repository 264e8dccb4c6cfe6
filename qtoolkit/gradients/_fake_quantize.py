"""`fake_quantize`: the rounding by blocks of `scaling` with a derivative."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qtoolkit.casts import Draw, Stochastic, random_of
from qtoolkit.formats import BlockFormat
from qtoolkit.gradients._estimators import Estimator, estimator, tangent
from qtoolkit.scaling import (
    Rounder,
    Scales,
    block_values,
    check_quantize,
    find_scales,
    in_dtype,
    kept_range,
    scaled_values,
)


def fake_quantize(
    x: ArrayLike,
    spec: Any,
    *,
    scale: ArrayLike | None = None,
    tensor_scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
    gradient: str | Estimator = "clipped",
) -> jax.Array:
    """Rounds `x` to what block format `spec` holds of it, keeps its dtype, and is differentiable.

    Bit for bit `quantize(x, spec, ...).dequantize()`, without the codes.

    Args:
      x, spec, scale, tensor_scale, zero_point, rounding, saturation, key, random_bits,
        index_offset: As in `quantize`.
      gradient: The slope that stands for the rounding's derivative, see `fake_cast`; here at x
        divided by its scale, plus the zero point. What lies up to half a step beyond the range of
        the elements counts as its end: a rounded scale may leave the largest element of a block
        there, and to clamp it is to round it.

    Returns:
      Shape and dtype of `x`.

    Raises:
      TypeError, ValueError: As `quantize`; unknown `gradient`.

    Gradient: the tangent times the estimator's slope, by `custom_jvp`. Scales, those that `x` gives
    and given ones, count as constants; `qtoolkit.gradients.lsq` learns them.
    """
    x, given, draw, how = check_quantize(
        "fake_quantize", x, spec, scale, tensor_scale, zero_point, rounding, saturation, key,
        random_bits, index_offset,
    )  # fmt: skip
    return _fake_quantize_jitted(x, given, draw, how, estimator("fake_quantize", gradient))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _fake_quantize(
    x: jax.Array, given: Scales, draw: Draw | None, how: Rounder, rule: Estimator
) -> jax.Array:
    scales, busy = find_scales(x, how.spec, given)
    return in_dtype(block_values(x, scales, busy, draw, how), x.dtype)


@_fake_quantize.defjvp
def _fake_quantize_jvp(
    how: Rounder, rule: Estimator, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (x, given, draw), (x_dot, _, _) = primals, tangents
    y = _fake_quantize(x, given, draw, how, rule)
    scales, _ = find_scales(x, how.spec, given)
    u = scaled_values(x, scales, how.spec)
    q = how.values(u, None, random_of(draw, x, how.rounding))
    u = _unclamped(u, how.spec)
    y_dot = tangent(rule, u, q, x_dot.astype(jnp.float32), how.spec.element)
    return y, y_dot.astype(x.dtype)


def _unclamped(u: jax.Array, spec: BlockFormat) -> jax.Array:
    """Scaled values, those that rounding brings back to the ends of the range as these ends."""
    lowest, largest = (np.float32(float(v)) for v in (spec.element.lowest, spec.element.max_finite))
    first, last = map(np.float32, kept_range(spec))
    u = jnp.where((u < lowest) & (u >= first), lowest, u)
    return jnp.where((u > largest) & (u <= last), largest, u)


_fake_quantize_jitted = jax.jit(_fake_quantize, static_argnums=(3, 4))
