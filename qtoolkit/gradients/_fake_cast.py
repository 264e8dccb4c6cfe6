"""`fake_cast`: the rounding of `casts` with a derivative."""

import functools
from typing import Any

import jax
from jax.typing import ArrayLike

from qtoolkit.casts import check_arguments, check_holds, round_values
from qtoolkit.formats import Format
from qtoolkit.gradients._estimators import Estimator, estimator, slope, times_slope


def fake_cast(
    x: ArrayLike,
    fmt: Any,
    *,
    rounding: str = "nearest_even",
    saturation: str = "finite",
    gradient: str | Estimator = "clipped",
) -> jax.Array:
    """Rounds `x` once to the values of `fmt`, keeps its dtype, and is differentiable.

    Bit for bit `decode(encode(x, fmt), fmt, x.dtype)`.

    Args:
      x: float32, float16 or bfloat16, any shape; already divided by its scale.
      fmt: A format or any spelling of one, see `qtoolkit.format`.
      rounding, saturation: As in `round_to_format`.
      gradient: The slope that stands for the rounding's derivative: "clipped" (1 within the finite
        range of `fmt`, else 0, also at infinities and NaN), "identity", "zero", or an object with a
        method `slope`, see `qtoolkit.gradients.Estimator`.

    Returns:
      Shape and dtype of `x`.

    Raises:
      TypeError: `x` has another dtype.
      ValueError: Unknown format, rounding, saturation or gradient, or the dtype of `x` does not
        hold every finite value of `fmt`.

    Gradient: the tangent times the estimator's slope, by `custom_jvp`: forward and reverse mode of
    any order.

    Source: arXiv:2209.05433 (the formats); arXiv:1308.3432 (straight-through estimator).
    """
    x, fmt = check_arguments("fake_cast", x, fmt, rounding, saturation)
    check_holds("fake_cast", fmt, x.dtype)
    return _fake_cast_jitted(x, fmt, saturation, estimator("fake_cast", gradient))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _fake_cast(x: jax.Array, fmt: Format, saturation: str, rule: Estimator) -> jax.Array:
    return round_values(x, fmt, saturation)


@_fake_cast.defjvp
def _fake_cast_jvp(
    fmt: Format,
    saturation: str,
    rule: Estimator,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (x,), (x_dot,) = primals, tangents
    return _fake_cast(x, fmt, saturation, rule), times_slope(slope(rule, x, fmt), x_dot)


_fake_cast_jitted = jax.jit(_fake_cast, static_argnums=(1, 2, 3))
