"""Operands as arrays of their own formats, and scales beside them, for hardware that has those."""

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
from qtoolkit.formats import E4M3FN, E8M0FNU, BlockFormat, FloatFormat, Format
from qtoolkit.products._bilinear import Blocked
from qtoolkit.products._rounded import Rounded, code_values
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
        if not (_has_8_bits(first) and _has_8_bits(second)):
            return None
        return Native(_own_elements(first), _own_elements(second), (one, other))
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


def _has_8_bits(operand: Rounded) -> bool:
    """Whether the elements are floats of 8 bits of which JAX has arrays."""
    assert operand.spec is not None
    element = operand.spec.element
    return isinstance(element, FloatFormat) and element.bits == 8 and element.dtype is not None


def _own_elements(operand: Rounded) -> Array:
    assert operand.spec is not None
    return _elements(operand.q, operand.codes, operand.spec.element)


def _elements(q: Array, codes: Array | None, fmt: Format) -> Array:
    """`q` as an array of a format; `codes` are its codes where they are known."""
    assert isinstance(fmt, FloatFormat)
    return dtype_from_codes(code_values(q, fmt) if codes is None else codes, fmt)


def _blocked_format(spec: BlockFormat) -> FloatFormat | None:
    """The format of the elements that `lax.scaled_dot` is given; None where there is none.

    Their own, but FP4 and FP6 with powers of two as scales are given as E4M3FN, which holds them:
    JAX has no arrays of FP6, and XLA fails to compile FP4 with E8M0 scales for GPUs (jaxlib
    0.10.2, for H100 and B200 described: "Failed to lower from shared dialect to Triton").
    """
    element = spec.element
    if not isinstance(element, FloatFormat):
        return None
    if spec.has_powers and element.bits < 8 and holds(element, np.dtype(E4M3FN.dtype)):
        return E4M3FN
    return element if element.bits in (4, 8) and element.dtype is not None else None


def _block_length(operand: Rounded, contracted: tuple[int, ...]) -> int:
    """Of the blocks along the last contracted axis; 1 where `lax.scaled_dot` cannot be exact.

    It multiplies elements and scales in bfloat16, or as hardware does, and takes blocks of two
    elements and more. An axis that is one block is cut into those that hardware takes.
    """
    spec = operand.spec
    if spec is None or spec.scale is None or spec.element_exponent or not contracted:
        return 1
    element, scale = _blocked_format(spec), spec.scale
    if element is None or scale.dtype is None or scale.bits != 8:
        return 1
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

    A block of several rows, or of several lengths, says its scale for each. What the format of the
    elements cannot say, that q is infinite or a NaN, the scale says: the NaN of one row's block,
    which reaches what q would.

    Args:
      size: To which the axis is padded with zeros.
    """
    spec, q, scale = operand.spec, operand.q, operand.scales.scale
    assert spec is not None
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
        is_bad = jnp.any(~jnp.isfinite(rows.split(q)), axis=rows.places, keepdims=True)
        scale = jnp.where(rows.gather(is_bad), jnp.full_like(scale, np.nan), scale)
    return Blocked(_elements(q, codes, fmt), scale)


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
