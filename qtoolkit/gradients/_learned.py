"""Learned scales: fake quantizers whose scale or offset trains with the model.

The rounding is that of `casts`; learned is the number by which x is divided before. All arithmetic
is float32, whatever the dtype of x, and so are the sums of the gradients of the parameters.
"""

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts.internal import (
    FINITE,
    FLOATS,
    POSITIVE,
    Domain,
    broadcast_like,
    check_differentiable,
    exact_float32,
    in_dtype,
    is_within,
    linear_in_dtype,
    linear_product,
    parameter,
    prevent_contraction,
    product,
    quotient,
    round_values,
    with_rank,
)
from qtoolkit.formats import BlockFormat, Format, FormatLike, format
from qtoolkit.scaling.internal import check_axes

LEAST = np.float32(2.0**-126)  # its reciprocal is finite, and XLA reads smaller numbers as zero

Factors = tuple[float | None, float | None]  # None: see `_factor`


def lsq(
    x: ArrayLike, scale: ArrayLike, fmt: FormatLike, *, gradient_factor: float | None = None
) -> jax.Array:
    """Rounds `x / scale` to the values of `fmt`, times `scale`, and learns the scale (LSQ).

    The bits of `fake_quantize(x, BlockFormat.tensor(fmt), scale=scale)`: one division, one rounding
    to nearest even that saturates, one product, rounded to the dtype of `x`.
    NaN becomes what the format makes of it: NaN if it has one, else 0 or its largest value.

    Args:
      x: float32, float16 or bfloat16, any shape, not empty.
      scale: A positive number, or an array of them in float32 or the dtype of `x` that broadcasts
        to the shape of `x`: a scalar for one scale per tensor, (n, 1) for one per row.
      fmt: A format or any spelling of one. The paper has integers, with Qn = 2**(bits - 1) and
        Qp = 2**(bits - 1) - 1, or 0 and 2**bits - 1 without a sign. For others, ours: the rounding
        is that of the format, Qp its largest and -Qn its lowest value.
      gradient_factor: What the gradient of the scale is multiplied by, a number of at least 0.
        None: the paper's 1 / sqrt(N * Qp), with the N elements of `x` that share one scale. Under
        `vmap` these are the ones of an example.

    Returns:
      Shape and dtype of `x`.

    Raises:
      TypeError: `x` or `scale` has another dtype.
      ValueError: Shapes do not broadcast; `x` is empty; unknown format, or one that cannot be
        scaled or has no positive value; a scale that is not traced and is zero, negative,
        subnormal, infinite or NaN; a factor that is negative or not finite.

    Gradient: with u = x / scale and q its rounding: dy/dx = 1 where -Qn <= u <= Qp, else 0;
    dy/dscale = q - u there, -Qn below and Qp above, times the factor; both 0 where u is NaN. On the
    edges themselves the paper counts u as outside, we as inside, as "clipped" does: zeros of
    unsigned activations keep their gradient. Either way x * dy/dx + scale * dy/dscale is y. Second
    derivatives: of the model with q - u and the choice of the branch held fixed, hence 0.

    A step of the optimizer can make a scale zero or negative. Traced scales are not checked: those
    below 2**-126 count as 2**-126. All of x but zero then saturates, y is almost zero, and the
    gradient stays as above, so that descent on an error makes the scale grow again. NaN and
    infinite scales give NaN.

    Source: arXiv:1902.08153, equations 1 and 2 (y), 3 (scale), 5 (data), section 2.2 (factor).

    Examples:
      >>> x = jnp.asarray([0.1, 0.6, -0.9, 3.0])
      >>> qt.gradients.lsq(x, 0.25, "int4")  # up to 7 * 0.25
      Array([ 0.  ,  0.5 , -1.  ,  1.75], dtype=float32)
      >>> def loss(scale):
      ...     return ((qt.gradients.lsq(x, scale, "int4") - x) ** 2).sum()
      >>> print(f"{jax.grad(loss)(0.25):.3f}")  # negative: a larger scale clips less
      -3.262
    """
    x, fmt = _check_data_format("lsq", x, fmt)
    scale = _parameter("lsq", "scale", scale, x)
    factor = _factor("lsq", "gradient_factor", gradient_factor, x, scale, fmt)
    return _learned_jitted(x, scale, None, fmt, (factor, 0.0))


def lsq_plus(
    x: ArrayLike,
    scale: ArrayLike,
    offset: ArrayLike,
    fmt: FormatLike,
    *,
    gradient_factor: float | None = None,
    offset_gradient_factor: float | None = None,
) -> jax.Array:
    """Rounds `(x - offset) / scale` to `fmt`, times `scale`, plus `offset`; learns both (LSQ+).

    The float32 steps are those of `lsq`, with a rounded subtraction before and a rounded addition
    after them.

    Args:
      x, scale, fmt: As in `lsq`. The paper's n and p are the lowest and largest value of `fmt`.
      offset: A finite number, or an array as for `scale`.
      gradient_factor, offset_gradient_factor: What the gradients of scale and offset are multiplied
        by. None: 1 / sqrt(N * p), with the N elements of `x` that share one. The paper takes
        the factor of LSQ over; that it goes for the offset too is what implementations do.

    Returns:
      Shape and dtype of `x`.

    Raises:
      TypeError, ValueError: As `lsq`; an offset that is not traced and not finite.

    Gradient: with u = (x - offset) / scale and q its rounding, where n <= u <= p: dy/dx = 1,
    dy/dscale = q - u, dy/doffset = 0; beyond: dy/dx = 0, dy/dscale = n or p, dy/doffset = 1; all 0
    where u is NaN. Those by scale and offset are multiplied by their factors. Edges, second
    derivatives, and scales that are zero or negative: as in `lsq`.

    Source: arXiv:2004.09576, section 3.1.

    Examples:
      >>> x = jnp.asarray([-0.3, 0.1, 1.0, 4.0])
      >>> qt.gradients.lsq_plus(x, 0.25, -0.25, "uint4")  # from -0.25 to -0.25 + 15 * 0.25
      Array([-0.25,  0.  ,  1.  ,  3.5 ], dtype=float32)
      >>> def total(offset):
      ...     y = qt.gradients.lsq_plus(x, 0.25, offset, "uint4", offset_gradient_factor=1.0)
      ...     return y.sum()
      >>> jax.grad(total)(-0.25)  # of what is clipped, -0.3 and 4
      Array(2., dtype=float32)
    """
    x, fmt = _check_data_format("lsq_plus", x, fmt)
    scale = _parameter("lsq_plus", "scale", scale, x)
    offset = _parameter("lsq_plus", "offset", offset, x, FINITE)
    factor = _factor("lsq_plus", "gradient_factor", gradient_factor, x, scale, fmt)
    name = "offset_gradient_factor"
    offset_factor = _factor("lsq_plus", name, offset_gradient_factor, x, offset, fmt)
    return _learned_jitted(x, scale, offset, fmt, (factor, offset_factor))


def lsq_scale(x: ArrayLike, fmt: FormatLike, axis: int | Sequence[int] | None = None) -> jax.Array:
    """The scale that LSQ starts from: 2 * mean(|x|) / sqrt(Qp).

    Args:
      x: float32, float16 or bfloat16, any shape: initial weights, or a first batch of activations.
        Infinities and NaNs do not count.
      fmt: As in `lsq`, with the largest value Qp.
      axis: The axes that share a scale; None for all.

    Returns:
      float32: the rank of `x`, axes that share a scale with length 1; a scalar where `axis` is
      None. 1 where all of x is zero, else at least 2**-126.

    Raises:
      TypeError, ValueError: As `lsq`; `axis` is no axis of `x`, or comes twice.

    Gradient: none; the scale is a constant of `x`.

    Source: arXiv:1902.08153, section 2.1.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (1000,))
      >>> f"{qt.gradients.lsq_scale(x, 'int4'):.3f}"
      '0.588'
    """
    x, fmt = _check_data_format("lsq_scale", x, fmt)
    return _lsq_scale(x, fmt, check_axes("lsq_scale", axis, x.ndim))


@functools.partial(jax.jit, static_argnames=("fmt", "axis"))
def _lsq_scale(x: jax.Array, fmt: Format, axis: tuple[int, ...] | None) -> jax.Array:
    magnitudes, keepdims = jnp.abs(exact_float32(lax.stop_gradient(x))), axis is not None
    is_finite = jnp.isfinite(magnitudes)
    total = jnp.sum(magnitudes, axis, keepdims=keepdims, where=is_finite)
    count = jnp.sum(is_finite, axis, dtype=jnp.float32, keepdims=keepdims)
    mean = total / jnp.maximum(count, np.float32(1))
    scale = jnp.maximum(mean * (2 / math.sqrt(fmt.max_finite)), LEAST)
    return jnp.where(mean == 0, jnp.ones_like(scale), scale)


def _check_data_format(where: str, x: ArrayLike, fmt: FormatLike) -> tuple[jax.Array, Format]:
    array, element = check_differentiable(where, x, wide=False), format(fmt)
    if array.size == 0:
        raise ValueError(f"{where}: x has shape {array.shape}, expected at least one element")
    try:
        BlockFormat.tensor(element)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return array, element


def _parameter(
    where: str, name: str, value: ArrayLike, x: jax.Array, domain: Domain = POSITIVE
) -> jax.Array:
    """`value` as an array that broadcasts to `x`; its numbers are checked unless it is traced."""
    array = jnp.asarray(parameter(where, name, value, x, domain, dtypes=("float32", x.dtype)))
    return array if array.dtype in FLOATS else array.astype(jnp.float32)


def _factor(
    where: str, name: str, value: Any, x: jax.Array, parameter: jax.Array, fmt: Format
) -> float | None:
    """The factor of a gradient; None if the default depends on a symbolic size.

    Models that are exported for batches of any size have symbolic sizes. Then the derivative
    computes the factor.
    """
    if value is None:
        count = x.size // parameter.size
        if jax.export.is_symbolic_dim(count):
            return None
        return 1 / math.sqrt(count * float(fmt.max_finite))
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ValueError(
            f"{where}: {name}={value!r}, expected None or a finite number of at least 0"
        )
    return float(value)


def _rounded(
    x: jax.Array, scale: jax.Array, offset: jax.Array | None, fmt: Format
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The float32 numbers u = (x - offset) / scale, its rounding q, and y = q * scale + offset."""
    # LSQ's equations 1 (q) and 2 (y), without an offset; with one those of LSQ+, section 3.1.
    wide, scale = exact_float32(x), exact_float32(scale)
    if offset is not None:
        offset = exact_float32(offset)
        wide = prevent_contraction(wide) - offset  # not contracted with a product that makes x
    scale = jnp.where(scale < LEAST, LEAST, scale)  # keeps NaN
    u = quotient(wide, scale)
    q = round_values(u, fmt)
    y = product(q, scale)
    # Without `prevent_contraction` XLA merges the offset with a number that is added next.
    return u, q, y if offset is None else prevent_contraction(y + offset)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _learned(
    x: jax.Array, scale: jax.Array, offset: jax.Array | None, fmt: Format, factors: Factors
) -> jax.Array:
    return in_dtype(_rounded(x, scale, offset, fmt)[2], x.dtype)


def _learned_jvp(
    fmt: Format, factors: Factors, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    x, scale, offset = primals
    x_dot, scale_dot, offset_dot = tangents
    y = _learned(x, scale, offset, fmt, factors)
    u, q, _ = _rounded(*lax.stop_gradient((x, scale, offset)), fmt)
    is_number = u == u
    is_inside = is_within(u, float(fmt.lowest), float(fmt.max_finite))
    y_dot = jnp.zeros_like(y)
    if not isinstance(x_dot, SymbolicZero):  # LSQ's equation 5
        y_dot += jnp.where(is_inside, x_dot, jnp.zeros_like(x_dot))
    if not isinstance(scale_dot, SymbolicZero):  # equation 3; q is -Qn or Qp beyond the range
        slope = jnp.where(is_inside, q - u, jnp.where(is_number, q, jnp.zeros_like(q)))
        y_dot += _times(slope, scale_dot, _factor_of(factors[0], x, scale, fmt), y.dtype)
    if offset is not None and not isinstance(offset_dot, SymbolicZero):  # LSQ+, section 3.1
        slope = (is_number & ~is_inside).astype(jnp.float32)
        y_dot += _times(slope, offset_dot, _factor_of(factors[1], x, offset, fmt), y.dtype)
    return y, y_dot


def _factor_of(factor: float | None, x: jax.Array, parameter: jax.Array, fmt: Format) -> Any:
    if factor is not None:
        return factor
    # LSQ's section 2.2: g = 1 / sqrt(N * Qp).
    count = jnp.asarray(x.size // parameter.size).astype(jnp.float32)
    return 1 / jnp.sqrt(count * np.float32(float(fmt.max_finite)))


def _times(
    slope: jax.Array, dot: jax.Array, factor: float | jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Their product in `dtype`; cotangents are multiplied and summed in float32."""
    # Both multiplications are rounded, so that XLA does not merge the factor with another one.
    by_factor = linear_product(jnp.asarray(factor, jnp.float32), linear_in_dtype(dot, jnp.float32))
    return linear_in_dtype(linear_product(slope, broadcast_like(by_factor, slope)), dtype)


_learned.defjvp(_learned_jvp, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _learned_jitted(
    x: jax.Array, scale: jax.Array, offset: jax.Array | None, *options: Any
) -> jax.Array:
    return _learned(x, with_rank(scale, x.ndim), with_rank(offset, x.ndim), *options)
