"""Checks of parameters of casts: scales, shifts, offsets, bounds."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from qtoolkit.casts._sources import number_text

Parameter = TypeVar("Parameter", jax.Array, jax.Array | None)
_LEAST = 2.0**-126  # XLA reads smaller float32 numbers as zero
_LEAST_FLOAT64 = 2.0**-1022  # and smaller float64 numbers


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


def ranked(parameter: Parameter, ndim: int) -> Parameter:
    """Add leading axes up to `ndim`, for `jax_numpy_rank_promotion="raise"`."""
    if parameter is None or parameter.ndim == ndim:
        return parameter
    return lax.expand_dims(parameter, range(ndim - parameter.ndim))


def spread(x: jax.Array, like: jax.Array) -> jax.Array:
    """`broadcast_to(x, like.shape)`, on an Explicit mesh with the sharding of `like`."""
    # JAX selects only between the elements of arrays that have the same sharding.
    sharding = jax.typeof(like).sharding
    return jnp.broadcast_to(
        x, like.shape, out_sharding=sharding if sharding.mesh.explicit_axes else None
    )


def number(where: str, name: str, value: float, dtype: DTypeLike, domain: Domain) -> np.ndarray:
    """A Python number in `dtype`; ValueError if the result is outside of the domain."""
    sign = math.copysign(1, value) if value == 0 else 0  # 0.0 and -0.0 are one key otherwise
    array, is_inside = _converted(value, sign, np.dtype(dtype), domain)
    if not is_inside:
        raise ValueError(
            f"{where}: {number_text(name, value)} is {array} in {array.dtype}, expected "
            f"{domain.wanted}"
        )
    return array


@functools.lru_cache(maxsize=256)
def _converted(
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
    known = tuple(dict.fromkeys(np.dtype(d) for d in dtypes))
    is_traced_number = dtype == np.float64 and getattr(value, "weak_type", False)
    if (dtype in known and dtype is not None) or is_traced_number:
        return
    got = f"dtype {dtype}" if dtype is not None else f"type {type(value).__name__}"
    raise TypeError(
        f"{where}: {name} has {got}, expected {' or '.join(map(str, known))}; convert it first, "
        f"e.g. jnp.asarray({name}, jnp.{known[0]})"
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
