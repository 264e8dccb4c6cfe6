"""A product without its arrays, `Plan`, and what a layer keeps for it, `State`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qtoolkit.formats.internal import hashed_once
from qtoolkit.products._arithmetic import Part
from qtoolkit.products._bilinear import Axes, Bilinear, DotGeneral, Einsum
from qtoolkit.products._learned import LearnedScale
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rounded import Rounding, rounding_of
from qtoolkit.products._taps import Tap, swapped_rows

Array = jax.Array

# An operand's role is its index in `_taps.ROLES` and in `Recipe.operands`. For the gradient
# of lhs (dgrad) and of rhs (wgrad), these are the roles of the cotangent and the other operand.
COTANGENT, OTHER = (2, 5), (3, 4)


class State(NamedTuple):
    """What a product needs besides its operands: values its layer keeps, and arrays of zeros.

    Attributes:
      amax: float32[3], the amaxes by which to scale lhs, rhs and the cotangent, from earlier steps.
        A 0 says: scale by the amax of the array at hand, or by `Delayed.initial`.
      probe: float32[3, BUCKETS] of zeros. Its gradient is a histogram of the amaxes of this step,
        from which the layer updates its history; see `_states` for why a histogram, and
        `_taps` for why a gradient.
      key: uint32[2], the words of a key for stochastic rounding.
      zeros: float32[len(ROLES), size] of zeros. Its gradient is what a tap measured.
      step: uint32, how many steps the layer has been trained, for a recipe with a warm-up.
      learned: For lhs and for rhs the learned scale and offset, float32 scalars; None where the
        recipe learns none.
      joined: For lhs and for rhs the amax of all kernels with which it is joined, or None.
    """

    amax: Array | None = None
    probe: Array | None = None
    key: Array | None = None
    zeros: Array | None = None
    step: Array | None = None
    learned: tuple[LearnedScale, LearnedScale] | None = None
    joined: tuple[Array | None, Array | None] = (None, None)

    @property
    def amaxes(self) -> tuple[Array | None, Array | None, Array | None]:
        """The amaxes of lhs, rhs and the cotangent as scalars; None if the layer keeps none."""
        first, second, third = (None, None, None) if self.amax is None else self.amax
        lhs, rhs = self.joined
        return first if lhs is None else lhs, second if rhs is None else rhs, third

    def swapped(self) -> "State":
        """The state with lhs and rhs exchanged.

        Layers keep state in the order (input, kernel). A product whose lhs is the kernel needs it
        in the other order.
        """
        order = jnp.array([1, 0, 2])
        amax, probe = (None if x is None else x[order] for x in (self.amax, self.probe))
        zeros = None if self.zeros is None else swapped_rows(self.zeros)
        learned = None if self.learned is None else self.learned[::-1]
        joined = self.joined[::-1]
        return self._replace(amax=amax, probe=probe, zeros=zeros, learned=learned, joined=joined)


@hashed_once
@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a product. Hashable, so that equal products share one trace."""

    function: Bilinear
    recipe: Recipe
    dtype: Any
    tap: Tap | None = None

    def axes(self, lhs: Any, rhs: Any) -> tuple[Axes, ...]:
        """The axes of each operand in its matmul, in the order of `_taps.ROLES`."""
        of_lhs, of_rhs, of_out = self.function.axes(lhs.shape, rhs.shape)
        return of_lhs, of_rhs, of_out, of_rhs.turned(), of_lhs.turned(), of_out.turned()

    def rounding(self, role: int, lhs: Any, rhs: Any, cotangent: Any = None) -> Rounding:
        """How the operand with this role is rounded."""
        x = (lhs, rhs, cotangent, rhs, lhs, cotangent)[role]
        # An operand of the forward matmul that a derivative uses again has blocks along the axis
        # over which the forward matmul sums.
        role = self.recipe.reused.get(role, role)
        return rounding_of(
            self.recipe.operands[role] if 0 not in x.shape else None,
            self.axes(lhs, rhs)[role],
            x.shape,
            self.recipe.axis_names,
            is_native=self.recipe.arithmetic == "native",
            is_dot=isinstance(self.function, DotGeneral | Einsum)
            and self.function.out_sharding is None,
        )

    def part(self, side: int | None, lhs: Any, rhs: Any, extra: tuple[Array, ...]) -> Part:
        """The forward matmul (side None), dgrad (0) or wgrad (1)."""
        axes = self.axes(lhs, rhs)
        first, second = (0, 1) if side is None else (COTANGENT[side], OTHER[side])
        gradient = None if side is None else (lhs, rhs)[side]
        return Part(
            self.function,
            extra,
            (axes[first].contracted, axes[second].contracted),
            self.dtype if gradient is None else gradient.dtype,
            self.recipe.arithmetic == "native",
            side,
            None if gradient is None else gradient.update(dtype=jnp.float32),
        )
