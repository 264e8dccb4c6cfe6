"""Convert and FakeConvert with the bits of OpenVINO's core (wheel 2026.4.1).

The core is the C++ code that runs these operators. In some cases it rounds otherwise than its
documentation says. The functions below repeat these defects. They hold float16, bfloat16 and float8
values in float32 arrays.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
    NEAREST,
    UNCLAMPED,
    elementwise,
    exact_float32,
    prevent_contraction,
    product,
    quotient,
    round_values,
    to_stored,
    with_rank,
)
from qtoolkit.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FloatFormat, Overflow, Specials

# FakeConvert rounds float16 to f8e4m3 in two steps. The first step rounds to this format, which has
# three mantissa bits and the exponents of float16. The second step truncates subnormals of E4M3FN.
_E5M3 = FloatFormat(
    name="e5m3",
    exponent_bits=5,
    mantissa_bits=3,
    bias=15,
    specials=Specials.IEEE,
    overflow=Overflow.INF,
)


def convert(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Convert float16, bfloat16 or float32 to the dtype of `fmt`: operator Convert, version 1."""
    assert fmt.dtype is not None
    if x.dtype == fmt.dtype:
        return x
    y = exact_float32(x)
    if fmt == BFLOAT16:
        y = _to_bfloat16(_float(_bits_with_payloads(x, y)))
    elif fmt == E4M3FN:
        # The core rounds twice: here to float16, and in `to_stored` to f8e4m3.
        y = round_values(y, FLOAT16, UNCLAMPED)
    elif fmt == E5M2:
        # The core keeps the sign, the exponent and the upper two mantissa bits of a NaN. If these
        # two are 0, the result is an infinity.
        nans = _float(_bits_with_payloads(x, y) & np.uint32(0xFFE00000))
        y = jnp.where(y == y, _to_float16(y), nans)
    return to_stored(y, fmt, UNCLAMPED)


def fake_convert(
    data: jax.Array, scale: jax.Array, shift: jax.Array | None, fmt: FloatFormat
) -> jax.Array:
    """Round `data * scale - shift` to `fmt` and undo scale and shift: FakeConvert, version 13.

    As in the core, each operation computes in float32 and is then rounded to the type of `data`.
    """
    rounded = _rounding_to(data.dtype)
    x, s = exact_float32(data), with_rank(exact_float32(scale), data.ndim)
    # If a multiplication in the same jit computes the shift, XLA would fuse it with the subtraction
    # below, and the result would have other bits. `prevent_contraction` prevents this.
    z = None if shift is None else prevent_contraction(with_rank(exact_float32(shift), data.ndim))
    scaled = rounded(product(x, s))
    scaled = scaled if z is None else rounded(scaled - z)
    half = scaled if data.dtype == jnp.float16 else _to_float16(scaled)
    q = round_values(half, E5M2) if fmt == E5M2 else _to_f8e4m3(half, _nan_is_negative(x, s, z))
    # Without a shift the core adds 0, so -0 becomes 0. XLA may remove `q + 0`, but not this select.
    q = jnp.where(q == 0, jnp.zeros_like(q), q) if z is None else rounded(q + z)
    return rounded(quotient(q, s)).astype(data.dtype)


def _rounding_to(dtype: DTypeLike) -> Callable[[jax.Array], jax.Array]:
    """The function by which the core rounds a float32 result to `dtype`."""
    if dtype == jnp.float32:
        return lambda x: x
    if dtype == jnp.float16:
        return _to_float16
    # NaNs are excluded. The low bits of the core's own NaNs are 0, so its rounding does not change
    # them. The NaNs here may have other low bits, and the same rounding would change them.
    return lambda x: jnp.where(x == x, _to_bfloat16(x), x)


def _to_float16(x: jax.Array) -> jax.Array:
    """Round as the core's class `float16` does.

    It rounds to nearest even, and overflow becomes infinity. One defect: a number below 2**-15
    becomes twice as large if it is at least p * (1 - 2**-12) and below p, for a power of two p. The
    core rounds the significand up to 2 and adds 1 to the exponent, but then it computes the
    subnormal from the new exponent and the significand before rounding.
    """
    bits = _bits(x)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # `tiny`: normal float32 numbers below 2**-15, with exponent fields 1 to 111. Subnormals have
    # field 0: the unsigned subtraction wraps around and makes them large, so they are not `tiny`.
    tiny = magnitude - np.uint32(1 << 23) < np.uint32(111 << 23)
    carries = (magnitude & np.uint32(0x007FF000)) == np.uint32(0x007FF000)
    doubled = jnp.where(tiny & carries, bits + np.uint32(1 << 23), bits)
    return round_values(_float(doubled), FLOAT16, UNCLAMPED)


def _to_bfloat16(x: jax.Array) -> jax.Array:
    """Round as the core's class `bfloat16` does.

    If bit 16, the lowest bit of the result, is 0, it truncates. If bit 16 is 1, it rounds half up.
    It does the same with the bits of a NaN.
    """
    bits = _bits(x)
    bits = bits + ((bits & np.uint32(0x10000)) >> np.uint32(1))  # adds half a step if bit 16 is 1
    return _float(bits & np.uint32(0xFFFF0000))


def _to_f8e4m3(h: jax.Array, nan_is_negative: jax.Array) -> jax.Array:
    """Round float16 values to f8e4m3 as FakeConvert does, in two steps, and clamp NaNs."""
    with_three_bits = round_values(h, _E5M3, NEAREST)
    q = round_values(with_three_bits, E4M3FN, Projection("toward_zero"))
    q = jnp.where(jnp.abs(h) < np.float32(2**-9), jnp.zeros_like(q), q)
    largest = np.float32(E4M3FN.max_finite)
    return jnp.where(h == h, q, jnp.where(nan_is_negative, -largest, largest))


def _nan_is_negative(x: jax.Array, scale: jax.Array, shift: jax.Array | None) -> jax.Array:
    """Whether FakeConvert's NaN is negative on x86, where the core runs.

    An operation returns its first NaN operand with its sign. If no operand is NaN (Inf - Inf), the
    new NaN is negative.
    """
    negative: jax.Array = jnp.ones_like(x, bool)
    # The operations read x first, then scale, then shift. The last one here overrides the others.
    for operand in (shift, scale, x):
        if operand is not None:
            negative = jnp.where(operand == operand, negative, _bits(operand) >= np.uint32(1 << 31))
    return negative


@elementwise
def _bits_with_payloads(x: jax.Array, y: jax.Array) -> jax.Array:
    """The bits of `y`, which is `x` converted to float32; NaNs get the mantissa bits of `x`."""
    if x.dtype != jnp.float16:
        return _bits(y)
    # XLA makes NaNs of float16 quiet when it converts them to float32.
    half_bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    payload = (half_bits & np.uint32(0x03FF)) << np.uint32(13)
    return jnp.where(y == y, _bits(y), (_bits(y) & np.uint32(0xFF800000)) | payload)


@elementwise
def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
