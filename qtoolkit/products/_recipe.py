"""What a quantized product rounds, and how: frozen data."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from qtoolkit.formats import E4M3FN, E5M2, BlockFormat
from qtoolkit.formats.internal import hashed_once, plain_number
from qtoolkit.products._operand import (
    Current,
    Delayed,
    Learned,
    Operand,
    OperandLike,
    Pair,
    Scaling,
    Static,
)

ARITHMETIC = ("emulate", "native")
_FORWARD, _GRADIENT = Operand(BlockFormat.tensor(E4M3FN)), Operand(BlockFormat.tensor(E5M2))
_UNSET: Any = object()


@hashed_once
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Recipe:
    """What a quantized product and the products of its derivatives round. Frozen, hashable.

    For y = f(lhs, rhs), with lhs the input of a layer and rhs its kernel, three products are
    computed: `forward`, which is y; `dgrad`, the gradient of lhs, from the cotangent and rhs; and
    `wgrad`, the gradient of rhs, from lhs and the cotangent. Each of them rounds its two operands
    on its own; None leaves one as it is. Blocks are cut along the axis that a product contracts, so
    dgrad may round rhs otherwise than the forward product did. One exception: if the cotangent
    stays wide and dgrad asks for the same rhs as `forward`, it reuses that rounded array, so that
    the gradient is that of the numbers that were multiplied (straight-through). Likewise wgrad.

        Recipe()                                             E4M3 forward, E5M2 for gradients
        Recipe(forward="mxfp8")                              MX blocks in all three products
        Recipe(("e4m3fn", "int4_group32"), gradient=None)    a pair: lhs, rhs
        Recipe("e4m3fn", wgrad=None)                         dW = x^T ct, nothing rounded

    **One scale for a tensor, from the tensor itself, is neither causal nor independent of the
    batch**: the last token, or another example, may hold the largest magnitude and so move the
    scale of all others. In a language model whose logits have a standard deviation of 1.1, changing
    the last token moved earlier logits by up to 0.28. Token scaling
    (`recipes.token_scaled`), `Static` and, in products that keep a history, `Delayed` scaling do
    not have this.

    **What `arithmetic="native"` passes to XLA in 8 bits or fewer.** This is decided for each of the
    three products on its own. All others are emulated, for example blocks with float32 scales
    (`deepseek_v3`) and integers. Native are:

    * Both operands have an 8-bit float format and one scale each. The result is computed in its
      own dtype (float16: in float32) and multiplied by one scalar, the product of both scales,
      which float32 has to hold. Derivatives of convolutions are given float32 copies.
    * In `dot_general`, layers and `x @ w`: both have an 8-bit float format and float32 scales that
      do not change along the axes that are summed, as in `token_scaled` for arrays of two axes.
      These multiply the result. (Of arrays with more axes, wgrad sums over several and is
      emulated.)
    * In `dot_general`, layers and `x @ w`: both have floats in blocks with E8M0 scales (MXFP8,
      MXFP6, MXFP4), or both with 8-bit scales of another kind (NVFP4, whose second scales multiply
      the result). `jax.lax.scaled_dot` multiplies them: by hardware where XLA has that, else
      elements by scales in bfloat16, which is exact, and sums in float32. Elements of MXFP6 and
      MXFP4 are given as E4M3FN, which holds them: JAX has no arrays of FP6, and XLA of jaxlib
      0.10.2 fails to compile FP4 with E8M0 scales for GPUs. Blocks lie along the contracted axis,
      also in dgrad and wgrad, where a stored kernel's do not unless they are 2-D. Not on Explicit
      meshes, nor with symbolic sizes; and `jax.export` of jax 0.10 takes one platform at a time.

    Attributes:
      forward: Operands (lhs, rhs) of the product.
      dgrad: (cotangent, rhs).
      wgrad: (lhs, cotangent).
      arithmetic: "emulate" multiplies the values in the dtype of the operands or in float32.
        "native" gives XLA arrays of the formats' own dtypes where it can, see above.
      axis_names: Axes of `jax.shard_map` whose shards share the scale of a whole tensor, and the
        history of delayed scales. Without them each shard has a scale of its own.
      warm_up: How many training steps a layer computes in high precision: see `policies.warm_up`.

    Source: arXiv:2209.05433 (E4M3 forward, E5M2 for gradients).

    Examples:
      >>> recipe = qt.Recipe("mxfp8", gradient="e5m2")
      >>> recipe.wgrad[0].spec.name, recipe.wgrad[1].spec.name
      ('mxfp8_e4m3', 'e5m2 by tensor')
      >>> qt.recipes.from_json(qt.recipes.to_json(recipe)) == recipe
      True
      >>> print(qt.Recipe((None, "int4_group32"), gradient=None))
      <Recipe forward: wide x (int4_group32); dgrad: wide x (int4_group32); wgrad: wide x wide>
    """

    forward: Pair
    dgrad: Pair
    wgrad: Pair
    arithmetic: str = "emulate"
    axis_names: tuple[str, ...] = ()
    warm_up: int = 0

    def __init__(
        self,
        forward: OperandLike | tuple[OperandLike, OperandLike] = _FORWARD,
        gradient: OperandLike = _UNSET,
        *,
        dgrad: tuple[OperandLike, OperandLike] | None = _UNSET,
        wgrad: tuple[OperandLike, OperandLike] | None = _UNSET,
        arithmetic: str = "emulate",
        axis_names: tuple[str, ...] = (),
        warm_up: int = 0,
    ) -> None:
        """From operands, formats or their names.

        Args:
          forward: For both operands, or a pair (lhs, rhs).
          gradient: For the cotangents, where `dgrad` and `wgrad` are not given. Left out: the
            format of `forward` where that is one for both operands and has blocks, else E5M2 with
            one scale.
          dgrad: (cotangent, rhs). Left out: (gradient, rhs as in `forward`). None: both wide.
          wgrad: (lhs, cotangent). Left out: (lhs as in `forward`, gradient). None: both wide.
          arithmetic, axis_names, warm_up: See above.

        Raises:
          ValueError: A format is unknown; one format without negative numbers is given for both
            operands (write a pair if that is meant); only one operand of a product has a
            transform; the scale of a cotangent would be learned or calibrated.
          TypeError: An argument has another type.
        """
        lhs, rhs = _pair("forward", forward)
        if gradient is _UNSET:
            has_blocks = lhs is not None and lhs.spec.block != ()
            gradient = lhs if has_blocks and lhs == rhs else _GRADIENT
            if gradient is not None and gradient.is_calibrated:
                gradient = _current(gradient)
        cotangent = _operand("gradient", gradient)
        fields = {
            "forward": (lhs, rhs),
            "dgrad": (cotangent, rhs) if dgrad is _UNSET else _pair("dgrad", dgrad),
            "wgrad": (lhs, cotangent) if wgrad is _UNSET else _pair("wgrad", wgrad),
            "arithmetic": arithmetic,
            "axis_names": axis_names,
            "warm_up": plain_number(warm_up),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._check_transforms()
        self._check_kept_scales()
        self._check_histories()
        if arithmetic not in ARITHMETIC:
            raise ValueError(
                f"Recipe: arithmetic={arithmetic!r}, expected one of {', '.join(ARITHMETIC)}"
            )
        if type(self.warm_up) is not int or self.warm_up < 0:
            raise ValueError(f"Recipe: warm_up={warm_up!r}, expected an integer of 0 or more")
        if not isinstance(axis_names, tuple) or not all(isinstance(n, str) for n in axis_names):
            raise TypeError(
                f"Recipe: axis_names={axis_names!r}, expected a tuple of names of mesh axes"
            )

    def __repr__(self) -> str:
        """The operands as reports show them. `recipes.to_json` writes every detail."""
        parts = []
        for name in ("forward", "dgrad", "wgrad"):
            shown = ["wide" if o is None else f"({o})" for o in getattr(self, name)]
            parts.append(f"{name}: {' x '.join(shown)}")
        parts += [] if self.arithmetic == "emulate" else [self.arithmetic]
        parts += [f"scales over {', '.join(self.axis_names)}"] if self.axis_names else []
        return f"<Recipe {'; '.join(parts)}>"

    def _check_transforms(self) -> None:
        """Raises unless both operands are transformed or none: (x H)(H w) = x w needs both H."""
        for name in ("forward", "dgrad", "wgrad"):
            transforms = [None if o is None else o.transform for o in getattr(self, name)]
            if transforms[0] != transforms[1]:
                raise ValueError(
                    f"Recipe: {name} transforms its operands by {transforms[0]} and "
                    f"{transforms[1]}, expected the same for both: the product would be another"
                )

    def _check_histories(self) -> None:
        """Raises unless all histories have one length: a layer keeps them in one array."""
        lengths = sorted({s.history for s in self._scalings if isinstance(s, Delayed)})
        if len(lengths) > 1:
            raise ValueError(
                f"Recipe: Delayed scaling with histories of {lengths[0]} and {lengths[-1]} steps, "
                "expected one length for all operands, which share a history"
            )

    def _check_kept_scales(self) -> None:
        """Raises if a scale is learned or calibrated that belongs to no operand of `forward`, or if
        a derivative has another operand than `forward` where that has a learned scale.
        """
        lhs, rhs = self.forward
        for name, given, forward in (("dgrad", self.dgrad[1], rhs), ("wgrad", self.wgrad[0], lhs)):
            is_learned = [o is not None and o.is_learned for o in (forward, given)]
            if any(is_learned) and forward != given:
                raise ValueError(
                    f"Recipe: {name} has {given} for what forward has as {forward}, expected the "
                    "same where a scale is learned"
                )
        cotangents = self.dgrad[0], self.wgrad[1]
        if any(o is not None and o.is_learned for o in cotangents):
            raise ValueError(
                "Recipe: a cotangent has Learned scaling, expected it for lhs or rhs of forward"
            )
        if any(o is not None and o.is_calibrated for o in cotangents):
            raise ValueError(
                "Recipe: a cotangent has Static() scaling, which nobody calibrates, expected "
                "Current() or Delayed(), or Static with a number"
            )

    @property
    def operands(self) -> tuple[Operand | None, ...]:
        """All six operands: lhs, rhs, dgrad's cotangent and rhs, wgrad's lhs and cotangent."""
        return (*self.forward, *self.dgrad, *self.wgrad)

    @property
    def twins(self) -> dict[int, int]:
        """Maps a place in `operands` to an earlier one where the same array is rounded alike.

        {3: 1} says that dgrad rounds rhs (place 3) to the same numbers as the forward product
        (place 1). Reports then show rhs only once.
        """
        lhs, rhs = self.forward
        pairs = (
            (3, 1, self.dgrad[1], rhs, self.keeps_forward[0]),
            (4, 0, self.wgrad[0], lhs, self.keeps_forward[1]),
            (5, 2, self.wgrad[1], self.dgrad[0], False),
        )
        return {
            role: twin
            for role, twin, a, b, is_kept in pairs
            if is_kept or (a == b and _is_cut_alike(a))
        }

    @property
    def keeps_forward(self) -> tuple[bool, bool]:
        """(Whether dgrad reuses the rhs, whether wgrad reuses the lhs) of the forward product.

        They do beside a wide cotangent, so that the gradient is that of what was computed.
        """
        return (
            self.dgrad[0] is None and self.dgrad[1] == self.forward[1],
            self.wgrad[1] is None and self.wgrad[0] == self.forward[0],
        )

    @property
    def _scalings(self) -> list[Scaling]:
        return [o.scaling for o in self.operands if o is not None]

    @property
    def is_delayed(self) -> bool:
        """Whether a layer has to keep histories of amaxes for it."""
        return any(isinstance(scaling, Delayed) for scaling in self._scalings)

    @property
    def delayed(self) -> tuple[bool, bool, bool]:
        """Whether lhs, rhs and the cotangent are scaled by earlier steps, in any of the matmuls."""
        (lhs, rhs), (of_dgrad, dgrad_rhs), (wgrad_lhs, of_wgrad) = (
            self.forward,
            self.dgrad,
            self.wgrad,
        )
        uses = (lhs, wgrad_lhs), (rhs, dgrad_rhs), (of_dgrad, of_wgrad)
        first, second, third = (
            any(o is not None and isinstance(o.scaling, Delayed) for o in operands)
            for operands in uses
        )
        return first, second, third

    @property
    def is_calibrated(self) -> bool:
        """Whether it uses scales that calibration found and a layer keeps."""
        return any(o is not None and o.is_calibrated for o in self.operands)

    @property
    def keeps_state(self) -> bool:
        """Whether a layer has something to keep for its products."""
        is_kept = self.is_delayed or self.is_stochastic or self.is_calibrated
        return is_kept or any(self.learned) or self.warm_up > 0

    @property
    def learned(self) -> tuple[bool, bool]:
        """Whether the scales of lhs and rhs are parameters."""
        lhs, rhs = (o is not None and o.is_learned for o in self.forward)
        return lhs, rhs

    def without_learned(self) -> "Recipe":
        """The recipe after learned scales have been applied: their operands are wide in it."""
        return self.mapped(lambda operand: None if operand.is_learned else operand)

    @property
    def is_stochastic(self) -> bool:
        """Whether it uses random bits."""
        return any(o.is_stochastic for o in self.operands if o is not None)

    @property
    def history(self) -> int:
        """The history that its delayed operands ask for; 0 if it has none."""
        return next((s.history for s in self._scalings if isinstance(s, Delayed)), 0)

    def of_activations(self) -> "Recipe":
        """The recipe for a product of two activations, such as queries and keys in attention.

        Both operands are rounded like the input of a layer. A recipe that rounds only weights
        leaves such a product as it is.
        """
        lhs, cotangent = self.forward[0], self.dgrad[0]
        beside = lhs
        if lhs is not None:
            transform = None if cotangent is None else cotangent.transform
            beside = dataclasses.replace(lhs, transform=transform)
        return dataclasses.replace(
            self, forward=(lhs, lhs), dgrad=(cotangent, beside), wgrad=(beside, cotangent)
        )

    def swapped(self) -> "Recipe":
        """The recipe for a product whose lhs is the kernel: lhs and rhs are exchanged."""
        return dataclasses.replace(
            self,
            forward=self.forward[::-1],
            dgrad=self.wgrad[::-1],
            wgrad=self.dgrad[::-1],
        )

    def beside_stored(self, side: int) -> "Recipe":
        """The recipe for a product whose operand on one side is stored as codes.

        That operand is not rounded, nor is it transformed; so its partner may not be, either.
        """

        def pair(operands: Pair, place: int) -> Pair:
            others = [o and dataclasses.replace(o, transform=None) for o in operands]
            others[place] = None
            return others[0], others[1]

        return dataclasses.replace(
            self,
            forward=pair(self.forward, side),
            dgrad=pair(self.dgrad, 1) if side else self.dgrad,
            wgrad=self.wgrad if side else pair(self.wgrad, 0),
        )

    def without_state(self) -> "Recipe":
        """The recipe with current scales in place of delayed ones."""
        if not self.warm_up and not any(isinstance(s, Delayed) for s in self._scalings):
            return self  # each call of a layer asks

        def current(operand: Operand) -> Operand:
            is_delayed = isinstance(operand.scaling, Delayed)
            return _current(operand) if is_delayed else operand

        return dataclasses.replace(self.mapped(current), warm_up=0)

    def frozen(self) -> "Recipe":
        """The recipe with calibrated scales in place of current and delayed ones.

        This concerns scales for a whole tensor of lhs or rhs, also in dgrad and wgrad. Cotangents
        are not calibrated; their scales become current.
        """
        calibrated = [o for o in self.forward if o is not None and o.is_calibratable]

        def static(operand: Operand | None) -> Operand | None:
            if operand is None or operand not in calibrated:
                return operand
            return dataclasses.replace(
                operand, scaling=Static(power_of_two=operand.has_power_of_two)
            )

        lhs, rhs = self.forward
        return dataclasses.replace(
            self,
            forward=(static(lhs), static(rhs)),
            dgrad=(self.dgrad[0], static(self.dgrad[1])),
            wgrad=(static(self.wgrad[0]), self.wgrad[1]),
        ).without_state()

    def mapped(self, function: Callable[[Operand], Operand | None]) -> "Recipe":
        """The recipe with `function(operand)` in place of each operand that is not None."""

        def pair(given: Pair) -> Pair:
            first, second = (None if operand is None else function(operand) for operand in given)
            return first, second

        return dataclasses.replace(
            self, forward=pair(self.forward), dgrad=pair(self.dgrad), wgrad=pair(self.wgrad)
        )


def _current(operand: Operand) -> Operand:
    """`operand` with a current scale."""
    return dataclasses.replace(operand, scaling=Current(operand.has_power_of_two))


def _is_cut_alike(operand: Operand | None) -> bool:
    """Whether an operand is rounded to the same numbers whichever axis a product contracts."""
    if operand is None:
        return True
    return operand.transform is None and (not operand.spec.block or operand.spec.axes is not None)


def check_recipe(where: str, recipe: Any) -> Recipe:
    """`recipe`; TypeError where it is something else, with the line to write."""
    if isinstance(recipe, Recipe):
        return recipe
    raise TypeError(
        f"{where}: recipe has type {type(recipe).__name__}, expected a Recipe{_instead(recipe)}"
    )


def _instead(given: Any) -> str:
    """What to write in place of something that is no Recipe; "" if nothing is known of it."""
    if isinstance(given, dict):
        return " or Rules; write qtoolkit.Rules({...}, default=qtoolkit.Recipe())"
    name = given if isinstance(given, str) else getattr(given, "name", None)
    if not isinstance(name, str):
        return ""
    presets = _presets()
    if isinstance(given, str) and given in presets:
        return f"; write qtoolkit.recipes.{given}"
    why = ""
    for argument, shown in ((name, repr(name)), (given, "fmt")):
        try:
            Recipe(argument)
        except (TypeError, ValueError) as error:
            why = why or str(error).removeprefix("Recipe: forward: spec: ")
        else:
            return f"; write qtoolkit.Recipe({shown})"
    close = difflib.get_close_matches(name, presets, n=1, cutoff=0.8)
    if close:
        return f"; did you mean qtoolkit.recipes.{close[0]}?"
    return f", e.g. qtoolkit.Recipe('e4m3fn'); {why}"


def _presets() -> tuple[str, ...]:
    from qtoolkit.products import _presets  # not at the top: `_presets` imports this file

    return tuple(name for name in _presets.__all__ if isinstance(getattr(_presets, name), Recipe))


def _pair(name: str, given: Any) -> Pair:
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise ValueError(
                f"Recipe: {name} has {len(given)} operands, expected two: (lhs, rhs), in dgrad "
                "(cotangent, rhs), in wgrad (lhs, cotangent)"
            )
        return _operand(name, given[0]), _operand(name, given[1])
    both = _operand(name, given)
    has_offset = both is not None and both.scaling == Learned(offset=True)
    if both is not None and not both.spec.element.signed and not has_offset:
        raise ValueError(
            f"Recipe: {name} is {both.spec.element.name} for both operands, which has no negative "
            "numbers: those of a kernel would become its lowest; expected a signed format, or a "
            "pair, e.g. ('uint8', 'int8') behind a relu"
        )
    return both, both


def _operand(name: str, given: Any) -> Operand | None:
    if given is None or isinstance(given, Operand):
        return given
    try:
        return Operand(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Recipe: {name}: {error}") from error
