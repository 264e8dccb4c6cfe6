"""The public casts: arguments checked, then one jitted call."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts._bits import check_holds, from_stored_codes, stored_codes
from qtoolkit.casts._modes import Rounding, Stochastic, check_rounding
from qtoolkit.casts._random import Draw, check_draw
from qtoolkit.casts._sources import (
    SOURCES,
    check_source,
    check_table,
    check_target,
    check_value_source,
    codes_of,
    round_values,
    values_of,
)
from qtoolkit.formats import FloatFormat, Format, IntFormat, TableFormat, format


def round_to_format(
    x: ArrayLike,
    fmt: Any,
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> jax.Array:
    """Rounds `x` once to the values of `fmt` and keeps its dtype.

    Bit for bit `decode(encode(x, fmt), fmt, x.dtype)`. Zeros keep their sign where the format has
    two. NaN becomes the quiet NaN of the same sign (formats with one NaN: that one); in formats
    without NaN the largest value, in integers zero.

    Args:
      x: An array of any float, integer or bool dtype up to 64 bits, any shape. Subnormals count
        like any other value. Python's numbers are 64-bit ones.
      fmt: A format or any spelling of one, see `qtoolkit.format`.
      rounding: "nearest_even", "nearest_away", "toward_zero", "toward_positive",
        "toward_negative", "to_odd" (what is inexact becomes the neighbour with the odd code), or
        "stochastic", which is `qtoolkit.Stochastic()`. Even and odd are codes.
      saturation: What becomes of numbers that lie beyond the format once they are rounded.
        "finite": they and infinities become the largest finite value of their sign. "propagate":
        numbers do, infinities become what `fmt.overflow` says. "none": both become what
        `fmt.overflow` says, but numbers that `rounding` moves toward zero the largest finite value.
        Unsigned formats write what lies below their lowest value as that value, "none": as NaN.
        Integers: "finite" and "propagate" clamp; "none" keeps the low bits of the exact integer,
        infinities clamp.
      key: A key of `jax.random`, for stochastic rounding: element i uses a hash of the key and i.
        The same bits eager, under `jit` and under any sharding; `vmap` over x and keys; inside
        `shard_map` fold the index of the device into the key.
      random_bits: Unsigned integers to use instead, of a shape that broadcasts to that of `x`; as
        many of their low bits count as `rounding` says.
      index_offset: Index of the first element of `x` in the stream of `key`, below 2**64: chunks
        of an array are rounded as the whole is.

    Returns:
      Shape and dtype of `x`.

    Raises:
      TypeError: `x` has another dtype, or one of 64 bits where JAX has them off; `key` is no key;
        or a derivative is asked for: use `fake_cast`.
      ValueError: Unknown format, rounding or saturation; the dtype of `x` does not hold every
        finite value of `fmt`; `key` and `random_bits` do not fit the rounding.

    Source: IEEE P3109 Interim Report v4.0 for the words and the modes; OFP8 1.0 for FP8.
    """
    source = check_value_source("round_to_format", x)
    fmt, rounding, draw = check_arguments(
        "round_to_format", source, fmt, rounding, saturation, key, random_bits, index_offset
    )
    check_holds("round_to_format", fmt, source.dtype)
    return _round_to_format(source, draw, fmt, rounding, saturation, "round_to_format")


def encode(
    x: ArrayLike,
    fmt: Any,
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> jax.Array:
    """Rounds `x` once to the codes of `fmt`.

    Args:
      x, fmt, rounding, saturation, key, random_bits, index_offset: As in `round_to_format`; here
        the dtype of `x` need not hold the values of `fmt`, and 64-bit arrays of NumPy are rounded
        from their exact values where JAX has 64-bit types off, too.

    Returns:
      Shape of `x`, dtype `fmt.code_dtype`: sign, exponent field, mantissa field from the top bit
      down; two's complement for signed integers. NaN is written as `fmt.nan_code` with its sign.

    Raises:
      TypeError, ValueError: As `round_to_format`. Codes have no derivative.
    """
    return encode_for("encode", x, fmt, rounding, saturation, key, random_bits, index_offset)


def cast(
    x: ArrayLike,
    fmt: Any,
    *,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> jax.Array:
    """Rounds `x` once to `fmt` and returns it in the format's own dtype.

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
    """
    return cast_for("cast", x, fmt, rounding, saturation, key, random_bits, index_offset)


def decode(codes: ArrayLike, fmt: Any, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The values of codes of `fmt`, exactly.

    Args:
      codes: As `encode` returns them, any shape, dtype `fmt.code_dtype`; or an array of the
        format's own dtype, as `cast` returns it. Bits above the format's width must be zero.
      fmt: A format or any spelling of one.
      dtype: Any dtype that holds every finite value of `fmt`.

    Returns:
      Shape of `codes`, dtype `dtype`. Every NaN code becomes the quiet NaN of the same sign, in
      formats with one NaN the positive one.

    Raises:
      TypeError: `codes` or `dtype` has another dtype, or one of 64 bits where JAX has them off.
      ValueError: Unknown format, or `dtype` does not hold every finite value of `fmt`.
    """
    fmt = format(fmt)
    target = None if dtype is None else np.dtype(dtype)  # numpy takes None for float64
    if target is None or target not in SOURCES:
        raise TypeError(f"decode: got dtype {target}, expected a float or integer dtype of JAX")
    check_holds("decode", fmt, target)
    check_target("decode", fmt)
    check_target("decode", format(target))
    got = getattr(codes, "dtype", None)
    if got is not None and got == fmt.dtype != fmt.code_dtype:
        codes = stored_codes(jnp.asarray(codes), fmt)
    elif got != fmt.code_dtype:
        raise TypeError(
            f"decode: codes have {f'dtype {got}' if got else f'type {type(codes).__name__}'}, "
            f"expected {fmt.code_dtype}, the codes of {fmt.name}"
            + (f", or {fmt.dtype}" if fmt.dtype is not None else "")
        )
    return _decode(jnp.asarray(codes), fmt, target)


def encode_for(
    where: str,
    x: ArrayLike,
    fmt: Any,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    *draw: Any,
) -> jax.Array:
    """`encode`, with errors that name the operator `where`; `draw` as the rest of its arguments."""
    source = check_source(where, x)
    fmt, rounding, drawn = check_arguments(where, source, fmt, rounding, saturation, *draw)
    with _types_of(source):
        return _encode(source, drawn, fmt, rounding, saturation, where)


def cast_for(
    where: str,
    x: ArrayLike,
    fmt: Any,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    *draw: Any,
) -> jax.Array:
    """`cast`, with errors that name the operator `where`; `draw` as the rest of its arguments."""
    source = check_source(where, x)
    fmt, rounding, drawn = check_arguments(where, source, fmt, rounding, saturation, *draw)
    if fmt.dtype is None:
        raise TypeError(
            f"{where}: format {fmt.name} has no numpy or JAX dtype, expected one that has; "
            "use encode for its codes"
        )
    with _types_of(source):
        return _cast(source, drawn, fmt, rounding, saturation, where)


def check_arguments(
    where: str,
    x: jax.Array | np.ndarray,
    fmt: Any,
    rounding: Any,
    saturation: Any,
    key: Any = None,
    random_bits: ArrayLike | None = None,
    index_offset: Any = 0,
) -> tuple[Format, Rounding, Draw | None]:
    """The checks that every cast shares: the resolved format and rounding, the random bits."""
    resolved = format(fmt)
    check_target(where, resolved)
    check_table(where, resolved, x.dtype)
    rounding = check_rounding(where, rounding, saturation)
    if isinstance(rounding, Stochastic) and isinstance(resolved, TableFormat):
        raise ValueError(
            f"{where}: stochastic rounding of table formats is not defined here, got "
            f"{resolved.name}; use another rounding"
        )
    return resolved, rounding, check_draw(where, x.shape, rounding, key, random_bits, index_offset)


def random_of(draw: Draw | None, x: jax.Array, rounding: Rounding) -> jax.Array | None:
    """The random bits for `x`, inside a jitted function."""
    return None if draw is None else draw.random(x.shape, rounding)


@contextlib.contextmanager
def _types_of(x: jax.Array | np.ndarray) -> Iterator[None]:
    """64-bit types for an array of NumPy that needs them: the result has at most 32 bits."""
    if isinstance(x, jax.Array):
        yield
        return
    with jax.enable_x64(True):
        yield


def _round(
    x: jax.Array, draw: Draw | None, fmt: Format, rounding: Rounding, saturation: str, where: str
) -> jax.Array:
    return round_values(x, fmt, rounding, saturation, random_of(draw, x, rounding))


def _codes(
    x: jax.Array, draw: Draw | None, fmt: Format, rounding: Rounding, saturation: str, where: str
) -> jax.Array:
    return codes_of(x, fmt, rounding, saturation, random_of(draw, x, rounding))


def _stored(
    x: jax.Array, draw: Draw | None, fmt: Format, rounding: Rounding, saturation: str, where: str
) -> jax.Array:
    return from_stored_codes(_codes(x, draw, fmt, rounding, saturation, where), fmt)


def _with_derivative(function: Callable[..., jax.Array], rule: Callable[..., Any]) -> Any:
    """`function(x, draw, fmt, rounding, saturation, where)` jitted, with `rule` as its JVP.

    `where` is for the errors of `rule` alone, and static: each operator compiles for itself.
    """
    differentiable = jax.custom_jvp(function, nondiff_argnums=(2, 3, 4, 5))
    differentiable.defjvp(rule)
    return jax.jit(differentiable, static_argnums=(2, 3, 4, 5))


def _no_derivative(fmt: Format, rounding: Rounding, saturation: str, where: str, *_: Any) -> Any:
    raise TypeError(
        f"{where}: has no derivative to {fmt.name}; differentiate fake_cast, which returns the "
        "same values in the dtype of its argument, or pass jax.lax.stop_gradient of the argument"
    )


def _cast_jvp(
    fmt: Format, rounding: Rounding, saturation: str, where: str, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (x, draw), (x_dot, _) = primals, tangents
    if not isinstance(fmt, FloatFormat) or fmt.bits < 16:
        _no_derivative(fmt, rounding, saturation, where)
    y = _cast(x, draw, fmt, rounding, saturation, where)
    source = format(x.dtype)
    if isinstance(source, IntFormat):
        return y, jnp.zeros_like(y)
    if source.bits < 16:
        raise TypeError(
            f"{where}: has no derivative from {source.name}: JAX would round the cotangent to it, "
            "unscaled; differentiate what comes before that array, with fake_cast in its place, or "
            "pass jax.lax.stop_gradient of it"
        )
    wide = jnp.float64 if jnp.float64 in (x.dtype, fmt.dtype) else jnp.float32
    inside = jnp.abs(x.astype(wide)) <= wide(float(fmt.max_finite))
    return y, jnp.where(inside, x_dot, jnp.zeros_like(x_dot)).astype(fmt.dtype)


_round_to_format = _with_derivative(_round, _no_derivative)
_encode = _with_derivative(_codes, _no_derivative)
_cast = _with_derivative(_stored, _cast_jvp)
_decode = jax.jit(values_of, static_argnums=(1, 2))
