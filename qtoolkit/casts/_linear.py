"""A linear function with a custom transpose, for example one that rounds the cotangent.

JAX has no such function with forward mode and `vmap`: `jax.custom_vjp` has no forward mode, and
`jax.custom_derivatives.linear_call` has no batching rule. Hence a primitive with all rules.
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

# function(residuals, x) -> y, where x and y are each an array or a tuple of arrays.
FunctionOfResiduals = Callable[[tuple[jax.Array, ...], Any], Any]

_linear_p = Primitive("linear_with_transpose")
_linear_p.multiple_results = True


def linear_with_transpose(
    forward: FunctionOfResiduals,
    transpose: FunctionOfResiduals,
    residuals: tuple[jax.Array, ...],
    x: Any,
    out_type: Any = None,
) -> jax.Array:
    """`forward(residuals, x)`, whose transpose is `transpose(residuals, cotangent)`.

    Args:
      forward: A hashable function that is linear in `x` and returns one array. JAX differentiates
        it by the residuals as usual.
      transpose: A hashable function that takes an array like the result of `forward` and returns
        the gradient of `x`. It need not be linear: it may round the cotangent, for example.
      residuals: Arrays that both functions get.
      x: The operand in which `forward` is linear: an array, or a tuple of arrays. Of a tuple,
        `transpose` returns a tuple of gradients.
      out_type: `jax.typeof` of the result. None: `forward` is traced to find it. If it is given,
        `forward` is not traced where only its transpose is computed, as in a backward pass. If a
        function returns another type, JAX raises an error only when it compiles the function.

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
        forward=_WithTuples(forward, is_tuple, False),
        transpose=_WithTuples(transpose, False, is_tuple),
        residuals=len(residuals),
        out_types=None if out_type is None else (out_type,),
    )
    return out


@dataclasses.dataclass(frozen=True)
class _WithTuples:
    """`function` with a tuple of arrays as operand and as result, as a primitive has them."""

    function: FunctionOfResiduals
    takes_tuple: bool
    gives_tuple: bool

    def __call__(
        self, residuals: tuple[jax.Array, ...], xs: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        out = self.function(residuals, xs if self.takes_tuple else xs[0])
        return tuple(out) if self.gives_tuple else (out,)


def linear_in_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x.astype(dtype)` for tangents; its transpose casts the cotangent back to `x.dtype`."""
    # XLA may remove a plain `astype` to a small dtype together with the one back: see `_storage`.
    if x.dtype == dtype:
        return x
    return linear_with_transpose(_InDtype(jnp.dtype(dtype)), _InDtype(x.dtype), (), x)


@dataclasses.dataclass(frozen=True)
class _InDtype:
    dtype: DTypeLike

    def __call__(self, residuals: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        wide = widened(x)  # float32, or float64 if x is
        if jnp.float64 in (wide.dtype, self.dtype):
            return wide.astype(self.dtype)  # `in_dtype` rounds float32 only
        return in_dtype(wide, self.dtype)


@dataclasses.dataclass(frozen=True)
class _Batched:
    """`function` mapped over a leading axis of its operands, and over `axes` of the residuals."""

    function: FunctionOfResiduals
    axes: tuple[int | None, ...]

    def __call__(
        self, residuals: tuple[jax.Array, ...], xs: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        return jax.vmap(self.function, in_axes=(self.axes, 0))(residuals, xs)


def _evaluate(
    *operands: jax.Array,
    forward: FunctionOfResiduals,
    transpose: FunctionOfResiduals,
    residuals: int,
    out_types: Any,
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
    # `jit` keeps the trace, so that later calls with the same functions and types need none.
    return jax.make_jaxpr(evaluate)(*avals).out_avals


def _jvp(
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    *,
    forward: FunctionOfResiduals,
    residuals: int,
    **others: Any,
) -> tuple[Any, Any]:
    rs, xs = tuple(primals[:residuals]), tuple(primals[residuals:])
    r_dots, x_dots = tangents[:residuals], tangents[residuals:]
    bind = functools.partial(_linear_p.bind, forward=forward, residuals=residuals, **others)
    terms = []
    if not all(isinstance(dot, ad.Zero) for dot in x_dots):  # linear in x: the function of x_dots
        terms.append(bind(*rs, *map(ad.instantiate_zeros, x_dots)))
    if not all(isinstance(dot, ad.Zero) for dot in r_dots):
        dots = tuple(map(ad.instantiate_zeros, r_dots))
        terms.append(jax.jvp(lambda *rs: forward(rs, xs), rs, dots)[1])
    return bind(*primals), [functools.reduce(jnp.add, parts) for parts in zip(*terms, strict=True)]


def _transpose(
    cotangents: Any,
    *operands: Any,
    forward: FunctionOfResiduals,
    transpose: FunctionOfResiduals,
    residuals: int,
    out_types: Any,
) -> list[Any]:
    rs, xs = operands[:residuals], operands[residuals:]
    no_gradients = [None] * residuals  # JAX transposes only by operands that are linear
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return no_gradients + [ad.Zero(x.aval) for x in xs]
    cotangents = map(ad.instantiate_zeros, cotangents)
    return no_gradients + _linear_p.bind(
        *rs,
        *cotangents,
        forward=transpose,
        transpose=forward,
        residuals=residuals,
        # What `transpose` computes is not weakly typed, even if x came from a number of Python.
        out_types=out_types and tuple(x.aval.update(weak_type=False) for x in xs),
    )


def _batch(
    operands: tuple[Any, ...],
    axes: tuple[Any, ...],
    *,
    forward: FunctionOfResiduals,
    transpose: FunctionOfResiduals,
    residuals: int,
    out_types: Any,
) -> tuple[Any, Any]:
    del out_types  # those of one example; `_abstract_eval` finds those of the batch
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
# Not inline: all calls with the same parameters then share one function of the compiled module.
mlir.register_lowering(_linear_p, mlir.lower_fun(_evaluate), inline=False)
