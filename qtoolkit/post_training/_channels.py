"""Which parameters write the channels of a value, and which kernels read them.

A graph of one run of a model. Post-training methods divide the channels that a kernel reads by
factors, or rotate them. Where only parameters write these channels, and only kernels read them, the
parameters can be changed instead: the model computes the same, and its inputs need no work.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

Array = jax.Array
Key = tuple[Any, tuple[int, ...]]  # the name of a parameter, and which kernel of a stack
KINDS = ("divide", "rotate", "gain")


class Root(NamedTuple):
    """A parameter that writes channels: its `axis` is that of the channels.

    `node` is that of the parameter, or, of a kernel, that of the result of its matmul. `source` is
    that of the parameter.
    """

    key: Key
    axis: int
    node: "Node"
    source: "Node"

    @property
    def is_own(self) -> bool:
        """Whether the parameter is used in no other way than through `node`."""
        is_plain = self.node is self.source and not self.source.is_used_as_stack
        return is_plain or self.source.is_used_once


class Link(NamedTuple):
    """What uses a value: a node that is computed from it, the key of a kernel that sums over its
    last axis, or None for anything else. `kinds` are those of the roots that the node takes over.
    """

    to: "Node | Key | None" = None
    kinds: frozenset[str] = frozenset()


class Node:
    """A value as a place in the graph.

    Attributes:
      roots: By kind. "divide": dividing all of these by a factor for each channel divides the
        value's last axis by it, and the value alone decides on nothing else. "rotate": likewise, to
        multiply the last axis by a matrix. "gain": the value is this vector, times a number for
        each row. Empty if there are none.
      gains: The vectors by which channels were multiplied after the roots to rotate wrote them.
        These must be ones before the roots are rotated.
      users: What uses it.
      stack: Of one step's part of what a scan goes over, the whole.
      is_even: Whether its last axis was broadcast.
    """

    def __init__(self, stack: "Node | None" = None) -> None:
        self.roots: dict[str, tuple[Root, ...]] = dict.fromkeys(KINDS, ())
        self.gains: tuple[Root, ...] = ()
        self.users: list[Link] = []
        self.stack = stack
        self.is_even = False

    @property
    def is_used_as_stack(self) -> bool:
        return self.stack is not None and bool(self.stack.users)

    @property
    def is_used_once(self) -> bool:
        return len(self.users) == 1 and not self.is_used_as_stack

    def readers(self, kind: str) -> tuple[set[Key], list["Node"]] | None:
        """The kernels that read what the roots at this node write, and the nodes on the way to
        them, this one first; None if anything else reads it.
        """
        keys: set[Key] = set()
        nodes, known = [self], {self}
        for node in nodes:  # the list grows
            if node is not self and not node.roots[kind]:
                continue  # it takes the gain, and passes it no further
            for to, kinds in node.users:
                if to is None:
                    return None
                if not isinstance(to, Node):
                    keys.add(to)
                elif kind in kinds:
                    nodes += [] if to in known else [to]
                    known.add(to)
                elif kind != "rotate" or "square" not in kinds or not to.is_summed:
                    return None  # a rotation leaves the sum of squares as it is
        return keys, nodes

    @property
    def is_summed(self) -> bool:
        """Whether only the sum over its last axis is used."""
        return all("sum" in link.kinds for link in self.users)


class Origin(NamedTuple):
    """Which parameter a value is, and which axis of it lies along each axis of the value."""

    key: Key
    order: tuple[int, ...]


class Value(NamedTuple):
    """Arrays, one for all batches or one for each."""

    arrays: tuple[Any, ...]
    node: Node
    origin: Origin | None = None

    def of_batch(self, i: int) -> Any:
        return self.arrays[i if len(self.arrays) > 1 else 0]


def following(eqn: Any, inputs: Sequence[Value]) -> Node:
    """The node of an operation's result, with its roots; operands get links to it."""
    name, node = eqn.primitive.name, Node()
    links: list[set[str]] = [set() for _ in inputs]
    for kind in KINDS:
        roots = [_roots(value, kind) for value in inputs]
        for i in _passing(kind, eqn, inputs, roots):
            node.roots[kind] += tuple(root for root in roots[i] if root not in node.roots[kind])
            links[i].add(kind)
            if kind == "rotate":
                node.gains += inputs[i].node.gains
    if name == "mul" and node.roots["rotate"]:
        for i, kinds in enumerate(links):
            if "rotate" not in kinds and not _is_even(inputs[i]):
                node.gains += _roots(inputs[i], "gain")
                kinds.add("gain")
    rank = len(eqn.invars[0].aval.shape) if inputs else 0
    if name in ("square", "integer_pow") and eqn.params.get("y", 2) == 2:
        links[0].add("square")
    elif name == "reduce_sum" and tuple(eqn.params["axes"]) == (rank - 1,):
        links[0].add("sum")
    elif name == "gather" and _looks_up_rows(eqn, inputs[0].origin):
        assert inputs[0].origin is not None
        key, order = inputs[0].origin
        node.roots["rotate"] = (Root(key, order[1], node, inputs[0].node),)
        links[0].add("rotate")
    elif name == "broadcast_in_dim":
        places, shape = eqn.params["broadcast_dimensions"], eqn.outvars[0].aval.shape
        node.is_even = len(shape) - 1 not in places or eqn.invars[0].aval.shape[-1] == 1
    for value, kinds in zip(inputs, links, strict=True):
        value.node.users.append(Link(node if kinds else None, frozenset(kinds)))
    return node


def _passing(
    kind: str, eqn: Any, inputs: Sequence[Value], roots: Sequence[tuple[Root, ...]]
) -> Sequence[int]:
    """The operands whose roots are those of the result, too."""
    name, last = eqn.primitive.name, eqn.outvars[0].aval.shape[-1:]
    places = [i for i, x in enumerate(eqn.invars) if roots[i] and x.aval.shape[-1:] == last]
    if not places:
        return ()
    if name in ("reshape", "broadcast_in_dim"):
        return (0,) if 0 in places and _keeps_last(eqn) else ()
    if name == "neg":
        return () if kind == "gain" else (0,)
    if kind == "divide":
        if name in ("add", "sub") and len(places) == 2:
            return places
        is_relu = name == "max" and isinstance(eqn.invars[1], Literal) and eqn.invars[1].val == 0
        return places[:1] if name == "mul" or ((name == "div" or is_relu) and 0 in places) else ()
    if name in ("add", "sub") and kind == "rotate":
        if len(places) == 2 and not any(value.node.gains for value in inputs):
            return places
        return [i for i in places if _is_even(inputs[1 - i]) and _is_zero(inputs[1 - i])]
    if name not in ("mul", "div"):
        return ()
    places = [i for i in places if i == 0 or name == "mul"]

    def scales_rows(value: Value) -> bool:
        is_gain = kind == "rotate" and name == "mul" and bool(_roots(value, "gain"))
        return _is_even(value) or is_gain

    return [i for i in places if scales_rows(inputs[1 - i])][:1]


def _roots(value: Value, kind: str) -> tuple[Root, ...]:
    """The roots of a value; a parameter is one itself. Only vectors can be divided."""
    if value.node.roots[kind] or value.origin is None or not value.origin.order:
        return value.node.roots[kind]
    key, order = value.origin
    is_root = kind == "rotate" or len(order) == 1
    return (Root(key, order[-1], value.node, value.node),) if is_root else ()


def _is_even(value: Value) -> bool:
    """Whether it is one number for each row."""
    shape = np.shape(value.arrays[0])
    return not shape or shape[-1] == 1 or value.node.is_even


def _is_zero(value: Value) -> bool:
    """Whether it is all zeros, as the mean that Flax's RMSNorm subtracts."""
    return value.origin is None and not any(np.any(array) for array in value.arrays)


def _looks_up_rows(eqn: Any, origin: Origin | None) -> bool:
    """Whether it is a lookup of whole rows in a table of parameters."""
    numbers, last = eqn.params["dimension_numbers"], len(eqn.outvars[0].aval.shape) - 1
    if origin is None or len(origin.order) != 2 or tuple(numbers.offset_dims) != (last,):
        return False
    return tuple(eqn.params["slice_sizes"]) == (1, eqn.invars[0].aval.shape[1])


def _keeps_last(eqn: Any) -> bool:
    given, shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if not given or not shape or given[-1] != shape[-1]:
        return False
    is_broadcast = eqn.primitive.name == "broadcast_in_dim"
    return not is_broadcast or eqn.params["broadcast_dimensions"][-1] == len(shape) - 1
