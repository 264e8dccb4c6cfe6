"""QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike

from qtoolkit.casts.internal import (
    NEAREST,
    UNCLAMPED,
    binary_parts,
    broadcast_like,
    cast_for,
    codes_of,
    dtype_from_codes,
    linear_product,
    product,
    quotient,
    round_values,
    rounded_to,
    times_power_of_two,
    without_derivative,
)
from qtoolkit.formats import FLOAT32, UINT8, Format, IntFormat, format
from qtoolkit.onnx._cast import cast_to
from qtoolkit.onnx._operator import Operator
from qtoolkit.onnx._types import (
    DTYPES,
    FLOAT6,
    FLOAT8,
    FORMATS,
    DataType,
    TypeLike,
    is_traced,
    of_dtype,
)

_T = DataType
_FLOATS = (_T.FLOAT, _T.FLOAT16, _T.BFLOAT16)
# The opset from which on quantized values may have each type.
_QUANTIZED: Mapping[DataType, int] = {
    **dict.fromkeys((_T.UINT8, _T.INT8), 10),
    **dict.fromkeys(FLOAT8, 19),
    **dict.fromkeys((_T.INT4, _T.UINT4, _T.INT16, _T.UINT16), 21),
    _T.FLOAT4E2M1: 23,
    **dict.fromkeys((_T.INT2, _T.UINT2), 25),
    **dict.fromkeys(FLOAT6, 28),
}
_DATA = {**dict.fromkeys((_T.FLOAT, _T.INT32), 10), **dict.fromkeys(_FLOATS[1:], 19)}
_SCALES = {**dict.fromkeys(_FLOATS, 19), _T.FLOAT: 10, _T.FLOAT8E8M0: 24}
# Quotients are rounded, and clamped, to this format before the zero point is added. A clamped one
# plus any zero point of 16 bits is still beyond every output type: 524,287 - 32,768 > 65,535, and
# -524,288 + 65,535 < -32,768. Float32 holds each sum exactly.
_INT20 = format("int20")


def quantize_linear(
    x: ArrayLike,
    y_scale: ArrayLike,
    y_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: TypeLike | None = None,
    saturate: bool | int = True,
    precision: TypeLike | None = None,
    opset: int = 28,
) -> jax.Array | np.ndarray:
    """`round(x / y_scale) + y_zero_point`, to nearest even and clamped.

    With `precision`, `x` and `y_scale` are converted to that type, and the quotient is rounded to
    it; without, the quotient is rounded to the type of `y_scale`. For an integer output, it is then
    rounded to an integer, the zero point is added, and the sum is clamped (NaN counts as 0). For a
    float output, the zero point is added, and the sum is cast as `cast` does. XLA may read numbers
    and scales that are subnormal in float32 or bfloat16 as zeros; with a scale of float8e8m0, none
    is.

    Args:
      x: float32, int32, and from opset 19 float16, bfloat16, any shape. int32 is rounded to float32
        first.
      y_scale: One number; or a number for each index of `axis`, one-dimensional; or, with
        `block_size`, the shape of `x` but for ceil(n / block_size) in place of the n of `axis`.
        float32; the type of `x` from opset 19; any of float32, float16, bfloat16, int32 from 23;
        float8e8m0 from 24. With one number, `axis` and `block_size` mean nothing. Without a
        `block_size` it may also be an array of shape (1,), as in published implementations. Zeros,
        infinities and NaNs follow IEEE.
      y_zero_point: None for zero, or an array of the shape of `y_scale` and of the output type.
      axis: Of `x`; negative ones count from the last. Came with opset 13.
      block_size: 0 for none. Came with opset 21.
      output_dtype: As `to` of `cast`: uint8, int8; float8 e4m3fn, e4m3fnuz, e5m2, e5m2fnuz from
        opset 19; int4, uint4, int16, uint16 from 21; float4e2m1 from 23; int2, uint2 from 25;
        float6 from 28. None, or 0, for the type of `y_zero_point`, or else uint8. Came with opset
        21.
      saturate: As in `cast`, for float8 only. Came with opset 19.
      precision: The type of the division, float32, float16 or bfloat16. None, or 0, for the type of
        `y_scale`; float32 where that is int32 or float8e8m0. Came with opset 23.
      opset: 10 to 28. QuantizeLinear changed in 13, 19, 21, 23, 24, 25 and 28.

    Returns:
      Shape of `x`, dtype of the output type; float6 as a NumPy array, as in `cast`.

    Raises:
      TypeError: An array is of no type that the version has, or the types do not agree; or a
        derivative is asked for: use `fake_quantize`, or `fake_cast` of the quotient.
      ValueError: Shapes, `axis` or `block_size` do not fit; or an attribute that the version lacks.

    Gradient: none.

    Source: ONNX QuantizeLinear 10, 13, 19, 21, 23, 24, 25, 28.

    Examples:
      >>> x = jnp.asarray([-1.0, 0.25, 0.75, 200.0])
      >>> qt.onnx.quantize_linear(x, jnp.float32(0.5), np.uint8(128))  # 0.5 and 1.5 go to even
      Array([126, 128, 130, 255], dtype=uint8)
    """
    operator = Operator("onnx.quantize_linear", opset, first=10)
    operator.check_choice("saturate", saturate, (True, False))
    operator.check_since("saturate", saturate, True, 19)
    target = operator.optional_type("output_dtype", output_dtype, since=21)
    division = operator.optional_type("precision", precision, since=23)
    if division is not None:
        operator.check_type("precision", division, dict.fromkeys(_FLOATS, 23))
    tensors = (x, y_scale, y_zero_point)
    types = (_DATA, {**_SCALES, _T.INT32: 19})
    source, scale_type, zero_type = _tensor_types(operator, "y", tensors, types)
    granularity = _granularity(operator, "y_scale", y_scale, x, axis, block_size)
    if 19 <= opset < 23 and scale_type is not source:
        raise TypeError(
            f"{operator.name}: y_scale is {scale_type.name} with opset={opset}, expected "
            f"{source.name}, the type of x"
        )
    if zero_type is not None and target not in (None, zero_type):
        raise TypeError(
            f"{operator.name}: y_zero_point is {zero_type.name}, but output_dtype={target.name}; "
            "expected the same type"
        )
    target = target or zero_type or _T.UINT8
    operator.check_type("the output", target, _QUANTIZED)
    no_derivative = _NO_DERIVATIVE.format(operator.name)
    y = _quantize(
        *(without_derivative(_array(tensor), no_derivative) for tensor in tensors),
        granularity,
        DTYPES[division or (scale_type if scale_type in _FLOATS else _T.FLOAT)],
        division is not None,
        FORMATS[target],
    )
    return y if isinstance(FORMATS[target], IntFormat) else cast_to(operator, y, target, saturate)


def dequantize_linear(
    x: ArrayLike,
    x_scale: ArrayLike,
    x_zero_point: ArrayLike | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: TypeLike | None = None,
    opset: int = 28,
) -> jax.Array:
    """`(x - x_zero_point) * x_scale`.

    The difference is computed in float32, exactly for integers of 16 bits and less. The product is
    rounded to float32, then to the output type. That is a single rounding if the output is float32,
    or if `x` has at most 8 bits and `x_scale` the type of the output. XLA may read scales and
    products that are subnormal in float32 or bfloat16 as zeros; with a scale of float8e8m0, none
    is.

    Args:
      x: Any output type of `quantize_linear` from the same opset on, or int32, any shape. int32 is
        rounded to float32 first, as published implementations do.
      x_scale: As `y_scale` of `quantize_linear`: float32; from opset 19 also float16 and bfloat16,
        whatever `x` is; from 24 float8e8m0.
      x_zero_point: None for zero, or an array of the shape of `x_scale` and of the type of `x`.
        With int32, zeros only.
      axis, block_size: As in `quantize_linear`.
      output_dtype: float32, float16 or bfloat16, as `to` of `cast`. None, or 0, for the type of
        `x_scale`, which must not be float8e8m0 then. Came with opset 23.
      opset: 10 to 28. DequantizeLinear changed in 13, 19, 21, 23, 24, 25 and 28.

    Returns:
      Shape of `x`, dtype of the output type.

    Raises:
      TypeError: An array is of no type that the version has, or the types do not agree; or a
        derivative by an array narrower than 16 bits is asked for.
      ValueError: Shapes, `axis` or `block_size` do not fit; int32 with a zero point that is not
        known to be zero; or an attribute that the version lacks.

    Gradient: that of the formula, for float results within the range of the output type.

    Source: ONNX DequantizeLinear 10, 13, 19, 21, 23, 24, 25, 28.

    Examples:
      >>> q = jnp.asarray([126, 128, 130], jnp.uint8)
      >>> qt.onnx.dequantize_linear(q, jnp.float32(0.5), np.uint8(128))
      Array([-1.,  0.,  1.], dtype=float32)
    """
    operator = Operator("onnx.dequantize_linear", opset, first=10)
    target = operator.optional_type("output_dtype", output_dtype, since=23)
    tensors = (x, x_scale, x_zero_point)
    types = ({**_QUANTIZED, _T.INT32: 10}, _SCALES)
    source, scale_type, zero_type = _tensor_types(operator, "x", tensors, types)
    granularity = _granularity(operator, "x_scale", x_scale, x, axis, block_size)
    target = target or scale_type
    operator.check_type("the output", target, {**dict.fromkeys(_FLOATS, 19), _T.FLOAT: 10})
    if zero_type not in (None, source):
        raise TypeError(
            f"{operator.name}: x_zero_point is {zero_type.name}, expected {source.name}, as x"
        )
    if source is _T.INT32 and x_zero_point is not None:
        if is_traced(x_zero_point) or np.any(x_zero_point):
            raise ValueError(
                f"{operator.name}: x is INT32, for which x_zero_point must be None or concrete "
                "zeros"
            )
        x_zero_point = None
    return _dequantize(
        *(_array(x), _array(x_scale), _array(x_zero_point)), granularity, FORMATS[target]
    )


def dynamic_quantize_linear(
    x: ArrayLike, *, opset: int = 28
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize float32 to uint8 with the scale and zero point that its range asks for.

    y_scale = (max(0, max(x)) - min(0, min(x))) / 255; y_zero_point = -min(0, min(x)) / y_scale,
    rounded and clamped; y = round(x / y_scale) + y_zero_point, clamped; all to nearest even. Where
    `x` is all zero the page's formula divides by zero: the scale is 1/255 then, as in ONNX's
    reference evaluator. Where it holds NaN or infinities, so does the scale, which is also infinite
    where the range overflows float32. Subnormal numbers and scales may count as zeros, as XLA has
    them.

    Args:
      x: float32, any shape but empty ones.
      opset: 11 to 28.

    Returns:
      (y, y_scale, y_zero_point): uint8 of the shape of `x`, float32 scalar, uint8 scalar.

    Raises:
      TypeError: `x` is not float32; or a derivative is asked for: use `fake_quantize`.
      ValueError: `x` is empty.

    Gradient: none.

    Source: ONNX DynamicQuantizeLinear 11.

    Examples:
      >>> y, scale, zero_point = qt.onnx.dynamic_quantize_linear(jnp.asarray([-1.0, 0.0, 4.1]))
      >>> y, scale, zero_point  # 5.1 / 255
      (Array([  0,  50, 255], dtype=uint8), Array(0.02, dtype=float32), Array(50, dtype=uint8))
    """
    operator = Operator("onnx.dynamic_quantize_linear", opset, first=11)
    operator.type_of("x", x, {_T.FLOAT: 11})
    if np.size(x) == 0:
        raise ValueError(
            f"{operator.name}: x has shape {np.shape(x)}, expected at least one element"
        )
    x = without_derivative(_array(x), _NO_DERIVATIVE.format(operator.name))
    return _quantize_dynamically(x)


_NO_DERIVATIVE = (
    "{}: has no derivative; differentiate fake_quantize, or fake_cast of the quotient, or pass "
    "jax.lax.stop_gradient of its arguments"
)


def _tensor_types(
    operator: Operator,
    prefix: str,
    tensors: tuple[Any, Any, Any],
    allowed: tuple[Mapping[DataType, int], Mapping[DataType, int]],
) -> tuple[DataType, DataType, DataType | None]:
    """The types of array, scale and zero point, None without one; their shapes must agree."""
    # `prefix` "y" stands for the names "y_scale" and "y_zero_point". `allowed`: the types of the
    # array and of the scale, and the opsets that brought them.
    x, scale, zero = tensors
    types = (
        operator.type_of("x", x, allowed[0]),
        operator.type_of(f"{prefix}_scale", scale, allowed[1]),
        None if zero is None else operator.type_of(f"{prefix}_zero_point", zero),
    )
    shapes = np.shape(scale), np.shape(scale if zero is None else zero)
    if shapes[0] != shapes[1] and not {*shapes} <= {(), (1,)}:
        raise ValueError(
            f"{operator.name}: {prefix}_zero_point has shape {shapes[1]}, expected {shapes[0]}, "
            f"that of {prefix}_scale"
        )
    return types


def _granularity(
    operator: Operator, name: str, scale: Any, x: Any, axis: int, block_size: int
) -> tuple[int, int] | None:
    """Which elements share a scale; raises where the shape of the scale does not fit."""
    # None: there is one scale. Else (axis, size of the blocks along it that have a scale each); of
    # size 0, each index of the axis has a scale.
    operator.check_since("axis", axis, 1, 13)
    operator.check_since("block_size", block_size, 0, 21)
    for attribute, value in (("axis", axis), ("block_size", block_size)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise TypeError(f"{operator.name}: {attribute}={value!r}, expected an integer")
    if block_size < 0:
        raise ValueError(
            f"{operator.name}: block_size={block_size}, expected 0 or a positive integer"
        )
    shape, got = np.shape(x), np.shape(scale)
    where = f"{operator.name}: {name} has shape {got}"
    if got == () or (got == (1,) and not block_size):
        return None
    if operator.opset < 13:
        raise ValueError(f"{where} with opset={operator.opset}, expected a scalar")
    rank = len(shape)
    if rank == 0:
        raise ValueError(f"{where}, expected (), as x is one number")
    if not -rank <= axis < rank:
        raise ValueError(
            f"{operator.name}: axis={axis}, expected {-rank} to {rank - 1} for x of shape {shape}"
        )
    axis = int(axis) % rank
    expected, how = (shape[axis],), f"axis={axis}"
    if block_size:
        blocks = -(-shape[axis] // block_size)
        expected = (*shape[:axis], blocks, *shape[axis + 1 :])
        how = f"block_size={block_size} on axis {axis}"
    if got != expected:
        raise ValueError(
            f"{where}, expected {expected} for x of shape {shape} and {how}, or a scalar"
        )
    return axis, int(block_size)


def _array(x: Any) -> Any:
    """`x`, or its float32 values where `jit` does not take its dtype."""
    if not isinstance(x, np.ndarray | np.generic):
        return x
    return x if x.dtype.isnative and of_dtype(x.dtype) not in FLOAT6 else _float32(x)


def _float32(x: Any) -> jax.Array:
    """Any type rounded to float32, from its pattern."""
    # Errors about derivatives name `dequantize_linear`, the only caller that has one.
    return cast_for("onnx.dequantize_linear", x, FLOAT32, UNCLAMPED)


def _spread(values: jax.Array, x: jax.Array, granularity: tuple[int, int] | None) -> jax.Array:
    """Scales or zero points as float32, of a shape that broadcasts to that of `x`, of its rank."""
    values = _float32(values)
    if granularity is None:
        return values.reshape((1,) * x.ndim)
    axis, block_size = granularity
    if not block_size:
        return lax.expand_dims(values, [i for i in range(x.ndim) if i != axis])

    def repeated(values: jax.Array) -> jax.Array:
        return lax.slice_in_dim(jnp.repeat(values, block_size, axis), 0, x.shape[axis], axis=axis)

    sharding = jax.typeof(x).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        repeated = jax.sharding.auto_axes(repeated, out_sharding=sharding)
    return repeated(values)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _quantize(
    x: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    granularity: tuple[int, int] | None,
    precision: np.dtype,
    converts_first: bool,
    target: Format,
) -> jax.Array:
    """Integers of `target`; if it is a float type, float32 numbers, which the caller casts."""
    is_power = scale.dtype == FORMATS[_T.FLOAT8E8M0].dtype
    dividend, divisor = _float32(x), _spread(scale, x, granularity)
    if converts_first:
        dividend, divisor = rounded_to(dividend, precision), rounded_to(divisor, precision)
    ratio = _times_power_of_two(dividend, divisor, -1) if is_power else quotient(dividend, divisor)
    ratio = rounded_to(ratio, precision)
    offset = None if zero is None else _spread(zero, x, granularity)
    if isinstance(target, IntFormat):
        return _integers(ratio, offset, target)
    if offset is None:
        return ratio
    # Where the zero point is zero, -0 keeps its sign.
    return jnp.where(offset == 0, ratio, rounded_to(ratio + offset, precision))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _dequantize(
    x: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None,
    granularity: tuple[int, int] | None,
    target: Format,
) -> jax.Array:
    is_power = scale.dtype == FORMATS[_T.FLOAT8E8M0].dtype
    difference = _float32(x)
    if zero is not None:
        difference = difference - _spread(zero, x, granularity)
    y = _scaled(difference, _spread(scale, x, granularity), is_power)
    return cast_for("onnx.dequantize_linear", y, target, UNCLAMPED)


@jax.jit
def _quantize_dynamically(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    largest, lowest = jnp.maximum(x.max(), 0), jnp.minimum(x.min(), 0)
    span = largest - lowest
    scale = quotient(jnp.where(span == 0, np.float32(1), span), jnp.float32(255))
    zero = codes_of(quotient(-lowest, scale), UINT8)
    ratio = quotient(x, scale.reshape((1,) * x.ndim))
    return _integers(ratio, zero.astype(jnp.float32), UINT8), scale, zero


def _integers(x: jax.Array, zero: jax.Array | None, fmt: IntFormat) -> jax.Array:
    """`x` rounded to nearest even, and `zero` added, clamped to integers of `fmt`."""
    total = x if zero is None else round_values(x, _INT20) + zero
    return dtype_from_codes(codes_of(total, fmt, NEAREST), fmt)


def _times_power_of_two(x: jax.Array, scale: jax.Array, sign: int) -> jax.Array:
    """`x` times or, with `sign` -1, divided by powers of two, of which some are subnormal."""
    exponent, _ = binary_parts(scale)
    y = times_power_of_two(x, exponent * np.int32(sign))
    return jnp.where(jnp.isnan(scale), np.float32(np.nan), y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _scaled(x: jax.Array, scale: jax.Array, is_power: bool) -> jax.Array:
    return _times_power_of_two(x, scale, 1) if is_power else product(x, scale)


@_scaled.defjvp
def _scaled_jvp(is_power: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, scale), (x_dot, scale_dot) = primals, tangents
    by_x = linear_product(scale, x_dot, zero_absorbs=False)
    by_scale = linear_product(x, broadcast_like(scale_dot, x), zero_absorbs=False)
    return _scaled(x, scale, is_power), by_x + by_scale
