"""float32 bit patterns: the one shape in which values are rounded.

Every source is widened to the pattern of its exact float32 value and narrowed back from it. All of
it is integer work where XLA's float arithmetic is not exact: on CPU it reads subnormals as zero.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.formats import FloatFormat, Format

SOURCES = (np.dtype("float32"), np.dtype("float16"), np.dtype("bfloat16"))

FLOAT32_MANTISSA = 23
MAGNITUDE = 0x7FFFFFFF
SIGN = 0x80000000
INF = 0x7F800000
NAN = 0x7FC00000


def u32(value: int) -> np.uint32:
    """A uint32 constant; negative values wrap, as the additions they feed do."""
    return np.uint32(value & 0xFFFFFFFF)


def pattern(x: jax.Array) -> jax.Array:
    """The uint32 pattern of `x` (float32, float16 or bfloat16) widened to float32, exactly."""
    if x.dtype == jnp.bfloat16:  # a shift, so that bfloat16's subnormals survive
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def from_pattern(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The value with float32 pattern `bits`, which `dtype` must hold exactly."""
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


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
    """The float32 patterns of float codes given as uint32."""
    magnitude = codes & u32(fmt.sign_code - 1)
    shift = FLOAT32_MANTISSA - fmt.mantissa_bits
    bits = (magnitude << np.uint32(shift)) + u32((127 - fmt.bias) << FLOAT32_MANTISSA)
    if fmt.min_exponent > -126:  # else its subnormals are float32's own
        step_exponent = fmt.min_exponent - fmt.mantissa_bits
        subnormal = magnitude < u32(1 << fmt.mantissa_bits)
        bits = jnp.where(subnormal, scaled_integer(magnitude, step_exponent), bits)
    if fmt.inf_code is not None:
        bits = jnp.where(magnitude == u32(fmt.inf_code), u32(INF), bits)
    sign = (codes << np.uint32(32 - fmt.bits)) & u32(SIGN)
    if fmt.has_negative_zero:
        is_nan = magnitude > u32(fmt.max_code + fmt.has_inf)
        return jnp.where(is_nan, u32(NAN), bits) | sign
    return jnp.where(codes == u32(fmt.nan_code), u32(NAN), bits | sign)


def exact_float32_pattern(value: Fraction | int) -> int:
    """The float32 pattern of a number that float32 holds."""
    return int(np.float32(float(value)).view(np.uint32))


def check_source(where: str, x: jax.typing.ArrayLike) -> jax.Array:
    """`x` as a JAX array, or TypeError where its dtype is none of `SOURCES`."""
    dtype = getattr(x, "dtype", None)
    if dtype not in SOURCES:
        got = f"dtype {dtype}" if dtype is not None else f"type {type(x).__name__}"
        raise TypeError(
            f"{where}: x has {got}, expected float32, float16 or bfloat16; convert it first, "
            "e.g. jnp.asarray(x, jnp.float32)"
        )
    return jnp.asarray(x)


def check_range(where: str, fmt: Format) -> None:
    """ValueError where `fmt` has finite values that float32's normal exponents do not reach."""
    if isinstance(fmt, FloatFormat) and not (
        fmt.min_exponent >= -126 and fmt.max_exponent <= 127 and fmt.mantissa_bits <= 23
    ):
        raise ValueError(
            f"{where}: format {fmt.name} has exponents {fmt.min_exponent} to {fmt.max_exponent} "
            f"and {fmt.mantissa_bits} mantissa bits, expected at most float32's (-126 to 127, 23)"
        )


def check_holds(where: str, fmt: Format, dtype: DTypeLike) -> None:
    """ValueError where `dtype` does not hold every finite value of `fmt` exactly."""
    info = ml_dtypes.finfo(dtype)
    if (
        fmt.mantissa_bits > info.nmant
        or max(fmt.max_finite, -fmt.lowest) > Fraction(float(info.max))
        or fmt.min_subnormal < Fraction(float(info.smallest_subnormal))
    ):
        raise ValueError(
            f"{where}: dtype {np.dtype(dtype)} does not hold every finite value of {fmt.name}, "
            "expected a wider one; use float32"
        )
