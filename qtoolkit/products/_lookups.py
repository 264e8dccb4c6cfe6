"""Look-ups of a program: rows that it takes from a parameter, such as a table of embeddings.

A look-up is a `gather` of whole rows along the first axis, as `table[tokens]` and `jnp.take` make
it. `Recipe(lookups=True)` rounds the rows as a matmul rounds its kernel; the gradient passes
straight through. Of a stored table the codes of the rows are read, and dequantized: never those of
the table. A vocabulary of 248,000 rows of 4,096 numbers would take 4 GB a step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from qtoolkit.casts.internal import differentiable_in_dtype, straight_through
from qtoolkit.products._bilinear import Axes
from qtoolkit.products._operand import Current, Operand, Static
from qtoolkit.products._origins import Origin, Parameter
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rounded import rounding_of
from qtoolkit.scaling import QArray

Array = jax.Array


class Lookup(NamedTuple):
    """A look-up of a program.

    Attributes:
      parameter: The table, or a stack of them.
      shape: The shape of one table.
      stored: How reports name it if it is a `QArray`; else "".
      recipe: Rounds the rows; None: they stay as they are.
    """

    parameter: Parameter
    shape: tuple[int, ...]
    stored: str
    recipe: Recipe | None = None

    @property
    def operand(self) -> Operand | None:
        return None if self.recipe is None else self.recipe.forward[1]

    @property
    def axes(self) -> Axes:
        """As those of the kernel of a head that is tied to the table: a sum over a row."""
        return Axes(tuple(range(1, len(self.shape))), (0,))

    def __str__(self) -> str:
        return f"{self.parameter.full_path}: {self.stored or self.operand}"


def lookup_of(eqn: Any, origin: Origin) -> Lookup | None:
    """The look-up that an equation is; None if it is none, or of something else than a parameter.

    Args:
      origin: Of its first operand.
    """
    if eqn.primitive.name != "gather" or origin.parameter is None or origin.order != ():
        return None
    shape, numbers = eqn.invars[0].aval.shape, eqn.params["dimension_numbers"]
    rank = len(eqn.outvars[0].aval.shape)
    is_of_rows = (
        numbers.start_index_map == numbers.collapsed_slice_dims == (0,)
        and not numbers.operand_batching_dims
        and eqn.params["slice_sizes"] == (1, *shape[1:])
        and numbers.offset_dims == tuple(range(rank - len(shape) + 1, rank))
    )
    is_float = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
    if not is_of_rows or not is_float or len(shape) < 2:
        return None
    return Lookup(origin.parameter, tuple(shape), origin.stored)


def looked_up(
    lookup: Lookup, eqn: Any, table: Any, inputs: Sequence[Array], bind: Callable[..., Array]
) -> Array:
    """The rows that a look-up takes.

    Args:
      table: A parameter as it is before its cast to 16 bits, or a `QArray`.
      inputs: The table as the program has it, and the indices.
      bind: The equation as a function of a table.
    """
    out, indices = eqn.outvars[0].aval, inputs[1]
    if isinstance(table, QArray):
        is_by_row = table.blocks.lengths[0] in (1, table.shape[0]) and indices.size > 0
        return _stored_rows(table, eqn, indices) if is_by_row else bind(table.dequantize(out.dtype))
    if lookup.operand is None:
        return bind(inputs[0])
    return differentiable_in_dtype(
        _rounded_rows(table, lookup.operand, lookup.axes, bind), out.dtype
    )


def _stored_rows(table: QArray, eqn: Any, indices: Array) -> Array:
    out, count = eqn.outvars[0].aval, table.shape[0]
    rows = indices[..., 0]
    flat = lax.clamp(
        jnp.zeros((), rows.dtype), rows.reshape(-1), jnp.asarray(count - 1, rows.dtype)
    )
    y = table[flat].dequantize(out.dtype).reshape(out.shape)
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return y
    fill = eqn.params["fill_value"]
    is_row = ((rows >= 0) & (rows < count)).reshape(*rows.shape, *(1,) * (len(table.shape) - 1))
    return jnp.where(is_row, y, jnp.asarray(jnp.nan if fill is None else fill, out.dtype))


def _rounded_rows(table: Array, operand: Operand, axes: Axes, bind: Callable[..., Array]) -> Array:
    if isinstance(operand.scaling, Static) and operand.is_calibrated:
        operand = dataclasses.replace(operand, scaling=Current(operand.has_power_of_two))
    fmt = rounding_of(operand, axes, table.shape, ()).operand
    assert fmt is not None
    spec, lengths = fmt.spec, fmt.spec.block_lengths(table.shape)
    is_static = isinstance(operand.scaling, Static)
    if is_static or spec.scale is None:
        by_row: Any = operand
    elif lengths[0] == 1 and spec.tensor_scale is None:
        # Rows have scales of their own: the others are not read.
        along = tuple(range(1 - len(lengths), 0))
        own = dataclasses.replace(spec, block=lengths[1:], axes=along, other_axes=1)
        by_row = dataclasses.replace(operand, spec=own)
    else:
        return bind(straight_through(table, _rounded(table, operand, axes)))
    rows = bind(table)
    return straight_through(rows, _rounded(rows, by_row, Axes((rows.ndim - 1,), ())))


def _rounded(x: Array, operand: Operand, axes: Axes) -> Array:
    x = lax.stop_gradient(x)
    if not x.size:
        return x
    return rounding_of(operand, axes, x.shape, ()).rounded(x, None, None).unscaled().astype(x.dtype)
