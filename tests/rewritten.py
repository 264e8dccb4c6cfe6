"""A function whose matmuls are computed otherwise, as those of a method of a wrapped module are."""

from collections.abc import Callable
from typing import Any

import jax

import qtoolkit as qt
from qtoolkit.formats import Rules
from qtoolkit.products._matmul import Multiply
from qtoolkit.products._origins import Operands, following_features
from qtoolkit.products._product import quantized_product
from qtoolkit.products.internal import Parameter, Program, Quantizing, State, in_module
from qtoolkit.scaling import QArray


def multiplying(recipe: qt.Recipe) -> Multiply:
    """Computes matmuls by a recipe, as a layer without state does."""
    return Quantizing(Rules([], default=recipe), {})


def quantized(
    recipe: qt.Recipe, name: str, function: Any, lhs: Any, rhs: Any, state: State | None
) -> jax.Array:
    """The matmul of an input and a kernel by a recipe, as a layer computes it.

    Args:
      name: As JAX calls it, "dot_general".
      function: As data, see `products._bilinear`.
    """
    types = jax.typeof(lhs), jax.typeof(rhs)
    recipe = following_features(recipe, Operands(function, types, 1, (-1, -1)))
    return quantized_product(name, function, lhs, rhs, recipe, lhs.dtype, state, ())


def program_of(
    function: Callable[..., Any], args: Any, names: Callable[..., Any], path: str = ""
) -> tuple[Program, list[Any], Any]:
    """The program of a function, as if the module at `path` ran it; its inputs; its results' tree.

    Args:
      function: Of pytrees. An argument that is a `QArray` is an ordinary array to it.
      names: Called with the arguments, it returns a pytree with one leaf for each of their arrays:
        the name of a parameter, or "" for anything else.
    """
    leaves, structure = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, QArray))
    labels = jax.tree.leaves(names(*args))
    parameters = [Parameter(path, name) if name else None for name in labels]

    def of_leaves(leaves: list[Any]) -> tuple[Any, Any]:
        with in_module(path, is_root=True):
            out = function(*jax.tree.unflatten(structure, leaves))
        return jax.tree.flatten(out)

    program = Program.of(of_leaves, leaves, parameters)
    return program, leaves, program.static


def rewritten(
    function: Callable[..., Any], multiply: Multiply, names: Callable[..., Any]
) -> Callable[..., Any]:
    """`function` with `multiply(matmul, call, planted)` in place of each matmul."""

    def rewriting(*args: Any) -> Any:
        program, leaves, structure = program_of(function, args, names)
        outs, _ = program.run(leaves, multiply, {})
        return jax.tree.unflatten(structure, outs)

    return rewriting
