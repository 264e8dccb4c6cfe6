"""A function whose products are replaced, as those of a method of a wrapped module are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import qtoolkit as qt
from qtoolkit.products._analyses import ACTIVATION, Source
from qtoolkit.products._matmul_trace import Known, MatmulTrace, Multiply, replacing_matmuls
from qtoolkit.products.internal import LayerRecipe, Matmul, State
from qtoolkit.scaling import QArray


def multiplying(recipe: qt.Recipe) -> Multiply:
    """Computes matmuls by a recipe, as a layer without state does."""
    return LayerRecipe(recipe).multiply()


def quantized(
    recipe: qt.Recipe, name: str, function: Any, lhs: Any, rhs: Any, state: State | None
) -> jax.Array:
    """The matmul of an input and a kernel by a recipe, as a layer computes it.

    Args:
      name: As JAX calls it, "dot_general".
      function: As data, see `products._bilinear`.
    """
    matmul = Matmul(name, function, lhs, rhs, (), ("", "kernel"), lhs.dtype)
    return LayerRecipe(recipe).product(matmul, "0", state)


def rewritten(
    function: Callable[..., Any],
    multiply: Multiply,
    parameters: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """`function` with `multiply(found)` in place of each product.

    Args:
      function: A function of pytrees. An argument that is a `QArray` is an ordinary array to it,
        and its codes and scales to products.
      multiply: Returns the result of a product; None leaves the product as it is.
      parameters: Called with the arguments, it returns a pytree with one leaf for each of their
        arrays: the name of a parameter, or "" for anything else. None: it has no parameters.
    """

    def rewriting(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, QArray))
        names = [""] * len(leaves) if parameters is None else jax.tree.leaves(parameters(*args))
        with replacing_matmuls(
            MatmulTrace(multiply, {name: name for name in names if name})
        ) as trace:
            values = []
            for x, name in zip(leaves, names, strict=True):
                value = x.dequantize() if isinstance(x, QArray) else jnp.asarray(x)
                original = x if isinstance(x, QArray) else None
                source = Source(name, order=()) if name else ACTIVATION
                trace.know(value, Known(source, original=original))
                values.append(value)
            return function(*jax.tree.unflatten(structure, values))

    return rewriting
