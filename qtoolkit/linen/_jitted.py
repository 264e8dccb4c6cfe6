"""Layers under `nn.jit` that share the trace of another layer, although rules tell them apart."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from qtoolkit.formats import Rules
from qtoolkit.products import Recipe
from qtoolkit.products.internal import warn

_SHARED = (
    "wrap: {}: nn.jit uses the trace of {}, an equal layer, and so its recipe, though the rules "
    "give them different ones; compile the whole step by jax.jit in place of nn.jit"
)


def warn_of_shared_traces(
    rules: Rules[Recipe],
    ran: Mapping[str, tuple[type, ...]],
    jitted: Collection[str],
    params: Mapping[str, Any],
) -> None:
    """Warns of a layer under `nn.jit` that has the trace of another layer, but not its recipe.

    `nn.jit` keeps one trace for equal modules, whatever their paths, and calls none of our code
    where it has one. So such a layer has not run, and its parameters are like those of the other.

    Args:
      ran: The paths of the modules that ran, with their types and those of the modules around them.
      jitted: Those of them that were traced under `nn.jit`.
      params: The parameters of the wrapped module.
    """
    shapes = {path: _shapes(node) for path, node in _subtrees(params, "")}
    outermost = [path for path in sorted(jitted) if path.rpartition("/")[0] not in jitted]
    for first, path in itertools.product(outermost, shapes):
        if path in ran or shapes[path] != shapes.get(first):
            continue
        for inner in sorted(jitted):
            other = path + inner.removeprefix(first)
            is_inside = f"{inner}/".startswith(f"{first}/")
            if is_inside and rules.lookup([inner], ran[inner]) != rules.lookup([other], ran[inner]):
                warn(_SHARED.format(other, inner))
                break


def _subtrees(node: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, child in node.items():
        if isinstance(child, Mapping):
            inner = f"{path}/{name}".lstrip("/")
            yield inner, child
            yield from _subtrees(child, inner)


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]
