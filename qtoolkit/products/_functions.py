"""Quantized matmuls and convolutions on plain arrays, with the signatures of JAX's own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from qtoolkit.casts.internal import key_words
from qtoolkit.products._bilinear import ConvGeneralDilated, DotGeneral, Einsum, RaggedDot
from qtoolkit.products._plan import State
from qtoolkit.products._product import quantized_product
from qtoolkit.products._recipe import Recipe
from qtoolkit.scaling import QArray

_DEFAULT = Recipe()


def dot_general(
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe = _DEFAULT,
    key: jax.Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.dot_general` of operands rounded by `recipe`.

    Operands are divided by their scales, rounded, and multiplied with float32 accumulation. If both
    have one scale each, the scales then multiply the result; if one has scales of blocks, channels
    or tokens, operands are scaled back in float32 before the product. It computes in the dtype of
    `lhs`. `rhs` may have another dtype and is rounded from that: float32 weights with bfloat16
    activations are rounded once, not first to bfloat16.

    No step overflows or underflows unless the result does, with three exceptions. With
    `arithmetic="native"` the product of both scales has to be a float32 number. In formats with an
    `amax_epsilon` (DeepSeek's) numbers far below it become 0. And no scale is below 2**-126
    (2**-127 in MX): an operand without numbers above the product of that and the format's largest
    number (5e-36 for E4M3, 7e-34 for E5M2; for NVFP4, with its two scales, 2e-32) is rounded more
    coarsely, as subnormal numbers are, and its smallest numbers become 0.

    Infinities and NaNs of operands make the same elements of the result and of the gradients
    non-finite as without quantization. Only if a result comes as close to float32's largest number
    as the rounding of its operands may move it, one of the two products may overflow and the other
    not. Operands never do: what a block rounds up to 2**128 is float32's largest number in the
    product (not with `arithmetic="native"`, where `jax.lax.scaled_dot` applies the scales).

    Each call has its own scales. So under `jax.vmap` each example is scaled by itself, while one
    call with a batch dimension has one scale for all examples. See `Recipe` for what that means for
    causality.

    Args:
      lhs, rhs: float32, float16 or bfloat16; shapes as for `jax.lax.dot_general`. A `QArray` is an
        operand that is rounded already: its codes and scales are used as they are, whatever the
        recipe says of that side, and it has no gradient.
      dimension_numbers, precision, out_sharding: As for `jax.lax.dot_general`.
      preferred_element_type: Dtype of the result; None for that of `lhs`.
      recipe: What the operands are rounded to, here and in the gradients.
      key: A key of `jax.random`, for recipes that round stochastically. A hash of the values is
        mixed into it: the same key draws other bits for other values. Without a key the bits
        follow from the values alone.

    Returns:
      The shape that `jax.lax.dot_general` gives.

    Raises:
      TypeError: An operand or the result has another dtype, or shapes do not match.
      ValueError: The dtype of an operand or of the result cannot hold a format's finite values; or
        the recipe has `Delayed` scaling, for which a layer must keep state.

    Gradient: The cotangent times the other operand, both rounded as `dgrad` and `wgrad` of the
    recipe say. The rounding of operands counts as the identity (straight-through). Forward mode
    multiplies unrounded tangents with the same rounded operands.

    Examples:
      >>> x, w = jnp.asarray([[0.3, 448.0]]), jnp.asarray([[448.0], [1.0]])
      >>> contract = (((1,), (0,)), ((), ()))
      >>> qt.dot_general(x, w, contract)  # 0.3 became 0.3125
      Array([[588.]], dtype=float32)
      >>> qt.dot_general(x, w, contract, recipe=qt.Recipe(None, None))  # nothing is rounded
      Array([[582.4]], dtype=float32)
    """
    function = DotGeneral(dimension_numbers, precision, out_sharding)
    dtype, state = preferred_element_type, _keyed("dot_general", key)
    return quantized_product("dot_general", function, lhs, rhs, recipe, dtype, state)


def einsum(
    subscripts: str,
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
    *others: jax.Array,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    recipe: Recipe = _DEFAULT,
    key: jax.Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.numpy.einsum` of two operands rounded by `recipe`.

    As in `dot_general`, each call has its own scales: under `jax.vmap` each example is scaled by
    itself.

    Args:
      subscripts: As for `jax.numpy.einsum`, of two operands.
      lhs, rhs, preferred_element_type, recipe, key: As in `dot_general`.
      precision, out_sharding: As for `jax.numpy.einsum`.

    Returns, Raises, Gradient: As `dot_general`; the shape is that of `jax.numpy.einsum`.

    Examples:
      >>> x, w = jnp.asarray([[[0.3, 448.0]]]), jnp.asarray([[448.0], [1.0]])
      >>> qt.einsum("btd,df->btf", x, w)  # 0.3 became 0.3125
      Array([[[588.]]], dtype=float32)
      >>> qt.einsum("btd,df->btf", x, w, recipe=qt.Recipe(("bfloat16", "bfloat16")))
      Array([[[582.75]]], dtype=float32)
    """
    if others:
        raise TypeError(
            f"einsum: got {2 + len(others)} operands, expected two; multiply two at a time, e.g. "
            "qtoolkit.einsum('ac,cd->ad', qtoolkit.einsum('ab,bc->ac', a, b), c)"
        )
    function = Einsum(subscripts, precision, out_sharding)
    dtype, state = preferred_element_type, _keyed("einsum", key)
    return quantized_product("einsum", function, lhs, rhs, recipe, dtype, state)


def conv_general_dilated(
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
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
    key: jax.Array | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` of operands rounded by `recipe`.

    Blocks are cut along the input features, over which the product sums; in wgrad, which sums over
    positions and examples, along the examples.

    As in `dot_general`, each call has its own scales: under `jax.vmap` each example is scaled by
    itself.

    Args:
      lhs, rhs, preferred_element_type, recipe, key: As in `dot_general`.
      window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count, precision, out_sharding: As for `jax.lax.conv_general_dilated`.

    Returns, Raises, Gradient: As `dot_general`; the shape is that of the function of JAX.

    Examples:
      >>> x = jnp.asarray([[[0.3, 1.0, 448.0]]])  # an example, a channel, three positions
      >>> kernel = jnp.asarray([[[1.0, 448.0]]])
      >>> qt.products.conv_general_dilated(x, kernel, (1,), "VALID")  # 0.3 became 0.3125
      Array([[[   448.3125, 200705.    ]]], dtype=float32)
    """
    function = ConvGeneralDilated(
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
        out_sharding,
    )
    dtype, state = preferred_element_type, _keyed("conv_general_dilated", key)
    return quantized_product("conv_general_dilated", function, lhs, rhs, recipe, dtype, state)


def ragged_dot(
    lhs: jax.Array | QArray,
    rhs: jax.Array | QArray,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe = _DEFAULT,
    key: jax.Array | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` of operands rounded by `recipe`.

    As in `dot_general`, each call has its own scales: under `jax.vmap` each example is scaled by
    itself.

    Args:
      lhs: [m, k], the rows of all groups after one another.
      rhs: [groups, k, n].
      group_sizes: Integers [groups], the number of rows of each.
      precision: As for `jax.lax.ragged_dot`.
      preferred_element_type, recipe, key: As in `dot_general`.

    Returns:
      [m, n].

    Raises, Gradient: As `dot_general`.

    Examples:
      >>> x = jnp.asarray([[0.3], [448.0], [1.0]])
      >>> experts = jnp.asarray([[[1.0]], [[448.0]]])  # two kernels of 1 x 1
      >>> qt.products.ragged_dot(x, experts, jnp.asarray([2, 1]))  # rows 0, 1 and row 2
      Array([[3.125e-01],
             [4.480e+02],
             [4.480e+02]], dtype=float32)
    """
    function, extra = RaggedDot(precision), (jnp.asarray(group_sizes),)
    dtype, state = preferred_element_type, _keyed("ragged_dot", key)
    return quantized_product("ragged_dot", function, lhs, rhs, recipe, dtype, state, extra)


def _keyed(where: str, key: jax.Array | None) -> State | None:
    """A product's state that holds only a key, as two words; None without a key."""
    return None if key is None else State(key=key_words(where, key)[:2])
