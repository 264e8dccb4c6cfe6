"""A model run operation by operation over all batches at once, with its kernels in view.

Post-training methods need the inputs of every matmul, those of layers inside of `scan`, `jit` and
`checkpoint` too, each kernel of a stack by itself; and later layers are to see what earlier ones
became. So the traced model is run for all batches in lockstep (`unrolled`), and `visit` is called
where a parameter is multiplied. `_channels` follows what lies between.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.post_training._channels import Key, Link, Node, Origin, Root, Value, following
from qtoolkit.products.internal import Body, unrolled
from qtoolkit.scaling.internal import Contraction

Array = jax.Array


class Use(NamedTuple):
    """A matmul of activations and a kernel.

    Attributes:
      key: The kernel.
      how: The axes of the kernel, of one of a stack.
      kernel: Its value.
      node: Its inputs, in the graph.
      source: The kernel, in the graph.
      inputs: How rows are made of the inputs, to tell equal ones.
      rows: The inputs of one batch, [..., rows, channels], in the order that `how` says.
      sizes: For `ragged_dot` the numbers of rows of the kernels; else None.
      batches: How many batches there are.
    """

    key: Key
    how: Contraction
    kernel: Array
    node: Node
    source: Node
    inputs: Any
    rows: Callable[[int], Array]
    sizes: Callable[[int], Array] | None
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
    for value in unrolled(_Lockstep(visit), closed, inputs):
        value.node.users.append(Link())


class _Lockstep(NamedTuple):
    """Values of all batches at once, see `Domain`."""

    visit: Visit

    def constant(self, array: Any) -> Value:
        return Value((array,), Node())

    def computed(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
            inputs, root = self._visited(name, eqn.params, inputs)
            outs = [Value(arrays, Node()) for arrays in _bound(eqn, inputs)]
            if root is not None:
                key, axis, source = root
                roots = (Root(key, axis, outs[0].node, source),)
                outs[0].node.roots |= {"divide": roots, "rotate": roots}
            return outs
        arrays = _bound(eqn, inputs)
        if name == "copy" or (name == "convert_element_type" and _is_cast(eqn)):
            # The same place in the graph.
            return [Value(arrays[0], inputs[0].node, inputs[0].origin)]
        if name == "transpose" and inputs[0].origin is not None:
            key, places = inputs[0].origin
            order = tuple(places[axis] for axis in eqn.params["permutation"])
            return [Value(arrays[0], inputs[0].node, Origin(key, order))]
        node = following(eqn, inputs)
        return [Value(out, node) for out in arrays]

    def sliced(self, value: Value, step: int) -> Value:
        arrays = tuple(array[step] for array in value.arrays)
        origin = value.origin
        if origin is None or origin.order[:1] != (0,):
            value.node.users.append(Link())
            return Value(arrays, Node())
        (name, index), order = origin
        key, rest = (name, (*index, step)), tuple(axis - 1 for axis in order[1:])
        return Value(arrays, Node(stack=value.node), Origin(key, rest))

    def stacked(self, values: Sequence[Value]) -> Value:
        count = max(len(value.arrays) for value in values)
        for value in values:
            value.node.users.append(Link())
        rows = (jnp.stack([value.of_batch(i) for value in values]) for i in range(count))
        return Value(tuple(rows), Node())

    def chosen(
        self, index: Value, bodies: Sequence[Body[Value]], inputs: Sequence[Value]
    ) -> list[Value]:
        choices = [int(i) for i in index.arrays]
        return _of_choices(choices, dict(enumerate(bodies)), inputs)

    def stepped(
        self, test: Value, body: Body[Value], consts: Sequence[Value], carry: Sequence[Value]
    ) -> list[Value] | None:
        flags = [bool(flag) for flag in test.arrays]
        return _of_choices(flags, {True: body}, [*consts, *carry], carry) if any(flags) else None

    def _visited(
        self, name: str, params: Any, inputs: list[Value]
    ) -> tuple[list[Value], tuple[Key, int, Node] | None]:
        """The operands of a matmul after a visit, and which parameter writes its last axis."""
        sides = [side for side in (0, 1) if inputs[side].origin is not None]
        if len(sides) != 1 or (name != "dot_general" and sides != [1]):
            for value in inputs:
                value.node.users.append(Link())
            return inputs, None
        side = sides[0]
        kernel, x = inputs[side], inputs[1 - side]
        kernel.node.users.append(Link())
        assert kernel.origin is not None
        key, order = kernel.origin
        if name == "dot_general":
            matching = _of_dot(params, side, order)
        elif name == "conv_general_dilated":
            matching = _of_conv(params, order, kernel.arrays[0].shape)
        else:
            matching = _of_ragged(params, order)
        x.node.users.append(Link(key if _sums_features(name, params, side, inputs) else None))
        if matching is None:
            return inputs, None
        how, signature, arranged = matching
        if name == "ragged_dot_general":
            signature = signature, inputs[2].node  # the sizes say which rows are whose

        back = sorted(range(len(order)), key=order.__getitem__)
        array = lax.transpose(kernel.arrays[0], back)
        ragged = inputs[2] if name == "ragged_dot_general" else None
        count = max(len(x.arrays), 1 if ragged is None else len(ragged.arrays))
        sizes = None if ragged is None else ragged.of_batch
        new = self.visit(
            Use(
                key, how, array, x.node, kernel.node, signature,
                lambda i: arranged(x.of_batch(i)), sizes, count,
            )
        )  # fmt: skip
        if new is not None:
            turned = lax.transpose(new.astype(array.dtype), order)
            inputs = list(inputs)
            inputs[side] = kernel._replace(arrays=(turned,))
        columns = [axis for axis in range(len(order)) if axis not in (*how.contracted, *how.batch)]
        is_last = name == "dot_general" or (
            how.groups == 1 and not how.batch and _is_last(params["dimension_numbers"].out_spec)
        )
        writes = len(columns) == 1 and side == 1 and not how.batch and is_last
        return inputs, (key, columns[0], kernel.node) if writes else None


def _bound(eqn: Any, inputs: Sequence[Value]) -> list[tuple[Any, ...]]:
    """The results of an operation, each for all batches or for each."""
    params = eqn.primitive.get_bind_params(eqn.params)
    count = max((len(value.arrays) for value in inputs), default=1)
    rows = []
    for i in range(count):
        out = eqn.primitive.bind(*(value.of_batch(i) for value in inputs), **params)
        rows.append(out if eqn.primitive.multiple_results else [out])
    return list(zip(*rows, strict=True))


def _of_choices(
    choices: Sequence[Any],
    bodies: Mapping[Any, Body[Value]],
    inputs: Sequence[Value],
    others: Sequence[Value] = (),
) -> list[Value]:
    """The results of the body that each batch chose; those of `others` if it chose none."""
    if len(set(choices)) == 1:
        return bodies[choices[0]](inputs)
    for value in (*inputs, *others):  # no root is known of what is taken apart
        value.node.users.append(Link())
    rows = [[value.of_batch(i) for value in others] for i in range(len(choices))]
    for choice, body in bodies.items():
        some = [i for i, other in enumerate(choices) if other == choice]
        own = [
            x if len(x.arrays) == 1 else Value(tuple(x.arrays[i] for i in some), Node())
            for x in inputs
        ]
        outs = body(own) if some else []
        for place, i in enumerate(some):
            rows[i] = [out.of_batch(place) for out in outs]
    return [Value(arrays, Node()) for arrays in zip(*rows, strict=True)]


def _is_cast(eqn: Any) -> bool:
    """Whether it changes a dtype of 16 bits or more to another; less is a rounding that counts."""
    dtypes = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return all(jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).bits >= 16 for d in dtypes)


def _sums_features(name: str, params: Any, side: int, inputs: Sequence[Value]) -> bool:
    """Whether a matmul sums over the last axis of its inputs alone.

    Only then do factors for the channels of the kernel lie along the axis that roots divide: not in
    a product over tokens, and not where a convolution reads several places.
    """
    last = inputs[1 - side].arrays[0].ndim - 1
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        return tuple(contracted[1 - side]) == (last,) and not batch[side]
    if name == "ragged_dot_general":
        return False
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
    last, first = tuple(b for _, b in summed), tuple(b for _, b in apart)

    def arranged(x: Array) -> Array:
        rest = [axis for axis in range(x.ndim) if axis not in (*first, *last)]
        y = lax.transpose(x, (*first, *rest, *last))
        lead = y.shape[: len(first)]
        return y.reshape(*lead, -1, math.prod(x.shape[axis] for axis in last))

    return how, (first, last), arranged


def _of_ragged(params: Any, order: tuple[int, ...]) -> Any:
    """The same of `jax.lax.ragged_dot`, whose rows belong to one kernel after the other."""
    numbers = params["ragged_dot_dimension_numbers"]
    ((of_x, of_kernel), batch) = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    is_usual = tuple(of_x) == (1,) and tuple(batch) == ((), ()) and len(of_kernel) == 1
    if not is_usual or len(groups) != 1 or tuple(numbers.lhs_ragged_dimensions) != (0,):
        return None
    how = Contraction((order[of_kernel[0]],), (order[groups[0]],))
    return how, "ragged", lambda x: x


def _of_conv(params: Any, order: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """The same of a convolution, whose inputs are patches; None if batches are in groups."""
    if params["batch_group_count"] != 1:
        return None
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    _, channels, *places = numbers.rhs_spec
    places_ = tuple(order[axis] for axis in places)
    how = Contraction((*places_, order[channels]), (), groups, places_)
    sizes = [shape[axis] for axis in places]
    options = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    signature = (groups, tuple(sizes), numbers.lhs_spec, *(params[name] for name in options))

    def arranged(x: Array) -> Array:
        first, features, *axes = numbers.lhs_spec
        interior = [dilation - 1 for dilation in params["lhs_dilation"]]
        pads = [(*ends, n) for ends, n in zip(params["padding"], interior, strict=True)]
        x = lax.transpose(x, (first, *axes, features))
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
        strides, steps = (1, *params["window_strides"], 1), params["rhs_dilation"]
        taps = []  # slices: XLA's CPU is slow at convolutions in groups, which JAX's patches are
        for tap in np.ndindex(*sizes):
            starts = [i * step for i, step in zip(tap, steps, strict=True)]
            rest = [(n - 1 - i) * step for n, i, step in zip(sizes, tap, steps, strict=True)]
            ends = [n - m for n, m in zip(x.shape[1:-1], rest, strict=True)]
            taps.append(lax.slice(x, (0, *starts, 0), (len(x), *ends, x.shape[-1]), strides))
        y = jnp.stack(taps, -2)
        if groups == 1:
            return y.reshape(-1, len(taps) * x.shape[-1])
        y = y.reshape(-1, len(taps), groups, x.shape[-1] // groups)
        return jnp.moveaxis(y, 2, 0).reshape(groups, len(y), -1)

    return how, signature, arranged
