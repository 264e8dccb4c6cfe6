"""Convert-1."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qtoolkit import casts
from qtoolkit.casts import check_differentiable, exact_float32, round_values, stored
from qtoolkit.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FloatFormat, Format, IntFormat, format
from qtoolkit.openvino._reference import to_bfloat16, to_float16
from qtoolkit.openvino._types import (
    ELEMENT_TYPES,
    check_arithmetic,
    element_type,
    element_type_of,
    native,
)

_WHERE = "openvino.convert"
_CORE_SOURCES = ("bf16", "f16", "f32")
_CORE_TARGETS = ("bf16", "f16", "f32", "f8e4m3", "f8e5m2")


def convert(x: ArrayLike, destination_type: Any, *, arithmetic: str = "exact") -> jax.Array:
    """The elements of `x` in another element type.

    "exact" is the written page, with one rounding where the page leaves the rounding open:

    * to floats: to nearest even, once, from the exact value of `x`. Overflow and infinities are
      infinities in f16, bf16, f32, f64 and f8e5m2 and NaN in f8e4m3: unlike `fake_convert` and
      `qtoolkit.cast`, nothing saturates. f8e8m0, f4e2m1 and nf4 have no infinity and saturate.
    * floats to integers: toward zero. What lies beyond the integers, where the page has no result,
      becomes the closest one, and NaN 0.
    * integers to integers: the low bits, that is modulo 2**N.
    * to boolean: whether it is not zero. NaN is true.

    "openvino" has the bits of OpenVINO's core reference, for float16, bfloat16 and float32 to f16,
    bf16, f32, f8e4m3 and f8e5m2: both f8 types are reached through float16, so float32 is rounded
    twice; bf16 is truncated where its last bit is 0, else rounded half up; in f8e5m2 values below
    2**-15 just below a power of two come out doubled, and NaNs without a bit in the upper two
    places of the mantissa become infinities.

    Args:
      x: An array of any float, integer or bool dtype, or a Python number (64 bits), any shape.
      destination_type: An element type of OpenVINO by name, upper or lower case, or a dtype.
      arithmetic: "exact" or "openvino".

    Returns:
      Shape of `x`, dtype of the element type: float8_e4m3fn for "f8e4m3", bool for "boolean".

    Raises:
      TypeError: `x` has another dtype; the element type is "string" or "dynamic", or JAX has no
        dtype for it (nf4, u1, u3, u6: use `qtoolkit.encode`), or it has 64 bits where JAX has them
        off; `arithmetic="openvino"` between other types; or a result that is no float of 16 bits
        or more is differentiated, or any by an `x` narrower than 16 bits: use
        `qtoolkit.fake_cast`.
      ValueError: No such element type or arithmetic.

    Gradient: for float results of 16 bits and more, 1 where |x| is at most the largest finite
    value, else 0.

    Source: OpenVINO 2026, Convert-1; `arithmetic="openvino"`: its core, wheel 2026.4.1.
    """
    name = element_type(f"{_WHERE}: destination_type", destination_type)
    check_arithmetic(_WHERE, arithmetic)
    source = element_type_of(_WHERE, "x", x)
    if arithmetic == "exact":
        return convert_exactly(_WHERE, x, name)
    if source not in _CORE_SOURCES or name not in _CORE_TARGETS:
        raise TypeError(
            f"{_WHERE}: arithmetic='openvino' from {source} to {name}, expected from one of "
            f"{', '.join(_CORE_SOURCES)} to one of {', '.join(_CORE_TARGETS)}; use 'exact'"
        )
    x = check_differentiable(_WHERE, native(x), wide=False)
    return _core_jitted(x, _target(_WHERE, name))


def convert_exactly(where: str, x: ArrayLike, name: str) -> jax.Array:
    """`convert` to the element type of that name, with errors that name the operator `where`."""
    fmt = _target(where, name)
    if isinstance(fmt, FloatFormat):
        saturation = "none" if fmt.signed else "finite"
        return casts.cast_for(where, x, fmt, saturation=saturation)
    if isinstance(ELEMENT_TYPES[element_type_of(where, "x", x)], IntFormat):
        return casts.cast_for(where, x, fmt, saturation="none")
    return casts.cast_for(where, x, fmt, "toward_zero", "finite")


def _target(where: str, name: str) -> Format:
    fmt = ELEMENT_TYPES[name]
    if fmt is None:
        raise TypeError(
            f"{where}: nothing converts to {name!r} here, expected an element type of numbers"
        )
    if fmt.dtype is None:
        raise TypeError(
            f"{where}: JAX has no dtype for {name}; use qtoolkit.encode(x, {fmt.name!r}) for codes"
        )
    casts.check_target(where, fmt)
    return fmt


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _core(x: jax.Array, fmt: Format) -> jax.Array:
    """The core's steps, on float32."""
    assert isinstance(fmt, FloatFormat)
    if format(x.dtype) == fmt:
        return x
    wide = exact_float32(x)
    if fmt == BFLOAT16:
        bits = _with_payloads(x, wide)
        return stored(to_bfloat16(lax.bitcast_convert_type(bits, jnp.float32)), fmt, "none")
    if fmt == E4M3FN:
        return stored(round_values(wide, FLOAT16, "nearest_even", "none"), fmt, "none")
    if fmt == E5M2:
        # Of a NaN the core keeps the upper two bits, which may leave an infinity.
        kept = _with_payloads(x, wide) & np.uint32(0xFFE00000)
        h = jnp.where(wide == wide, to_float16(wide), lax.bitcast_convert_type(kept, jnp.float32))
        return stored(h, fmt, "none")
    return stored(wide, fmt, "none")


@_core.defjvp
def _core_jvp(fmt: Format, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The tangent of the exact arithmetic."""
    exact = functools.partial(casts.cast_for, _WHERE, fmt=fmt, saturation="none")
    _, y_dot = jax.jvp(exact, primals, tangents)
    return _core(*primals, fmt), y_dot


_core_jitted = jax.jit(_core, static_argnums=1)


def _with_payloads(x: jax.Array, wide: jax.Array) -> jax.Array:
    """The pattern of `wide`, `x` as float32; NaNs of float16 as they are, which XLA makes quiet."""
    bits = lax.bitcast_convert_type(wide, jnp.uint32)
    if x.dtype != jnp.float16:
        return bits
    half = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    payload = (half & np.uint32(0x03FF)) << np.uint32(13)
    return jnp.where(wide == wide, bits, (bits & np.uint32(0xFF800000)) | payload)
