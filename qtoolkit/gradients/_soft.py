"""Soft estimators of the literature, for the values of any format.

The papers assume equal steps. Here the step is the gap between the two values of the format next to
x, its neighbours. Each slope is computed in float32 (float64 for float64) and rounded once to the
dtype of x.
"""

import dataclasses
import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
    differentiable_product,
    differentiable_widened,
    from_ordinal,
    inside,
    ordinal,
    ordinal_of,
    round_values,
    widened,
)
from qtoolkit.formats import Format


@dataclasses.dataclass(frozen=True)
class Ramp:
    """Slope 1 within the format's range, falling linearly to 0 over a flank on either side.

    Values just beyond the range can still come back; far ones no longer drift. 0 at NaN and at the
    infinities.

    Attributes:
      width: The width of each flank, as a part of `upper - lower`; positive. As it goes to 0 the
        ramp becomes `Clipped`, as it grows `Identity`.

    Source: no published one; the saturating estimator of arXiv:1602.02830 with a flank in place of
    its jump.

    Examples:
      >>> ramp = qt.gradients.Ramp(width=0.5)
      >>> x = jnp.asarray([448.0, 560.0, 672.0, 896.0])  # a flank is 0.5 * 896 wide
      >>> jax.grad(lambda x: qt.fake_cast(x, "e4m3fn", gradient=ramp).sum())(x)
      Array([1.  , 0.75, 0.5 , 0.  ], dtype=float32)
    """

    width: float

    def __post_init__(self) -> None:
        _check(self, "width", "a finite number above 0", lambda width: width > 0)

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        wide = differentiable_widened(x)
        # Halves, since the length of a range may overflow.
        half = jnp.where(wide > upper, wide / 2 - upper / 2, lower / 2 - wide / 2)
        length = self.width * (upper / 2 - lower / 2)
        way = _over(half, min(max(length, 2.0**-126), 2.0**250))  # factors within float32
        flank = 1 - lax.clamp(np.array(0, way.dtype), way, np.array(1, way.dtype))
        flank = jnp.where(x == x, flank, jnp.zeros_like(flank))
        return jnp.where(inside(x, lower, upper), jnp.ones_like(flank), flank).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class DSQ:
    """The slope of a tanh that climbs from one neighbour of x to the other; 0 outside the range.

    With the neighbours l <= x < u, their distance D and midpoint m, the soft rounding is
    Q(x) = l + D/2 * (1 + s * tanh(k * (x - m))), s = 1 / (1 - alpha), k = log(2 / alpha - 1) / D,
    so that it meets the neighbours: s * tanh(k * D/2) = 1. Its slope D/2 * s * k * sech(...)**2 is
    largest at the midpoint. At every number of the format it is alpha * (2 - alpha) times that,
    whatever the gaps next to it.

    The tanh is centred on the midpoint for every rounding mode, also for "toward_zero" and others
    that jump elsewhere.

    Attributes:
      alpha: The paper's characteristic variable, 1 - tanh(k * D/2), between 0 and 1: the smaller,
        the closer to the steps; towards 1 it becomes the clipped straight-through estimator. The
        paper learns it; here it is a constant.

    Source: arXiv:1908.05033, section 3, there with one D for all steps.

    Examples:
      >>> x = jnp.asarray([1.0, 1.25, 1.5, 1.75, 2.0])  # between the integers 1 and 2
      >>> dsq = qt.gradients.DSQ()
      >>> slopes = jax.grad(lambda x: qt.fake_cast(x, "int4", gradient=dsq).sum())(x)
      >>> print([f"{slope:.2f}" for slope in slopes])
      ['0.49', '1.03', '1.37', '1.03', '0.49']
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        _check(self, "alpha", "a number between 0 and 1", lambda alpha: 0 < alpha < 1)

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        steepness = 2 * math.atanh(1 - self.alpha)  # k * D = log(2 / alpha - 1)
        # sech**2 by a decaying exponential: no difference of nearly equal numbers.
        decay = jnp.exp(-steepness * jnp.abs(_position(x, lower, upper, fmt)))
        peak = steepness / (2 * (1 - self.alpha))
        soft = 4 * peak * decay / jnp.square(1 + decay)
        return jnp.where(inside(x, lower, upper), soft, jnp.zeros_like(soft)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class EWGS:
    """Scales each cotangent by how far, and to which side, rounding moved the element.

    Within the range g becomes g * (1 + delta * sign(g) * (x - Q(x)) / (upper - lower)), outside it
    0. The paper has the same, with x clipped and mapped to [0, 1]. Only reverse mode follows this
    rule. In forward mode the slope is that of `Clipped`: 1 within the range, 0 outside it.

    The paper has no second derivatives. Here, forward over reverse mode applies the rule to the
    tangent of g, with the sign of that tangent, as if the rule were linear in g; to this it adds
    the derivative by x with Q(x) held constant. Reverse over reverse mode has the slope of
    `Clipped`.

    Attributes:
      delta: The paper's scaling factor, from 0 to 2**64; 0 is `Clipped`. The paper fixes it, or
        updates it from the trace of the Hessian; here it is a constant. For a factor c of the error
        x - Q(x) itself, give delta = c * (upper - lower).

    Source: arXiv:2104.00903, section 3.

    Examples:
      >>> ewgs = qt.gradients.EWGS(delta=1.0)
      >>> x = jnp.asarray([1.25, 1.75])  # rounded down, and up
      >>> slopes = jax.grad(lambda x: qt.fake_cast(x, "int4", gradient=ewgs).sum())(x)
      >>> print([f"{slope:.4f}" for slope in slopes])  # 1 + 0.25 / 15 and 1 - 0.25 / 15
      ['1.0167', '0.9833']
    """

    delta: float = 1e-3

    def __post_init__(self) -> None:
        _check(self, "delta", "a number from 0 to 2**64", lambda delta: 0 <= delta <= 2.0**64)

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        return inside(x, lower, upper).astype(x.dtype)

    def cotangent(
        self,
        g: jax.Array,
        x: jax.Array,
        q: jax.Array,
        lower: float,
        upper: float,
        fmt: Format,
    ) -> jax.Array:
        is_inside = inside(x, lower, upper)
        half_error = differentiable_widened(x) / 2 - differentiable_widened(q) / 2
        half_error = jnp.where(is_inside, half_error, jnp.zeros_like(half_error))
        change = self.delta * _over(half_error, upper / 2 - lower / 2)
        # The clamp changes no number. Without it the compiler contracts the product and the sum.
        wide = change.dtype
        change = lax.clamp(np.array(-self.delta, wide), change, np.array(self.delta, wide))
        scaled = differentiable_product(1 + jnp.sign(g).astype(wide) * change, g)
        return jnp.where(is_inside, scaled, jnp.zeros_like(scaled))


@dataclasses.dataclass(frozen=True)
class ReSTE:
    """The slope of a power function that stands for the step between the two neighbours of x.

    The paper binarizes. It approximates sign(z) by f(z) = sign(z) * |z|**(1/o), whose slope is
    f'(z) = 1/o * |z|**((1 - o)/o). It changes this slope in two places: to 0 where |z| > t, and to
    f(m) / m where |z| <= m, since f' has a pole at 0.

    The extension to a grid is ours. z is the distance of x from the midpoint of its two neighbours,
    divided by half of the gap between them: -1 at the lower one, 1 at the upper one. There f equals
    the step for every o. For x beyond the range, the neighbours are the outermost two values, so
    |z| exceeds 1. In a format with only the values -1 and 1, z is x, up to rounding in float32, and
    the slope is the paper's.

    Attributes:
      o: The power, at least 1: at 1 the straight-through estimator, the greater the closer to the
        steps. The paper raises it in training; here it is a constant.
      t: The paper's clip threshold, above `m`: with t = 1 the slope ends with the range, below 1 it
        is 0 around every number of the format.
      m: The paper's half width of the pole's cap, from 2**-15 (so that float16 holds the slope).

    Source: arXiv:2308.06689, with the thresholds of its authors' code.

    Examples:
      >>> x = jnp.asarray([1.0, 1.25, 1.45, 1.5])
      >>> reste = qt.gradients.ReSTE()
      >>> slopes = jax.grad(lambda x: qt.fake_cast(x, "int4", gradient=reste).sum())(x)
      >>> print([f"{slope:.2f}" for slope in slopes])
      ['0.33', '0.53', '4.64', '4.64']
    """

    o: float = 3.0
    t: float = 1.5
    m: float = 0.1

    def __post_init__(self) -> None:
        _check(self, "o", "a finite number of at least 1", lambda o: o >= 1)
        _check(self, "m", "a number from 2**-15 to below 1", lambda m: 2.0**-15 <= m < 1)
        _check(self, "t", f"a finite number above m={self.m}", lambda t: t > self.m)

    def slope(self, x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
        distance = jnp.abs(_position(x, lower, upper, fmt))
        power = (1 - self.o) / self.o
        in_cap = ~(distance > self.m)
        outer = jnp.where(in_cap, jnp.ones_like(distance), distance)
        soft = jnp.where(in_cap, self.m**power, outer**power / self.o)
        return jnp.where(distance <= self.t, soft, jnp.zeros_like(soft)).astype(x.dtype)


def _check(rule: Any, field: str, expected: str, holds: Any) -> None:
    """ValueError where `field` is not as `expected`; else stores it as a Python float."""
    value = getattr(rule, field)
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Real)
        or not math.isfinite(value)
        or not holds(float(value))
    ):
        raise ValueError(f"{type(rule).__name__}: {field}={value!r}, expected {expected}")
    object.__setattr__(rule, field, float(value))


def _over(x: jax.Array, length: float) -> jax.Array:
    """`x / length` by two products, because the reciprocal of a format's range may be subnormal."""
    # The clamp changes only infinities, and keeps a compiler from merging the two products.
    significand, exponent = math.frexp(length)
    first = exponent // 2
    largest = np.array(jnp.finfo(x.dtype).max, x.dtype)
    part = lax.clamp(-largest, x * 2.0**-first, largest)
    return part * (2.0 ** (first - exponent) / significand)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _position(x: jax.Array, lower: float, upper: float, fmt: Format) -> jax.Array:
    """Where `x` lies between its neighbours: -1 at the lower one, 0 midway, 1 at the upper one.

    Beyond the range the neighbours are the outermost two values, so it exceeds -1 or 1. Its
    derivative is 2 / gap, as between fixed neighbours; in float32, gaps below 2**-100 count as that
    large. float32, or float64 for float64.
    """
    below, above = _neighbours(x, lower, upper, fmt)
    x, below, above = _rescaled(widened(x), below, above)
    return ((x - below) - (above - x)) / jnp.where(above > below, above - below, 1)


@_position.defjvp
def _position_jvp(
    lower: float,
    upper: float,
    fmt: Format,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (x,), (x_dot,) = primals, tangents
    below, above = _neighbours(lax.stop_gradient(x), lower, upper, fmt)
    # XLA may read gaps near the subnormals as zeros, which would lead to inf - inf. So they count
    # as larger.
    gap = jnp.maximum(above - below, 2.0**26 * jnp.finfo(above.dtype).tiny)
    return _position(x, lower, upper, fmt), x_dot.astype(gap.dtype) * (2 / gap)


def _neighbours(
    x: jax.Array, lower: float, upper: float, fmt: Format
) -> tuple[jax.Array, jax.Array]:
    """The values of `fmt` with below <= x < above; beyond the range, the outermost two."""
    wide = widened(x)
    place = ordinal(wide)
    first, last = ordinal_of(lower, wide.dtype), ordinal_of(upper, wide.dtype)
    place = jnp.clip(place, first, last - 1)
    down, up = Projection("toward_negative"), Projection("toward_positive")
    below = round_values(from_ordinal(place, wide.dtype), fmt, down)
    above = round_values(from_ordinal(place + 1, wide.dtype), fmt, up)
    # In bool every number but 0 becomes 1, even where it is rounded down.
    below = jnp.where(ordinal(below) <= place, below, lower)
    return below, above


def _rescaled(x: jax.Array, below: jax.Array, above: jax.Array) -> tuple[jax.Array, ...]:
    """All three times one power of two: their differences neither underflow nor overflow."""
    # Neighbours below 2**-64 are multiplied by 2**64: the gap of E4M3FN * 2**-120 would be
    # subnormal, which XLA reads as zero. All others are divided by 4: the gap from -3e38 to 3e38
    # would be infinite.
    info = jnp.finfo(x.dtype)
    limit = ordinal_of(2.0**-64, x.dtype)
    is_small = jnp.maximum(jnp.abs(ordinal(below)), jnp.abs(ordinal(above))) < limit

    def rescaled(v: jax.Array) -> jax.Array:
        # A subnormal v, which XLA may read as zero, is `place` times the least one.
        place = ordinal(v)
        subnormal = place.astype(x.dtype) * 2.0 ** int(64 + info.minexp - info.nmant)
        normal = v * 2.0**64
        is_subnormal = jnp.abs(place) < ordinal_of(float(info.tiny), x.dtype)
        return jnp.where(is_small, jnp.where(is_subnormal, subnormal, normal), v / 4)

    return rescaled(x), rescaled(below), rescaled(above)
