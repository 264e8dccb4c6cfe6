"""Scales of blocks: how to compute them from amax, how to store them, and how to apply them.

Data is divided and multiplied by scales as they are stored, that is after rounding to the scale
format. Powers of two are applied by their exponents, so that data, scales and results may be
subnormal. All other scales are float32 numbers, applied by IEEE division and multiplication.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import (
    binary_parts,
    differentiable_widened,
    dtype_from_codes,
    e8m0_codes,
    elementwise,
    from_stored,
    ieee_quotient,
    is_zero,
    positive_to_stored,
    power_of_two,
    power_to_stored,
    prevent_merging,
    product,
    quotient,
    times_power_of_two,
    to_stored,
)
from qtoolkit.formats import (
    E8M0FNU,
    FLOAT32,
    BlockFormat,
    FloatFormat,
    IntFormat,
    TableFormat,
)
from qtoolkit.formats.internal import POWER_RULES, binade

_LEAST = Fraction(1, 2**126)  # float32's lowest normal number; XLA's CPU reads less as zero


def scale_from(amax: jax.Array, spec: BlockFormat, tensor_scale: jax.Array | None) -> jax.Array:
    """The scale, as stored, of blocks with a float32 `amax`; NaN for NaN; the first candidate."""
    return candidate_scales(amax, spec, tensor_scale)[0]


def candidate_scales(
    amax: jax.Array, spec: BlockFormat, tensor_scale: jax.Array | None
) -> tuple[jax.Array, ...]:
    """All scales that the rule of `spec` gives; the elements decide among them."""
    if tensor_scale is None:
        return _candidates(amax, spec)
    assert spec.tensor_scale is not None
    second = from_stored(tensor_scale, spec.tensor_scale)
    return _candidates(amax, spec, jnp.ones_like(amax) * second)


@elementwise
def _candidates(
    amax: jax.Array, spec: BlockFormat, tensor_scale: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    assert spec.scale is not None
    if spec.amax_epsilon:
        amax = jnp.where(amax < np.float32(spec.amax_epsilon), np.float32(spec.amax_epsilon), amax)
    if has_normal_powers(spec):
        codes = e8m0_codes(amax, binade(spec.largest), _least_carrying(spec))
        return (dtype_from_codes(codes, spec.scale),)
    if spec.rule in POWER_RULES:
        return (power_to_stored(_power_exponent(amax, spec), jnp.isnan(amax), spec.scale),)
    least = least_scale(spec.scale)
    if callable(spec.rule):
        scales = _by_function(amax, spec)
    elif tensor_scale is None:
        scales = [_quotient_scale(amax, divisor, least) for divisor in _divisors(spec)]
    else:
        scales = [ieee_quotient(amax, jnp.full_like(amax, float(d))) for d in _divisors(spec)]
    if tensor_scale is not None:
        combine = product if spec.tensor_scale_divides else quotient
        scales = [combine(scale, tensor_scale) for scale in scales]
    if tensor_scale is not None or callable(spec.rule):
        scales = [jnp.maximum(scale, np.float32(float(least))) for scale in scales]
    return tuple(positive_to_stored(scale, spec.scale) for scale in scales)


def _divisors(spec: BlockFormat) -> tuple[Fraction, ...]:
    """What an amax is divided by: one number, or one for each candidate."""
    if spec.rule == "four_over_six":  # the amax becomes 6 or 4, whichever loses less
        return Fraction(6), Fraction(4)
    if spec.rule == "range" and isinstance(spec.element, IntFormat):
        return (Fraction(spec.element.max_finite - spec.element.lowest) / 2,)
    return (spec.largest,)


def _by_function(amax: jax.Array, spec: BlockFormat) -> list[jax.Array]:
    """The scales of a rule that is a function; 1 for an amax of 0, NaN for NaN."""
    assert callable(spec.rule)
    is_one = is_zero(amax)
    result = spec.rule(jnp.where(is_one, np.float32(1), amax), float(spec.largest))
    scales = list(result) if isinstance(result, tuple | list) else [result]
    for scale in scales:
        if getattr(scale, "dtype", None) != jnp.float32 or scale.shape != amax.shape:
            raise TypeError(
                f"{spec.name}: the rule returned {scale!r}, expected float32 scales in the shape "
                "of amax, one or a tuple; compute them from amax by operations of JAX"
            )
    if not scales:
        raise ValueError(f"{spec.name}: the rule returned no scale, expected one or more")
    return [jnp.where(is_one, np.float32(1), prevent_merging(scale)) for scale in scales]


@elementwise
def power_above(scale: jax.Array) -> jax.Array:
    """The least power of two that is not below a positive float32 number, itself below 2**127."""
    exponent, fraction = binary_parts(scale)
    return power_of_two(exponent + (fraction > 0).astype(jnp.int32))


def tensor_scale_from(amax: jax.Array, spec: BlockFormat) -> jax.Array:
    """The scale of the whole tensor, as it is stored, from the amax of the whole tensor."""
    assert spec.scale is not None
    assert spec.tensor_scale is not None
    if spec.tensor_scale_divides:
        return to_stored(_dividing_scale(amax, spec), spec.tensor_scale)
    # At least this, so that its product with the least scale of a block is a normal number, too.
    least = _LEAST / least_scale(spec.scale)
    scale = _quotient_scale(amax, spec.largest * spec.largest_scale, least)
    return to_stored(scale, spec.tensor_scale)


@elementwise
def _dividing_scale(amax: jax.Array, spec: BlockFormat) -> jax.Array:
    """Largest element * largest scale / amax, by which results are divided; 1 for zeros."""
    # As `generate_gparam` of compressed-tensors computes it.
    assert spec.scale is not None
    largest = np.float32(float(spec.largest * spec.largest_scale))
    one = jnp.ones_like(amax)
    # PyTorch divides a number by a tensor by multiplying with the rounded reciprocal. Above 2**126
    # the reciprocal would be subnormal, which XLA's CPU reads as 0.
    is_huge = amax > np.float32(2.0**120)
    divisor = jnp.where(is_zero(amax), largest, amax)
    scale = ieee_quotient(jnp.where(is_huge, largest, one), divisor)
    scale = product(scale, jnp.where(is_huge, one, largest))
    # At most this, so that the least scale of a block divided by it is a normal number, too.
    most = np.float32(float(least_scale(spec.scale) / _LEAST))
    return jnp.where(is_zero(amax), one, jnp.minimum(scale, most))


def least_scale(fmt: FloatFormat) -> Fraction:
    """The least scale of a format: its lowest positive value, if that is a normal float32."""
    return fmt.min_normal if not fmt.has_zero else max(fmt.min_subnormal, _LEAST)


@elementwise
def asymmetric(
    lowest: jax.Array, largest: jax.Array, spec: BlockFormat
) -> tuple[jax.Array, jax.Array]:
    """Scale and zero point of integers for blocks from `lowest` <= 0 to `largest` >= 0."""
    assert spec.scale is not None
    first, last = (float(v) for v in (spec.element.lowest, spec.element.max_finite))
    half = largest * np.float32(0.5) - lowest * np.float32(0.5)  # the whole range may overflow
    scale = _quotient_scale(half, Fraction(last - first) / 2, least_scale(spec.scale))
    stored = to_stored(scale, spec.scale)
    place = jnp.round(quotient(lowest, from_stored(stored, spec.scale)))
    zero_point = jnp.clip(np.float32(first) - place, np.float32(first), np.float32(last))
    return stored, jnp.where(jnp.isnan(zero_point), np.float32(0), zero_point).astype(jnp.int32)


def effective_scale(
    scale: jax.Array, tensor_scale: jax.Array | None, spec: BlockFormat, *, is_own: bool = False
) -> jax.Array:
    """The float32 number by which a value of the element format is multiplied.

    Do not compute with it if scales are powers of two: it may be subnormal, which XLA's CPU reads
    as zero. `is_own` says that `scale` comes from `scale_from`.
    """
    assert spec.scale is not None
    # XLA cannot skip the rounding of such a scale, so `astype`, one operation, replaces 35.
    is_narrow = is_own and spec.scale.bits == 8 and spec.scale.dtype is not None
    value = scale.astype(jnp.float32) if is_narrow else from_stored(scale, spec.scale)
    if tensor_scale is not None:
        assert spec.tensor_scale is not None
        second = from_stored(tensor_scale, spec.tensor_scale)
        combine = quotient if spec.tensor_scale_divides else product
        value = combine(value, _over(second, value))
    if spec.element_exponent:
        value = times_power_of_two(value, jnp.full_like(value, spec.element_exponent, jnp.int32))
    return value


def differentiable_scale(
    scale: jax.Array | None, tensor_scale: jax.Array | None, spec: BlockFormat
) -> jax.Array:
    """`effective_scale`, for scales of 16 bits and more, by operations that have a derivative."""
    assert scale is not None
    value = differentiable_widened(scale)
    if tensor_scale is None:
        return value
    second = _over(differentiable_widened(tensor_scale), value)
    return value / second if spec.tensor_scale_divides else value * second


def _over(tensor_scale: jax.Array, scales: jax.Array) -> jax.Array:
    """Add trailing axes, so that one number for each tensor of a batch broadcasts to `scales`."""
    return tensor_scale.reshape(tensor_scale.shape + (1,) * (scales.ndim - tensor_scale.ndim))


@elementwise
def _quotient_scale(amax: jax.Array, largest: Fraction, least: Fraction) -> jax.Array:
    """`amax / largest`, but at least the power of two `least`; 1 where `amax` is zero."""
    # The division comes last, because XLA repeats cheap operations in every kernel that reads the
    # scale: a maximum after the division would be one more kernel to compile.
    divisor = np.float32(float(largest))
    bound = np.float32(float(max(least * Fraction(float(divisor)), _LEAST)))
    dividend = jnp.where(is_zero(amax), divisor, jnp.maximum(amax, bound))
    return ieee_quotient(dividend, jnp.full_like(amax, divisor))


def unclamped_range(spec: BlockFormat) -> tuple[float, float]:
    """The range that rounding to nearest does not clamp: the finite one and half a step more."""
    element = spec.element
    lowest, highest = element.lowest + spec.narrow_range, element.max_finite
    first = last = Fraction(1)
    if isinstance(element, FloatFormat):
        last = highest - element.magnitude(element.max_code - 1)
        first = last if element.signed else element.min_positive
        first = first if element.has_zero else 2 * lowest  # zero is no step below the lowest
    elif isinstance(element, TableFormat):
        values = [Fraction(value) for value in element.finite]
        first, last = values[1] - values[0], values[-1] - values[-2]
        if element.beyond is not None:
            last = Fraction(element.beyond) - highest
            first = last if element.signed else first
    limit = FLOAT32.max_finite
    return float(max(lowest - first / 2, -limit)), float(min(highest + last / 2, limit))


def has_normal_powers(spec: BlockFormat) -> bool:
    """Whether the scales of data are E8M0 codes and each 2**-e is a normal number of float32."""
    # If the largest element is 4 or more: e is the exponent of an amax less that of the largest
    # element, so at most 126.
    is_plain = spec.rule in POWER_RULES and not spec.element_exponent
    return is_plain and spec.scale == E8M0FNU and spec.largest >= 4


def _least_carrying(spec: BlockFormat) -> int:
    """The least fraction of an amax, of 2**23, for which the exponent of the scale is one more."""
    significand = spec.largest / Fraction(2) ** binade(spec.largest)
    match spec.rule:
        case "ceil":
            return 1
        case "rceil":
            # amax / largest > 2**e, in integers; `largest` may have more bits than float32.
            return int((significand - 1) * 2**23) + 1
        case "below":
            return math.ceil((significand - 1) * 2**23)
        case "even":
            return 2**23 - (2**22 >> spec.element.mantissa_bits)
    return 2**23  # there is none


def _power_exponent(amax: jax.Array, spec: BlockFormat) -> jax.Array:
    """The exponent of the power of two by the rule of `spec` for amax; arbitrary for a NaN."""
    assert spec.scale is not None
    amax_exponent, fraction = binary_parts(amax)
    e = amax_exponent - np.int32(binade(spec.largest))
    e += (fraction >= np.uint32(_least_carrying(spec))).astype(jnp.int32)
    lowest = binade(least_scale(spec.scale))
    highest = binade(min(spec.scale.max_finite, FLOAT32.max_finite))
    return jnp.where(is_zero(amax), np.int32(lowest), jnp.clip(e, lowest, highest))
