"""A linear function with a transpose of its own: what must act on cotangents, and only on them.

A `custom_vjp` would do so too, but lose forward mode; `jax.custom_derivatives.linear_call` has no
batching rule. This primitive has both, so `jvp`, `vjp`, `vmap`, `scan`, `remat` and `hessian` work.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

Linear = Callable[[tuple[jax.Array, ...], jax.Array], jax.Array]

_linear_p = Primitive("linear_with_transpose")


def linear_with_transpose(
    forward: Linear, transpose: Linear, residuals: tuple[jax.Array, ...], x: jax.Array
) -> jax.Array:
    """`forward(residuals, x)`, whose transpose is `transpose(residuals, cotangent)`.

    Args:
      forward: Linear in `x`; hashable. Its derivative by the residuals is the ordinary one.
      transpose: From the shape and dtype of the result to those of `x`; hashable. It need not be
        linear: rounding the cotangent is what it is for.
      residuals: Arrays that both functions get.
      x: The linear operand.
    """
    operands = varying_alike(*residuals, x)
    return _linear_p.bind(*operands, forward=forward, transpose=transpose)


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


def broadcast_product(coefficient: jax.Array, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`coefficient * x`, in float32 and then in `dtype`; linear in `x`, which broadcasts.

    Its transpose sums in float32, and coefficients under a cotangent of 0 add 0, whatever they are:
    not the NaN that 0 times a NaN or an infinity is.

    Args:
      coefficient: float32.
      x: Any float dtype, of the rank of `coefficient`.
    """
    transpose = _ProductTransposed(x.shape, x.dtype)
    return linear_with_transpose(_Product(jnp.dtype(dtype)), transpose, (coefficient,), x)


@dataclasses.dataclass(frozen=True)
class _Product:
    dtype: DTypeLike

    def __call__(self, residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        return (residuals[0] * x.astype(jnp.float32)).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class _ProductTransposed:
    shape: tuple[int, ...]
    dtype: DTypeLike

    def __call__(self, residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> jax.Array:
        wide = cotangent.astype(jnp.float32)
        terms = jnp.where(wide == 0, np.float32(0), residuals[0] * wide)
        summed = [
            i
            for i, (n, wide_n) in enumerate(zip(self.shape, terms.shape, strict=True))
            if n != wide_n
        ]
        return jnp.sum(terms, axis=summed, keepdims=True).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class _Batched:
    """`function` mapped over a leading axis of `x` and over `residual_axes` of the residuals."""

    function: Linear
    residual_axes: tuple[int | None, ...]

    def __call__(self, residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        return jax.vmap(self.function, in_axes=(self.residual_axes, 0))(residuals, x)


def _evaluate(*operands: jax.Array, forward: Linear, transpose: Linear) -> jax.Array:
    del transpose
    return forward(operands[:-1], operands[-1])


_evaluate_jitted = jax.jit(_evaluate, static_argnames=("forward", "transpose"))


def _abstract_eval(*avals: Any, forward: Linear, transpose: Linear) -> Any:
    evaluate = functools.partial(_evaluate_jitted, forward=forward, transpose=transpose)
    return jax.make_jaxpr(evaluate)(*avals).out_avals[0]  # traced once for all calls alike


def _jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], *, forward: Linear, transpose: Linear
) -> tuple[Any, Any]:
    *residuals, x = primals
    *residual_dots, x_dot = tangents
    bind = functools.partial(_linear_p.bind, forward=forward, transpose=transpose)
    out = bind(*residuals, x)
    terms = [] if isinstance(x_dot, ad.Zero) else [bind(*residuals, x_dot)]
    if not all(isinstance(dot, ad.Zero) for dot in residual_dots):
        dots = tuple(map(ad.instantiate_zeros, residual_dots))
        terms.append(jax.jvp(lambda *r: forward(r, x), tuple(residuals), dots)[1])
    return out, functools.reduce(jnp.add, terms)


def _transpose(cotangent: Any, *operands: Any, forward: Linear, transpose: Linear) -> list[Any]:
    *residuals, x = operands
    if isinstance(cotangent, ad.Zero):
        return [None] * len(residuals) + [ad.Zero(x.aval)]
    out = _linear_p.bind(*residuals, cotangent, forward=transpose, transpose=forward)
    return [None] * len(residuals) + [out]


def _batch(
    operands: tuple[Any, ...], axes: tuple[Any, ...], *, forward: Linear, transpose: Linear
) -> tuple[Any, int]:
    *residuals, x = operands
    *residual_axes, x_axis = axes
    if x_axis is None:
        size = next(a.shape[d] for a, d in zip(operands, axes, strict=True) if d is not None)
        x = jnp.broadcast_to(x, (size, *x.shape))
    else:
        x = jnp.moveaxis(x, x_axis, 0)
    mapped = [_Batched(function, tuple(residual_axes)) for function in (forward, transpose)]
    return _linear_p.bind(*residuals, x, forward=mapped[0], transpose=mapped[1]), 0


_linear_p.def_impl(_evaluate_jitted)
_linear_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(_evaluate_jitted, multiple_results=False))
