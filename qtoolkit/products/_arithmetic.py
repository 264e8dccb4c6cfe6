"""Two rounded operands multiplied: emulated in wide numbers, or natively in their own formats."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.casts.internal import (
    by_platform,
    differentiable_widened,
    elementwise,
    settled,
    unmerged,
)
from qtoolkit.products._bilinear import Bilinear, Blocked
from qtoolkit.products._native import native_operands
from qtoolkit.products._rounded import Rounded
from qtoolkit.scaling.internal import explicit_spec

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class OnSide:
    """`function` in float32 with its first argument placed on one side, and q on the other."""

    function: Bilinear
    side: int
    extra: tuple[Array, ...]

    def __call__(self, operand: Array, q: Array) -> Array:
        operand, q = operand.astype(jnp.float32), q.astype(jnp.float32)
        lhs, rhs = (q, operand) if self.side else (operand, q)
        return self.function(lhs, rhs, *self.extra)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """`function` with its integer arrays bound."""

    function: Bilinear = dataclasses.field(metadata={"static": True})
    extra: tuple[Array, ...]

    def __call__(self, lhs: Any, rhs: Any) -> Array:
        return self.function(lhs, rhs, *self.extra)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """The transpose of `function` in the operand on one side, which gives that side's gradient.

    Called with the cotangent and the other operand, it returns an array like `wide`.
    """

    function: Bilinear = dataclasses.field(metadata={"static": True})
    side: int = dataclasses.field(metadata={"static": True})
    extra: tuple[Array, ...]
    wide: jax.ShapeDtypeStruct = dataclasses.field(metadata={"static": True})

    def __call__(self, q_g: Any, q: Any) -> Array:
        if isinstance(q_g, Blocked) or not _is_explicit(q_g, q):
            out = self.function.transposed(self.side, q_g, q, self.wide, *self.extra)
            if out is not None:
                return out
        function = OnSide(self.function, self.side, self.extra)
        along = functools.partial(function, q=q)
        return jax.linear_transpose(along, self.wide)(q_g.astype(jnp.float32))[0]


def _is_explicit(*arrays: Array) -> bool:
    """Whether arrays lie on an Explicit mesh."""
    return any(any(explicit_spec(x)) for x in arrays)


def combined(function: Callable[[Array, Array], Array], first: Rounded, second: Rounded) -> Array:
    """`function(first, second)` in float32, emulated.

    If both operands have a scale for the whole tensor, these multiply the result: the values q of
    most formats are so far from the ends of float32 that no sum of their products overflows. If one
    operand has none, q * scale is computed before the product. A wide operand may be 1e36, and 1e36
    times q = 448 would overflow before a scale of 1 / 448 could bring it back; so would the square
    of q = 2**63, the largest number of P3109's 8p1. Scales of blocks differ along the summed axis,
    so they cannot multiply the result and are applied first, too.
    """
    one, other = first.parted(), second.parted()
    if one is not None and other is not None:
        return _times_scales(function(*_of_one_dtype(one[0], other[0])), one[1], other[1])
    return function(*_of_one_dtype(first.unscaled(), second.unscaled()))


def _of_one_dtype(first: Array, second: Array) -> tuple[Array, Array]:
    """Both as they are if their dtypes are equal and can be multiplied, else as float32."""
    if first.dtype == second.dtype and not (first.dtype == jnp.bfloat16 and _traced_for_cpu()):
        return first, second
    return differentiable_widened(first), differentiable_widened(second)


def _traced_for_cpu() -> bool:
    """Whether programs traced now run on CPUs unless their arguments lie elsewhere.

    XLA for CPUs leaves some products of bfloat16 with float32 sums to code that does not have them
    (jaxlib 0.10.2, "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"): where the
    CPU has AVX512-BF16, and a transpose stands beside the product or its batch axes do not come
    first. In float32 the same products are exact, too.
    """
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend() == "cpu"
    return getattr(device, "platform", device) == "cpu"


def native_constant(
    function: Forward | Transposed,
    first: Rounded,
    second: Rounded,
    contracted: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> Array:
    """Like `combined`, but gives XLA arrays in the formats' own dtypes if it can multiply them.

    Args:
      contracted: Which axes of both operands are summed; None unless `function` is a plain
        `dot_general`.

    It has no derivative; `native` has one.
    """
    native = native_operands(first, second, contracted)
    if native is None:
        return combined(function, first, second)
    out = function(native.first, native.second)
    return _times_scales(out, *native.scales) if native.scales else out


native = jax.custom_jvp(native_constant, nondiff_argnums=(3,))


@native.defjvp
def _native_jvp(contracted: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Second derivatives use the tangent of the emulated product, `combined`.

    Neither 8-bit arrays nor `lax.scaled_dot` have a tangent.
    """
    return native(*primals, contracted), jax.jvp(combined, primals, tangents)[1]


@jax.custom_jvp
def _times_scales(x: Array, first: Array, second: Array) -> Array:
    """`x * first * second` in an order that overflows or underflows only if the result does.

    If one scale is below 1 and the other is not, they are multiplied first; their product lies
    between them. For x = 448 * 448 and the scales 1e36 / 448 and 1 / 448, x times the first one
    would overflow, but the result is 1e36. If both scales are below 1, or both are not, x is
    multiplied by one after the other, and both steps go in the same direction.
    """
    # Without a barrier XLA's compiler for GPUs pulls what makes the scales into the kernel of the
    # product and fails (jaxlib 0.11.2: "Expected instruction to have shape equal to f32[]").
    first, second = lax.optimization_barrier(_in_safe_order(first, second))
    x = _kept_in_shape(x)
    return _times_both(x, jnp.broadcast_to(first, x.shape), jnp.broadcast_to(second, x.shape))


# Saves compile time. XLA for CPUs reshapes the result of a matrix product, and moves that reshape
# through one of the operations that follow in each round of its simplifications. Scaling the result
# takes twelve operations, so it would need twelve rounds; the barrier stops the first one.
_kept_in_shape = by_platform(
    "kept_in_shape", cpu=lax.optimization_barrier, others=lambda x: x, aval=lambda x: x
)


@elementwise
def _times_both(x: Array, first: Array, second: Array) -> Array:
    return settled(unmerged(x * first) * second)


@elementwise
def _in_safe_order(first: Array, second: Array) -> tuple[Array, Array]:
    is_mixed = (first < 1) != (second < 1)
    both = first * second
    return jnp.where(is_mixed, both, first), jnp.where(is_mixed, 1.0, second)


@_times_scales.defjvp
def _times_scales_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    tangent = jax.jvp(lambda x, first, second: x * first * second, primals, tangents)[1]
    return _times_scales(*primals), tangent
