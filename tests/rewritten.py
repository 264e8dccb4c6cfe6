"""A function whose matmuls are computed otherwise, as those of a method of a wrapped module are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import qtoolkit as qt
from qtoolkit.formats import Rules
from qtoolkit.products.internal import Parameter, Planted, Program, Quantizing, in_module
from qtoolkit.scaling import QArray


def multiplying(recipe: qt.Recipe) -> Callable[..., Any]:
    """Computes matmuls by a recipe, as a layer without state does."""
    return Quantizing(Rules([], default=recipe), {})


def quantized(
    recipe: qt.Recipe,
    function: Callable[[jax.Array, jax.Array], jax.Array],
    amax: jax.Array,
    probe: jax.Array,
    x: jax.Array,
    w: jax.Array,
) -> jax.Array:
    """`function(x, w)`, a matmul of an input and a kernel, as a layer with this state computes it.

    Args:
      amax: float32[3], for a recipe that has a history: amaxes of the step before.
      probe: Zeros, whose gradient is the histogram of amaxes.
    """
    program, leaves, _ = program_of(function, (x, w), lambda x, w: ("", "kernel"))
    (matmul,) = program.matmuls
    history = jnp.broadcast_to(amax[:, None], (3, recipe.history))
    state = {"history": history, "probe": probe}
    planted = {matmul.key: Planted(state)} if recipe.is_delayed else {}
    multiply = Quantizing(Rules([], default=recipe), {}, observes=False)
    (out,), _ = program.run(leaves, multiply, planted)
    return out


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
    function: Callable[..., Any], multiply: Callable[..., Any], names: Callable[..., Any]
) -> Callable[..., Any]:
    """`function` with `multiply(matmul, call, planted)` in place of each matmul."""

    def rewriting(*args: Any) -> Any:
        program, leaves, structure = program_of(function, args, names)
        outs, _ = program.run(leaves, multiply, {})
        return jax.tree.unflatten(structure, outs)

    return rewriting
