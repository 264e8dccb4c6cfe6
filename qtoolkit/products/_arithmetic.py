"""Two rounded operands multiplied: emulated in wide numbers, or natively in their own formats."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.casts.internal import by_platform, elementwise, settled
from qtoolkit.products._bilinear import Bilinear, Blocked, DotGeneral
from qtoolkit.products._native import native_operands
from qtoolkit.products._rounded import Rounded
from qtoolkit.scaling.internal import explicit_spec

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class OnSide:
    """`function` in float32 of an operand on one side and q on the other."""

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
    """`function` with its integer arrays."""

    function: Bilinear = dataclasses.field(metadata={"static": True})
    extra: tuple[Array, ...]

    def __call__(self, lhs: Any, rhs: Any) -> Array:
        return self.function(lhs, rhs, *self.extra)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """`function` transposed on one side: of the cotangent and q, to the struct of that side."""

    function: Bilinear = dataclasses.field(metadata={"static": True})
    side: int = dataclasses.field(metadata={"static": True})
    extra: tuple[Array, ...]
    wide: jax.ShapeDtypeStruct = dataclasses.field(metadata={"static": True})

    def __call__(self, q_g: Any, q: Any) -> Array:
        if isinstance(q_g, Blocked):
            assert isinstance(self.function, DotGeneral)
            return self.function.transposed(self.side, q_g, q)
        if not q_g.dtype.itemsize == q.dtype.itemsize == 1:
            q_g, q = q_g.astype(jnp.float32), q.astype(jnp.float32)
        if isinstance(self.function, DotGeneral) and not _is_explicit(q_g, q):
            return self.function.transposed(self.side, q_g, q)
        function = OnSide(self.function, self.side, self.extra)
        along = functools.partial(function, q=q)
        return jax.linear_transpose(along, self.wide)(q_g.astype(jnp.float32))[0]


def _is_explicit(*arrays: Array) -> bool:
    """Whether arrays lie on an Explicit mesh."""
    return any(any(explicit_spec(x)) for x in arrays)


def combined(function: Callable[[Array, Array], Array], first: Rounded, second: Rounded) -> Array:
    """`function` of two operands, float32, emulated.

    Scales multiply the result where both operands have one: q is as far from the ends of float32 as
    its format is. Beside an operand without one, 1e36, already its product with q = 448 would
    overflow, so that there q is multiplied by its scale first, in float32; and so are blocks, whose
    scales differ along the axis that is summed.
    """
    scales = first.scale, second.scale
    if scales[0] is not None and scales[1] is not None:
        return _times_scales(function(first.q, second.q.astype(first.q.dtype)), *scales)
    if first.is_wide and second.is_wide:
        return function(first.q, second.q.astype(first.q.dtype))
    return function(first.unscaled(), second.unscaled())


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def native(
    function: Forward | Transposed,
    first: Rounded,
    second: Rounded,
    contracted: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> Array:
    """`combined`, but multiplied by XLA in the dtypes of the operands' formats where it can be.

    Args:
      contracted: Which axes of both are summed; None where `function` is no plain `dot_general`.
    """
    native = native_operands(first, second, contracted)
    if native is None:
        return combined(function, first, second)
    out = function(native.first, native.second)
    return _times_scales(out, *native.scales) if native.scales else out


@native.defjvp
def _native_jvp(contracted: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The tangent of the emulated product, for second derivatives: codes and `lax.scaled_dot` have
    none.
    """
    return native(*primals, contracted), jax.jvp(combined, primals, tangents)[1]


@jax.custom_jvp
def _times_scales(x: Array, first: Array, second: Array) -> Array:
    """`x * first * second`, no step of which leaves float32's range where the result does not.

    Where one scale is below 1 and the other is not, their product is taken first, which lies
    between them: x = 448 * 448 with the scales 1e36 / 448 and 1 / 448 is 1e36, in either order.
    Where both are on one side of 1, x moves to that side in two steps.
    """
    # Without a barrier XLA's compiler for GPUs pulls what makes the scales into the kernel of the
    # product and fails (jaxlib 0.11.2: "Expected instruction to have shape equal to f32[]").
    first, second = lax.optimization_barrier(_in_safe_order(first, second))
    x = _kept_in_shape(x)
    return _times_both(x, jnp.broadcast_to(first, x.shape), jnp.broadcast_to(second, x.shape))


# XLA's CPU multiplies matrices and then reshapes. Each round of its simplifications would move that
# reshape through one of the operations that scale the result, and there are twelve.
_kept_in_shape = by_platform(
    "kept_in_shape", cpu=lax.optimization_barrier, others=lambda x: x, aval=lambda x: x
)


@elementwise
def _times_both(x: Array, first: Array, second: Array) -> Array:
    return settled(settled(x * first) * second)


@elementwise
def _in_safe_order(first: Array, second: Array) -> tuple[Array, Array]:
    is_mixed = (first < 1) != (second < 1)
    both = first * second
    return jnp.where(is_mixed, both, first), jnp.where(is_mixed, 1.0, second)


@_times_scales.defjvp
def _times_scales_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    def plain(x: Array, first: Array, second: Array) -> Array:
        return x * first * second

    return _times_scales(*primals), jax.jvp(plain, primals, tangents)[1]
