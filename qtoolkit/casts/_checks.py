"""Checks of the arguments of casts: arrays, formats, and parameters such as scales and shifts."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts._bits import holds
from qtoolkit.casts._floats import needs_64_bits
from qtoolkit.formats import FORMATS, FloatFormat, Format, IntFormat, TableFormat, format

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
Parameter = TypeVar("Parameter", jax.Array, jax.Array | None)
_LEAST = 2.0**-126  # XLA reads smaller float32 numbers as zero
_LEAST_FLOAT64 = 2.0**-1022  # and smaller float64 numbers


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
            f"convert it first, e.g. {conversion_line(name, x)}"
        )
    if dtype.itemsize == 8 and not x64_enabled() and not isinstance(x, jax.Array):
        # NumPy's longlong and int64 compare equal, but JAX accepts only scalars of int64.
        return np.asarray(x).view(SOURCES[SOURCES.index(dtype)])
    return jnp.asarray(x)


def conversion_line(name: str, x: Any, dtype: Any = "float32") -> str:
    """What makes an array of JAX of the argument `name`, as a message says it."""
    if not is_of_others(x):
        return f"jnp.asarray({name}, jnp.{dtype})"
    # PyTorch's: NumPy has no bfloat16 and takes none that require gradients; JAX takes no strides.
    tensor = f"{name}.detach().contiguous()" if hasattr(x, "detach") else name
    return f"jax.dlpack.from_dlpack({tensor})"


def is_of_others(x: Any) -> bool:
    """Whether `x` is an array of another library, PyTorch's say."""
    return hasattr(x, "__dlpack__") and not isinstance(x, jax.Array | np.ndarray | np.generic)


def hint_for_others(name: str, x: Any) -> str:
    """What a message about a type says of an array of another library; "" for one of ours."""
    return f"; convert it first, e.g. {conversion_line(name, x)}" if is_of_others(x) else ""


def is_array(x: Any) -> bool:
    """Whether `x` has elements: an array, or what NumPy or JAX makes one of."""
    if isinstance(x, type):  # NumPy's scalar types have all attributes of their scalars
        return False
    return hasattr(x, "dtype") and (hasattr(x, "__array__") or hasattr(x, "__jax_array__"))


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
    dtypes = (*FLOATS, np.dtype("float64")) if wide else FLOATS
    if not is_array(x):
        dtype = None
    if isinstance(dtype, np.dtype):
        dtype = dtype.newbyteorder("=")  # as in `check_source`: JAX has no arrays of the other
    if (dtype is None or dtype not in dtypes) and not (wide and isinstance(x, float)):
        got = f"dtype {dtype}" if dtype is not None else f"type {type(x).__name__}"
        raise TypeError(
            f"{where}: {name} has {got}, expected {', '.join(map(str, dtypes[:-1]))} or "
            f"{dtypes[-1]}; convert it first, e.g. {conversion_line(name, x)}"
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


def result_dtype(x: jax.Array | np.ndarray) -> np.dtype:
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


@dataclasses.dataclass(frozen=True)
class Domain:
    """The numbers that a parameter may be.

    Attributes:
      wanted: What they are called in messages.
      contains: Which elements of an array are among them.
    """

    wanted: str
    contains: Callable[[np.ndarray], np.ndarray]


FINITE = Domain("a finite number", np.isfinite)
NONZERO = Domain(
    "a finite number other than zero, 2**-126 or more in magnitude",
    lambda v: np.isfinite(v) & (np.abs(v) >= _LEAST),
)
POSITIVE = Domain(
    "a positive finite number, 2**-126 or more", lambda v: (v >= _LEAST) & (v < np.inf)
)


def parameter(
    where: str,
    name: str,
    value: ArrayLike,
    x: jax.Array,
    domain: Domain,
    *,
    dtypes: Sequence[DTypeLike],
    checks_arrays: bool = True,
) -> jax.Array | np.ndarray:
    """Check a parameter. Numbers become arrays of the first of `dtypes`, arrays stay unchanged.

    Args:
      x: The array to whose shape it must broadcast.
      checks_arrays: Whether arrays that are known here, not traced ones, are checked against
        `domain`. Numbers are.

    Raises:
      TypeError: Another dtype.
      ValueError: The shape does not broadcast, or a value lies outside the domain.
    """
    if isinstance(value, int | float):
        return number(where, name, value, dtypes[0], domain)
    check_dtype(where, name, value, dtypes)
    shape = np.shape(value)
    if not broadcasts_to(shape, x.shape):
        raise ValueError(
            f"{where}: {name} has shape {shape}, expected one that broadcasts to that of x, "
            f"{x.shape}"
        )
    if checks_arrays:
        check_domain(where, name, value, domain)
    return value if isinstance(value, jax.Array | np.ndarray) else jnp.asarray(value)


def broadcasts_to(shape: tuple[int, ...], wide: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to the shape `wide`; sizes may be symbolic."""
    sizes = zip(shape[::-1], wide[::-1], strict=False)
    return len(shape) <= len(wide) and all(size in (1, wide_size) for size, wide_size in sizes)


def with_rank(parameter: Parameter, ndim: int) -> Parameter:
    """Add leading axes up to `ndim`, for `jax_numpy_rank_promotion="raise"`."""
    if parameter is None or parameter.ndim == ndim:
        return parameter
    return lax.expand_dims(parameter, range(ndim - parameter.ndim))


def broadcast_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """`broadcast_to(x, like.shape)`, on an Explicit mesh with the sharding of `like`."""
    # JAX selects only between the elements of arrays that have the same sharding.
    sharding = jax.typeof(like).sharding
    return jnp.broadcast_to(
        x, like.shape, out_sharding=sharding if sharding.mesh.explicit_axes else None
    )


def number(where: str, name: str, value: float, dtype: DTypeLike, domain: Domain) -> np.ndarray:
    """A Python number in `dtype`; ValueError if the result is outside of the domain."""
    sign = math.copysign(1, value) if value == 0 else 0  # 0.0 and -0.0 are one key otherwise
    array, is_inside = _in_dtype(value, sign, np.dtype(dtype), domain)
    if not is_inside:
        if isinstance(value, int) and value.bit_length() > 64:  # Python may refuse to print it
            text = f"{name}, an integer of {value.bit_length()} bits,"
        else:
            text = f"{name}={value}"
        raise ValueError(f"{where}: {text} is {array} in {array.dtype}, expected {domain.wanted}")
    return array


@functools.lru_cache(maxsize=256)
def _in_dtype(
    value: float, sign: float, dtype: np.dtype, domain: Domain
) -> tuple[np.ndarray, bool]:
    try:
        with np.errstate(over="ignore", under="ignore"):
            array = np.asarray(float(value), dtype)
    except OverflowError:  # integers beyond float64
        array = np.asarray(math.inf if value > 0 else -math.inf, dtype)
    if abs(array) < (_LEAST_FLOAT64 if dtype == np.float64 else _LEAST):
        array = np.asarray(math.copysign(0.0, value), dtype)
    return array, bool(domain.contains(array.astype(np.float64)))


def check_dtype(where: str, name: str, value: Any, dtypes: Sequence[DTypeLike]) -> None:
    """TypeError if `value` has none of the dtypes; traced Python numbers pass."""
    dtype = getattr(value, "dtype", None)
    expected = tuple(dict.fromkeys(np.dtype(d) for d in dtypes))
    is_traced_number = dtype == np.float64 and getattr(value, "weak_type", False)
    if (dtype in expected and dtype is not None) or is_traced_number:
        return
    got = f"dtype {dtype}" if dtype is not None else f"type {type(value).__name__}"
    raise TypeError(
        f"{where}: {name} has {got}, expected {' or '.join(map(str, expected))}; convert it first, "
        f"e.g. {conversion_line(name, value, expected[0])}"
    )


def check_domain(where: str, name: str, value: Any, domain: Domain) -> None:
    """ValueError that names the first element outside of the domain, unless `value` is traced."""
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        return
    values = np.asarray(value).astype(np.float64)
    bad = ~domain.contains(values)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        place = f" at {at}" if at else ""
        raise ValueError(
            f"{where}: {name} is {values[at]:.9g}{place}, expected {domain.wanted}; {bad.sum()} of "
            f"{values.size} are not"
        )
