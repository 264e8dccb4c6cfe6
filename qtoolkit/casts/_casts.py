"""The public casts: arguments checked, then one jitted call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts._bits import (
    SOURCES,
    check_holds,
    check_range,
    check_source,
    float_pattern,
    from_pattern,
    pattern,
)
from qtoolkit.casts._rounding import SATURATIONS, float_codes, float_values, int_codes
from qtoolkit.formats import FloatFormat, Format, IntFormat, format

ROUNDINGS = ("nearest_even",)


def round_to_format(
    x: ArrayLike, fmt: Any, *, rounding: str = "nearest_even", saturation: str = "finite"
) -> jax.Array:
    """Rounds `x` once to the values of `fmt` and keeps its dtype.

    Bit for bit `decode(encode(x, fmt), fmt, x.dtype)`. Zeros keep their sign where the format has
    two. NaN becomes the quiet NaN of the same sign (FNUZ formats: positive), in integers zero.

    Args:
      x: float32, float16 or bfloat16, any shape. Subnormals count like any other value.
      fmt: A format or any spelling of one, see `qtoolkit.format`.
      rounding: "nearest_even".
      saturation: "finite": overflow and infinities become the largest finite value of their sign.
        "propagate": finite overflow does, infinities become what `fmt.overflow` says. "none": both
        become what `fmt.overflow` says. Integers: "finite" and "propagate" clamp; "none" keeps the
        low bits of the exact integer, infinities clamp.

    Returns:
      Shape and dtype of `x`.

    Raises:
      TypeError: `x` has another dtype, or a derivative is asked for: use `fake_cast`.
      ValueError: Unknown format, rounding or saturation, or the dtype of `x` does not hold every
        finite value of `fmt`.

    Source: IEEE P3109 Interim Report v4.0 for the words; OFP8 1.0 for the formats.
    """
    x, fmt = check_arguments("round_to_format", x, fmt, rounding, saturation)
    check_holds("round_to_format", fmt, x.dtype)
    return _round_to_format(x, fmt, saturation)


def encode(
    x: ArrayLike, fmt: Any, *, rounding: str = "nearest_even", saturation: str = "finite"
) -> jax.Array:
    """Rounds `x` once to the codes of `fmt`.

    Args:
      x, fmt, rounding, saturation: As in `round_to_format`; here the dtype of `x` need not hold
        the values of `fmt`.

    Returns:
      Shape of `x`, dtype `fmt.code_dtype`: sign, exponent field, mantissa field from the top bit
      down; two's complement for signed integers. NaN is written as `fmt.nan_code` with its sign.

    Raises:
      TypeError, ValueError: As `round_to_format`. Codes have no derivative.
    """
    x, fmt = check_arguments("encode", x, fmt, rounding, saturation)
    return _encode(x, fmt, saturation)


def cast(
    x: ArrayLike, fmt: Any, *, rounding: str = "nearest_even", saturation: str = "finite"
) -> jax.Array:
    """Rounds `x` once to `fmt` and returns it in the format's own dtype.

    Unlike `x.astype`, it saturates by default and rounds from the exact value of `x`.

    Args:
      x, fmt, rounding, saturation: As in `encode`.

    Returns:
      Shape of `x`, dtype `fmt.dtype`: float8_e4m3fn for "e4m3fn".

    Raises:
      TypeError: As `encode`; or the format has no dtype of its own (use `encode`); or a result
        narrower than 16 bits is differentiated: JAX would round the cotangent to that type,
        unscaled. Use `fake_cast`.
      ValueError: As `encode`.

    Gradient: for results of 16 bits, 1 where `fmt.lowest <= x <= fmt.max_finite`, else 0.
    """
    x, fmt = check_arguments("cast", x, fmt, rounding, saturation)
    if fmt.dtype is None:
        raise TypeError(
            f"cast: format {fmt.name} has no numpy or JAX dtype, expected one that has; "
            "use encode for its codes"
        )
    return _cast(x, fmt, saturation)


def decode(codes: ArrayLike, fmt: Any, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The values of codes of `fmt`, exactly.

    Args:
      codes: As `encode` returns them, any shape, dtype `fmt.code_dtype`; or an array of the
        format's own dtype, as `cast` returns it.
      fmt: A format or any spelling of one.
      dtype: float32, float16 or bfloat16.

    Returns:
      Shape of `codes`, dtype `dtype`. Every NaN code becomes the quiet NaN of the same sign, in
      FNUZ formats the positive one.

    Raises:
      TypeError: `codes` or `dtype` has another dtype.
      ValueError: Unknown format, or `dtype` does not hold every finite value of `fmt`.
    """
    fmt = format(fmt)
    check_range("decode", fmt)
    if np.dtype(dtype) not in SOURCES:
        raise TypeError(
            f"decode: got dtype {np.dtype(dtype)}, expected float32, float16 or bfloat16"
        )
    check_holds("decode", fmt, dtype)
    got = getattr(codes, "dtype", None)
    if got is not None and got == fmt.dtype != fmt.code_dtype:
        codes = lax.bitcast_convert_type(jnp.asarray(codes), fmt.code_dtype)
    elif got != fmt.code_dtype:
        raise TypeError(
            f"decode: codes have {f'dtype {got}' if got else f'type {type(codes).__name__}'}, "
            f"expected {fmt.code_dtype}, the codes of {fmt.name}"
            + (f", or {fmt.dtype}" if fmt.dtype is not None else "")
        )
    return decode_codes(jnp.asarray(codes), fmt, np.dtype(dtype))


def check_arguments(
    where: str, x: ArrayLike, fmt: Any, rounding: str, saturation: str
) -> tuple[jax.Array, Format]:
    """The checks that every cast shares; returns the array and the resolved format."""
    resolved = format(fmt)
    check_range(where, resolved)
    for name, got, known in (
        ("rounding", rounding, ROUNDINGS),
        ("saturation", saturation, SATURATIONS),
    ):
        if got not in known:
            raise ValueError(f"{where}: {name}={got!r}, expected one of {', '.join(known)}")
    return check_source(where, x), resolved


def round_values(x: jax.Array, fmt: Format, saturation: str) -> jax.Array:
    """`round_to_format` without checks; what the differentiable casts are built on."""
    if isinstance(fmt, IntFormat):
        return _decode(int_codes(pattern(x), fmt, saturation), fmt, x.dtype)
    return from_pattern(float_values(pattern(x), fmt, saturation), x.dtype)


def _codes(x: jax.Array, fmt: Format, saturation: str) -> jax.Array:
    to_codes: Callable[..., jax.Array] = int_codes if isinstance(fmt, IntFormat) else float_codes
    return to_codes(pattern(x), fmt, saturation).astype(fmt.code_dtype)


def _decode(codes: jax.Array, fmt: Format, dtype: DTypeLike) -> jax.Array:
    codes = codes.astype(jnp.uint32)
    if isinstance(fmt, FloatFormat):
        return from_pattern(float_pattern(codes, fmt), dtype)
    if fmt.signed:
        spare = np.int32(32 - fmt.bits)
        integers = lax.bitcast_convert_type(codes << spare.view(np.uint32), jnp.int32) >> spare
        return integers.astype(dtype)
    return codes.astype(dtype)


decode_codes = jax.jit(_decode, static_argnums=(1, 2))


def _with_derivative(function: Callable[..., jax.Array], rule: Callable[..., Any]) -> Any:
    """`function(x, fmt, saturation)` jitted, with `rule` as its JVP."""
    differentiable = jax.custom_jvp(function, nondiff_argnums=(1, 2))
    differentiable.defjvp(rule)
    return jax.jit(differentiable, static_argnums=(1, 2))


def _no_derivative(name: str) -> Callable[..., Any]:
    def rule(*_: Any) -> Any:
        raise TypeError(
            f"{name}: has no derivative; differentiate fake_cast, which returns the same values in "
            f"the dtype of x, or pass jax.lax.stop_gradient(x) to {name}"
        )

    return rule


def _cast_codes(x: jax.Array, fmt: Format, saturation: str) -> jax.Array:
    assert fmt.dtype is not None
    return lax.bitcast_convert_type(_codes(x, fmt, saturation), fmt.dtype)


def _cast_jvp(
    fmt: Format, saturation: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (x_dot,) = primals, tangents
    if not isinstance(fmt, FloatFormat) or fmt.bits < 16:
        _no_derivative("cast")()
    inside = jnp.abs(x).astype(jnp.float32) <= np.float32(float(fmt.max_finite))
    x_dot = jnp.where(inside, x_dot, jnp.zeros_like(x_dot))
    return _cast(x, fmt, saturation), x_dot.astype(fmt.dtype)


_round_to_format = _with_derivative(round_values, _no_derivative("round_to_format"))
_encode = _with_derivative(_codes, _no_derivative("encode"))
_cast = _with_derivative(_cast_codes, _cast_jvp)
