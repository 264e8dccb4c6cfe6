"""JAX's functions for products as they are while nobody intercepts them.

An interceptor such as qwix replaces the code of `lax.dot_general` while a model runs, so that also
callers who have imported the function before reach its handler. Inside a quantized product that
would hand codes to the handler in place of the operands, and leave its tracers in traces that JAX
keeps. Copies of the functions have the code of JAX whatever happens to the originals.
"""

import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

_ORIGINALS: tuple[tuple[Any, str, Any], ...] = tuple(
    (module, name, getattr(module, name))
    for module, name in (
        (lax, "dot_general"),
        (lax, "conv_general_dilated"),
        (lax, "ragged_dot_general"),
        (jnp, "einsum"),
    )
)


def _copied(function: Any) -> Callable[..., Any]:
    if not isinstance(function, types.FunctionType):
        return function  # somebody has replaced it for good
    code = function.__code__
    if code.co_name != function.__name__:
        raise ImportError(
            f"qtoolkit.products: imported while {function.__name__} of JAX runs the code of "
            f"{code.co_filename}, expected its own; import qtoolkit.products before the model runs"
        )
    copied = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


dot_general, conv_general_dilated, ragged_dot_general, _einsum = (
    _copied(function) for _, _, function in _ORIGINALS
)


def einsum(*args: Any, **options: Any) -> Any:
    return _einsum(*args, _dot_general=dot_general, **options)
