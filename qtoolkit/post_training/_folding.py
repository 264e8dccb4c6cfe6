"""Factors and rotations of the inputs of kernels, put into parameters where that is exact.

Where it is not, the kernel keeps them: its matmul divides and rotates the inputs.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import exact_float32
from qtoolkit.formats import BlockFormat
from qtoolkit.post_training._channels import Key, Node, Root
from qtoolkit.post_training._tracking import Use
from qtoolkit.products import Operand
from qtoolkit.products.internal import Axes, listed, rounding_of, warn
from qtoolkit.scaling import Hessian
from qtoolkit.scaling.internal import (
    Contraction,
    InputTransform,
    awq_factors,
    check_inputs,
    smoothing_factors,
)

Array = jax.Array
Params = dict[str, Array]
Transforms = dict[str, InputTransform]
# The longest block of a rotation. One that stays explicit takes log2(block) additions per input.
_LONGEST = 128


class Readers(NamedTuple):
    """The kernels that read the same inputs in the same way.

    Attributes:
      node: The inputs, in the graph.
      uses: The matmuls by kernel, without their inputs.
      hessian: The sums over the inputs, if they are needed.
    """

    node: Node
    uses: dict[Key, Use]
    hessian: Hessian | None


class Graph(NamedTuple):
    """All groups of kernels; and for each kernel those that it belongs to, one a use."""

    groups: tuple[Readers, ...]
    of_key: Mapping[Key, Sequence[Readers]]

    @classmethod
    def of(cls, groups: Sequence[Readers]) -> "Graph":
        of_key: dict[Key, list[Readers]] = {}
        for group in groups:
            for key in group.uses:
                of_key.setdefault(key, []).append(group)
        return cls(tuple(groups), of_key)

    def is_used_once(self, key: Key) -> bool:
        (first, *others) = self.of_key[key]
        return not others and first.uses[key].source.is_used_once

    def use(self, name: str) -> Use:
        """A matmul of a kernel, or of one in a stack."""
        return next(of[0].uses[key] for key, of in self.of_key.items() if key[0] == name)

    def stacked(self, name: str, array: Array, parts: Mapping[Key, Array]) -> Array:
        """Factors of a kernel, or of all in a stack: ones for those that `parts` lacks."""
        shape = next(part.shape for key, part in parts.items() if key[0] == name)
        lead = array.shape[: array.ndim - len(shape)]
        one = jnp.ones(shape, jnp.float32)
        rows = [parts.get((name, index), one) for index in np.ndindex(lead)]
        return jnp.stack(rows).reshape(*lead, *shape)


def with_factors(
    graph: Graph,
    params: Params,
    kernels: Mapping[str, Operand],
    method: str,
    rotations: Transforms,
) -> tuple[Params, Transforms]:
    """Parameters with factors of AWQ or SmoothQuant, and what kernels must keep.

    Args:
      rotations: Those that kernels keep already; they come after the factors.
    """
    params, explicit = dict(params), dict[Key, Array]()
    search = functools.partial(_searched, kernels, method, rotations)
    for group in graph.groups:
        own = {key: use for key, use in group.uses.items() if key[0] in kernels}
        if own and _is_foldable(graph, group):
            factors = search(own, [group], group.uses)
            _fold(params, group, factors)
            continue
        for key, use in own.items():
            groups = graph.of_key[key]
            if group is groups[0]:  # factors of its own, for the inputs of all its uses
                factors = search({key: use}, groups, {key: use})
                if not bool(jnp.all(factors == 1)):
                    explicit[key] = use.how.factors(factors, use.kernel.shape)
    transforms = dict(rotations)
    for name in dict.fromkeys(name for name, _ in explicit):
        factors = graph.stacked(name, params[name], explicit)
        transforms[name] = rotations.get(name, InputTransform())._replace(factors=factors)
    return params, transforms


def _is_foldable(graph: Graph, group: Readers) -> bool:
    """Whether parameters write the channels of a group, and only its kernels read them."""
    keys, roots = set(group.uses), group.node.roots["divide"]
    readers = [root.node.readers("divide") for root in roots]
    is_apart = all(found is not None and found[0] == keys for found in readers)
    is_own = all(root.is_own for root in roots) and all(map(graph.is_used_once, keys))
    return bool(roots) and is_apart and is_own


def _searched(
    kernels: Mapping[str, Operand],
    method: str,
    rotations: Transforms,
    uses: Mapping[Key, Use],
    groups: Sequence[Readers],
    multiplied: Mapping[Key, Use],
) -> Array:
    """Factors for the channels of kernels that share their inputs, those of `groups`.

    They are powers of two if one of the kernels that are `multiplied` has half precision, which
    multiplies exactly then.
    """
    hessian = functools.reduce(Hessian.merge, (x.hessian for x in groups if x.hessian is not None))
    arrays = [use.kernel for use in uses.values()]
    is_half = any(use.kernel.dtype != jnp.float32 for use in multiplied.values())
    where = f"quantize: {shown(next(iter(uses)))}"
    if method == "awq":
        read = [
            (
                use.kernel,
                spec_of(kernels[key[0]], use.how, use.kernel.shape),
                use.how,
                rotations.get(key[0], InputTransform()).rotation,
            )
            for key, use in uses.items()
        ]
        return awq_factors(read, hessian, power_of_two=is_half, where=where)
    amaxes = []
    for array, use in zip(arrays, uses.values(), strict=True):
        check_inputs(where, array, hessian, use.how)
        matrices = jnp.abs(use.how.matrices(exact_float32(array)))
        amaxes.append(use.how.pooled(jnp.max(matrices, 2), array.shape, jnp.max))
    largest = use.how.pooled(hessian.largest, array.shape, jnp.max)
    return smoothing_factors(largest, jnp.max(jnp.stack(amaxes), 0), power_of_two=is_half)


def _fold(params: Params, group: Readers, factors: Array) -> None:
    for key, use in group.uses.items():
        transform = InputTransform(use.how.factors(factors, use.kernel.shape))
        _change(params, key, transform)
    for root in group.node.roots["divide"]:
        array = exact_float32(params[root.key[0]][root.key[1]])
        along = jnp.expand_dims(factors, [a for a in range(array.ndim) if a != root.axis])
        _put(params, root.key, array / along)


class _Rotation(NamedTuple):
    """What must be rotated together: what writes channels, and the kernels that read them."""

    roots: frozenset[Root]
    keys: frozenset[Key]
    block: int


def rotated(
    graph: Graph, params: Params, kernels: Mapping[str, Operand]
) -> tuple[Params, Transforms]:
    """Parameters with random Hadamard transforms, and those that kernels must keep.

    A transform is folded into the matmuls, biases and tables that write the channels, through norms
    that divide by the root mean square alone: their vectors are folded into the kernels before.
    """
    asked = {key for key in graph.of_key if key[0] in kernels}
    together: dict[Key, _Rotation | None] = {}
    for key in asked:
        if key not in together:
            one = _together(graph, key)
            together |= dict.fromkeys({key} if one is None else one.keys & asked, one)
    # Kernels of a stack share one rotation, so all are folded or none.
    while True:
        rest = {key[0] for key, one in together.items() if one is None}
        torn = [key for key, one in together.items() if one and any(k[0] in rest for k in one.keys)]
        if not torn:
            break
        together |= dict.fromkeys(torn)
    params, once = dict(params), dict.fromkeys(one for one in together.values() if one is not None)
    gains: set[Root] = set()
    for one in once:
        for key in one.keys:
            (group,) = graph.of_key[key]
            use, factors = group.uses[key], None
            for gain in group.node.gains:
                vector = exact_float32(params[gain.key[0]][gain.key[1]])
                factors = vector if factors is None else factors * vector
            gains |= set(group.node.gains)
            shape = use.kernel.shape
            factors = None if factors is None else use.how.factors(factors, shape)
            axis = use.how.contracted[-1] - len(shape)
            _change(params, key, InputTransform(factors, (one.block, 0, axis)))
        for root in one.roots:
            axis = root.axis - (params[root.key[0]].ndim - len(root.key[1]))
            _change(params, root.key, InputTransform(None, (one.block, 0, axis)))
    for gain in gains:
        _put(params, gain.key, jnp.ones_like(params[gain.key[0]][gain.key[1]]))
    return params, _explicit_rotations(graph, [key[0] for key in asked if key[0] in rest])


def _explicit_rotations(graph: Graph, names: Sequence[str]) -> Transforms:
    transforms, odd = {}, []
    for name in sorted(set(names)):
        use = graph.use(name)
        block = _block_of(use)
        if block == 1:
            odd.append(name)
            continue
        axis = use.how.contracted[-1] - use.kernel.ndim
        transforms[name] = InputTransform(None, (block, 0, axis))
    if odd:
        warn(
            "quantize: hadamard: these kernels are not rotated, because they have an odd "
            f"number of input channels: {listed(odd)}",
            UserWarning,
        )
    return transforms


def _block_of(use: Use) -> int:
    return math.gcd(use.kernel.shape[use.how.contracted[-1]], _LONGEST)


def _together(graph: Graph, key: Key) -> _Rotation | None:
    """What must be rotated together with a kernel; None if something else is in the way."""
    roots: set[Root] = set()
    keys, first = {key}, graph.of_key[key][0]
    nodes, known = [first.node], {first.node}
    if not graph.is_used_once(key):
        return None
    for node in nodes:  # the list grows
        if not node.roots["rotate"]:
            return None
        for root in node.roots["rotate"]:
            if root in roots:
                continue
            roots.add(root)
            found = root.node.readers("rotate")
            if found is None or not root.is_own or not all(map(graph.is_used_once, found[0])):
                return None
            read, passed = found
            keys |= read
            on_way = {*passed[1:], *(graph.of_key[other][0].node for other in read)}
            nodes += on_way - known
            known |= on_way
    for gain in {gain for node in nodes for gain in node.gains}:
        found = gain.node.readers("gain")
        if found is None or found[0] or not gain.is_own:
            return None
        if any(node not in known and not node.roots["gain"] for node in found[1][1:]):
            return None
    block = _block_of(first.uses[key])
    return None if block == 1 else _Rotation(frozenset(roots), frozenset(keys), block)


def _change(params: Params, key: Key, transform: InputTransform) -> None:
    _put(params, key, transform.of_kernel(params[key[0]][key[1]]))


def _put(params: Params, key: Key, array: Array) -> None:
    name, index = key
    params[name] = params[name].at[index].set(array.astype(params[name].dtype))


def axes_of(how: Contraction, shape: tuple[int, ...]) -> Axes:
    """The axes of a kernel in its product."""
    others = (*how.contracted, *how.batch)
    kept = tuple(axis for axis in range(len(shape)) if axis not in others)
    axes = Axes(how.contracted, kept)
    return axes if how.places else axes.ones_first(shape)  # places: of a convolution


def spec_of(operand: Operand, how: Contraction, shape: tuple[int, ...]) -> BlockFormat:
    made = rounding_of(operand, axes_of(how, shape), shape, ()).operand
    assert made is not None
    return made.spec


def shown(key: Key) -> str:
    name, index = key
    return f"{name}{list(index)}" if index else name


def stripped(use: Use) -> Use:
    """The use without its inputs, which are large."""
    blank: Any = None
    return use._replace(rows=blank, sizes=blank)
