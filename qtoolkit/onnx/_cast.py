"""Cast and CastLike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import NEAREST, UNCLAMPED, cast_for, dtype_from_codes, encode_for
from qtoolkit.formats import FLOAT32, FloatFormat, IntFormat
from qtoolkit.onnx import _strings
from qtoolkit.onnx._operator import Operator
from qtoolkit.onnx._types import (
    CAST_TYPES,
    DTYPES,
    FLOAT6,
    FLOAT8,
    FORMATS,
    DataType,
    TypeLike,
    is_traced,
)

_ROUNDINGS = {"up": "toward_positive", "down": "toward_zero", "nearest": "nearest_away"}
_INEXACT_IN_FLOAT32 = (DataType.INT32, DataType.UINT32, DataType.INT64, DataType.UINT64)


def cast(
    x: ArrayLike | str | bytes | np.ndarray,
    to: TypeLike,
    *,
    saturate: bool | int = True,
    round_mode: str = "up",
    opset: int = 28,
    arithmetic: str = "exact",
) -> jax.Array | np.ndarray:
    """Convert `x` to another type of ONNX, rounded once from its exact value.

    What becomes of numbers, by the type that they are cast to:

    * float64, float32, float16, bfloat16: to nearest even, overflow is infinite.
    * Float8 (e4m3fn, e4m3fnuz, e5m2, e5m2fnuz): to nearest even. With `saturate`, overflow and
      infinities become the largest number of their sign; before opset 24, infinities become NaN in
      the two fnuz types. Without, both become infinite in e5m2 and NaN in the others.
    * float8e8m0: as `round_mode` says. With `saturate`, numbers beyond its range are clamped to it;
      without, they become NaN before they are rounded. Zero and, unspecified by the page, negative
      numbers lie below that range.
    * float4e2m1, float6e2m3, float6e3m2: to nearest even, clamped; NaN becomes the largest number.
    * Integers of 8 bits and more: integers keep their low bits. Floats are truncated toward zero
      (the page names no direction; implementations agree); beyond the range, where the page leaves
      the result undefined, they are clamped, and NaN becomes 0.
    * int4, uint4, int2, uint2: numbers are rounded to nearest even, then keep their low bits, as
      the technical note on these types says; ONNX's reference evaluator truncates and ONNX Runtime
      rounds half away before they keep the low bits. Infinities become the limits, NaN 0.
    * bool: whether a number is not zero; NaN is not.

    Strings are read as the exact numbers that they spell ("3.14", "1000", "1e-5"; "INF", "+INF",
    "-INF" and "NaN" in upper or lower case; blanks around them are ignored), and these are cast
    like floats: "100.5" to an integer is 100. Numbers are written in plain notation with the fewest
    digits that read back as the same number of their type ("314.15926", "0.00001"; those of
    float8e8m0 in full), bool as "1" and "0", the others as "INF", "-INF" and "NaN".

    Args:
      x: An array of any type of ONNX but complex ones, any shape; a number of Python, which has 64
        bits; or text: a string, bytes in UTF-8, or a NumPy array of these, of dtype str, bytes,
        StringDType or object.
      to: A number of `TensorProto.DataType` (see `DataType`), its name ("FLOAT8E4M3FN"), or a
        dtype.
      saturate: For the types named float8 only; came with opset 19.
      round_mode: "up" (away from zero), "down" (toward zero) or "nearest" (ties go up). For
        float8e8m0 only; came with opset 24.
      opset: 1 to 28, the version of the operator set. Cast changed in 6, 9, 13, 19, 21, 23, 24, 25
        and 28; each takes the types that it had.
      arithmetic: "exact", or "reference", the two steps of ONNX's reference evaluator: float64 goes
        through float32 on its way to bfloat16 and to floats of 8 bits and less, integers of 32 and
        64 bits on their way to bfloat16 and float8e8m0. No difference for strings.

    Returns:
      Shape of `x`, the type's dtype of NumPy, ml_dtypes or JAX. A JAX array, but for two types that
      have none: strings are a NumPy array of dtype str, and float6 one of the dtype of ml_dtypes.

    Raises:
      TypeError: `x` is of no type that the version has; a result of 64 bits where JAX has them off;
        `x` is traced and the result a NumPy array; a result narrower than 16 bits is
        differentiated, or any by an `x` narrower than 16 bits: use `fake_cast`.
      ValueError: `to` is no type that the version has; an unknown attribute value, or one that the
        version lacks; text that is no number.

    Gradient: as `qtoolkit.cast`: for float results of 16 bits and more, 1 within the range of the
    type, else 0.

    Source: ONNX Cast 1, 6, 9, 13, 19, 21, 23, 24, 25, 28; technical notes int4, int2, float4.

    Examples:
      >>> x = jnp.asarray([0.3, 449.0, jnp.inf])
      >>> qt.onnx.cast(x, "FLOAT8E4M3FN")
      Array([0.3125, 448, 448], dtype=float8_e4m3fn)
      >>> qt.onnx.cast(x, "FLOAT8E4M3FN", saturate=False)
      Array([0.3125, 448, nan], dtype=float8_e4m3fn)
      >>> qt.onnx.cast(np.asarray(["3.7", "1e-5", "-INF"]), "INT32")
      Array([          3,           0, -2147483648], dtype=int32)
      >>> qt.onnx.cast(x, "STRING")
      array(['0.3', '449', 'INF'], dtype='<U3')
    """
    operator = Operator("onnx.cast", opset, first=1)
    target = operator.data_type("to", to)
    if CAST_TYPES.get(target, opset + 1) > opset:
        since = (
            f"came with opset {CAST_TYPES[target]}, got opset={opset}"
            if target in CAST_TYPES
            else "is a type that nothing is cast to"
        )
        allowed = ", ".join(t.name for t, first in CAST_TYPES.items() if first <= opset)
        raise ValueError(f"{operator.name}: to={target.name} {since}; expected one of {allowed}")
    return cast_to(operator, x, target, saturate, round_mode, arithmetic)


def cast_like(
    x: ArrayLike | str | bytes | np.ndarray,
    like: Any,
    *,
    saturate: bool | int = True,
    round_mode: str = "up",
    opset: int = 28,
    arithmetic: str = "exact",
) -> jax.Array | np.ndarray:
    """Convert `x` to the type of `like`.

    Args:
      x, saturate, round_mode, arithmetic: As in `cast`.
      like: An array, of which only the dtype counts; traced ones and `jax.ShapeDtypeStruct` do.
      opset: 15 to 28. CastLike changed in 19, 21, 23, 24 and 25; none of them has float6.

    Returns, Raises, Gradient: As `cast`.

    Source: ONNX CastLike 15, 19, 21, 23, 24, 25.

    Examples:
      >>> qt.onnx.cast_like(jnp.asarray([1.5, -2.5]), jnp.int8(0))  # toward zero
      Array([ 1, -2], dtype=int8)
    """
    operator = Operator("onnx.cast_like", opset, first=15)
    types = {t: first for t, first in CAST_TYPES.items() if t not in FLOAT6}
    target = operator.type_like("like", like, types)
    operator.type_of("x", x, types)
    return cast_to(operator, x, target, saturate, round_mode, arithmetic)


def cast_to(
    operator: Operator,
    x: Any,
    target: DataType,
    saturate: Any,
    round_mode: Any = "up",
    arithmetic: Any = "exact",
) -> jax.Array | np.ndarray:
    """Cast to a type that the version has; checks everything else."""
    operator.check_choice("saturate", saturate, (True, False))
    operator.check_choice("round_mode", round_mode, tuple(_ROUNDINGS))
    operator.check_choice("arithmetic", arithmetic, ("exact", "reference"))
    operator.check_since("saturate", saturate, True, 19)
    operator.check_since("round_mode", round_mode, "up", 24)
    source = operator.type_of("x", x, CAST_TYPES)
    operator.check_64_bits(target)
    if (target in FLOAT6 or DataType.STRING in (source, target)) and is_traced(x):
        raise TypeError(
            f"{operator.name}: x is traced, and {target.name} has no JAX array; expected a "
            "concrete array: call it outside of jit, vmap and grad"
            + (", or use encode for codes, fake_cast for gradients" if target in FLOAT6 else "")
        )
    if target is DataType.STRING:
        if source is DataType.STRING:
            return _strings.texts(operator.name, x).astype(np.str_)
        return _strings.from_numbers(np.asarray(x, DTYPES[source]), FORMATS[source])
    if source is DataType.STRING:
        text, fmt = _strings.texts(operator.name, x), FORMATS[target]
        if isinstance(fmt, IntFormat) and not fmt.is_bool:
            integers = _strings.to_integers(operator.name, text, fmt, nearest=fmt.bits <= 4)
            return _concrete(operator, integers, target, UNCLAMPED)
        x = _strings.to_float64(operator.name, text, exact=target is DataType.DOUBLE)
        source = DataType.DOUBLE
    elif arithmetic == "reference" and _through_float32(source, target):
        x, source = cast_for(operator.name, x, FLOAT32, UNCLAMPED), DataType.FLOAT
    if target is DataType.FLOAT8E8M0:
        return _to_e8m0(operator, x, _ROUNDINGS[round_mode], bool(saturate))
    projection = _projection(source, target, bool(saturate), operator.opset)
    if target in FLOAT6:
        return _concrete(operator, x, target, projection)
    return cast_for(operator.name, x, FORMATS[target], projection)


def _projection(source: DataType, target: DataType, saturate: bool, opset: int) -> Projection:
    """How numbers are cast to any numeric type but float8e8m0."""
    fmt = FORMATS[target]
    if isinstance(fmt, IntFormat):
        wraps = fmt.bits <= 4 or isinstance(FORMATS[source], IntFormat)
        return UNCLAMPED if wraps else Projection("toward_zero")
    if target not in FLOAT8 or not saturate:
        return UNCLAMPED
    # "propagate" clamps numbers, and makes infinities what the format's overflow is: NaN.
    fnuz = target in (DataType.FLOAT8E4M3FNUZ, DataType.FLOAT8E5M2FNUZ)
    return Projection(saturation="propagate") if fnuz and opset < 24 else NEAREST


def _to_e8m0(operator: Operator, x: Any, rounding: str, saturate: bool) -> jax.Array:
    fmt = FORMATS[DataType.FLOAT8E8M0]
    if saturate:
        return cast_for(operator.name, x, fmt, Projection(rounding))
    # The page compares x itself with the range, not what x is rounded to: 1e-39, below the least
    # number 2**-127, is NaN even where it is rounded up to it. Only rounding down shows that x lies
    # below the range, only rounding up that it lies above.
    low, high, code = (
        encode_for(operator.name, x, fmt, projection)
        for projection in (
            Projection("toward_negative", "none"),
            Projection("toward_positive", "none"),
            Projection(rounding),
        )
    )
    assert fmt.nan_code is not None
    nan = np.uint8(fmt.nan_code)
    return dtype_from_codes(jnp.where((low == nan) | (high == nan), nan, code), fmt)


def _concrete(operator: Operator, x: Any, target: DataType, projection: Projection) -> Any:
    """The cast at once, even inside `jit`; a NumPy array for float6, which JAX does not have."""
    fmt = FORMATS[target]
    with jax.ensure_compile_time_eval():
        if target not in FLOAT6:
            return cast_for(operator.name, x, fmt, projection)
        codes = encode_for(operator.name, x, fmt, projection)
        return np.asarray(codes).view(DTYPES[target])


def _through_float32(source: DataType, target: DataType) -> bool:
    if source is DataType.DOUBLE:
        fmt = FORMATS[target]
        return isinstance(fmt, FloatFormat) and (fmt.bits <= 8 or target is DataType.BFLOAT16)
    return source in _INEXACT_IN_FLOAT32 and target in (
        DataType.BFLOAT16,
        DataType.FLOAT8E8M0,
    )
