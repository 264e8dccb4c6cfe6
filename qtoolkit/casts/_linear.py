"""A linear function with a custom transpose, for code that must act on cotangents only.

A `custom_vjp` could do this, too, but would lose forward mode; `jax.custom_derivatives.linear_call`
has no batching rule. This primitive has both, so `jvp`, `vjp`, `vmap`, `scan`, `remat` and
`hessian` work.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from qtoolkit.casts._elementwise import varying_alike
from qtoolkit.casts._order import widened
from qtoolkit.casts._storage import in_dtype

# Takes (residuals, the operand in which it is linear); the operand and result are arrays or tuples.
Linear = Callable[[tuple[jax.Array, ...], Any], Any]

_linear_p = Primitive("linear_with_transpose")
_linear_p.multiple_results = True


def linear_with_transpose(
    forward: Linear,
    transpose: Linear,
    residuals: tuple[jax.Array, ...],
    x: Any,
    out_type: Any = None,
) -> jax.Array:
    """`forward(residuals, x)`, whose transpose is `transpose(residuals, cotangent)`.

    Args:
      forward: A hashable function that is linear in `x` and returns one array. Its derivative by
        the residuals is the ordinary one.
      transpose: A hashable function that takes an array like the result of `forward` and returns
        one like `x`. It need not be linear: its purpose is to round the cotangent, for example.
      residuals: Arrays that both functions get.
      x: The linear operand: an array, or a tuple of arrays, which `transpose` then returns.
      out_type: `jax.typeof` of the result; None: found by tracing `forward`. If it is given, both
        functions are traced only when they are computed; reverse mode never computes `forward`. A
        function that returns another shape or dtype then fails only when it is compiled.

    Examples:
      >>> def forward(residuals, x):
      ...     return x * residuals[0]
      >>> def transpose(residuals, cotangent):
      ...     return qt.round_to_format(cotangent * residuals[0], "e4m3fn")
      >>> def y(x):
      ...     return qt.gradients.linear_with_transpose(forward, transpose, (jnp.float32(1.7),), x)
      >>> y(1.0), jax.grad(y)(1.0)  # the cotangent alone is rounded
      (Array(1.7, dtype=float32), Array(1.75, dtype=float32))
    """
    is_tuple = isinstance(x, tuple)
    xs = x if is_tuple else (x,)
    operands = varying_alike(*residuals, *xs)
    (out,) = _linear_p.bind(
        *operands,
        forward=_Flat(forward, is_tuple, False),
        transpose=_Flat(transpose, False, is_tuple),
        residuals=len(residuals),
        out_types=None if out_type is None else (out_type,),
    )
    return out


@dataclasses.dataclass(frozen=True)
class _Flat:
    """Wraps `function` so that it takes and returns tuples of arrays."""

    function: Linear
    takes_tuple: bool
    gives_tuple: bool

    def __call__(
        self, residuals: tuple[jax.Array, ...], xs: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        out = self.function(residuals, xs if self.takes_tuple else xs[0])
        return tuple(out) if self.gives_tuple else (out,)


def linear_in_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x.astype(dtype)` of a tangent. It and its transpose are rounded whatever XLA fuses."""
    if x.dtype == dtype:
        return x
    return linear_with_transpose(_InDtype(jnp.dtype(dtype)), _InDtype(x.dtype), (), x)


@dataclasses.dataclass(frozen=True)
class _InDtype:
    dtype: DTypeLike

    def __call__(self, residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        wide = widened(x)
        is_float64 = jnp.float64 in (wide.dtype, self.dtype)
        return wide.astype(self.dtype) if is_float64 else in_dtype(wide, self.dtype)


@dataclasses.dataclass(frozen=True)
class _Batched:
    """`function` mapped over a leading axis of its operands, and over `axes` of the residuals."""

    function: Linear
    axes: tuple[int | None, ...]

    def __call__(
        self, residuals: tuple[jax.Array, ...], xs: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        return jax.vmap(self.function, in_axes=(self.axes, 0))(residuals, xs)


def _evaluate(
    *operands: jax.Array, forward: Linear, transpose: Linear, residuals: int, out_types: Any
) -> list[jax.Array]:
    del transpose, out_types
    return list(forward(operands[:residuals], operands[residuals:]))


_STATIC = ("forward", "transpose", "residuals", "out_types")
_evaluate_jitted = jax.jit(_evaluate, static_argnames=_STATIC)


def _abstract_eval(*avals: Any, out_types: Any, **static: Any) -> Any:
    if out_types is not None:
        return out_types
    static["out_types"] = None
    evaluate = functools.partial(_evaluate_jitted, **static)
    return jax.make_jaxpr(evaluate)(*avals).out_avals  # `jit` traces once for all such calls


def _jvp(
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    forward: Linear,
    residuals: int,
    **others: Any,
) -> tuple[Any, Any]:
    fixed, xs = tuple(primals[:residuals]), tuple(primals[residuals:])
    fixed_dots, x_dots = tangents[:residuals], tangents[residuals:]
    bind = functools.partial(_linear_p.bind, forward=forward, residuals=residuals, **others)
    terms = []
    if not all(isinstance(dot, ad.Zero) for dot in x_dots):
        terms.append(bind(*fixed, *map(ad.instantiate_zeros, x_dots)))
    if not all(isinstance(dot, ad.Zero) for dot in fixed_dots):
        dots = tuple(map(ad.instantiate_zeros, fixed_dots))
        terms.append(jax.jvp(lambda *r: forward(r, xs), fixed, dots)[1])
    return bind(*primals), [functools.reduce(jnp.add, parts) for parts in zip(*terms, strict=True)]


def _transpose(
    cotangents: Any,
    *operands: Any,
    forward: Linear,
    transpose: Linear,
    residuals: int,
    out_types: Any,
) -> list[Any]:
    fixed, xs = operands[:residuals], operands[residuals:]
    nothing = [None] * residuals
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return nothing + [ad.Zero(x.aval) for x in xs]
    cotangents = map(ad.instantiate_zeros, cotangents)
    return nothing + _linear_p.bind(
        *fixed,
        *cotangents,
        forward=transpose,
        transpose=forward,
        residuals=residuals,
        out_types=out_types and tuple(x.aval.update(weak_type=False) for x in xs),
    )


def _batch(
    operands: tuple[Any, ...],
    axes: tuple[Any, ...],
    *,
    forward: Linear,
    transpose: Linear,
    residuals: int,
    out_types: Any,
) -> tuple[Any, Any]:
    del out_types
    size = next(a.shape[d] for a, d in zip(operands, axes, strict=True) if d is not None)
    xs = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands[residuals:], axes[residuals:], strict=True)
    ]
    outs = _linear_p.bind(
        *operands[:residuals],
        *xs,
        forward=_Batched(forward, tuple(axes[:residuals])),
        transpose=_Batched(transpose, tuple(axes[:residuals])),
        residuals=residuals,
        out_types=None,
    )
    return outs, [0] * len(outs)


_linear_p.def_impl(_evaluate_jitted)
_linear_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
mlir.register_lowering(_linear_p, mlir.lower_fun(_evaluate), inline=False)
