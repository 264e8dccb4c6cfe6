"""Functions that are written differently for CPUs: what is exact there is not so everywhere.

`jax.lax.platform_dependent` would trace both versions at every use, and leave conditionals to the
compiler. These are one operation while they are traced, and one version where they are compiled.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla


def by_platform(
    name: str,
    *,
    cpu: Callable[..., jax.Array],
    others: Callable[..., jax.Array],
    aval: Callable[..., Any],
) -> Callable[..., jax.Array]:
    """A function of arrays of one shape, elementwise: `cpu` on CPUs, `others` elsewhere.

    Its derivative is zero: use it where a rule of its own gives the derivative.

    Args:
      aval: The result's type from those of the arguments, which vary along the same axes of a mesh.
    """
    primitive = Primitive(name)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(aval)
    ad.primitive_jvps[primitive] = functools.partial(_constant, primitive)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batched, primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(others, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(cpu, multiple_results=False), platform="cpu")
    return lambda *operands: primitive.bind(*varying_alike(*operands))


def varying_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each of which varies along all mesh axes that one of them varies along.

    Inside `jax.shard_map` JAX's own operations see to that by themselves. What did not vary gets
    the sum of its cotangents.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*varying)
    return tuple(
        lax.pcast(x, tuple(every - along), to="varying") if along != every else x
        for x, along in zip(arrays, varying, strict=True)
    )


def _constant(primitive: Primitive, primals: Any, tangents: Any) -> tuple[jax.Array, ad.Zero]:
    del tangents
    out = primitive.bind(*primals)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


def _batched(
    primitive: Primitive, axis: Any, operands: tuple[jax.Array, ...], places: tuple[Any, ...]
) -> tuple[jax.Array, int | None]:
    if all(place is None for place in places):  # JAX calls such rules then, too
        return primitive.bind(*operands), None
    moved = (
        # Along an axis of an Explicit mesh, if that is what is mapped.
        batching.broadcast(x, axis.size, 0, axis.explicit_mesh_axis)
        if place is None
        else jnp.moveaxis(x, place, 0)
        for x, place in zip(operands, places, strict=True)
    )
    return primitive.bind(*moved), 0


_on_cpu = by_platform(
    "on_cpu",
    cpu=lambda: jnp.asarray(True),
    others=lambda: jnp.asarray(False),
    aval=lambda: jax.typeof(np.True_),
)


def on_cpu() -> jax.Array:
    """Whether the program runs on a CPU: a constant where it is compiled (where it is loaded, if it
    was exported for several platforms), so that XLA takes the branch of a `lax.cond` that it
    decides. A branch keeps XLA's CPU from repeating work in every kernel that reads its result; a
    GPU waits there for its host.
    """
    return _on_cpu()
