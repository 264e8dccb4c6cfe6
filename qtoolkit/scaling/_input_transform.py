"""Factors and rotations of the inputs of a matmul, which its stored kernel brings with it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.casts.internal import (
    broadcast_like,
    differentiable_in_dtype,
    differentiable_product,
    differentiable_quotient,
    differentiable_widened,
)
from qtoolkit.scaling._hadamard import computed_now, hadamard_transform

Array = jax.Array
Rotation = tuple[int, int | None, int]


class InputTransform(NamedTuple):
    """Inputs x become (x / factors) R and a kernel w becomes R' (factors * w), for the same x w.

    Attributes:
      factors: float32, with as many axes as the kernel; of length 1 but along axes that the matmul
        sums over. None: no factors.
      rotation: (block, seed, axis): the Hadamard transform in blocks along this axis of the kernel,
        counted from the end; without signs if the seed is None. None: no rotation.
    """

    factors: Array | None = None
    rotation: Rotation | None = None

    def __bool__(self) -> bool:
        return self.factors is not None or self.rotation is not None

    def of_kernel(self, w: Array) -> Array:
        """R' (factors * w), float32."""
        wide = differentiable_widened(w)
        if self.factors is not None:
            wide = differentiable_product(broadcast_like(self.factors, wide), wide)
        return wide if self.rotation is None else _rotated(wide, self.rotation, self.rotation[2])

    def undone(self, w: Array) -> Array:
        """The kernel of which `of_kernel` made the float32 array `w`."""
        if self.rotation is not None:
            w = _rotated(w, self.rotation, self.rotation[2], inverse=True)
        return w if self.factors is None else differentiable_quotient(w, self.factors)

    def of_inputs(self, x: Array, axes: Sequence[tuple[int, int]], rank: int) -> Array:
        """(x / factors) R, in the dtype of `x`.

        Args:
          axes: Pairs of an axis of `x` and the axis of the kernel that it is summed with.
          rank: The number of axes of the kernel.
        """
        y = x
        if self.factors is not None:
            pairs = sorted(axes)
            others = [a for a in range(rank) if a not in [place for _, place in pairs]]
            factors = lax.transpose(self.factors, (*others, *(place for _, place in pairs)))
            sizes = {axis: self.factors.shape[place] for axis, place in pairs}
            factors = factors.reshape([sizes.get(axis, 1) for axis in range(x.ndim)])
            # The groups of a convolution share the factors of their channels.
            repeats = [x.shape[a] // n if n > 1 else 1 for a, n in enumerate(factors.shape)]
            divided = differentiable_quotient(differentiable_widened(y), jnp.tile(factors, repeats))
            y = differentiable_in_dtype(divided, x.dtype)
        if self.rotation is not None:
            place = self.rotation[2] % rank
            y = _rotated(y, self.rotation, next(axis for axis, other in axes if other == place))
        return y


def _rotated(x: Array, rotation: Rotation, axis: int, *, inverse: bool = False) -> Array:
    block, seed, _ = rotation
    with computed_now():
        key = None if seed is None else jax.random.key(seed)
    return hadamard_transform(x, block=block, axis=axis, key=key, inverse=inverse)
