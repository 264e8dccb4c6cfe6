"""A float32 product times the scales of its operands."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.casts.internal import barrier_on_cpu, elementwise, settled, unmerged

Array = jax.Array


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
    return settled(unmerged(x * first) * second)


@elementwise
def _in_safe_order(first: Array, second: Array) -> tuple[Array, Array]:
    is_mixed = (first < 1) != (second < 1)
    both = first * second
    return jnp.where(is_mixed, both, first), jnp.where(is_mixed, 1.0, second)


@times_scales.defjvp
def _times_scales_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    tangent = jax.jvp(lambda x, first, second: x * first * second, primals, tangents)[1]
    return times_scales(*primals), tangent
