"""The public casts: arguments checked, then one jitted call."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts._bits import check_holds, codes_from_dtype, dtype_from_codes
from qtoolkit.casts._checks import (
    SOURCES,
    check_source,
    check_table,
    check_target,
    hint_for_others,
    result_dtype,
)
from qtoolkit.casts._codes import codes_of, round_values, values_of
from qtoolkit.casts._keywords import hinting
from qtoolkit.casts._linear import linear_in_dtype
from qtoolkit.casts._modes import Stochastic
from qtoolkit.casts._order import is_within, widened
from qtoolkit.casts._projection import NEAREST, Projection, projection_of
from qtoolkit.casts._tables import check_stochastic
from qtoolkit.formats import FloatFormat, Format, FormatLike, TableFormat, format


@hinting
def round_to_format(
    x: ArrayLike,
    fmt: FormatLike,
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> jax.Array:
    """Round `x` once to the values of `fmt`, in the dtype of `x`.

    Bit for bit `decode(encode(x, fmt), fmt, x.dtype)`. Zeros keep their sign where the format has
    two. NaN becomes the quiet NaN of the same sign (formats with one NaN: that one); in formats
    without NaN the largest value, in integers zero.

    Args:
      x: An array of any float, integer or bool dtype up to 64 bits, any shape. Subnormals count
        like any other value. Python's numbers are 64-bit ones, as in NumPy.
      fmt: A format or any spelling of one, see `qtoolkit.format`.
      rounding: "nearest_even", "nearest_away", "toward_zero", "toward_positive",
        "toward_negative", "to_odd" (what is inexact becomes the neighbour with the odd code), or
        "stochastic", which is `qtoolkit.Stochastic()`. Even and odd are codes. Between the values
        of tables, stochastic rounding measures distances in float32.
      saturation: What happens to infinities, and to numbers that after rounding exceed the largest
        finite value. "finite": both become the largest finite value of their sign. "propagate":
        numbers do, but infinities become what `fmt.overflow` says. "none": both become what
        `fmt.overflow` says; only numbers that `rounding` moves toward zero become the largest
        finite value. In unsigned formats, numbers below the lowest value become that value, or NaN
        with "none". Integers: "finite" and "propagate" clamp; "none" keeps the low bits of the
        exact integer, and clamps infinities.
      key: A key of `jax.random`, for stochastic rounding: element i uses a hash of the key and i.
        The same bits eager, under `jit` and under any sharding; `vmap` over x and keys; inside
        `shard_map` fold the index of the device into the key.
      random_bits: Unsigned integers to use instead of a key, of a shape that broadcasts to that of
        `x`. Only as many of their low bits are used as `rounding` has.
      index_offset: The index of the first element of `x` in the stream of `key`, below 2**64. With
        it, an array that is rounded in chunks gives the same result as the whole.

    Returns:
      Shape and dtype of `x`. Where JAX has 64-bit types off, 64-bit arrays of NumPy and Python's
      numbers are rounded from their exact values, and the result has the dtype that JAX gives them:
      float32, int32 or uint32.

    Raises:
      TypeError: `x` has another dtype; `key` is no key; or a derivative is asked for: use
        `fake_cast`.
      ValueError: Unknown format, rounding or saturation; the dtype of `x` does not hold every
        finite value of `fmt`; `key` and `random_bits` do not fit the rounding.

    Source: IEEE P3109 Interim Report v4.0 for the words and the modes; OFP8 1.0 for FP8.

    Examples:
      >>> x = jnp.asarray([17.0, 19.0, 21.0, 1000.0])  # e4m3fn has 16, 18, 20 and 22
      >>> qt.round_to_format(x, "e4m3fn")  # ties go to the even code, 1000 saturates
      Array([ 16.,  20.,  20., 448.], dtype=float32)
      >>> qt.round_to_format(x, "e4m3fn", rounding="toward_positive", saturation="none")
      Array([18., 20., 22., nan], dtype=float32)
    """
    source = check_source("round_to_format", x)
    fmt, projection = check_arguments(
        "round_to_format", source, fmt, rounding, saturation, key, random_bits, index_offset
    )
    check_holds("round_to_format", fmt, result_dtype(source))
    source = without_derivative(source, _NO_DERIVATIVE.format("round_to_format", fmt.name))
    return rounded(source, projection, fmt)


def rounded(x: jax.Array | np.ndarray, projection: Projection, fmt: Format) -> jax.Array:
    """The values of `fmt` as `result_dtype(x)`, which holds them; without checks or derivative."""
    dtype = result_dtype(x)
    with types_of(x):
        return _round_to_format(x, projection, fmt, dtype)


@hinting
def encode(
    x: ArrayLike,
    fmt: FormatLike,
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> jax.Array:
    """Round `x` once and return the codes of `fmt`.

    Args:
      x, fmt, rounding, saturation, key, random_bits, index_offset: As in `round_to_format`; here
        the dtype of `x` need not hold the values of `fmt`, and 64-bit arrays of NumPy are rounded
        from their exact values where JAX has 64-bit types off, too.

    Returns:
      Shape of `x`, dtype `fmt.code_dtype`: sign, exponent field, mantissa field from the top bit
      down; two's complement for signed integers. NaN is written as `fmt.nan_code` with its sign.

    Raises:
      TypeError, ValueError: As `round_to_format`. Codes have no derivative.

    Examples:
      >>> x = jnp.asarray([0.5, 2.5, -5.0, 100.0])
      >>> qt.encode(x, "e2m1fn")  # 2.5 and 5 lie between two values: the even codes 4 and 6
      Array([ 1,  4, 14,  7], dtype=uint8)
      >>> qt.decode(qt.encode(x, "e2m1fn"), "e2m1fn")
      Array([ 0.5,  2. , -4. ,  6. ], dtype=float32)
    """
    x = check_source("encode", x)
    projection = projection_of(
        "encode", x.shape, rounding, saturation, key, random_bits, index_offset
    )
    return encode_for("encode", x, fmt, projection)


@hinting
def cast(
    x: ArrayLike,
    fmt: FormatLike,
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> jax.Array:
    """Round `x` once to `fmt` and return it in the format's own dtype.

    Unlike `x.astype`, it saturates by default and rounds from the exact value of `x`.

    Args:
      x, fmt, rounding, saturation, key, random_bits, index_offset: As in `encode`.

    Returns:
      Shape of `x`, dtype `fmt.dtype`: float8_e4m3fn for "e4m3fn".

    Raises:
      TypeError: As `encode`; or the format has no dtype of its own (use `encode`); or a result
        narrower than 16 bits is differentiated, or any result by an `x` narrower than 16 bits: JAX
        would round the cotangent to that type, unscaled. Use `fake_cast`.
      ValueError: As `encode`.

    Gradient: for float results of 16 bits and more, 1 where `fmt.lowest <= x <= fmt.max_finite`,
    else 0.

    Examples:
      >>> x = jnp.asarray([0.3, 449.0, jnp.inf])
      >>> qt.cast(x, "e4m3fn")
      Array([0.3125, 448, 448], dtype=float8_e4m3fn)
      >>> qt.cast(x, "e4m3fn", saturation="none")  # 449 still rounds to 448
      Array([0.3125, 448, nan], dtype=float8_e4m3fn)
    """
    x = check_source("cast", x)
    projection = projection_of(
        "cast", x.shape, rounding, saturation, key, random_bits, index_offset
    )
    return cast_for("cast", x, fmt, projection)


def decode(codes: ArrayLike, fmt: FormatLike, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The values of codes of `fmt`, exactly.

    Args:
      codes: As `encode` returns them, any shape, dtype `fmt.code_dtype`; or an array of the
        format's own dtype, as `cast` returns it. Bits above the format's width do not count.
      fmt: A format or any spelling of one.
      dtype: Any dtype that holds every finite value of `fmt`.

    Returns:
      Shape of `codes`, dtype `dtype`. Every NaN code becomes the quiet NaN of the same sign, in
      formats with one NaN the positive one.

    Raises:
      TypeError: `codes` or `dtype` has another dtype, or one of 64 bits where JAX has them off.
      ValueError: Unknown format, or `dtype` does not hold every finite value of `fmt`.

    Examples:
      >>> qt.decode(np.arange(8, dtype=np.uint8), "e2m1fn")
      Array([0. , 0.5, 1. , 1.5, 2. , 3. , 4. , 6. ], dtype=float32)
      >>> qt.decode(np.uint8([0x01, 0x7E, 0x7F]), "e4m3fn")  # smallest, largest, NaN
      Array([1.953125e-03, 4.480000e+02,          nan], dtype=float32)
    """
    fmt = format(fmt)
    try:
        target = None if dtype is None else np.dtype(dtype)  # NumPy takes None for float64
    except TypeError:
        target = None
    if target is None or target not in SOURCES:
        got = dtype if target is None else target
        raise TypeError(f"decode: got dtype {got!r}, expected a float or integer dtype of JAX")
    check_holds("decode", fmt, target)
    check_target("decode", fmt)
    check_target("decode", format(target))
    source = getattr(codes, "dtype", None)
    if source is None or source not in (fmt.code_dtype, fmt.dtype or fmt.code_dtype):
        got = f"dtype {source}" if source else f"type {type(codes).__name__}"
        raise TypeError(
            f"decode: codes have {got}, expected {fmt.code_dtype}, the codes of {fmt.name}"
            + (f", or {fmt.dtype}" if fmt.dtype is not None else "")
            + hint_for_others("codes", codes)
        )
    return _decode(jnp.asarray(codes), fmt, target)


def encode_for(
    where: str, x: ArrayLike, fmt: FormatLike, projection: Projection = NEAREST
) -> jax.Array:
    """`encode` by a projection, with errors that name the function or operator `where`."""
    source = check_source(where, x)
    fmt = _check_target(where, source, fmt, projection)
    source = without_derivative(source, _NO_DERIVATIVE.format(where, fmt.name))
    with types_of(source):
        return _encode(source, projection, fmt)


def cast_for(
    where: str, x: ArrayLike, fmt: FormatLike, projection: Projection = NEAREST
) -> jax.Array:
    """`cast` by a projection, with errors that name the function or operator `where`."""
    source = check_source(where, x)
    fmt = _check_target(where, source, fmt, projection)
    if fmt.dtype is None:
        raise TypeError(
            f"{where}: format {fmt.name} has no numpy or JAX dtype, expected one that has; "
            "use encode for its codes"
        )
    source_format = format(source.dtype)
    if not isinstance(fmt, FloatFormat) or fmt.bits < 16:
        source = without_derivative(source, _NO_DERIVATIVE.format(where, fmt.name))
    elif isinstance(source_format, FloatFormat) and source_format.bits < 16:
        source = without_derivative(source, _NO_DERIVATIVE_FROM.format(where, source_format.name))
    with types_of(source):
        return _cast_jitted(source, projection, fmt)


def check_arguments(
    where: str,
    x: jax.Array | np.ndarray,
    fmt: FormatLike,
    rounding: Any,
    saturation: Any,
    key: Any = None,
    random_bits: ArrayLike | None = None,
    index_offset: Any = 0,
) -> tuple[Format, Projection]:
    """Check what every cast takes; return the format and the keywords as a projection."""
    projection = projection_of(where, x.shape, rounding, saturation, key, random_bits, index_offset)
    return _check_target(where, x, fmt, projection), projection


def _check_target(
    where: str, x: jax.Array | np.ndarray, fmt: FormatLike, projection: Projection
) -> Format:
    resolved = format(fmt)
    check_target(where, resolved)
    check_table(where, resolved, x.dtype)
    if isinstance(projection.rounding, Stochastic) and isinstance(resolved, TableFormat):
        check_stochastic(where, resolved)
    return resolved


def types_of(x: jax.Array | np.ndarray) -> contextlib.AbstractContextManager[Any]:
    """64-bit types for an array of NumPy that needs them: the result has at most 32 bits."""
    return contextlib.nullcontext() if isinstance(x, jax.Array) else jax.enable_x64(True)


def without_derivative(x: Any, message: str) -> Any:
    """Returns `x`; if it is traced, differentiating by it raises TypeError with this message."""
    # Outside of the jitted function, so that callers with different messages share one program.
    return _undifferentiable(x, message) if isinstance(x, jax.core.Tracer) else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _undifferentiable(x: jax.Array, message: str) -> jax.Array:
    return x


@_undifferentiable.defjvp
def _refuse(message: str, *_: Any) -> Any:
    raise TypeError(message)


_NO_DERIVATIVE = (
    "{}: has no derivative to {}; differentiate fake_cast, which returns the same values in the "
    "dtype of its argument, or pass jax.lax.stop_gradient of the argument"
)
_NO_DERIVATIVE_FROM = (
    "{}: has no derivative from {}: JAX would round the cotangent to it, unscaled; differentiate "
    "what comes before that array, with fake_cast in its place, or pass jax.lax.stop_gradient of it"
)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _round_to_format(
    x: jax.Array | np.ndarray, projection: Projection, fmt: Format, dtype: np.dtype
) -> jax.Array:
    x, projection = jnp.asarray(x), projection.drawn(x.shape)
    if x.dtype == dtype:
        return round_values(x, fmt, projection)
    return values_of(codes_of(x, fmt, projection), fmt, dtype)


@functools.partial(jax.jit, static_argnums=2)
def _encode(x: jax.Array, projection: Projection, fmt: Format) -> jax.Array:
    return codes_of(x, fmt, projection.drawn(x.shape))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _cast(x: jax.Array, projection: Projection, fmt: Format) -> jax.Array:
    return dtype_from_codes(codes_of(x, fmt, projection.drawn(x.shape)), fmt)


@_cast.defjvp
def _cast_jvp(fmt: Format, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # Floats to floats of 16 bits and more: `cast_for` refuses the derivatives of all other casts.
    (x, projection), (x_dot, _) = primals, tangents
    y = _cast(x, projection, fmt)
    numbers = x.astype(jnp.float64) if fmt.dtype == jnp.float64 else widened(x)
    is_inside = is_within(numbers, float(fmt.lowest), float(fmt.max_finite))
    y_dot = jnp.where(is_inside, x_dot, jnp.zeros_like(x_dot))
    return y, linear_in_dtype(y_dot, y.dtype)


_cast_jitted = jax.jit(_cast, static_argnums=2)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _decode(codes: jax.Array, fmt: Format, dtype: np.dtype) -> jax.Array:
    if codes.dtype != fmt.code_dtype:
        codes = codes_from_dtype(codes, fmt)
    return values_of(codes & codes.dtype.type(2**fmt.bits - 1), fmt, dtype)
