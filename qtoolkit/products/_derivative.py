"""The derivatives of a product: its tangent, and the transpose of that, dgrad and wgrad."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from qtoolkit.casts.internal import differentiable_in_dtype, varying_alike
from qtoolkit.formats.internal import hashed_once
from qtoolkit.products._arithmetic import OnSide, Transposed, combined
from qtoolkit.products._instruments import ROLES
from qtoolkit.products._plan import Given, Plan, State, operand_of
from qtoolkit.products._residuals import SavedCodes, from_residual, to_residual
from qtoolkit.products._rounded import Cut, Rounded, largest_over, rounded
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import Scales, amax_to_keep, histogram

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the forward product leaves for its derivatives.

    Attributes:
      operands: For each side that is differentiated, the other operand, rounded as the derivative
        product needs it: rhs for dgrad, lhs for wgrad.
      amax: The amax by which the cotangent is scaled, from earlier steps.
      key: The key for stochastic rounding.
      seen: The results of `amax_to_keep` for lhs and rhs, if the layer's history observes them.
      tapped: What a tap measured of lhs and rhs: float32[len(ROLES), size], with rows of zeros for
        the cotangents, which are measured in the backward pass.
      extra: The integer arrays of the function.
    """

    operands: tuple[SavedCodes | Rounded, ...]
    amax: Array | None
    key: Array | None
    seen: Any
    tapped: Array | None
    extra: tuple[Array, ...]


def residual_of(
    plan: Plan,
    side: int,
    given: tuple[Given, Given],
    operands: tuple[Rounded, Rounded],
    state: State,
) -> SavedCodes | Rounded:
    """The operand by which the cotangent is multiplied to get the gradient of one side.

    That is the other side's operand. If the recipe rounds it as in the forward product, the rounded
    array is used again; if not, it is rounded anew.
    """
    other = 1 - side
    how = plan.other(side, *given)
    x, operand = given[other], operands[other]
    if isinstance(x, QArray):
        return lax.stop_gradient(operand)
    if how != plan.forward(*given)[other]:
        operand = operand_of(x, state.amaxes[other], state.key, how)
    structs = (x if isinstance(x, QArray) else jax.typeof(x) for x in given)
    return to_residual(operand, x, how, plan.contracted(side, *structs)[1])


def seen_of(given: tuple[Given, Given]) -> Any:
    """The results of `amax_to_keep` for lhs and rhs; those of 0 for stored operands.

    A stored operand has its scale, so nobody needs its amax.
    """
    nothing = jnp.zeros((), jnp.float32)
    return tuple(
        amax_to_keep(nothing if isinstance(x, QArray) else lax.stop_gradient(x)) for x in given
    )


def is_moving(given: Given, dot: Any) -> bool:
    """Whether somebody differentiates by this operand: whether its tangent is not just zero."""
    leaves = jax.tree.leaves(dot, is_leaf=lambda x: isinstance(x, SymbolicZero))
    moving = [x for x in leaves if not isinstance(x, SymbolicZero) and x.dtype != jax.dtypes.float0]
    if moving and isinstance(given, QArray):
        raise TypeError(
            f"product: differentiated by a stored operand, {given!r}, which has no derivative; "
            "differentiate by something else, or train the model from wrap and quantize it then"
        )
    return bool(moving)


def tapped_of(
    plan: Plan, given: tuple[Given, Given], operands: tuple[Rounded, Rounded], state: State
) -> Array:
    """What the tap measures of lhs and rhs: float32[len(ROLES), size].

    Where dgrad rounds rhs, or wgrad lhs, otherwise than the forward product, it measures that, too.
    """
    assert plan.tap is not None
    forward = plan.forward(*given)
    rows: dict[int, Array] = {}
    for side, x in enumerate(given):
        if isinstance(x, QArray):  # not rounded here
            continue
        rows[side] = _kept_by_tap(plan, side, x, operands[side], forward[side])
        how = plan.other(1 - side, *given)
        role = 3 if side else 4
        if role in plan.tap.roles and role not in plan.recipe.twins:
            again = rounded(x, state.amaxes[side], state.key, how)
            rows[role] = _kept_by_tap(plan, role, x, again, how)
    return _stacked(plan, rows)


def _kept_by_tap(plan: Plan, role: int, x: Array, operand: Rounded, how: Cut) -> Array:
    assert plan.tap is not None
    if role not in plan.tap.roles:
        return jnp.zeros((plan.tap.size,), jnp.float32)
    x, operand = lax.stop_gradient((how.transformed(x), operand))
    return plan.tap(x, operand)


def _stacked(plan: Plan, rows: dict[int, Array]) -> Array:
    """The rows of a tap as one float32[len(ROLES), size], with zeros for roles without a row."""
    assert plan.tap is not None
    nothing = jnp.zeros((plan.tap.size,), jnp.float32)
    return jnp.stack(varying_alike(*(rows.get(role, nothing) for role in range(len(ROLES)))))


@hashed_once
@dataclasses.dataclass(frozen=True)
class Facts:
    """Static data that the tangent of a product and its transpose share.

    Attributes:
      plan: The product.
      sides: The sides that are differentiated: 0 for lhs, 1 for rhs.
      given: Shape and dtype of lhs and rhs.
      is_observed: Whether somebody differentiates by `State.probe`.
      is_tapped: Whether somebody differentiates by `State.zeros`.
      structure: The tree structure of the `Residuals`.
    """

    plan: Plan
    sides: tuple[int, ...]
    given: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    is_observed: bool
    is_tapped: bool
    structure: Any


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The tangent: d(lhs) * rhs + lhs * d(rhs), with unrounded tangents and rounded operands."""

    facts: Facts
    out: jax.ShapeDtypeStruct

    def __call__(self, leaves: tuple[Array, ...], xs: tuple[Array, ...]) -> Array:
        facts = self.facts
        residuals: Residuals = jax.tree.unflatten(facts.structure, leaves)
        terms = []
        for side, kept_other, x in zip(facts.sides, residuals.operands, xs, strict=False):
            function = OnSide(facts.plan.function, side, residuals.extra)
            how = facts.plan.other(side, *facts.given)
            other = how.untransformed(from_residual(kept_other), facts.given[1 - side].shape)
            terms.append(combined(function, Rounded(x, Scales(), None), other))
        if not terms:  # somebody differentiates only by the probe or the zeros
            return jnp.zeros_like(xs[-1], shape=self.out.shape, dtype=self.out.dtype)
        return differentiable_in_dtype(functools.reduce(jnp.add, terms), facts.plan.dtype)


@dataclasses.dataclass(frozen=True)
class Cotangent:
    """The transpose of `Tangent`: dgrad and wgrad, each with the cotangent rounded as it asks."""

    facts: Facts

    def __call__(self, leaves: tuple[Array, ...], cotangent: Array) -> tuple[Array, ...]:
        facts = self.facts
        residuals: Residuals = jax.tree.unflatten(facts.structure, leaves)
        found: dict[Cut, Rounded] = {}
        outs = []
        for side, other in zip(facts.sides, residuals.operands, strict=True):
            how = facts.plan.cotangent(side, *facts.given, cotangent)
            if how not in found:
                found[how] = rounded(cotangent, residuals.amax, residuals.key, how)
            wide = facts.given[side].update(dtype=jnp.float32)
            function = Transposed(facts.plan.function, side, residuals.extra, wide)
            contracted = facts.plan.contracted(side, *facts.given)
            dtype = facts.given[side].dtype
            out = facts.plan.combined(function, found[how], from_residual(other), contracted, dtype)
            outs.append(differentiable_in_dtype(out, dtype))
        if facts.is_observed:
            outs.append(self._observed((*residuals.seen, amax_to_keep(cotangent))))
        if facts.is_tapped:
            outs.append(self._tapped(residuals, cotangent, found))
        return tuple(outs)

    def _observed(self, seen: tuple[tuple[Array, Array], ...]) -> Array:
        """The histograms of lhs, rhs and the cotangent: float32[3, buckets].

        Shards that share scales have one history. Only with `check_vma=True` does JAX add up the
        histograms of all shards, so the largest amax is taken here, of scalars.
        """
        amax, is_bad = (jnp.stack(parts) for parts in zip(*seen, strict=True))
        if names := self.facts.plan.recipe.axis_names:
            largest = largest_over(jnp.stack([amax, is_bad.astype(amax.dtype)]), names)
            (amax, is_bad), _ = varying_alike(largest, amax)
            is_bad = is_bad != 0
        # Of operands that are not delayed the history needs only to know whether they are finite.
        amax = jnp.where(np.array(self.facts.plan.recipe.delayed), amax, 0)
        return jax.vmap(histogram)(amax, is_bad)

    def _tapped(self, residuals: Residuals, cotangent: Array, found: dict[Cut, Rounded]) -> Array:
        """What the tap measures of all operands.

        If dgrad and wgrad round the cotangent alike, it is measured only once, for dgrad.
        """
        plan, rows = self.facts.plan, {}
        assert plan.tap is not None
        assert residuals.tapped is not None
        for side, role in ((0, 2), (1, 5)):
            how = plan.cotangent(side, *self.facts.given, cotangent)
            if role not in plan.tap.roles or role in plan.recipe.twins:
                continue
            operand = found.get(how)
            if operand is None:
                operand = rounded(cotangent, residuals.amax, residuals.key, how)
            rows[role] = _kept_by_tap(plan, role, cotangent, operand, how)
        return residuals.tapped + _stacked(plan, rows) if rows else residuals.tapped
