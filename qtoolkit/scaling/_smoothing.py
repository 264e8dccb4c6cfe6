"""Factors that move range from one operand of a matmul to the other, channel by channel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import exact_float32, nearest_power_of_two, quotient

_LARGEST_EXPONENT = 126  # 2**126 and its reciprocal are both normal float32 numbers


@functools.partial(jax.jit, static_argnames=("alpha", "power_of_two"))
def smoothing_factors(
    activation_amax: jax.Array,
    weight_amax: jax.Array,
    alpha: float = 0.5,
    power_of_two: bool = False,
) -> jax.Array:
    """SmoothQuant's factors: activation_amax**alpha / weight_amax**(1 - alpha).

    Divide the activations by them and multiply the weights: their product does not change.

    Args:
      activation_amax: [channels], the largest |x| of each channel, over calibration data; float32,
        float16 or bfloat16, finite, not negative.
      weight_amax: [channels], the largest |w| that meets each channel, likewise.
      alpha: How much of the range moves to the weights, from 0 to 1; static. At 0.5 both operands
        end with the same amax in every channel: sqrt(activation_amax * weight_amax).
      power_of_two: Whether to round factors to the nearest power of two, by their logarithm. Then
        dividing and multiplying by them rounds nothing.

    Returns:
      [channels], float32, from 2**-126 to 2**126. 1 where one of the two is below 2**-126 or
      not finite: there is nothing to balance.

    Source: arXiv:2211.10438 (SmoothQuant), equation 4.
    """
    first, second = map(exact_float32, (activation_amax, weight_amax))
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
