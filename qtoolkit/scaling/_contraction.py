"""The kernel of a matmul as matrices [batch, channels, columns], whatever the order of its axes."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.formats import BlockFormat
from qtoolkit.formats.internal import add_json_kinds
from qtoolkit.scaling._blocks import Blocks
from qtoolkit.scaling._elements import Scales
from qtoolkit.scaling._hessian import Hessian

Array = jax.Array


def along_contracted(
    spec: BlockFormat, contracted: tuple[int, ...], kept: tuple[int, ...], rank: int
) -> BlockFormat:
    """Blocks that name no axes lie along the last contracted axis; two-dimensional ones also along
    the last kept axis. A scale for a whole vector is one for all contracted axes: in the kernel of
    a convolution, a scale for each output channel.
    """
    if not spec.block or spec.axes is not None:
        return spec
    if spec.block == (None,) and spec.other_axes == 1 and len(contracted) > 1:
        others = tuple(axis for axis in range(rank) if axis not in contracted)
        return dataclasses.replace(
            spec, block=(1,) * len(others), axes=others or None, other_axes=None
        )
    along = contracted[-1:] or (rank - 1,)
    places = (*(axis for axis in kept if axis not in along), *along)[-len(spec.block) :]
    return dataclasses.replace(spec, block=spec.block[-len(places) :], axes=places)


class Contraction(NamedTuple):
    """Which axes of a kernel the matmul sums over, in the order of the input's channels.

    Attributes:
      contracted: The axes that are summed over.
      batch: The axes along which each matmul has inputs of its own, such as experts.
      groups: Those of a convolution: its outputs are the columns of so many matmuls in turn.
      places: The contracted axes along which a convolution reads neighbours of each channel.
    """

    contracted: tuple[int, ...]
    batch: tuple[int, ...] = ()
    groups: int = 1
    places: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, where: str, shape: tuple[int, ...], axis: "int | tuple[int, ...] | Contraction"
    ) -> "Contraction":
        """From the axis or axes that a user names; a `Contraction` is returned as it is.

        Raises:
          ValueError: An axis is out of range or comes twice.
        """
        if isinstance(axis, Contraction):
            return axis
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        rank = len(shape)
        if not axes or any(not -rank <= a < rank for a in axes):
            raise ValueError(f"{where}: axis={axis} of shape {shape}, expected {-rank}..{rank - 1}")
        places = tuple(a % rank for a in axes)
        if len(set(places)) < len(places):
            raise ValueError(f"{where}: axis={axis} of shape {shape}, expected different axes")
        return cls(places)

    def matrix_axes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`shape` with an axis for groups, and the order of axes: batch, contracted, others."""
        batch, contracted = self.batch, self.contracted
        if self.groups > 1:
            (axis,) = (a for a in range(len(shape)) if a not in contracted)
            columns = shape[axis] // self.groups
            shape = (*shape[:axis], self.groups, columns, *shape[axis + 1 :])
            batch, contracted = (axis,), tuple(a + (a > axis) for a in contracted)
        first = (*batch, *contracted)
        return shape, (*first, *(a for a in range(len(shape)) if a not in first))

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        batch, channels = (math.prod(shape[a] for a in axes) for axes in (self.batch, self[0]))
        batch *= self.groups
        return batch, channels, math.prod(shape) // (batch * channels)

    def matrices(self, x: Array) -> Array:
        """The kernel as [batch, channels, columns]."""
        shape, order = self.matrix_axes(x.shape)
        return lax.transpose(x.reshape(shape), order).reshape(self.sizes(x.shape))

    def restored(self, matrices: Array, shape: tuple[int, ...]) -> Array:
        """The kernel of `shape` that `matrices` were made of; or its scales, in their shape."""
        split, order = self.matrix_axes(shape)
        x = matrices.reshape([split[axis] for axis in order])
        return lax.transpose(x, [order.index(axis) for axis in range(len(order))]).reshape(shape)

    def pooled(
        self, sums: Array, shape: tuple[int, ...], pool: Callable[..., Array] = jnp.sum
    ) -> Array:
        """One number for each channel of a kernel of `shape` that may have a factor of its own.

        Experts, groups and the places that a convolution reads share theirs: sums of
        [..., channels] become [channels without places].
        """
        sums = sums.reshape(-1, *(shape[axis] for axis in self.contracted))
        axes = (0, *(1 + i for i, axis in enumerate(self.contracted) if axis in self.places))
        return pool(sums, axes).reshape(-1)

    def factors(self, factors: Array, shape: tuple[int, ...]) -> Array:
        """Factors of `pooled` channels in a shape that broadcasts to that of the kernel."""
        own = [axis for axis in self.contracted if axis not in self.places]
        x = factors.reshape([shape[axis] for axis in own])
        x = lax.transpose(x, sorted(range(len(own)), key=own.__getitem__))
        return x.reshape([n if axis in own else 1 for axis, n in enumerate(shape)])

    def along(self, spec: BlockFormat, shape: tuple[int, ...]) -> BlockFormat:
        """`spec` with its axes, as `along_contracted` chooses them."""
        kept = (a for a in range(len(shape)) if a not in (*self.contracted, *self.batch))
        return along_contracted(spec, self.contracted, tuple(kept), len(shape))

    def blocks(self, spec: BlockFormat, shape: tuple[int, ...]) -> Blocks:
        """The blocks of the matrices.

        Raises:
          ValueError: Blocks of the kernel would be torn: those of several contracted axes must
            divide the last one, or cover all of them.
        """
        split, order = self.matrix_axes(shape)
        blocks = Blocks(shape, spec.block_lengths(shape)).reshaped(split)
        turned = (tuple(sizes[a] for a in order) for sizes in (split, blocks.lengths))
        return Blocks(*turned).reshaped(self.sizes(shape))

    def scales(self, scales: Scales, spec: BlockFormat, shape: tuple[int, ...]) -> Scales:
        """Scales of the kernel as those of its matrices."""
        split, order = self.matrix_axes(shape)
        before = Blocks(shape, spec.block_lengths(shape)).reshaped(split).counts
        counts = self.blocks(spec, shape).counts

        def moved(x: Array) -> Array:
            return lax.transpose(x.reshape(before), order).reshape(counts)

        scale, zero_point = (None if x is None else moved(x) for x in scales[::2])
        return Scales(scale, scales.tensor_scale, zero_point)


add_json_kinds(Contraction)


def check_inputs(where: str, w: Array, hessian: Hessian, contraction: Contraction) -> None:
    """Raises unless `hessian` is of the inputs of a kernel `w`, and says enough about them.

    Raises:
      ValueError: `hessian` has other channels, holds too few rows or non-finite sums; or `w` holds
        an infinity or a NaN.
    """
    batch, channels, _ = contraction.sizes(w.shape)
    if hessian.magnitude.size != batch * channels or hessian.channels != channels:
        raise ValueError(
            f"{where}: the Hessian has shape {hessian.magnitude.shape}, and w of shape {w.shape} "
            f"has {channels} channels along {contraction.contracted}, expected the same"
        )
    if isinstance(hessian.rows, jax.core.Tracer) or isinstance(w, jax.core.Tracer):
        return
    rows = int(jnp.max(hessian.rows))
    if not rows:
        count = int(hessian.bad)
        why = f"all {count} batches held a NaN or an infinity" if count else "there was no batch"
        raise ValueError(f"{where}: not calibrated: {why}; expected finite inputs")
    if rows < channels:
        raise ValueError(
            f"{where}: {rows} rows of inputs for {channels} channels, expected at "
            "least as many rows as channels: fewer leave errors free; calibrate with more samples"
        )
    if not bool(jnp.isfinite(hessian.total).all()):
        raise ValueError(
            f"{where}: the Hessian is not finite, its sums of squares overflow; expected inputs "
            "whose squares float32 can add"
        )
    count = int(jnp.sum(~jnp.isfinite(w)))
    if count:
        raise ValueError(
            f"{where}: w holds {count} infinities and NaNs, expected finite numbers; repair the "
            "checkpoint, or exclude the layer by a rule with None"
        )


def squared_error(difference: Array, total: Array) -> Array:
    """The sum of d' H d over the columns d, of [batch, channels, columns]."""
    moved = jnp.matmul(total, difference.astype(total.dtype), precision=lax.Precision.HIGHEST)
    return jnp.sum(moved * difference)


def with_block(spec: BlockFormat, *block: int) -> BlockFormat:
    """`spec` with blocks of these lengths along the two axes of a matrix."""
    return dataclasses.replace(spec, block=block, axes=(0, 1), other_axes=1)
