"""Convert and FakeConvert, bit for bit as OpenVINO's core, also where its documentation differs.

The core's classes of narrow floats do not all round to nearest even; this module has the same
defects. It holds values of narrow types in float32. The core is that of OpenVINO's wheel 2026.4.1.
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
    exact_float32,
    product,
    quotient,
    ranked,
    round_values,
    settled,
    to_stored,
    unfolded,
)
from qtoolkit.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FloatFormat, Overflow, Specials

# For f8e4m3 the core first rounds to three mantissa bits, in every binade of float16. Only then it
# truncates subnormals.
_E5M3 = FloatFormat(
    name="e5m3",
    exponent_bits=5,
    mantissa_bits=3,
    bias=15,
    specials=Specials.IEEE,
    overflow=Overflow.INF,
)


def convert(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    """Convert-1 of float16, bfloat16 or float32 to the dtype of `fmt`."""
    assert fmt.dtype is not None
    if x.dtype == fmt.dtype:
        return x
    y = exact_float32(x)
    if fmt == BFLOAT16:
        y = _to_bfloat16(_float(_bits_with_payloads(x, y)))
    elif fmt == E4M3FN:
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
    """FakeConvert-13, each operation on float32 and then rounded to the type of `data`."""
    rounded = _rounding_to(data.dtype)
    x, s = exact_float32(data), ranked(exact_float32(scale), data.ndim)
    # Without `settled`, a product that makes the shift in the same jit would be fused with the
    # subtraction.
    z = None if shift is None else settled(ranked(exact_float32(shift), data.ndim))
    p = rounded(product(x, s))
    p = p if z is None else rounded(p - z)
    h = p if data.dtype == jnp.float16 else _to_float16(p)
    q = round_values(h, E5M2) if fmt == E5M2 else _to_f8e4m3(h, _nan_is_negative(x, s, z))
    # Without a shift the core adds zeros, so -0 becomes 0. XLA may remove q + 0, so select.
    q = jnp.where(q == 0, jnp.zeros_like(q), q) if z is None else rounded(q + z)
    return rounded(quotient(q, s)).astype(data.dtype)


def _rounding_to(dtype: DTypeLike) -> Callable[[jax.Array], jax.Array]:
    """How the core rounds the float32 result of an operation to `dtype`."""
    if dtype == jnp.float32:
        return lambda x: x
    if dtype == jnp.float16:
        return _to_float16
    # The core's rule would change a NaN with arbitrary bits. Its own NaNs end in zeros and stay.
    return lambda x: jnp.where(x == x, _to_bfloat16(x), x)


def _to_float16(x: jax.Array) -> jax.Array:
    """Rounded by the core's class `float16`.

    To nearest even, overflow to infinity. A number below 2**-15 comes out doubled if it is just
    below a power of two p, from p * (1 - 2**-12) on. The core rounds its significand, which carries
    into the exponent, and then makes the subnormal from the new exponent and the old significand.
    """
    bits = _bits(x)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # From the least normal float32, exponent field 1, to just below 2**-15, field 112. What is
    # smaller wraps around to a large number.
    tiny = magnitude - np.uint32(1 << 23) < np.uint32(111 << 23)
    carries = (magnitude & np.uint32(0x007FF000)) == np.uint32(0x007FF000)
    doubled = jnp.where(tiny & carries, bits + np.uint32(1 << 23), bits)
    return round_values(_float(doubled), FLOAT16, UNCLAMPED)


def _to_bfloat16(x: jax.Array) -> jax.Array:
    """Rounded by the core's class `bfloat16`.

    It truncates if the last bit that it keeps is 0, else it rounds half up. Patterns of NaNs are
    treated as those of numbers are.
    """
    bits = _bits(x)
    bits = bits + ((bits & np.uint32(0x10000)) >> np.uint32(1))  # half of a step where it is 1
    return _float(bits & np.uint32(0xFFFF0000))


def _to_f8e4m3(h: jax.Array, nan_is_negative: jax.Array) -> jax.Array:
    """Rounds float16 values to f8e4m3 as FakeConvert does."""
    binade = round_values(h, _E5M3, NEAREST)
    q = round_values(binade, E4M3FN, Projection("toward_zero"))
    q = jnp.where(jnp.abs(h) < np.float32(2**-9), jnp.zeros_like(q), q)
    largest = np.float32(E4M3FN.max_finite)
    return jnp.where(h == h, q, jnp.where(nan_is_negative, -largest, largest))


def _nan_is_negative(x: jax.Array, scale: jax.Array, shift: jax.Array | None) -> jax.Array:
    """The sign of the NaN that x86 arithmetic yields: its first NaN operand's, else negative."""
    negative: jax.Array = jnp.ones_like(x, bool)
    for operand in (shift, scale, x):
        if operand is not None:
            negative = jnp.where(operand == operand, negative, jnp.signbit(unfolded(operand)))
    return negative


def _bits_with_payloads(x: jax.Array, y: jax.Array) -> jax.Array:
    """The bit pattern of `y`, which is `x` as float32; its NaNs have the payloads of `x`."""
    if x.dtype != jnp.float16:
        return _bits(y)
    # XLA makes NaNs of float16 quiet when it converts them to float32.
    half = lax.bitcast_convert_type(unfolded(x), jnp.uint16).astype(jnp.uint32)
    payload = (half & np.uint32(0x03FF)) << np.uint32(13)
    return jnp.where(y == y, _bits(y), (_bits(y) & np.uint32(0xFF800000)) | payload)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(unfolded(x), jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
