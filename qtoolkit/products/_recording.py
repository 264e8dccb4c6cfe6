"""State that the forward pass itself updates: histories of lhs and rhs, and keys.

Delayed scaling needs the magnitudes of every training step. `value_and_grad` of the Flax packages
gets them, those of cotangents too, as the gradient of a probe. A trainer that differentiates by
itself, `nnx.value_and_grad` for instance, has no probe. There the forward pass updates the state of
its operands. It must not do so in evaluation, and a traced function cannot see whether somebody
will differentiate it. But a derivative rule is called only then. So `recorded` is a primitive that
returns the state unchanged, and whose derivative rule returns the updated one. It passes through
`jit`, `scan`, `remat` and `cond` as any operation does; under `vmap` all examples share one state.
"""

import contextvars
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir

from qtoolkit.products._context import held
from qtoolkit.products._plan import State
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._states import BAD, HISTORY, MOVING, PROBE, STEP, advance, state_of
from qtoolkit.products._taps import instrument
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import amax_of, rolled_by

Array = jax.Array
Kept = Mapping[str, Any]

STALE = (
    "differentiated without qtoolkit.{nnx,linen}.value_and_grad: histories of delayed scales and "
    "keys of stochastic rounding do not move here, so scales are current ones and equal numbers "
    "are rounded equally in every step; differentiate by value_and_grad of qtoolkit.nnx or "
    "qtoolkit.linen, or let the forward pass update the state: nnx.value_and_grad of an argument "
    'that is the model, or apply(..., mutable=["qtoolkit"]); a linen layer inside of nn.scan, '
    "nn.remat or nn.vmap needs value_and_grad, or a wrap inside of that transformation"
)
COTANGENTS = (
    "differentiated without qtoolkit.{nnx,linen}.value_and_grad: the delayed scales of lhs and rhs "
    "follow the forward pass, if the state after it is kept (that of a model which nnx.merge makes "
    "inside of jax.checkpoint is lost: scales are current ones), those of cotangents are current "
    "ones; differentiate by value_and_grad of qtoolkit.nnx or qtoolkit.linen to delay these as well"
)

_COMPUTED_BY = (HISTORY, STEP)  # what a product gets otherwise, depending on who differentiates it
_recorded_p = Primitive("qtoolkit_recorded")
_recorded_p.multiple_results = True
_is_rolled: contextvars.ContextVar[bool] = contextvars.ContextVar("rolled", default=False)
# Part of the key by which `jax.jit` finds a trace: one of a plain step records, others do not.
_traced_for = jax.make_user_context(None)


@contextmanager
def rolled_later() -> Iterator[None]:
    """In this context the forward pass records nothing: `value_and_grad` updates all state."""
    with held(_is_rolled, True), _traced_for("rolled"):
        yield


def present_trace() -> Any:
    return get_opaque_trace_state(convention="flax")


class Track:
    """Gives a product its state, and stores the new state where the product moves it.

    Args:
      name: The name of layer and product, "mlp:kernel".
      kept: See `_states`.
      write: Stores what is moved. None: nobody can, so the scales of a product that somebody
        differentiates are current ones.
      rng: As for `state_of`.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        kept: Kept,
        write: Callable[[Kept], None] | None = None,
        rng: Array | None = None,
    ) -> None:
        self.recipe, self.name, self.kept, self.rng = recipe, name, kept, rng
        self.write, self._trace = write, present_trace()

    def __call__(self, lhs: Any, rhs: Any) -> State | None:
        """The state by which to compute `lhs * rhs`, in the order (input, kernel)."""
        write = self.write if self._trace == present_trace() else None
        used, moved = recorded(
            self.kept,
            lhs,
            rhs,
            is_carried=write is not None,
            delays_cotangent=self.recipe.delays_cotangent,
        )
        if moved and write is not None:
            write(moved)
        return state_of(self.recipe, self.name, used, self.rng)

    @property
    def unmoved(self) -> State | None:
        """The state for products that nobody tells apart: they change none."""
        return state_of(self.recipe, self.name, self.kept, self.rng)


def recorded(
    kept: Kept, lhs: Any, rhs: Any, *, is_carried: bool, delays_cotangent: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state by which a product is computed, and the state after it.

    Not differentiated, both are `kept`. Differentiated by somebody who reads the probe, too. By
    anybody else the history of lhs and rhs moves and the key advances, if the new state is carried
    to the next step. The product is computed by the history as it was, the cotangent by its own
    magnitude. Where the state is not carried, all scales are current ones, and a warning says so.

    Args:
      lhs, rhs: The operands in the order (input, kernel).
      is_carried: Whether the caller stores the state after the product.
      delays_cotangent: Whether the recipe delays the scale of a cotangent: then a warning says that
        it is a current one.
    """
    names = [name for name in MOVING if name in kept]
    arrays = {side: x for side, x in enumerate((lhs, rhs)) if not isinstance(x, QArray)}
    is_empty = any(0 in x.shape for x in (lhs, rhs))
    if not names or is_empty or _is_rolled.get() or instrument() is not None:
        return dict(kept), {}
    probe = [kept[PROBE]] if PROBE in kept else []
    outs = _recorded_p.bind(
        *(kept[name] for name in names),
        *probe,
        *arrays.values(),
        names=tuple(names),
        has_probe=bool(probe),
        sides=tuple(arrays),
        is_carried=is_carried,
        delays_cotangent=delays_cotangent,
        lead=0,
    )
    by = [name for name in names if name in _COMPUTED_BY]
    used = {**kept, **dict(zip(by, outs, strict=False))}
    return used, dict(zip(names, outs[len(by) :], strict=True))


def _parts(operands: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(state, probe, lhs and rhs) of the primitive's operands."""
    count = len(params["names"])
    after = count + params["has_probe"]
    return operands[:count], operands[count:after], operands[after:]


def _as_it_is(*operands: Any, **params: Any) -> list[Any]:
    state, _, _ = _parts(operands, params)
    pairs = zip(params["names"], state, strict=True)
    return [*(x for name, x in pairs if name in _COMPUTED_BY), *state]


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    _, probe_dots, dots = _parts(tangents, params)
    is_differentiated = any(not isinstance(dot, ad.Zero) for dot in dots)
    is_read = any(not isinstance(dot, ad.Zero) for dot in probe_dots)
    if not is_differentiated or is_read:
        outs = _recorded_p.bind(*primals, **params)
    else:
        outs = _differentiated(primals, params)
    return outs, [ad.Zero(jax.typeof(out)) for out in outs]


def _differentiated(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    values, _, arrays = _parts(operands, params)
    state = dict(zip(params["names"], values, strict=True))
    has_history = HISTORY in state
    if not params["is_carried"]:
        warnings.warn(STALE, RuntimeWarning, stacklevel=2)
        # A warm-up would never end.
        replaced = {HISTORY: jnp.zeros_like, STEP: lambda x: jnp.full_like(x, np.uint32(2**32 - 1))}
        used = [replaced[name](state[name]) for name in _COMPUTED_BY if name in state]
        return [*used, *values]
    if has_history and params["delays_cotangent"]:
        warnings.warn(COTANGENTS, RuntimeWarning, stacklevel=2)
    used = [state[HISTORY].at[..., 2, :].set(0)] if has_history else []
    used += [state[STEP]] if STEP in state else []
    if has_history:
        state[HISTORY], state[BAD] = _moved(state, arrays, params)
    after = advance(state)
    return [*used, *(after[name] for name in params["names"])]


def _moved(state: Kept, arrays: Any, params: Mapping[str, Any]) -> tuple[Array, Array]:
    history, lead = state[HISTORY], params["lead"]
    measure = amax_of
    for _ in range(lead):
        measure = jax.vmap(measure)
    nothing = jnp.zeros(history.shape[:lead], jnp.float32), jnp.zeros(history.shape[:lead], bool)
    seen = [nothing] * 3
    for side, x in zip(params["sides"], arrays, strict=True):
        seen[side] = measure(lax.stop_gradient(x))
    amax, is_bad = (jnp.stack(parts, axis=-1) for parts in zip(*seen, strict=True))
    # Shards of a `shard_map` that are given one history update it alike.
    seen_on, kept_on = (jax.typeof(x).manual_axis_type.varying for x in (amax, history))
    axes = tuple(sorted(seen_on - kept_on))
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
        outs = _recorded_p.bind(*operands, **params)
        return outs, [None] * len(outs)
    sizes = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    (size,) = sizes
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    outs = _recorded_p.bind(*moved, **{**params, "lead": params["lead"] + 1})
    return outs, [0] * len(outs)


_recorded_p.def_impl(_as_it_is)
_recorded_p.def_abstract_eval(_as_it_is)
ad.primitive_jvps[_recorded_p] = _jvp
batching.primitive_batchers[_recorded_p] = _batched
mlir.register_lowering(_recorded_p, mlir.lower_fun(_as_it_is, multiple_results=True))
