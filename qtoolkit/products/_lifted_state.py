"""State that products move inside of a loop or `remat`, brought out of it.

linen's `nn.scan`, `nn.remat`, `nn.vmap` and `nn.cond` pass on only those collections that they are
told of, and the collection "qtoolkit" belongs to the wrapped module, outside of them. A layer in
there reads its state, which it closes over, but cannot write it. `LiftingTrace` stands outside. It
gets a loop with its finished body and runs it with one more result: what `moved_by` finds for each
product. All iterations compute from the state before the loop, so that the history moves by one
step, by the largest magnitude of all iterations, as it does under `value_and_grad`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, set_current_trace, take_current_trace

from qtoolkit.products._control_flow import PassingTrace, jaxprs_in, scan_lengths
from qtoolkit.products._forward_state import moved_state, recorded_p
from qtoolkit.products._states import BAD, HISTORY

# For each product, by its `home`, what has moved. Of two moves of one product, or of all iterations
# of a loop, the elementwise maximum is the move of both; zeros are no move.
Moves = dict[Hashable, dict[str, Any]]


class LiftingTrace(PassingTrace):
    """Computes every operation in the trace underneath, and collects the moves in it."""

    def __init__(self, moves: Moves) -> None:
        with take_current_trace() as parent:
            super().__init__(parent)
        self.moves = moves

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self.parent_trace):
            if primitive is recorded_p and params["home"] is not None:
                outs = primitive.bind(*args, **{**params, "is_carried": True, "home": None})
                self.add({params["home"]: _moved_by(args, outs, params)})
                return outs
            run = _LOOPS.get(primitive.name)
            if run is None or not any(map(_moves_state, jaxprs_in(params))):
                return primitive.bind(*args, **params)
            outs, moves = run(args, params)
            self.add(moves)
            return outs

    def add(self, moves: Moves) -> None:
        for home, move in moves.items():
            before = self.moves.get(home)
            self.moves[home] = move if before is None else jax.tree.map(jnp.maximum, before, move)


def _moved_by(args: Any, outs: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The move of one product: its new history, if it has a new one, and what else has grown."""
    old, new = moved_state(args, outs, params)
    move = {name: x - old[name] for name, x in new.items() if name != HISTORY}
    if HISTORY in new:
        is_new = jnp.any(new[HISTORY] != old[HISTORY], axis=(-2, -1), keepdims=True)
        move[HISTORY] = jnp.where(is_new, new[HISTORY], 0)
        # A step with an infinity or a NaN: bad, and the history has stayed.
        move["is_skipped"] = (move[BAD] > 0) & ~is_new[..., 0, 0]
    return move


def state_after(state: Mapping[str, Any], move: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a product after a move."""
    new = {name: state[name] + x for name, x in move.items() if name not in (HISTORY, "is_skipped")}
    if HISTORY in move:
        is_new = jnp.any(move[HISTORY] != 0, axis=(-2, -1)) & ~move["is_skipped"]
        new[HISTORY] = jnp.where(is_new[..., None, None], move[HISTORY], state[HISTORY])
    return new


def _moves_state(jaxpr: Any) -> bool:
    return any(
        (eqn.primitive is recorded_p and eqn.params["home"] is not None)
        or any(map(_moves_state, jaxprs_in(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _body(closed: ClosedJaxpr) -> Callable[..., tuple[list[Any], Moves]]:
    """A jaxpr as a function that also returns the moves in it."""

    def function(*arrays: Any) -> tuple[list[Any], Moves]:
        moves: Moves = {}
        with set_current_trace(LiftingTrace(moves)):
            outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays)
        return list(outs), moves

    return function


def _scan(args: Any, params: Any) -> tuple[list[Any], Moves]:
    fixed, carries = scan_lengths(params)
    body = _body(params["jaxpr"])

    def step(carry: Any, xs: Any) -> Any:
        outs, moves = body(*args[:fixed], *carry, *xs)
        return outs[:carries], (outs[carries:], moves)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    state, xs = list(args[fixed:][:carries]), list(args[fixed + carries :])
    carry, (ys, moves) = lax.scan(step, state, xs, **options)
    return [*carry, *ys], jax.tree.map(lambda x: jnp.max(x, axis=0), moves)


def _remat(args: Any, params: Any) -> tuple[list[Any], Moves]:
    options = {name: params[name] for name in ("prevent_cse", "policy")}
    outs: tuple[list[Any], Moves]
    outs = jax.checkpoint(_body(ClosedJaxpr(params["jaxpr"], ())), **options)(*args)
    return outs


def _cond(args: Any, params: Any) -> tuple[list[Any], Moves]:
    index, *operands = args
    bodies = [_body(closed) for closed in params["branches"]]
    shapes: Moves = {}
    for body in bodies:
        shapes |= jax.eval_shape(body, *operands)[1]

    def branch(body: Any) -> Callable[..., Any]:
        def function(*arrays: Any) -> Any:
            outs, moves = body(*arrays)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return outs, zeros | moves

        return function

    outs: tuple[list[Any], Moves] = lax.switch(index, [*map(branch, bodies)], *operands)
    return outs


_LOOPS: dict[str, Callable[[Sequence[Any], Any], tuple[list[Any], Moves]]] = {
    "scan": _scan,
    "cond": _cond,
    "checkpoint": _remat,
    "remat": _remat,
    "remat2": _remat,
}
