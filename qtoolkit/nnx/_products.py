"""Callables that layers hold in place of JAX's functions, and the state of their products."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx.nn import dtypes
from jax import lax

from qtoolkit.nnx._state import ProductState
from qtoolkit.products.internal import (
    MODEL,
    Replacing,
    Site,
    Track,
    is_intercepted,
    replacing,
)
from qtoolkit.scaling import QArray

States = Sequence[Track]


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Stands in for a function of JAX, such as `lax.dot_general`, by the method of its name.

    Equal sites make equal objects: no second trace.

    Attributes:
      original: The function that Flax's layer holds; None if it takes JAX's when it is called.
    """

    site: Site
    name: str
    original: Callable[..., Any] | None = dataclasses.field(default=None, repr=False)

    def __call__(self, *args: Any, states: States = (), **kwargs: Any) -> jax.Array:
        state = states[0] if states else None
        if is_intercepted():
            return self._intercepted(args, kwargs, state)
        product: jax.Array = getattr(self.site, self.name)(*args, state=state, **kwargs)
        return product

    def _intercepted(self, args: Any, kwargs: Any, state: Track | None) -> jax.Array:
        function = self.original or getattr(lax, self.name)
        try:
            return self.site.intercepted(function, args, kwargs, state)
        except TraceContextError as error:
            raise ValueError(
                f"wrap: {self.site.path or MODEL}: an interceptor of {self.name} changes variables "
                "of the model while the product is traced, expected one that only reads them; "
                "apply an adapter such as qwix's LoRA before wrap, with dropout=0.0, or leave this "
                "layer as it is by a rule"
            ) from error


@dataclasses.dataclass(frozen=True)
class Attention:
    """Stands in for an attention function, whose products it replaces."""

    site: Site
    original: Callable[..., jax.Array]

    def __call__(
        self, *arrays: Any, module: Any = None, states: States = (), **options: Any
    ) -> jax.Array:
        states_of: dict[str, Track] = {str(i): state for i, state in enumerate(states)}
        trace = Replacing(self.site.multiply(states_of.get), {}, mark=self.site.mark)
        trace.know_inputs((arrays, options))
        with replacing(trace):
            return self.original(*arrays, module=module, **options)


class StatefulProducts(nnx.Module):
    """One of the callables above, together with the states of its products, in order."""

    def __init__(self, call: Any, products: Sequence[ProductState]) -> None:
        self.call = call
        self.products = nnx.List(products)

    def __call__(this, *args: Any, **kwargs: Any) -> jax.Array:  # noqa: N805
        # Interceptors of qwix take the innermost module that a frame calls `self` for the layer.
        return this.call(*args, states=[kept.track() for kept in this.products], **kwargs)


def keep_kernel_dtype(args: tuple[Any, ...], /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Flax's `promote_dtype` for (inputs, kernel, bias), except that the kernel keeps its dtype.

    A product rounds the kernel; if it were a bfloat16 copy, it would be rounded twice.
    """
    inputs, kernel, *biases = args
    is_stored = isinstance(kernel, QArray)
    like = jnp.zeros((), kernel.dtype) if is_stored else kernel
    dtype = dtypes.canonicalize_dtype(inputs, like, *biases, dtype=dtype, inexact=inexact)
    biases = [None if bias is None else jnp.asarray(bias, dtype) for bias in biases]
    return jnp.asarray(inputs, dtype), kernel if is_stored else jnp.asarray(kernel), *biases
