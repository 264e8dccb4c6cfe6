"""Operands that are stored as codes and scales: rounded once, and used as they are."""

import dataclasses

import jax
import jax.numpy as jnp

from qtoolkit.casts import pack
from qtoolkit.casts.internal import WIDTHS, check_holds, values_of
from qtoolkit.formats import BlockFormat
from qtoolkit.products._bilinear import Axes
from qtoolkit.products._operand import Rounded, code_values, cut
from qtoolkit.products._recipe import Operand
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import Scales

Array = jax.Array


def stored(
    where: str,
    x: Array,
    operand: Operand,
    axes: Axes,
    delayed: Array | None = None,
    key: Array | None = None,
) -> QArray:
    """`x` as a product rounds it, as codes and scales; codes below eight bits share bytes.

    A product of it equals, bit for bit, that of `x` by a recipe with `operand` for `x`.

    Args:
      axes: Of `x` in that product.
      delayed, key: What the layer keeps for it, as in `Cut.rounded`.

    Raises:
      ValueError: The operand has a transform, which is undone in no product of codes; or a format
        that the dtype of `x` does not hold.
    """
    if operand.transform is not None:
        raise ValueError(
            f"{where}: the recipe transforms the operand by {operand.transform}, expected one that "
            "is stored as it is; leave out the transform of the forward product"
        )
    check_holds(where, operand.spec.element, x.dtype)
    how = cut(operand, axes, x.shape, ())
    rounded = how.rounded(x, delayed, key)
    spec, scales = rounded.spec, rounded.scales
    assert spec is not None
    codes = code_values(rounded.q, spec.element)
    is_packed = spec.element.bits in WIDTHS and spec.element.bits < 8 and x.ndim > 0
    return QArray(
        pack(codes, spec.element) if is_packed else codes,
        scales.scale,
        spec,
        scales.tensor_scale,
        None,
        x.dtype,
        spec.block_lengths(x.shape),
        x.shape[-1] if is_packed else None,
    )


def restored_operand(where: str, array: QArray) -> Rounded:
    """A stored array as an operand: its codes as values, and its scales."""
    if getattr(array.tensor_scale, "ndim", 0):
        raise ValueError(
            f"{where}: {array!r} is a stack of arrays, each with a tensor scale of its own, "
            "expected one of them; index it, or use jax.vmap"
        )
    element = array.spec.element
    check_holds(where, element, array.dtype)
    codes = array.unpack().codes
    q = values_of(codes, element, jnp.float32)
    if array.zero_point is None:
        return Rounded(
            q.astype(array.dtype),
            Scales(array.scale, array.tensor_scale),
            _spec_of(array),
            codes,
        )
    blocks = array.blocks
    zero_point = blocks.spread(array.zero_point).astype(jnp.float32)
    q = blocks.join(blocks.split(q) - zero_point)
    spec = dataclasses.replace(_spec_of(array), zero_point=False)
    return Rounded(q, Scales(array.scale), spec)


def _spec_of(array: QArray) -> BlockFormat:
    """Its format with blocks where they lie: a stack has axes that its `spec` does not count."""
    lengths = array.blocks.lengths
    try:
        if array.spec.block_lengths(array.shape) == lengths:
            return array.spec
    except ValueError:
        pass
    return dataclasses.replace(
        array.spec, block=lengths, axes=tuple(range(array.ndim)), other_axes=1
    )
