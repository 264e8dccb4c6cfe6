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
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


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
      aval: The result's type from those of the arguments.
    """
    primitive = Primitive(name)
    primitive.def_impl(jax.jit(primitive.bind))
    primitive.def_abstract_eval(aval)
    ad.defjvp(primitive, None, None)
    batching.primitive_batchers[primitive] = functools.partial(_batched, primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(others, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(cpu, multiple_results=False), platform="cpu")
    return primitive.bind


def _batched(
    primitive: Primitive, operands: tuple[jax.Array, ...], axes: tuple[int | None, ...]
) -> tuple[jax.Array, int]:
    size = next(x.shape[i] for x, i in zip(operands, axes, strict=True) if i is not None)
    moved = (
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    )
    return primitive.bind(*moved), 0


_on_cpu = by_platform(
    "on_cpu",
    cpu=lambda: jnp.asarray(True),
    others=lambda: jnp.asarray(False),
    aval=lambda: jax.typeof(np.True_),
)


def on_cpu() -> jax.Array:
    """Whether the program runs on a CPU: a constant where it is compiled, so that XLA takes the
    branch of a `lax.cond` that it decides. A branch keeps XLA's CPU from repeating work in every
    kernel that reads its result; a GPU waits there for its host.
    """
    return _on_cpu()
