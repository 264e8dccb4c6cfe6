"""Range-4."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import (
    UNCLAMPED,
    cast_for,
    check_target,
    codes_of,
    dtype_from_codes,
    prevent_contraction,
    product,
    to_stored,
)
from qtoolkit.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FloatFormat,
    FormatLike,
    IntFormat,
)
from qtoolkit.openvino._types import ELEMENT_TYPES, element_type, element_type_of

_WHERE = "openvino.range"
_OUTPUTS = (
    *("bf16", "f16", "f32", "f64"),
    *("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"),
)
_MOST = 2**32 - 1  # the core counts in 32 bits


def range(
    start: ArrayLike,
    stop: ArrayLike,
    step: ArrayLike,
    *,
    output_type: FormatLike,
    length: int | None = None,
) -> jax.Array:
    """Numbers from `start` up to, but without, `stop` in steps of `step`.

    The arguments are read as float64, whatever their dtypes; for an integer output type they are
    truncated toward zero. Their number of elements is max(ceil((stop - start) / step), 0) in
    float64, for every output type: float32 arguments 0.1, 1.1, 0.1 give 11 elements, Python's 10.

    Element i is start + i * step, two roundings and no running sum, in float32 for f16, bf16 and
    f32 and in float64 for f64, with start and step rounded to that type; then it is rounded once,
    to nearest even, to the output type. Integers wrap around, modulo 2**N. Numbers that are
    subnormal in the type that adds may be zeros.

    Args:
      start, stop, step: Numbers or arrays of rank 0 of any float or integer dtype.
      output_type: "f16", "bf16", "f32", "f64", "i8" to "i64" or "u8" to "u64", upper or lower case,
        or a dtype.
      length: The number of elements, static. If arguments are traced, as under `jit`, it is needed
        in place of `stop`, and values are not checked: neither the step for zero nor any argument
        for NaN or infinity. Otherwise it must equal the number that the arguments give.

    Returns:
      Shape (n,), dtype of the output type.

    Raises:
      ValueError: start, stop or step is infinite or NaN; step is zero, or its integer part is for
        an integer output type (there the page has no result); an argument is no scalar; arguments
        are traced and there is no `length`; `length` is negative or not what they give; 2**32
        elements or more; no such element type.
      TypeError: An argument is boolean or no number; the output type is none of the above, or has
        64 bits where JAX has them off; `length` is no integer; or the derivative of an integer
        output type, or by an array narrower than 16 bits, is asked for.

    Gradient: for float output types, 1 with respect to `start` and i to `step`.

    Source: OpenVINO 2026, Range-4; for what its page leaves open (the float types of counting and
    adding, i * step, errors) its core, wheel 2026.4.1, but for bf16, which the core does not round
    to nearest even.

    Examples:
      >>> qt.openvino.range(0, 1, 0.25, output_type="f32")
      Array([0.  , 0.25, 0.5 , 0.75], dtype=float32)
      >>> qt.openvino.range(0.1, 1.1, 0.1, output_type="f16").shape  # arguments are float64
      (10,)
    """
    name = element_type(f"{_WHERE}: output_type", output_type)
    if name not in _OUTPUTS:
        raise TypeError(
            f"{_WHERE}: output_type={name}, expected a numeric type: one of {', '.join(_OUTPUTS)}"
        )
    fmt = ELEMENT_TYPES[name]
    assert isinstance(fmt, FloatFormat | IntFormat)
    check_target(_WHERE, fmt)
    arguments = {"start": start, "stop": stop, "step": step}
    for argument, x in arguments.items():
        _check_scalar(argument, x)
    if length is not None:
        if isinstance(length, bool) or not isinstance(length, int | np.integer):
            raise TypeError(f"{_WHERE}: length={length!r}, expected an integer that is not traced")
        if not 0 <= length <= _MOST:
            raise ValueError(f"{_WHERE}: length={length}, expected 0 to {_MOST}")
    traced = [argument for argument, x in arguments.items() if isinstance(x, jax.core.Tracer)]
    if not traced:
        numbers = [_number(argument, x) for argument, x in arguments.items()]
        count = _count(*numbers, truncated=isinstance(fmt, IntFormat))
        if length is not None and length != count:
            raise ValueError(f"{_WHERE}: length={length}, but the arguments give {count} elements")
        length = count
    elif length is None:
        are = "is traced" if len(traced) == 1 else "are traced"
        raise ValueError(
            f"{_WHERE}: {', '.join(traced)} {are}, so the number of elements is not known; pass "
            "static arguments or length="
        )
    first, by = (_accumulated(argument, arguments[argument], fmt) for argument in ("start", "step"))
    return _elements_jitted(first, by, int(length), fmt)


def _check_scalar(argument: str, x: Any) -> None:
    if isinstance(x, bool) or not isinstance(x, int | float):
        got = "boolean" if isinstance(x, bool) else element_type_of(_WHERE, argument, x)
        if got == "boolean":
            raise TypeError(
                f"{_WHERE}: {argument} should be of a numeric type, got boolean; convert it first"
            )
    if np.ndim(x) != 0:
        raise ValueError(
            f"{_WHERE}: {argument} is not a scalar, it has shape {np.shape(x)}, expected ()"
        )


def _number(argument: str, x: Any) -> float:
    try:
        return float(np.asarray(x).astype(np.float64))
    except OverflowError:
        raise ValueError(f"{_WHERE}: {argument} is beyond the range of float64") from None


def _count(start: float, stop: float, step: float, *, truncated: bool) -> int:
    for argument, number in (("start", start), ("stop", stop)):
        if not math.isfinite(number):
            raise ValueError(f"{_WHERE}: {argument}={number}, which cannot be nan or infinite")
    if not math.isfinite(step) or step == 0:
        raise ValueError(f"{_WHERE}: step={step}, which cannot be zero, nan or infinite")
    if truncated:
        start, stop, whole = (float(np.trunc(number)) for number in (start, stop, step))
        if whole == 0:
            raise ValueError(
                f"{_WHERE}: step={step} is zero as an integer; use a float output_type, or 1 or "
                "more"
            )
        step = whole
    if start == stop or (stop > start) != (step > 0):
        return 0
    with np.errstate(over="ignore"):
        count = np.ceil(np.abs(np.float64(stop) - np.float64(start)) / np.abs(np.float64(step)))
    if count > _MOST:
        raise ValueError(f"{_WHERE}: {count} elements, expected at most {_MOST}")
    return int(count)


def _accumulated(argument: str, x: Any, fmt: FloatFormat | IntFormat) -> jax.Array:
    """A scalar in the type that adds: float32, float64, or unsigned integers of enough bits."""
    is_traced = isinstance(x, jax.core.Tracer)
    if is_traced and x.dtype in (jnp.int64, jnp.uint64):
        x = x.astype(jnp.float64)  # which may round; float64 holds all other dtypes
    if isinstance(fmt, FloatFormat):
        adding = FLOAT64 if fmt == FLOAT64 else FLOAT32
        if is_traced:
            return cast_for(_WHERE, x, adding, UNCLAMPED)
        with np.errstate(over="ignore"):
            return jnp.asarray(np.float64(_number(argument, x)).astype(adding.dtype))
    unsigned = _unsigned(fmt)
    if is_traced:
        return cast_for(_WHERE, x, unsigned, Projection("toward_zero", "none"))
    integer = int(_number(argument, x))
    return jnp.asarray(np.asarray(integer % 2 ** (8 * unsigned.itemsize), unsigned))


def _unsigned(fmt: IntFormat) -> np.dtype:
    return np.dtype("uint64" if fmt.bits == 64 else "uint32")


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _elements(
    start: jax.Array, step: jax.Array, length: int, fmt: FloatFormat | IntFormat
) -> jax.Array:
    if isinstance(fmt, IntFormat):
        wrapped = start + lax.iota(_unsigned(fmt), length) * step
        return dtype_from_codes(codes_of(wrapped, fmt, UNCLAMPED), fmt)
    index = lax.iota(jnp.uint32, length).astype(start.dtype)
    # Settled: a start that was multiplied in the same jit would be fused with the addition.
    elements = prevent_contraction(start) + product(index, step)
    return to_stored(elements, fmt, UNCLAMPED) if fmt in (FLOAT16, BFLOAT16) else elements


@_elements.defjvp
def _elements_jvp(
    length: int, fmt: FloatFormat | IntFormat, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    """Of floats: integers are made from integers, which have no tangents."""
    y = _elements(*primals, length, fmt)
    start_dot, step_dot = tangents
    index = lax.iota(jnp.uint32, length).astype(start_dot.dtype)
    return y, (start_dot + index * step_dot).astype(y.dtype)


_elements_jitted = jax.jit(_elements, static_argnums=(2, 3))
