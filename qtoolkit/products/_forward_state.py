"""State that the forward pass itself updates: histories of lhs and rhs, and keys.

A recipe with delayed scaling scales an operand by the largest magnitude of the last steps, which
the layer keeps as a history. Stochastic rounding needs another key in each step.

Delayed scaling needs the magnitudes of every training step. `value_and_grad` of the Flax packages
gets them, those of cotangents too, as the gradient of a probe. A trainer that differentiates by
itself, `nnx.value_and_grad` for instance, has no probe. There the forward pass updates the state of
its operands. It must not do so in evaluation, and a traced function cannot see whether somebody
will differentiate it. But a derivative rule is called only then. So `recorded` is a primitive that
returns the state unchanged, and whose derivative rule returns the updated one. It passes through
`jit`, `scan`, `remat` and `cond` as any operation does; under `vmap` all examples share one state.
"""

import contextvars
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, get_opaque_trace_state, take_current_trace
from jax.interpreters import ad, batching, mlir

from qtoolkit.products._control_flow import PassingTrace
from qtoolkit.products._instruments import instrument, set_variable
from qtoolkit.products._lines import warn
from qtoolkit.products._plan import State
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._states import (
    BAD,
    HISTORY,
    MOVING,
    PROBE,
    STEP,
    advance,
    state_of,
    untracked_axes,
)
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import amax_of, rolled_by

Array = jax.Array
Kept = Mapping[str, Any]

_TWICE = (
    "a model differentiates itself inside of value_and_grad of qtoolkit.nnx or qtoolkit.linen: its "
    "inner derivative does not see histories of delayed scales, so scales are current ones there; "
    "use a recipe with current scales, e.g. te_current, for the layers that it differentiates"
)
STALE = (
    "differentiated without qtoolkit.{nnx,linen}.value_and_grad: histories of delayed scales and "
    "keys of stochastic rounding do not move here, so scales are current ones and equal numbers "
    "are rounded equally in every step; differentiate by value_and_grad of qtoolkit.nnx or "
    "qtoolkit.linen, or let the forward pass update the state, outside of jax.shard_map: "
    'nnx.value_and_grad of an argument that is the model, or apply(..., mutable=["qtoolkit"])'
)
COTANGENTS = (
    "differentiated without qtoolkit.{nnx,linen}.value_and_grad: the delayed scales of lhs and rhs "
    "follow the forward pass, those of cotangents are current ones; differentiate by "
    "value_and_grad of qtoolkit.nnx or qtoolkit.linen to delay these as well"
)
DROPPED = (
    "differentiated without qtoolkit.nnx.value_and_grad: new histories of delayed scales and keys "
    "of stochastic rounding are dropped, with a model that nnx.merge makes inside of the function, "
    "of jax.checkpoint or of jax.lax.scan, or because nnx.scan broadcasts the state, so the state "
    "stays as it is: if no step has moved it, scales are current ones; differentiate by "
    "qtoolkit.nnx.value_and_grad, use the transform of nnx, such as nnx.remat, let nnx.scan carry "
    "the state, or return nnx.state(model, qtoolkit.nnx.ScalingState) and write "
    "nnx.update(original, state)"
)

# The state by which a matmul is computed depends on who differentiates it. The primitive returns
# these parts of it first, and then all that is stored for the next step.
_COMPUTED_BY = (HISTORY, STEP)
recorded_p = Primitive("qtoolkit_recorded")
recorded_p.multiple_results = True
# Whether `value_and_grad` of qtoolkit.nnx or qtoolkit.linen runs.
_is_ours: contextvars.ContextVar[bool] = contextvars.ContextVar("is_ours", default=False)
# Part of the key by which `jax.jit` finds a trace: one of a plain step records, others do not.
_traced_for = jax.make_user_context(None)


@contextmanager
def without_forward_updates() -> Iterator[None]:
    """In this context the forward pass records nothing: `value_and_grad` updates all state."""
    with set_variable(_is_ours, True), _traced_for("value_and_grad"):
        yield


def moves_forward() -> bool:
    """Whether the forward pass updates state, as it does unless our `value_and_grad` runs."""
    return not _is_ours.get()


def present_trace() -> Any:
    return get_opaque_trace_state(convention="flax")


class ForwardState:
    """Gives a matmul its state, and stores the new state where a training step updates it.

    Args:
      name: The name of layer and matmul, "mlp:kernel".
      kept: What the layer keeps for the matmul, see `_states`.
      write: Stores what is new. None: nobody can, so the scales of a matmul that somebody
        differentiates are current ones.
      rng: As for `state_of`.
      home: By what `_lifted_state` knows the state, if it carries what is moved in inner loops.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        kept: Kept,
        write: Callable[[Kept], None] | None = None,
        rng: Array | None = None,
        home: Hashable = None,
    ) -> None:
        self.recipe, self.name, self.kept, self.rng = recipe, name, kept, rng
        self.write, self.home, self._trace = write, home, present_trace()

    def __call__(self, lhs: Any, rhs: Any) -> State | None:
        """The state by which to compute `lhs * rhs`, in the order (input, kernel)."""
        # In an inner trace, as of the body of a loop, the new state is a tracer: it must not leave.
        write = self.write if self._trace == present_trace() else None
        used, moved = recorded(
            self.kept,
            lhs,
            rhs,
            is_carried=write is not None,
            delayed=self.recipe.delayed,
            home=self.home if write is None else None,
        )
        if moved and write is not None:
            write(moved)
        return state_of(self.recipe, self.name, used, self.rng)

    @property
    def unmoved(self) -> State | None:
        """The state for matmuls that nobody tells apart, which update none: those of `dot`."""
        return state_of(self.recipe, self.name, self.kept, self.rng)


def recorded(
    kept: Kept,
    lhs: Any,
    rhs: Any,
    *,
    is_carried: bool,
    delayed: tuple[bool, bool, bool],
    home: Hashable = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state by which a matmul is computed, and the state after it.

    In evaluation both are `kept`. Under our `value_and_grad`, which differentiates by the probe,
    too. If anybody else differentiates, the history of lhs and rhs is updated and the key advances,
    provided that the new state is carried to the next step. The matmul is computed by the history
    as it was, the cotangent by its own magnitude. Where the state is not carried, all scales are
    current ones, and a warning says so.

    Args:
      lhs, rhs: The operands in the order (input, kernel).
      is_carried: Whether the caller stores the state after the matmul.
      delayed: See `Recipe.delayed`. If it delays that of the cotangent, a warning says that it is a
        current one.
    """
    names = [name for name in MOVING if name in kept]
    arrays = {side: x for side, x in enumerate((lhs, rhs)) if not isinstance(x, QArray)}
    is_empty = any(0 in x.shape for x in (lhs, rhs))
    # Under our `value_and_grad` the primitive is there only to notice that the model differentiates
    # itself: a derivative that does not go through the probe is not ours. If the state is carried,
    # the matmul runs in the trace in which the method began, so no derivative lies between.
    is_ours = _is_ours.get()
    is_needless = is_ours and (is_carried or PROBE not in kept)
    if not names or is_empty or is_needless or instrument() is not None:
        return dict(kept), {}
    probe = [kept[PROBE]] if PROBE in kept else []
    outs = recorded_p.bind(
        *(kept[name] for name in names),
        *probe,
        *arrays.values(),
        names=tuple(names),
        has_probe=bool(probe),
        sides=tuple(arrays),
        is_carried=is_carried,
        delayed=delayed,
        is_ours=is_ours,
        home=home,
        lead=0,
    )
    by = [name for name in names if name in _COMPUTED_BY]
    before, after = kept[names[0]], outs[len(by)]
    _watched.pop(id(before), None)  # the state of an earlier run of this matmul is used here
    if after is not before and not isinstance(after, jax.core.Tracer):
        differentiated = next(x for x in _traces() if not isinstance(x, PassingTrace))
        _warn_if_dropped(after, differentiated)
    used = {**kept, **dict(zip(by, outs, strict=False))}
    return used, dict(zip(names, outs[len(by) :], strict=True))


def _parts(operands: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(state, probe, lhs and rhs) of the primitive's operands."""
    count = len(params["names"])
    after = count + params["has_probe"]
    return operands[:count], operands[count:after], operands[after:]


def moved_state(
    operands: Any, outs: Any, params: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state before and after a matmul, from the operands and results of the primitive."""
    names = params["names"]
    before, _, _ = _parts(operands, params)
    after = outs[len(outs) - len(names) :]
    return dict(zip(names, before, strict=True)), dict(zip(names, after, strict=True))


def _as_it_is(*operands: Any, **params: Any) -> list[Any]:
    state, _, _ = _parts(operands, params)
    pairs = zip(params["names"], state, strict=True)
    return [*(x for name, x in pairs if name in _COMPUTED_BY), *state]


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    _, probe_dots, dots = _parts(tangents, params)
    # JAX calls this rule in a training step, and never in evaluation. A tangent of the probe says
    # that our `value_and_grad` differentiates, which updates the state itself.
    is_differentiated = any(not isinstance(dot, ad.Zero) for dot in dots)
    is_read = any(not isinstance(dot, ad.Zero) for dot in probe_dots)
    if is_read:  # nothing is left to notice, also if a second derivative comes from outside
        outs = _as_it_is(*primals, **params)
    elif not is_differentiated:
        outs = recorded_p.bind(*primals, **params)
    else:
        outs = _differentiated(primals, params)
    return outs, [ad.Zero(jax.typeof(out)) for out in outs]


def _differentiated(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    values, _, arrays = _parts(operands, params)
    state = dict(zip(params["names"], values, strict=True))
    has_history = HISTORY in state
    if not params["is_carried"]:
        warn(_TWICE if params["is_ours"] else STALE)
        # Zeros in a history mean current scales. The last step: else a warm-up would never end.
        replaced = {HISTORY: jnp.zeros_like, STEP: lambda x: jnp.full_like(x, np.uint32(2**32 - 1))}
        used = [replaced[name](state[name]) for name in _COMPUTED_BY if name in state]
        return [*used, *values]
    if has_history and params["delayed"][2]:
        warn(COTANGENTS)
    # Nobody sees the cotangent here, so its row of the history is empty: it has a current scale.
    used = [state[HISTORY].at[..., 2, :].set(0)] if has_history else []
    used += [state[STEP]] if STEP in state else []
    if has_history:
        state[HISTORY], state[BAD] = _updated_history(state, arrays, params)
    after = advance(state)
    first = after[params["names"][0]]
    if isinstance(first, jax.core.Tracer):  # else `recorded` watches it
        _warn_if_dropped(first, first._trace)
    return [*used, *(after[name] for name in params["names"])]


_watched: dict[int, Any] = {}  # references to new states, by the id of the state


def _warn_if_dropped(state: Any, trace: Any) -> None:
    """Warns if the new state of a matmul is lost, because a function drops the model it has made.

    Who returns or uses the state holds it until JAX has traced or differentiated the function. So a
    state that is freed before is in nobody's hands.

    Args:
      trace: The one by which JAX traces or differentiates the function.
    """
    key, made_in = id(state), weakref.ref(trace)

    def freed(_: Any) -> None:
        del _watched[key]
        if any(now is made_in() for now in _traces()):  # that of a derivative may lie on top
            warn(DROPPED)

    _watched[key] = weakref.ref(state, freed)


def _traces() -> Iterator[Any]:
    """The traces that run now, the innermost first."""
    with take_current_trace() as trace:
        pass
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def _updated_history(state: Kept, arrays: Any, params: Mapping[str, Any]) -> tuple[Array, Array]:
    """The history after this step, and the count of steps with bad numbers."""
    history, lead = state[HISTORY], params["lead"]
    measure = amax_of
    for _ in range(lead):
        measure = jax.vmap(measure)
    nothing = jnp.zeros(history.shape[:lead], jnp.float32), jnp.zeros(history.shape[:lead], bool)
    seen = [nothing] * 3
    for side, x in zip(params["sides"], arrays, strict=True):
        amax, is_bad = measure(lax.stop_gradient(x))
        seen[side] = (amax if params["delayed"][side] else nothing[0]), is_bad
    amax, is_bad = (jnp.stack(parts, axis=-1) for parts in zip(*seen, strict=True))
    # Shards of a `shard_map` that are given one history update it alike.
    seen_on, kept_on = (jax.typeof(x).manual_axis_type.varying for x in (amax, history))
    axes = (*sorted(seen_on - kept_on), *untracked_axes())
    if axes:
        amax, is_bad = lax.pmax(amax, axes), lax.pmax(is_bad.astype(jnp.int32), axes) > 0
    between = history.ndim - 2 - lead  # a whole stack that came here observes for all its layers
    shape = (*amax.shape[:lead], *(1,) * between, 3)
    shape_of_all = (*history.shape[:-2], 3)
    amax, is_bad = (jnp.broadcast_to(x.reshape(shape), shape_of_all) for x in (amax, is_bad))
    return rolled_by(history, state[BAD], amax, is_bad)


def _batched(operands: Any, dims: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    state_dims, probe_dims, _ = _parts(dims, params)
    if all(dim is None for dim in (*state_dims, *probe_dims)):
        # One state for all examples. Their magnitudes are those of one larger array.
        outs = recorded_p.bind(*operands, **params)
        return outs, [None] * len(outs)
    sizes = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    (size,) = sizes
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    outs = recorded_p.bind(*moved, **{**params, "lead": params["lead"] + 1})
    return outs, [0] * len(outs)


recorded_p.def_impl(_as_it_is)
recorded_p.def_abstract_eval(_as_it_is)
ad.primitive_jvps[recorded_p] = _jvp
batching.primitive_batchers[recorded_p] = _batched
mlir.register_lowering(recorded_p, mlir.lower_fun(_as_it_is, multiple_results=True))
