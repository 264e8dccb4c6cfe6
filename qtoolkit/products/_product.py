"""The one quantized product: any bilinear function of two arrays, with its derivatives.

The forward product is `f(q_l, q_r) * s_l * s_r`: operands on the grid of their format, the scales
outside. Its derivatives are products of the same kind: `f` transposed, of the rounded cotangent and
the other operand's q. Rounding an operand counts as the identity: with current scaling nothing
saturates. Infinities and NaNs of operands and cotangents stay in q, so that results are not finite
where those of the plain product are not: loss scalers and skipped steps rely on it.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from qtoolkit.casts.internal import (
    FLOATS,
    check_differentiable,
    check_holds,
    floor_log2,
    in_dtype,
    power_of_two,
    product,
)
from qtoolkit.formats import BlockFormat
from qtoolkit.gradients import linear_with_transpose
from qtoolkit.gradients.internal import varying_alike
from qtoolkit.products._recipe import Recipe
from qtoolkit.scaling.internal import operand_values


class Bilinear(Protocol):
    """A hashable bilinear function of two arrays of one dtype, accumulated in float32."""

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array: ...


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
    return quantized_product_jitted(*varying_alike(lhs, rhs), function, recipe, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _product(
    lhs: jax.Array, rhs: jax.Array, function: Bilinear, recipe: Recipe, dtype: DTypeLike
) -> jax.Array:
    (q_l, s_l), (q_r, s_r) = _operand(lhs, recipe.forward), _operand(rhs, recipe.forward)
    return in_dtype(_times_scales(function(q_l, q_r.astype(q_l.dtype)), s_l, s_r), dtype)


def _times_scales(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """`x * (first * second)`, where that product may lie beyond float32 though the result does not.

    The scales are multiplied as numbers from 1 to 4 and exponents apart; half of the exponents'
    sum is applied at a time. So x = 448 * 448 with the scales 1e36 / 448 and 1 / 448 gives 1e36,
    in either order, and what lies between x and the result is never smaller or larger than both.
    """
    exponents = [jnp.clip(floor_log2(scale), -126, 127) for scale in (first, second)]
    parts = [s * power_of_two(-e) for s, e in zip((first, second), exponents, strict=True)]
    total = exponents[0] + exponents[1]
    half = total // 2
    x = product(x, (parts[0] * parts[1]) * power_of_two(half))
    return product(x, power_of_two(total - half))


def _product_jvp(
    function: Bilinear, recipe: Recipe, dtype: DTypeLike, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    out = _product(*primals, function, recipe, dtype)
    terms = []
    for side, (operand, dot) in enumerate(zip(primals, tangents, strict=True)):
        if not isinstance(dot, SymbolicZero):
            other = _operand(primals[1 - side], recipe.forward)
            forward = _Tangent(function, side, dtype)
            transpose = _Cotangent(function, side, recipe.gradient, _struct(operand))
            terms.append(linear_with_transpose(forward, transpose, other, dot))
    return out, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(out)


_product.defjvp(_product_jvp, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True)
class _Tangent:
    """The product with a tangent on one side, the other operand being q * scale."""

    function: Bilinear
    side: int
    dtype: DTypeLike

    def __call__(self, other: tuple[jax.Array, ...], tangent: jax.Array) -> jax.Array:
        q, scale = other
        out = _on_side(self.function, self.side, tangent.astype(jnp.float32), q)
        return in_dtype(product(out, scale), self.dtype)


@dataclasses.dataclass(frozen=True)
class _Cotangent:
    """Its transpose, of the cotangent rounded to `spec` with a scale of its own."""

    function: Bilinear
    side: int
    spec: BlockFormat | None
    operand: jax.ShapeDtypeStruct

    def __call__(self, other: tuple[jax.Array, ...], cotangent: jax.Array) -> jax.Array:
        (q_g, s_g), (q, scale) = _operand(cotangent, self.spec), other
        along = functools.partial(_on_side, self.function, self.side, q=q)
        transposed = jax.linear_transpose(along, self.operand.update(dtype=jnp.float32))
        (out,) = transposed(q_g.astype(jnp.float32))
        return in_dtype(_times_scales(out, scale, s_g), self.operand.dtype)


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype, and where on a mesh `x` is: what a transpose needs to know."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.manual_axis_type
    )


def _on_side(function: Bilinear, side: int, operand: jax.Array, q: jax.Array) -> jax.Array:
    q = q.astype(jnp.float32)
    return function(q, operand) if side else function(operand, q)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _operand(x: jax.Array, spec: BlockFormat | None) -> tuple[jax.Array, jax.Array]:
    """Q and scale with x ~ q * scale; the derivative takes that for an equality, scale fixed."""
    return (x, jnp.float32(1)) if spec is None else operand_values(x, spec)


@_operand.defjvp
def _operand_jvp(
    spec: BlockFormat | None, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    q, scale = _operand(*primals, spec)
    q_dot = (tangents[0].astype(jnp.float32) / scale).astype(q.dtype)
    return (q, scale), (q_dot, jnp.zeros_like(scale))


# One traced program for all products alike: a model of six equal blocks traces one block's.
quantized_product_jitted = jax.jit(_product, static_argnames=("function", "recipe", "dtype"))
