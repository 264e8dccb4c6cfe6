"""State that matmuls change inside of a loop or `remat`, brought out of it.

linen's `nn.scan`, `nn.remat`, `nn.vmap` and `nn.cond` pass on only the collections that they are
given. The collection "qtoolkit" is not among them: it belongs to the wrapped module, outside.
A layer inside can read its state, which it closes over, but it cannot write it. In nnx a module may
run a copy of a layer that `nnx.merge` makes in the body, and that is dropped; and `nnx.RNN` carries
the state of its cell from one time step to the next. `LiftingTrace` stands outside. It gets a loop
with its finished body, and runs it with one more result: the moves of `_moved_by` for each matmul.
All iterations compute from the state before the loop. So the history moves by one step, by the
largest magnitude of all iterations, as it does under `value_and_grad`.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, set_current_trace, take_current_trace

from qtoolkit.products._control_flow import (
    INLINED,
    Body,
    PassingTrace,
    jaxprs_in,
    run_with_bodies,
    scan_lengths,
)
from qtoolkit.products._forward_state import moved_state, recorded_p
from qtoolkit.products._states import BAD, HISTORY

# The moves of each matmul, by its `home`. Several moves of one matmul, as in the iterations of a
# loop, become one: their elementwise maximum. Zeros are no move.
Moves = dict[Hashable, dict[str, Any]]
_LOOPS = ("scan", "cond", "checkpoint", "remat", "remat2", *INLINED)


class _Carried(NamedTuple):
    """The home of a state that a scan carries: the names of its arrays, and their places there."""

    names: tuple[str, ...]
    places: tuple[int, ...]


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
                count = len(params["names"])
                return [*outs[:-count], *args[:count]]  # here the state stays as it was
            name = primitive.name
            homes = [self.homes.get(id(x), (x, None))[1] for x in args]
            has_home = name not in INLINED and any(home is not None for home in homes)
            is_known = name == "scan" or has_home
            if name not in _LOOPS or not any(_moves_state(x, is_known) for x in jaxprs_in(params)):
                return primitive.bind(*args, **params)
            outs, moves = _lifted(name, args, params, homes)
            self.add(moves)
            return outs

    def add(self, moves: Moves) -> None:
        for home, move in moves.items():
            before = self.moves.get(home)
            self.moves[home] = move if before is None else jax.tree.map(jnp.maximum, before, move)


def _moved_by(args: Any, outs: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """The move of one matmul: its new history, and by how much counts and keys have grown."""
    old, new = moved_state(args, outs, params)
    move = {name: x - old[name] for name, x in new.items() if name != HISTORY}
    if HISTORY in new:
        is_new = jnp.any(new[HISTORY] != old[HISTORY], axis=(-2, -1), keepdims=True)
        move[HISTORY] = jnp.where(is_new, new[HISTORY], 0)
        # In a step with an infinity or a NaN `bad` grows, and the history stays.
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


def _with_homes(jaxpr: Any, homes: Sequence[Hashable], carry: range) -> Any:
    """Gives a jaxpr the homes of those states that its matmuls move, and that it drops or carries.

    If `nnx.merge` makes the model in the body, these states are inputs of the body.

    Args:
      carry: Which inputs a scan carries from one iteration to the next.
    """
    home_of = dict(zip(jaxpr.invars, homes, strict=True))
    reads = [x for eqn in jaxpr.eqns for x in eqn.invars] + list(jaxpr.outvars)
    uses = Counter(x for x in reads if not hasattr(x, "val"))
    places = {jaxpr.invars[i]: i - carry.start for i in carry}
    found: dict[int, Hashable] = {}
    runs: dict[_Carried, list[int]] = {}  # of each state; in the second it is the new one
    for i, eqn in enumerate(jaxpr.eqns):
        params = eqn.params
        if eqn.primitive is not recorded_p or params["home"] is not None:
            continue
        count = len(params["names"])
        old, new = eqn.invars[:count], eqn.outvars[-count:]
        if params["is_carried"] and not any(uses[x] for x in new):
            found[i] = None if hasattr(old[0], "val") else home_of.get(old[0])
        elif all(not hasattr(x, "val") and x in places for x in old):
            state = _Carried(params["names"], tuple(places[x] for x in old))
            places |= zip(new, state.places, strict=True)
            runs.setdefault(state, []).append(i)
    for state, of_state in runs.items():
        new = [x for i in of_state for x in jaxpr.eqns[i].outvars[-len(state.names) :]]
        last = [jaxpr.outvars[place] for place in state.places]
        if new[-len(last) :] == last and all(uses[x] == 1 for x in new):
            found |= dict.fromkeys(of_state, state)
    eqns = [
        eqn.replace(params={**eqn.params, "home": found[i]}) if i in found else eqn
        for i, eqn in enumerate(jaxpr.eqns)
    ]
    return jaxpr.replace(eqns=eqns)


def _body(closed: ClosedJaxpr, homes: Sequence[Hashable], carry: range = range(0)) -> Body:
    """A jaxpr as a function that also returns the moves in it."""

    def function(*arrays: Any) -> tuple[list[Any], Moves]:
        moves: Moves = {}
        with set_current_trace(LiftingTrace(moves, [*zip(arrays, homes, strict=True)])):
            jaxpr = _with_homes(closed.jaxpr, homes, carry)
            outs = jax.core.eval_jaxpr(jaxpr, closed.consts, *arrays)
        return list(outs), moves

    return function


def _lifted(
    name: str, args: Any, params: Any, homes: Sequence[Hashable]
) -> tuple[list[Any], Moves]:
    """Runs a loop or `remat` and returns its results, and the moves in it."""
    if name in INLINED:
        return _body(params["jaxpr"], homes)(*args)
    if name == "scan":
        return _scan(args, params, homes)
    shapes: Moves = {}
    if name == "cond":
        homes = homes[1:]
        for closed in params["branches"]:
            shapes |= jax.eval_shape(_body(closed, homes), *args[1:])[1]

    def body_of(closed: ClosedJaxpr) -> Body:
        body = _body(closed, homes)

        def function(*arrays: Any) -> tuple[list[Any], Moves]:
            outs, moves = body(*arrays)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return outs, zeros | moves  # of all branches

        return function

    return run_with_bodies(name, args, params, body_of)


def _scan(args: Any, params: Any, homes: Sequence[Hashable]) -> tuple[list[Any], Moves]:
    fixed, carries = scan_lengths(params)
    carry = range(fixed, fixed + carries)
    stacked = homes[carry.stop :]  # each iteration has the state of its own layer
    homes = [*homes[:fixed], *[None] * carries, *stacked]
    outs, moves = run_with_bodies("scan", args, params, lambda closed: _body(closed, homes, carry))
    lifted: Moves = {}
    for home, move in moves.items():
        if home in stacked:
            lifted[home] = move
            continue
        largest = jax.tree.map(lambda x: jnp.max(x, axis=0, initial=0), move)
        if not isinstance(home, _Carried):
            lifted[home] = largest
            continue
        state = {name: outs[i] for name, i in zip(home.names, home.places, strict=True)}
        after = state_after(state, largest, is_moved=False)
        for name, i in zip(home.names, home.places, strict=True):
            outs[i] = after[name]
    return outs, lifted
