"""What one operand of a product is rounded to, and where its scales come from: frozen data."""

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import NEAREST
from qtoolkit.formats import E4M3FN, BlockFormat, SpecLike, spec
from qtoolkit.formats.internal import hashed_once


@dataclasses.dataclass(frozen=True)
class Current:
    """Scales from the array itself, in the step that uses it. Nothing is kept.

    Examples:
      >>> qt.Operand("e4m3fn").scaling
      Current()
    """


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Scales from the largest magnitudes of the steps before, which a wrapped layer keeps.

    Values above them saturate. The first step, and a layer that was never reached, scale as
    `Current` does. So do, with nnx, products that a module of one's own computes by itself, such as
    `x @ self.kernel`: they keep no history.

    Observed is what a gradient flows through. A layer that is called twice, once behind
    `stop_gradient` or for an auxiliary output, scales both by what the other call held: larger
    inputs of the one saturate. Call the model there as wrapped by a recipe with current scales,
    `qtoolkit.nnx.wrap(model, qtoolkit.recipes.te_current)`: the parameters are the same.

    Attributes:
      history: How many steps count, 1 or more.
      margin: Room above the largest magnitude, in powers of two.

    Source: arXiv:2209.05433, section 3; `DelayedScaling` of Transformer Engine, whose default is
    1,024 steps.

    Examples:
      >>> delayed = qt.Operand("e4m3fn", scaling=qt.products.Delayed(history=4))
      >>> recipe = qt.Recipe((delayed, None), gradient=None)
      >>> ones = nnx.initializers.ones
      >>> layer = qt.nnx.Fp8Linear(1, 1, kernel_init=ones, rngs=nnx.Rngs(0), recipe=recipe)
      >>> step = qt.nnx.value_and_grad(lambda layer, x: layer(jnp.full((1, 1), x)).sum())
      >>> [f"{step(layer, x)[0]:.0f}" for x in (448.0, 896.0, 896.0)]  # the second one saturates
      ['448', '480', '891']
    """

    history: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("history", 1, 4096), ("margin", 0, 64)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"Delayed: {name}={value!r}, expected an integer of {least} to {most}"
                )


@dataclasses.dataclass(frozen=True)
class Static:
    """One scale that never moves: x ~ q * scale. What does not fit saturates.

    Attributes:
      scale: A positive number, which float32 holds as a normal one. None: what calibration found
        for the product, which the layer keeps; `qtoolkit.nnx.freeze` makes such recipes.

    Examples:
      >>> static = qt.Operand("e4m3fn", scaling=qt.products.Static(0.5))
      >>> recipe = qt.Recipe((static, None), gradient=None)
      >>> x = jnp.asarray([300.0, 0.3])  # 224 is the largest that fits
      >>> qt.einsum("i,ij->j", x, jnp.eye(2), recipe=recipe)
      Array([224.    ,   0.3125], dtype=float32)
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale is None:
            return
        is_number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not is_number or not 2.0**-126 <= self.scale <= 2.0**127:
            raise ValueError(
                f"Static: scale={self.scale!r}, expected a number of 2**-126 to 2**127"
            )


@dataclasses.dataclass(frozen=True)
class Learned:
    """A scale that is a parameter of the model and trains with it: LSQ.

    The operand is `qtoolkit.gradients.lsq(x, scale, fmt)`, or `lsq_plus` with an offset; what the
    derivatives multiply is that, too, and gradients of what saturates are 0, other than with all
    other scalings. For the operands of forward products.

    Attributes:
      offset: Whether there is an offset, which is learned as well (LSQ+).

    Source: arXiv:1902.08153; arXiv:2004.09576.

    Examples:
      >>> learned = qt.Operand("int4", scaling=qt.products.Learned())
      >>> recipe = qt.Recipe((learned, None), gradient=None)
      >>> layer = qt.nnx.Fp8Linear(2, 1, rngs=nnx.Rngs(0), recipe=recipe)
      >>> qt.nnx.start_scales(layer, jnp.asarray([[1.0, -3.0]]))
      >>> scales = jax.tree.leaves(nnx.state(layer, qt.nnx.LsqScale))
      >>> print([f"{scale.item():.3f}" for scale in scales])  # 2 * mean(|x|) / sqrt(7)
      ['1.512']
    """

    offset: bool = False


@dataclasses.dataclass(frozen=True)
class Hadamard:
    """Both operands of a product are transformed in blocks along the contracted axis.

    (x H)(H w) = x w, but an outlier is spread over its block before it is rounded. A contracted
    axis that is no multiple of `block` is padded with zeros. Nothing is transformed where sums
    run over groups of that axis, as over the rows in wgrad of `ragged_dot` and in a convolution
    with groups, or where no axis is summed that both operands have.

    Attributes:
      block: The length of a block, a power of two.
      seed: Of the random signs, as NVFP4 training has them, the same in every step; None for none.

    Source: arXiv:2509.25149, section on the random Hadamard transform.

    Examples:
      >>> x = jnp.ones(16).at[3].set(64.0)  # an outlier, beside which int4 holds no 1
      >>> for transform in (None, qt.products.Hadamard(16)):
      ...     operand = qt.Operand("int4", transform=transform)
      ...     recipe = qt.Recipe(operand, gradient=operand)
      ...     print(f"{qt.einsum('i,i->', x, jnp.ones(16), recipe=recipe):.1f}")  # exactly 79
      64.0
      81.4
    """

    block: int = 16
    seed: int | None = 0

    def __post_init__(self) -> None:
        is_int = isinstance(self.block, int) and not isinstance(self.block, bool)
        if not is_int or self.block < 2 or self.block & (self.block - 1):
            raise ValueError(f"Hadamard: block={self.block!r}, expected a power of two, 2 or more")
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"Hadamard: seed={self.seed!r}, expected an integer or None")


Scaling: TypeAlias = Current | Delayed | Static | Learned


@hashed_once
@dataclasses.dataclass(frozen=True)
class Operand:
    """What one operand of a product is rounded to. Frozen, hence hashable.

    Attributes:
      spec: A block format, or whatever `qtoolkit.spec` takes. Blocks without `axes` are cut along
        the contracted axis of the product (the last one where there are several, in the order that
        lhs has them, in dgrad rhs), a block of two lengths along one that is kept and the
        contracted one; blocks with `axes` stay where they are. In a wrapped model the axis -1, as
        `BlockFormat.token(...)` has it, stands for the features of an activation, also where the
        model has transposed it, and what meets a kernel is cut where the product sums. An axis
        shorter than a block is one block. "mxfp8" is short for "mxfp8_e4m3".
      projection: Rounding and saturation.
      scaling: Where the scales come from. Delayed and static ones take formats with one scale.
      transform: A `Hadamard` transform before the rounding, for both operands of a product.

    Raises:
      ValueError: An unknown format, one with zero points, a scaling that it cannot have.
      TypeError: An argument of another kind.

    Examples:
      >>> down = qt.casts.Projection("toward_zero")
      >>> operand = qt.Operand("e4m3fn", down, scaling=qt.products.Static(1.0))
      >>> recipe = qt.Recipe((operand, None), gradient=None)
      >>> x = jnp.asarray([0.34, 1.0])
      >>> qt.einsum("i,ij->j", x, jnp.eye(2), recipe=recipe)
      Array([0.3125, 1.    ], dtype=float32)
    """

    spec: BlockFormat
    projection: Projection = NEAREST
    scaling: Scaling = Current()
    transform: Hadamard | None = None

    if TYPE_CHECKING:  # what may be given; the attributes are what `__post_init__` makes of it

        def __init__(
            self,
            spec: SpecLike,
            projection: Projection = NEAREST,
            scaling: Scaling = Current(),
            transform: Hadamard | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        given: Any = self.spec
        found = spec("mxfp8_e4m3" if given == "mxfp8" else given)
        object.__setattr__(self, "spec", found)
        for name, kinds in (
            ("projection", (Projection,)),
            ("scaling", (Current, Delayed, Static, Learned)),
            ("transform", (Hadamard, type(None))),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(
                    f"Operand: {name} has type {type(value).__name__}, expected {names}"
                )
        if self.projection.draw is not None:
            raise ValueError(
                "Operand: the projection has random bits of its own; leave out its draw, products "
                "get a key"
            )
        if found.zero_point:
            raise ValueError(
                f"Operand: {found.name} has zero points, which products do not take; use a "
                "symmetric format, or qtoolkit.fake_quantize on the operand"
            )
        self._check_scaling()

    def _check_scaling(self) -> None:
        """Raises where the format, or what else is asked for, cannot have this scaling."""
        found = self.spec
        has_calibrated_second = self.scaling == Static() and bool(found.tensor_scale)
        if not (isinstance(self.scaling, Current) or self.has_one_scale or has_calibrated_second):
            of_element = Operand(found.element)  # of float32 and NF4 that has no such scale, either
            example = found.element.name if of_element.has_one_scale else E4M3FN.name
            raise ValueError(
                f"Operand: {found.name} has no single scale of float32 for the tensor, which "
                f"{type(self.scaling).__name__} scaling needs; expected e.g. {example!r}"
            )
        if isinstance(self.scaling, Delayed) and self.transform:
            raise ValueError(
                "Operand: Delayed scaling observes what is given, not its transform, which may be "
                "sqrt(block) as large; leave out the transform, or take Current() or Static()"
            )
        if isinstance(self.scaling, Learned) and (self.transform or self.projection != NEAREST):
            raise ValueError(
                "Operand: Learned scaling rounds to nearest and without a transform; leave out "
                "projection and transform"
            )

    @property
    def is_by_token(self) -> bool:
        """Whether its blocks lie along the last axis, that of features."""
        return self.spec.axes == (-1,)

    @property
    def is_learned(self) -> bool:
        """Whether its scale is a parameter."""
        return isinstance(self.scaling, Learned)

    @property
    def has_one_scale(self) -> bool:
        """One scale for the tensor, which may be any number."""
        fmt = self.spec
        is_tensor = fmt.block == () and fmt.other_axes is None
        return is_tensor and fmt.scale is not None and not fmt.has_powers and not fmt.tensor_scale

    def __str__(self) -> str:
        notes = [type(self.scaling).__name__.lower()] if self.has_one_scale else []
        notes += [] if self.projection == NEAREST else [str(self.projection.rounding)]
        notes += ["Hadamard"] if self.transform else []
        return ", ".join([self.spec.name, *notes])


OperandLike: TypeAlias = Operand | SpecLike | None
Pair: TypeAlias = tuple[Operand | None, Operand | None]


def is_calibratable(operand: Operand) -> bool:
    """Whether a scale of it sees the whole tensor and is not given."""
    has_scale = operand.has_one_scale or bool(operand.spec.tensor_scale)
    return has_scale and isinstance(operand.scaling, Current | Delayed)


def is_stochastic(operand: Operand | None) -> bool:
    return operand is not None and not isinstance(operand.projection.rounding, str)
