"""The bit patterns on which rounding works.

A value that float32 holds is represented by its float32 pattern. Other values, such as 32- and
64-bit integers and float64, are represented by an `Exact`: sign, significand, exponent. All
arithmetic is on integers, since XLA's float arithmetic reads subnormals as zero on CPUs.
"""

import functools
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts._elementwise import by_platform, elementwise
from qtoolkit.formats import FloatFormat, Format, IntFormat, TableFormat, format

FLOAT32_MANTISSA = 23
MAGNITUDE = 0x7FFFFFFF
SIGN = 0x80000000
INF = 0x7F800000
NAN = 0x7FC00000


def u32(value: int) -> np.uint32:
    """A uint32 constant; negative values wrap."""
    return np.uint32(value & 0xFFFFFFFF)


class Exact(NamedTuple):
    """Numbers (-1)**negative * significand * 2**(exponent - top), with infinities and NaNs.

    `significand` is unsigned. Its leading one is at bit `top`, or below if it is not normalized.
    Deterministic roundings add to it and need two spare bits above `top`. If low bits are cut off
    to make room, the last bit is set if one of them was 1 (rounding to odd), so that a later
    rounding gives the same result as for the exact number. Stochastic rounding needs no room and
    must not cut bits off: for 2**31 + 1 it would count the last bit, set for a quarter of a unit,
    as a whole unit, and round up four times too often.
    """

    negative: jax.Array
    significand: jax.Array
    exponent: jax.Array  # int32
    is_inf: jax.Array | bool = False
    is_nan: jax.Array | bool = False
    spare: int = 2

    @property
    def top(self) -> int:
        """The place of a normalized significand's leading one."""
        return 8 * self.significand.dtype.itemsize - 1 - self.spare

    def in_64_bits(self) -> "Exact":
        if self.significand.dtype == jnp.uint64:
            return self
        return self._replace(significand=self.significand.astype(jnp.uint64) << np.uint64(32))


def pattern(x: jax.Array) -> jax.Array:
    """The uint32 pattern of the float32 value of `x`, which float32 must hold."""
    if x.dtype == jnp.bfloat16:  # a shift, so that bfloat16's subnormals survive
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    if x.dtype == jnp.float32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    if x.dtype == jnp.float16:
        return _pattern_of_float16(x)
    fmt = format(x.dtype)
    if isinstance(fmt, FloatFormat):
        return float_pattern(codes_from_dtype(x, fmt).astype(jnp.uint32), fmt)
    return lax.bitcast_convert_type(x.astype(jnp.int32).astype(jnp.float32), jnp.uint32)


def _by_widening(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _by_widening_magnitudes(x: jax.Array) -> jax.Array:
    # GPUs would drop the sign of NaNs, so only magnitudes are widened. For GPUs XLA also removes a
    # narrowing to float16 that is directly followed by a widening; the selection separates the two.
    half = lax.bitcast_convert_type(x, jnp.uint16)
    magnitude = half & np.uint16(0x7FFF)
    magnitude = jnp.where(magnitude > np.uint16(0x7C00), np.uint16(0x7E00), magnitude)
    bits = _by_widening(lax.bitcast_convert_type(magnitude, jnp.float16))
    bits = jnp.where(magnitude > np.uint16(0x7C00), u32(NAN), bits)
    return bits | ((half & np.uint16(0x8000)).astype(jnp.uint32) << np.uint32(16))


_pattern_of_float16 = by_platform(
    "pattern_of_float16",
    cpu=_by_widening,
    others=_by_widening_magnitudes,
    aval=lambda x: x.update(dtype=np.dtype(np.uint32), weak_type=False),
)


def from_pattern(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The value with float32 pattern `bits`, which `dtype` (float32 or narrower) must hold."""
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
    x = lax.bitcast_convert_type(bits, jnp.float32)
    if dtype == jnp.float16:
        return to_float16(x)
    return x.astype(dtype)


def _narrowed_by_hand(x: jax.Array) -> jax.Array:
    # GPUs turn all NaNs to 0x7FFF.
    half = lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = (bits >> np.uint32(16)).astype(jnp.uint16) & np.uint16(0x8000)
    half = jnp.where((bits & u32(MAGNITUDE)) > u32(INF), sign | np.uint16(0x7E00), half)
    return lax.bitcast_convert_type(half, jnp.float16)


to_float16 = by_platform(
    "to_float16",
    cpu=lambda x: x.astype(jnp.float16),
    others=_narrowed_by_hand,
    aval=lambda x: x.update(dtype=np.dtype(np.float16), weak_type=False),
)


def exact_float32(x: jax.Array) -> jax.Array:
    """float16, bfloat16 or float32 as float32, subnormals included."""
    # By the pattern: XLA may widen a bfloat16 number that was made in the same jit without rounding
    # it to bfloat16 first.
    return x if x.dtype == jnp.float32 else _exact_float32(x)


@elementwise
def _exact_float32(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(pattern(x), jnp.float32)


@elementwise
def codes_from_dtype(x: jax.Array, fmt: Format) -> jax.Array:
    """The codes of an array of the format's own dtype, as `fmt.code_dtype`."""
    if fmt.bits == 1:
        return x.astype(fmt.code_dtype)
    unsigned = np.dtype(f"uint{fmt.bits}")
    return lax.bitcast_convert_type(x, unsigned).astype(fmt.code_dtype)


@elementwise
def dtype_from_codes(codes: jax.Array, fmt: Format) -> jax.Array:
    """The array of the format's own dtype with these codes."""
    assert fmt.dtype is not None
    if fmt.bits == 1:
        return codes.astype(fmt.dtype)
    return lax.bitcast_convert_type(codes.astype(np.dtype(f"uint{fmt.bits}")), fmt.dtype)


def exact_from_pattern(bits: jax.Array, normalized: bool = True) -> Exact:
    """float32 patterns as `Exact` numbers of 32 bits."""
    magnitude = bits & u32(MAGNITUDE)
    negative, is_inf, is_nan = bits >= u32(SIGN), magnitude == u32(INF), magnitude > u32(INF)
    field = (magnitude >> np.uint32(FLOAT32_MANTISSA)).astype(jnp.int32)
    mantissa = magnitude & u32((1 << FLOAT32_MANTISSA) - 1)
    significand = mantissa | jnp.where(field > 0, u32(1 << FLOAT32_MANTISSA), u32(0))
    exponent = jnp.maximum(field, 1) - np.int32(127)
    if normalized:
        exponent -= np.int32(FLOAT32_MANTISSA)
        return _normalized(negative, significand, exponent, is_inf, is_nan)
    return Exact(negative, significand << np.uint32(6), exponent, is_inf, is_nan)


def exact_from_float64(x: jax.Array) -> Exact:
    bits = lax.bitcast_convert_type(x, jnp.uint64)
    magnitude = bits & np.uint64(2**63 - 1)
    field = (magnitude >> np.uint64(52)).astype(jnp.int32)
    hidden = jnp.where(field > 0, np.uint64(2**52), np.uint64(0))
    inf = np.uint64(0x7FF << 52)
    return _normalized(
        bits >= np.uint64(2**63),
        (magnitude & np.uint64(2**52 - 1)) | hidden,
        jnp.maximum(field, 1) - np.int32(1023 + 52),
        magnitude == inf,
        magnitude > inf,
    )


def exact_from_integer(x: jax.Array, spare: int = 2) -> Exact:
    """Integers of any width as `Exact` numbers of 32 bits, from 64-bit ones of 64."""
    width = 64 if x.dtype.itemsize == 8 else 32
    unsigned = jnp.uint64 if width == 64 else jnp.uint32
    negative = x < 0 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.zeros(x.shape, bool)
    magnitude = x.astype(unsigned)
    magnitude = jnp.where(negative, -magnitude, magnitude)
    return _normalized(negative, magnitude, jnp.zeros(x.shape, jnp.int32), spare=spare)


def _normalized(
    negative: jax.Array,
    magnitude: jax.Array,
    exponent: jax.Array,
    is_inf: jax.Array | bool = False,
    is_nan: jax.Array | bool = False,
    spare: int = 2,
) -> Exact:
    """`magnitude * 2**exponent` with its leading one moved into place; zero has a low exponent."""
    dtype = magnitude.dtype.type
    width = 8 * magnitude.dtype.itemsize
    zeros = lax.clz(magnitude)
    shifted = magnitude << jnp.minimum(zeros, dtype(width - 1))
    significand = shifted
    if spare:
        cut = shifted & dtype((1 << spare) - 1)
        significand = (shifted >> dtype(spare)) | (cut != 0).astype(magnitude.dtype)
    leading = exponent + np.int32(width - 1) - zeros.astype(jnp.int32)
    leading = jnp.where(magnitude == 0, np.int32(-(2**20)), leading)
    return Exact(negative, significand, leading, is_inf, is_nan, spare)


def exact_from_codes(codes: jax.Array, fmt: FloatFormat) -> Exact:
    """The values of codes of `fmt`, as `Exact` numbers of the codes' width (32 or 64 bits)."""
    dtype = codes.dtype.type
    magnitude = codes & dtype(fmt.magnitude_count - 1)
    field = (magnitude >> dtype(fmt.mantissa_bits)).astype(jnp.int32)
    mantissa = magnitude & dtype((1 << fmt.mantissa_bits) - 1)
    hidden = dtype(1 << fmt.mantissa_bits)
    if fmt.has_zero:
        mantissa = mantissa | jnp.where(field > 0, hidden, dtype(0))
        field = jnp.maximum(field, 1)
    else:
        mantissa = mantissa | hidden
    negative = (codes & dtype(fmt.sign_code)) != 0
    is_nan: jax.Array | bool = False
    if fmt.has_negative_zero:
        is_nan = magnitude > dtype(fmt.max_code + fmt.has_inf)
    elif fmt.nan_code is not None:
        is_nan = codes == dtype(fmt.nan_code)
        negative &= ~is_nan
    is_inf = False if fmt.inf_code is None else magnitude == dtype(fmt.inf_code)
    exponent = field - np.int32(fmt.bias + fmt.mantissa_bits)
    return _normalized(negative, mantissa, exponent, is_inf, is_nan)


def scaled_integer(q: jax.Array, exponent: int) -> jax.Array:
    """The float32 pattern of q * 2**exponent, for uint32 q < 2**24 and exponent >= -149."""
    as_float = q.astype(jnp.int32).astype(jnp.float32)  # exact below 2**24
    if exponent >= -126:  # no product is subnormal, so float arithmetic is exact
        return lax.bitcast_convert_type(as_float * np.float32(2.0**exponent), jnp.uint32)
    bits = lax.bitcast_convert_type(as_float, jnp.uint32)
    rebased = bits + u32(exponent << FLOAT32_MANTISSA)
    is_normal = (bits >> np.uint32(FLOAT32_MANTISSA)) > np.uint32(-exponent)
    return jnp.where(is_normal, rebased, q << np.uint32(149 + exponent))


def float_pattern(codes: jax.Array, fmt: FloatFormat) -> jax.Array:
    """The float32 patterns of float codes given as uint32; float32 must hold the format."""
    magnitude = codes & u32(fmt.magnitude_count - 1)
    shift = FLOAT32_MANTISSA - fmt.mantissa_bits
    bits = (magnitude << np.uint32(shift)) + u32((127 - fmt.bias) << FLOAT32_MANTISSA)
    if fmt.has_zero and fmt.min_exponent != -126:  # at -126 its subnormals are float32's own
        step_exponent = fmt.min_exponent - fmt.mantissa_bits
        subnormal = magnitude < u32(1 << fmt.mantissa_bits)
        bits = jnp.where(subnormal, scaled_integer(magnitude, step_exponent), bits)
    if fmt.min_exponent == -127 and not fmt.has_zero:  # the lowest binade is subnormal, as in E8M0
        least = magnitude < u32(1 << fmt.mantissa_bits)
        significand = (magnitude | u32(1 << fmt.mantissa_bits)) << np.uint32(shift)
        bits = jnp.where(least, significand >> np.uint32(1), bits)
    elif fmt.min_exponent < -126:  # several binades are subnormal in float32
        field = (magnitude >> np.uint32(fmt.mantissa_bits)).astype(jnp.int32)
        below = np.int32(fmt.bias - 127 + 1) - field  # binades below the lowest normal one
        mantissa = magnitude & u32((1 << fmt.mantissa_bits) - 1)
        significand = (mantissa | u32(1 << fmt.mantissa_bits)) << np.uint32(shift)
        shifted = significand >> jnp.clip(below, 0, 31).astype(jnp.uint32)
        is_small = (below > 0) & ((field > 0) if fmt.has_zero else True)
        bits = jnp.where(is_small, shifted, bits)
    if fmt.inf_code is not None:
        bits = jnp.where(magnitude == u32(fmt.inf_code), u32(INF), bits)
    sign = (codes << np.uint32(32 - fmt.bits)) & u32(SIGN if fmt.signed else 0)
    if fmt.has_negative_zero:
        if fmt.has_nan:
            is_nan = magnitude > u32(fmt.max_code + fmt.has_inf)
            bits = jnp.where(is_nan, u32(NAN), bits)
        return bits | sign
    if fmt.nan_code is None:
        return bits | sign
    is_nan = codes >= u32(fmt.nan_code) if not fmt.signed else codes == u32(fmt.nan_code)
    return jnp.where(is_nan, u32(NAN), bits | sign)


def exact_float32_pattern(value: Fraction | int) -> int:
    """The float32 pattern of a number that float32 holds."""
    return int(np.float32(float(value)).view(np.uint32))


@functools.lru_cache(maxsize=4096)  # exact fractions: each matmul that is traced asks six times
def holds(fmt: Format, dtype: DTypeLike) -> bool:
    """Whether `dtype` holds every finite value of `fmt` exactly."""
    wide = format(dtype)
    inside = wide.lowest <= fmt.lowest and fmt.max_finite <= wide.max_finite
    if isinstance(wide, IntFormat):
        return inside and isinstance(fmt, IntFormat)
    assert isinstance(wide, FloatFormat)
    has_zero, least_step = True, Fraction(1)  # every finite value is a multiple of the step
    if isinstance(fmt, FloatFormat):
        has_zero, least_step = fmt.has_zero, fmt.min_normal / 2**fmt.mantissa_bits
    elif isinstance(fmt, TableFormat):
        least_step /= max(Fraction(value).denominator for value in fmt.finite)
    return (
        inside
        and fmt.mantissa_bits <= wide.mantissa_bits
        and least_step >= wide.min_subnormal
        and (wide.has_zero or not has_zero)
    )


def check_holds(where: str, fmt: Format, dtype: DTypeLike) -> None:
    """ValueError where `dtype` does not hold every finite value of `fmt` exactly."""
    if not holds(fmt, np.dtype(dtype)):
        wide = next((d for d in ("float32", "float64") if holds(fmt, d)), None)
        hint = f"use {wide}" if wide else "use format.value(code), which is exact"
        raise ValueError(
            f"{where}: dtype {np.dtype(dtype)} does not hold every finite value of {fmt.name}, "
            f"expected a wider one; {hint}"
        )
