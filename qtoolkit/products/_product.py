"""The one quantized product: any bilinear function of two arrays, with its derivatives.

The forward product is `f(q_l, q_r) * s_l * s_r` where both operands have one scale, and
`f(q_l * s_l, q_r * s_r)` in float32 where one has several. Its derivatives are products of the same
kind, `f` transposed: dgrad of the cotangent and rhs, wgrad of lhs and the cotangent, each operand
rounded as the recipe says for that product. Rounding an operand counts as the identity, also where
delayed or static scales saturate. Infinities and NaNs of operands and cotangents stay in q, so that
results are not finite where those of the plain product are not: loss scalers and skipped steps rely
on it.

Everything static about a product is one hashable `_Plan`; everything else is arrays.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from qtoolkit.casts.internal import (
    FLOATS,
    by_platform,
    check_differentiable,
    check_holds,
    elementwise,
    settled,
    varying_alike,
)
from qtoolkit.formats.internal import hashed_once
from qtoolkit.gradients import linear_with_transpose
from qtoolkit.gradients.internal import differentiable_in_dtype
from qtoolkit.products._bilinear import Axes, Bilinear, Blocked, DotGeneral
from qtoolkit.products._learned import LearnedScale, with_learned_scales
from qtoolkit.products._native import native_operands
from qtoolkit.products._operand import (
    Cut,
    Kept,
    Rounded,
    cut,
    keeps_codes,
    kept,
    restored,
    rounded,
)
from qtoolkit.products._recipe import Operand, Recipe, check_recipe
from qtoolkit.products._stored import restored_operand, stored_label
from qtoolkit.products._taps import ROLES, Place, Tap, instrument, swapped_rows
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import Scales, amax_of, explicit_spec, histogram

Array = jax.Array
Given: TypeAlias = Array | QArray


class State(NamedTuple):
    """What a layer keeps for its product from step to step.

    Attributes:
      amax: float32[3], of lhs, rhs and the cotangent, from the steps before; 0 for the current one.
      probe: float32[3, BUCKETS], zeros, whose gradient are the histograms of the step.
      key: uint32[2], words of a key for stochastic rounding.
      zeros: float32[len(ROLES), size], whose gradient is what a tap keeps.
      learned: For lhs and rhs, the scale and the offset, float32 scalars, None where not learned.
    """

    amax: Array | None = None
    probe: Array | None = None
    key: Array | None = None
    zeros: Array | None = None
    learned: tuple[LearnedScale, LearnedScale] | None = None

    def swapped(self) -> "State":
        """Lhs and rhs exchanged: of a product whose lhs is the kernel."""
        order = jnp.array([1, 0, 2])
        amax, probe = (None if x is None else x[order] for x in (self.amax, self.probe))
        zeros = None if self.zeros is None else swapped_rows(self.zeros)
        learned = None if self.learned is None else self.learned[::-1]
        return self._replace(amax=amax, probe=probe, zeros=zeros, learned=learned)


def quantized_product(
    where: str,
    function: Bilinear,
    lhs: Array | QArray,
    rhs: Array | QArray,
    recipe: Recipe,
    dtype: DTypeLike | None,
    state: State | None = None,
    extra: tuple[Array, ...] = (),
    *,
    place: Place | None = None,
    is_swapped: bool = False,
) -> Array:
    """`function(lhs, rhs)` by `recipe`, as `dtype`; None: as the dtype of `lhs`, which computes.

    A `QArray` is an operand that is rounded already: its codes and scales are used as they are, in
    derivatives too, whatever the recipe says of that side. Where that says that a scale is learned,
    the numbers of the codes in their dtype are the operand, as LSQ's are.

    Args:
      where: Of messages: "dot_general of blocks/0/mlp".
      state: What its layer keeps for it; None where nothing is kept.
      extra: Integer arrays that `function` takes besides.
      place: Which product this is; None for one that belongs to no layer.
      is_swapped: Whether lhs is the kernel; recipe and state are those of (input, kernel).

    Raises:
      TypeError: `recipe` is none, an operand or `dtype` is no float of 16 or 32 bits, or codes are
        differentiated by.
      ValueError: A dtype does not hold a format's finite values, or the recipe needs scales that
        `state` does not have: delayed, calibrated or learned ones.
    """
    check_recipe(where, recipe)
    operands, learned = [lhs, rhs], recipe.learned
    given = (rhs, lhs) if is_swapped else (lhs, rhs)
    for index, operand in enumerate((lhs, rhs)):
        if isinstance(operand, QArray):
            side = 1 - index if is_swapped else index
            recipe = recipe.beside_stored(side)
            operands[index] = operand.dequantize() if learned[side] else operand
    lhs, rhs = operands

    def compute(
        recipe: Recipe, state: State | None, tap: Tap | None = None, zeros: Array | None = None
    ) -> Array:
        if tap is not None:
            state = (state or State())._replace(zeros=zeros)
        if is_swapped:
            recipe, state = recipe.swapped(), state and state.swapped()
        return _computed(where, function, lhs, rhs, recipe, dtype, state, extra, tap)

    by = instrument()
    if by is None:
        return compute(recipe, state)
    stored = (stored_label(given[0]), stored_label(given[1]))
    return by.product(place or Place("", where), recipe, state, compute, stored)


def _computed(
    where: str,
    function: Bilinear,
    lhs: Array | QArray,
    rhs: Array | QArray,
    recipe: Recipe,
    dtype: Any,
    state: State | None,
    extra: tuple[Array, ...],
    tap: Tap | None,
) -> Array:
    """`quantized_product`, its arguments checked; recipe and state are those of (lhs, rhs)."""
    _check_kept(where, recipe, state)
    lhs, rhs = (
        x if isinstance(x, QArray) else check_differentiable(where, x, wide=False)
        for x in (lhs, rhs)
    )
    if 0 in (*lhs.shape, *rhs.shape):  # nothing to round, and no scale for it
        wide = (None, None)
        recipe = dataclasses.replace(recipe, forward=wide, dgrad=wide, wgrad=wide)
        state = tap = None
    dtype = jnp.dtype(lhs.dtype if dtype is None else dtype)
    if dtype not in FLOATS:
        raise TypeError(
            f"{where}: preferred_element_type is {dtype}, expected float32, float16 or bfloat16"
        )
    _check_held(where, recipe, lhs.dtype, rhs.dtype, dtype)
    if any(recipe.learned):
        learned, zeros = (None, None) if state is None else (state.learned, state.zeros)
        (lhs, rhs), tap = with_learned_scales(where, (lhs, rhs), recipe, learned, tap, zeros)
        state = None if state is None else state._replace(learned=None)
        recipe = recipe.without_learned()
    if state is not None:
        state = jax.tree.map(jnp.asarray, state)
        state = state._replace(amax=_stopped(state.amax), key=_stopped(state.key))
    plan = _Plan(function, recipe, dtype, tap)
    leaves, structure = jax.tree.flatten((lhs, rhs))
    lhs, rhs = jax.tree.unflatten(structure, varying_alike(*leaves))
    return qtoolkit_product(lhs, rhs, state or State(), extra, plan)


def _stopped(x: Array | None) -> Array | None:
    return None if x is None else lax.stop_gradient(x)


def _check_kept(where: str, recipe: Recipe, state: State | None) -> None:
    """Raises where a layer must keep scales for the recipe, and there are none."""
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
            "from calibrate and freeze (of qtoolkit.nnx or qtoolkit.linen) with batches that reach "
            "it, or give Static a number"
        )


def _check_held(where: str, recipe: Recipe, lhs: Any, rhs: Any, out: Any) -> None:
    """Raises where one of these dtypes does not hold what the recipe rounds that array to."""
    for pair, held in (
        (recipe.forward, (lhs, rhs)),
        (recipe.dgrad, (out, rhs)),
        (recipe.wgrad, (lhs, out)),
    ):
        for operand, dtype in zip(pair, held, strict=True):
            if operand is not None:
                check_holds(where, operand.spec.element, dtype)


@hashed_once
@dataclasses.dataclass(frozen=True)
class _Plan:
    """A product without its arrays. Products alike are traced once."""

    function: Bilinear
    recipe: Recipe
    dtype: Any
    tap: Tap | None = None

    def forward(self, lhs: Any, rhs: Any) -> tuple[Cut, Cut]:
        """How lhs and rhs are cut in the product."""
        of_lhs, of_rhs, _ = self.function.axes(lhs.shape, rhs.shape)
        first, second = self.recipe.forward
        return self._cut(first, of_lhs, lhs), self._cut(second, of_rhs, rhs)

    def other(self, side: int, lhs: Any, rhs: Any) -> Cut:
        """How the other operand is cut in the product that gives the gradient of one side."""
        of_lhs, of_rhs, _ = self.function.axes(lhs.shape, rhs.shape)
        axes, x = (of_lhs, lhs) if side else (of_rhs, rhs)
        is_kept = self.recipe.keeps_forward[side]
        operand = self.recipe.wgrad[0] if side else self.recipe.dgrad[1]
        return self._cut(operand, axes if is_kept else axes.turned(), x)

    def cotangent(self, side: int, lhs: Any, rhs: Any, cotangent: Any) -> Cut:
        """How the cotangent is cut in the product that gives the gradient of one side."""
        *_, of_out = self.function.axes(lhs.shape, rhs.shape)
        if 0 in cotangent.shape:  # nothing to round, and no scale for it
            return self._cut(None, of_out, cotangent)
        if side:
            return self._cut(self.recipe.wgrad[1], of_out.turned(), cotangent)
        return self._cut(self.recipe.dgrad[0], of_out, cotangent)

    def _cut(self, operand: Operand | None, axes: Axes, x: Any) -> Cut:
        return cut(operand, axes, x.shape, self.recipe.axis_names)

    def contracted(
        self, side: int | None, lhs: Any, rhs: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which axes of its first and of its second operand a product sums over.

        Args:
          side: None: of the product of lhs and rhs. 0 or 1: of the one that gives the gradient of
            lhs or rhs, whose operands are the cotangent and the other one.
        """
        of_lhs, of_rhs, of_out = self.function.axes(lhs.shape, rhs.shape)
        if side is None:
            return of_lhs.contracted, of_rhs.contracted
        return (of_out.kept, of_lhs.kept) if side else (of_out.contracted, of_rhs.kept)

    def combined(
        self,
        function: "_Forward | _Transposed",
        first: Rounded,
        second: Rounded,
        contracted: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> Array:
        """`function` of two operands, float32, by the recipe's arithmetic."""
        if self.recipe.arithmetic != "native":
            return _combined(function, first, second)
        is_dot = isinstance(self.function, DotGeneral) and self.function.out_sharding is None
        return _native(function, first, second, contracted if is_dot else None)


# Compiled as one function, so that all products alike are traced once: those of a model with six
# equal blocks as those of one. Reports find products by its name.
@functools.partial(jax.jit, static_argnums=(4,))
def qtoolkit_product(
    lhs: Given, rhs: Given, state: State, extra: tuple[Array, ...], plan: _Plan
) -> Array:
    operands = _forward_operands(lhs, rhs, state, plan)
    return _product((lhs, rhs), operands, state, extra, plan)


def _forward_operands(lhs: Given, rhs: Given, state: State, plan: _Plan) -> tuple[Rounded, Rounded]:
    first, second = plan.forward(lhs, rhs)
    amax_l, amax_r, _ = _amaxes(state)
    return _operand(lhs, amax_l, state.key, first), _operand(rhs, amax_r, state.key, second)


def _operand(x: Given, amax: Array | None, key: Array | None, how: Cut) -> Rounded:
    if isinstance(x, QArray):
        return restored_operand("product", x)
    # `_product_jvp` reads no tangent of a rounded operand, and second derivatives flow through the
    # carrier beside its codes: JAX would trace the derivative of the rounding for nobody.
    return rounded(lax.stop_gradient(x) if keeps_codes(how) else x, amax, key, how)


def _amaxes(state: State) -> tuple[Array | None, Array | None, Array | None]:
    if state.amax is None:
        return None, None, None
    first, second, third = state.amax
    return first, second, third


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _product(
    given: tuple[Given, Given],
    operands: tuple[Rounded, Rounded],
    state: State,
    extra: tuple[Array, ...],
    plan: _Plan,
) -> Array:
    function = _Forward(plan.function, extra)
    contracted = plan.contracted(None, *(operand.q for operand in operands))
    return differentiable_in_dtype(plan.combined(function, *operands, contracted), plan.dtype)


def _product_jvp(plan: _Plan, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The result, and its tangent: a linear function of those of lhs, rhs, probe and taps.

    The tangents of lhs and rhs are those of `given`, of which dgrad and wgrad are the transpose.
    Those of `operands`, the same arrays rounded, are not read here: rounding counts as the
    identity. Second derivatives take them from the residuals, or, where these are codes, from the
    carrier beside the codes.

    Delayed scales stay true only while somebody differentiates by the probe and so learns this
    step's amaxes. Where nobody does, as in `jax.grad` without `qtoolkit.nnx.value_and_grad`, they
    would go stale: then operands are rounded again, by current scales.
    """
    given: tuple[Given, Given]
    (given, operands, state, extra), (dots, _, state_dots, _) = primals, tangents
    is_observed = state.probe is not None and not isinstance(state_dots.probe, SymbolicZero)
    is_tapped = state.zeros is not None and not isinstance(state_dots.zeros, SymbolicZero)
    if state.probe is not None and not is_observed and not is_tapped:
        state = State(key=state.key)
        operands = _forward_operands(given[0], given[1], state, plan)
    out = _product(given, operands, State(key=state.key), extra, plan)
    sides = tuple(side for side in (0, 1) if _moves(given[side], dots[side]))
    xs = [dots[side] for side in sides]
    xs += [state_dots.probe] if is_observed else []
    xs += [state_dots.zeros] if is_tapped else []
    if not xs:
        return out, jnp.zeros_like(out)
    residuals = _Residuals(
        operands=tuple(_residual(plan, side, given, operands, state) for side in sides),
        amax=_amaxes(state)[2],
        key=state.key,
        seen=_seen(given) if is_observed else None,
        tapped=_tapped(plan, given, operands, state) if is_tapped else None,
        extra=extra,
    )
    leaves, structure = jax.tree.flatten(residuals)
    lhs, rhs = (
        _struct(operand.q if isinstance(x, QArray) else x)
        for x, operand in zip(given, operands, strict=True)
    )
    facts = _Facts(plan, sides, (lhs, rhs), is_observed, is_tapped, structure)
    tangent = linear_with_transpose(
        _Tangent(facts, _struct(out)), _Cotangent(facts), tuple(leaves), tuple(xs), jax.typeof(out)
    )
    return out, tangent


_product.defjvp(_product_jvp, symbolic_zeros=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What derivatives keep of the forward product.

    Attributes:
      operands: For each side that is differentiated, the other operand, as that product takes it.
      amax: Of the cotangent, from the steps before.
      key: For stochastic rounding.
      seen: Of lhs and rhs, what `amax_of` gives, where the state observes.
      tapped: What a tap keeps of lhs and rhs: float32[len(ROLES), size], zeros for the cotangents.
      extra: The integer arrays of the function.
    """

    operands: tuple[Kept | Rounded, ...]
    amax: Array | None
    key: Array | None
    seen: Any
    tapped: Array | None
    extra: tuple[Array, ...]


def _residual(
    plan: _Plan,
    side: int,
    given: tuple[Given, Given],
    operands: tuple[Rounded, Rounded],
    state: State,
) -> Kept | Rounded:
    """What the gradient of one side multiplies the cotangent by: the other operand.

    It is the one of the forward product, where this rounds it in the same way; else it is rounded
    again.
    """
    other = 1 - side
    how = plan.other(side, *given)
    x, operand = given[other], operands[other]
    if isinstance(x, QArray):
        return lax.stop_gradient(operand)
    if how != plan.forward(*given)[other]:
        operand = _operand(x, _amaxes(state)[other], state.key, how)
    return kept(operand, x, how)


def _seen(given: tuple[Given, Given]) -> Any:
    """What `amax_of` gives of lhs and of rhs; 0 of stored operands, whose scales do not move."""
    nothing = jnp.zeros((), jnp.float32)
    return tuple(amax_of(nothing if isinstance(x, QArray) else lax.stop_gradient(x)) for x in given)


def _moves(given: Given, dot: Any) -> bool:
    """Whether somebody differentiates by an operand."""
    leaves = jax.tree.leaves(dot, is_leaf=lambda x: isinstance(x, SymbolicZero))
    moving = [x for x in leaves if not isinstance(x, SymbolicZero) and x.dtype != jax.dtypes.float0]
    if moving and isinstance(given, QArray):
        raise TypeError(
            f"product: differentiated by a stored operand, {given!r}, which has no derivative; "
            "differentiate by something else, or train the model from wrap and quantize it then"
        )
    return bool(moving)


def _tapped(
    plan: _Plan, given: tuple[Given, Given], operands: tuple[Rounded, Rounded], state: State
) -> Array:
    """What the tap keeps of lhs and rhs; also as dgrad and wgrad round them, where these differ."""
    amaxes = _amaxes(state)
    forward = plan.forward(*given)
    rows: dict[int, Array] = {}
    for side, x in enumerate(given):
        if isinstance(x, QArray):  # not rounded here
            continue
        rows[side] = _kept_by_tap(plan, side, x, operands[side], forward[side])
        how = plan.other(1 - side, *given)
        role = 3 if side else 4
        if role in _roles(plan) and role not in plan.recipe.twins:
            again = rounded(x, amaxes[side], state.key, how)
            rows[role] = _kept_by_tap(plan, role, x, again, how)
    return _stacked(plan, rows)


def _kept_by_tap(plan: _Plan, role: int, x: Array, operand: Rounded, how: Cut) -> Array:
    assert plan.tap is not None
    if role not in plan.tap.roles:
        return jnp.zeros((plan.tap.size,), jnp.float32)
    x, operand = lax.stop_gradient((how.transformed(x), operand))
    return plan.tap(x, operand, how)


def _roles(plan: _Plan) -> tuple[int, ...]:
    """The operands that a tap looks at, as places in `ROLES`."""
    return () if plan.tap is None else plan.tap.roles


def _stacked(plan: _Plan, rows: dict[int, Array]) -> Array:
    """float32[len(ROLES), size]: what a tap keeps, by role; zeros for the roles without a row."""
    assert plan.tap is not None
    nothing = jnp.zeros((plan.tap.size,), jnp.float32)
    return jnp.stack(varying_alike(*(rows.get(role, nothing) for role in range(len(ROLES)))))


@hashed_once
@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the tangent of a product and its transpose both know."""

    plan: _Plan
    sides: tuple[int, ...]
    given: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    is_observed: bool
    is_tapped: bool
    structure: Any

    def residuals(self, leaves: tuple[Array, ...]) -> _Residuals:
        return jax.tree.unflatten(self.structure, leaves)


@dataclasses.dataclass(frozen=True)
class _Tangent:
    """The sum of the products with a tangent on one side and the other operand rounded."""

    facts: _Facts
    out: jax.ShapeDtypeStruct

    def __call__(self, leaves: tuple[Array, ...], xs: tuple[Array, ...]) -> Array:
        facts = self.facts
        residuals = facts.residuals(leaves)
        terms = []
        for side, kept_other, x in zip(facts.sides, residuals.operands, xs, strict=False):
            function = _OnSide(facts.plan.function, side, residuals.extra)
            how = facts.plan.other(side, *facts.given)
            other = how.untransformed(restored(kept_other), facts.given[1 - side].shape)
            terms.append(_combined(function, Rounded(x, Scales(), None), other))
        if not terms:  # only the probe
            return jnp.zeros_like(xs[-1], shape=self.out.shape, dtype=self.out.dtype)
        return differentiable_in_dtype(functools.reduce(jnp.add, terms), facts.plan.dtype)


@dataclasses.dataclass(frozen=True)
class _Cotangent:
    """The transpose of `_Tangent`: dgrad and wgrad, of the cotangent as each of them rounds it."""

    facts: _Facts

    def __call__(self, leaves: tuple[Array, ...], cotangent: Array) -> tuple[Array, ...]:
        facts = self.facts
        residuals = facts.residuals(leaves)
        found: dict[Cut, Rounded] = {}
        outs = []
        for side, other in zip(facts.sides, residuals.operands, strict=True):
            how = facts.plan.cotangent(side, *facts.given, cotangent)
            if how not in found:
                found[how] = rounded(cotangent, residuals.amax, residuals.key, how)
            wide = facts.given[side].update(dtype=jnp.float32)
            function = _Transposed(facts.plan.function, side, residuals.extra, wide)
            contracted = facts.plan.contracted(side, *facts.given)
            out = facts.plan.combined(function, found[how], restored(other), contracted)
            outs.append(differentiable_in_dtype(out, facts.given[side].dtype))
        if facts.is_observed:
            seen = (*residuals.seen, amax_of(cotangent))
            outs.append(jnp.stack([histogram(*one) for one in seen]))
        if facts.is_tapped:
            outs.append(self._tapped(residuals, cotangent, found))
        return tuple(outs)

    def _tapped(self, residuals: _Residuals, cotangent: Array, found: dict[Cut, Rounded]) -> Array:
        """What the tap keeps of all operands; the cotangent's once, where both products take it
        alike.
        """
        facts, rows = self.facts, {}
        for side, role in ((0, 2), (1, 5)):
            how = facts.plan.cotangent(side, *facts.given, cotangent)
            if role not in _roles(facts.plan) or role in facts.plan.recipe.twins:
                continue
            operand = found.get(how)
            if operand is None:
                operand = rounded(cotangent, residuals.amax, residuals.key, how)
            rows[role] = _kept_by_tap(facts.plan, role, cotangent, operand, how)
        forward = residuals.tapped
        assert forward is not None
        return forward + _stacked(facts.plan, rows) if rows else forward


@dataclasses.dataclass(frozen=True)
class _OnSide:
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
class _Forward:
    """`function` with its integer arrays."""

    function: Bilinear = dataclasses.field(metadata={"static": True})
    extra: tuple[Array, ...]

    def __call__(self, lhs: Any, rhs: Any) -> Array:
        return self.function(lhs, rhs, *self.extra)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Transposed:
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
        function = _OnSide(self.function, self.side, self.extra)
        along = functools.partial(function, q=q)
        return jax.linear_transpose(along, self.wide)(q_g.astype(jnp.float32))[0]


def _is_explicit(*arrays: Array) -> bool:
    """Whether arrays lie on an Explicit mesh."""
    return any(any(explicit_spec(x)) for x in arrays)


def _struct(x: Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype, and where on a mesh `x` is: what a transpose needs to know."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.manual_axis_type
    )


def _combined(function: Callable[[Array, Array], Array], first: Rounded, second: Rounded) -> Array:
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
def _native(
    function: _Forward | _Transposed,
    first: Rounded,
    second: Rounded,
    contracted: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> Array:
    """`_combined`, but multiplied by XLA in the dtypes of the operands' formats where it can be.

    Args:
      contracted: Which axes of both are summed; None where `function` is no plain `dot_general`.
    """
    native = native_operands(first, second, contracted)
    if native is None:
        return _combined(function, first, second)
    out = function(native.first, native.second)
    return _times_scales(out, *native.scales) if native.scales else out


@_native.defjvp
def _native_jvp(contracted: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """The tangent of the emulated product, for second derivatives: codes and `lax.scaled_dot` have
    none.
    """
    return _native(*primals, contracted), jax.jvp(_combined, primals, tangents)[1]


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
