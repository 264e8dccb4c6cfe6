"""What a quantized matmul rounds, and how: frozen data."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from qtoolkit.formats import E4M3FN, E5M2, BlockFormat
from qtoolkit.formats.internal import hashed_once, plain_number
from qtoolkit.products._operand import (
    Delayed,
    Learned,
    Operand,
    OperandLike,
    Pair,
    Scaling,
    Static,
    is_cut_alike,
    with_current_scale,
)

ARITHMETIC = ("emulate", "native")
_FORWARD, _GRADIENT = Operand(BlockFormat.tensor(E4M3FN)), Operand(BlockFormat.tensor(E5M2))
_UNSET: Any = object()
UNQUANTIZED = "unquantized"  # in place of a format, in reports


@hashed_once
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Recipe:
    """What a quantized matmul or convolution and its two derivatives round. Frozen, hashable.

    For y = f(lhs, rhs), with lhs the input of a layer and rhs its kernel, three matmuls are
    computed: `forward`, which is y; `dgrad`, the gradient of lhs, from the cotangent and rhs; and
    `wgrad`, the gradient of rhs, from lhs and the cotangent. Each of them rounds its two operands
    on its own; an operand that is None is not rounded. Blocks are cut along the axis that a matmul
    contracts, so dgrad may round rhs otherwise than the forward matmul did. One exception: if the
    cotangent is not rounded and dgrad asks for the same rhs as `forward`, it reuses that rounded
    array, because the gradient is then that of the numbers that were multiplied (straight-through).
    Likewise wgrad.

        Recipe()                                             E4M3 forward, E5M2 for gradients
        Recipe(forward="mxfp8")                              MX blocks in all three matmuls
        Recipe(("e4m3fn", "int4_group32"), gradient=None)    a pair: lhs, rhs
        Recipe("e4m3fn", wgrad=None)                         dW = x^T ct, nothing rounded

    **One scale for a tensor, from the tensor itself, is neither causal nor independent of the
    batch**: the last token, or another example, may hold the largest magnitude and so move the
    scale of all others. In a language model whose logits have a standard deviation of 1.1, changing
    the last token moved earlier logits by up to 0.28. Token scaling
    (`recipes.token_scaled`), `Static` and, in layers that keep a history, `Delayed` scaling do not
    have this.

    **What `arithmetic="native"` passes to XLA in 8 bits or fewer.** This is decided for each of the
    three matmuls on its own. All others are emulated, for example blocks with float32 scales
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
      forward: Operands (lhs, rhs).
      dgrad: (cotangent, rhs).
      wgrad: (lhs, cotangent).
      arithmetic: "emulate" multiplies the values in the dtype of the operands or in float32.
        "native" gives XLA arrays of the formats' own dtypes where it can, see above.
      axis_names: Axes of `jax.shard_map` whose shards share the scale of a whole tensor, its zero
        point and the history of delayed scales. Without them each shard has a scale of its own.
      warm_up: How many training steps a layer computes in high precision: see `policies.warm_up`.
      lookups: Whether rows looked up in a table of embeddings are rounded, too, as rhs of `forward`
        (a tied head multiplies the same codes); the gradient passes straight through.

    Source: arXiv:2209.05433 (E4M3 forward, E5M2 for gradients).

    Examples:
      >>> recipe = qt.Recipe("mxfp8", gradient="e5m2")
      >>> recipe.wgrad[0].spec.name, recipe.wgrad[1].spec.name
      ('mxfp8_e4m3', 'e5m2 by tensor')
      >>> qt.recipes.from_json(qt.recipes.to_json(recipe)) == recipe
      True
      >>> print(str(qt.Recipe((None, "int4_group32"), gradient=None)).split(";")[0])
      <Recipe forward: unquantized x (int4_group32)
    """

    forward: Pair
    dgrad: Pair
    wgrad: Pair
    arithmetic: str = "emulate"
    axis_names: tuple[str, ...] = ()
    warm_up: int = 0
    lookups: bool = False

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
        lookups: bool = False,
    ) -> None:
        """From operands, formats or their names.

        Args:
          forward: For both operands, or a pair (lhs, rhs).
          gradient: For the cotangents, where `dgrad` and `wgrad` are not given. Default: the format
            of `forward` where that is one for both operands and has blocks, else E5M2 with one
            scale. None: they are not rounded.
          dgrad: (cotangent, rhs). Default: (gradient, rhs as in `forward`). None: nothing is
            rounded.
          wgrad: (lhs, cotangent). Default: (lhs as in `forward`, gradient). None: nothing is
            rounded.
          arithmetic, axis_names, warm_up, lookups: See above.

        Raises:
          ValueError: A format is unknown; one format without negative numbers is given for both
            operands (write a pair if that is meant); only one operand of a matmul has a transform;
            the scale of a cotangent would be learned or calibrated; `lookups` is given and rhs has
            state, random bits or a transform.
          TypeError: An argument has another type.
        """
        lhs, rhs = _pair("forward", forward)
        if gradient is _UNSET:
            has_blocks = lhs is not None and lhs.spec.block != ()
            gradient = lhs if has_blocks and lhs == rhs else _GRADIENT
            if gradient is not None and gradient.is_calibrated:
                gradient = with_current_scale(gradient)
        cotangent = _operand("gradient", gradient)
        fields = {
            "forward": (lhs, rhs),
            "dgrad": (cotangent, rhs) if dgrad is _UNSET else _pair("dgrad", dgrad),
            "wgrad": (lhs, cotangent) if wgrad is _UNSET else _pair("wgrad", wgrad),
            "arithmetic": arithmetic,
            "axis_names": axis_names,
            "warm_up": plain_number(warm_up),
            "lookups": lookups,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._check_operands()
        if arithmetic not in ARITHMETIC:
            raise ValueError(
                f"Recipe: arithmetic={arithmetic!r}, expected one of {', '.join(ARITHMETIC)}"
            )
        self._check_lookups()
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
            formats = [UNQUANTIZED if o is None else f"({o})" for o in getattr(self, name)]
            parts.append(f"{name}: {' x '.join(formats)}")
        parts += [] if self.arithmetic == "emulate" else [self.arithmetic]
        parts += [f"scales over {', '.join(self.axis_names)}"] if self.axis_names else []
        return f"<Recipe {'; '.join(parts)}>"

    def _check_lookups(self) -> None:
        """Raises if look-ups cannot be rounded as the kernel is."""
        if type(self.lookups) is not bool:
            raise TypeError(f"Recipe: lookups={self.lookups!r}, expected True or False")
        rhs = self.forward[1]
        if self.lookups and rhs is not None and not (rhs.is_plain and not self.warm_up):
            raise ValueError(
                f"Recipe: lookups=True and {rhs} as rhs, expected current or static scales, "
                "rounding to nearest, no transform, no warm-up: look-ups keep no state; give the "
                "embedding a recipe of its own by Rules"
            )
        if self.lookups and rhs is not None and rhs.spec.axes not in (None, ()):
            # A head that is tied to the table takes it transposed, and would cut other axes.
            raise ValueError(
                f"Recipe: lookups=True and {rhs} as rhs, whose axes are named, expected blocks "
                "along rows wherever these lie; write spec.with_(axes=None)"
            )

    def _check_operands(self) -> None:
        """Raises if operands do not fit together."""
        for name in ("forward", "dgrad", "wgrad"):
            transforms = [None if o is None else o.transform for o in getattr(self, name)]
            if transforms[0] != transforms[1]:  # (x H)(H w) = x w needs both H
                raise ValueError(
                    f"Recipe: {name} transforms its operands by {transforms[0]} and "
                    f"{transforms[1]}, expected the same for both: the result would be another"
                )
        lhs, rhs = self.forward
        for name, operand, forward in (
            ("dgrad", self.dgrad[1], rhs),
            ("wgrad", self.wgrad[0], lhs),
        ):
            is_learned = any(o is not None and o.is_learned for o in (forward, operand))
            if is_learned and forward != operand:
                raise ValueError(
                    f"Recipe: {name} has {operand} for what forward has as {forward}, expected the "
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
        lengths = sorted({s.history for s in self._scalings if isinstance(s, Delayed)})
        if len(lengths) > 1:  # a layer keeps them in one array
            raise ValueError(
                f"Recipe: Delayed scaling with histories of {lengths[0]} and {lengths[-1]} steps, "
                "expected one length for all operands, which share a history"
            )

    @property
    def operands(self) -> tuple[Operand | None, ...]:
        """All six operands: lhs, rhs, dgrad's cotangent and rhs, wgrad's lhs and cotangent."""
        return (*self.forward, *self.dgrad, *self.wgrad)

    @property
    def reused(self) -> dict[int, int]:
        """Maps a place in `operands` to that of the rounded array of `forward` used again there.

        {3: 1} says that dgrad reuses the rhs of the forward product, {4: 0} that wgrad reuses its
        lhs. They do if the cotangent is not rounded, so that the gradient is that of what was
        computed.
        """
        o = self.operands
        return {
            place: forward
            for place, forward, cotangent in ((3, 1, 2), (4, 0, 5))
            if o[cotangent] is None and o[place] == o[forward]
        }

    @property
    def twins(self) -> dict[int, int]:
        """Maps a place in `operands` to an earlier one where the same array is rounded alike.

        {3: 1} says that dgrad rounds rhs (place 3) to the same numbers as the forward product
        (place 1). Reports then show rhs only once.
        """
        o = self.operands
        return {
            place: twin
            for place, twin in ((3, 1), (4, 0), (5, 2))
            if place in self.reused or (o[place] == o[twin] and is_cut_alike(o[place]))
        }

    @property
    def _scalings(self) -> list[Scaling]:
        return [o.scaling for o in self.operands if o is not None]

    @property
    def is_delayed(self) -> bool:
        """Whether a layer has to keep histories of amaxes for it."""
        return any(self.delayed)

    @property
    def delayed(self) -> tuple[bool, bool, bool]:
        """Whether lhs, rhs and the cotangent are scaled by earlier steps, in any of the matmuls."""
        lhs, rhs, in_dgrad, dgrad_rhs, wgrad_lhs, in_wgrad = (
            o is not None and isinstance(o.scaling, Delayed) for o in self.operands
        )
        return lhs or wgrad_lhs, rhs or dgrad_rhs, in_dgrad or in_wgrad

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
        """The recipe after learned scales have been applied: None in place of their operands."""
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
        """The recipe for a matmul of two activations, such as queries and keys in attention.

        Both operands are rounded like the input of a layer. A recipe that rounds only weights does
        not quantize such a matmul.
        """
        lhs, cotangent = self.forward[0], self.dgrad[0]
        partner = lhs  # of the cotangent, with its transform
        if lhs is not None:
            transform = None if cotangent is None else cotangent.transform
            partner = dataclasses.replace(lhs, transform=transform)
        return self._with_operands((lhs, lhs, cotangent, partner, partner, cotangent))

    def swapped(self) -> "Recipe":
        """The recipe for a matmul whose lhs is the kernel: lhs and rhs are exchanged."""
        lhs, rhs, *gradients = self.operands
        return self._with_operands((rhs, lhs, *gradients[::-1]))

    def with_stored(self, side: int) -> "Recipe":
        """The recipe for a matmul whose operand on one side is stored as codes.

        That operand is not rounded, nor is it transformed; so its partner may not be, either.
        """
        operands = list(self.operands)
        # Its places and its partner's, in `forward` and in the derivative that multiplies by it.
        for stored, partner in ((1, 0), (3, 2)) if side else ((0, 1), (4, 5)):
            other = operands[partner]
            operands[stored] = None
            operands[partner] = other and dataclasses.replace(other, transform=None)
        return self._with_operands(operands)

    def without_state(self) -> "Recipe":
        """The recipe with current scales in place of delayed ones, and without a warm-up."""
        if not self.warm_up and not self.is_delayed:
            return self  # each call of a layer asks
        current = self.mapped(
            lambda o: with_current_scale(o) if isinstance(o.scaling, Delayed) else o
        )
        return dataclasses.replace(current, warm_up=0)

    def frozen(self) -> "Recipe":
        """The recipe with calibrated scales in place of current and delayed ones.

        This concerns scales for a whole tensor of lhs or rhs, also in dgrad and wgrad. Cotangents
        are not calibrated; their scales become current.
        """
        calibrated = [o for o in self.forward if o is not None and o.is_calibratable]
        operands = list(self.operands)
        for place in (0, 1, 3, 4):
            operand = operands[place]
            if operand is not None and operand in calibrated:
                scaling = Static(power_of_two=operand.has_power_of_two)
                operands[place] = dataclasses.replace(operand, scaling=scaling)
        return self._with_operands(operands).without_state()

    def mapped(self, function: Callable[[Operand], Operand | None]) -> "Recipe":
        """The recipe with `function(operand)` in place of each operand that is not None."""
        return self._with_operands([None if o is None else function(o) for o in self.operands])

    def _with_operands(self, operands: Sequence[Operand | None]) -> "Recipe":
        """The recipe with six other operands, in the order of `operands`."""
        lhs, rhs, dgrad_cotangent, dgrad_rhs, wgrad_lhs, wgrad_cotangent = operands
        return dataclasses.replace(
            self,
            forward=(lhs, rhs),
            dgrad=(dgrad_cotangent, dgrad_rhs),
            wgrad=(wgrad_lhs, wgrad_cotangent),
        )


def _pair(name: str, value: Any) -> Pair:
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise ValueError(
                f"Recipe: {name} has {len(value)} operands, expected two: (lhs, rhs), in dgrad "
                "(cotangent, rhs), in wgrad (lhs, cotangent)"
            )
        return _operand(name, value[0]), _operand(name, value[1])
    both = _operand(name, value)
    has_offset = both is not None and (both.spec.zero_point or both.scaling == Learned(offset=True))
    if both is not None and not both.spec.element.signed and not has_offset:
        raise ValueError(
            f"Recipe: {name} is {both.spec.element.name} for both operands, which has no negative "
            "numbers: those of a kernel would become its lowest; expected a signed format, or a "
            "pair, e.g. ('uint8', 'int8') behind a relu"
        )
    return both, both


def _operand(name: str, value: Any) -> Operand | None:
    if value is None or isinstance(value, Operand):
        return value
    try:
        return Operand(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Recipe: {name}: {error}") from error
