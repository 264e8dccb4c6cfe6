"""Checks of arrays to be cast, and the casts from each dtype to codes and back to values."""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

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
    FORMATS,
    FloatFormat,
    Format,
    IntFormat,
    TableFormat,
    format,
)
from qtoolkit.formats.internal import unsigned_dtype

SOURCES = tuple(fmt.dtype for fmt in FORMATS if fmt.dtype is not None)
FLOATS = (np.dtype("float32"), np.dtype("float16"), np.dtype("bfloat16"))
_ENABLE_X64 = "jax.config.update('jax_enable_x64', True)"
# For NumPy dtypes that XLA does not have: a dtype that holds their values.
_WITHOUT_XLA = {
    np.dtype(ml_dtypes.float6_e2m3fn): np.float32,
    np.dtype(ml_dtypes.float6_e3m2fn): np.float32,
    np.dtype(ml_dtypes.int1): np.int8,
    np.dtype(ml_dtypes.uint1): np.uint8,
}


def x64_enabled() -> bool:
    return bool(jax.config.read("jax_enable_x64"))


def check_source(where: str, x: ArrayLike, name: str = "x") -> jax.Array | np.ndarray:
    """Check `x` and return it as an array of JAX.

    With JAX's 64-bit types off, 64-bit `x` stays an array of NumPy, because JAX would cut it to 32
    bits. Python's numbers count as 64-bit ones, as in NumPy.
    """
    dtype = getattr(x, "dtype", None)
    if isinstance(x, jax.Array) and dtype in SOURCES:
        return x
    if dtype is None and isinstance(x, bool | int | float):
        x = np.asarray(x)
        if x.dtype == object:
            raise TypeError(f"{where}: {name} is an integer of more than 64 bits, expected fewer")
        dtype = x.dtype
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"{where}: {name} is a masked array, expected one without a mask; fill it first: "
            f"{name}.filled(0)"
        )
    if isinstance(x, np.ndarray | np.generic) and not x.dtype.isnative:
        x = np.asarray(x).astype(x.dtype.newbyteorder("="))
        dtype = x.dtype
    if not is_array(x):  # such as jax.ShapeDtypeStruct
        dtype = None
    if dtype is not None and dtype in _WITHOUT_XLA:
        return jnp.asarray(np.asarray(x).astype(_WITHOUT_XLA[dtype]))
    if dtype is None or dtype not in SOURCES:  # numpy takes None for float64
        got = f"dtype {dtype}" if dtype is not None else f"type {type(x).__name__}"
        raise TypeError(
            f"{where}: {name} has {got}, expected an array of a float, integer or bool dtype; "
            f"convert it first, e.g. jnp.asarray({name}, jnp.float32)"
        )
    if dtype.itemsize == 8 and not x64_enabled() and not isinstance(x, jax.Array):
        # NumPy's longlong and int64 compare equal, but JAX accepts only scalars of int64.
        return np.asarray(x).view(SOURCES[SOURCES.index(dtype)])
    return jnp.asarray(x)


def is_array(x: Any) -> bool:
    """Whether `x` has elements: an array, or what NumPy or JAX makes one of."""
    if isinstance(x, type):  # NumPy's scalar types have all attributes of their scalars
        return False
    return hasattr(x, "dtype") and (hasattr(x, "__array__") or hasattr(x, "__jax_array__"))


def number_text(name: str, value: float) -> str:
    """`name=value` for messages; Python refuses to print very long integers."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"{name}, an integer of {value.bit_length()} bits,"
    return f"{name}={value}"


def check_value_source(where: str, x: ArrayLike, name: str = "x") -> jax.Array:
    """As `check_source`, for functions whose result has the dtype of `x`: 64-bit `x` needs x64."""
    source = check_source(where, x, name)
    if not isinstance(source, jax.Array):
        raise TypeError(
            f"{where}: {name} has dtype {source.dtype} (as Python's numbers have), and 64-bit "
            f"types are off in JAX; enable them with {_ENABLE_X64}, or convert {name} first, e.g. "
            f"np.asarray({name}, np.float32)"
        )
    return source


def check_differentiable(
    where: str, x: ArrayLike, name: str = "x", *, wide: bool = True
) -> jax.Array:
    """As `check_value_source`, for float32, float16, bfloat16 and, where `wide`, float64 only."""
    dtype = getattr(x, "dtype", None)
    known = (*FLOATS, np.dtype("float64")) if wide else FLOATS
    if not is_array(x):
        dtype = None
    if isinstance(dtype, np.dtype):
        dtype = dtype.newbyteorder("=")  # as in `check_source`: JAX has no arrays of the other
    if (dtype is None or dtype not in known) and not (wide and isinstance(x, float)):
        got = f"dtype {dtype}" if dtype is not None else f"type {type(x).__name__}"
        raise TypeError(
            f"{where}: {name} has {got}, expected {', '.join(map(str, known[:-1]))} or "
            f"{known[-1]}; convert it first, e.g. jnp.asarray({name}, jnp.float32)"
        )
    return check_value_source(where, x, name)


def check_unnarrowed(
    where: str, x: ArrayLike, name: str = "x", *, wide: bool = True
) -> jax.Array | np.ndarray:
    """As `check_differentiable`, but float64 of NumPy and Python stays float64, on the host.

    Where its 64-bit types are off, JAX would narrow such numbers before they are rounded.
    """
    on_host = isinstance(x, float | np.ndarray | np.generic) and not x64_enabled()
    if on_host and np.asarray(x).dtype.newbyteorder("=") == np.float64:
        return check_source(where, x, name)
    return check_differentiable(where, x, name, wide=wide)


def kept_dtype(x: jax.Array | np.ndarray) -> np.dtype:
    """The dtype of results that keep the dtype of `x`: 32 bits for 64-bit arrays of NumPy."""
    return x.dtype if isinstance(x, jax.Array) else np.dtype(x.dtype.name.replace("64", "32"))


def check_target(where: str, fmt: Format) -> None:
    """TypeError where JAX's 64-bit types are off and codes of `fmt` need them."""
    wide = fmt.bits > 32 or (isinstance(fmt, FloatFormat) and needs_64_bits(fmt))
    if wide and not x64_enabled():
        raise TypeError(
            f"{where}: format {fmt.name} needs 64-bit types, which are off in JAX; enable them "
            f"with {_ENABLE_X64}"
        )


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
        return _values_of_integers(codes, fmt, target)
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


def _values_of_integers(codes: jax.Array, fmt: IntFormat, target: Format) -> jax.Array:
    integers = codes
    if fmt.signed:
        width = 64 if fmt.bits > 32 else 32
        unsigned, signed = unsigned_dtype(width), np.dtype(f"int{width}")
        spare = width - fmt.bits
        shifted = codes.astype(unsigned) << unsigned.type(spare)
        integers = lax.bitcast_convert_type(shifted, signed) >> signed.type(spare)
    return _converted(integers, target)


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


def check_table(where: str, fmt: Format, dtype: Any) -> None:
    """TypeError if some integer of `dtype` in the range of a table is not an exact float."""
    if not isinstance(fmt, TableFormat) or not isinstance(format(dtype), IntFormat):
        return
    has_float64 = x64_enabled() or np.dtype(dtype).itemsize == 8
    if holds(format(dtype), np.float64 if has_float64 else np.float32):
        return
    ends = [abs(float(v)) for v in (fmt.max_finite, fmt.lowest, fmt.beyond or 0)]
    if max(ends) > 2 ** (53 if has_float64 else 24):
        hint = "" if has_float64 else f"enable 64-bit types with {_ENABLE_X64}, or "
        raise TypeError(
            f"{where}: x has dtype {np.dtype(dtype)} and {fmt.name} reaches to {max(ends)}, beyond "
            f"what is exact as a float{64 if has_float64 else 32}; {hint}convert x to a float dtype"
        )
