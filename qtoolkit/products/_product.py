"""The one quantized product: any bilinear function of two arrays, with its derivatives.

The forward product is `f(q_l, q_r) * s_l * s_r`: operands on the grid of their format, the scales
outside. Its derivatives are products of the same kind: `f` transposed, of the rounded cotangent and
the other operand's q. Rounding an operand counts as the identity: with current scaling nothing
saturates.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from qtoolkit.casts import FLOATS, check_differentiable, check_holds
from qtoolkit.formats import Format
from qtoolkit.gradients import linear_with_transpose, varying_alike
from qtoolkit.products._recipe import Recipe
from qtoolkit.scaling import quantized_values


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
    for fmt, held_in in ((recipe.forward, (lhs.dtype, rhs.dtype)), (recipe.gradient, (dtype,))):
        for held in held_in:
            if fmt is not None:
                check_holds(where, fmt, held)
    return _product(*varying_alike(lhs, rhs), function, recipe, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _product(
    lhs: jax.Array, rhs: jax.Array, function: Bilinear, recipe: Recipe, dtype: DTypeLike
) -> jax.Array:
    (q_l, s_l), (q_r, s_r) = _operand(lhs, recipe.forward), _operand(rhs, recipe.forward)
    return (function(q_l, q_r.astype(q_l.dtype)) * s_l * s_r).astype(dtype)


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
        return (out * scale).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class _Cotangent:
    """Its transpose, of the cotangent rounded to `fmt` with a scale of its own."""

    function: Bilinear
    side: int
    fmt: Format | None
    operand: jax.ShapeDtypeStruct

    def __call__(self, other: tuple[jax.Array, ...], cotangent: jax.Array) -> jax.Array:
        (q_g, s_g), (q, scale) = _operand(cotangent, self.fmt), other
        along = functools.partial(_on_side, self.function, self.side, q=q)
        transposed = jax.linear_transpose(along, self.operand.update(dtype=jnp.float32))
        (out,) = transposed(q_g.astype(jnp.float32))
        return (out * scale * s_g).astype(self.operand.dtype)


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
def _operand(x: jax.Array, fmt: Format | None) -> tuple[jax.Array, jax.Array]:
    """Q and scale with x ~ q * scale; the derivative takes that for an equality, scale fixed."""
    return (x, jnp.float32(1)) if fmt is None else quantized_values(x, fmt)


@_operand.defjvp
def _operand_jvp(
    fmt: Format | None, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    q, scale = _operand(*primals, fmt)
    q_dot = (tangents[0].astype(jnp.float32) / scale).astype(q.dtype)
    return (q, scale), (q_dot, jnp.zeros_like(scale))
