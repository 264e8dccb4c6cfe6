"""What is known of each value of a program: its `Origin`, followed from operation to operation.

Parameters: a matmul rounds its kernel as the recipe's rhs, whichever side it is on. The kernel is
the operand that comes from one parameter and constants alone, such as `kernel.T` or `2 * kernel`.

Features: along which axis the features of an activation lie, for recipes with a scale per token. A
token is a vector of features. They lie along the last axis until the program moves them: in
`q @ k.swapaxes(-1, -2)` the last axis of the transposed keys are the tokens. A scale for each
vector along that axis would be shared by all tokens, and so depend on later ones.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qtoolkit.products._bilinear import Bilinear
from qtoolkit.products._operand import Operand
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._stored import stored_label
from qtoolkit.scaling import QArray

LAST = -1  # the axis, from the end, along which features lie if nothing else is known
# The place of the features in a matmul of two activations, such as the scores of attention: no axis
# of these holds features. The next matmul takes the axis over which it sums.
UNKNOWN = 0


class Parameter(NamedTuple):
    """Names a parameter: the path of the module that owns it, and its name there."""

    path: str
    name: str

    @property
    def full_path(self) -> str:
        """As rules name it: "blocks/0/mlp/kernel"."""
        return f"{self.path}/{self.name.replace('.', '/')}".strip("/")


class Loop(NamedTuple):
    """A `lax.scan`: where it stands in the program, and how often it runs."""

    at: tuple[int, ...]
    length: int


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
      parameter: The parameter from which it is computed, together with constants alone; None for an
        activation or a constant.
      is_constant: Whether it depends on nothing at all.
      order: The permutation by which the parameter has been transposed, if nothing but that and
        casts have happened to it: (), if no transpose has; None if something else has.
      loops: The scans that slice the parameter, the outer one first.
      stored: How reports name the parameter if it is a `QArray`, which is rounded already; else "".
      is_trained: Whether a derivative by the parameters of the program passes through it.
      features: The axis along which features lie, counted from the end.
    """

    parameter: Parameter | None = None
    is_constant: bool = False
    order: tuple[int, ...] | None = None
    loops: tuple[Loop, ...] = ()
    stored: str = ""
    is_trained: bool = False
    features: int = LAST

    @classmethod
    def of(cls, parameter: Parameter | None, value: Any) -> "Origin":
        """That of an input of a program."""
        if parameter is None:
            return ACTIVATION
        stored = stored_label(value)
        is_trained = not stored and jnp.issubdtype(value.dtype, jnp.inexact)
        return cls(parameter, order=(), stored=stored, is_trained=is_trained)

    def merged(self, other: "Origin") -> "Origin":
        """What is known of a value that is one or the other, as after a `lax.cond`."""
        if self == other:
            return self
        is_trained = self.is_trained or other.is_trained
        features = self.features if self.features == other.features else LAST
        if self[:5] == other[:5]:
            return self._replace(is_trained=is_trained, features=features)
        return Origin(is_trained=is_trained, features=features)

    def sliced(self, loop: Loop) -> "Origin":
        """What is known of the slices along the first axis that a scan takes."""
        if self.parameter is None:
            return self
        return self._replace(loops=(*self.loops, loop), order=() if self.order == () else None)

    def stacked(self, loop: Loop) -> "Origin":
        """What is known of the results of all steps of a scan: of slices, the whole parameter."""
        if self.loops[-1:] != (loop,):
            return self._replace(order=None)
        return self._replace(loops=self.loops[:-1], order=() if self.order == () else None)


ACTIVATION, CONSTANT = Origin(), Origin(is_constant=True)
_SAME = (
    *("copy", "copy_p", "stop_gradient", "sharding_constraint", "reshard"),
    "optimization_barrier",
)
# Primitives that only move elements. They are applied to a bfloat16 copy of a parameter and to its
# float32 original alike, so that a later matmul can round the original.
_VIEWS = (
    *("transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims"),
    *("slice", "dynamic_slice", *_SAME),
)


class Step(NamedTuple):
    """One operation of a program.

    Attributes:
      name, params: Of its primitive.
      inputs, outputs: The types of its operands and results, as `jax.typeof` gives them.
    """

    name: str
    params: Mapping[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @classmethod
    def of(cls, eqn: Any) -> "Step":
        inputs, outputs = (tuple(x.aval for x in xs) for xs in (eqn.invars, eqn.outvars))
        return cls(eqn.primitive.name, eqn.params, inputs, outputs)

    @property
    def is_cast_to_half(self) -> bool:
        """A cast of float32 to 16 bits. A cast to less is a rounding that the user wants."""
        if self.name != "convert_element_type" or self.inputs[0].dtype != jnp.float32:
            return False
        return self.outputs[0].dtype in (jnp.bfloat16, jnp.float16)


# JAX computes no derivative through these.
_CONSTANT_DERIVATIVE = ("stop_gradient", "sign", "round", "floor", "ceil")


def origins_after(step: Step, origins: Sequence[Origin]) -> list[Origin]:
    """The origin of each result of an operation, from those of its operands."""
    if not origins:
        return [CONSTANT] * len(step.outputs)
    trained = step.name not in _CONSTANT_DERIVATIVE and any(x.is_trained for x in origins)
    places = features_of(step, [x.features for x in origins])
    source = _source_after(step, origins)
    return [
        source._replace(
            is_trained=trained and jnp.issubdtype(out.dtype, jnp.inexact), features=place
        )
        for out, place in zip(step.outputs, places, strict=True)
    ]


def _source_after(step: Step, origins: Sequence[Origin]) -> Origin:
    if all(x.is_constant for x in origins):
        return CONSTANT
    if any(not x.is_constant and x.parameter is None for x in origins):
        return ACTIVATION
    first = next(x for x in origins if x.parameter is not None)
    order = first.order if len(origins) == 1 else None
    return first._replace(order=None if order is None else _order_after(step, order))


def _order_after(step: Step, order: tuple[int, ...]) -> tuple[int, ...] | None:
    if step.name == "transpose":
        permutation = tuple(step.params["permutation"])
        return tuple(order[axis] for axis in permutation) if order else permutation
    # A "cast" to the same dtype only makes a weak type strong.
    is_cast = step.name == "convert_element_type" and (
        step.is_cast_to_half or step.inputs[0].dtype == step.outputs[0].dtype
    )
    return order if is_cast or step.name in _SAME else None


def original_of(step: Step, bind: Callable[..., Any], x: Any, original: Any) -> Any:
    """What a matmul rounds in place of the result of an operation on a parameter; None: the result.

    For a bfloat16 copy of a float32 parameter that is the parameter, which would otherwise be
    rounded twice; for the dequantized array of a stored parameter, its codes and scales.

    Args:
      bind: The operation as a function of its first operand.
      x: The first operand.
      original: What a matmul rounds in place of `x`, or None.
    """
    if not isinstance(original, QArray):
        if step.is_cast_to_half:
            return x
        return bind(original) if original is not None and step.name in _VIEWS else None
    if len(step.inputs) != 1:
        return None
    (out,) = step.outputs
    is_cast = step.name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating)
    if step.name == "reshard":  # blocks would be cut: each device has all codes
        everywhere = NamedSharding(step.params["dst_sharding"].mesh, PartitionSpec())
        return jax.tree.map(lambda part: jax.sharding.reshard(part, everywhere), original)
    if is_cast or step.name in _SAME:
        return original
    try:
        if step.name == "transpose":
            return original.unpack().transpose(step.params["permutation"])
        if step.name in ("reshape", "squeeze", "expand_dims"):
            return original.unpack().reshape(out.shape)
    except ValueError:  # it would tear a block apart
        return None
    return None


# Primitives that keep the order of axes, though not their lengths.
_PARTS = ("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "split")


def features_of(step: Step, places: Sequence[int]) -> list[int]:
    """The place of the features in each result of an operation; -1 where nothing else is known.

    Args:
      places: The place of the features in each of its operands.
    """
    name, params, count = step.name, step.params, len(step.outputs)
    if all(place == LAST for place in places) and name != "transpose":
        return [LAST] * count
    if name in _PARTS or places[0] == UNKNOWN:
        return [places[0]] * count
    shapes, out = [x.shape for x in step.inputs], step.outputs[0].shape
    match name:
        case "transpose":
            order = params["permutation"]
            return [order.index(places[0] % len(order)) - len(order)] if order else [LAST]
        case "broadcast_in_dim":
            axes = params["broadcast_dimensions"]
            return [axes[places[0] % len(axes)] - len(out)] if axes else [LAST]
        case "squeeze":
            at, rank = places[0] % len(shapes[0]), len(shapes[0])
            return [places[0] + sum(axis % rank > at for axis in params["dimensions"])]
        # A model reshapes to split off heads or to join batches. The place counts from the end, so
        # it stays if the axes behind the features do.
        case "reshape":
            after = places[0] + 1
            is_behind = after == 0 or shapes[0][after:] == out[after:]
            return [places[0] if is_behind and len(out) >= -places[0] else LAST]
    # Any other operation: the features lie as in the operands that have the shape of the result.
    alike = {place for place, shape in zip(places, shapes, strict=True) if shape == out} - {LAST}
    known = alike - {UNKNOWN} or alike
    return [known.pop() if len(known) == 1 else LAST] * count


class Operands(NamedTuple):
    """The operands of a matmul, as far as the axes of its features ask.

    Attributes:
      function: The matmul as a function of lhs, rhs and extra.
      types: Shapes and dtypes of lhs, rhs and extra.
      kernel: Which of the first two is the kernel; None for two activations.
      features: The axes of lhs and rhs along which features lie, counted from the end.
    """

    function: Bilinear
    types: tuple[Any, ...]
    kernel: int | None
    features: tuple[int, int]

    @property
    def features_of_result(self) -> int:
        """The axis of the result that comes from the kernel, counted from the end."""
        if self.kernel is None:
            return UNKNOWN
        *_, out = self.function.axes(*(x.shape for x in self.types[:2]))
        axes = out.contracted if self.kernel else out.kept
        return _summed_axis(axes, self._rank_of_result, LAST)

    @property
    def _rank_of_result(self) -> int:
        lhs, rhs, *extra = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.types)
        floats = (x.update(dtype=jnp.float32) for x in (lhs, rhs))
        return len(jax.eval_shape(self.function, *floats, *extra).shape)


def following_features(recipe: Recipe, operands: Operands) -> Recipe:
    """`recipe` with its scales per token cut along the axis where the features lie.

    The input of a layer has its features on the axis that is summed with the kernel: "bct,cf->bft"
    sums over c, so those of bct lie at -2, and those of the result and its cotangent, bft, too.

    Args:
      recipe: Its operands are (input, kernel), even if lhs is the kernel; for two activations they
        are (lhs, rhs).
    """
    if not any(o is not None and o.is_by_token for o in recipe.operands):
        return recipe
    both, kernel = operands.types[:2], operands.kernel
    of_sides = operands.function.axes(*(x.shape for x in both))[:2]
    first, second = (
        # UNKNOWN: these are scores of attention. The matmul sums over their axis of keys.
        place or _summed_axis(axes.contracted, len(x.shape), LAST)
        for place, axes, x in zip(operands.features, of_sides, both, strict=True)
    )
    cotangent = LAST
    if kernel is not None:
        side = 1 - kernel
        place, rank = (first, second)[side], len(both[side].shape)
        first, second = _summed_axis(of_sides[side].contracted, rank, place), LAST
        cotangent = operands.features_of_result

    def along_features(operand: Operand | None, place: int) -> Operand | None:
        if operand is None or place == LAST or not operand.is_by_token:
            return operand
        return dataclasses.replace(operand, spec=operand.spec.along(place))

    def pair(operands: Any, *places: int) -> Any:
        return tuple(map(along_features, operands, places))

    return dataclasses.replace(
        recipe,
        forward=pair(recipe.forward, first, second),
        dgrad=pair(recipe.dgrad, cotangent, second),
        wgrad=pair(recipe.wgrad, first, cotangent),
    )


def _summed_axis(summed: tuple[int, ...], rank: int, place: int) -> int:
    """`place` if the matmul sums over it, else the last axis over which it sums."""
    if not summed or place % rank in summed:
        return place
    return summed[-1] - rank
