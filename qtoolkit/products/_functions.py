"""Quantized `dot_general`, `einsum` and `conv_general_dilated` on plain arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qtoolkit.products._product import quantized_product
from qtoolkit.products._recipe import Recipe

_DEFAULT = Recipe()


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe = _DEFAULT,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.dot_general` of operands rounded by `recipe`.

    Operands are divided by their current scales, rounded to `recipe.forward`, multiplied with
    float32 accumulation, and scaled back: emulation, any backend. It computes in the dtype of
    `lhs`; `rhs` may have another one and is rounded from that, so that float32 weights beside
    bfloat16 activations are rounded once. No step overflows or underflows where the result does
    not. Infinities and NaNs stay: the result, and either gradient, is not finite exactly where that
    of the plain product is not.

    A scale belongs to an operand of one call. So `jax.vmap` of a product scales each example by
    itself, other than one call with a batch dimension, whose operands have one scale for all.

    Args:
      lhs, rhs: float32, float16 or bfloat16; shapes as for `jax.lax.dot_general`.
      dimension_numbers, precision, out_sharding: As for `jax.lax.dot_general`.
      preferred_element_type: Dtype of the result; None for that of `lhs`.
      recipe: What operands and cotangents are rounded to.

    Returns:
      The shape that `jax.lax.dot_general` gives.

    Raises:
      TypeError: An operand or the result has another dtype, or shapes do not match.
      ValueError: The dtype of an operand or of the result does not hold a format's finite values.

    Gradient: with respect to an operand, the product of the cotangent, rounded to
    `recipe.gradient`, and the other operand as it was rounded; operand roundings count as the
    identity. Forward and reverse mode.
    """
    (contract_l, contract_r), (batch_l, batch_r) = dimension_numbers
    numbers = (
        (_integers(contract_l), _integers(contract_r)),
        (_integers(batch_l), _integers(batch_r)),
    )
    function = _DotGeneral(numbers, _hashable(precision), out_sharding)
    return quantized_product("dot_general", function, lhs, rhs, recipe, preferred_element_type)


def einsum(
    subscripts: str,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    recipe: Recipe = _DEFAULT,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.numpy.einsum` of two operands rounded by `recipe`; all else as in `dot_general`."""
    function = _Einsum(subscripts, _hashable(precision), out_sharding)
    return quantized_product("einsum", function, lhs, rhs, recipe, preferred_element_type)


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe = _DEFAULT,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` of operands rounded by `recipe`, as in `dot_general`."""
    function = _ConvGeneralDilated(
        window_strides=_integers(window_strides),
        padding=padding if isinstance(padding, str) else tuple(map(_integers, padding)),
        lhs_dilation=None if lhs_dilation is None else _integers(lhs_dilation),
        rhs_dilation=None if rhs_dilation is None else _integers(rhs_dilation),
        dimension_numbers=_hashable(dimension_numbers),
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=_hashable(precision),
        out_sharding=out_sharding,
    )
    return quantized_product(
        "conv_general_dilated", function, lhs, rhs, recipe, preferred_element_type
    )


@dataclasses.dataclass(frozen=True)
class _DotGeneral:
    dimension_numbers: Any
    precision: Any
    out_sharding: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.dot_general(
            lhs,
            rhs,
            self.dimension_numbers,
            precision=self.precision,
            preferred_element_type=jnp.float32,
            out_sharding=self.out_sharding,
        )


@dataclasses.dataclass(frozen=True)
class _Einsum:
    subscripts: str
    precision: Any
    out_sharding: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.einsum(
            self.subscripts,
            lhs,
            rhs,
            precision=self.precision,
            preferred_element_type=jnp.float32,
            out_sharding=self.out_sharding,
        )


@dataclasses.dataclass(frozen=True)
class _ConvGeneralDilated:
    window_strides: tuple[int, ...]
    padding: Any
    lhs_dilation: tuple[int, ...] | None
    rhs_dilation: tuple[int, ...] | None
    dimension_numbers: Any
    feature_group_count: int
    batch_group_count: int
    precision: Any
    out_sharding: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return lax.conv_general_dilated(lhs, rhs, preferred_element_type=jnp.float32, **options)


def _integers(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in np.asarray(values, int).reshape(-1))


def _hashable(value: Any) -> Any:
    """Lists as tuples, so that equal arguments make equal functions."""
    return tuple(map(_hashable, value)) if type(value) in (list, tuple) else value
