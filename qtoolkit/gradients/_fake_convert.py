"""`fake_convert`: scale, shift, round to a format, then undo shift and scale."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts import Projection, Stochastic
from qtoolkit.casts.internal import (
    FINITE,
    NONZERO,
    broadcast_like,
    cast_for,
    check_arguments,
    check_holds,
    check_unnarrowed,
    differentiable_product,
    differentiable_quotient,
    differentiable_widened,
    hinting,
    in_dtype,
    linear_product,
    linear_with_transpose,
    parameter,
    product,
    quotient,
    round_values,
    rounded_to,
    widened,
    with_rank,
)
from qtoolkit.formats import FLOAT32, Format, FormatLike, format
from qtoolkit.gradients._estimators import (
    Estimator,
    estimator,
    slope,
    slope_times_tangent,
)


@hinting
def fake_convert(
    x: ArrayLike,
    scale: ArrayLike = 1.0,
    shift: ArrayLike | None = None,
    *,
    fmt: FormatLike,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
    gradient: str | Estimator = "clipped",
) -> jax.Array:
    """`(conv(x * scale - shift) + shift) / scale`, where `conv` rounds to the format `fmt`.

    As in OpenVINO's FakeConvert, the scale multiplies before the rounding; in `quantize` it
    divides. The result of each step is rounded once to the dtype of `x`, and division is IEEE's.
    So the bits are the same without `jit`, under `jit`, and however XLA fuses the steps. This does
    not hold for data and scales that are subnormal in float32.

    Args:
      x: float32, float16, bfloat16 or float64, any shape. If JAX's 64-bit types are off, NumPy's
        float64 and Python's floats are converted to float32 first. A number that float32 cannot
        hold becomes the neighbour whose last bit is 1 ("round to odd"). Without a shift, and with
        a scale that is a power of two, the result is then that of the exact number.
      scale: A finite number other than zero, or an array of the dtype of `x` that broadcasts to its
        shape. The elements of an array are not checked: dividing by 0 gives an infinity or a NaN.
      shift: None, a finite number, or an array as for `scale`. With None nothing is added, so
        that -0 keeps its sign.
      fmt: A format or any spelling of one, see `qtoolkit.format`.
      rounding, saturation, key, random_bits, index_offset, gradient: As in `fake_cast`.

    Returns:
      Shape and dtype of `x`.

    Raises:
      TypeError: `x`, `scale` or `shift` has another dtype.
      ValueError: As `fake_cast`; shapes do not broadcast to that of `x`; a number given as `scale`
        is zero, infinite or NaN in the dtype of `x`; one given as `shift` is infinite or NaN.

    Gradient: Let y be the result and u = x * scale - shift. The slope of `conv` at u is D, as
    `gradient` says: for "clipped" 1 if u is in the range of `fmt`, else 0. Then dy/dx = D,
    dy/dscale = (D * x - y) / scale, and dy/dshift = (1 - D) / scale. The last two are computed and
    summed in float32, or in float64 if x is float64. An element whose cotangent is 0, as under a
    masked loss, adds 0 to these sums, even if the element is a NaN or infinite.

    Numbers that are subnormal in float32 may count as zero: data, scales, and values of `fmt`, such
    as the least of E8M0, 2**-127.

    Source: OpenVINO FakeConvert-13. (OpenVINO itself rounds to float16 on the way to `fmt`.)

    Examples:
      >>> x, scale = jnp.asarray([0.3, 1.0, 500.0]), jnp.float32(2.0)
      >>> qt.fake_convert(x, scale, fmt="e4m3fn")  # 0.6 becomes 0.625, 1000 becomes 448
      Array([  0.3125,   1.    , 224.    ], dtype=float32)
      >>> jax.grad(lambda s: qt.fake_convert(x, s, fmt="e4m3fn")[2])(scale)  # -448 / s**2
      Array(-112., dtype=float32)
    """
    source = check_unnarrowed("fake_convert", x)
    x = source if isinstance(source, jax.Array) else _in_float32(source, format(fmt))
    fmt, projection = check_arguments(
        "fake_convert", x, fmt, rounding, saturation, key, random_bits, index_offset
    )
    check_holds("fake_convert", fmt, x.dtype)
    rule = estimator("fake_convert", gradient)
    check = functools.partial(parameter, "fake_convert", dtypes=(x.dtype,), checks_arrays=False)
    scale = check("scale", scale, x, NONZERO)
    shift = None if shift is None else check("shift", shift, x, FINITE)
    return _fake_convert_jitted(x, scale, shift, projection, fmt, rule)


def _in_float32(x: np.ndarray, fmt: Format) -> jax.Array:
    """float64 as float32. Rounding this to `fmt` gives the same as rounding the exact number."""
    # Round to nearest could move a number onto a tie of `fmt`. Round to odd cannot: the last bit of
    # an inexact result is 1, that of a tie is 0, if float32 has two bits more than `fmt`.
    to_odd = fmt.mantissa_bits + 2 <= FLOAT32.mantissa_bits
    projection = Projection("to_odd" if to_odd else "nearest_even", "propagate")
    return cast_for("fake_convert", x, FLOAT32, projection)


@jax.custom_jvp
def _shifted(x: jax.Array, scale: jax.Array, shift: jax.Array | None) -> jax.Array:
    """`u = x * scale - shift`, rounded to the dtype of `x` after each step."""
    # float32 has at least 2p + 2 significand bits for the p bits of float16 and bfloat16. So a
    # result that is rounded to float32 first and then to p bits equals the exact result rounded
    # once (Figueroa, 1995).
    u = product(widened(x), widened(scale))
    if shift is not None:
        u = rounded_to(u, x.dtype) - widened(shift)
    return in_dtype(u, x.dtype)


@_shifted.defjvp
def _shifted_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, scale, shift = primals
    x_dot, scale_dot, shift_dot = tangents
    u_dot = linear_product(broadcast_like(scale, x), x_dot)
    u_dot += _broadcast_product(differentiable_widened(x), scale_dot, x.dtype)
    if shift_dot is not None:
        u_dot -= _broadcast_product(jnp.ones_like(differentiable_widened(x)), shift_dot, x.dtype)
    return _shifted(x, scale, shift), u_dot


def _broadcast_product(coefficient: jax.Array, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`coefficient * x`, rounded to `dtype`, where `x` is the tangent of a scale or a shift.

    Its transpose sums over the axes that are broadcast, in the dtype of the coefficient. JAX's own
    would multiply a cotangent of 0 by a NaN or an infinity, which gives NaN; here the term is 0.

    Args:
      coefficient: float32 or float64.
      x: The same or a narrower float dtype; of the rank of `coefficient`, to which it broadcasts.
    """
    # The transpose must know the sharding of `x` if its mesh has explicit axes.
    sharding = jax.typeof(x).sharding
    explicit = sharding if sharding.mesh.explicit_axes else None
    transpose = _ProductTransposed(x.shape, x.dtype, explicit)
    return linear_with_transpose(_Product(jnp.dtype(dtype)), transpose, (coefficient,), x)


@dataclasses.dataclass(frozen=True)
class _Product:
    """`coefficient * x`, as a function of (coefficient,) and x."""

    dtype: DTypeLike

    def __call__(self, residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        factor = jnp.broadcast_to(widened(x), residuals[0].shape)
        return in_dtype(differentiable_product(residuals[0], factor), self.dtype)


@dataclasses.dataclass(frozen=True)
class _ProductTransposed:
    """The transpose of `_Product`: a cotangent of the shape, dtype and sharding of x."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    sharding: jax.sharding.Sharding | None

    def __call__(self, residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> jax.Array:
        wide = widened(cotangent)
        zero = jnp.zeros_like(wide)
        terms = jnp.where(wide == 0, zero, differentiable_product(residuals[0], wide))
        sizes = zip(self.shape, terms.shape, strict=True)
        broadcast_axes = [axis for axis, (n, size) in enumerate(sizes) if n != size]
        total = in_dtype(jnp.sum(terms, axis=broadcast_axes, keepdims=True), self.dtype)
        return total if self.sharding is None else jax.sharding.reshard(total, self.sharding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _fake_convert(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array | None,
    projection: Projection,
    fmt: Format,
    rule: Estimator,
) -> jax.Array:
    u = _shifted(x, scale, shift)
    q = widened(round_values(u, fmt, projection.drawn(x.shape)))
    if shift is not None:
        q = rounded_to(q + widened(shift), x.dtype)
    return in_dtype(quotient(q, widened(scale)), x.dtype)


def _fake_convert_jvp(
    fmt: Format, rule: Estimator, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    x, scale, shift, projection = primals
    x_dot, scale_dot, shift_dot, _ = tangents
    y = _fake_convert(x, scale, shift, projection, fmt, rule)
    wide_y, wide_scale = differentiable_widened(y), differentiable_widened(scale)
    # The slope D: add the terms in the docstring of `fake_convert`.
    d = slope(rule, _shifted(x, scale, shift), fmt)
    wide_d = differentiable_widened(d)
    y_dot = jnp.zeros_like(y)
    if not isinstance(x_dot, SymbolicZero):
        y_dot += slope_times_tangent(rule, d, x_dot)
    if not isinstance(scale_dot, SymbolicZero):
        d_times_x = linear_product(wide_d, differentiable_widened(x))
        by_scale = differentiable_quotient(d_times_x - wide_y, wide_scale)
        y_dot += _broadcast_product(by_scale, scale_dot, y.dtype)
    if shift is not None and not isinstance(shift_dot, SymbolicZero):
        by_shift = differentiable_quotient(jnp.broadcast_to(1 - wide_d, x.shape), wide_scale)
        y_dot += _broadcast_product(by_shift, shift_dot, y.dtype)
    return y, y_dot


_fake_convert.defjvp(_fake_convert_jvp, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _fake_convert_jitted(
    x: jax.Array, scale: jax.Array, shift: jax.Array | None, projection: Projection, *options: Any
) -> jax.Array:
    return _fake_convert(
        x, with_rank(scale, x.ndim), with_rank(shift, x.ndim), projection, *options
    )
