"""`quantize`: numbers to codes and the scales of their blocks."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qtoolkit.casts import (
    FLOATS,
    WIDTHS,
    Draw,
    Stochastic,
    check_arguments,
    check_differentiable,
    check_holds,
    stored,
)
from qtoolkit.formats import BlockFormat, FloatFormat
from qtoolkit.formats import spec as resolve
from qtoolkit.scaling._qarray import QArray
from qtoolkit.scaling._rounding import Rounder, Scales, block_codes, find_scales
from qtoolkit.scaling._scales import least_scale


def quantize(
    x: ArrayLike,
    spec: Any,
    *,
    scale: ArrayLike | None = None,
    tensor_scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    packed: bool = False,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> QArray:
    """Rounds `x` to codes and a scale for each block: x ~ q * scale.

    The scale is rounded first, and it is the rounded one that divides: by one reciprocal and a
    multiplication in float32, and exactly where scales are powers of two by their format (E8M0).
    Then each element is rounded once, as `encode` does. The same bits eager, under `jit`, in any
    fusion and on any mesh; float32 subnormals are exact beside E8M0 scales only.

    A block of zeros gives exact zeros, and no scale is ever infinite or zero. Infinities do not
    count for the scale and follow `saturation`. NaN stays its own element's; where elements have no
    NaN, it makes the scale of its block NaN.

    Args:
      x: float32, float16 or bfloat16, not empty.
      spec: A `BlockFormat`, the name of a published one, "mxfp4", or an element format, which
        stands for one scale for the tensor; see `qtoolkit.formats.spec`.
      scale: Scales to use instead of those that `x` gives, for instance calibrated ones: an array
        in the shape of the scales, `spec.scale_shape(x.shape)`, or a number where there is one
        scale. They are rounded to the scale format. Values are checked where they are known, that
        is not under `jit`: positive, and within what float32 can divide by. Beside given scales a
        NaN is what the cast to the element makes of it: 0 in integers.
      tensor_scale: A second scale to use, for formats that have one: shared by several tensors.
      zero_point: With `scale`, for formats with zero points: integers in its shape.
      packed: Whether codes of fewer than eight bits share bytes along the last axis, see `pack`.
      rounding, saturation, key, random_bits, index_offset: As in `encode`, for the elements.
        Integers with a zero point always clamp.

    Raises:
      TypeError: `x` has another dtype, or is differentiated: use `fake_quantize`.
      ValueError: Unknown `spec` or one that does not fit the shape of `x`; an empty `x`; scales or
        zero points of another shape or range.

    Source: OCP Microscaling Formats (MX) 1.0; arXiv:2509.25149 (NVFP4); arXiv:2412.19437 (tiles).
    """
    x, given, draw, how = check_quantize(
        "quantize", x, spec, scale, tensor_scale, zero_point, rounding, saturation, key,
        random_bits, index_offset,
    )  # fmt: skip
    if packed and how.spec.element.bits not in WIDTHS:
        raise ValueError(
            f"quantize: packed=True for {how.spec.name}, whose elements have "
            f"{how.spec.element.bits} bits; expected {', '.join(map(str, WIDTHS))}"
        )
    if packed and x.ndim == 0:
        raise ValueError("quantize: packed=True for a scalar, expected at least one axis")
    codes, scales = _quantize_jitted(x, given, draw, how, packed)
    return QArray(
        codes,
        scales.scale,
        how.spec,
        scales.tensor_scale,
        scales.zero_point,
        x.dtype,
        how.spec.block_lengths(x.shape),
        x.shape[-1] if packed else None,
    )


def check_quantize(
    where: str,
    x: ArrayLike,
    spec: Any,
    scale: ArrayLike | None,
    tensor_scale: ArrayLike | None,
    zero_point: ArrayLike | None,
    rounding: Any,
    saturation: Any,
    key: Any,
    random_bits: ArrayLike | None,
    index_offset: Any,
) -> tuple[jax.Array, Scales, Draw | None, Rounder]:
    """The arguments that `quantize` and its kin share, checked and resolved."""
    x = check_differentiable(where, x, wide=False)
    spec = resolve(spec)
    _, rounding, draw = check_arguments(
        where, x, spec.element, rounding, saturation, key, random_bits, index_offset
    )
    check_holds(where, spec.element, np.float32)
    try:
        shape = spec.scale_shape(x.shape)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if spec.zero_point and saturation == "none":
        raise ValueError(
            f"{where}: saturation='none' with zero points, expected 'finite': they always clamp"
        )
    given = Scales(
        _given_scale(where, "scale", scale, spec, spec.scale, shape),
        _given_scale(where, "tensor_scale", tensor_scale, spec, spec.tensor_scale, ()),
        _given_zero_point(where, zero_point, scale, spec, shape),
    )
    if given.scale is not None and spec.tensor_scale is not None and given.tensor_scale is None:
        raise ValueError(f"{where}: scale without tensor_scale for {spec.name}, expected both")
    return x, given, draw, Rounder(spec, rounding, saturation)


def _given_scale(
    where: str,
    name: str,
    value: ArrayLike | None,
    spec: BlockFormat,
    fmt: FloatFormat | None,
    shape: tuple[int, ...],
) -> jax.Array | None:
    if value is None:
        return None
    if fmt is None:
        raise ValueError(f"{where}: {name} is given, and {spec.name} has none; leave it out")
    array: Any = value
    if isinstance(value, int | float) and not isinstance(value, bool):
        with np.errstate(over="ignore", under="ignore"):
            array = np.float32(min(max(value, -1e300), 1e300))
    dtype = getattr(array, "dtype", None)
    own = dtype is not None and dtype == (fmt.dtype or fmt.code_dtype)
    is_weak = dtype == np.float64 and getattr(value, "weak_type", False)  # a traced number
    if not own and not is_weak and dtype not in FLOATS:
        known = dict.fromkeys(map(str, (*FLOATS, fmt.dtype or fmt.code_dtype)))
        raise TypeError(
            f"{where}: {name} has {dtype or type(value).__name__}, expected one of "
            f"{', '.join(known)}; convert it first, e.g. jnp.asarray({name}, jnp.float32)"
        )
    array = _in_shape(where, name, jnp.asarray(array), shape, spec)
    if not isinstance(array, jax.core.Tracer):
        _check_values(where, name, np.asarray(array), fmt, spec, is_code=own and fmt.dtype is None)
    if own:
        return array
    numbers = jnp.maximum(array.astype(jnp.float32), np.float32(float(least_scale(fmt))))
    return stored(numbers, fmt)


def _check_values(
    where: str, name: str, array: np.ndarray, fmt: FloatFormat, spec: BlockFormat, *, is_code: bool
) -> None:
    """Scales that may divide: with their second scale, normal numbers with normal reciprocals."""
    assert spec.scale is not None
    values = fmt.values()[array] if is_code else array.astype(np.float32)
    lowest, largest = least_scale(fmt), fmt.max_finite
    if name == "tensor_scale":
        lowest = max(lowest, Fraction(1, 2**126) / least_scale(spec.scale))
        largest = min(largest, 2**126 / spec.scale.max_finite)
    elif spec.largest >= 4 and not spec.has_powers:
        largest = min(largest, Fraction(2**126))
    bad = ~((values >= float(lowest)) & (values <= float(largest)))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{where}: {name} is {values[at]} at {at}, expected positive numbers from "
            f"{float(lowest):.3g} to {float(largest):.3g}; {bad.sum()} of {values.size} are not"
        )


def _given_zero_point(
    where: str,
    value: ArrayLike | None,
    scale: ArrayLike | None,
    spec: BlockFormat,
    shape: tuple[int, ...],
) -> jax.Array | None:
    if (value is not None) and not spec.zero_point:
        raise ValueError(f"{where}: zero_point is given, and {spec.name} has none; leave it out")
    if (value is None) != (scale is None) and spec.zero_point:
        given = "scale" if value is None else "zero_point"
        raise ValueError(
            f"{where}: {given} alone is given for {spec.name}, expected scale and zero_point, or "
            "neither"
        )
    if value is None:
        return None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    dtype = np.dtype("int32") if is_number else getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{where}: zero_point has {dtype or type(value).__name__}, expected an integer dtype"
        )
    first, last = int(spec.element.lowest), int(spec.element.max_finite)
    if not isinstance(value, jax.core.Tracer):
        values = np.asarray(value)
        if values.size and (values.min() < first or values.max() > last):
            raise ValueError(
                f"{where}: zero_point reaches from {values.min()} to {values.max()}, expected "
                f"{first} to {last}, the range of {spec.element.name}"
            )
    return _in_shape(where, "zero_point", jnp.asarray(value, jnp.int32), shape, spec)


def _in_shape(
    where: str, name: str, array: jax.Array, shape: tuple[int, ...], spec: BlockFormat
) -> jax.Array:
    if array.shape == shape:
        return array
    if array.ndim == 0 and np.prod(shape, dtype=int) == 1:
        return array.reshape(shape)
    of = "the tensor" if name == "tensor_scale" else "each block"
    raise ValueError(
        f"{where}: {name} has shape {array.shape}, expected {shape}, one for {of} of {spec.name}"
    )


def _quantize(
    x: jax.Array, given: Scales, draw: Draw | None, how: Rounder, packed: bool
) -> tuple[jax.Array, Scales]:
    scales, busy = find_scales(x, how.spec, given)
    return block_codes(x, scales, busy, draw, how, packed), scales


def _no_derivative(*_: Any) -> Any:
    raise TypeError(
        "quantize: has no derivative; differentiate fake_quantize, which returns the same numbers, "
        "or pass jax.lax.stop_gradient(x) to quantize"
    )


_without_derivative = jax.custom_jvp(_quantize, nondiff_argnums=(3, 4))
_without_derivative.defjvp(_no_derivative)
_quantize_jitted = jax.jit(_without_derivative, static_argnums=(3, 4))
