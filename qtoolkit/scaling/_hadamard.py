"""The Walsh-Hadamard transform in blocks, which spreads an outlier over its block."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.casts.internal import (
    check_differentiable,
    exact_float32,
    in_dtype,
    linear_with_transpose,
    prevent_contraction,
    product,
    with_rank,
)
from qtoolkit.scaling._blocks import check_shards, checked_axis


def hadamard_transform(
    x: jax.Array,
    *,
    block: int = 16,
    axis: int = -1,
    key: jax.Array | None = None,
    inverse: bool = False,
) -> jax.Array:
    """Multiplies each block along `axis` by the Hadamard matrix H, divided by sqrt(block).

    H is orthonormal and its own inverse, so a matmul over `axis` stays what it is, up to rounding:
    (x H)(H w) = x w. With a key it is the random Hadamard transform: elements are multiplied by
    random signs D first, x D H, and the same key undoes it or cancels in (x D H)(H D w).

    Args:
      x: float32, float16 or bfloat16, any shape.
      block: The length of a block, a power of two; 1 leaves only the signs.
      axis: The axis that blocks lie along; its length is a multiple of `block`. Where `x` is
        sharded along it, let each shard hold whole blocks.
      key: A key of `jax.random`, for random signs: one vector of `block` signs, which all blocks
        share, as in NVFP4 training. Both operands of a matmul need the same key.
      inverse: Whether to undo the transform with the same `key`: y H D. Without a key, the
        transform is its own inverse.

    Returns:
      Shape and dtype of `x`. Sums are float32, in log2(block) additions of pairs, and rounded once
      to the dtype of `x`.

    Raises:
      TypeError: `x` has another dtype.
      ValueError: `block` is no power of two; `axis` is out of range, or its length no multiple of
        `block`, or it is sharded over an Explicit mesh so that shards tear blocks.

    Gradient: that of a linear function: the transform backwards.
    Source: arXiv:2307.13304 (QuIP), arXiv:2404.00456 (QuaRot); arXiv:2509.25149 for blocks of 16
    and their signs.

    Examples:
      >>> x = jnp.zeros(16).at[3].set(8.0)  # an outlier is spread over its block
      >>> y = qt.scaling.hadamard_transform(x)
      >>> qt.scaling.amax(y)
      Array(2., dtype=float32)
      >>> bool((qt.scaling.hadamard_transform(y) == x).all())
      True
    """
    x = check_differentiable("hadamard_transform", x, wide=False)
    if isinstance(block, bool) or not isinstance(block, int | np.integer):
        raise ValueError(f"hadamard_transform: block={block!r}, expected an integer")
    if block < 1 or block & (block - 1):
        raise ValueError(f"hadamard_transform: block={block}, expected a power of two")
    place = checked_axis("hadamard_transform", "x", x, axis)
    if x.shape[place] % block:
        raise ValueError(
            f"hadamard_transform: axis {axis} of shape {x.shape} has length {x.shape[place]}, "
            f"expected a multiple of block={block}; pad it with zeros or use a shorter block"
        )
    check_shards("hadamard_transform", x, place, int(block))
    signs = None if key is None else random_signs(key, int(block))
    return _transformed_jitted(x, signs, int(block), place, bool(inverse))


def random_signs(key: jax.Array, block: int) -> jax.Array:
    """Random signs, float32[block]. If the key is no tracer, they are a constant of the program."""
    is_known = not isinstance(key, jax.core.Tracer)
    with computed_now() if is_known else contextlib.nullcontext():
        return jax.random.rademacher(key, (block,), jnp.float32)


@contextlib.contextmanager
def computed_now() -> Iterator[None]:
    """Compute eagerly in this context, even inside a trace."""
    # Without a mesh: inside `jax.shard_map` under `jax.set_mesh` JAX would shard even constants
    # over the axes of the `shard_map`, and could not compute them outside of it.
    nowhere = jax.sharding.AbstractMesh((), ())
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(nowhere):
        yield


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _transformed(
    x: jax.Array, signs: jax.Array | None, block: int, axis: int, inverse: bool
) -> jax.Array:
    y = _summed(prevent_contraction(exact_float32(x)), signs, block, axis, inverse)
    return in_dtype(product(y, np.float32(1 / math.sqrt(block))), x.dtype)


@_transformed.defjvp
def _transformed_jvp(
    block: int, axis: int, inverse: bool, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    (x, signs), (x_dot, _) = primals, tangents
    forward = _Transform(block, axis, inverse)
    transpose = _Transform(block, axis, not inverse)
    y_dot = linear_with_transpose(forward, transpose, () if signs is None else (signs,), x_dot)
    return _transformed_jitted(x, signs, block, axis, inverse), y_dot


@dataclasses.dataclass(frozen=True)
class _Transform:
    # Its transpose is its inverse, because the matrix is symmetric and orthogonal.

    block: int
    axis: int
    inverse: bool

    def __call__(self, signs: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        (factors,) = signs or (None,)
        return _transformed(x, factors, self.block, self.axis, self.inverse)


_transformed_jitted = jax.jit(_transformed, static_argnums=(2, 3, 4))


def _summed(
    x: jax.Array, signs: jax.Array | None, block: int, axis: int, inverse: bool
) -> jax.Array:
    """The transform of float32 before it is divided by sqrt(block)."""
    before, after = (*x.shape[:axis], x.shape[axis] // block), x.shape[axis + 1 :]
    y = x.reshape(*before, block, *after)
    factors = None if signs is None else signs.reshape(block, *(1,) * len(after))
    if factors is not None and not inverse:
        y = y * with_rank(factors, y.ndim)
    halvings = block.bit_length() - 1
    y = y.reshape(*before, *(2,) * halvings, *after)  # an axis for each bit of the place in a block
    for at in range(len(before), len(before) + halvings):
        first, second = (lax.index_in_dim(y, i, at, keepdims=False) for i in (0, 1))
        # A stack is written to memory. Otherwise XLA would fuse all steps, and each step would
        # compute the ones before it twice.
        y = jnp.stack([first + second, first - second], at)
    y = y.reshape(*before, block, *after)
    if factors is not None and inverse:
        y = y * with_rank(factors, y.ndim)
    return y.reshape(x.shape)
