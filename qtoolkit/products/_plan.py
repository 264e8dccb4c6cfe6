"""A product without its arrays, `Plan`, and what a layer keeps for it, `State`."""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.formats.internal import hashed_once
from qtoolkit.products._arithmetic import Forward, Transposed, combined, native, native_constant
from qtoolkit.products._bilinear import Axes, Bilinear, DotGeneral, Einsum
from qtoolkit.products._instruments import Tap, swapped_rows
from qtoolkit.products._learned import LearnedScale
from qtoolkit.products._operand import Operand
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._residuals import codes_format
from qtoolkit.products._rounded import Cut, Rounded, cut, rounded
from qtoolkit.products._stored import restored_operand
from qtoolkit.scaling import QArray

Array = jax.Array
Given: TypeAlias = Array | QArray


class State(NamedTuple):
    """What a product needs besides its operands: values its layer keeps, and arrays of zeros.

    Attributes:
      amax: float32[3], the amaxes by which to scale lhs, rhs and the cotangent, from earlier steps.
        A 0 says: scale by the amax of the array at hand, or by `Delayed.initial`.
      probe: float32[3, BUCKETS] of zeros. Its gradient is a histogram of the amaxes of this step,
        from which the layer updates its history; see `_instruments` for why a gradient.
      key: uint32[2], the words of a key for stochastic rounding.
      zeros: float32[len(ROLES), size] of zeros. Its gradient is what a tap measured.
      step: uint32, how many steps the layer has been trained, for a recipe with a warm-up.
      learned: For lhs and for rhs the learned scale and offset, float32 scalars; None where the
        recipe learns none.
    """

    amax: Array | None = None
    probe: Array | None = None
    key: Array | None = None
    zeros: Array | None = None
    step: Array | None = None
    learned: tuple[LearnedScale, LearnedScale] | None = None

    @property
    def amaxes(self) -> tuple[Array | None, Array | None, Array | None]:
        """The amaxes of lhs, rhs and the cotangent as scalars; None if the layer keeps none."""
        if self.amax is None:
            return None, None, None
        first, second, third = self.amax
        return first, second, third

    def swapped(self) -> "State":
        """The state with lhs and rhs exchanged.

        Layers keep state in the order (input, kernel). A product whose lhs is the kernel needs it
        in the other order.
        """
        order = jnp.array([1, 0, 2])
        amax, probe = (None if x is None else x[order] for x in (self.amax, self.probe))
        zeros = None if self.zeros is None else swapped_rows(self.zeros)
        learned = None if self.learned is None else self.learned[::-1]
        return self._replace(amax=amax, probe=probe, zeros=zeros, learned=learned)


@hashed_once
@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a product. Hashable, so that equal products share one trace."""

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
        return cut(
            operand,
            axes,
            x.shape,
            self.recipe.axis_names,
            is_native=self.recipe.arithmetic == "native",
            is_dot=isinstance(self.function, DotGeneral | Einsum)
            and self.function.out_sharding is None,
        )

    def contracted(
        self, side: int | None, lhs: Any, rhs: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which axes of its first and of its second operand a product sums over.

        Args:
          side: None for the forward product of lhs and rhs. 0 for dgrad, the product of the
            cotangent and rhs; 1 for wgrad, that of the cotangent and lhs.
        """
        of_lhs, of_rhs, of_out = self.function.axes(lhs.shape, rhs.shape)
        if side is None:
            return of_lhs.contracted, of_rhs.contracted
        return (of_out.kept, of_lhs.kept) if side else (of_out.contracted, of_rhs.kept)

    def combined(
        self,
        function: "Forward | Transposed",
        first: Rounded,
        second: Rounded,
        contracted: tuple[tuple[int, ...], tuple[int, ...]],
        dtype: Any,
        *,
        is_constant: bool = False,
    ) -> Array:
        """`function(first, second)`, emulated or native as the recipe says.

        Emulated it is float32, natively it may be `dtype`, in which the result is wanted. If
        `is_constant`, it has no derivative, and its product stands in no `custom_jvp`.
        """
        if self.recipe.arithmetic != "native":
            return combined(function, first, second)
        multiply = native_constant if is_constant else native
        return multiply(function, first, second, contracted, dtype)


def operand_of(x: Given, amax: Array | None, key: Array | None, how: Cut) -> Rounded:
    """`x` rounded as `how` says; with `Delayed` or calibrated scaling by the kept `amax`."""
    if isinstance(x, QArray):
        return restored_operand(x)
    # Nobody needs the derivative of this rounding: `_product_jvp` ignores the tangent of a rounded
    # operand, and second derivatives flow through `SavedCodes.carrier`. Stopping it here saves JAX
    # the tracing. An operand that is not saved as codes has no carrier and must keep its own.
    return rounded(lax.stop_gradient(x) if codes_format(how) else x, amax, key, how)
