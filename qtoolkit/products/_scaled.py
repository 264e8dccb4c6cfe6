"""Operands with scales: one per block, or scales that do not change along summed axes."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.casts.internal import varying_alike
from qtoolkit.products._times_scales import times_scales_of_places

Places = tuple[int, ...]


class Blocked(NamedTuple):
    """An operand for `lax.scaled_dot`, which multiplies elements by scales and sums in float32.

    Attributes:
      elements: An array in the dtype of the element format.
      scale: An array in the dtype of the scale format. It has the shape of `elements`, except that
        it is shorter along the last contracted axis: 4 scales for 128 elements belong to 32 each.
    """

    elements: jax.Array
    scale: jax.Array

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
        kept = others(self.ndim, batch, contracted)
        parts = [batch, contracted, kept]
        if (*batch, *contracted, *kept) != tuple(range(self.ndim)):
            parts = [batch, kept, contracted]
        parts = parts if batch else parts[1:]

        def merged(x: jax.Array) -> jax.Array:
            shape = [math.prod(x.shape[axis] for axis in part) for part in parts]
            return lax.transpose(x, [axis for part in parts for axis in part]).reshape(shape)

        return Blocked(merged(self.elements), merged(self.scale)), parts.index(contracted)


class Scaled(NamedTuple):
    """An operand whose scales, float32, do not change along the axes that are summed.

    So the scales can multiply the result instead. Each axis of `scale` has the length of that of
    `elements`, or 1.
    """

    elements: jax.Array
    scale: jax.Array

    @property
    def ndim(self) -> int:
        return self.elements.ndim


def others(rank: int, *taken: Any) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if not any(i in axes for axes in taken))


def scaled_result(out: jax.Array, lhs: Scaled, rhs: Scaled, numbers: Any) -> jax.Array:
    """`out`, the product of the elements, times both scales: float32."""
    scales = []
    for side, x in enumerate((lhs, rhs)):
        of_x, batch = (axes[side] for axes in numbers)
        kept = others(x.ndim, of_x, batch)
        first = out.ndim - len(kept) if side else len(batch)  # in the result
        places = (*range(len(batch)), *range(first, first + len(kept)))
        lengths = [x.scale.shape[axis] for axis in (*batch, *kept)]
        scale = lax.transpose(x.scale, (*of_x, *batch, *kept)).reshape(lengths)
        shape = dict(zip(places, lengths, strict=True))
        scale = scale.reshape([shape.get(axis, 1) for axis in range(out.ndim)])
        scales.append(jnp.broadcast_to(scale, out.shape))
    return times_scales_of_places(out.astype(jnp.float32), *scales)


def scaled_dot(lhs: Blocked, rhs: Blocked, numbers: Any) -> jax.Array:
    (of_lhs, of_rhs), (batch_l, batch_r) = numbers
    shape = [lhs.elements.shape[axis] for axis in batch_l]
    for x, *taken in ((lhs, of_lhs, batch_l), (rhs, of_rhs, batch_r)):
        shape += [x.elements.shape[axis] for axis in others(x.ndim, *taken)]
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
