"""Two rounded operands multiplied: emulated in wide numbers, or natively in their own formats."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.casts.internal import (
    differentiable_widened,
    traced_for_cpu,
)
from qtoolkit.products._bilinear import Bilinear, DotGeneral
from qtoolkit.products._native import native_operands
from qtoolkit.products._rounded import Rounded
from qtoolkit.products._scaled import Blocked, Scaled
from qtoolkit.products._times_scales import times_scales
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

    def __call__(self, lhs: Any, rhs: Any, dtype: Any = jnp.float32) -> Array:
        return self.function(lhs, rhs, *self.extra, dtype=dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """The transpose of `function` in the operand on one side, which gives that side's gradient.

    Called with the cotangent and the other operand, it returns an array in the shape of `wide`.
    """

    function: Bilinear = dataclasses.field(metadata={"static": True})
    side: int = dataclasses.field(metadata={"static": True})
    extra: tuple[Array, ...]
    wide: jax.ShapeDtypeStruct = dataclasses.field(metadata={"static": True})

    def __call__(self, q_g: Any, q: Any, dtype: Any = jnp.float32) -> Array:
        if isinstance(q_g, Blocked | Scaled) or not _is_explicit(q_g, q):
            out = self.function.transposed(self.side, q_g, q, self.wide, *self.extra, dtype=dtype)
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
        return times_scales(function(*_of_one_dtype(one[0], other[0])), one[1], other[1])
    return function(*_of_one_dtype(first.unscaled(), second.unscaled()))


def _of_one_dtype(first: Array, second: Array) -> tuple[Array, Array]:
    """Both as they are if their dtypes are equal and can be multiplied, else as float32.

    XLA for CPUs leaves some products of bfloat16 with float32 sums to code that does not have them
    (jaxlib 0.10.2, "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"): where the
    CPU has AVX512-BF16, and a transpose stands beside the product or its batch axes do not come
    first. In float32 the same products are exact, too.
    """
    if first.dtype == second.dtype and not (first.dtype == jnp.bfloat16 and traced_for_cpu()):
        return first, second
    return differentiable_widened(first), differentiable_widened(second)


def native_constant(
    function: Forward | Transposed,
    first: Rounded,
    second: Rounded,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: Any,
) -> Array:
    """Like `combined`, but gives XLA arrays in the formats' own dtypes if it can multiply them.

    One scalar in the dtype of the product multiplies it. That is the only form that XLA for GPUs
    folds into the call of cuBLASLt: two scalars, or a float32 one beside a bfloat16 product, cost a
    pass over the result.

    Args:
      contracted: Which axes of both operands are summed.
      dtype: Of the result that is wanted. bfloat16 products are rounded to it at once; float16
        does not hold them before they are scaled.

    It has no derivative; `native` has one.
    """
    of = function.function
    is_plain = isinstance(of, DotGeneral) and of.out_sharding is None
    native = native_operands(first, second, contracted, is_plain=is_plain)
    if native is None:
        return combined(function, first, second)
    out_dtype = dtype if dtype == jnp.bfloat16 else jnp.float32
    out = function(native.first, native.second, out_dtype)
    if native.scale is None:
        return out
    # Without a barrier XLA's compiler for GPUs pulls what makes the scale into the kernel of the
    # product and fails (jaxlib 0.11.2: "Expected instruction to have shape equal to f32[]").
    return out * lax.optimization_barrier(native.scale).astype(out.dtype)


native = jax.custom_jvp(native_constant, nondiff_argnums=(3, 4))


@native.defjvp
def _native_jvp(contracted: Any, dtype: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Second derivatives use the tangent of the emulated product, `combined`.

    Neither 8-bit arrays nor `lax.scaled_dot` have a tangent.
    """
    out = native(*primals, contracted, dtype)
    return out, jax.jvp(combined, primals, tangents)[1].astype(out.dtype)
