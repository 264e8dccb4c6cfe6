"""`fake_cast`: the rounding of `casts` with a derivative."""

import functools
from typing import Any

import jax
from jax.typing import ArrayLike

from qtoolkit.casts import Projection, Stochastic
from qtoolkit.casts.internal import (
    check_arguments,
    check_holds,
    check_unnarrowed,
    hinting,
    result_dtype,
    round_values,
    rounded,
)
from qtoolkit.formats import Format, FormatLike
from qtoolkit.gradients._estimators import Estimator, estimator, tangent


@hinting
def fake_cast(
    x: ArrayLike,
    fmt: FormatLike,
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
    gradient: str | Estimator = "clipped",
) -> jax.Array:
    """Rounds `x` once to the values of `fmt`, keeps its dtype, and is differentiable.

    Bit for bit `decode(encode(x, fmt), fmt, x.dtype)`.

    Args:
      x: float32, float16, bfloat16 or float64, any shape; already divided by its scale.
      fmt: A format or any spelling of one, see `qtoolkit.format`.
      rounding, saturation, key, random_bits, index_offset: As in `round_to_format`.
      gradient: The slope that replaces the derivative of the rounding: "clipped" (1 within the
        finite range of `fmt`, else 0, also at infinities and NaN), "identity", "zero", or an object
        such as `qtoolkit.gradients.Ramp(0.5)`, see `qtoolkit.gradients.Estimator`.

    Returns:
      Shape and dtype of `x`. Where JAX has 64-bit types off, NumPy's float64 and Python's floats
      are rounded from their exact values, and the result is float32: `fake_cast(0.3, "e4m3fn")`.

    Raises:
      TypeError: `x` has another dtype.
      ValueError: Unknown format, rounding, saturation or gradient, or the dtype of `x` does not
        hold every finite value of `fmt`.

    Gradient: the tangent times the estimator's slope, by `custom_jvp`: forward and reverse mode of
    any order. Random bits have none.

    Source: arXiv:2209.05433 (the formats); arXiv:1308.3432 (straight-through estimator).

    Examples:
      >>> x = jnp.asarray([0.3, 17.0, 449.0, jnp.nan])
      >>> qt.fake_cast(x, "e4m3fn")
      Array([3.125e-01, 1.600e+01, 4.480e+02,       nan], dtype=float32)
      >>> jax.grad(lambda x: qt.fake_cast(x, "e4m3fn").sum())(x)  # 0 where x is beyond 448
      Array([1., 1., 0., 0.], dtype=float32)
    """
    x = check_unnarrowed("fake_cast", x)
    fmt, projection = check_arguments(
        "fake_cast", x, fmt, rounding, saturation, key, random_bits, index_offset
    )
    check_holds("fake_cast", fmt, result_dtype(x))
    rule = estimator("fake_cast", gradient)
    if not isinstance(x, jax.Array):  # a constant of 64 bits, which are off in JAX
        return rounded(x, projection, fmt)
    return _fake_cast_jitted(x, projection, fmt, rule)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _fake_cast(x: jax.Array, projection: Projection, fmt: Format, rule: Estimator) -> jax.Array:
    return round_values(x, fmt, projection.drawn(x.shape))


@_fake_cast.defjvp
def _fake_cast_jvp(
    fmt: Format, rule: Estimator, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (x, projection), (x_dot, _) = primals, tangents
    return _fake_cast(x, projection, fmt, rule), tangent(rule, x, x_dot, fmt)


_fake_cast_jitted = jax.jit(_fake_cast, static_argnums=(2, 3))
