"""One tensor scale for kernels that engines join, such as q, k and v: `Operand.joined`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.products._matmul import Key, Matmul, Planted
from qtoolkit.products._operand import Operand
from qtoolkit.products._program import Program
from qtoolkit.products._recipe import Recipe
from qtoolkit.scaling import QArray
from qtoolkit.scaling.internal import largest_magnitude

JOINED = "joined"  # the name of what is planted


def group_of(operand: Operand | None, path: str) -> tuple[str, ...]:
    """The paths of the parameters that share a tensor scale with the one at `path`; () for none."""
    parts = path.split("/")
    for place in reversed(range(len(parts))):
        for names in () if operand is None else operand.joined:
            if parts[place] in names:
                before, after = parts[:place], parts[place + 1 :]
                return tuple("/".join((*before, name, *after)) for name in names)
    return ()


def joined_amax(
    operand: Operand | None, path: str, parameters: Mapping[str, Any], stack: Sequence[int]
) -> jax.Array | None:
    """The largest magnitude of a kernel and those that it is joined with; None if with none.

    Args:
      parameters: All parameters, by their paths.
      stack: The leading axes of a stack of kernels, of which each has its own.
    """
    group = group_of(operand, path)
    for name in group:
        shape = None if name not in parameters else tuple(parameters[name].shape)
        if shape is None or shape[: len(stack)] != tuple(stack):
            what = "which this call does not have" if shape is None else f"of shape {shape}"
            raise ValueError(
                f"{path}: its tensor scale is joined with that of {name}, {what}, expected kernels "
                f"{list(group)}, in stacks of {tuple(stack)}; call the model that has them all, or "
                "give the layer a recipe without qtoolkit.policies.join by Rules"
            )
    largest: Callable[[jax.Array], jax.Array] = largest_magnitude
    for _ in stack:
        largest = jax.vmap(largest)
    amaxes = [largest(lax.stop_gradient(_array(parameters[name]))) for name in group]
    return functools.reduce(jnp.maximum, amaxes) if amaxes else None


def _array(x: Any) -> jax.Array:
    return x.dequantize() if isinstance(x, QArray) else x


def with_joined_scales(
    program: Program,
    inputs: Sequence[Any],
    planted: Mapping[Key, Planted],
    recipe_of: Callable[[Matmul], Recipe | None],
) -> dict[Key, Planted]:
    """What is planted, with the amax of each kernel that is joined with others."""
    pairs = zip(program.parameters, inputs, strict=True)
    parameters = {name.full_path: x for name, x in pairs if name is not None}
    found = dict(planted)
    for matmul in program.matmuls:
        recipe, parameter = recipe_of(matmul), matmul.parameter
        if recipe is None or parameter is None or matmul.is_stored:
            continue
        own = found.get(matmul.key, Planted({}))
        lead = own.lead if own.arrays else len(matmul.stack)
        operand, path = recipe.forward[1], parameter.full_path
        amax = joined_amax(operand, path, parameters, matmul.stack[:lead])
        if amax is not None:
            found[matmul.key] = Planted({**own.arrays, JOINED: amax}, own.shared, lead)
    return found
