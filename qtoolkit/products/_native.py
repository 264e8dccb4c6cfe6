"""Operands as arrays of their own formats, and scales beside them, for hardware that has those."""

import dataclasses
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
    power_from_stored,
    power_to_stored,
)
from qtoolkit.formats import E8M0FNU, FloatFormat
from qtoolkit.products._bilinear import Blocked
from qtoolkit.products._operand import Rounded, code_values
from qtoolkit.scaling.internal import Blocks, blocks_of, explicit_spec

Array = jax.Array
_DIGITS = 8  # significant bits of a bfloat16
_SHORT = 32  # the block of MX
_LEAST = -126  # the exponent of its lowest normal number; XLA's CPU reads less as zero


class Native(NamedTuple):
    """Two operands as XLA is given them.

    Attributes:
      first, second: Arrays of 8-bit floats, or both of them `Blocked`.
      scales: Two float32 scalars that multiply the result, or none.
    """

    first: Array | Blocked
    second: Array | Blocked
    scales: tuple[Array, ...]


def native_operands(
    first: Rounded,
    second: Rounded,
    contracted: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> Native | None:
    """What is multiplied in place of q * scale; None where the product has to be emulated.

    Args:
      contracted: The axes of both that are summed; None where a product takes nothing `Blocked`.
    """
    one, other = first.scale, second.scale
    if one is not None and other is not None:
        if _bits(first) == _bits(second) == 8:
            return Native(_elements(first), _elements(second), (one, other))
        return None
    if contracted is None:
        return None
    lengths = _block_length(first, contracted[0]), _block_length(second, contracted[1])
    # E8M0 scales reach the ends of float32, where no second scale could bring a result back.
    if 1 in lengths or _has_powers(first) != _has_powers(second):
        return None
    n, whole = first.q.shape[contracted[0][-1]], math.lcm(*lengths)
    size = -(-n // whole) * whole
    if size == max(lengths):  # of one block XLA compiles nothing for a GPU (jaxlib 0.10.2)
        size *= 2
    scales = () if _has_powers(first) else (_tensor_scale(first), _tensor_scale(second))
    return Native(
        _blocked(first, contracted[0][-1], lengths[0], size),
        _blocked(second, contracted[1][-1], lengths[1], size),
        scales,
    )


def _bits(operand: Rounded) -> int:
    """Of the elements, where JAX has arrays of their format; else 0."""
    assert operand.spec is not None
    element = operand.spec.element
    return element.bits if isinstance(element, FloatFormat) and element.dtype is not None else 0


def _elements(operand: Rounded) -> Array:
    """Q as an array of its own dtype."""
    assert operand.spec is not None
    element = operand.spec.element
    codes = code_values(operand.q, element) if operand.codes is None else operand.codes
    return dtype_from_codes(codes, element)


def _block_length(operand: Rounded, contracted: tuple[int, ...]) -> int:
    """Of the blocks along the last contracted axis; 1 where `lax.scaled_dot` cannot be exact.

    It multiplies elements and scales in bfloat16, or as hardware does, and takes blocks of two
    elements and more. An axis that is one block is cut into those that hardware takes.
    """
    spec = operand.spec
    if spec is None or spec.scale is None or spec.element_exponent or not contracted:
        return 1
    element, scale = spec.element, spec.scale
    if _bits(operand) not in (4, 8) or scale.dtype is None or scale.bits != 8:
        return 1
    assert isinstance(element, FloatFormat)
    is_marked = element.has_nan or scale.has_nan
    digits = element.mantissa_bits + 1 + scale.mantissa_bits + 1
    # Jax 0.10 cannot lower `scaled_dot` with symbolic sizes: it passes them to its parts alone.
    is_known = all(isinstance(n, int) for n in operand.q.shape)
    fits = element.has_zero and is_marked and is_known and digits <= _DIGITS
    if not fits or (spec.has_powers and scale != E8M0FNU) or any(explicit_spec(operand.q)):
        return 1
    n, length = (x[contracted[-1]] for x in (operand.q.shape, blocks_of(operand.q, spec).lengths))
    return _SHORT if length == n > 1 else length


def _has_powers(operand: Rounded) -> bool:
    assert operand.spec is not None
    return operand.spec.has_powers


def _tensor_scale(operand: Rounded) -> Array:
    assert operand.spec is not None
    second = operand.scales.tensor_scale
    if second is None:
        return jnp.ones((), jnp.float32)
    assert operand.spec.tensor_scale is not None
    return from_stored(second, operand.spec.tensor_scale)


def _blocked(operand: Rounded, axis: int, length: int, size: int) -> Blocked:
    """Elements, and one scale for each `length` of them along `axis`.

    A block of several rows, or of several lengths, says its scale for each. What the element format
    cannot say, that q is infinite or a NaN, the scale says: the NaN of one row's block, which
    reaches what q would.

    Args:
      size: To which the axis is padded with zeros.
    """
    spec, q, scale = operand.spec, operand.q, operand.scales.scale
    assert spec is not None
    assert spec.scale is not None
    assert scale is not None
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
    if codes is None and not spec.element.has_nan:
        is_bad = jnp.any(~jnp.isfinite(rows.split(q)), axis=rows.places, keepdims=True)
        scale = jnp.where(rows.gather(is_bad), jnp.full_like(scale, np.nan), scale)
    return Blocked(_elements(dataclasses.replace(operand, q=q, codes=codes)), scale)


def _padded(x: Array, axis: int, missing: int, value: int) -> Array:
    if not missing:
        return x
    widths = [(0, missing if i == axis else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, np.asarray(value, x.dtype), widths)


@elementwise
def _raised(q: Array, exponent: Array) -> Array:
    """Halved where the scale is 2**-127, which becomes 2**-126: XLA's CPU would take it for zero.

    Products q * scale that are normal numbers are the same.
    """
    return jnp.where(exponent < _LEAST, q * q.dtype.type(0.5), q)
