"""The operations of JAX that hold jaxprs: this file alone walks them.

For each it says which jaxprs it runs, and where their operands come from (`bodies_of`); and how it
runs with other matmuls in them (`RULES`). What is planted for matmuls is one more operand of a
body, what is seen of them one more result. What a matmul saw in several runs is merged: the largest
by maximum, totals by addition. A scan that slices a kernel slices what is planted for it, too, and
stacks what is seen of it.

`unrolled` runs a jaxpr operation by operation, and its loops step by step, on values of any kind:
`Domain` says what a value is and what operations do to it.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from qtoolkit.products._lookups import Lookup
from qtoolkit.products._matmul import Key, Matmul, Multiply, Planted
from qtoolkit.products._origins import ACTIVATION, Loop, Origin, Step, origins_after
from qtoolkit.products._taps import Seen
from qtoolkit.scaling import QArray

QUANTIZED_MATMUL = "qtoolkit_product"  # the jitted function around each quantized matmul
_INLINED = ("jit", "pjit", "closed_call", "core_call")
_REMAT = ("checkpoint", "remat", "remat2")
_LOOPS = (*_INLINED, *_REMAT, "scan", "while", "cond", "shard_map")
# Functions whose derivative the user has defined. They stay as they are, because that derivative is
# of exactly this function.
OPAQUE = {
    "custom_vjp_call": "custom_vjp",
    "custom_vjp_call_jaxpr": "custom_vjp",
    "custom_jvp_call": "custom_jvp",
}


class Block(NamedTuple):
    """A jaxpr with what was found in it.

    Attributes:
      at: Where it stands in the program: the numbers of the equations around it.
      matmuls: Those among its equations, by number.
      bodies: The jaxprs in its equations, where these hold matmuls or look-ups.
      casts: The casts of parameters to 16 bits among its equations.
      lookups: The look-ups among its equations, by number.
    """

    jaxpr: Any
    consts: Sequence[Any]
    at: tuple[int, ...]
    matmuls: dict[int, Matmul]
    bodies: dict[int, tuple["Block", ...]]
    casts: frozenset[int]
    lookups: dict[int, Lookup]

    @property
    def all_matmuls(self) -> list[Matmul]:
        found = []
        for number in sorted({*self.matmuls, *self.bodies}):
            if number in self.matmuls:
                found.append(self.matmuls[number])
            for block in self.bodies.get(number, ()):
                found += block.all_matmuls
        return found

    @property
    def all_lookups(self) -> list[Lookup]:
        inner = (block.all_lookups for blocks in self.bodies.values() for block in blocks)
        return [*self.lookups.values(), *itertools.chain.from_iterable(inner)]


# (jaxpr, origins of its inputs, place) to (block, origins of its results)
Find = Callable[[ClosedJaxpr, Sequence[Origin], tuple[int, ...]], tuple[Block, list[Origin]]]


def has_bodies(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in _INLINED and eqn.params.get("name") == QUANTIZED_MATMUL:
        return False
    return name in _LOOPS or bool(jaxprs_in(eqn.params))


def is_opaque(eqn: Any) -> bool:
    """Whether the matmuls inside stay as they are: `OPAQUE`, and what this file does not know."""
    return eqn.primitive.name not in _LOOPS


def bodies_of(
    eqn: Any, inputs: Sequence[Origin], find: Find, look: Find, at: tuple[int, ...]
) -> tuple[list[Block], list[Origin]]:
    """The bodies of an equation, and the origins of its results.

    Args:
      inputs: The origins of its operands.
      find: Finds the matmuls of a jaxpr that stands at a place of the program.
      look: The same for the origins of its results alone.
    """
    params, name = eqn.params, eqn.primitive.name
    if is_opaque(eqn):
        blocks = []
        for which, closed in enumerate(jaxprs_in(params)):
            count = len(closed.jaxpr.invars)
            known = inputs if len(inputs) == count else [ACTIVATION] * count
            blocks.append(find(closed, known, (*at, which))[0])
        return blocks, origins_after(Step.of(eqn), inputs)
    if name == "cond":
        pairs = [
            find(branch, inputs[1:], (*at, which))
            for which, branch in enumerate(params["branches"])
        ]
        branches = zip(*(outs for _, outs in pairs), strict=True)
        return [block for block, _ in pairs], [_merged(*same) for same in branches]
    if name == "scan":
        _, consts, first, sliced = _parts(params, inputs)
        loop = Loop(at, params["length"])
        xs = [x.sliced(loop) for x in sliced]
        carry = _carried(look, params["jaxpr"], consts, first, xs)
        block, outs = find(params["jaxpr"], [*consts, *carry, *xs], at)
        carries = len(carry)
        return [block], [*outs[:carries], *(x.stacked(loop) for x in outs[carries:])]
    if name == "while":
        of_test, of_step, first, _ = _parts(params, inputs)
        carry = _carried(look, params["body_jaxpr"], of_step, first, [])
        test, _ = find(params["cond_jaxpr"], [*of_test, *carry], (*at, 0))
        step, outs = find(params["body_jaxpr"], [*of_step, *carry], (*at, 1))
        return [test, step], [x._replace(is_trained=False) for x in outs]
    (closed,) = jaxprs_in(params)
    block, outs = find(closed, inputs, at)
    return [block], outs


def jaxprs_in(params: Mapping[str, Any]) -> list[ClosedJaxpr]:
    """The jaxprs among the parameters of an equation, alone or in lists."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if hasattr(item, "eqns") or hasattr(getattr(item, "jaxpr", None), "eqns"):
                found.append(item if hasattr(item, "consts") else ClosedJaxpr(item, ()))
    return found


def _parts(params: Mapping[str, Any], operands: Sequence[Any]) -> list[list[Any]]:
    """The operands of a loop: constants of its test and of a step, what it carries and slices."""
    if "cond_nconsts" in params:
        counts = params["cond_nconsts"], params["body_nconsts"], len(operands)
    elif "ft_in" in params:  # jax 0.12: three trees of consts, carry and xs
        consts, carry, _ = params["ft_in"].unpack()
        counts = 0, len(consts), len(carry)
    else:
        counts = 0, params["num_consts"], params["num_carry"]
    rest = iter(operands)
    return [*([*itertools.islice(rest, count)] for count in counts), [*rest]]


def _merged(*origins: Origin) -> Origin:
    first, *others = origins
    for other in others:
        first = first.merged(other)
    return first


def _carried(
    look: Find,
    body: ClosedJaxpr,
    consts: Sequence[Origin],
    carry: Sequence[Origin],
    xs: Sequence[Origin],
) -> list[Origin]:
    """The origins of what a loop carries: what holds before its first step and after each one."""
    carry = list(carry)
    while True:
        _, after = look(body, [*consts, *carry, *xs], ())
        merged = [_merged(*pair) for pair in zip(carry, after, strict=False)]
        if merged == carry:
            return carry
        carry = merged


def runs_of(eqn: Any) -> int:
    """How often the jaxprs in an equation run; 1 if that is not known: in `lax.while_loop`."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    if eqn.primitive.name == "shard_map":
        sizes = eqn.params["mesh"].shape
        return math.prod(sizes[axis] for axis in _manual_axes(eqn.params))
    return 1


def _manual_axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(params.get("manual_axes", params.get("newly_manual_axes", ())))


def merge(first: dict[Key, Seen], second: Mapping[Key, Seen]) -> dict[Key, Seen]:
    for key, (largest, total) in second.items():
        if key in first:
            largest = jax.tree.map(jnp.maximum, first[key].largest, largest)
            total = jax.tree.map(jnp.add, first[key].total, total)
        first[key] = Seen(largest, total)
    return first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cast:
    """A parameter that was cast to 16 bits, with the original, on its way into a body."""

    array: Any
    original: Any


Ran = tuple[list[Any], dict[Key, Seen]]


class Inner(NamedTuple):
    """The bodies of an equation, as functions that also return what their matmuls saw."""

    evaluate: Callable[..., Ran]  # a block with its arguments, `multiply` and what is planted
    blocks: tuple[Block, ...]
    multiply: Multiply
    planted: Mapping[Key, Planted]

    def run(
        self,
        args: Sequence[Any],
        planted: Mapping[Key, Planted] | None = None,
        which: int = 0,
    ) -> Ran:
        given = self.planted if planted is None else planted
        return self.evaluate(self.blocks[which], args, self.multiply, given)

    def nothing(self, which: int, args: Sequence[Any]) -> dict[Key, Seen]:
        """Zeros like what a body sees, for a branch that did not run, a loop that has not begun."""
        types = jax.eval_shape(lambda args: self.run(args, which=which)[1], list(args))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)


def _inlined(inner: Inner, params: Mapping[str, Any], args: Sequence[Any]) -> Ran:
    return inner.run(args)


def _remat(inner: Inner, params: Mapping[str, Any], args: Sequence[Any]) -> Ran:
    options = {name: params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(lambda *args: inner.run(args), **options)(*args)


def _cond(inner: Inner, params: Mapping[str, Any], args: Sequence[Any]) -> Ran:
    index, *rest = args
    numbers = range(len(inner.blocks))
    nothing: dict[Key, Seen] = {}
    for which in numbers:
        nothing |= inner.nothing(which, rest)

    def branch(which: int, *args: Any) -> Ran:
        outs, seen = inner.run(args, which=which)
        return outs, nothing | seen

    branches = [lambda *args, which=which: branch(which, *args) for which in numbers]
    ran: Ran = lax.switch(index, branches, *rest)
    return ran


def _scan(inner: Inner, params: Mapping[str, Any], args: Sequence[Any]) -> Ran:
    (body,), (_, consts, first, whole) = inner.blocks, _parts(params, args)
    carry, xs, carries = [*map(array_of, first)], [*map(_sliceable, whole)], len(first)
    # A scan over layers gives each layer its own part of what is planted for the stack.
    sliced = {
        matmul.key
        for matmul in body.all_matmuls
        if any(loop.at == body.at for loop in matmul.loops)
        and matmul.key in inner.planted
        and inner.planted[matmul.key].lead
    }
    stacked = {key: inner.planted[key].arrays for key in sliced}

    def step(carry: Any, x: Any) -> Any:
        xs, own = x
        planted = dict(inner.planted)
        for key, arrays in own.items():
            planted[key] = Planted(arrays, planted[key].shared, planted[key].lead - 1)
        outs, seen = inner.run([*consts, *carry, *xs], planted)
        return outs[:carries], (outs[carries:], seen)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, (ys, seen) = lax.scan(step, carry, (xs, stacked), **options)
    return [*last, *ys], {
        key: x if key in sliced else Seen(*_over_steps(x)) for key, x in seen.items()
    }


def _over_steps(seen: Seen) -> tuple[Any, Any]:
    """What all steps of a scan saw together. Histories are totals."""
    return (
        jax.tree.map(lambda x: jnp.max(x, 0, initial=0), seen.largest),
        jax.tree.map(lambda x: jnp.sum(x, 0), seen.total),
    )


def _sliceable(x: Any) -> Any:
    """What a scan slices along its first axis: codes if each slice has scales of its own.

    Slices of other stored parameters would tear blocks apart or lack a scale: these are arrays.
    """
    if isinstance(x, QArray):
        shares_scale = x.tensor_scale is not None and x.tensor_scale.ndim == 0
        if x.ndim < 2 or x.blocks.lengths[0] != 1 or shares_scale:
            return x.dequantize()
    return x


def array_of(x: Any) -> Any:
    return x.array if isinstance(x, Cast) else x.dequantize() if isinstance(x, QArray) else x


def _while(inner: Inner, params: Mapping[str, Any], args: Sequence[Any]) -> Ran:
    of_test, of_step, first, _ = _parts(params, args)
    carry = [*map(array_of, first)]

    def step(state: Any) -> Any:
        carry, seen = state
        outs, own = inner.run([*of_step, *carry], which=1)
        return outs, merge(dict(seen), own)

    def goes_on(state: Any) -> Any:
        return inner.run([*of_test, *state[0]], which=0)[0][0]

    ran: Ran = lax.while_loop(goes_on, step, (carry, inner.nothing(1, [*of_step, *carry])))
    return ran


def _shard_map(inner: Inner, params: Mapping[str, Any], args: Sequence[Any]) -> Ran:
    names, keys = _manual_axes(params), list(inner.planted)

    def body(planted: Any, *args: Any) -> Any:
        outs, seen = inner.run(args, dict(zip(keys, planted, strict=True)))
        # The shards share one state.
        largest = jax.tree.map(
            lambda x: lax.pmax(x, names), {k: x.largest for k, x in seen.items()}
        )
        total = jax.tree.map(lambda x: lax.psum(x, names), {k: x.total for k, x in seen.items()})
        return outs, {key: Seen(largest[key], total[key]) for key in seen}

    everywhere = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(everywhere, *params["in_specs"]),
        out_specs=(list(params["out_specs"]), everywhere),
        check_vma=params["check_vma"],
        axis_names=set(names),
    )
    ran: Ran = sharded([inner.planted[key] for key in keys], *map(array_of, args))
    return ran


RULES: dict[str, Callable[[Inner, Mapping[str, Any], Sequence[Any]], Ran]] = {
    **dict.fromkeys(_INLINED, _inlined),
    **dict.fromkeys(_REMAT, _remat),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "shard_map": _shard_map,
}


V = TypeVar("V")
Body = Callable[[Sequence[V]], list[V]]


class Domain(Protocol[V]):
    """Values, and what operations without bodies do to them."""

    def constant(self, array: Any) -> V: ...

    def computed(self, eqn: Any, inputs: list[V]) -> list[V]: ...

    def sliced(self, value: V, step: int) -> V:
        """What one step of a scan gets of a value that it goes over."""

    def stacked(self, values: Sequence[V]) -> V:
        """The results of all steps of a scan, as one value."""

    def chosen(self, index: V, bodies: Sequence[Body[V]], inputs: Sequence[V]) -> list[V]:
        """The results of the body that the value `index` names."""

    def stepped(
        self, test: V, body: Body[V], consts: Sequence[V], carry: Sequence[V]
    ) -> list[V] | None:
        """What a `while` carries after its next step; None if the value `test` says to end."""


def unrolled(domain: Domain[V], closed: Any, inputs: Sequence[V]) -> list[V]:
    """The results of a jaxpr."""
    jaxpr = closed.jaxpr
    env: dict[Any, V] = dict(zip(jaxpr.invars, inputs, strict=True))
    env |= {v: domain.constant(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
    remaining = Counter(a for eqn in jaxpr.eqns for a in eqn.invars if not isinstance(a, Literal))
    remaining.update(a for a in jaxpr.outvars if not isinstance(a, Literal))

    def read(atom: Any) -> V:
        if isinstance(atom, Literal):
            return domain.constant(atom.val)
        remaining[atom] -= 1
        # Arrays are freed after their last use.
        return env[atom] if remaining[atom] else env.pop(atom)

    for eqn in jaxpr.eqns:
        outs = _computed(domain, eqn, [read(atom) for atom in eqn.invars])
        env.update((v, out) for v, out in zip(eqn.outvars, outs, strict=True) if remaining[v])
    return [read(atom) for atom in jaxpr.outvars]


def _computed(domain: Domain[V], eqn: Any, inputs: list[V]) -> list[V]:
    name, params = eqn.primitive.name, eqn.params

    def body(closed: Any) -> Body[V]:
        return lambda inputs: unrolled(domain, closed, inputs)

    if name in (*_INLINED, *_REMAT, *OPAQUE):
        return body(jaxprs_in(params)[0])(inputs)
    if name == "scan":
        return _scanned(domain, params, inputs)
    if name == "cond":
        return domain.chosen(inputs[0], [body(branch) for branch in params["branches"]], inputs[1:])
    if name != "while":
        return domain.computed(eqn, inputs)
    of_test, of_step, carry, _ = _parts(params, inputs)
    test, step = body(params["cond_jaxpr"]), body(params["body_jaxpr"])
    while True:
        after = domain.stepped(test([*of_test, *carry])[0], step, of_step, carry)
        if after is None:
            return carry
        carry = after


def _scanned(domain: Domain[V], params: Any, inputs: list[V]) -> list[V]:
    _, consts, carry, stacked = _parts(params, inputs)
    steps: list[list[V]] = [[] for _ in range(params["length"])]
    order = range(params["length"])
    for i in reversed(order) if params["reverse"] else order:
        each = [domain.sliced(value, i) for value in stacked]
        outs = unrolled(domain, params["jaxpr"], [*consts, *carry, *each])
        carry, steps[i] = outs[: len(carry)], outs[len(carry) :]
    return [*carry, *(domain.stacked(values) for values in zip(*steps, strict=True))]
