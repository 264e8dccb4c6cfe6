"""Operands as arrays of 8-bit floats and scales, for hardware that multiplies these."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    dtype_from_codes,
    elementwise,
    from_stored,
    holds,
    power_from_stored,
    power_to_stored,
)
from qtoolkit.formats import E4M3FN, E8M0FNU, FLOAT32, BlockFormat, FloatFormat, Format
from qtoolkit.products._residuals import code_values, in_place, poisoned
from qtoolkit.products._rounded import LARGEST, Rounded
from qtoolkit.products._scaled import Blocked, Scaled
from qtoolkit.scaling.internal import Blocks, blocks_of, explicit_spec, single_scale

Array = jax.Array
_DIGITS = 8  # significant bits of a bfloat16
_SHORT = 32  # the block length of MX
_LEAST = -126  # the exponent of bfloat16's least normal number; XLA for CPUs reads less as zero


class Native(NamedTuple):
    """Two operands as XLA is given them.

    Attributes:
      first, second: Arrays of 8-bit floats, or both of them `Blocked`, or both `Scaled`.
      scale: A float32 scalar that multiplies the result, or None.
    """

    first: Array | Blocked | Scaled
    second: Array | Blocked | Scaled
    scale: Array | None = None


def native_operands(
    first: Rounded,
    second: Rounded,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    is_plain: bool,
) -> Native | None:
    """The arrays that XLA multiplies natively; None if the product has to be emulated.

    Args:
      contracted: The axes of both operands that are summed.
      is_plain: Whether the function takes `Blocked` and `Scaled` operands.
    """
    one, other = _one_scale(first), _one_scale(second)
    have_8_bits = _has_8_bits(first) and _has_8_bits(second)
    if one is not None and other is not None:
        if not have_8_bits:
            return None
        first_elements = _own_elements(first, contracted[0])
        return Native(first_elements, _own_elements(second, contracted[1]), one * other)
    if not is_plain:
        return None
    if have_8_bits and _has_fixed(first, contracted[0]) and _has_fixed(second, contracted[1]):
        return Native(_scaled(first, contracted[0]), _scaled(second, contracted[1]))
    lengths = _block_length(first, contracted[0]), _block_length(second, contracted[1])
    # E8M0 and other scales are not mixed. E8M0 reaches the ends of float32, so a result might
    # overflow before the other operand's second scale could bring it back.
    if 1 in lengths or _spec(first).has_powers != _spec(second).has_powers:
        return None
    n, whole = first.q.shape[contracted[0][-1]], math.lcm(*lengths)
    size = -(-n // whole) * whole
    # XLA cannot compile an axis of a single block for a GPU (jaxlib 0.10.2): pad it to two.
    if size == max(lengths):
        size *= 2
    has_powers = _spec(first).has_powers
    return Native(
        _blocked(first, contracted[0][-1], lengths[0], size),
        _blocked(second, contracted[1][-1], lengths[1], size),
        None if has_powers else _tensor_scale(first) * _tensor_scale(second),
    )


def _one_scale(operand: Rounded) -> Array | None:
    """The one scale of the operand, a float32 scalar, also where it is stored as a power of two.

    Such a scale must not become many for `lax.scaled_dot`, which is slower than bfloat16 on GPUs
    whose hardware takes no blocks, and which XLA does not compile for them without Triton.
    """
    spec = operand.spec
    if spec is None or spec.block or spec.other_axes is not None or spec.scale != E8M0FNU:
        return operand.scale
    # 2**-127, the scale of zeros alone, is no normal number.
    return jnp.maximum(single_scale(operand.scales, spec), np.float32(2.0**_LEAST))


def _spec(operand: Rounded) -> BlockFormat:
    assert operand.spec is not None
    return operand.spec


def _has_8_bits(operand: Rounded) -> bool:
    """Whether the elements are floats of 8 bits for which JAX has a dtype."""
    if operand.spec is None:
        return False
    element = operand.spec.element
    return isinstance(element, FloatFormat) and element.bits == 8 and element.dtype is not None


def _own_elements(operand: Rounded, contracted: tuple[int, ...]) -> Array:
    codes, order = operand.codes_for(contracted)
    elements = _elements(operand.q, codes, _spec(operand).element)
    return in_place(elements, order)


def _has_fixed(operand: Rounded, contracted: tuple[int, ...]) -> bool:
    """Whether the operand has float32 scales that do not change along the axes that are summed."""
    spec, scale = _spec(operand), operand.scales.scale
    if spec.scale != FLOAT32 or scale is None or spec.tensor_scale or spec.element_exponent:
        return False
    return spec.element.max_finite <= LARGEST and all(scale.shape[axis] == 1 for axis in contracted)


def _scaled(operand: Rounded, contracted: tuple[int, ...]) -> Scaled:
    """The operand with one scale for each place; blocks along axes that are kept are spread."""
    assert operand.scales.scale is not None
    blocks = blocks_of(operand.q, _spec(operand))
    scale = operand.scales.scale
    for axis, (n, length) in enumerate(zip(operand.q.shape, blocks.lengths, strict=True)):
        if axis not in contracted and length not in (1, n):
            scale = lax.slice_in_dim(jnp.repeat(scale, length, axis), 0, n, axis=axis)
    return Scaled(_own_elements(operand, contracted), scale)


def _elements(q: Array, codes: Array | None, fmt: Format) -> Array:
    """`q` as an array of a format; `codes` are its codes where they are known."""
    assert isinstance(fmt, FloatFormat)
    return dtype_from_codes(code_values(q, fmt) if codes is None else codes, fmt)


def _blocked_format(spec: BlockFormat) -> FloatFormat | None:
    """The format in which elements are passed to `lax.scaled_dot`; None if none is possible.

    Usually that is the operand's own. FP4 and FP6 with powers of two as scales are passed as
    E4M3FN, which has all of their values: JAX has no dtype for FP6, and XLA fails to compile FP4
    with E8M0 scales for GPUs (jaxlib 0.10.2, compiled for H100 and B200 by their description:
    "Failed to lower from shared dialect to Triton").
    """
    element = spec.element
    if not isinstance(element, FloatFormat):
        return None
    if spec.has_powers and element.bits < 8 and holds(element, np.dtype(E4M3FN.dtype)):
        return E4M3FN
    return element if element.bits in (4, 8) and element.dtype is not None else None


def _block_length(operand: Rounded, contracted: tuple[int, ...]) -> int:
    """The length of a block along the last contracted axis; 1 if the product must be emulated.

    `lax.scaled_dot` takes blocks of two elements or more and multiplies elements by scales in
    bfloat16, unless hardware does it. It is exact if both together have at most 8 significant bits.
    If the whole axis is one block, it is cut into blocks of 32, which hardware supports.
    """
    spec = operand.spec
    if spec is None or spec.scale is None or spec.element_exponent or not contracted:
        return 1
    if spec.tensor_scale_divides:
        return 1
    element, scale = _blocked_format(spec), spec.scale
    if element is None or scale.dtype is None or scale.bits != 8:
        return 1
    is_marked = element.has_nan or scale.has_nan
    digits = element.mantissa_bits + 1 + scale.mantissa_bits + 1
    # Jax 0.10 cannot lower `scaled_dot` with symbolic sizes.
    is_known = all(isinstance(n, int) for n in operand.q.shape)
    fits = element.has_zero and is_marked and is_known and digits <= _DIGITS
    if not fits or (spec.has_powers and scale != E8M0FNU) or any(explicit_spec(operand.q)):
        return 1
    n, length = (x[contracted[-1]] for x in (operand.q.shape, blocks_of(operand.q, spec).lengths))
    return _SHORT if length == n > 1 else length


def _tensor_scale(operand: Rounded) -> Array:
    second, fmt = operand.scales.tensor_scale, _spec(operand).tensor_scale
    if second is None:
        return jnp.ones((), jnp.float32)
    assert fmt is not None
    return from_stored(second, fmt)


def _blocked(operand: Rounded, axis: int, length: int, size: int) -> Blocked:
    """Elements, and one scale for each `length` elements along `axis`.

    The scale of a larger block is repeated: a block of 16 x 16 gives 16 blocks of 1 x 16. If the
    element format has no NaN, a block with an infinite or NaN q gets NaN as its scale. That makes
    the same elements of the result non-finite as q would.

    Args:
      size: The length to which the axis is padded with zeros.
    """
    spec, q, scale = _spec(operand), operand.q, operand.scales.scale
    assert spec.scale is not None
    assert scale is not None
    fmt = _blocked_format(spec)
    assert fmt is not None
    for other, held in enumerate(blocks_of(q, spec).lengths):
        if other != axis and held > 1:
            spread = jnp.repeat(scale, held, axis=other)
            scale = lax.slice_in_dim(spread, 0, q.shape[other], axis=other)
        elif other == axis and held != length:
            scale = jnp.repeat(scale, -(-held // length), axis=axis)
    missing = size - q.shape[axis]
    q = _padded(q, axis, missing, 0)
    scale = _padded(scale, axis, size // length - scale.shape[axis], 1)
    rows = Blocks(q.shape, tuple(length if i == axis else 1 for i in range(q.ndim)))
    codes = None if operand.codes is None else _padded(operand.codes, axis, missing, 0)
    if spec.has_powers:
        exponent, is_nan = power_from_stored(scale, spec.scale)
        view = rows.split(q)
        q = rows.join(_raised(view, jnp.broadcast_to(rows.spread(exponent), view.shape)))
        codes = None
        scale = power_to_stored(jnp.maximum(exponent, _LEAST), is_nan, spec.scale)
    if codes is None and not fmt.has_nan:
        scale = poisoned(scale, q, rows, spec.scale)
    return Blocked(_elements(q, codes, fmt), scale)


def _padded(x: Array, axis: int, missing: int, value: int) -> Array:
    if not missing:
        return x
    widths = [(0, missing if i == axis else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, np.asarray(value, x.dtype), widths)


@elementwise
def _raised(q: Array, exponent: Array) -> Array:
    """`q`, halved where the scale is 2**-127, which the caller then raises to 2**-126.

    XLA for CPUs would read 2**-127, a subnormal bfloat16, as zero. q * scale does not change where
    it is a normal number.
    """
    return jnp.where(exponent < _LEAST, q * q.dtype.type(0.5), q)
