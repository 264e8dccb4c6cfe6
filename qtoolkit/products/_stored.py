"""Operands that are stored as codes and scales: rounded once, and used as they are."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qtoolkit.casts.internal import check_holds, values_of
from qtoolkit.formats import BlockFormat
from qtoolkit.products._bilinear import Bilinear
from qtoolkit.products._rounded import Rounded
from qtoolkit.products._zero_points import moved_by, of_differences
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import Scales

STORED = "stored"


def stored_label(x: Any) -> str:
    """The name that reports give to an operand stored as codes; "" for an array."""
    if not isinstance(x, QArray):
        return ""
    notes = ["factors"] if x.factors is not None else []
    notes += ["Hadamard"] if x.rotation is not None else []
    return ", ".join([x.spec.name, *notes, STORED])


def check_trainable(tree: Any) -> None:
    """Raises TypeError if a tree that somebody wants to differentiate by holds stored kernels."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, QArray))
    paths = [path for path, leaf in found if isinstance(leaf, QArray)]
    if paths:
        first = jax.tree_util.keystr(paths[0], simple=True, separator="/")
        raise TypeError(
            f"value_and_grad: {len(paths)} of the parameters are codes of a quantized model, which "
            f"have no derivative, first {first}; differentiate by other parameters, or train the "
            "wrapped model and quantize it afterwards"
        )


def is_stack_of_kernels(array: QArray, contracted: Sequence[int]) -> bool:
    """Whether it is several stored kernels at once, each with scales or factors of its own.

    `jax.vmap` over kernels makes one matmul of them. Then it takes the dequantized arrays.
    """
    if getattr(array.tensor_scale, "ndim", 0):
        return True
    sizes = () if array.factors is None else array.factors.shape
    return any(size > 1 and axis not in contracted for axis, size in enumerate(sizes))


def with_inputs_transformed(function: Bilinear, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """The operands of a product, where a stored kernel may ask for factors and a rotation.

    These are applied to the other operand, and the kernel is returned without them.
    """
    operands = [lhs, rhs]
    for side, kernel in enumerate(operands):
        if isinstance(kernel, QArray) and kernel.transform:
            other = operands[1 - side]
            other = other.dequantize() if isinstance(other, QArray) else other
            axes = function.axes(lhs.shape, rhs.shape)
            pairs = tuple(zip(axes[1 - side].contracted, axes[side].contracted, strict=True))
            operands[1 - side] = kernel.transform.of_inputs(other, pairs, kernel.ndim)
            operands[side] = dataclasses.replace(kernel, factors=None, rotation=None)
    return operands[0], operands[1]


def restored_operand(array: QArray) -> Rounded:
    """A stored array as an operand of a matmul: the values of its codes, and its scales."""
    if getattr(array.tensor_scale, "ndim", 0):
        raise ValueError(
            f"matmul: {array!r} is a stack of arrays, each with a tensor scale of its own, "
            "expected one of them; index it, or use jax.vmap"
        )
    element = array.spec.element
    check_holds("product", of_differences(array.spec).element, array.dtype)
    codes = array.unpack().codes
    q = values_of(codes, element, jnp.float32)
    scales = Scales(array.scale, array.tensor_scale, array.zero_point)
    if array.zero_point is None:
        return Rounded(q.astype(array.dtype), scales, _spec_of(array), codes)
    q = moved_by(q, -array.zero_point, array.blocks)
    return Rounded(q.astype(array.dtype), scales, of_differences(_spec_of(array)))


def _spec_of(array: QArray) -> BlockFormat:
    """The array's format with a block length for every axis.

    `array.spec` alone is not enough for a stack of kernels: it does not count the stack's axes.
    """
    lengths = array.blocks.lengths
    try:
        if array.spec.block_lengths(array.shape) == lengths:
            return array.spec
    except ValueError:
        pass
    return dataclasses.replace(
        array.spec, block=lengths, axes=tuple(range(array.ndim)), other_axes=1
    )
