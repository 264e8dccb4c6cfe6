"""A jaxpr run operation by operation, and its loops step by step, on values of any kind.

`Domain` says what a value is and what operations do to it. This file knows where they go: into the
bodies of calls and of functions with a derivative of their own, and through loops, in the order in
which JAX runs them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from jax.extend.core import ClosedJaxpr, Literal

from qtoolkit.products.internal import scan_lengths

V = TypeVar("V")
# Computes one of the bodies of an operation.
Body = Callable[[Sequence[V]], list[V]]
_CALLS = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call"), "call_jaxpr"),
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr"), "call_jaxpr"),
}


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

    if name in _CALLS:
        inner = params.get(_CALLS[name], params.get("fun_jaxpr"))
        return body(inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ()))(inputs)
    if name == "scan":
        return _scanned(domain, params, inputs)
    if name == "cond":
        return domain.chosen(inputs[0], [body(branch) for branch in params["branches"]], inputs[1:])
    if name != "while":
        return domain.computed(eqn, inputs)
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = inputs[:first], inputs[first : first + second]
    carry, test, step = inputs[first + second :], body(params["cond_jaxpr"]), params["body_jaxpr"]
    while True:
        after = domain.stepped(test([*of_cond, *carry])[0], body(step), of_body, carry)
        if after is None:
            return carry
        carry = after


def _scanned(domain: Domain[V], params: Any, inputs: list[V]) -> list[V]:
    first, carries = scan_lengths(params)
    second = first + carries
    consts, carry, stacked = inputs[:first], inputs[first:second], inputs[second:]
    steps: list[list[V]] = [[] for _ in range(params["length"])]
    order = range(params["length"])
    for i in reversed(order) if params["reverse"] else order:
        each = [domain.sliced(value, i) for value in stacked]
        outs = unrolled(domain, params["jaxpr"], [*consts, *carry, *each])
        carry, steps[i] = outs[: len(carry)], outs[len(carry) :]
    return [*carry, *(domain.stacked(values) for values in zip(*steps, strict=True))]
