"""What one operand of a matmul is rounded to, and where its scales come from: frozen data."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, TypeAlias

from qtoolkit.casts import Projection
from qtoolkit.casts.internal import NEAREST
from qtoolkit.formats import E4M3FN, BlockFormat, SpecLike, spec
from qtoolkit.formats.internal import hashed_once, plain_number


@dataclasses.dataclass(frozen=True)
class Current:
    """Scales from the array itself, in the step that uses it. A layer has no state for them.

    Attributes:
      power_of_two: Whether scales are rounded up to powers of two. This is faster on GPUs: the cast
        multiplies instead of dividing, and rounding before or after multiplying by a power of two
        gives the same bits.

    Examples:
      >>> qt.Operand("e4m3fn").scaling
      Current(power_of_two=False)
      >>> operand = qt.Operand("e4m3fn", scaling=qt.products.Current(power_of_two=True))
      >>> x = jnp.asarray([300.0, 21.0])  # scale 1 in place of 300 / 448
      >>> qt.einsum("i,ij->j", x, jnp.eye(2), recipe=qt.Recipe((operand, None), gradient=None))
      Array([288.,  20.], dtype=float32)
    """

    power_of_two: bool = False

    def __post_init__(self) -> None:
        _check_flag(self)


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Scales from the largest magnitudes of earlier steps, which a wrapped layer stores.

    Larger values saturate. Until a layer has a history, i.e. in the first step and as long as no
    gradient reaches it, it scales as `Current` does, unless there is `initial`. With nnx, so do
    matmuls that your own modules compute, such as `x @ self.kernel`, unless `wrap` is given
    `inputs` or `strict`.

    The history records only calls through which a gradient flows. If a layer is called a second
    time in a step, behind `stop_gradient`, that call is scaled by the magnitudes of the other
    calls, and larger inputs saturate. For such a call wrap the model a second time, with current
    scales: `qtoolkit.nnx.wrap(model, qtoolkit.recipes.te_current)` shares its parameters.

    Attributes:
      history: The number of steps that count, 1 or more.
      margin: Room above the largest magnitude, in powers of two.
      power_of_two: As in `Current`.
      initial: The largest magnitude to assume as long as there is no history. None: that of the
        array, as `Current` does. This costs one more read of the array in every step, because the
        program cannot know whether there is a history yet.

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
    power_of_two: bool = False
    initial: float | None = None

    def __post_init__(self) -> None:
        _check_flag(self)
        object.__setattr__(self, "initial", _positive("Delayed", "initial", self.initial))
        for name, least, most in (("history", 1, 4096), ("margin", 0, 64)):
            value = plain_number(getattr(self, name))
            object.__setattr__(self, name, value)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"Delayed: {name}={value!r}, expected an integer of {least} to {most}"
                )


@dataclasses.dataclass(frozen=True)
class Static:
    """One scale that never changes: x ~ q * scale. Values that do not fit saturate.

    Attributes:
      scale: A positive number, in the normal range of float32. None: the layer stores a scale that
        calibration found. `qtoolkit.nnx.freeze` makes such recipes, from a model that was wrapped
        and calibrated with `Current` scaling.
      power_of_two: As in `Current`; a `scale` has to be one.

    Examples:
      >>> static = qt.Operand("e4m3fn", scaling=qt.products.Static(0.5))
      >>> recipe = qt.Recipe((static, None), gradient=None)
      >>> x = jnp.asarray([300.0, 0.3])  # 224 is the largest that fits
      >>> qt.einsum("i,ij->j", x, jnp.eye(2), recipe=recipe)
      Array([224.    ,   0.3125], dtype=float32)
    """

    scale: float | None = None
    power_of_two: bool = False

    def __post_init__(self) -> None:
        _check_flag(self)
        object.__setattr__(self, "scale", _positive("Static", "scale", self.scale))
        is_power = self.scale is None or (math.frexp(self.scale)[0], self.scale < 2.0**127) == (
            0.5,
            True,
        )
        if self.power_of_two and not is_power:
            raise ValueError(
                f"Static: scale={self.scale!r} with power_of_two=True, expected a power of two "
                "below 2**127"
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether calibration has to find the scale."""
        return self.scale is None


def _check_flag(scaling: Any) -> None:
    if type(scaling.power_of_two) is not bool:
        raise TypeError(
            f"{type(scaling).__name__}: power_of_two={scaling.power_of_two!r}, expected True or "
            "False"
        )


def _positive(where: str, name: str, value: Any) -> Any:
    """`value` as a plain number in the normal range of float32, or None."""
    value = plain_number(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 2.0**-126 <= value <= 2.0**127):
        raise ValueError(f"{where}: {name}={value!r}, expected a number of 2**-126 to 2**127")
    return value


@dataclasses.dataclass(frozen=True)
class Learned:
    """A scale that is a parameter of the model and trains with it: LSQ.

    The operand becomes `qtoolkit.gradients.lsq(x, scale, fmt)`, or `lsq_plus` with an offset, in
    the forward matmul and in its derivatives. Unlike with other scalings, the gradient of an
    element that saturates is 0. Only operands of the forward matmul can have it.

    Attributes:
      offset: Whether an offset is learned as well (LSQ+): a number, or in a format with a zero
        point a whole number of scales, so that `quantize` can store a kernel.

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
    """A Hadamard transform of both operands, in blocks along the contracted axis.

    The result does not change, because (x H)(H w) = x w. But an outlier is spread over its block
    before it is rounded. A contracted axis whose length is no multiple of `block` is padded with
    zeros. Nothing is transformed if the axis is summed in groups (in a convolution with groups, or
    in wgrad of `ragged_dot`), or if the operands have no summed axis in common.

    Attributes:
      block: The length of a block, a power of two.
      seed: The seed of random signs, as in NVFP4 training, the same in every step. None: no signs.

    Source: arXiv:2509.25149, section on the random Hadamard transform.

    Examples:
      >>> x = jnp.ones(16).at[3].set(64.0)  # with this outlier int4 rounds 1 to 0
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
        for field in ("block", "seed"):
            object.__setattr__(self, field, plain_number(getattr(self, field)))
        if type(self.block) is not int or self.block < 2 or self.block & (self.block - 1):
            raise ValueError(f"Hadamard: block={self.block!r}, expected a power of two, 2 or more")
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"Hadamard: seed={self.seed!r}, expected an integer or None")


Scaling: TypeAlias = Current | Delayed | Static | Learned


@hashed_once
@dataclasses.dataclass(frozen=True)
class Operand:
    """What one operand of a matmul is rounded to. Frozen, hence hashable.

    Attributes:
      spec: A block format, or whatever `qtoolkit.spec` takes; "mxfp8" is short for "mxfp8_e4m3".
        Blocks without `axes` are cut along the contracted axis of the matmul. If there are several
        contracted axes, it is the last one in the order in which lhs (in dgrad: rhs) names them, of
        those that are longer than 1 (in convolutions the features); but a block of length None, a
        whole vector, covers all of them. A block of two lengths is cut along the last axis that is
        not contracted, and the contracted one. Blocks with `axes` are cut along these, with one
        exception: in a wrapped model the axis -1, as in `BlockFormat.token(...)`, means the axis of
        features, even if the model has transposed the activation, and for the input of a layer the
        axis that is summed with the kernel. An axis shorter than a block is one block.
      projection: Rounding and saturation.
      scaling: Where the scales come from. `Delayed` and `Static` need a format with one scale.
      transform: A `Hadamard` transform before the rounding, for both operands of a matmul.
      gather: The name of a mesh axis along which a kernel is sharded (FSDP). It is rounded shard by
        shard, and its codes of 8 bits are gathered for the matmul, again for its derivative, where
        XLA would gather the kernel. The mesh is that of `jax.set_mesh`. `policies.gather_codes`
        sets it.
      gather_axis: The axis of the kernel that is cut into shards, as the matmul gets it; None: the
        longest one that can be cut, the first of equals. Not needed where the mesh axis has the
        type Explicit. If the kernel lies otherwise, XLA moves it first: `native_calls` says so.
      joined: Groups of names in the paths of kernels, (("q", "k", "v"),): kernels whose paths
        differ only in these names have one tensor scale. `policies.join` sets it.

    Raises:
      ValueError: The format is unknown, or cannot have this scaling.
      TypeError: An argument has another type.

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
    gather: str | None = None
    gather_axis: int | None = None
    joined: tuple[tuple[str, ...], ...] = ()

    if TYPE_CHECKING:  # `__init__` takes more types than the attributes have: see `__post_init__`

        def __init__(
            self,
            spec: SpecLike,
            projection: Projection = NEAREST,
            scaling: Scaling = Current(),
            transform: Hadamard | None = None,
            gather: str | None = None,
            gather_axis: int | None = None,
            joined: tuple[tuple[str, ...], ...] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        like: Any = self.spec
        fmt = spec("mxfp8_e4m3" if like == "mxfp8" else like)
        object.__setattr__(self, "spec", fmt)
        for name, kinds in (
            ("projection", (Projection,)),
            ("scaling", (Current, Delayed, Static, Learned)),
            ("transform", (Hadamard, type(None))),
            ("gather", (str, type(None))),
            ("gather_axis", (int, type(None))),
            ("joined", (tuple,)),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(
                    f"Operand: {name} has type {type(value).__name__}, expected {names}"
                )
        if self.projection.draw is not None:
            raise ValueError(
                "Operand: the projection has random bits of its own, expected none: matmuls get a "
                "key; write Projection('stochastic')"
            )
        is_coded = fmt.element.bits <= 8 and not (self.transform or self.is_learned)
        if self.gather and (not is_coded or fmt.zero_point):
            raise ValueError(
                f"Operand: gather={self.gather!r} for {self}, expected elements of at most 8 bits, "
                "no transform, no learned scale and no zero points: codes are gathered"
            )
        self._check_scaling()

    def _check_scaling(self) -> None:
        """Raise if this scaling cannot be combined with the format, transform or projection."""
        fmt = self.spec
        if fmt.zero_point and not self._finds_zero_points:
            raise ValueError(
                f"Operand: {fmt.name} has zero points, which {type(self.scaling).__name__} scaling "
                "does not find, expected Current(), or Learned(offset=True) for one zero point in "
                "all"
            )
        has_calibrated_second = self.is_calibrated and bool(fmt.tensor_scale)
        is_found = isinstance(self.scaling, Current) or fmt.zero_point
        if not (is_found or self.has_one_scale or has_calibrated_second):
            # Suggest the element format with one scale; float32 and NF4 have none in that form.
            by_tensor = Operand(fmt.element)
            example = fmt.element.name if by_tensor.has_one_scale else E4M3FN.name
            raise ValueError(
                f"Operand: {fmt.name} has no single scale of float32 for the tensor, which "
                f"{type(self.scaling).__name__} scaling needs; expected e.g. {example!r}"
            )
        if self.has_power_of_two and not self.has_one_scale:
            raise ValueError(
                f"Operand: {fmt.name} has no single scale of float32 for the tensor, which "
                "power_of_two=True needs; expected e.g. 'e4m3fn', or a format whose own scales are "
                "powers of two, such as 'mxfp8'"
            )
        is_plain = self.scaling == Current() and self.transform is None
        if self.joined and not (fmt.tensor_scale and is_plain):
            raise ValueError(
                f"Operand: joined={self.joined!r} for {self}, expected a format with a tensor "
                "scale, such as 'nvfp4', current scaling and no transform"
            )
        if isinstance(self.scaling, Delayed) and self.transform:
            raise ValueError(
                "Operand: Delayed scaling observes the array, not its transform, which may be "
                "sqrt(block) times as large; remove the transform, or take Current() or Static()"
            )
        if isinstance(self.scaling, Learned) and (self.transform or self.projection != NEAREST):
            raise ValueError(
                "Operand: Learned scaling rounds to nearest and without a transform; remove "
                "projection and transform"
            )

    @property
    def is_by_token(self) -> bool:
        """Whether its blocks are cut along the last axis, that of features."""
        return self.spec.axes == (-1,)

    @property
    def is_calibrated(self) -> bool:
        """Whether calibration finds its scale, which a layer stores."""
        return isinstance(self.scaling, Static) and self.scaling.is_calibrated

    @property
    def has_power_of_two(self) -> bool:
        """Whether its one scale is a float32 number that is a power of two."""
        return getattr(self.scaling, "power_of_two", False)

    @property
    def is_learned(self) -> bool:
        """Whether its scale is a parameter."""
        return isinstance(self.scaling, Learned)

    @property
    def is_plain(self) -> bool:
        """Whether it is rounded to nearest, by no state and without a transform."""
        has_state = isinstance(self.scaling, Delayed | Learned)
        return not (has_state or self.is_stochastic or self.transform is not None)

    @property
    def is_stochastic(self) -> bool:
        """Whether it is rounded by random bits."""
        return not isinstance(self.projection.rounding, str)

    @property
    def is_calibratable(self) -> bool:
        """Whether calibration can find its scale: one for the tensor, not static, not learned."""
        has_scale = self.has_one_scale or bool(self.spec.tensor_scale)
        return has_scale and isinstance(self.scaling, Current | Delayed) and not self.joined

    @property
    def has_one_scale(self) -> bool:
        """Whether an amax gives it one scale for the whole tensor, in float32 or similar."""
        return self.is_by_tensor and not self.spec.zero_point

    @property
    def is_by_tensor(self) -> bool:
        """Whether the whole tensor has one scale, in float32 or similar, or a zero point, too."""
        fmt = self.spec
        is_tensor = fmt.block == () and fmt.other_axes is None
        return is_tensor and fmt.scale is not None and not fmt.has_powers and not fmt.tensor_scale

    @property
    def _finds_zero_points(self) -> bool:
        if isinstance(self.scaling, Learned):
            return self.scaling.offset and self.is_by_tensor
        return self.scaling == Current()

    def __str__(self) -> str:
        notes = [type(self.scaling).__name__.lower()] if self.has_one_scale else []
        notes += ["powers of two"] if self.has_power_of_two else []
        notes += [] if self.projection == NEAREST else [str(self.projection.rounding)]
        notes += ["Hadamard"] if self.transform else []
        notes += [f"codes gathered over {self.gather}"] if self.gather else []
        notes += [f"one scale for {', '.join(names)}" for names in self.joined]
        return ", ".join([self.spec.name, *notes])


def with_current_scale(operand: Operand) -> Operand:
    """`operand` with a current scale."""
    return dataclasses.replace(operand, scaling=Current(operand.has_power_of_two))


def is_cut_alike(operand: Operand | None) -> bool:
    """Whether an operand is rounded to the same numbers whichever axis a matmul contracts."""
    if operand is None:
        return True
    return operand.transform is None and (not operand.spec.block or operand.spec.axes is not None)


OperandLike: TypeAlias = Operand | SpecLike | None
Pair: TypeAlias = tuple[Operand | None, Operand | None]
