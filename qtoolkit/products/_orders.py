"""Codes in two orders of axes, one for each of the products that read them on a GPU."""

import jax
from jax import lax

from qtoolkit.casts.internal import row_major
from qtoolkit.products._bilinear import Axes

Array = jax.Array


def turned_order(axes: Axes, rank: int) -> tuple[int, ...] | None:
    """The order of axes in which those that another product sums over come last; None if the array
    is summed over axes that are neither the last ones nor next to the last ones.
    """
    contracted, kept = sorted(axes.contracted), sorted(axes.kept)
    batch = [axis for axis in range(rank) if axis not in contracted and axis not in kept]
    orders = [(*batch, *kept, *contracted), (*batch, *contracted, *kept)]
    if not contracted or not kept or tuple(range(rank)) not in orders:
        return None
    return orders[0] if orders[1] == tuple(range(rank)) else orders[1]


def both_orders(codes: Array, order: tuple[int, ...], is_apart: bool) -> tuple[Array, Array]:
    """Codes, and the same with their axes in another order, as one GPU writes them best.

    cuBLASLt multiplies 8-bit operands only if the axis that is summed is the last one of both.
    Layouts are fixed, or XLA transposes the 16-bit operand, or calls the second array a view of the
    first and copies it later. A barrier around both makes one kernel write both. XLA puts no amax
    into a kernel that transposes, so where an amax can be taken while the operand is cast, the
    barrier is around the codes, and a second kernel turns them: that reads one byte for each
    element, and the amax in a kernel of its own would read two.

    Args:
      is_apart: Whether the scale does not depend on the elements, so that their amax can be taken
        while they are cast.
    """
    codes = row_major(codes)
    if is_apart:
        codes = lax.optimization_barrier(codes)
    turned = row_major(lax.transpose(codes, order))
    return (codes, turned) if is_apart else lax.optimization_barrier((codes, turned))
