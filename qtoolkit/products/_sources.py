"""Finds the values of a program that are parameters, or are computed from one alone.

A matmul rounds its kernel as the recipe's rhs, whichever side it is on. The kernel is the operand
that comes from a parameter and constants alone, such as `kernel.T` or `2 * kernel`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from qtoolkit.scaling import QArray

# Primitives that only move elements. They are applied to a bfloat16 copy of a parameter and to its
# float32 original alike, so that a later product can round the original.
_VIEWS = (
    *("transpose", "reshape", "broadcast_in_dim", "squeeze", "copy", "expand_dims", "slice"),
    *("dynamic_slice", "stop_gradient", "sharding_constraint"),
)
_SAME = ("copy", "copy_p", "stop_gradient", "sharding_constraint")


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


def sources_of(step: Step, sources: Sequence[Source]) -> list[Source]:
    """The source of each result of an operation, from those of its operands."""
    return [_source_of(step, sources)] * len(step.outputs)


def _source_of(step: Step, sources: Sequence[Source]) -> Source:
    if all(x.is_constant for x in sources):
        return CONSTANT
    if not all(x.is_constant or x.parameter is not None for x in sources):
        return ACTIVATION
    parameter = next(x.parameter for x in sources if x.parameter is not None)
    order = sources[0].order if len(sources) == 1 else None
    return Source(parameter, order=None if order is None else _ordered(step, order))


def _ordered(step: Step, order: tuple[int, ...]) -> tuple[int, ...] | None:
    # A "cast" to the same dtype only makes a weak type strong.
    is_cast = step.name == "convert_element_type" and (
        step.is_cast_to_half or step.inputs[0].dtype == step.outputs[0].dtype
    )
    if is_cast or step.name in _SAME:
        return order
    if step.name != "transpose":
        return None
    moved = step.params["permutation"]
    return tuple(order[axis] for axis in moved) if order else tuple(moved)


def original_of(step: Step, bind: Callable[..., Any], x: Any, original: Any) -> Any:
    """What a product rounds in place of the result of an operation on a parameter; None: that.

    For a bfloat16 copy of a float32 parameter that is the parameter, which would otherwise be
    rounded twice; for the dequantized array of a stored parameter, its codes and scales.

    Args:
      bind: The operation as a function of its first operand.
      x: The first operand.
      original: What stands for that, or None.
    """
    if isinstance(original, QArray):
        return _moved(step, original)
    if step.is_cast_to_half:
        return x
    return bind(original) if original is not None and step.name in _VIEWS else None


def _moved(step: Step, array: QArray) -> QArray | None:
    """The QArray after an operation that only moves its elements; None for other operations."""
    if len(step.inputs) != 1:
        return None
    (out,) = step.outputs
    is_cast = step.name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating)
    if is_cast or step.name in _SAME:
        return array
    try:
        if step.name == "transpose":
            return array.transpose(step.params["permutation"])
        if step.name in ("reshape", "squeeze", "expand_dims"):
            return array.reshape(out.shape)
    except ValueError:  # it would tear a block apart, or the codes are packed
        return None
    return None


Analysis = Callable[[Step, Sequence[Any]], Sequence[Any]]


def along(jaxpr: Any, analysis: Analysis, inputs: Sequence[Any], literal: Any) -> list[Any]:
    """What an analysis finds of the results of a jaxpr, from what is known of its inputs.

    Args:
      analysis: From an operation and what is known of its operands, to the same of its results.
      literal: What is known of the numbers in the program.
    """
    known: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    known.update(dict.fromkeys(jaxpr.constvars, literal))

    def of(atom: Any) -> Any:
        return literal if hasattr(atom, "val") else known[atom]

    for eqn in jaxpr.eqns:
        found = analysis(Step.of(eqn), [of(x) for x in eqn.invars])
        known.update(zip(eqn.outvars, found, strict=True))
    return [of(x) for x in jaxpr.outvars]
