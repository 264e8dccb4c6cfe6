"""The one quantized product: any bilinear function of two arrays, with its derivatives.

The forward product is `f(q_l, q_r) * s_l * s_r` if both operands have one scale, and
`f(q_l * s_l, q_r * s_r)` in float32 if one has several. Its derivatives are products of the same
kind, with `f` transposed: dgrad takes the cotangent and rhs, wgrad takes lhs and the cotangent, and
each operand is rounded as the recipe says for that product. The derivative of rounding is taken to
be the identity, even where delayed or static scales saturate. Infinities and NaNs of operands and
cotangents are kept in q, so a result is non-finite wherever that of the plain product is: loss
scalers, which skip such steps, rely on it.

The way from a recipe to XLA:

  Recipe, Operand     what each of the six operands is rounded to: data
  Plan                the same with the function: all that is static about a product
  Rounding            an operand of the recipe whose blocks have axes, for one array
  Rounded             that array as values or codes, and its scales
  Part                the forward product, dgrad or wgrad: multiplies two `Rounded`
  Bilinear            the function of JAX that it calls
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from qtoolkit.casts.internal import (
    FLOATS,
    check_differentiable,
    check_holds,
    differentiable_in_dtype,
    varying_alike,
)
from qtoolkit.gradients import linear_with_transpose
from qtoolkit.products._arithmetic import multiplied
from qtoolkit.products._bilinear import Bilinear
from qtoolkit.products._checks import check_recipe
from qtoolkit.products._derivative import (
    Cotangent,
    DifferentiatedProduct,
    Input,
    Tangent,
    is_differentiated,
    residuals_of,
    rounded_operand,
)
from qtoolkit.products._learned import with_learned_scales
from qtoolkit.products._plan import Plan, State
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rounded import Rounded
from qtoolkit.products._stored import is_stack_of_kernels, with_inputs_transformed
from qtoolkit.products._taps import Tap
from qtoolkit.products._zero_points import of_differences
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import TornBlocksError

Array = jax.Array


def quantized_product(
    where: str,
    function: Bilinear,
    lhs: Input,
    rhs: Input,
    recipe: Recipe,
    dtype: DTypeLike | None,
    state: State | None = None,
    extra: tuple[Array, ...] = (),
    *,
    tap: Tap | None = None,
    is_swapped: bool = False,
) -> Array:
    """Computes `function(lhs, rhs, *extra)` with operands rounded as `recipe` says.

    A `QArray` is an operand that is rounded already: its codes and scales are used as they are, in
    derivatives too, whatever the recipe says about that side. The other operand is divided by its
    factors and rotated, if it has such, before it is rounded. But if the recipe has a learned scale
    there, the operand is the dequantized array in its dtype, as `lsq` returns it.

    Args:
      where: Starts error messages: "dot_general of blocks/0/mlp".
      dtype: The dtype of the result; None for that of `lhs`.
      state: What the layer keeps for this product; None if it keeps nothing.
      extra: Integer arrays that `function` takes besides.
      tap: What to measure; `state` then has zeros, whose gradient it becomes.
      is_swapped: Whether lhs is the kernel; recipe and state are always for (input, kernel).

    Raises:
      TypeError: `recipe` is no recipe, an operand or `dtype` is no float of 16 or 32 bits, or
        somebody differentiates by codes.
      ValueError: A dtype cannot hold a format's finite values, or the recipe needs scales that
        `state` does not have: delayed, calibrated or learned ones.
    """
    check_recipe(where, recipe)
    inputs, operands, learned = (lhs, rhs), [lhs, rhs], recipe.learned
    for index, operand in enumerate(inputs):
        if isinstance(operand, QArray):
            side = 1 - index if is_swapped else index
            recipe = recipe.with_stored(side)
            contracted = function.axes(lhs.shape, rhs.shape)[index].contracted
            is_array = learned[side] or is_stack_of_kernels(operand, contracted)
            operands[index] = operand.dequantize() if is_array else operand
    lhs, rhs = with_inputs_transformed(function, *operands)

    def compute(recipe: Recipe, state: State | None) -> Array:
        if is_swapped:
            recipe, state = recipe.swapped(), state and state.swapped()
        arguments = _prepared(where, function, lhs, rhs, recipe, dtype, state, tap)
        try:
            return qtoolkit_product(*arguments, extra)
        except TornBlocksError as error:
            raise TornBlocksError(f"{where}: {error}") from None

    if recipe.warm_up and state is not None and state.step is not None:
        return lax.cond(
            state.step < recipe.warm_up,
            lambda: compute(_HIGH_PRECISION, None),
            lambda: compute(recipe, state),
        )
    return compute(recipe, state)


_HIGH_PRECISION = Recipe((None, None), None)


def _prepared(
    where: str,
    function: Bilinear,
    lhs: Input,
    rhs: Input,
    recipe: Recipe,
    dtype: Any,
    state: State | None,
    tap: Tap | None,
) -> tuple[Plan, Input, Input, State]:
    """The checked arguments of `qtoolkit_product`; recipe and state are for (lhs, rhs) here."""
    _check_state(where, recipe, state)
    lhs, rhs = (
        x if isinstance(x, QArray) else check_differentiable(where, x, wide=False)
        for x in (lhs, rhs)
    )
    if 0 in (*lhs.shape, *rhs.shape):  # nothing to round, and no scale for it
        recipe, state, tap = recipe.mapped(lambda _: None), None, None
    dtype = jnp.dtype(lhs.dtype if dtype is None else dtype)
    if dtype not in FLOATS:
        raise TypeError(
            f"{where}: preferred_element_type is {dtype}, expected float32, float16 or bfloat16"
        )
    dtypes = (lhs.dtype, rhs.dtype, dtype, rhs.dtype, lhs.dtype, dtype)
    for operand, dtype_of_operand in zip(recipe.operands, dtypes, strict=True):
        if operand is not None:
            check_holds(where, of_differences(operand.spec).element, dtype_of_operand)
    if any(recipe.learned):
        learned, zeros = (None, None) if state is None else (state.learned, state.zeros)
        (lhs, rhs), tap = with_learned_scales(where, (lhs, rhs), recipe, learned, tap, zeros)
        state = None if state is None else state._replace(learned=None)
        recipe = recipe.without_learned()
    if state is not None:
        state = jax.tree.map(jnp.asarray, state)
        amax, key = lax.stop_gradient((state.amax, state.key))
        state = state._replace(amax=amax, key=key)
    leaves, structure = jax.tree.flatten((lhs, rhs))
    lhs, rhs = jax.tree.unflatten(structure, varying_alike(*leaves))
    return Plan(function, recipe, dtype, tap), lhs, rhs, state or State()


def _check_state(where: str, recipe: Recipe, state: State | None) -> None:
    """Raises if the recipe needs numbers that a layer keeps, and `state` has none."""
    if recipe.warm_up and (state is None or state.step is None):
        raise ValueError(
            f"{where}: the recipe has a warm-up, whose steps a layer counts; expected a layer of a "
            "model from qtoolkit.nnx.wrap or qtoolkit.linen.wrap"
        )
    if state is not None and state.amax is not None:
        return
    if recipe.is_delayed:
        raise ValueError(
            f"{where}: the recipe has Delayed scaling, which keeps state from step to step; "
            "expected a layer of a model from qtoolkit.nnx.wrap or qtoolkit.linen.wrap"
        )
    if recipe.is_calibrated:
        raise ValueError(
            f"{where}: not calibrated, though the recipe has Static() scaling; expected a scale "
            "from calibrate and freeze (of qtoolkit.nnx or qtoolkit.linen), of a model wrapped "
            "with current scaling and with batches that reach it; or give Static a number"
        )


# One jitted function, so that JAX traces equal products once: a model with six equal blocks needs
# no more traces than one block. Reports find products by the name of this function.
@functools.partial(jax.jit, static_argnums=0)
def qtoolkit_product(
    plan: Plan, lhs: Input, rhs: Input, state: State, extra: tuple[Array, ...]
) -> Array:
    amaxes = state.amaxes
    first, second = (
        rounded_operand(x, amaxes[side], state.key, plan.rounding(side, lhs, rhs))
        for side, x in enumerate((lhs, rhs))
    )
    # The product is computed outside of `_product`, because a policy of `jax.checkpoint` such as
    # `dots_saveable` looks at primitives, and never into a `custom_jvp`.
    part = plan.part(None, lhs, rhs, extra)
    out = multiplied(part, *lax.stop_gradient((first, second)))
    out = differentiable_in_dtype(out, plan.dtype)
    return _product(plan, (lhs, rhs), (first, second), state, extra, out)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(
    plan: Plan,
    inputs: tuple[Input, Input],
    operands: tuple[Rounded, Rounded],
    state: State,
    extra: tuple[Array, ...],
    out: Array,
) -> Array:
    """`out`, the product of the operands, with the derivative of a product of the inputs."""
    del plan, inputs, operands, state, extra
    return out


def _product_jvp(plan: Plan, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The result and its tangent, which is linear in the tangents of lhs, rhs, probe and zeros.

    lhs and rhs come twice: as `inputs`, and rounded as `operands`. Rounding counts as the identity,
    so only the tangents of `inputs` are read, and dgrad and wgrad are the transpose in these.
    Second derivatives differentiate this function by its residuals, which hold the rounded
    operands; for residuals that are codes, by their carrier.

    Delayed scales need the amaxes of each step, which come out as the gradient of the probe. What
    a layer does if nobody differentiates by the probe is said in `_observed`.
    """
    inputs: tuple[Input, Input]
    (inputs, operands, state, extra, out), (dots, _, state_dots, *_) = primals, tangents
    is_observed = state.probe is not None and not isinstance(state_dots.probe, SymbolicZero)
    is_tapped = state.zeros is not None and not isinstance(state_dots.zeros, SymbolicZero)
    # `out` has no tangent of its own: it was computed behind `stop_gradient`. Second derivatives
    # differentiate this rule, and get the tangent of the result from this call; without it they
    # would be 0. It has no probe and no zeros, because the first derivative observes the step.
    out = _product(plan, inputs, operands, State(key=state.key), extra, out)
    sides = tuple(side for side in (0, 1) if is_differentiated(inputs[side], dots[side]))
    xs = [dots[side] for side in sides]
    xs += [state_dots.probe] if is_observed else []
    xs += [state_dots.zeros] if is_tapped else []
    if not xs:
        return out, jnp.zeros_like(out)
    residuals = residuals_of(
        plan, inputs, operands, state, extra, sides, is_observed=is_observed, is_tapped=is_tapped
    )
    leaves, structure = jax.tree.flatten(residuals)
    lhs, rhs = (
        _struct(operand.q if isinstance(x, QArray) else x)
        for x, operand in zip(inputs, operands, strict=True)
    )
    product = DifferentiatedProduct(plan, sides, (lhs, rhs), structure)
    tangent = linear_with_transpose(
        Tangent(product, _struct(out)),
        Cotangent(product),
        tuple(leaves),
        tuple(xs),
        jax.typeof(out),
    )
    return out, tangent


_product.defjvp(_product_jvp, symbolic_zeros=True)


def _struct(x: Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of `x`, which a transpose needs in place of the array."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.manual_axis_type
    )
