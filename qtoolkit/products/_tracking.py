"""A model run operation by operation over all batches at once, with its kernels in view.

Post-training methods need the inputs of every matmul, those of layers inside of `scan`, `jit` and
`checkpoint` too, each kernel of a stack by itself; and later layers are to see what earlier ones
became. So the traced model is evaluated here, for all batches in lockstep, and `visit` is called
where a parameter is multiplied. What lies between is followed as well: which parameters could be
divided by a factor for each channel of an input, so that nothing else of the model changes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from qtoolkit.scaling.internal import Contraction

Array = jax.Array
Key = tuple[Any, tuple[int, ...]]  # the name of a parameter, and which kernel of a stack
_CALLS = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call"), "call_jaxpr"),
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr"), "call_jaxpr"),
}


class Root(NamedTuple):
    """A parameter that writes channels: its `axis` is that of the channels.

    `node` is that of the parameter, or, of a kernel, that of the result of its matmul. `source` is
    that of the parameter.
    """

    key: Key
    axis: int
    node: "Node"
    source: "Node"

    def is_read_only_by(self, keys: Iterable[Key]) -> bool:
        """Whether only these kernels read what the parameter writes, and nothing else reads it."""
        is_vector = self.node is self.source and not self.source.is_used_as_stack
        return (is_vector or self.source.is_used_once) and self.node.read_by() == set(keys)


class Node:
    """A value as a place in the graph.

    Attributes:
      roots: Dividing all of these by a factor for each channel divides the value's last axis by it,
        and the value alone decides on nothing else. Empty if there are none.
      users: The nodes that are computed from it, and the keys of kernels that it is multiplied by;
        None for anything else.
      stack: Of one step's part of what a scan goes over, the whole.
    """

    def __init__(self, roots: tuple[Root, ...] = (), stack: "Node | None" = None) -> None:
        self.roots = roots
        self.stack = stack
        self.users: list[Node | Key | None] = []

    @property
    def is_used_as_stack(self) -> bool:
        return self.stack is not None and bool(self.stack.users)

    @property
    def is_used_once(self) -> bool:
        return len(self.users) == 1 and not self.is_used_as_stack

    def read_by(self) -> set[Key | None]:
        """The kernels that read what the roots write; None among them for anything else."""
        found: set[Key | None] = set()
        seen, left = {id(self)}, [self]
        while left:
            for user in left.pop().users:
                if not isinstance(user, Node) or not user.roots:
                    found.add(None if isinstance(user, Node) else user)
                elif id(user) not in seen:
                    seen.add(id(user))
                    left.append(user)
        return found


class Origin(NamedTuple):
    """Which parameter a value is, and which axis of it lies along each axis of the value."""

    key: Key
    order: tuple[int, ...]


class Value(NamedTuple):
    """Arrays, one for all batches or one for each."""

    arrays: tuple[Any, ...]
    node: Node
    origin: Origin | None = None


class Use(NamedTuple):
    """A matmul of activations and a kernel.

    Attributes:
      key: The kernel.
      how: The axes of the kernel, of one of a stack.
      kernel: Its value.
      node: Its inputs, in the graph.
      source: The kernel, in the graph.
      rows: The inputs of one batch, [..., rows, channels], in the order that `how` says.
      batches: How many batches there are.
    """

    key: Key
    how: Contraction
    kernel: Array
    node: Node
    source: Node
    rows: Callable[[int], Array]
    batches: int


Visit = Callable[[Use], Array | None]


def tracked(
    function: Callable[..., Any],
    params: Mapping[Any, Array],
    batches: Sequence[Any],
    visit: Visit,
) -> None:
    """Runs `function(arrays, batch)`, with a list of the parameters, for all batches in lockstep.

    Args:
      params: Arrays by name.
      batches: Pytrees of arrays with the same structure, shapes and dtypes.
      visit: Called at each matmul of a parameter; what it returns is used in place of the kernel.
    """
    closed = jax.make_jaxpr(function)(list(params.values()), batches[0])
    inputs = [
        Value((array,), Node(), Origin((name, ()), tuple(range(jnp.ndim(array)))))
        for name, array in params.items()
    ]
    leaves = map(jax.tree.leaves, batches)
    inputs += [Value(arrays, Node()) for arrays in zip(*leaves, strict=True)]
    for value in _Run(visit, len(batches)).evaluated(closed, inputs):
        value.node.users.append(None)


class _Run(NamedTuple):
    visit: Visit
    batches: int

    def evaluated(self, closed: Any, inputs: Sequence[Value]) -> list[Value]:
        jaxpr = closed.jaxpr
        env: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: Value((c,), Node()) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
        left = Counter(a for eqn in jaxpr.eqns for a in eqn.invars if not isinstance(a, Literal))
        left.update(a for a in jaxpr.outvars if not isinstance(a, Literal))

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return Value((atom.val,), Node())
            left[atom] -= 1
            return env[atom] if left[atom] else env.pop(atom)  # arrays are freed after their use

        for eqn in jaxpr.eqns:
            outs = self._computed(eqn, [read(atom) for atom in eqn.invars])
            env.update((v, out) for v, out in zip(eqn.outvars, outs, strict=True) if left[v])
        return [read(atom) for atom in jaxpr.outvars]

    def _computed(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in _CALLS:
            inner = eqn.params.get(_CALLS[name], eqn.params.get("fun_jaxpr"))
            closed = inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())
            return self.evaluated(closed, inputs)
        if name == "scan":
            return self._scanned(eqn.params, inputs)
        if name == "cond" and len({int(i) for i in inputs[0].arrays}) == 1:
            return self.evaluated(eqn.params["branches"][int(inputs[0].arrays[0])], inputs[1:])
        if name in ("dot_general", "conv_general_dilated"):
            inputs, roots = self._visited(name, eqn.params, inputs)
            outs = [Value(arrays, Node()) for arrays in self._bound(eqn, inputs)]
            if roots is not None:
                key, axis, source = roots
                outs[0].node.roots = (Root(key, axis, outs[0].node, source),)
            return outs
        arrays = self._bound(eqn, inputs)
        if name in ("convert_element_type", "copy"):  # the same place in the graph
            return [Value(arrays[0], inputs[0].node, inputs[0].origin)]
        if name == "transpose" and inputs[0].origin is not None:
            key, places = inputs[0].origin
            order = tuple(places[axis] for axis in eqn.params["permutation"])
            return [Value(arrays[0], inputs[0].node, Origin(key, order))]
        node = _following(name, eqn, inputs)
        return [Value(out, node) for out in arrays]

    def _bound(self, eqn: Any, inputs: Sequence[Value]) -> list[tuple[Any, ...]]:
        """The results of an operation, each for all batches or for each."""
        params = eqn.primitive.get_bind_params(eqn.params)
        count = max((len(value.arrays) for value in inputs), default=1)
        rows = []
        for i in range(count):
            arrays = [value.arrays[i if len(value.arrays) > 1 else 0] for value in inputs]
            out = eqn.primitive.bind(*arrays, **params)
            rows.append(out if eqn.primitive.multiple_results else [out])
        return list(zip(*rows, strict=True))

    def _scanned(self, params: Any, inputs: list[Value]) -> list[Value]:
        if "ft_in" in params:  # jax 0.12: three trees of consts, carry and xs
            first, states, _ = (len(part) for part in params["ft_in"].unpack())
        else:
            first, states = params["num_consts"], params["num_carry"]
        second = first + states
        consts, carry, stacked = inputs[:first], inputs[first:second], inputs[second:]
        steps: list[list[Value]] = [[] for _ in range(params["length"])]
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            each = [_at(value, i) for value in stacked]
            outs = self.evaluated(params["jaxpr"], [*consts, *carry, *each])
            carry, steps[i] = outs[: len(carry)], outs[len(carry) :]
        return [*carry, *(_stacked(values) for values in zip(*steps, strict=True))]

    def _visited(
        self, name: str, params: Any, inputs: list[Value]
    ) -> tuple[list[Value], tuple[Key, int, Node] | None]:
        """The operands of a matmul after a visit, and which parameter writes its last axis."""
        sides = [side for side in (0, 1) if inputs[side].origin is not None]
        if len(sides) != 1 or (name != "dot_general" and sides != [1]):
            for value in inputs:
                value.node.users.append(None)
            return inputs, None
        side = sides[0]
        kernel, x = inputs[side], inputs[1 - side]
        kernel.node.users.append(None)
        assert kernel.origin is not None
        key, order = kernel.origin
        if name == "dot_general":
            matching = _of_dot(params, side, order)
        else:
            matching = _of_conv(params, order, kernel.arrays[0].shape)
        x.node.users.append(key if _sums_features(name, params, side, inputs) else None)
        if matching is None:
            return inputs, None
        how, arranged = matching

        def rows(i: int) -> Array:
            return arranged(x.arrays[i if len(x.arrays) > 1 else 0])

        back = sorted(range(len(order)), key=order.__getitem__)
        array = lax.transpose(kernel.arrays[0], back)
        new = self.visit(Use(key, how, array, x.node, kernel.node, rows, len(x.arrays)))
        if new is not None:
            turned = lax.transpose(new.astype(array.dtype), order)
            inputs = list(inputs)
            inputs[side] = kernel._replace(arrays=(turned,))
        kept = [axis for axis in range(len(order)) if axis not in (*how.contracted, *how.batch)]
        is_last = name == "dot_general" or _is_last(params["dimension_numbers"].out_spec)
        writes = len(kept) == 1 and side == 1 and not how.batch and is_last
        return inputs, (key, kept[0], kernel.node) if writes else None


def _sums_features(name: str, params: Any, side: int, inputs: Sequence[Value]) -> bool:
    """Whether a matmul sums over the last axis of its inputs alone.

    Only then do factors for the channels of the kernel lie along the axis that roots divide: not in
    a product over tokens, and not where a convolution reads several places.
    """
    last = inputs[1 - side].arrays[0].ndim - 1
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        return tuple(contracted[1 - side]) == (last,) and not batch[side]
    numbers = params["dimension_numbers"]
    places = [inputs[side].arrays[0].shape[axis] for axis in numbers.rhs_spec[2:]]
    return params["feature_group_count"] == 1 and _is_last(numbers.lhs_spec) and set(places) <= {1}


def _is_last(spec: tuple[int, ...]) -> bool:
    """Whether the features of a convolution's operand or result lie along its last axis."""
    return spec[1] == len(spec) - 1


def _of_dot(params: Any, side: int, order: tuple[int, ...]) -> Any:
    """The axes of the kernel, and how inputs are arranged in the same order."""
    contracted, batch = params["dimension_numbers"]

    def pairs(axes: Any) -> list[tuple[int, int]]:
        return sorted((order[a], b) for a, b in zip(axes[side], axes[1 - side], strict=True))

    summed, apart = pairs(contracted), pairs(batch)
    how = Contraction(tuple(a for a, _ in summed), tuple(a for a, _ in apart))
    last, first = [b for _, b in summed], [b for _, b in apart]

    def arranged(x: Array) -> Array:
        rest = [axis for axis in range(x.ndim) if axis not in (*first, *last)]
        y = lax.transpose(x, (*first, *rest, *last))
        lead = y.shape[: len(first)]
        return y.reshape(*lead, -1, math.prod(x.shape[axis] for axis in last))

    return how, arranged


def _of_conv(params: Any, order: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """The same of a convolution, whose inputs are patches; None if it has groups."""
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    numbers = params["dimension_numbers"]
    _, *summed = numbers.rhs_spec  # channels, then places
    places = tuple(order[axis] for axis in summed)
    ranks = sorted(range(len(places)), key=places.__getitem__)
    how = Contraction(tuple(sorted(places)))

    def arranged(x: Array) -> Array:
        sizes = [shape[axis] for axis in summed[1:]]
        first, features, *places = numbers.lhs_spec
        interior = [dilation - 1 for dilation in params["lhs_dilation"]]
        pads = [(*ends, n) for ends, n in zip(params["padding"], interior, strict=True)]
        x = lax.transpose(x, (first, *places, features))
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
        strides, steps = (1, *params["window_strides"], 1), params["rhs_dilation"]
        taps = []  # slices: XLA's CPU is slow at convolutions in groups, which JAX's patches are
        for tap in np.ndindex(*sizes):
            starts = [i * step for i, step in zip(tap, steps, strict=True)]
            rest = [(n - 1 - i) * step for n, i, step in zip(sizes, tap, steps, strict=True)]
            ends = [n - m for n, m in zip(x.shape[1:-1], rest, strict=True)]
            taps.append(lax.slice(x, (0, *starts, 0), (len(x), *ends, x.shape[-1]), strides))
        y = jnp.stack(taps, -1).reshape(-1, x.shape[-1], *sizes)
        return lax.transpose(y, (0, *(1 + rank for rank in ranks))).reshape(len(y), -1)

    return how, arranged


def _following(name: str, eqn: Any, inputs: list[Value]) -> Node:
    """The node of a result, with what still divides its last axis."""
    shape = eqn.outvars[0].aval.shape
    roots = [_roots(value, shape) for value in inputs]
    new: tuple[Root, ...] = ()
    chosen: list[int] = []
    match name:
        case "mul":
            chosen = [i for i in (0, 1) if roots[i]][:1]
        case "div":
            chosen = [0] if roots[0] else []
        case "add" | "sub" if all(roots):
            chosen = [0, 1]
        case "max" if roots[0] and isinstance(eqn.invars[1], Literal) and eqn.invars[1].val == 0:
            chosen = [0]
        case "neg" | "reshape" | "broadcast_in_dim":
            chosen = [0] if inputs and roots[0] and _keeps_last(name, eqn, shape) else []
    for i in chosen:
        new += tuple(root for root in roots[i] if root not in new)
    node = Node(new)
    for i, value in enumerate(inputs):
        value.node.users.append(node if i in chosen else None)
    return node


def _roots(value: Value, shape: tuple[int, ...]) -> tuple[Root, ...]:
    """What divides the last axis of a value; a vector of parameters divides itself."""
    if value.node.roots:
        return value.node.roots
    if value.origin is None or value.arrays[0].ndim != 1:
        return ()
    return (Root(value.origin.key, 0, value.node, value.node),)


def _keeps_last(name: str, eqn: Any, shape: tuple[int, ...]) -> bool:
    given = eqn.invars[0].aval.shape
    if not given or not shape or given[-1] != shape[-1]:
        return False
    return name != "broadcast_in_dim" or (eqn.params["broadcast_dimensions"][-1] == len(shape) - 1)


def _at(value: Value, i: int) -> Value:
    """One step's part of what a scan goes over."""
    arrays = tuple(array[i] for array in value.arrays)
    origin = value.origin
    if origin is None or origin.order[:1] != (0,):
        value.node.users.append(None)
        return Value(arrays, Node())
    (name, index), order = origin
    key, rest = (name, (*index, i)), tuple(axis - 1 for axis in order[1:])
    return Value(arrays, Node(stack=value.node), Origin(key, rest))


def _stacked(values: Sequence[Value]) -> Value:
    count = max(len(value.arrays) for value in values)
    for value in values:
        value.node.users.append(None)
    rows = (
        jnp.stack([value.arrays[i if len(value.arrays) > 1 else 0] for value in values])
        for i in range(count)
    )
    return Value(tuple(rows), Node())
