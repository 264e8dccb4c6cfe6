"""Layouts of arrays in the memory of a GPU."""

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import mlir

from qtoolkit.casts._elementwise import _define

_row_major = Primitive("row_major")


def row_major(x: jax.Array) -> jax.Array:
    """`x`, which a program for one GPU of NVIDIA then keeps with its last axis contiguous.

    In a program for several devices it does nothing: XLA would gather all shards of an array whose
    layout is constrained. Inside of `jax.shard_map` each shard is an array by itself.
    """
    return _row_major.bind(x)


def _constrained(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _lowered(ctx: mlir.LoweringRuleContext, x: Any) -> Any:
    return _by_constraint(ctx, x) if _is_whole(ctx.module_context.axis_context) else [x]


def _is_whole(place: Any) -> bool:
    """Whether arrays lie on one device each, as JAX describes where a program will run."""
    if hasattr(place, "num_devices"):
        return bool(place.num_devices == 1)
    return place.manual_axes == frozenset(place.mesh.axis_names)


_row_major.def_abstract_eval(lambda x: x)
_define(_row_major, lambda x: x)
_by_constraint = mlir.lower_fun(_constrained, multiple_results=False)
mlir.register_lowering(_row_major, _lowered, platform="cuda")
