"""Factors that move range from one operand of a matmul to the other, channel by channel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    check_differentiable,
    exact_float32,
    nearest_power_of_two,
    quotient,
)

_LARGEST_EXPONENT = 126  # 2**126 and its reciprocal are both normal float32 numbers


def smoothing_factors(
    activation_amax: jax.Array,
    weight_amax: jax.Array,
    alpha: float = 0.5,
    *,
    power_of_two: bool = False,
) -> jax.Array:
    """SmoothQuant's factors: activation_amax**alpha / weight_amax**(1 - alpha).

    Divide the activations by them and multiply the weights: their product does not change.

    Args:
      activation_amax: [channels], the largest |x| of each channel, over calibration data; float32,
        float16 or bfloat16, finite, not negative.
      weight_amax: [channels], the largest |w| that meets each channel, likewise.
      alpha: How much of the range moves to the weights, from 0 to 1. At 0.5 both operands end with
        the same amax in every channel: sqrt(activation_amax * weight_amax).
      power_of_two: Whether to round factors to the nearest power of two, by their logarithm. Then
        dividing and multiplying by them rounds nothing.

    Returns:
      [channels], float32, from 2**-126 to 2**126. 1 where one of the two is below 2**-126 or
      not finite: there is nothing to balance.

    Raises:
      TypeError: Another dtype.
      ValueError: The shapes differ, or alpha is not from 0 to 1.

    Gradient: zero.
    Source: arXiv:2211.10438 (SmoothQuant), equation 4.

    Examples:
      >>> activations, weights = jnp.asarray([100.0, 1.0]), jnp.asarray([0.25, 0.25])
      >>> factors = qt.scaling.smoothing_factors(activations, weights)
      >>> factors
      Array([20.,  2.], dtype=float32)
      >>> activations / factors, weights * factors  # both with the same range in each channel
      (Array([5. , 0.5], dtype=float32), Array([5. , 0.5], dtype=float32))
    """
    activation = check_differentiable("smoothing_factors", activation_amax, wide=False)
    weight = check_differentiable("smoothing_factors", weight_amax, wide=False)
    if activation.shape != weight.shape:
        raise ValueError(
            f"smoothing_factors: activation_amax has shape {activation.shape}, weight_amax "
            f"{weight.shape}, expected the same, one number for each channel"
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"smoothing_factors: alpha={alpha}, expected 0 to 1")
    return _factors(activation, weight, float(alpha), bool(power_of_two))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _factors(first: jax.Array, second: jax.Array, alpha: float, power_of_two: bool) -> jax.Array:
    first, second = (exact_float32(lax.stop_gradient(a)) for a in (first, second))
    # Not `> 0`: whether a subnormal number is, depends on the program.
    least = np.finfo(np.float32).tiny
    balanced = (first >= least) & (second >= least) & jnp.isfinite(first) & jnp.isfinite(second)
    one = jnp.ones_like(first)
    first, second = jnp.where(balanced, first, one), jnp.where(balanced, second, one)
    # A quotient of powers overflows only for alpha near 0 or 1, and is limited there.
    # A bare `/` may become a product with a reciprocal root, in some programs and not in others.
    ratio = quotient(first ** np.float32(alpha), second ** np.float32(1 - alpha))
    limit = np.float32(2.0**_LARGEST_EXPONENT)
    factors = jnp.clip(ratio, 1 / limit, limit)
    return nearest_power_of_two(factors) if power_of_two else factors
