"""The state of a matmul in a training step of somebody else, who does not differentiate by probes.

A recipe with delayed scaling scales an operand by the largest magnitude of the last steps, its
history. `value_and_grad` of the Flax packages gets the magnitudes of a step, those of cotangents
too, as the gradient of a probe. Any other trainer knows no probe. There the forward pass tells the
magnitudes of lhs and rhs. It must not do so in evaluation, and a traced function cannot see whether
somebody will differentiate it. But a derivative rule is called only then. So `observed` is a
primitive that returns the state as it is, and zeros; its derivative rule returns magnitudes.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from qtoolkit.casts.internal import varying_alike
from qtoolkit.products._lines import warn
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._states import HISTORY, PROBE, STEP
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import BUCKETS, amax_of, histogram

Array = jax.Array

MISSING = (
    "differentiated without state: the model has none for some of its matmuls, so their delayed "
    "scales are computed in the same step, and they have no warm-up; with qtoolkit.nnx write "
    "wrap(model, recipe, inputs=(x,)), which traces the model and gives each matmul its state; "
    'with qtoolkit.linen pass {**variables, "params": params}, with the collection "qtoolkit" that '
    'init returned; report(...) says "current" for the matmuls without state'
)
STALE = (
    "differentiated without qtoolkit.{nnx,linen}.value_and_grad: histories of delayed scales and "
    "keys of stochastic rounding do not move here, so scales are current ones and equal numbers "
    "are rounded equally in every step; differentiate by value_and_grad of qtoolkit.nnx or "
    "qtoolkit.linen, or let the forward pass update the state: nnx.value_and_grad of an argument "
    'that is the model, or apply(..., mutable=["qtoolkit"])'
)
COTANGENTS = (
    "differentiated without value_and_grad of qtoolkit.nnx or qtoolkit.linen: training works, but "
    "scales of cotangents are computed in the same step, instead of from earlier steps as the "
    "recipe says; write qtoolkit.nnx.value_and_grad(loss)(model, ...), or the same of "
    "qtoolkit.linen"
)


@dataclasses.dataclass(frozen=True)
class _Matmul:
    """What the primitive has to know of a matmul.

    Attributes:
      names: Those of its state that the primitive gets.
      has_probe: Whether it also gets the probe, to know whether somebody differentiates by it: then
        the gradient tells the magnitudes, and whoever takes it updates the state.
      moves: Whether the caller stores the state after the step.
      warning: What to say if somebody differentiates; "" for nothing.
    """

    names: tuple[str, ...]
    has_probe: bool
    moves: bool
    warning: str


_observed_p = Primitive("qtoolkit_observed")
_observed_p.multiple_results = True


def observed(
    kept: Mapping[str, Array], lhs: Any, rhs: Any, recipe: Recipe, *, moves: bool
) -> tuple[dict[str, Array], Array]:
    """The state by which a matmul is computed, and what a training step sees of it.

    Seen are the histograms of the amaxes of lhs and rhs, as a probe gets them: float32[3, buckets].
    In evaluation that is `kept`, and zeros. If somebody differentiates, cotangents have current
    scales; where the state does not move, all scales are current ones, and a warm-up has ended.

    Args:
      kept: Empty for a matmul that the state does not know.
      lhs, rhs: The operands in the order (input, kernel).
    """
    names = tuple(part for part in (HISTORY, STEP) if part in kept)
    warning = STALE if kept else MISSING
    if moves:
        warning = COTANGENTS if recipe.delayed[2] and HISTORY in kept else ""
    matmul = _Matmul(names, PROBE in kept, moves, warning)
    state = [kept[part] for part in (*names, *([PROBE] if PROBE in kept else []))]
    zeros, *_ = varying_alike(jnp.zeros((3, BUCKETS), jnp.float32), *kept.values())
    arrays = [jnp.zeros(()) if isinstance(x, QArray) else x for x in (lhs, rhs)]
    *used, seen = _observed_p.bind(*state, zeros, *arrays, matmul=matmul, lead=0)
    return {**kept, **dict(zip(names, used, strict=True))}, seen


def _as_it_is(*operands: Any, matmul: _Matmul, lead: int) -> list[Any]:
    return [*operands[: len(matmul.names)], operands[-3]]


def _jvp(primals: Any, tangents: Any, *, matmul: _Matmul, lead: int) -> tuple[Any, Any]:
    is_read = matmul.has_probe and not isinstance(tangents[len(matmul.names)], ad.Zero)
    if is_read:
        outs = _as_it_is(*primals, matmul=matmul, lead=lead)
    elif all(isinstance(dot, ad.Zero) for dot in tangents[-2:]):
        outs = _observed_p.bind(*primals, matmul=matmul, lead=lead)
    else:
        if matmul.warning:
            warn(matmul.warning)
        outs = _differentiated(*primals, matmul=matmul, lead=lead)
    return outs, [ad.Zero(jax.typeof(out)) for out in outs]


def _differentiated(*operands: Any, matmul: _Matmul, lead: int) -> list[Array]:
    *state, zeros, lhs, rhs = operands
    kept = dict(zip(matmul.names, state, strict=False))
    if HISTORY in kept:  # zeros in a history mean current scales
        first = 2 if matmul.moves else 0
        kept[HISTORY] = kept[HISTORY].at[..., first:, :].set(0)
    if STEP in kept and not matmul.moves:  # the last step: else a warm-up would never end
        kept[STEP] = jnp.full_like(kept[STEP], np.uint32(2**32 - 1))
    measure = _histogram_of
    for _ in range(lead):
        measure = jax.vmap(measure)
    seen = jnp.stack([measure(lax.stop_gradient(x)) for x in (lhs, rhs)], axis=-2)
    seen = jnp.concatenate([seen, jnp.zeros_like(seen[..., :1, :])], axis=-2)
    here, there = (jax.typeof(x).manual_axis_type.varying for x in (seen, zeros))
    if axes := tuple(sorted(here - there)):  # shards that are given one state share it
        seen = lax.psum(seen, axes)
    return [*kept.values(), seen]


def _histogram_of(x: Array) -> Array:
    return histogram(*amax_of(x))


def _batched(operands: Any, dims: Any, *, matmul: _Matmul, lead: int) -> tuple[Any, Any]:
    if all(dim is None for dim in dims[:-2]):
        # One state for all examples. Their magnitudes are those of one larger array.
        outs = _observed_p.bind(*operands, matmul=matmul, lead=lead)
        return outs, [None] * len(outs)
    (size,) = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    outs = _observed_p.bind(*moved, matmul=matmul, lead=lead + 1)
    return outs, [0] * len(outs)


_observed_p.def_impl(_as_it_is)
_observed_p.def_abstract_eval(_as_it_is)
ad.primitive_jvps[_observed_p] = _jvp
batching.primitive_batchers[_observed_p] = _batched
mlir.register_lowering(_observed_p, mlir.lower_fun(_as_it_is, multiple_results=True))
