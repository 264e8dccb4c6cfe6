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

from qtoolkit.casts.internal import (
    FLOATS,
    check_differentiable,
    check_holds,
    floor_log2,
    power_of_two,
    product,
)
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _product(
    lhs: jax.Array, rhs: jax.Array, function: Bilinear, recipe: Recipe, dtype: DTypeLike
) -> jax.Array:
    out = _combined(function, _operand(lhs, recipe.forward), _operand(rhs, recipe.forward))
    return differentiable_in_dtype(out, dtype)


# One traced program for all products alike: a model of six equal blocks traces one block's.
_quantized_product = jax.jit(_product, static_argnums=(2, 3, 4))


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
    its format is. Beside a wide operand, 1e36, already its product with q = 448 would overflow, so
    that there q is multiplied by its scale first.
    """
    if len(first) == len(second) == 2:
        (q, scale), (other_q, other_scale) = first, second
        return _times_scales(function(q, other_q.astype(q.dtype)), scale, other_scale)
    wide, other = _unscaled(first), _unscaled(second)
    return function(wide, other.astype(wide.dtype))


def _unscaled(operand: Operand) -> jax.Array:
    if len(operand) == 1:
        return operand[0]
    return differentiable_widened(operand[0]) * operand[1]


@jax.custom_jvp
def _times_scales(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """`x * (first * second)`, where that product may lie beyond float32 though the result does not.

    The scales' significands, from 1 to 2, and exponents are multiplied apart, and half of the
    exponents' sum is applied at a time: x = 448 * 448 with the scales 1e36 / 448 and 1 / 448 is
    1e36 in either order. Whatever lies between x and the result is never beyond both of them.
    """
    exponents = [floor_log2(scale) for scale in (first, second)]
    parts = [s * power_of_two(-e) for s, e in zip((first, second), exponents, strict=True)]
    total = exponents[0] + exponents[1]
    half = total // 2
    x = product(x, (parts[0] * parts[1]) * power_of_two(half))
    return product(x, power_of_two(total - half))


@_times_scales.defjvp
def _times_scales_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    def plain(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return x * first * second

    return _times_scales(*primals), jax.jvp(plain, primals, tangents)[1]


def _operand(x: jax.Array, spec: BlockFormat | None) -> Operand:
    return (x,) if spec is None else _quantized(x, spec)


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
