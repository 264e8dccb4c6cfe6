"""Zero points in matmuls: x ~ (q - zero point) * scale.

A matmul of such operands is the sum of (qx - zx) (qw - zw) times both scales. Written out it is
that of qx qw, less zx times the sums of qw, less zw times those of qx, plus zx zw for each term.
The differences are small integers, exact in 16-bit floats: they are multiplied as they are, and
nothing has to be corrected afterwards.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from qtoolkit.formats import BlockFormat, IntFormat
from qtoolkit.scaling.internal import Blocks


@functools.cache
def of_differences(spec: BlockFormat) -> BlockFormat:
    """The format of integers less their zero points: one bit wider; `spec` if it has none."""
    if not spec.zero_point:
        return spec
    bits = spec.element.bits + 1
    return dataclasses.replace(
        spec, element=IntFormat(name=f"int{bits}", bits=bits), zero_point=False
    )


def moved_by(q: jax.Array, zero_point: jax.Array, blocks: Blocks) -> jax.Array:
    """Integers plus the zero points of their blocks: float32."""
    view = blocks.split(q.astype(jnp.float32))
    return blocks.join(view + blocks.spread(zero_point).astype(jnp.float32))
