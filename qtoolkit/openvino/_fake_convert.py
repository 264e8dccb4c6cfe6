"""FakeConvert-13."""

import functools
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from qtoolkit import gradients
from qtoolkit.casts.internal import (
    FINITE,
    NONZERO,
    Domain,
    broadcasts_to,
    check_differentiable,
    number,
)
from qtoolkit.formats import E4M3FN, E5M2, FloatFormat
from qtoolkit.openvino import _reference
from qtoolkit.openvino._types import check_arithmetic, element_type, element_type_of

_WHERE = "openvino.fake_convert"
_DESTINATIONS = {"f8e4m3": E4M3FN, "f8e5m2": E5M2}
_TYPES = ("bf16", "f16", "f32")
Parameter = jax.Array | np.ndarray  # a NumPy array stands for a number of Python


def fake_convert(
    data: ArrayLike,
    scale: ArrayLike,
    shift: ArrayLike | None = None,
    *,
    destination_type: str = "f8e4m3",
    arithmetic: str = "exact",
) -> jax.Array:
    """`(Convert(data * scale - shift, destination_type) + shift) / scale` in the type of `data`.

    "exact" follows the written page, and is `qtoolkit.fake_convert`: every operation is rounded
    once to the type of `data`, and the conversion is one rounding to nearest even. The page does
    not mention overflow; it saturates, as in OpenVINO's core. NaN stays NaN, subnormals of the
    destination are rounded like any other value. Without a shift nothing is subtracted or added, so
    that -0 keeps its sign.

    "openvino" has the bits of OpenVINO's core reference. There float32 and bfloat16 pass through
    float16 first, so they are rounded twice; f8e4m3 rounds subnormals in their own binade and then
    cuts them to multiples of 2**-9, what lies below 2**-9 becomes +0 and NaN becomes 448 or -448 by
    its sign (a NaN that no input had is negative, as on x86); bfloat16 results are truncated where
    their last bit is 0, else rounded half up; what rounds to float16 below 2**-15, just below a
    power of two, comes out doubled; and no shift is a shift of zeros, so that zeros become +0.

    Either arithmetic may treat subnormals of float32, as data, scale or result, as zeros.

    Args:
      data: float16, bfloat16 or float32, any shape.
      scale: Array of the dtype of `data`, with a shape that broadcasts to that of `data`; or a
        number, which stands for an array of rank 0 and must be finite and of magnitude 2**-126 or
        more, since XLA reads less as zero. Zeros, infinities and NaNs in arrays follow IEEE.
      shift: None, or as `scale`, of the same shape; a number may be any finite one.
      destination_type: "f8e4m3" (to 448) or "f8e5m2" (to 57344), upper or lower case.
      arithmetic: "exact" or "openvino".

    Returns:
      Shape and dtype of `data`. Works under `jit` and `vmap`.

    Raises:
      ValueError: Another destination type or arithmetic; shapes of scale and shift differ, or do
        not broadcast to that of `data`; a number is infinite, NaN or, as scale, too small.
      TypeError: The dtypes differ, or are not among the three; `destination_type` is no string.

    Gradient: clipped straight-through, for both arithmetics that of the exact one. With
    u = data * scale - shift, y the result and D = 1 where |u| is at most the largest finite value,
    else 0: dy/ddata = D, dy/dscale = (D * data - y) / scale, dy/dshift = (1 - D) / scale.

    Source: OpenVINO 2026, FakeConvert-13; `arithmetic="openvino"`: its core, wheel 2026.4.1.

    Examples:
      >>> x = jnp.asarray([0.3, 1.0, 500.0])
      >>> qt.openvino.fake_convert(x, 2.0)  # 0.6 becomes 0.625, 1000 becomes 448
      Array([  0.3125,   1.    , 224.    ], dtype=float32)
      >>> y = jnp.asarray([1 + 2**-4 + 2**-12])  # just above a tie, which float16 makes it
      >>> qt.openvino.fake_convert(y, 1.0), qt.openvino.fake_convert(y, 1.0, arithmetic="openvino")
      (Array([1.125], dtype=float32), Array([1.], dtype=float32))
    """
    if not isinstance(destination_type, str):
        raise TypeError(
            f"{_WHERE}: destination_type has type {type(destination_type).__name__}, expected a "
            "string, 'f8e4m3' or 'f8e5m2'"
        )
    fmt = _DESTINATIONS.get(element_type(f"{_WHERE}: destination_type", destination_type))
    if fmt is None:
        raise ValueError(
            f"{_WHERE}: bad format for f8 conversion: destination_type={destination_type!r}, "
            f"expected {' or '.join(map(repr, _DESTINATIONS))}"
        )
    check_arithmetic(_WHERE, arithmetic)
    data, scale, shift = _arguments(data, scale, shift)
    if arithmetic == "exact":
        return gradients.fake_convert(data, scale, shift, fmt=fmt)
    return _reference_jitted(data, scale, shift, fmt)


def _arguments(
    data: ArrayLike, scale: ArrayLike, shift: ArrayLike | None
) -> tuple[jax.Array, Parameter, Parameter | None]:
    """Types, then shapes, in the order of the operator's own checks."""
    arrays = {"data": data, "scale": scale} | ({} if shift is None else {"shift": shift})
    types = {
        name: element_type_of(_WHERE, name, x)
        for name, x in arrays.items()
        if name == "data" or not _is_number(x)  # a number has the type of the data
    }
    if len(set(types.values())) > 1:
        text = ", ".join(f"{name} is {got}" for name, got in types.items())
        raise TypeError(
            f"{_WHERE}: mixed input types are not supported: {text}; expected one type, e.g. "
            "scale.astype(data.dtype)"
        )
    if types["data"] not in _TYPES:
        raise TypeError(
            f"{_WHERE}: the element type of the inputs is {types['data']}, expected bf16, f16 or "
            "f32; convert them first, e.g. data.astype(jnp.float32)"
        )
    x = check_differentiable(_WHERE, data, "data", wide=False)
    s = _parameter("scale", scale, x.dtype, NONZERO)
    z = None if shift is None else _parameter("shift", shift, x.dtype, FINITE)
    if z is not None and z.shape != s.shape:
        raise ValueError(
            f"{_WHERE}: scale has shape {s.shape} and shift {z.shape}, expected the same; "
            "broadcasting between them is not part of the operator"
        )
    if not broadcasts_to(s.shape, x.shape):
        raise ValueError(
            f"{_WHERE}: only unidirectional broadcasting: scale has shape {s.shape}, expected one "
            f"that broadcasts to that of data, {x.shape}"
        )
    return x, s, z


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and not hasattr(x, "dtype")


def _parameter(name: str, value: Any, dtype: np.dtype, domain: Domain) -> Parameter:
    """A number in the dtype of the data, where it is one of the domain; or any array."""
    if _is_number(value):
        return number(_WHERE, name, value, dtype, domain)
    return check_differentiable(_WHERE, value, name, wide=False)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _by_reference(
    data: jax.Array, scale: jax.Array, shift: jax.Array | None, fmt: FloatFormat
) -> jax.Array:
    return _reference.fake_convert(data, scale, shift, fmt)


def _exact_jvp(fmt: FloatFormat, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The tangent of the exact arithmetic."""
    y = _by_reference(*primals, fmt)
    moving = [i for i, dot in enumerate(tangents) if not isinstance(dot, SymbolicZero | None)]

    def exact(*values: jax.Array) -> jax.Array:
        arguments = list(primals)
        for i, value in zip(moving, values, strict=True):
            arguments[i] = value
        return gradients.fake_convert(*arguments, fmt=fmt)

    _, y_dot = jax.jvp(exact, [primals[i] for i in moving], [tangents[i] for i in moving])
    return y, y_dot


_by_reference.defjvp(_exact_jvp, symbolic_zeros=True)
_reference_jitted = jax.jit(_by_reference, static_argnums=3)
