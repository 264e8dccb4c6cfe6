"""State that products move inside of a loop or `remat`, brought out of it.

linen's `nn.scan`, `nn.remat`, `nn.vmap` and `nn.cond` pass on only those collections that they are
told of, and the collection "qtoolkit" belongs to the wrapped module, outside of them. A layer in
there reads its state, which it closes over, but cannot write it. In nnx a module may run a copy of
a layer, which `nnx.merge` makes in the body and which is dropped. `LiftingTrace` stands outside. It
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

from qtoolkit.products._control_flow import INLINED, PassingTrace, jaxprs_in, scan_lengths
from qtoolkit.products._forward_state import moved_state, recorded_p
from qtoolkit.products._states import BAD, HISTORY

# For each product, by its `home`, what has moved. Of two moves of one product, or of all iterations
# of a loop, the elementwise maximum is the move of both; zeros are no move.
Moves = dict[Hashable, dict[str, Any]]


class LiftingTrace(PassingTrace):
    """Computes every operation in the trace underneath, and collects the moves in it.

    Args:
      moves: Filled with the moves.
      homes: Arrays of the states of a model, with their homes. A state that a loop takes as its
        operand is known by the first array that moves.
    """

    def __init__(self, moves: Moves, homes: Sequence[tuple[Any, Hashable]] = ()) -> None:
        with take_current_trace() as parent:
            super().__init__(parent)
        self.moves = moves
        self.homes = {id(x): (x, home) for x, home in homes if home is not None}

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(self.parent_trace):
            if primitive is recorded_p and params["home"] is not None:
                outs = primitive.bind(*args, **{**params, "is_carried": True, "home": None})
                self.add({params["home"]: _moved_by(args, outs, params)})
                return outs
            run = _LOOPS.get(primitive.name)
            homes = [self.homes.get(id(x), (x, None))[1] for x in args]
            is_known = any(home is not None for home in homes) and run is not _jit
            if run is None or not any(_moves_state(x, is_known) for x in jaxprs_in(params)):
                return primitive.bind(*args, **params)
            outs, moves = run(args, params, homes)
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


def state_after(
    state: Mapping[str, Any], move: Mapping[str, Any], *, is_moved: bool
) -> dict[str, Any]:
    """The state of a product after a move.

    Args:
      is_moved: Whether the product has also run outside of loops, and moved `state`.
    """
    new = {name: state[name] + x for name, x in move.items() if name not in (HISTORY, "is_skipped")}
    if HISTORY in move:
        is_new = jnp.any(move[HISTORY] != 0, axis=(-2, -1)) & ~move["is_skipped"]
        history = jnp.maximum(move[HISTORY], state[HISTORY]) if is_moved else move[HISTORY]
        new[HISTORY] = jnp.where(is_new[..., None, None], history, state[HISTORY])
    return new


def _moves_state(jaxpr: Any, is_known: bool) -> bool:
    return any(
        (eqn.primitive is recorded_p and (is_known or eqn.params["home"] is not None))
        or any(_moves_state(x, is_known) for x in jaxprs_in(eqn.params))
        for eqn in jaxpr.eqns
    )


def _with_homes(jaxpr: Any, homes: Sequence[Hashable]) -> Any:
    """A jaxpr with the homes of the states that its matmuls move and that it drops.

    A model that `nnx.merge` makes in the body has them as inputs of the body.
    """
    home_of = dict(zip(jaxpr.invars, homes, strict=True))
    used = {x for eqn in jaxpr.eqns for x in eqn.invars if not hasattr(x, "val")}
    used |= {x for x in jaxpr.outvars if not hasattr(x, "val")}
    eqns = []
    for eqn in jaxpr.eqns:
        params = eqn.params
        if eqn.primitive is recorded_p and params["home"] is None and params["is_carried"]:
            is_dropped = used.isdisjoint(eqn.outvars[-len(params["names"]) :])
            home = home_of.get(eqn.invars[0]) if not hasattr(eqn.invars[0], "val") else None
            eqn = eqn.replace(params={**params, "home": home if is_dropped else None})
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _body(closed: ClosedJaxpr, homes: Sequence[Hashable]) -> Callable[..., tuple[list[Any], Moves]]:
    """A jaxpr as a function that also returns the moves in it."""

    def function(*arrays: Any) -> tuple[list[Any], Moves]:
        moves: Moves = {}
        with set_current_trace(LiftingTrace(moves, [*zip(arrays, homes, strict=True)])):
            jaxpr = _with_homes(closed.jaxpr, homes)
            outs = jax.core.eval_jaxpr(jaxpr, closed.consts, *arrays)
        return list(outs), moves

    return function


def _scan(args: Any, params: Any, homes: Sequence[Hashable]) -> tuple[list[Any], Moves]:
    fixed, carries = scan_lengths(params)
    stacked = homes[fixed + carries :]  # each iteration has the state of its own layer
    homes = [*homes[:fixed], *[None] * carries, *stacked]
    body = _body(params["jaxpr"], homes)

    def step(carry: Any, xs: Any) -> Any:
        outs, moves = body(*args[:fixed], *carry, *xs)
        return outs[:carries], (outs[carries:], moves)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    state, xs = list(args[fixed:][:carries]), list(args[fixed + carries :])
    carry, (ys, moves) = lax.scan(step, state, xs, **options)
    for home, move in moves.items():
        if home not in stacked:
            moves[home] = jax.tree.map(lambda x: jnp.max(x, axis=0), move)
    return [*carry, *ys], moves


def _jit(args: Any, params: Any, homes: Sequence[Hashable]) -> tuple[list[Any], Moves]:
    return _body(params["jaxpr"], homes)(*args)


def _remat(args: Any, params: Any, homes: Sequence[Hashable]) -> tuple[list[Any], Moves]:
    options = {name: params[name] for name in ("prevent_cse", "policy")}
    outs: tuple[list[Any], Moves]
    outs = jax.checkpoint(_body(ClosedJaxpr(params["jaxpr"], ()), homes), **options)(*args)
    return outs


def _cond(args: Any, params: Any, homes: Sequence[Hashable]) -> tuple[list[Any], Moves]:
    index, *operands = args
    bodies = [_body(closed, homes[1:]) for closed in params["branches"]]
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


_LOOPS: dict[str, Callable[[Sequence[Any], Any, Sequence[Hashable]], tuple[list[Any], Moves]]] = {
    "scan": _scan,
    "cond": _cond,
    **dict.fromkeys(INLINED, _jit),
    "checkpoint": _remat,
    "remat": _remat,
    "remat2": _remat,
}
