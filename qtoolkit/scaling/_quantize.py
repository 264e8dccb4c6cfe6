"""`quantize`: numbers to codes and the scales of their blocks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qtoolkit import formats
from qtoolkit.casts import Projection, Stochastic
from qtoolkit.casts.internal import (
    FLOATS,
    WIDTHS,
    Domain,
    check_arguments,
    check_domain,
    check_dtype,
    check_holds,
    check_unnarrowed,
    exact_float32,
    hinting,
    number,
    result_dtype,
    to_stored,
    types_of,
    without_derivative,
)
from qtoolkit.formats import FLOAT32, BlockFormat, FloatFormat, SpecLike
from qtoolkit.scaling._blocks import scale_shape
from qtoolkit.scaling._elements import Scales
from qtoolkit.scaling._engine import block_codes
from qtoolkit.scaling._find_scales import find_scales
from qtoolkit.scaling._qarray import QArray
from qtoolkit.scaling._scales import least_scale


@hinting
def quantize(
    x: ArrayLike,
    spec: SpecLike,
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
    """Quantize `x` block by block: codes q and a scale for each block, x ~ q * scale.

    The scale is rounded to its format first, and `x` is divided by the rounded one: codes are
    `encode(x / scale)` with IEEE's float32 division, exact where scales are powers of two by their
    format (E8M0). The bits are the same eager, under `jit`, in any fusion and on any mesh; float32
    subnormals are exact only with E8M0 scales.

    A block of zeros gives exact zeros if the element format has a zero, and no scale is ever
    infinite or zero. Infinities do not count for the scale and follow `saturation`. NaN stays its
    own element's; where elements have no NaN, it makes the scale of its block NaN.

    Args:
      x: float32, float16 or bfloat16, not empty. Where JAX has 64-bit types off, also float64 of
        NumPy and Python's floats: scales follow from their float32, and their exact values are
        divided by them, in float64. The result is float32.
      spec: A `BlockFormat`, the name of a published one, "mxfp4", or an element format, which
        stands for one scale for the tensor; see `qtoolkit.formats.spec`.
      scale: Scales to use instead of those that `x` gives, for instance calibrated ones: an array
        in the shape of the scales, `spec.scale_shape(x.shape)`, or a number where there is one
        scale. They are rounded to the scale format. Values are checked where they are known, that
        is not under `jit`: positive, and within what float32 can divide by. With such scales
        a NaN is what the cast to the element makes of it: 0 in integers.
      tensor_scale: A second scale to use, for formats that have one: shared by several tensors.
      zero_point: With `scale`, for formats with zero points: integers in its shape.
      packed: Whether codes of fewer than eight bits share bytes along the last axis, see `pack`.
      rounding, saturation, key, random_bits, index_offset: As in `encode`, for the elements.
        Integers with a zero point always clamp.

    Returns:
      A `QArray` of the shape and dtype of `x`: codes in `spec.element.code_dtype`, or packed into
      uint8; scales in the dtype of `spec.scale`, in the shape `spec.scale_shape(x.shape)`.

    Raises:
      TypeError: `x` has another dtype, or is differentiated: use `fake_quantize`.
      ValueError: Unknown `spec` or one that does not fit the shape of `x`; an empty `x`; scales or
        zero points of another shape or range.

    Source: OCP Microscaling Formats (MX) 1.0; arXiv:2509.25149 (NVFP4); arXiv:2412.19437 (tiles).

    Examples:
      >>> x = jnp.asarray([[0.3, -2.25, 63.5], [9.0, -120.0, 254.0]])
      >>> q = qt.quantize(x, qt.BlockFormat.token("int8"))  # a scale for each row
      >>> q.scale  # 63.5 / 127 and 254 / 127
      Array([[0.5],
             [2. ]], dtype=float32)
      >>> qt.decode(q.codes, "int8", jnp.int8)
      Array([[  1,  -4, 127],
             [  4, -60, 127]], dtype=int8)
      >>> q.dequantize()
      Array([[   0.5,   -2. ,   63.5],
             [   8. , -120. ,  254. ]], dtype=float32)
    """
    array, spec, fixed, projection = check_quantize(
        "quantize", x, spec, scale, tensor_scale, zero_point, rounding, saturation, key,
        random_bits, index_offset,
    )  # fmt: skip
    if packed and spec.element.bits not in WIDTHS:
        raise ValueError(
            f"quantize: packed=True for {spec.name}, whose elements have {spec.element.bits} bits; "
            f"expected {', '.join(map(str, WIDTHS))}"
        )
    if packed and array.ndim == 0:
        raise ValueError("quantize: packed=True for a scalar, expected at least one axis")
    array = without_derivative(array, _NO_DERIVATIVE)
    with types_of(array):
        codes, scales = _quantize(array, fixed, projection, spec, packed)
    return QArray(
        codes,
        scales.scale,
        spec,
        scales.tensor_scale,
        scales.zero_point,
        result_dtype(array),
        spec.block_lengths(array.shape),
        array.shape[-1] if packed else None,
    )


def check_quantize(
    where: str,
    x: ArrayLike,
    spec: SpecLike,
    scale: ArrayLike | None,
    tensor_scale: ArrayLike | None,
    zero_point: ArrayLike | None,
    rounding: Any,
    saturation: Any,
    key: Any,
    random_bits: ArrayLike | None,
    index_offset: Any,
) -> tuple[jax.Array | np.ndarray, BlockFormat, Scales, Projection]:
    """Check and resolve the arguments that `quantize`, `metrics` and `fake_quantize` share."""
    array = check_unnarrowed(where, x, wide=False)
    spec = formats.spec(spec)
    _, projection = check_arguments(
        where, array, spec.element, rounding, saturation, key, random_bits, index_offset
    )
    check_holds(where, spec.element, np.float32)
    shape = scale_shape(where, spec, array.shape)
    if spec.zero_point and saturation == "none":
        raise ValueError(
            f"{where}: saturation='none' with zero points, expected 'finite': they always clamp"
        )
    fixed = Scales(
        _check_scale(where, "scale", scale, spec, spec.scale, shape),
        _check_scale(where, "tensor_scale", tensor_scale, spec, spec.tensor_scale, ()),
        _check_zero_point(where, zero_point, scale, spec, shape),
    )
    if fixed.scale is not None and spec.tensor_scale is not None and fixed.tensor_scale is None:
        raise ValueError(f"{where}: scale without tensor_scale for {spec.name}, expected both")
    return array, spec, fixed, projection


def _check_scale(
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
        raise ValueError(f"{where}: {name} is given, and {spec.name} has none; remove it")
    domain = _domain(name, fmt, spec)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = number(where, name, value, np.float32, domain)
    own = fmt.dtype or fmt.code_dtype
    check_dtype(where, name, value, (*FLOATS, own))
    array = _in_shape(where, name, jnp.asarray(value), shape, spec)
    if not isinstance(array, jax.core.Tracer):
        is_code = fmt.dtype is None and array.dtype == own
        check_domain(where, name, fmt.values()[np.asarray(array)] if is_code else array, domain)
    if array.dtype == own:
        return array
    numbers = array.astype(jnp.float32) if array.dtype not in FLOATS else exact_float32(array)
    return to_stored(jnp.maximum(numbers, np.float32(float(least_scale(fmt)))), fmt)


def _domain(name: str, fmt: FloatFormat, spec: BlockFormat) -> Domain:
    """Scales that may divide: with their second scale, normal numbers of float32."""
    assert spec.scale is not None
    lowest, largest = least_scale(fmt), fmt.max_finite
    if name == "tensor_scale" and spec.tensor_scale_divides:
        lowest = max(lowest, spec.scale.max_finite / FLOAT32.max_finite)
        largest = min(largest, least_scale(spec.scale) / FLOAT32.min_normal)
    elif name == "tensor_scale":
        lowest = max(lowest, FLOAT32.min_normal / least_scale(spec.scale))
        largest = min(largest, FLOAT32.max_finite / spec.scale.max_finite)
    first, last = float(lowest), float(largest)
    text = f"a positive number from {first:.3g} to {last:.3g}"
    return Domain(text, lambda values: (values >= first) & (values <= last))


def _check_zero_point(
    where: str,
    value: ArrayLike | None,
    scale: ArrayLike | None,
    spec: BlockFormat,
    shape: tuple[int, ...],
) -> jax.Array | None:
    if (value is not None) and not spec.zero_point:
        raise ValueError(f"{where}: zero_point is given, and {spec.name} has none; remove it")
    if (value is None) != (scale is None) and spec.zero_point:
        name = "scale" if value is None else "zero_point"
        raise ValueError(
            f"{where}: {name} alone is given for {spec.name}, expected scale and zero_point, or "
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
    if array.ndim == 0 and all(n == 1 for n in shape):
        return array.reshape(shape)
    of = "the tensor" if name == "tensor_scale" else "each block"
    raise ValueError(
        f"{where}: {name} has shape {array.shape}, expected {shape}, one for {of} of {spec.name}"
    )


@functools.partial(jax.jit, static_argnames=("spec", "packed"))
def _quantize(
    x: jax.Array | np.ndarray,
    fixed: Scales,
    projection: Projection,
    spec: BlockFormat,
    packed: bool,
) -> tuple[jax.Array, Scales]:
    x = jnp.asarray(x)
    scales, nonzero = find_scales(x, spec, fixed)
    return block_codes(x, spec, projection, scales, nonzero, packed=packed), scales


_NO_DERIVATIVE = (
    "quantize: has no derivative; differentiate fake_quantize, which returns the same numbers, or "
    "pass jax.lax.stop_gradient(x) to quantize"
)
