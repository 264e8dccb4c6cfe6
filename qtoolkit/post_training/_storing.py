"""Stores kernels as codes and scales, as matmuls by a recipe would round them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from qtoolkit.casts import pack
from qtoolkit.casts.internal import WIDTHS, check_holds, exact_float32
from qtoolkit.formats import BlockFormat, Format, Rules
from qtoolkit.products import Operand, Recipe
from qtoolkit.products.internal import (
    Axes,
    Einsum,
    check_not_none,
    check_storable,
    code_values,
    moved_by,
    of_differences,
    poisoned,
    rounding_of,
    stored_by_learned_scale,
)
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import Blocks

Array = jax.Array
AS_WRAPPED = "wrapped"  # in place of a recipe: those that `wrap` gave to the model


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
    offset: Array | None = None,
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
      scale, offset: What the layer has learned, stacked likewise.

    Raises:
      ValueError: The kernel holds an infinity or a NaN; its dtype cannot hold the format's values;
        its learned scale is not finite, or its offset no zero point; or the operand has a
        transform, which no matmul of codes could undo.
    """
    if operand.is_learned:
        check_storable(where, operand, scale)
    if operand.transform is not None:
        raise ValueError(
            f"{where}: the recipe transforms the operand by {operand.transform}, expected no "
            "transform, which stored codes cannot have; omit that of the forward matmul"
        )
    check_holds(where, of_differences(operand.spec).element, x.dtype)
    is_known = not isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
    count = int(jnp.sum(~jnp.isfinite(exact_float32(x)))) if is_known else 0
    if count:
        raise ValueError(
            f"{where} holds {count} infinities and NaNs, expected finite numbers; repair the "
            "checkpoint, or exclude the layer by a rule with None"
        )
    return _stored_jitted(x, (amax, key, scale, offset), operand, axes, stacked)


# Jitted, so that all kernels of one shape share one program. Without it each operation is compiled
# on its own: NVFP4 for a transformer of one block took 31 s of CPU time instead of 5 s.
@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _stored_jitted(
    x: Array, state: tuple[Array | None, ...], operand: Operand, axes: Axes, stacked: int
) -> QArray:
    def store(x: Array, state: tuple[Array | None, ...]) -> QArray:
        amax, key, scale, offset = state
        if operand.is_learned:
            assert scale is not None  # `check_storable` made sure
            array = stored_by_learned_scale(x, operand, scale, offset)
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
    return store(x, state)


def _by_own_scale(
    x: Array, operand: Operand, axes: Axes, delayed: Array | None, key: Array | None
) -> QArray:
    how = rounding_of(operand, axes, x.shape, ())
    rounded = how.rounded(x, delayed, key)
    scales = rounded.scales
    assert how.operand is not None
    q, spec = rounded.q, how.operand.spec
    if scales.zero_point is not None:
        q = moved_by(q, scales.zero_point, Blocks(x.shape, spec.block_lengths(x.shape)))
    codes = code_values(q, spec.element)
    is_packed = spec.element.bits in WIDTHS and x.ndim > 0
    return QArray(
        pack(codes, spec.element) if is_packed else codes,
        scales.scale,
        spec,
        scales.tensor_scale,
        scales.zero_point,
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


def einsum_axes(subscripts: str, kernel: tuple[int, ...]) -> Axes:
    """The axes of a kernel that is the second operand of an einsum.

    They do not depend on the shape of the first operand, so shape (1, 1, ...) is used for it.
    """
    first = subscripts.split(",")[0]
    rank = len(first.replace(".", "")) + ("..." in first)
    return Einsum(subscripts).axes((1,) * rank, kernel)[1]
