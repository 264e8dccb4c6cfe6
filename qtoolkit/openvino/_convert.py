"""Convert-1."""

import functools
from typing import Any

import jax
from jax.typing import ArrayLike

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
    NEAREST,
    UNCLAMPED,
    cast_for,
    check_differentiable,
    check_target,
)
from qtoolkit.formats import FloatFormat, Format, FormatLike, IntFormat
from qtoolkit.openvino import _reference
from qtoolkit.openvino._types import (
    ELEMENT_TYPES,
    check_arithmetic,
    element_type,
    element_type_of,
)

_WHERE = "openvino.convert"
_CORE_SOURCES = ("bf16", "f16", "f32")
_CORE_TARGETS = ("bf16", "f16", "f32", "f8e4m3", "f8e5m2")


def convert(x: ArrayLike, destination_type: FormatLike, *, arithmetic: str = "exact") -> jax.Array:
    """Convert the elements of `x` to another element type.

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

    Examples:
      >>> x = jnp.asarray([0.3, 449.0, 1000.0])
      >>> qt.openvino.convert(x, "f8e4m3")  # nothing saturates
      Array([0.3125, 448, nan], dtype=float8_e4m3fn)
      >>> qt.openvino.convert(jnp.asarray([-1.7, 300.0]), "u8")
      Array([  0, 255], dtype=uint8)
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
    x = check_differentiable(_WHERE, x, wide=False)
    return _reference_jitted(x, _target(_WHERE, name))


def convert_exactly(where: str, x: ArrayLike, name: str) -> jax.Array:
    """`convert` to the element type of that name, with errors that name the operator `where`."""
    fmt = _target(where, name)
    if isinstance(fmt, FloatFormat):
        return cast_for(where, x, fmt, UNCLAMPED if fmt.signed else NEAREST)
    if isinstance(ELEMENT_TYPES[element_type_of(where, "x", x)], IntFormat):
        return cast_for(where, x, fmt, UNCLAMPED)
    return cast_for(where, x, fmt, Projection("toward_zero"))


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
    check_target(where, fmt)
    return fmt


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _by_reference(x: jax.Array, fmt: FloatFormat) -> jax.Array:
    return _reference.convert(x, fmt)


@_by_reference.defjvp
def _exact_jvp(fmt: FloatFormat, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The tangent of the exact arithmetic, which refuses results narrower than 16 bits."""
    exact = functools.partial(cast_for, _WHERE, fmt=fmt, projection=UNCLAMPED)
    _, y_dot = jax.jvp(exact, primals, tangents)
    return _by_reference(*primals, fmt), y_dot


_reference_jitted = jax.jit(_by_reference, static_argnums=1)
