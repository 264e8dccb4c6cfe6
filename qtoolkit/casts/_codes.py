"""Casts from every dtype to the codes of every format, and from codes to values of every dtype."""

from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.casts._bits import (
    Exact,
    dtype_from_codes,
    exact_from_codes,
    exact_from_float64,
    exact_from_integer,
    exact_from_pattern,
    float_pattern,
    from_pattern,
    holds,
    pattern,
    to_float16,
)
from qtoolkit.casts._checks import x64_enabled
from qtoolkit.casts._elementwise import elementwise
from qtoolkit.casts._floats import (
    codes_of_exact,
    float_codes,
    float_values,
    is_upper_part,
    needs_64_bits,
    upper_part,
)
from qtoolkit.casts._integers import (
    addition_rounds_to,
    codes_of_integers,
    int_codes,
    integers_by_addition,
    low_bits,
)
from qtoolkit.casts._modes import Stochastic
from qtoolkit.casts._projection import NEAREST, UNCLAMPED, Projection
from qtoolkit.casts._tables import table_codes, table_values
from qtoolkit.formats import (
    FLOAT16,
    FLOAT32,
    FloatFormat,
    Format,
    IntFormat,
    TableFormat,
    format,
)
from qtoolkit.formats.internal import unsigned_dtype


@elementwise
def codes_of(x: jax.Array, fmt: Format, projection: Projection = NEAREST) -> jax.Array:
    """`x`, of any dtype of `SOURCES`, rounded once to the codes of `fmt`, as `fmt.code_dtype`."""
    is_integer = isinstance(format(x.dtype), IntFormat)
    if isinstance(fmt, IntFormat) and is_integer:
        return codes_of_integers(x, fmt, projection.saturation)
    if isinstance(fmt, TableFormat):
        return table_codes(_as_float(x), fmt, projection)
    by_pattern = holds(format(x.dtype), np.float32)
    if isinstance(fmt, IntFormat):
        if by_pattern and addition_rounds_to(fmt, projection):
            integers = integers_by_addition(pattern(x), fmt, projection)
            return low_bits(integers.astype(fmt.code_dtype), fmt)
        return int_codes(_exact(x, normalized=False), fmt, projection)
    if _is_upper_part_of_float16(fmt, x.dtype, projection):
        bits = lax.bitcast_convert_type(x, jnp.uint16)
        codes = upper_part(bits, fmt, FLOAT16, projection, to_codes=True)
    elif by_pattern and not needs_64_bits(fmt):
        codes = float_codes(pattern(x), fmt, projection)
    else:
        wide = needs_64_bits(fmt)
        spare = 0 if isinstance(projection.rounding, Stochastic) else 2
        codes = codes_of_exact(_exact(x, wide=wide, spare=spare), fmt, projection)
    return codes.astype(fmt.code_dtype)


@elementwise
def round_values(x: jax.Array, fmt: Format, projection: Projection = NEAREST) -> jax.Array:
    """`x` rounded once to the values of `fmt`, in its own dtype, which must hold them."""
    if _is_upper_part_of_float16(fmt, x.dtype, projection):
        bits = lax.bitcast_convert_type(x, jnp.uint16)
        bits = upper_part(bits, fmt, FLOAT16, projection, to_codes=False)
        return lax.bitcast_convert_type(bits, jnp.float16)
    by_pattern = x.dtype in (jnp.float32, jnp.float16, jnp.bfloat16)
    if by_pattern and isinstance(fmt, FloatFormat) and holds(fmt, np.float32):
        bits = float_values(pattern(x), fmt, projection)
        return from_pattern(bits, x.dtype)
    if by_pattern and isinstance(fmt, IntFormat) and addition_rounds_to(fmt, projection):
        return integers_by_addition(pattern(x), fmt, projection).astype(x.dtype)
    return values_of(codes_of(x, fmt, projection), fmt, x.dtype)


def _is_upper_part_of_float16(
    fmt: Format, dtype: DTypeLike, projection: Projection
) -> TypeGuard[FloatFormat]:
    """Whether `x` is float16 and `fmt` its upper part, such as E5M2, without random bits.

    Then 16-bit operations suffice, which are twice as fast as 32-bit ones.
    """
    # Stochastic rounding may take more random bits than 16.
    if dtype != jnp.float16 or isinstance(projection.rounding, Stochastic):
        return False
    return isinstance(fmt, FloatFormat) and is_upper_part(fmt, FLOAT16)


@elementwise
def values_of(codes: jax.Array, fmt: Format, dtype: DTypeLike) -> jax.Array:
    """The values of codes of `fmt` in a dtype that holds them."""
    target = format(dtype)
    if isinstance(fmt, IntFormat):
        if not fmt.signed:
            return _converted(codes, target)
        width = 64 if fmt.bits > 32 else 32
        unsigned, signed = unsigned_dtype(width), np.dtype(f"int{width}")
        above = width - fmt.bits  # bits above the code: shifted out, and back with its sign
        shifted = codes.astype(unsigned) << unsigned.type(above)
        integers = lax.bitcast_convert_type(shifted, signed) >> signed.type(above)
        return _converted(integers, target)
    if isinstance(fmt, TableFormat):
        # Not float32 for wider targets: widening it would make its subnormals 0.
        fits = holds(fmt, np.float32) and target.bits <= 32
        wide = np.dtype(np.float32 if fits else np.float64)
        return _converted(table_values(codes, fmt, wide), target)
    assert isinstance(target, FloatFormat)
    if holds(fmt, np.float32) and target.bits <= 32:
        bits = float_pattern(codes.astype(jnp.uint32), fmt)
        if target.bits >= 16:
            return from_pattern(bits, target.dtype)  # type: ignore[arg-type]
        narrow = float_codes(bits, target, UNCLAMPED)
        return dtype_from_codes(narrow, target)
    width = jnp.uint64 if max(fmt.bits, target.bits) > 32 else jnp.uint32
    exact = exact_from_codes(codes.astype(width), fmt)
    wide_codes = codes_of_exact(exact, target, UNCLAMPED)
    return dtype_from_codes(wide_codes, target)


def _converted(x: jax.Array, target: Format) -> jax.Array:
    """`x` in the dtype of `target`, which holds its values."""
    assert target.dtype is not None
    if x.dtype == jnp.float32 and target.dtype == jnp.float16:
        return to_float16(x)  # `astype` on GPUs makes every NaN the same one, 0x7FFF
    if isinstance(target, IntFormat) or target.bits >= 16:
        return x.astype(target.dtype)
    return dtype_from_codes(codes_of(x, target, UNCLAMPED), target)


def _exact(x: jax.Array, *, normalized: bool = True, wide: bool = False, spare: int = 2) -> Exact:
    fmt = format(x.dtype)
    if x.dtype == jnp.float64:
        return exact_from_float64(x)
    if isinstance(fmt, IntFormat) and not holds(fmt, np.float32):
        is_narrow = wide and x.dtype.itemsize < 8
        return exact_from_integer(x.astype(jnp.int64) if is_narrow else x, spare)
    return exact_from_pattern(pattern(x), normalized)


def _as_float(x: jax.Array) -> jax.Array:
    """`x` as float32 or float64, for tables. It lies between the same two values as `x`."""
    source = format(x.dtype)
    if x.dtype == jnp.float64:
        return x
    if holds(source, np.float32):
        return lax.bitcast_convert_type(pattern(x), jnp.float32)
    # Integers up to 2**24 (2**53) are exact floats. Larger ones may be clipped, because
    # `check_table` refuses tables that reach further.
    wide = jnp.float64 if x64_enabled() else jnp.float32
    limit = 2 ** (53 if wide == jnp.float64 else FLOAT32.mantissa_bits + 1)
    info = jnp.iinfo(x.dtype)
    return jnp.clip(x, max(info.min, -limit), min(info.max, limit)).astype(wide)
