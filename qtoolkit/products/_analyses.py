"""What is known of the values of a program: two analyses, and a matmul with what they say of it.

Sources: which values are parameters, or are computed from one alone. A matmul rounds its kernel as
the recipe's rhs, whichever side it is on; the kernel is the operand that comes from a parameter and
constants alone, such as `kernel.T` or `2 * kernel`.

Features: along which axis the features of an activation lie, for recipes with a scale per token. A
token is a vector of features. They lie along the last axis until the program moves them: in
`q @ k.swapaxes(-1, -2)` the last axis of the transposed keys are the tokens. A scale for each
vector along that axis would be shared by all tokens, and so depend on later ones.

Each analysis goes from an operation, a `Step`, and what is known of its operands to what is known
of its results. `MatmulTrace` calls them as operations run; `along` follows a jaxpr.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qtoolkit.products._bilinear import Bilinear
from qtoolkit.products._operand import Operand
from qtoolkit.products._recipe import Recipe
from qtoolkit.scaling import QArray

LAST = -1  # the axis, from the end, along which features lie if nothing else is known


class Step(NamedTuple):
    """One operation of a program: an equation of a jaxpr, or a primitive as it runs.

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


Analysis = Callable[[Step, Sequence[Any]], Sequence[Any]]


def along(jaxpr: Any, analysis: Analysis, inputs: Sequence[Any], literal: Any) -> list[Any]:
    """What an analysis says of the results of a jaxpr.

    Args:
      analysis: From an operation and what is known of its operands, to the same of its results.
      inputs: What is known of the inputs.
      literal: What is known of the numbers in the program.
    """
    known: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    known.update(dict.fromkeys(jaxpr.constvars, literal))

    def of(atom: Any) -> Any:
        return literal if hasattr(atom, "val") else known[atom]

    for eqn in jaxpr.eqns:
        results = analysis(Step.of(eqn), [of(x) for x in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [of(x) for x in jaxpr.outvars]


# First analysis: sources.


class Source(NamedTuple):
    """Where a value comes from.

    Attributes:
      parameter: The parameter from which it is computed, together with constants alone; None for an
        activation or a constant.
      is_constant: Whether it depends on nothing at all.
      order: The permutation by which the parameter has been transposed, if nothing but that and
        casts have happened to it: (), if no transpose has; None if something else has.
    """

    parameter: Hashable = None
    is_constant: bool = False
    order: tuple[int, ...] | None = None


ACTIVATION, CONSTANT = Source(), Source(is_constant=True)
_SAME = ("copy", "copy_p", "stop_gradient", "sharding_constraint")
# Primitives that only move elements. They are applied to a bfloat16 copy of a parameter and to its
# float32 original alike, so that a later matmul can round the original.
_VIEWS = (
    *("transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims"),
    *("slice", "dynamic_slice", *_SAME),
)


def sources_of(step: Step, sources: Sequence[Source]) -> list[Source]:
    """The source of each result of an operation, from those of its operands."""
    if all(x.is_constant for x in sources):
        source = CONSTANT
    elif any(not x.is_constant and x.parameter is None for x in sources):
        source = ACTIVATION
    else:
        parameter = next(x.parameter for x in sources if x.parameter is not None)
        order = sources[0].order if len(sources) == 1 else None
        source = Source(parameter, order=None if order is None else _order_after(step, order))
    return [source] * len(step.outputs)


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


# Second analysis: features. A place is an axis counted from the end: -1, -2 ...

# The place of the features in a matmul of two activations, such as the scores of attention: no axis
# of these holds features. The next matmul takes the axis over which it sums.
UNKNOWN = 0
# Primitives that keep the order of axes, though not their lengths.
_PARTS = ("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "split")


def features_of(step: Step, places: Sequence[int]) -> list[int]:
    """The place of the features in each result of an operation; -1 where nothing else is known.

    Args:
      places: The place of the features in each of its operands.
    """
    name, params, count = step.name, step.params, len(step.outputs)
    if name in ("jit", "pjit"):
        return _features_through(params["jaxpr"].jaxpr, tuple(places))
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


@functools.lru_cache(maxsize=4096)
def _features_through(jaxpr: Any, places: tuple[int, ...]) -> list[int]:
    return along(jaxpr, features_of, places, LAST)


# A matmul, and what follows for it from both analyses.


class Matmul(NamedTuple):
    """A matmul or convolution that a `MatmulTrace` met.

    Attributes:
      name: The name of its primitive.
      function: The matmul as a function of lhs, rhs and extra.
      lhs, rhs, extra: Its operands.
      parameters: For lhs and rhs the name of the parameter from which, constants aside, the operand
        is computed, such as "kernel"; "" for an activation.
      dtype: The dtype of the result.
      sources: Where lhs and rhs come from.
      features: The axes of lhs and rhs along which features lie, counted from the end.
    """

    name: str
    function: Bilinear
    lhs: jax.Array | QArray
    rhs: jax.Array | QArray
    extra: tuple[jax.Array, ...]
    parameters: tuple[str, str]
    dtype: Any
    sources: tuple[Source, Source] = (ACTIVATION, ACTIVATION)
    features: tuple[int, int] = (LAST, LAST)

    @property
    def kernel(self) -> int | None:
        """Which operand is the kernel: 0, 1, or None for two activations; 1 for two parameters."""
        lhs, rhs = self.parameters
        return 1 if rhs else 0 if lhs else None

    @property
    def kernel_name(self) -> str:
        """The name of the kernel's parameter; "" for two activations."""
        return "" if self.kernel is None else self.parameters[self.kernel]


class MatmulNames:
    """Names the matmuls of a method in the order in which they run. State is stored by these names.

    A matmul is named by its kernel: "up", and "up#2" when "up" is multiplied a second time. Were
    all matmuls numbered, an `if` in the method that skips one would give its state to the next.
    Those of two activations have no kernel and are numbered: "0", "1".
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, matmul: Matmul) -> str:
        kernel = matmul.kernel_name
        before = self.counts.get(kernel, 0)
        self.counts[kernel] = before + 1
        if not kernel:
            return str(before)
        return kernel + (f"#{before + 1}" if before else "")


def features_of_result(matmul: Matmul, rank: int) -> int:
    """The place of the features in a matmul's result: the axis that comes from the kernel."""
    if matmul.kernel is None:
        return UNKNOWN
    *_, out = matmul.function.axes(matmul.lhs.shape, matmul.rhs.shape)
    return _summed_axis(out.contracted if matmul.kernel else out.kept, rank, LAST)


def following_features(recipe: Recipe, matmul: Matmul) -> Recipe:
    """`recipe` with its scales per token cut along the axis where the features lie.

    The input of a layer has its features on the axis that is summed with the kernel: "bct,cf->bft"
    sums over c, so those of bct lie at -2, and those of the result and its cotangent, bft, too.

    Args:
      recipe: Its operands are (input, kernel), even if lhs is the kernel; for two activations they
        are (lhs, rhs).
    """
    if not any(o is not None and o.is_by_token for o in recipe.operands):
        return recipe
    function, operands, kernel = matmul.function, (matmul.lhs, matmul.rhs), matmul.kernel
    of_sides = function.axes(*(x.shape for x in operands))[:2]
    first, second = (
        # UNKNOWN: these are scores of attention. The matmul sums over their axis of keys.
        place or _summed_axis(axes.contracted, len(x.shape), LAST)
        for place, axes, x in zip(matmul.features, of_sides, operands, strict=True)
    )
    cotangent = LAST
    if kernel is not None:
        side = 1 - kernel
        place, rank = (first, second)[side], len(operands[side].shape)
        first, second = _summed_axis(of_sides[side].contracted, rank, place), LAST
        structs = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in operands)
        rank = len(jax.eval_shape(function, *structs, *matmul.extra).shape)
        cotangent = features_of_result(matmul, rank)

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
