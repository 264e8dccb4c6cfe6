"""The one quantized product: any bilinear function of two arrays, with its derivatives.

The forward product is `f(q_l, q_r) * s_l * s_r`: operands on the grid of their format, the scales
outside. Its derivatives are products of the same kind: `f` transposed, of the rounded cotangent and
the other operand's q. Rounding an operand counts as the identity: with current scaling nothing
saturates. Infinities and NaNs of operands and cotangents stay in q, so that results are not finite
where those of the plain product are not: loss scalers and skipped steps rely on it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from qtoolkit.casts.internal import FLOATS, check_differentiable, check_holds, settled
from qtoolkit.formats import BlockFormat
from qtoolkit.gradients import linear_with_transpose
from qtoolkit.gradients.internal import (
    differentiable_in_dtype,
    differentiable_widened,
    varying_alike,
)
from qtoolkit.products._recipe import Recipe
from qtoolkit.scaling.internal import operand_values


class Bilinear(Protocol):
    """A hashable bilinear function of two arrays of one dtype, accumulated in float32."""

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array: ...


Operand = tuple[jax.Array, ...]  # (q, scale) with x ~ q * scale; (x,) where it stays wide


def quantized_product(
    where: str,
    function: Bilinear,
    lhs: jax.Array,
    rhs: jax.Array,
    recipe: Recipe,
    dtype: DTypeLike | None,
) -> jax.Array:
    """`function(lhs, rhs)` by `recipe`, as `dtype`; None: as the dtype of `lhs`, which computes."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{where}: recipe has type {type(recipe).__name__}, expected a Recipe")
    lhs, rhs = (check_differentiable(where, operand, wide=False) for operand in (lhs, rhs))
    dtype = lhs.dtype if dtype is None else jnp.dtype(dtype)
    if dtype not in FLOATS:
        raise TypeError(
            f"{where}: preferred_element_type is {dtype}, expected float32, float16 or bfloat16"
        )
    for spec, held_in in ((recipe.forward, (lhs.dtype, rhs.dtype)), (recipe.gradient, (dtype,))):
        for held in held_in:
            if spec is not None:
                check_holds(where, spec.element, held)
    return _quantized_product(*varying_alike(lhs, rhs), function, recipe, dtype)


# Compiled as one function, so that all products alike are traced once: those of a model with six
# equal blocks as those of one.
@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _quantized_product(
    lhs: jax.Array, rhs: jax.Array, function: Bilinear, recipe: Recipe, dtype: DTypeLike
) -> jax.Array:
    operands = _operand(lhs, recipe.forward), _operand(rhs, recipe.forward)
    return _product((lhs, rhs), operands, function, recipe.gradient, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _product(
    given: tuple[jax.Array, jax.Array],
    operands: tuple[Operand, Operand],
    function: Bilinear,
    gradient: BlockFormat | None,
    dtype: DTypeLike,
) -> jax.Array:
    return differentiable_in_dtype(_combined(function, *operands), dtype)


def _product_jvp(
    function: Bilinear,
    gradient: BlockFormat | None,
    dtype: DTypeLike,
    primals: Any,
    tangents: Any,
) -> tuple[jax.Array, jax.Array]:
    """By what was given; the tangents of its roundings are for second derivatives alone."""
    (given, operands), (dots, _) = primals, tangents
    out = _product(given, operands, function, gradient, dtype)
    terms = []
    for side, (x, dot) in enumerate(zip(given, dots, strict=True)):
        if not isinstance(dot, SymbolicZero):
            forward = _Tangent(function, side, dtype)
            transpose = _Cotangent(function, side, gradient, _struct(x))
            terms.append(linear_with_transpose(forward, transpose, operands[1 - side], dot))
    return out, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(out)


_product.defjvp(_product_jvp, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True)
class _Tangent:
    """The product with a tangent on one side, the other operand being q * scale."""

    function: Bilinear
    side: int
    dtype: DTypeLike

    def __call__(self, other: Operand, tangent: jax.Array) -> jax.Array:
        function = _OnSide(self.function, self.side)
        return differentiable_in_dtype(_combined(function, (tangent,), other), self.dtype)


@dataclasses.dataclass(frozen=True)
class _Cotangent:
    """Its transpose, of the cotangent rounded to `spec` with a scale of its own."""

    function: Bilinear
    side: int
    spec: BlockFormat | None
    operand: jax.ShapeDtypeStruct

    def __call__(self, other: Operand, cotangent: jax.Array) -> jax.Array:
        def transposed(q_g: jax.Array, q: jax.Array) -> jax.Array:
            along = functools.partial(_OnSide(self.function, self.side), q=q)
            wide = self.operand.update(dtype=jnp.float32)
            return jax.linear_transpose(along, wide)(q_g.astype(jnp.float32))[0]

        out = _combined(transposed, _operand(cotangent, self.spec), other)
        return differentiable_in_dtype(out, self.operand.dtype)


@dataclasses.dataclass(frozen=True)
class _OnSide:
    """`function` in float32 of an operand on one side and q on the other."""

    function: Bilinear
    side: int

    def __call__(self, operand: jax.Array, q: jax.Array) -> jax.Array:
        operand, q = operand.astype(jnp.float32), q.astype(jnp.float32)
        return self.function(q, operand) if self.side else self.function(operand, q)


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype, and where on a mesh `x` is: what a transpose needs to know."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.manual_axis_type
    )


def _combined(
    function: Callable[[jax.Array, jax.Array], jax.Array], first: Operand, second: Operand
) -> jax.Array:
    """`function` of two operands, float32.

    Scales multiply the result where both operands have one: q is as far from the ends of float32 as
    its format is. Beside an operand without one, 1e36, already its product with q = 448 would
    overflow, so that there q is multiplied by its scale first, in float32.
    """
    q, other_q = first[0], second[0]
    if len(first) != len(second):
        return function(_unscaled(first), _unscaled(second))
    out = function(q, other_q.astype(q.dtype))
    return out if len(first) == 1 else _times_scales(out, first[1], second[1])


def _unscaled(operand: Operand) -> jax.Array:
    wide = differentiable_widened(operand[0])
    return wide if len(operand) == 1 else wide * operand[1]


@jax.custom_jvp
def _times_scales(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """`x * first * second`, no step of which leaves float32's range where the result does not.

    Where one scale is below 1 and the other is not, their product is taken first, which lies
    between them: x = 448 * 448 with the scales 1e36 / 448 and 1 / 448 is 1e36, in either order.
    Where both are on one side of 1, x moves to that side in two steps.
    """
    is_mixed = (first < 1) != (second < 1)
    both = first * second
    first, second = jnp.where(is_mixed, both, first), jnp.where(is_mixed, 1.0, second)
    return settled(settled(x * first) * second)


@_times_scales.defjvp
def _times_scales_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    def plain(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return x * first * second

    return _times_scales(*primals), jax.jvp(plain, primals, tangents)[1]


def _operand(x: jax.Array, spec: BlockFormat | None) -> Operand:
    return (x,) if spec is None else _quantized_jitted(x, spec)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _quantized(x: jax.Array, spec: BlockFormat) -> Operand:
    """The derivative takes x = q * scale for an equality, with a scale that does not move."""
    q, scale = operand_values(x, spec)
    return (q,) if scale is None else (q, scale)


@_quantized.defjvp
def _quantized_jvp(
    spec: BlockFormat, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[Operand, Operand]:
    q, *scales = _quantized(*primals, spec)
    q_dot = tangents[0].astype(jnp.float32)
    for scale in scales:
        q_dot = q_dot / scale
    return (q, *scales), (q_dot.astype(q.dtype), *map(jnp.zeros_like, scales))


_quantized_jitted = jax.jit(_quantized, static_argnums=1)
