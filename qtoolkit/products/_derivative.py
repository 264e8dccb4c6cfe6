"""The derivatives of a product: its tangent, and the transpose of that, dgrad and wgrad."""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from qtoolkit.casts.internal import differentiable_in_dtype, varying_alike
from qtoolkit.formats.internal import hashed_once
from qtoolkit.products._arithmetic import emulated, multiplied, twice_differentiable
from qtoolkit.products._plan import COTANGENT, OTHER, Plan, State
from qtoolkit.products._residuals import SavedCodes, codes_format, from_residual, to_residual
from qtoolkit.products._rounded import Rounded, Rounding, largest_over, rounded
from qtoolkit.products._stored import restored_operand
from qtoolkit.products._taps import ROLES
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import Scales, amax_to_keep, histogram

Array = jax.Array
Input: TypeAlias = Array | QArray  # an operand to be rounded, or one that is stored as codes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the forward pass saves for the derivatives.

    Attributes:
      operands: For each side that is differentiated, the other operand, rounded as the derivative
        needs it: rhs for dgrad, lhs for wgrad.
      cotangent_amax: The amax by which the cotangent is scaled, from earlier steps.
      key: The key for stochastic rounding.
      new_amaxes: The results of `amax_to_keep` for lhs and rhs; None if nobody differentiates by
        `State.probe`.
      measured: What a tap measured of lhs and rhs, float32[len(ROLES), size], with zeros for the
        cotangents, which the backward pass measures; None if nobody differentiates by
        `State.zeros`.
      extra: The integer arrays of the function.
    """

    operands: tuple[SavedCodes | Rounded, ...]
    cotangent_amax: Array | None
    key: Array | None
    new_amaxes: Any
    measured: Array | None
    extra: tuple[Array, ...]


def residuals_of(
    plan: Plan,
    inputs: tuple[Input, Input],
    operands: tuple[Rounded, Rounded],
    state: State,
    extra: tuple[Array, ...],
    sides: tuple[int, ...],
    *,
    is_observed: bool,
    is_tapped: bool,
) -> Residuals:
    new_amaxes = None
    if is_observed:  # a stored operand has its scale, so nobody needs its amax
        zero = jnp.zeros((), jnp.float32)
        new_amaxes = tuple(
            amax_to_keep(zero if isinstance(x, QArray) else lax.stop_gradient(x)) for x in inputs
        )
    return Residuals(
        operands=tuple(_other_operand(plan, side, inputs, operands, state) for side in sides),
        cotangent_amax=state.amaxes[2],
        key=state.key,
        new_amaxes=new_amaxes,
        measured=_measured(plan, inputs, operands, state) if is_tapped else None,
        extra=extra,
    )


def rounded_operand(x: Input, amax: Array | None, key: Array | None, how: Rounding) -> Rounded:
    """`x` rounded as `how` says; with `Delayed` or calibrated scaling by the `amax` of a layer."""
    if isinstance(x, QArray):
        return restored_operand(x)
    # Nobody needs the derivative of this rounding: the derivative of a product ignores the tangents
    # of rounded operands, and second derivatives flow through `SavedCodes.carrier`. Stopping it
    # here saves JAX the tracing. An operand that is not saved as codes has no carrier and must keep
    # its derivative.
    operand = rounded(lax.stop_gradient(x) if codes_format(how) else x, amax, key, how)
    return from_residual(to_residual(operand, x, how)) if _is_gathered(how) else operand


def _is_gathered(how: Rounding) -> bool:
    """Whether the codes of the operand come from several devices, which keep their shards."""
    return how.operand is not None and how.operand.gather is not None


def _other_operand(
    plan: Plan,
    side: int,
    inputs: tuple[Input, Input],
    operands: tuple[Rounded, Rounded],
    state: State,
) -> SavedCodes | Rounded:
    """The operand by which the cotangent is multiplied to get the gradient of one side.

    That is the other side's operand. If the recipe rounds it as in the forward matmul, the rounded
    array is used again; if not, it is rounded anew.
    """
    other = 1 - side
    x, operand = inputs[other], operands[other]
    if isinstance(x, QArray):
        return lax.stop_gradient(operand)
    how = plan.rounding(OTHER[side], *inputs)
    if how != plan.rounding(other, *inputs) or _is_gathered(how):
        operand = rounded(lax.stop_gradient(x), state.amaxes[other], state.key, how)
    structs = (x if isinstance(x, QArray) else jax.typeof(x) for x in inputs)
    return to_residual(operand, x, how, plan.axes(*structs)[OTHER[side]].contracted)


def is_differentiated(x: Input, dot: Any) -> bool:
    """Whether somebody differentiates by `x`: whether its tangent `dot` is not just zero."""
    leaves = jax.tree.leaves(dot, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    moving = [
        leaf
        for leaf in leaves
        if not isinstance(leaf, SymbolicZero) and leaf.dtype != jax.dtypes.float0
    ]
    if moving and isinstance(x, QArray):
        raise TypeError(
            f"matmul: differentiated by a stored operand, {x!r}, which has no derivative; "
            "differentiate by something else, or train the model from wrap and quantize it then"
        )
    return bool(moving)


def _measured(
    plan: Plan, inputs: tuple[Input, Input], operands: tuple[Rounded, Rounded], state: State
) -> Array:
    """What the tap measures of lhs and rhs: float32[len(ROLES), size].

    Where dgrad rounds rhs, or wgrad lhs, otherwise than the forward matmul, it measures that, too.
    """
    assert plan.tap is not None
    rows = {}
    for side, x in enumerate(inputs):
        for role in (side, OTHER[1 - side]):
            # A stored operand is not rounded here.
            if isinstance(x, QArray) or role not in plan.tap.roles or role in plan.recipe.twins:
                continue
            how, operand = plan.rounding(role, *inputs), operands[side]
            if role != side:
                operand = rounded(x, state.amaxes[side], state.key, how)
            rows[role] = plan.tap(*lax.stop_gradient((how.transformed(x), operand)))
    return _stacked(plan, rows)


def _stacked(plan: Plan, rows: dict[int, Array]) -> Array:
    """The rows of a tap as one float32[len(ROLES), size], with zeros for roles without a row."""
    assert plan.tap is not None
    zeros = jnp.zeros((plan.tap.size,), jnp.float32)
    return jnp.stack(varying_alike(*(rows.get(role, zeros) for role in range(len(ROLES)))))


@hashed_once
@dataclasses.dataclass(frozen=True)
class DifferentiatedProduct:
    """Static data that the tangent of a product and its transpose share.

    Attributes:
      plan: The product.
      sides: The sides that are differentiated: 0 for lhs, 1 for rhs.
      inputs: Shape, dtype and sharding of lhs and rhs.
      structure: The tree structure of the `Residuals`.
    """

    plan: Plan
    sides: tuple[int, ...]
    inputs: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    structure: Any


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The tangent: d(lhs) * rhs + lhs * d(rhs), with unrounded tangents and rounded operands."""

    product: DifferentiatedProduct
    out: jax.ShapeDtypeStruct

    def __call__(self, leaves: tuple[Array, ...], xs: tuple[Array, ...]) -> Array:
        plan, inputs = self.product.plan, self.product.inputs
        residuals: Residuals = jax.tree.unflatten(self.product.structure, leaves)
        terms = []
        for side, saved_other, x in zip(self.product.sides, residuals.operands, xs, strict=False):
            how = plan.rounding(OTHER[side], *inputs)
            other = how.untransformed(from_residual(saved_other), inputs[1 - side].shape)
            part = plan.part(side, *inputs, residuals.extra)
            terms.append(emulated(part.placed, Rounded(x, Scales(), None), other))
        if not terms:  # somebody differentiates only by the probe or the zeros
            return jnp.zeros_like(xs[-1], shape=self.out.shape, dtype=self.out.dtype)
        return differentiable_in_dtype(functools.reduce(jnp.add, terms), plan.dtype)


@dataclasses.dataclass(frozen=True)
class Cotangent:
    """The transpose of `Tangent`: dgrad and wgrad, each with the cotangent rounded as it asks.

    Behind these gradients it returns those of `State.probe` and `State.zeros`, where somebody
    differentiates by them: what the layer's history and a tap want to know of this step.
    """

    product: DifferentiatedProduct

    def __call__(self, leaves: tuple[Array, ...], cotangent: Array) -> tuple[Array, ...]:
        plan, inputs = self.product.plan, self.product.inputs
        residuals: Residuals = jax.tree.unflatten(self.product.structure, leaves)

        @functools.cache  # dgrad and wgrad may round the cotangent alike
        def rounded_cotangent(how: Rounding) -> Rounded:
            return rounded(cotangent, residuals.cotangent_amax, residuals.key, how)

        outs = []
        for side, other in zip(self.product.sides, residuals.operands, strict=True):
            operand = rounded_cotangent(plan.rounding(COTANGENT[side], *inputs, cotangent))
            part = plan.part(side, *inputs, residuals.extra)
            multiply = twice_differentiable if part.is_native else multiplied
            out = multiply(part, operand, from_residual(other))
            outs.append(differentiable_in_dtype(out, part.dtype))
        if residuals.new_amaxes is not None:
            outs.append(self._observed((*residuals.new_amaxes, amax_to_keep(cotangent))))
        if residuals.measured is not None:
            assert plan.tap is not None
            rows = {}
            for role in COTANGENT:
                # What dgrad and wgrad round alike is measured once, for dgrad.
                if role in plan.tap.roles and role not in plan.recipe.twins:
                    how = plan.rounding(role, *inputs, cotangent)
                    operands = how.transformed(cotangent), rounded_cotangent(how)
                    rows[role] = plan.tap(*lax.stop_gradient(operands))
            outs.append(residuals.measured + _stacked(plan, rows) if rows else residuals.measured)
        return tuple(outs)

    def _observed(self, amaxes: tuple[tuple[Array, Array], ...]) -> Array:
        """The histograms of lhs, rhs and the cotangent: float32[3, buckets]."""
        amax, is_bad = (jnp.stack(parts) for parts in zip(*amaxes, strict=True))
        # Shards that share scales have one history. Only with `check_vma=True` does JAX add up the
        # histograms of all shards, so the largest amax is taken here, of scalars.
        if names := self.product.plan.recipe.axis_names:
            largest = largest_over(jnp.stack([amax, is_bad.astype(amax.dtype)]), names)
            (amax, is_bad), _ = varying_alike(largest, amax)
            is_bad = is_bad != 0
        # Of operands that are not delayed the history needs only to know whether they are finite.
        amax = jnp.where(np.array(self.product.plan.recipe.delayed), amax, 0)
        return jax.vmap(histogram)(amax, is_bad)
