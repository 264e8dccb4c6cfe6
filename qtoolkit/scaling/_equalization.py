"""Factors that move range from one operand of a matmul to the other, channel by channel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    check_differentiable,
    differentiable_in_dtype,
    differentiable_product,
    differentiable_quotient,
    differentiable_widened,
    exact_float32,
    in_dtype,
    nearest_power_of_two,
    product,
    quotient,
    spread,
)
from qtoolkit.scaling._blocks import amax, checked_axis

_LARGEST_EXPONENT = 126  # 2**126 and its reciprocal are both normal float32 numbers


def smoothing_factors(
    activation_amax: jax.Array,
    weight_amax: jax.Array,
    alpha: float = 0.5,
    *,
    power_of_two: bool = False,
) -> jax.Array:
    """SmoothQuant's factors: activation_amax**alpha / weight_amax**(1 - alpha).

    `equalize` divides the activations by them and multiplies the weights.

    Args:
      activation_amax: [channels], the largest |x| of each channel, over calibration data; float32,
        float16 or bfloat16, finite, not negative.
      weight_amax: [channels], the largest |w| that meets each channel, likewise.
      alpha: How much of the range moves to the weights, from 0 to 1. At 0.5 both operands end with
        the same amax in every channel: sqrt(activation_amax * weight_amax).
      power_of_two: Whether to round factors to the nearest power of two, by their logarithm. Then
        `equalize` rounds nothing.

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


def cross_layer_factors(
    w1: jax.Array,
    w2: jax.Array,
    *,
    axis1: int = -1,
    axis2: int = 0,
    power_of_two: bool = False,
) -> jax.Array:
    """Factors that give two layers in a row the same range in each channel between them.

    For y = f(x @ w1 + b) @ w2 with f(s * t) = s * f(t) for s > 0, as ReLU has it:
    `w1, w2 = equalize(w1, w2, factors)` together with b / factors does not change y.

    Args:
      w1: [..., channels], the weights that write the channels; float32, float16 or bfloat16.
      w2: [channels, ...], the weights that read them.
      axis1, axis2: The axis of the channels in each.
      power_of_two: As in `smoothing_factors`.

    Returns:
      [channels], float32: sqrt(amax of w1 / amax of w2), over what belongs to each channel; 1 where
      one of them is below 2**-126.

    Raises:
      TypeError: Another dtype.
      ValueError: An axis is out of range, or their lengths differ.

    Gradient: zero.
    Source: arXiv:1906.04721 (data-free quantization), section 4.1.

    Examples:
      >>> w1 = jnp.asarray([[16.0, 0.5], [8.0, 0.25]])  # writes two channels
      >>> w2 = jnp.asarray([[1.0, -0.5], [2.0, 1.0]])  # reads them
      >>> factors = qt.scaling.cross_layer_factors(w1, w2)
      >>> print([f"{factor:.3f}" for factor in factors])
      ['4.000', '0.500']
      >>> w1, w2 = qt.scaling.equalize(w1, w2, factors)
      >>> print([f"{amax:.3f}" for amax in qt.scaling.amax(w1, axis=0)[0]])  # that of both
      ['4.000', '1.000']
    """
    w1 = check_differentiable("cross_layer_factors", w1, wide=False)
    w2 = check_differentiable("cross_layer_factors", w2, wide=False)
    first = checked_axis("cross_layer_factors", "w1", w1, axis1)
    second = checked_axis("cross_layer_factors", "w2", w2, axis2)
    if w1.shape[first] != w2.shape[second]:
        raise ValueError(
            f"cross_layer_factors: w1 has {w1.shape[first]} channels along axis {axis1} of shape "
            f"{w1.shape}, w2 {w2.shape[second]} along axis {axis2} of shape {w2.shape}, expected "
            "the same number; choose the axes with axis1= and axis2="
        )
    return _factors(_channel_amax(w1, first), _channel_amax(w2, second), 0.5, bool(power_of_two))


def equalize(
    x: jax.Array, w: jax.Array, factors: jax.Array, *, x_axis: int = -1, w_axis: int = 0
) -> tuple[jax.Array, jax.Array]:
    """`x / factors` and `w * factors`, channel by channel: their product over it does not change.

    Exactly so where factors are powers of two, and the results neither overflow nor underflow.

    Args:
      x: [..., channels], activations, or the weights of the layer before; float32, float16 or
        bfloat16.
      w: [channels, ...], weights, likewise.
      factors: [channels], float32, positive; see `smoothing_factors` and `cross_layer_factors`.
      x_axis, w_axis: The axis of the channels in each.

    Returns:
      Both arrays in their own shapes and dtypes, each rounded once from float32.

    Raises:
      TypeError: Another dtype.
      ValueError: An axis is out of range, or its length is not that of `factors`.

    Gradient: that of the quotient and of the product, also with respect to `factors`.

    Examples:
      >>> x, w = jnp.asarray([[100.0, 1.0]]), jnp.asarray([[0.25, 0.5], [2.0, 1.0]])
      >>> smooth, scaled = qt.scaling.equalize(x, w, jnp.asarray([16.0, 0.5]))
      >>> smooth, scaled
      (Array([[6.25, 2.  ]], dtype=float32), Array([[4. , 8. ],
             [1. , 0.5]], dtype=float32))
      >>> bool((smooth @ scaled == x @ w).all())
      True
    """
    x = check_differentiable("equalize", x, wide=False)
    w = check_differentiable("equalize", w, wide=False)
    factors = check_differentiable("equalize", factors, wide=False)
    axes = (checked_axis("equalize", "x", x, x_axis), checked_axis("equalize", "w", w, w_axis))
    for name, array, axis in (("x", x, axes[0]), ("w", w, axes[1])):
        if factors.shape != (array.shape[axis],):
            raise ValueError(
                f"equalize: {name} has {array.shape[axis]} channels along axis {axis} of shape "
                f"{array.shape}, and factors have shape {factors.shape}, expected "
                f"({array.shape[axis]},); choose the axis with {name}_axis="
            )
    return _equalized_jitted(x, w, factors, *axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _equalized(
    x: jax.Array, w: jax.Array, factors: jax.Array, x_axis: int, w_axis: int
) -> tuple[jax.Array, jax.Array]:
    wide = exact_float32(factors)
    divided = quotient(exact_float32(x), _along(wide, x, x_axis))
    multiplied = product(exact_float32(w), _along(wide, w, w_axis))
    return in_dtype(divided, x.dtype), in_dtype(multiplied, w.dtype)


@_equalized.defjvp
def _equalized_jvp(x_axis: int, w_axis: int, primals: Any, tangents: Any) -> Any:
    def plain(x: jax.Array, w: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide_x, wide_w, wide = map(differentiable_widened, (x, w, factors))
        divided = differentiable_quotient(wide_x, _along(wide, x, x_axis))
        along = spread(_along(wide, w, w_axis), w)
        multiplied = differentiable_product(along, wide_w)
        return (
            differentiable_in_dtype(divided, x.dtype),
            differentiable_in_dtype(multiplied, w.dtype),
        )

    return _equalized(*primals, x_axis, w_axis), jax.jvp(plain, primals, tangents)[1]


_equalized_jitted = jax.jit(_equalized, static_argnums=(3, 4))


def _along(factors: jax.Array, array: jax.Array, axis: int) -> jax.Array:
    return lax.expand_dims(factors, [a for a in range(array.ndim) if a != axis])


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


def _channel_amax(w: jax.Array, axis: int) -> jax.Array:
    others = tuple(a for a in range(w.ndim) if a != axis)
    return amax(w, axis=others).reshape(-1)
