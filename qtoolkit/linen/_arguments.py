"""The arguments of a wrapped module's methods: NumPy arrays, and names that Flax cannot pass."""

import contextvars
import inspect
from collections.abc import Callable
from typing import Any

from qtoolkit.products.internal import as_jax, set_variable, with_numbers

_RESERVED = ("module", "orig_method")  # parameters of `run_interceptors` in flax.linen.module
_integers: contextvars.ContextVar[bool] = contextvars.ContextVar("integers", default=True)


def converting(call: Callable[[], Any], inputs: Any) -> Any:
    """`call()`, a call of `apply` or `init`, in which `arguments_of` converts arrays."""

    def calling(integers: bool) -> Any:
        with set_variable(_integers, integers):
            return call()

    return with_numbers(calling, inputs)


def arguments_of(
    method: Callable[..., Any], module: Any, args: Any, kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with which a wrapped module runs one of its methods.

    NumPy arrays become JAX arrays. An argument that Flax cannot pass by name, because a parameter
    of its own has that name where an interceptor is set, is passed by position.
    """
    if any(name in kwargs for name in _RESERVED):
        bound = inspect.signature(method).bind(module, *args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args[1:], bound.kwargs
    integers = _integers.get()
    named = {name: as_jax(value, integers) for name, value in kwargs.items()}
    return [as_jax(value, integers) for value in args], named


def explain_reserved_name(error: TypeError) -> None:
    """Raises a clear error if Flax could not pass an argument by name to a module inside."""
    for name in _RESERVED:
        if str(error) == f"run_interceptors() got multiple values for argument {name!r}":
            raise TypeError(
                f"wrap: a method of a module is called with {name}=..., expected this argument by "
                "position: under nn.intercept_methods, which quantizes its matmuls, Flax cannot "
                f"pass an argument of that name; write layer(x, {name}) in place of "
                f"layer(x, {name}={name}), and rename it if it is keyword-only"
            ) from error
