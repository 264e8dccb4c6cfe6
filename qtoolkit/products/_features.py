"""Tracks along which axis the features of an activation lie, for recipes with a scale per token.

A token is a vector of features. They lie along the last axis until the program moves them: in
`q @ k.swapaxes(-1, -2)` the last axis of the transposed keys are the tokens. A scale for each
vector along that axis would be shared by all tokens, and so depend on later ones.

A place is an axis counted from the end: -1, -2 ...
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qtoolkit.products._found import LAST, Found
from qtoolkit.products._operand import Operand
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._sources import Step, along

# The place of the features in a product of two activations, such as the scores of attention: no
# axis of these holds features. The next product takes the axis over which it sums.
UNKNOWN = 0
# Primitives that keep the order of axes, though not their lengths. For primitives that are neither
# here nor in `moved`, the features of the result lie where those of an operand of its shape lie.
_PARTS = ("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "split")


def moved(step: Step, places: Sequence[int]) -> list[int]:
    """The place of the features in each result of an operation; -1 where nothing else is known.

    Args:
      places: The place of the features in each of its operands.
    """
    name, params, count = step.name, step.params, len(step.outputs)
    if name in ("jit", "pjit"):
        return _through(params["jaxpr"].jaxpr, tuple(places))
    if all(place == LAST for place in places) and name != "transpose":
        return [LAST] * count
    if name in _PARTS or places[0] == UNKNOWN:
        return [places[0]] * count
    shapes, out = [x.shape for x in step.inputs], step.outputs[0].shape
    match name:
        case "transpose":
            order = params["permutation"]
            return [order.index(places[0] % len(order)) - len(order)] if order else [LAST]
        case "broadcast_in_dim":
            kept = params["broadcast_dimensions"]
            return [kept[places[0] % len(kept)] - len(out)] if kept else [LAST]
        case "squeeze":
            at, rank = places[0] % len(shapes[0]), len(shapes[0])
            gone = sum(axis % rank > at for axis in params["dimensions"])
            return [places[0] + gone]
        # A model reshapes to split off heads or to join batches. The place counts from the end, so
        # it stays if the axes behind the features do.
        case "reshape":
            after = places[0] + 1
            is_behind = after == 0 or shapes[0][after:] == out[after:]
            return [places[0] if is_behind and len(out) >= -places[0] else LAST]
    alike = {place for place, shape in zip(places, shapes, strict=True) if shape == out} - {LAST}
    known = alike - {UNKNOWN} or alike
    return [known.pop() if len(known) == 1 else LAST] * count


@functools.lru_cache(maxsize=4096)
def _through(jaxpr: Any, places: tuple[int, ...]) -> list[int]:
    return along(jaxpr, moved, places, LAST)


def of_result(found: Found, rank: int) -> int:
    """The place of the features in a product's result: the axis that comes from the kernel."""
    if found.kernel is None:
        return UNKNOWN
    *_, out = found.function.axes(found.lhs.shape, found.rhs.shape)
    return _summed(out.contracted if found.kernel else out.kept, rank, LAST)


def following(recipe: Recipe, found: Found) -> Recipe:
    """`recipe` with its scales per token cut along the axis where the features lie.

    The input of a layer has its features on the axis that is summed with the kernel: "bct,cf->bft"
    sums over c, so those of bct lie at -2, and those of the result and its cotangent, bft, too.

    Args:
      recipe: Its operands are (input, kernel), even if lhs is the kernel; for two activations they
        are (lhs, rhs).
    """
    if not any(o is not None and o.is_by_token for o in recipe.operands):
        return recipe
    function, operands, kernel = found.function, (found.lhs, found.rhs), found.kernel
    cotangent = LAST
    of = function.axes(*(x.shape for x in operands))[:2]
    first, second = (
        # UNKNOWN: these are scores of attention. The product sums over their axis of keys.
        place or _summed(axes.contracted, len(x.shape), LAST)
        for place, axes, x in zip(found.features, of, operands, strict=True)
    )
    places = (first, second)
    if kernel is not None:
        side = 1 - kernel
        places = (_summed(of[side].contracted, len(operands[side].shape), places[side]), LAST)
        wide = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in operands)
        rank = len(jax.eval_shape(function, *wide, *found.extra).shape)
        cotangent = of_result(found, rank)
    return dataclasses.replace(
        recipe,
        forward=(_at(recipe.forward[0], places[0]), _at(recipe.forward[1], places[1])),
        dgrad=(_at(recipe.dgrad[0], cotangent), _at(recipe.dgrad[1], places[1])),
        wgrad=(_at(recipe.wgrad[0], places[0]), _at(recipe.wgrad[1], cotangent)),
    )


def _summed(summed: tuple[int, ...], rank: int, place: int) -> int:
    """`place` if the product sums over it, else the last axis over which it sums."""
    if not summed or place % rank in summed:
        return place
    return summed[-1] - rank


def _at(operand: Operand | None, place: int) -> Operand | None:
    if operand is None or place == LAST or not operand.is_by_token:
        return operand
    return dataclasses.replace(operand, spec=operand.spec.along(place))
