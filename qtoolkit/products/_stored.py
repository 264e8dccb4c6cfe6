"""Operands that are stored as codes and scales: rounded once, and used as they are."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from qtoolkit.casts import pack
from qtoolkit.casts.internal import WIDTHS, check_holds, exact_float32, values_of
from qtoolkit.formats import BlockFormat, Format, Rules
from qtoolkit.products._bilinear import Axes, Bilinear, Einsum
from qtoolkit.products._learned import check_storable, stored_by_learned_scale
from qtoolkit.products._operand import Operand
from qtoolkit.products._recipe import Recipe, check_not_none
from qtoolkit.products._residuals import code_values, poisoned
from qtoolkit.products._rounded import Rounded, rounding_of
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import Scales

Array = jax.Array
STORED = "stored"
AS_WRAPPED = "wrapped"  # in place of a recipe: those that `wrap` gave to the model


def stored_label(x: Any) -> str:
    """The name that reports give to an operand stored as codes; "" for an array."""
    if not isinstance(x, QArray):
        return ""
    notes = ["factors"] if x.factors is not None else []
    notes += ["Hadamard"] if x.rotation is not None else []
    return ", ".join([x.spec.name, *notes, STORED])


def kept_or_serving_rules(recipe: Any) -> Rules[Recipe] | None:
    """As `serving_rules`; None for `AS_WRAPPED`."""
    is_kept = isinstance(recipe, str) and recipe == AS_WRAPPED
    return None if is_kept else serving_rules(recipe)


def not_wrapped(name: str) -> ValueError:
    return ValueError(
        f"quantize: recipe is {AS_WRAPPED!r} for {name}, which is not wrapped, expected a recipe, "
        "e.g. qtoolkit.recipes.weight_only_e4m3"
    )


def serving_rules(recipe: Any) -> Rules[Recipe]:
    """The recipes for a model to be served. A format alone means kernels only."""
    if isinstance(recipe, Rules):
        return recipe.map(_serving_recipe)
    return Rules((), default=_serving_recipe(recipe))


def _serving_recipe(recipe: Any) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | Operand | BlockFormat | Format):
        return Recipe((None, recipe), gradient=None)
    check_not_none("quantize", recipe, f"write {AS_WRAPPED!r} for the recipes of `wrap`")
    raise TypeError(
        f"quantize: recipe has type {type(recipe).__name__}, expected a Recipe, Rules of them or a "
        "format, e.g. qtoolkit.recipes.weight_only_e4m3"
    )


def stored_kernel(
    where: str,
    x: Array,
    operand: Operand,
    axes: Axes,
    stacked: int,
    amax: Array | None = None,
    key: Array | None = None,
    scale: Array | None = None,
) -> QArray:
    """Rounds a kernel to codes and scales, as matmuls would; codes below 8 bits are packed.

    A matmul with the result equals, bit for bit, one with `x` by a recipe that rounds it as
    `operand` says. Inside of a trace no error can be raised for infinities and NaNs. There they
    become NaNs; if elements have no NaN, the scale of their block becomes NaN, and without a scale
    they are clamped.

    Args:
      x: One kernel, or a stack of them.
      axes: The axes of one kernel in its matmul.
      stacked: The number of leading axes of `x` along which kernels are stacked.
      amax, key: What the layer keeps for the kernel, see `of_kernel`, stacked likewise.
      scale: The scale that the layer has learned, stacked likewise.

    Raises:
      ValueError: The kernel holds an infinity or a NaN; its dtype cannot hold the format's values;
        its learned scale is not finite or comes with an offset; or the operand has a transform,
        which no matmul of codes could undo.
    """
    if operand.is_learned:
        check_storable(where, operand, scale)
    if operand.transform is not None:
        raise ValueError(
            f"{where}: the recipe transforms the operand by {operand.transform}, expected no "
            "transform, which stored codes cannot have; omit that of the forward matmul"
        )
    check_holds(where, operand.spec.element, x.dtype)
    is_known = not isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
    count = int(jnp.sum(~jnp.isfinite(exact_float32(x)))) if is_known else 0
    if count:
        raise ValueError(
            f"{where} holds {count} infinities and NaNs, expected finite numbers; repair the "
            "checkpoint, or exclude the layer by a rule with None"
        )
    return _stored_jitted(x, amax, key, scale, operand, axes, stacked)


# Jitted, so that all kernels of one shape share one program. Without it each operation is compiled
# on its own: NVFP4 for a transformer of one block took 31 s of CPU time instead of 5 s.
@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _stored_jitted(
    x: Array,
    amax: Array | None,
    key: Array | None,
    scale: Array | None,
    operand: Operand,
    axes: Axes,
    stacked: int,
) -> QArray:
    def store(x: Array, amax: Array | None, key: Array | None, scale: Array | None) -> QArray:
        if operand.is_learned:
            assert scale is not None  # `check_storable` made sure
            array = stored_by_learned_scale(x, operand, scale)
        else:
            array = _by_own_scale(x, operand, axes, amax, key)
            if array.spec.element.has_nan:
                return array
        if array.scale is None or array.spec.scale is None:
            return array
        return dataclasses.replace(
            array, scale=poisoned(array.scale, x, array.blocks, array.spec.scale)
        )

    for _ in range(stacked):
        store = jax.vmap(store)
    return store(x, amax, key, scale)


def _by_own_scale(
    x: Array, operand: Operand, axes: Axes, delayed: Array | None, key: Array | None
) -> QArray:
    how = rounding_of(operand, axes, x.shape, ())
    rounded = how.rounded(x, delayed, key)
    spec, scales = rounded.spec, rounded.scales
    assert spec is not None
    codes = code_values(rounded.q, spec.element)
    is_packed = spec.element.bits in WIDTHS and x.ndim > 0
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


def with_leading_axes(array: QArray, stacked: int) -> QArray:
    """The array of a stack, with scales and factors along the stack's axes.

    Under `vmap` all kernels of a stack are one operand to a method that runs the model, and may
    share a scale. `vmap` maps all leaves of the stored array along the same axes.
    """
    lead, rank = array.shape[:stacked], array.ndim - stacked
    if array.lengths is None or len(array.lengths) <= rank:
        return array

    def own(x: Array | None) -> Array | None:
        if x is None:
            return None
        x = x.reshape(*x.shape, *(1,) * (stacked - x.ndim))  # a tensor scale
        return jnp.broadcast_to(x, (*lead, *x.shape[stacked:]))

    return dataclasses.replace(
        array,
        scale=own(array.scale),
        tensor_scale=own(array.tensor_scale),
        zero_point=own(array.zero_point),
        factors=own(array.factors),
        lengths=array.lengths[-rank:],
    )


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


def einsum_axes(subscripts: str, kernel: tuple[int, ...]) -> Axes:
    """The axes of a kernel that is the second operand of an einsum.

    They do not depend on the shape of the first operand, so shape (1, 1, ...) is used for it.
    """
    first = subscripts.split(",")[0]
    rank = len(first.replace(".", "")) + ("..." in first)
    return Einsum(subscripts).axes((1,) * rank, kernel)[1]


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
    check_holds("product", element, array.dtype)
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
