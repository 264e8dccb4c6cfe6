"""Products of operands with scales: one scale each, one for each row, or one for each block."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.casts.internal import (
    barrier_on_cpu,
    elementwise,
    prevent_contraction,
    prevent_merging,
    varying_alike,
)

Array = jax.Array
Places = tuple[int, ...]


class Blocked(NamedTuple):
    """An operand for `lax.scaled_dot`, which multiplies elements by scales and sums in float32.

    Attributes:
      elements: An array in the dtype of the element format.
      scale: An array in the dtype of the scale format. It has the shape of `elements`, except that
        it is shorter along the last contracted axis: 4 scales for 128 elements belong to 32 each.
    """

    elements: Array
    scale: Array

    @property
    def ndim(self) -> int:
        return self.elements.ndim

    def matrices(self, batch: Places, contracted: Places) -> tuple["Blocked", int]:
        """The operand reshaped to [batch, contracted, kept] or [batch, kept, contracted].

        There are two reasons: XLA's compiler for GPUs takes at most one axis of each kind, and
        `lax.scaled_dot` cuts blocks along all contracted axes, not only the last. Without batch
        axes the result has two axes. If one of the two orders needs no transpose, it is chosen.

        Returns:
          The reshaped operand, and the index of its contracted axis.
        """
        kept = remaining_axes(self.ndim, batch, contracted)
        parts = [batch, contracted, kept]
        if (*batch, *contracted, *kept) != tuple(range(self.ndim)):
            parts = [batch, kept, contracted]
        parts = parts if batch else parts[1:]

        def merged(x: Array) -> Array:
            shape = [math.prod(x.shape[axis] for axis in part) for part in parts]
            return lax.transpose(x, [axis for part in parts for axis in part]).reshape(shape)

        return Blocked(merged(self.elements), merged(self.scale)), parts.index(contracted)


class Scaled(NamedTuple):
    """An operand whose scales, float32, do not change along the axes that are summed.

    So the scales can multiply the result instead. Each axis of `scale` has the length of that of
    `elements`, or 1.
    """

    elements: Array
    scale: Array

    @property
    def ndim(self) -> int:
        return self.elements.ndim


def remaining_axes(rank: int, *taken: Any) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if not any(i in axes for axes in taken))


def scaled_result(out: Array, lhs: Scaled, rhs: Scaled, numbers: Any) -> Array:
    """`out`, the product of the elements, times both scales: float32."""
    scales = []
    for side, x in enumerate((lhs, rhs)):
        of_x, batch = (axes[side] for axes in numbers)
        kept = remaining_axes(x.ndim, of_x, batch)
        first = out.ndim - len(kept) if side else len(batch)  # in the result
        places = (*range(len(batch)), *range(first, first + len(kept)))
        lengths = [x.scale.shape[axis] for axis in (*batch, *kept)]
        scale = lax.transpose(x.scale, (*of_x, *batch, *kept)).reshape(lengths)
        shape = dict(zip(places, lengths, strict=True))
        scale = scale.reshape([shape.get(axis, 1) for axis in range(out.ndim)])
        scales.append(jnp.broadcast_to(scale, out.shape))
    return times_scales_of_places(out.astype(jnp.float32), *scales)


def scaled_dot(lhs: Blocked, rhs: Blocked, numbers: Any) -> Array:
    (of_lhs, of_rhs), (batch_l, batch_r) = numbers
    shape = [lhs.elements.shape[axis] for axis in batch_l]
    for x, *taken in ((lhs, of_lhs, batch_l), (rhs, of_rhs, batch_r)):
        shape += [x.elements.shape[axis] for axis in remaining_axes(x.ndim, *taken)]
    (lhs, axis_l), (rhs, axis_r) = lhs.matrices(batch_l, of_lhs), rhs.matrices(batch_r, of_rhs)
    batch = (0,) if batch_l else ()
    out = lax.scaled_dot(
        lhs.elements,
        rhs.elements,
        lhs_scale=lhs.scale,
        rhs_scale=rhs.scale,
        dimension_numbers=(((axis_l,), (axis_r,)), (batch, batch)),
        preferred_element_type=jnp.float32,
    )
    # In `jax.shard_map`, JAX 0.12 types the result of `scaled_dot` as equal in all shards, even if
    # the operands differ between shards.
    return varying_alike(out.reshape(shape), lhs.elements, rhs.elements)[0]


@jax.custom_jvp
def times_scales(x: Array, first: Array, second: Array) -> Array:
    """`x * first * second` in an order that overflows or underflows only if the result does.

    If one scale is below 1 and the other is not, they are multiplied first; their product lies
    between them. For x = 448 * 448 and the scales 1e36 / 448 and 1 / 448, x times the first one
    would overflow, but the result is 1e36. If both scales are below 1, or both are not, x is
    multiplied by one after the other, and both steps go in the same direction.
    """
    # Without a barrier XLA's compiler for GPUs pulls what makes the scales into the kernel of the
    # product and fails (jaxlib 0.11.2: "Expected instruction to have shape equal to f32[]").
    first, second = lax.optimization_barrier(_in_safe_order(first, second))
    # Saves compile time. XLA for CPUs reshapes the result of a matrix product, and moves that
    # reshape through one of the operations that follow in each round of its simplifications.
    # Scaling the result takes twelve operations, so it would need twelve rounds; the barrier stops
    # the first one.
    x = barrier_on_cpu(x)
    return _times_both(x, jnp.broadcast_to(first, x.shape), jnp.broadcast_to(second, x.shape))


@elementwise
def times_scales_of_places(x: Array, first: Array, second: Array) -> Array:
    """`times_scales` with a scale of each operand for each element, all float32; no derivative."""
    return _times_both(x, *_in_safe_order(first, second))


@elementwise
def _times_both(x: Array, first: Array, second: Array) -> Array:
    return prevent_contraction(prevent_merging(x * first) * second)


@elementwise
def _in_safe_order(first: Array, second: Array) -> tuple[Array, Array]:
    is_mixed = (first < 1) != (second < 1)
    both = first * second
    return jnp.where(is_mixed, both, first), jnp.where(is_mixed, 1.0, second)


@times_scales.defjvp
def _times_scales_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    tangent = jax.jvp(lambda x, first, second: x * first * second, primals, tangents)[1]
    return times_scales(*primals), tangent
