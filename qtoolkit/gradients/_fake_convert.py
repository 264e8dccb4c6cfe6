"""`fake_convert`: an affine map, a rounding, and the way back."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts import (
    Draw,
    Rounding,
    Stochastic,
    check_arguments,
    check_differentiable,
    check_holds,
    product,
    quotient,
    random_of,
    round_values,
    shown_number,
)
from qtoolkit.formats import Format, format
from qtoolkit.gradients._estimators import (
    CotangentEstimator,
    Estimator,
    estimator,
    slope,
    tangent,
    times_slope,
)


def fake_convert(
    x: ArrayLike,
    scale: ArrayLike = 1.0,
    shift: ArrayLike | None = None,
    *,
    fmt: Any,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
    gradient: str | Estimator = "clipped",
) -> jax.Array:
    """`(conv(x * scale - shift) + shift) / scale`, each step rounded once to the dtype of `x`.

    Here, as in the published operator, the scale multiplies before the conversion `conv`. No step
    is fused with another, and the division is IEEE's: the same bits eager, under `jit` and inside
    any fusion, for data and scales that are not float32 subnormals.

    Args:
      x: float32, float16 or bfloat16, any shape.
      scale: A finite number other than zero, or an array of the dtype of `x` that broadcasts to its
        shape. Arrays are not checked: zeros, infinities and NaNs follow IEEE.
      shift: None, a finite number, or an array as for `scale`. None leaves the addition out, so
        that -0 keeps its sign.
      fmt: A format or any spelling of one, see `qtoolkit.format`.
      rounding, saturation, key, random_bits, index_offset, gradient: As in `fake_cast`.

    Returns:
      Shape and dtype of `x`.

    Raises:
      TypeError: `x`, `scale` or `shift` has another dtype.
      ValueError: As `fake_cast`; shapes do not broadcast to that of `x`; a number given as `scale`
        is zero, infinite or NaN in the dtype of `x`; one given as `shift` is infinite or NaN.

    Gradient: with u = x * scale - shift, y the result and D the estimator's slope at u:
    dy/dx = D, dy/dscale = (D * x - y) / scale, dy/dshift = (1 - D) / scale.

    Source: OpenVINO FakeConvert-13, exactly rounded (its own arithmetic goes through float16).
    """
    x = check_differentiable("fake_convert", x, wide=False)
    fmt, rounding, draw = check_arguments(
        "fake_convert", x, fmt, rounding, saturation, key, random_bits, index_offset
    )
    check_holds("fake_convert", fmt, x.dtype)
    rule = estimator("fake_convert", gradient)
    scale = _parameter("scale", scale, x)
    if shift is not None:
        shift = _parameter("shift", shift, x)
    return _fake_convert_jitted(x, scale, shift, draw, fmt, rounding, saturation, rule)


def _parameter(name: str, value: ArrayLike, x: jax.Array) -> jax.Array | np.ndarray:
    if isinstance(value, int | float):
        number = _number(value, x.dtype)
        if not math.isfinite(number) or (name == "scale" and number == 0):
            wanted = "a finite number" + (" other than zero" if name == "scale" else "")
            raise ValueError(
                f"fake_convert: {shown_number(name, value)} is {number} in {x.dtype}, expected "
                f"{wanted}"
            )
        return np.asarray(value, x.dtype)
    dtype = getattr(value, "dtype", type(value).__name__)
    if dtype != x.dtype:
        raise TypeError(
            f"fake_convert: {name} has dtype {dtype}, expected {x.dtype}, that of x; convert it "
            f"first, e.g. {name}.astype(x.dtype)"
        )
    array = value if isinstance(value, jax.Array | np.ndarray) else jnp.asarray(value)
    sizes = zip(array.shape[::-1], x.shape[::-1], strict=False)
    if array.ndim > x.ndim or any(size not in (1, wide) for size, wide in sizes):
        raise ValueError(
            f"fake_convert: {name} has shape {array.shape}, expected one that broadcasts to that "
            f"of x, {x.shape}"
        )
    return array


def _ranked(array: jax.Array | None, ndim: int) -> jax.Array | None:
    """With so many axes: what strict promotion of ranks wants written."""
    return None if array is None else lax.expand_dims(array, range(ndim - array.ndim))


def _number(value: float, dtype: DTypeLike) -> float:
    """A Python number as `dtype` has it; zero for float32's subnormals, as XLA reads them."""
    try:
        with np.errstate(over="ignore", under="ignore"):
            number = float(np.asarray(float(value), dtype))
    except OverflowError:
        return math.inf
    return 0.0 if abs(number) < 2.0**-126 else number


@jax.custom_jvp
def _argument(x: jax.Array, scale: jax.Array, shift: jax.Array | None) -> jax.Array:
    """What is converted, x * scale - shift, in the dtype of `x` and rounded to it after each step.

    float32 has at least 2p + 2 significand bits for the p of float16 and bfloat16, so rounding its
    sums, products and quotients once more is as rounding the exact ones (Figueroa, 1995).
    """
    u = _rounded_to_dtype(product(x.astype(jnp.float32), scale.astype(jnp.float32)), x.dtype)
    if shift is not None:
        u = _rounded_to_dtype(u - shift.astype(jnp.float32), x.dtype)
    return u.astype(x.dtype)


@_argument.defjvp
def _argument_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, scale, shift), (x_dot, scale_dot, shift_dot) = primals, tangents
    u_dot = x_dot * scale + x * scale_dot
    return _argument(x, scale, shift), u_dot if shift is None else u_dot - shift_dot


def _rounded_to_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds float32 to what `dtype` holds; XLA may drop an `astype` there and back."""
    return x if dtype == jnp.float32 else round_values(x, format(dtype), "nearest_even", "none")


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5, 6, 7))
def _fake_convert(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array | None,
    draw: Draw | None,
    fmt: Format,
    rounding: Rounding,
    saturation: str,
    rule: Estimator,
) -> jax.Array:
    q = _converted(_argument(x, scale, shift), draw, fmt, rounding, saturation).astype(jnp.float32)
    if shift is not None:
        q = _rounded_to_dtype(q + shift.astype(jnp.float32), x.dtype)
    return _rounded_to_dtype(quotient(q, scale.astype(jnp.float32)), x.dtype).astype(x.dtype)


def _converted(
    u: jax.Array, draw: Draw | None, fmt: Format, rounding: Rounding, saturation: str
) -> jax.Array:
    return round_values(u, fmt, rounding, saturation, random_of(draw, u, rounding))


def _fake_convert_jvp(
    fmt: Format,
    rounding: Rounding,
    saturation: str,
    rule: Estimator,
    primals: Any,
    tangents: Any,
) -> tuple[jax.Array, jax.Array]:
    x, scale, shift, draw = primals
    y = _fake_convert(x, scale, shift, draw, fmt, rounding, saturation, rule)
    x_dot, scale_dot, shift_dot, _ = tangents
    y_dot = jnp.zeros_like(y)
    if isinstance(rule, CotangentEstimator):
        # Its cotangents are those of the rounding itself, so all terms pass it in one sum.
        dots: Any = jax.tree.map(_instantiated, (x, scale, shift), tuple(tangents[:3]))
        u, u_dot = jax.jvp(_argument, (x, scale, shift), dots)
        q = _converted(lax.stop_gradient(u), draw, fmt, rounding, saturation)
        y_dot = tangent(rule, u, q, u_dot, fmt) - y * dots[1]
        return y, (y_dot if shift is None else y_dot + dots[2]) / scale
    d = slope(rule, _argument(x, scale, shift), fmt)
    if not isinstance(x_dot, SymbolicZero):
        y_dot += times_slope(d, x_dot)
    if not isinstance(scale_dot, SymbolicZero):
        y_dot += (times_slope(d, x) - y) / scale * scale_dot
    if shift is not None and not isinstance(shift_dot, SymbolicZero):
        y_dot += (1 - d) / scale * shift_dot
    return y, y_dot


def _instantiated(primal: jax.Array, dot: Any) -> jax.Array:
    return jnp.zeros_like(primal) if isinstance(dot, SymbolicZero) else dot


_fake_convert.defjvp(_fake_convert_jvp, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _fake_convert_jitted(
    x: jax.Array, scale: jax.Array, shift: jax.Array | None, draw: Draw | None, *options: Any
) -> jax.Array:
    return _fake_convert(x, _ranked(scale, x.ndim), _ranked(shift, x.ndim), draw, *options)
