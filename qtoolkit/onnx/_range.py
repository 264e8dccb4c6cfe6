"""Range."""

import builtins
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qtoolkit import casts
from qtoolkit.formats import FLOAT32, IntFormat
from qtoolkit.onnx._operator import Operator
from qtoolkit.onnx._strings import to_odd
from qtoolkit.onnx._types import DTYPES, FORMATS, DataType, TypeLike, is_traced

_T = DataType
_TYPES = {
    **dict.fromkeys((_T.FLOAT, _T.DOUBLE, _T.INT16, _T.INT32, _T.INT64), 11),
    **dict.fromkeys((_T.FLOAT16, _T.BFLOAT16), 27),
}


def range(
    start: ArrayLike,
    limit: ArrayLike,
    delta: ArrayLike,
    *,
    stash_type: TypeLike = DataType.FLOAT,
    opset: int = 28,
) -> jax.Array:
    """The numbers `start + i * delta` for i from 0, as long as they lie before `limit` exactly.

    There are max(ceil((limit - start) / delta), 0) of them; that quotient is exact here, of the
    arguments as their type has them. So float32's 0.1, 1.1 and 0.1 give 11 numbers, the last of
    which is rounded to 1.1, as in ONNX Runtime; ONNX's reference evaluator, which rests on
    `numpy.arange`, gives 10. Each number is rounded once from its exact value: no error adds up, as
    it does in implementations that add `delta` again and again (ONNX Runtime) or that take it from
    rounded differences (`numpy.arange`).

    Args:
      start, limit, delta: Scalars of one type: arrays of NumPy or JAX without dimensions, or
        numbers of Python, which have 64 bits. float32, float64, int16, int32, int64; float16 and
        bfloat16 from opset 27 on. They decide the shape, so under `jit` they must be static.
      stash_type: The type in which float16 and bfloat16 are computed, float32 (1) or float64 (11):
        each number is rounded to it, then to the result's type. Came with opset 27.
      opset: 11 to 28. Range changed in 27.

    Returns:
      One-dimensional, of the type of `start`. No derivative: all arguments are static.

    Raises:
      TypeError: The types differ, or the version lacks them; 64-bit types where JAX has them off;
        an argument is traced.
      ValueError: An argument is no scalar, infinite or NaN; `delta` is zero; 2**32 numbers or more.

    Source: ONNX Range 11, 27.

    Examples:
      >>> tenth = np.float32(0.1)
      >>> qt.onnx.range(tenth, np.float32(1.1), tenth).shape  # NumPy's has 10
      (11,)
      >>> qt.onnx.range(np.int32(10), np.int32(3), np.int32(-2))
      Array([10,  8,  6,  4], dtype=int32)
    """
    operator = Operator("onnx.range", opset, first=11)
    stash = operator.data_type("stash_type", stash_type)
    operator.check_choice("stash_type", stash, (_T.FLOAT, _T.DOUBLE))
    operator.check_since("stash_type", stash, _T.FLOAT, 27)
    arguments = {"start": start, "limit": limit, "delta": delta}
    types = {name: operator.type_of(name, value) for name, value in arguments.items()}
    dtype = types["start"]
    if len(set(types.values())) > 1:
        got = ", ".join(f"{name} {t.name}" for name, t in types.items())
        raise TypeError(
            f"{operator.name}: got {got}, expected one type; convert them first, e.g. "
            "jnp.float32(0)"
        )
    operator.check_type("start", dtype, _TYPES)
    operator.check_64_bits(dtype)
    first, end, step = (_number(operator, name, value) for name, value in arguments.items())
    if step == 0:
        raise ValueError(f"{operator.name}: delta is zero, expected another number")
    count = max(math.ceil((end - first) / step), 0)
    if count >= 2**32:
        raise ValueError(f"{operator.name}: {count} numbers, expected fewer than 2**32 = {2**32}")
    fmt = FORMATS[dtype]
    if isinstance(fmt, IntFormat):  # no number lies beyond the limit, so none overflows
        numbers = int(first) + int(step) * np.arange(count, dtype=np.int64)
        return jnp.asarray(numbers.astype(DTYPES[dtype]))
    if dtype is _T.DOUBLE or (stash is _T.DOUBLE and dtype is not _T.FLOAT):
        return casts.cast(_numbers(first, step, count, odd=False), fmt, saturation="none")
    numbers = _numbers(first, step, count, odd=True)
    stashed = casts.cast(numbers, FLOAT32, saturation="none")
    return stashed if dtype is _T.FLOAT else casts.cast(stashed, fmt, saturation="none")


def _number(operator: Operator, name: str, value: Any) -> Fraction:
    if is_traced(value):
        raise TypeError(
            f"{operator.name}: {name} is traced, but the arguments decide the shape; pass concrete "
            "scalars, e.g. with static_argnums"
        )
    array = np.asarray(value)
    if array.ndim:
        raise ValueError(f"{operator.name}: {name} has shape {array.shape}, expected a scalar")
    number = array.item()
    if not math.isfinite(number):
        raise ValueError(f"{operator.name}: {name} is {number}, expected a finite number")
    return Fraction(number)


def _numbers(first: Fraction, step: Fraction, count: int, *, odd: bool) -> np.ndarray:
    """`first + i * step` in float64, rounded to nearest even or to odd."""
    scale = max(first.denominator, step.denominator)  # a power of two
    a, b = int(first * scale), int(step * scale) if count > 1 else 0
    if max(abs(a), abs(a + b * (count - 1))) <= 2**53:  # float64 holds all of them
        integers = a + b * np.arange(count, dtype=np.int64)
        return np.ldexp(integers.astype(np.float64), 1 - scale.bit_length())
    exact = (Fraction(a + b * i, scale) for i in builtins.range(count))
    rounded = (to_odd(float(x), x) if odd else float(x) for x in exact)
    return np.fromiter(rounded, np.float64, count)
