"""FakeConvert-13."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from qtoolkit import gradients
from qtoolkit.casts import (
    check_differentiable,
    exact_float32,
    product,
    quotient,
    round_values,
    shown_number,
)
from qtoolkit.formats import E4M3FN, E5M2, FloatFormat, Overflow, Specials
from qtoolkit.openvino._reference import to_bfloat16, to_float16
from qtoolkit.openvino._types import (
    ELEMENT_TYPES,
    check_arithmetic,
    element_type,
    element_type_of,
    native,
)

_WHERE = "openvino.fake_convert"
_DESTINATIONS = ("f8e4m3", "f8e5m2")
_TYPES = ("bf16", "f16", "f32")
Parameter = jax.Array | np.ndarray  # NumPy: what was a number


def fake_convert(
    data: ArrayLike,
    scale: ArrayLike,
    shift: ArrayLike | None = None,
    *,
    destination_type: str = "f8e4m3",
    arithmetic: str = "exact",
) -> jax.Array:
    """`(Convert(data * scale - shift, destination_type) + shift) / scale` in the type of `data`.

    "exact" is the written page: `qtoolkit.fake_convert`, where every operation is rounded once to
    the type of `data` and the conversion is one saturating rounding to nearest even. NaN stays NaN,
    subnormals of the destination are rounded like any other value. Without a shift nothing is
    subtracted or added, so that -0 keeps its sign.

    "openvino" has the bits of OpenVINO's core reference. There float32 and bfloat16 pass through
    float16 first, so they are rounded twice; f8e4m3 rounds subnormals in their own binade and then
    cuts them to multiples of 2**-9, what lies below 2**-9 becomes +0 and NaN becomes 448 or -448 by
    its sign (a NaN that no input had is negative, as on x86); bfloat16 results are truncated where
    their last bit is 0, else rounded half up; what rounds to float16 below 2**-15, just below a
    power of two, comes out doubled; and no shift is a shift of zeros, so that zeros become +0.

    Of float32's subnormals, as data, scale or result, either arithmetic may make zeros.

    Args:
      data: float16, bfloat16 or float32, any shape.
      scale: Array of the dtype of `data`, with a shape that broadcasts to that of `data`; or a
        number, which stands for an array of rank 0 and must be finite and not zero. Zeros,
        infinities and NaNs in arrays follow IEEE.
      shift: None, or as `scale`, of the same shape; a number may be zero.
      destination_type: "f8e4m3" (to 448) or "f8e5m2" (to 57344), upper or lower case.
      arithmetic: "exact" or "openvino".

    Returns:
      Shape and dtype of `data`. Works under `jit` and `vmap`.

    Raises:
      ValueError: Another destination type or arithmetic; shapes of scale and shift differ, or do
        not broadcast to that of `data`; a number is infinite, NaN or, as scale, zero.
      TypeError: The dtypes differ, or are not among the three; `destination_type` is no string.

    Gradient: clipped straight-through, for both arithmetics that of the exact one. With
    u = data * scale - shift, y the result and D = 1 where |u| is at most the largest finite value,
    else 0: dy/ddata = D, dy/dscale = (D * data - y) / scale, dy/dshift = (1 - D) / scale.

    Source: OpenVINO 2026, FakeConvert-13; `arithmetic="openvino"`: its core, wheel 2026.4.1.
    """
    fmt = _destination(destination_type)
    check_arithmetic(_WHERE, arithmetic)
    data, scale, shift = _arguments(data, scale, shift)
    if arithmetic == "exact":
        return gradients.fake_convert(data, scale, shift, fmt=fmt)
    return _core_jitted(data, scale, shift, fmt)


def _destination(destination_type: Any) -> FloatFormat:
    if not isinstance(destination_type, str):
        raise TypeError(
            f"{_WHERE}: destination_type has type {type(destination_type).__name__}, expected a "
            "string, 'f8e4m3' or 'f8e5m2'"
        )
    name = element_type(f"{_WHERE}: destination_type", destination_type)
    fmt = ELEMENT_TYPES[name]
    if name not in _DESTINATIONS or not isinstance(fmt, FloatFormat):
        raise ValueError(
            f"{_WHERE}: bad format for f8 conversion: destination_type={destination_type!r}, "
            f"expected {' or '.join(map(repr, _DESTINATIONS))}"
        )
    return fmt


def _arguments(
    data: ArrayLike, scale: ArrayLike, shift: ArrayLike | None
) -> tuple[jax.Array, Parameter, Parameter | None]:
    """Types, then shapes, in the order of the operator's own checks."""
    data, scale, shift = native(data), native(scale), native(shift)
    given = {"data": data, "scale": scale} | ({} if shift is None else {"shift": shift})
    types = {
        name: element_type_of(_WHERE, name, x)
        for name, x in given.items()
        if name == "data" or not _is_number(x)  # a number has the type of the data
    }
    if len(set(types.values())) > 1:
        listed = ", ".join(f"{name} is {got}" for name, got in types.items())
        raise TypeError(
            f"{_WHERE}: mixed input types are not supported: {listed}; expected one type, e.g. "
            "scale.astype(data.dtype)"
        )
    if types["data"] not in _TYPES:
        raise TypeError(
            f"{_WHERE}: the element type of the inputs is {types['data']}, expected bf16, f16 or "
            "f32; convert them first, e.g. data.astype(jnp.float32)"
        )
    x = check_differentiable(_WHERE, data, "data", wide=False)
    s = _parameter("scale", scale, x.dtype)
    z = None if shift is None else _parameter("shift", shift, x.dtype)
    if z is not None and z.shape != s.shape:
        raise ValueError(
            f"{_WHERE}: scale has shape {s.shape} and shift {z.shape}, expected the same; "
            "broadcasting between them is not part of the operator"
        )
    if s.ndim > x.ndim or any(
        size not in (1, wide) for size, wide in zip(s.shape[::-1], x.shape[::-1], strict=False)
    ):
        raise ValueError(
            f"{_WHERE}: only unidirectional broadcasting: scale has shape {s.shape}, expected one "
            f"that broadcasts to that of data, {x.shape}"
        )
    return x, s, z


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and not hasattr(x, "dtype")


def _parameter(name: str, value: ArrayLike, dtype: np.dtype) -> Parameter:
    if not _is_number(value):
        return check_differentiable(_WHERE, value, name, wide=False)
    try:
        wide = float(value)  # type: ignore[arg-type]
    except OverflowError:
        wide = math.inf
    with np.errstate(over="ignore", under="ignore"):
        number = np.asarray(wide, dtype)
    if not np.isfinite(number) or (name == "scale" and number == 0):
        wanted = "a finite number" + (" other than zero" if name == "scale" else "")
        raise ValueError(
            f"{_WHERE}: {shown_number(name, value)} is {number} in {dtype}, expected {wanted}; "  # type: ignore[arg-type]
            "arrays may be any"
        )
    return number


# A step of f8e4m3 in every binade of float16: what the core rounds to before it cuts subnormals.
_E5M3 = FloatFormat(
    name="e5m3",
    exponent_bits=5,
    mantissa_bits=3,
    bias=15,
    specials=Specials.IEEE,
    overflow=Overflow.INF,
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _core(
    data: jax.Array, scale: jax.Array, shift: jax.Array | None, fmt: FloatFormat
) -> jax.Array:
    """The core's steps, each on float32 that holds values of the data's type."""
    step = _step(data.dtype)
    shape = (1,) * (data.ndim - scale.ndim) + scale.shape
    x, s = exact_float32(data), exact_float32(scale).reshape(shape)
    z = None if shift is None else exact_float32(shift).reshape(shape)
    p = step(product(x, s))
    p = p if z is None else step(p - z)
    h = p if data.dtype == jnp.float16 else to_float16(p)
    if fmt == E5M2:
        q = round_values(h, E5M2, "nearest_even", "finite")
    else:
        q = _f8e4m3(h, _nan_is_negative(x, s, z))
    # Not q + 0, which XLA may leave out.
    q = jnp.where(q == 0, jnp.zeros_like(q), q) if z is None else step(q + z)
    return step(quotient(q, s)).astype(data.dtype)


def _core_jvp(fmt: FloatFormat, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The tangent of the exact arithmetic."""
    y = _core(*primals, fmt)
    moving = [i for i, dot in enumerate(tangents) if not isinstance(dot, SymbolicZero | None)]
    if not moving:
        return y, jnp.zeros_like(y)

    def exact(*values: jax.Array) -> jax.Array:
        arguments = list(primals)
        for i, value in zip(moving, values, strict=True):
            arguments[i] = value
        return gradients.fake_convert(*arguments, fmt=fmt)

    _, y_dot = jax.jvp(exact, [primals[i] for i in moving], [tangents[i] for i in moving])
    return y, y_dot


_core.defjvp(_core_jvp, symbolic_zeros=True)
_core_jitted = jax.jit(_core, static_argnums=3)


def _step(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """How the core rounds the float32 result of an operation to `dtype`."""
    if dtype == jnp.float32:
        return lambda x: x
    if dtype == jnp.float16:
        return to_float16
    # The core's NaNs end in zeros, so its rule keeps them; elsewhere they may have any bits.
    return lambda x: jnp.where(x == x, to_bfloat16(x), x)


def _f8e4m3(h: jax.Array, nan_is_negative: jax.Array) -> jax.Array:
    """float16 values as the core converts them to f8e4m3."""
    binade = round_values(h, _E5M3, "nearest_even", "finite")
    q = round_values(binade, E4M3FN, "toward_zero", "finite")
    q = jnp.where(jnp.abs(h) < np.float32(2**-9), jnp.zeros_like(q), q)
    largest = np.float32(E4M3FN.max_finite)
    return jnp.where(h == h, q, jnp.where(nan_is_negative, -largest, largest))


def _nan_is_negative(x: jax.Array, scale: jax.Array, shift: jax.Array | None) -> jax.Array:
    """The sign of the NaN that arithmetic yields on x86: its first operand's, else negative."""
    negative: jax.Array = jnp.ones_like(x, bool)
    for operand in (shift, scale, x):
        if operand is not None:
            sign = lax.bitcast_convert_type(operand, jnp.uint32) >> np.uint32(31) != 0
            negative = jnp.where(operand == operand, negative, sign)
    return negative
